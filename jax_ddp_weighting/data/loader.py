"""A plan's slots as sharded device batches, fetched ahead of the step that needs them."""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import PyTree

from jax_ddp_weighting._arguments import check_at_least, check_epoch, check_up_to
from jax_ddp_weighting.data.batch import Batch
from jax_ddp_weighting.data.row_format import FormatAgreement
from jax_ddp_weighting.distributed import coordination
from jax_ddp_weighting.distributed.mesh import AxisName
from jax_ddp_weighting.distributed.placement import RankPlacement, id_dtype
from jax_ddp_weighting.sampling.plan import EpochPlan

Fetch = Callable[[np.ndarray], PyTree]
"""`fetch(ids)` returns a pytree of arrays `[len(ids), ...]`: row `j` is example `ids[j]`."""


def batches(
    plan: EpochPlan,
    epoch: int,
    fetch: Fetch,
    mesh: Mesh,
    *,
    start_step: int = 0,
    prefetch: int = 2,
    axis_name: AxisName = "data",
    timeout_s: float = 300,
) -> Iterator[Batch]:
    """An epoch of a plan as global device batches of one shape, each rank's rows on its device.

    The rule: every step is full, short ones are filled with rows of weight 0, and each process
    fetches its own ranks' ids only, whichever devices of the mesh it holds. A thread fetches ahead
    of the step that is running.

    Processes whose rows differ in form would go on with different global shapes, and hang or abort
    in a collective. So the first rows' form is compared over the processes of the mesh, once a
    stream and through the coordination service; later rows must have the form of the first. (An
    error of `fetch` at a later step is this process's alone: see `join_batches` for streams whose
    errors are to reach all.)

    Args:
        plan: who reads what; its `num_replicas` is the size of the mesh's data axis.
        epoch: which epoch, from 0.
        fetch: `fetch(ids)` for an int64 array of ids returns a pytree of arrays with one row per
            id. It runs in another thread, one call per step, in order.
        mesh: a mesh with the axis; over further axes the rows are replicated.
        start_step: the first step to yield, to resume.
        prefetch: how many batches are made ahead; 0 makes each when it is asked for.
        axis_name: the data axis.
        timeout_s: how many seconds to wait, at the first batch, for other processes' first rows.

    Returns:
        An iterator of `plan.steps_per_epoch - start_step` batches, every leaf a global array
        `[num_replicas * batch_size, ...]` sharded over the axis. Ids are int32, or int64 where
        x64 is on when it is called; weights are int32.

    Raises:
        TypeError: a number is none; at once.
        ValueError: the mesh has not the plan's number of ranks or no device of this process, or a
            number is out of range; at once, not at the first batch. `fetch` returned another number
            of rows than ids, or rows of another form than before or than on another process. An
            error in `fetch` surfaces at the step it belongs to, with a note that names the step.
        RuntimeError: another process failed to fetch its first rows, or did not in time.

    Example:
        >>> plan = EpochPlan(5, num_replicas=1, batch_size=2, shuffle=False)
        >>> images = np.arange(5.0) * 10
        >>> for batch in batches(plan, 0, lambda ids: images[ids], data_mesh(1)):
        ...     print(batch.data.tolist(), batch.weights.tolist())
        [0.0, 10.0] [1, 1]
        [20.0, 30.0] [1, 1]
        [40.0, 0.0] [1, 0]
    """
    layout = RankPlacement.here(mesh, axis_name, caller="batches")
    ranks = layout.ranks
    if plan.num_replicas != ranks:
        raise ValueError(
            f"batches: plan must have as many ranks as the mesh's {axis_name!r} axis, got "
            f"{plan.num_replicas} and {ranks}. Make the plan with num_replicas={ranks}."
        )
    epoch = check_epoch("batches: epoch", epoch)
    steps = plan.steps_per_epoch
    remedy = "A later step belongs to the next epoch."
    start_step = check_up_to("batches: start_step", start_step, steps, remedy)
    prefetch = check_at_least("batches: prefetch", prefetch, 0, "0 fetches without a thread.")
    coordination.check_timeout("batches: timeout_s", timeout_s)
    _check_ids_fit(plan)
    # met here and not at the first batch: all processes make their streams in the same order
    meeting = coordination.next_meeting("batches", jax.process_index(), layout.processes)
    agreement = FormatAgreement("batches", meeting, timeout_s)

    # a `with jax.enable_x64(...)` holds in its own thread alone, and another one may fetch
    x64 = jax.config.read("jax_enable_x64")

    def make_in_any_thread(step: int) -> Batch:
        with jax.enable_x64(x64):
            return make(step)

    def make(step: int) -> Batch:
        slots = plan.batch(epoch, step, ranks=layout.local)
        ids, weights = slots.ids.reshape(-1), slots.weights.reshape(-1)
        failed = f"fetch failed at epoch {epoch}, step {step}"
        # what is wrong with the first rows is the others' business too: they wait for this process
        with agreement.report_failure(failed):
            try:
                data = fetch(ids)
            except BaseException as error:
                error.add_note(f"batches: {failed}.")
                raise
            data = jax.tree_util.tree_map_with_path(partial(_check_rows, number=len(ids)), data)
        agreement.check(data)
        return jax.tree.map(layout.place_rows, Batch(data, ids.astype(id_dtype()), weights))

    return _read_ahead(make_in_any_thread, range(start_step, steps), prefetch)


def _read_ahead(make: Callable[[int], Batch], steps: range, prefetch: int) -> Iterator[Batch]:
    # A generator, since it turns a StopIteration out of `make` into an error, where `map` would
    # take it for the end of the epoch.
    if not prefetch:
        for step in steps:
            yield make(step)
        return
    waiting: deque[Future[Batch]] = deque()
    with ThreadPoolExecutor(1, thread_name_prefix="batches") as pool:
        try:
            for step in steps:
                waiting.append(pool.submit(make, step))
                if len(waiting) > prefetch:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:  # the loop was left early, or a fetch failed: start nothing more
            pool.shutdown(wait=False, cancel_futures=True)


def _check_rows(path: Any, leaf: Any, *, number: int) -> np.ndarray:
    leaf = np.asarray(leaf)
    if leaf.shape[:1] != (number,):
        raise ValueError(
            f"batches: fetch must return one row per id, got shape {leaf.shape} at data"
            f"{jax.tree_util.keystr(path)} for {number} ids. Index every array with ids."
        )
    return leaf


def _check_ids_fit(plan: EpochPlan) -> None:
    largest = int(np.iinfo(id_dtype()).max)
    if plan.num_examples > largest + 1:
        raise ValueError(
            f"batches: plan must have ids of at most 32 bits while x64 is off, got "
            f"{plan.num_examples} examples. JAX would cut larger ids without a word: switch "
            "jax_enable_x64 on, or shard the data set into parts."
        )
