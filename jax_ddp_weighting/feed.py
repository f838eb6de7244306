"""A plan's slots as sharded device batches, fetched ahead of the step that needs them."""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jaxtyping import PyTree

from jax_ddp_weighting import mesh as meshes
from jax_ddp_weighting.mesh import AxisName
from jax_ddp_weighting.plan import EpochPlan, Slots


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Batch:
    """Rows with their identities and their weights: what a loss function is given.

    Attributes:
        data: a pytree of arrays `[rows, ...]`.
        ids: integers `[rows]`, which example each row is.
        weights: `[rows]`, how much each row counts; 0 is padding.
    """

    data: Any
    ids: Any
    weights: Any

    @classmethod
    def of(cls, data: PyTree, weights: Any = None, ids: Any = None) -> "Batch":
        """A batch made by hand, of data that no plan has laid out.

        Args:
            data: a pytree of arrays `[rows, ...]`.
            weights: `[rows]`, each finite and at least 0; all 1 when None.
            ids: integers `[rows]`; 0, 1, 2, ... when None.

        Returns:
            A `Batch` of the arrays as they are, on the host or on devices.

        Raises:
            ValueError: the leaves have different numbers of rows, or a weight on the host is
                negative or NaN. (Weights on a device are not read back.)

        Example:
            >>> batch = Batch.of({"x": np.zeros((3, 2))}, weights=np.array([1, 1, 0]))
            >>> batch.ids.tolist(), batch.weights.tolist()
            ([0, 1, 2], [1, 1, 0])
        """
        shapes = [np.shape(leaf) for leaf in jax.tree.leaves(data)]
        if not shapes or any(not shape or shape[0] != shapes[0][0] for shape in shapes):
            raise ValueError(
                "Batch.of: data must be arrays with one leading axis of rows, got shapes "
                f"{shapes}. Give every leaf the same number of rows."
            )
        rows = shapes[0][0]
        weights = np.ones(rows, np.int32) if weights is None else _array(weights)
        ids = np.arange(rows, dtype=np.int32) if ids is None else _array(ids)
        for name, array in (("weights", weights), ("ids", ids)):
            if array.shape != (rows,):
                raise ValueError(
                    f"Batch.of: {name} must have one entry per row, got shape {array.shape} for "
                    f"{rows} rows. Token weights belong in data, beside the tokens."
                )
        if isinstance(weights, np.ndarray):
            bad = np.flatnonzero(~(np.isfinite(weights) & (weights >= 0)))
            if bad.size:
                raise ValueError(
                    "Batch.of: weights must be finite and at least 0, got "
                    f"{weights[bad[0]]} at row {bad[0]}. A row that is not to count weighs 0."
                )
        return cls(data, ids, weights)

    def padded(self, multiple: int) -> "Batch":
        """The batch, filled up with rows of weight 0 until its rows divide by `multiple`.

        The rule: a row of padding repeats the first row, id included, at weight 0. So its data are
        as finite as that row's, and it counts for nothing.

        Args:
            multiple: what the number of rows is to divide by, such as microbatches times ranks;
                inside a mapped function, where a batch holds one rank's rows, the microbatches.

        Returns:
            A `Batch` of host arrays where they were on the host, else of device arrays; the same
            batch where the rows divide already.

        Raises:
            ValueError: `multiple` is below 1.

        Example:
            >>> batch = Batch.of(np.array([7.0, 8.0, 9.0])).padded(4)
            >>> batch.data.tolist(), batch.ids.tolist(), batch.weights.tolist()
            ([7.0, 8.0, 9.0, 7.0], [0, 1, 2, 0], [1, 1, 1, 0])
        """
        if multiple < 1:
            raise ValueError(
                f"Batch.padded: multiple must be at least 1, got {multiple}. 1 adds no rows."
            )
        extra = -self.weights.shape[0] % multiple
        if not extra:
            return self

        def repeated(leaf: Any) -> Any:
            numpy = jnp if isinstance(leaf, jax.Array) else np
            return numpy.concatenate([leaf, numpy.repeat(leaf[:1], extra, axis=0)])

        rows = jax.tree.map(repeated, self)
        real = np.arange(self.weights.shape[0] + extra) < self.weights.shape[0]
        return Batch(rows.data, rows.ids, rows.weights * real.astype(rows.weights.dtype))


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
) -> Iterator[Batch]:
    """An epoch of a plan as global device batches of one shape, each rank's rows on its device.

    The rule: every step is full, short ones are filled with rows of weight 0, and each process
    fetches its own ranks' ids only. A thread fetches ahead of the step that is running.

    Args:
        plan: who reads what; its `num_replicas` is the size of the mesh's data axis.
        epoch: which epoch, from 0.
        fetch: `fetch(ids)` for an int64 array of ids returns a pytree of arrays with one row per
            id. It runs in another thread, one call per step, in order.
        mesh: a mesh with the axis; over further axes the rows are replicated.
        start_step: the first step to yield, to resume.
        prefetch: how many batches are made ahead; 0 makes each when it is asked for.
        axis_name: the data axis.

    Returns:
        An iterator of `plan.steps_per_epoch - start_step` batches, every leaf a global array
        `[num_replicas * batch_size, ...]` sharded over the axis. Ids are int32, or int64 where
        x64 is on; weights are int32.

    Raises:
        ValueError: the mesh has not the plan's number of ranks, or a number is out of range; at
            once, not at the first batch. `fetch` returned another number of rows than ids. An error
            in `fetch` surfaces at the step it belongs to, with a note that names the step.

    Example:
        >>> plan = EpochPlan(5, num_replicas=1, batch_size=2, shuffle=False)
        >>> images = np.arange(5.0) * 10
        >>> for batch in batches(plan, 0, lambda ids: images[ids], data_mesh(1)):
        ...     print(batch.data.tolist(), batch.weights.tolist())
        [0.0, 10.0] [1, 1]
        [20.0, 30.0] [1, 1]
        [40.0, 0.0] [1, 0]
    """
    ranks = meshes.num_ranks(mesh, axis_name, caller="batches")
    if plan.num_replicas != ranks:
        raise ValueError(
            f"batches: plan must have as many ranks as the mesh's {axis_name!r} axis, got "
            f"{plan.num_replicas} and {ranks}. Make the plan with num_replicas={ranks}."
        )
    if not 0 <= start_step <= plan.steps_per_epoch:
        raise ValueError(
            f"batches: start_step must be in [0, {plan.steps_per_epoch}], got {start_step}. "
            "A later step belongs to the next epoch."
        )
    if prefetch < 0:
        raise ValueError(
            f"batches: prefetch must be at least 0, got {prefetch}. 0 fetches without a thread."
        )
    sharding = meshes.row_sharding(mesh, axis_name)
    width = plan.batch_size
    local = _local_ranks(sharding, ranks, width)
    _check_ids_fit(plan)

    def make(step: int) -> Batch:
        slots = plan.batch(epoch, step, ranks=local)
        try:
            data = fetch(slots.ids.reshape(-1))
        except BaseException as error:
            error.add_note(f"batches: fetch failed at epoch {epoch}, step {step}.")
            raise
        return _global_batch(slots, data, sharding, local, ranks)

    return _ahead(make, range(start_step, plan.steps_per_epoch), prefetch)


