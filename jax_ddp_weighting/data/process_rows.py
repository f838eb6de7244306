"""Each process's own rows as one global batch."""

from dataclasses import replace

import jax
import numpy as np
from jax.sharding import Mesh

from jax_ddp_weighting.data.batch import Batch, check_batch, check_batch_values
from jax_ddp_weighting.data.opening import Opening
from jax_ddp_weighting.data.row_format import describe_batch
from jax_ddp_weighting.data.shards import deal_rows, place_dealt
from jax_ddp_weighting.distributed import coordination
from jax_ddp_weighting.distributed.mesh import AxisName
from jax_ddp_weighting.distributed.placement import RankPlacement, device_ids


def global_batch(
    batch: Batch,
    mesh: Mesh,
    *,
    axis_name: AxisName = "data",
    timeout_s: float = coordination.WAIT_S,
) -> Batch:
    """One global batch of every process's own rows, for a training step or `evaluate`.

    The rule: each process's rows go to its own ranks, in order. Processes may have unequally many,
    or none: all ranks get as many as the one with the most, filled up with rows of weight 0, so
    each row counts as its weight, once, and the step's shape is the same everywhere.

    Processes agree on that number, and on what rows look like, at every call and through the
    coordination service: some milliseconds. For a loop see `batches`, which has a plan, and
    `join_batches`, which has streams: both agree once. Ids should tell rows of all processes apart;
    the 0, 1, 2, ... of `Batch.of` do not.

    Args:
        batch: this process's rows, on the host or on its devices. Processes that share a rank, on a
            mesh of further axes, must give the same rows.
        mesh: a mesh with the axis.
        axis_name: the data axis.
        timeout_s: how many seconds to wait for other processes.

    Returns:
        A `Batch` of global arrays `[ranks * rows per rank, ...]`, sharded over the axis; a copy.

    Raises:
        TypeError: `batch` is none, holds no numbers, or `timeout_s` is no number.
        ValueError: rows have different forms on different processes, a device would cut a number,
            the mesh lacks the axis or holds no device of this process, or `timeout_s` is not above
            0.
        RuntimeError: another process's rows were refused, or did not come in time.

    Example:
        >>> batch = global_batch(Batch.of(np.array([1.0, 2.0, 3.0])), data_mesh(1))
        >>> batch.data.tolist(), batch.weights.tolist()
        ([1.0, 2.0, 3.0], [1, 1, 1])
    """
    check_batch("global_batch: batch must be a Batch", batch)
    timeout_s = coordination.check_timeout("global_batch: timeout_s", timeout_s)
    placement = RankPlacement.here(mesh, axis_name, caller="global_batch")
    meeting = coordination.next_meeting(
        "global batch", jax.process_index(), placement.processes, timeout_s
    )
    opening = Opening("global_batch", meeting, {}, timeout_s)
    ranks = len(placement.local)
    with opening.report_failure("its rows were refused"):
        rows = jax.tree.map(np.asarray, batch)
        check_batch_values(rows, caller="global_batch")
        rows = replace(rows, ids=device_ids(rows.ids, caller="global_batch"))
    width = opening.check(describe_batch(rows), -(-len(rows.weights) // ranks))
    return place_dealt([deal_rows(rows, ranks, max(1, width))], placement)