def _ahead(make: Callable[[int], Batch], steps: range, prefetch: int) -> Iterator[Batch]:
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


def _local_ranks(sharding: NamedSharding, ranks: int, width: int) -> list[int]:
    rows = sharding.addressable_devices_indices_map((ranks * width,))
    return sorted({(index[0].start or 0) // width for index in rows.values() if index})


def _global_batch(
    slots: Slots, data: PyTree, sharding: NamedSharding, local: list[int], ranks: int
) -> Batch:
    width = slots.ids.shape[1]
    first_row = {rank * width: place * width for place, rank in enumerate(local)}

    def globally(leaf: np.ndarray) -> jax.Array:
        def shard(index: Any) -> np.ndarray:
            first = first_row[index[0].start or 0]
            return leaf[first : first + width]

        return jax.make_array_from_callback((ranks * width, *leaf.shape[1:]), sharding, shard)

    def checked(path: Any, leaf: Any) -> jax.Array:
        leaf = np.asarray(leaf)
        if leaf.shape[:1] != (slots.ids.size,):
            raise ValueError(
                f"batches: fetch must return one row per id, got shape {leaf.shape} at data"
                f"{jax.tree_util.keystr(path)} for {slots.ids.size} ids. Index every array "
                "with ids."
            )
        return globally(leaf)

    ids = slots.ids.reshape(-1).astype(_id_dtype())
    weights = slots.weights.reshape(-1)
    return Batch(jax.tree_util.tree_map_with_path(checked, data), globally(ids), globally(weights))


def _id_dtype() -> Any:
    return jnp.result_type(int)


def _check_ids_fit(plan: EpochPlan) -> None:
    largest = int(np.iinfo(_id_dtype()).max)
    if plan.num_examples > largest + 1:
        raise ValueError(
            f"batches: plan must have ids of at most 32 bits while x64 is off, got "
            f"{plan.num_examples} examples. JAX would cut larger ids without a word: switch "
            "jax_enable_x64 on, or shard the data set into parts."
        )


def _array(values: Any) -> Any:
    return values if isinstance(values, jax.Array) else np.asarray(values)
