"""A plan's slots as sharded device batches, fetched ahead of the step that needs them."""

import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import PyTree

from jax_ddp_weighting._arguments import check_at_least, check_epoch, check_up_to
from jax_ddp_weighting._version import __version__
from jax_ddp_weighting.data.batch import Batch, check_is_leaf
from jax_ddp_weighting.data.opening import Opening
from jax_ddp_weighting.data.read_ahead import read_ahead
from jax_ddp_weighting.data.row_format import RowFormat, describe_rows
from jax_ddp_weighting.data.row_lengths import RowLengths
from jax_ddp_weighting.data.watching import Watch
from jax_ddp_weighting.distributed import coordination
from jax_ddp_weighting.distributed.mesh import AxisName
from jax_ddp_weighting.distributed.placement import RankPlacement, check_device_values, id_dtype
from jax_ddp_weighting.sampling.kinds import Plan, check_any_plan, count_steps, find_fingerprint
from jax_ddp_weighting.sampling.order import GivenOrder
from jax_ddp_weighting.sampling.plan import EpochPlan
from jax_ddp_weighting.sampling.slots import Slots

Fetch = Callable[..., PyTree]
"""`fetch(ids)` returns a pytree of arrays `[len(ids), ...]`: row `j` is example `ids[j]`.

`fetch(ids, length)` for plans whose steps have a length, to which rows are padded.
"""


def batches(
    plan: Plan,
    epoch: int,
    fetch: Fetch,
    mesh: Mesh,
    *,
    start_step: int = 0,
    prefetch: int = 2,
    axis_name: AxisName = "data",
    timeout_s: float = coordination.WAIT_S,
) -> Iterator[Batch]:
    """An epoch of a plan as global device batches, each rank's rows on its device.

    The rule: every step is full (of one shape, or of a few where the plan is a `BudgetPlan`), short
    ones are filled with rows of weight 0, and each process fetches its own ranks' ids only,
    whichever devices of the mesh it holds. A thread fetches ahead of the step that is running. What
    `fetch` returned is copied, by this or by the transfer to the device, before `fetch` is called
    again: it may fill one buffer over and over.

    Processes that read different plans, epochs or steps, or whose rows differ in form, would go on
    with wrong rows, or hang or abort in a collective. So these are compared over the processes of
    the mesh, once a stream, at its first batch and through the coordination service; later rows
    must have the form of the first. An error of `fetch` at a later step is raised on this process
    alone, and so is one in the loop; the others wait in the next step's collective, inside XLA,
    where nothing can be raised. There the logger `jax_ddp_weighting.batches` names, at level ERROR,
    who has left the loop, and why, some seconds after, and who is behind or gone after `timeout_s`;
    the error itself comes when the collective's own library gives up. See `join_batches` for
    streams whose errors are raised on all.

    A loop that is left early, by `break` or by an error, is left at once, even while `fetch` hangs;
    and so is the program.

    Args:
        plan: who reads what; its `num_replicas` is the size of the mesh's data axis.
        epoch: which epoch, from 0.
        fetch: `fetch(ids)` for an int64 array of ids returns a pytree of arrays with one row per
            id; `fetch(ids, length)` where the plan is a `BudgetPlan` or a `PackedPlan`: rows are to
            be padded to `length`, and so one axis of some leaf at least must be as long. The ids of
            a `PackedPlan` are `[rows, most]`, as `pack_rows` takes them. It runs in another
            thread, one call per step, in order. The ids cannot be written: `ids.copy()` can.
            Integers that the device would cut are refused; floats of 64 bits are rounded to 32
            while x64 is off, as JAX does.
        mesh: a mesh with the axis; over further axes the rows are replicated.
        start_step: the first step of this plan to yield, to resume on as many ranks and rows as
            before. On others, give what `plan.resumed` returns, whose steps count from 0.
        prefetch: how many batches are made ahead; 0 makes each when it is asked for.
        axis_name: the data axis.
        timeout_s: how many seconds to wait, at the first batch, for other processes' first rows;
            and how long a step may take before the log names who is behind.

    Returns:
        An iterator of the plan's steps from `start_step` on, every leaf a global array
        `[num_replicas * rows, ...]` sharded over the axis. Ids are int32, or int64 where
        x64 is on when it is called; weights are int32, or float32 where the plan has its own. (Both
        are `[rows, most]` for a `PackedPlan`, with -1 at weight 0 where a row holds no further
        sequence: `Ledger.add` takes them; what tokens weigh is in the data.)

    Raises:
        TypeError: a number is none, or `fetch` cannot be called so; at once. `fetch` returned
            something that is no number.
        ValueError: the mesh has not the plan's number of ranks or no device of this process, or a
            number is out of range; at once, not at the first batch. `fetch` returned another number
            of rows than ids, rows of another length than the step's, of another form than
            before or than on another process, or integers that the device would cut; or another
            process reads other steps. An error in `fetch` surfaces at the step it belongs to, with
            a note that names the step.
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
    check_any_plan("batches: plan", plan)
    placement = RankPlacement.here(mesh, axis_name, caller="batches")
    ranks = placement.ranks
    if plan.num_replicas != ranks:
        raise ValueError(
            f"batches: plan must have as many ranks as the mesh's {axis_name!r} axis, got "
            f"{plan.num_replicas} and {ranks}. Make the plan with num_replicas={ranks}."
        )
    epoch = check_epoch("batches: epoch", epoch)
    steps = count_steps(plan, epoch)
    remedy = "A later step belongs to the next epoch."
    start_step = check_up_to("batches: start_step", start_step, steps, remedy)
    prefetch = check_at_least("batches: prefetch", prefetch, 0, "0 fetches without a thread.")
    timeout_s = coordination.check_timeout("batches: timeout_s", timeout_s)
    _check_ids_fit(plan)
    _warn_of_one_draw(plan, epoch)
    if not callable(fetch):
        raise TypeError(
            f"batches: fetch must be a function of ids, got {type(fetch).__name__}. Write lambda "
            "ids: rows[ids], or rows.__getitem__."
        )
    lengths = None if isinstance(plan, EpochPlan) else RowLengths("batches")
    if lengths is not None:
        _check_takes_length(fetch, plan)
    # met here and not at the first batch: all processes make their streams in the same order
    meeting = coordination.next_meeting(
        "batches", jax.process_index(), placement.processes, timeout_s
    )
    reading = {
        **find_fingerprint(plan, epoch),
        "num_replicas": plan.num_replicas,
        "batch_size": plan.batch_size,
        "steps": steps,
        "start": plan.start,
        "epoch": epoch,
        "start_step": start_step,
        "library_version": __version__,
    }
    if not isinstance(plan, EpochPlan):
        reading["shapes"] = plan.step_shapes
    opening = Opening("batches", meeting, reading, timeout_s)
    # a `with jax.enable_x64(...)` holds in its own thread alone, and another one may fetch
    x64 = jax.config.read("jax_enable_x64")
    rows = _Rows(plan, epoch, fetch, placement, lengths, opening, x64)

    def read() -> Iterator[Batch]:
        if start_step == steps:  # others may not think so, and would wait for rows from here
            opening.check_without_rows()
            return
        made = read_ahead(range(start_step, steps), prefetch, rows.fetch_step, rows.place_step)
        watch = Watch("batches", meeting, placement, timeout_s, lambda step: step == steps - 1)
        try:
            for step, batch in enumerate(made, start_step):
                watch.enter(step)
                yield batch
        except GeneratorExit:  # by a break, or an error in the loop
            watch.leave()
            raise
        except Exception as error:  # of fetch or of its rows: the others' log says which
            watch.leave(f"{type(error).__name__}: {error}")
            raise
        finally:
            watch.end()
            made.close()

    return read()


@dataclass(frozen=True, eq=False)
class _Rows:
    """The rows of an epoch: fetched for this process's ranks, which another thread may do; placed.

    Attributes:
        plan: who reads what.
        epoch: the epoch.
        fetch: the user's function.
        placement: where rows go.
        lengths: what knows rows that are padded to a length; None where none are.
        opening: where processes compare what they read first.
        x64: whether 64 bits were on when reading began.
    """

    plan: Plan
    epoch: int
    fetch: Fetch
    placement: RankPlacement
    lengths: RowLengths | None
    opening: Opening
    x64: bool

    def fetch_step(self, step: int) -> tuple[int, Slots, Any]:
        slots = self.plan.batch(self.epoch, step, ranks=self.placement.local)
        with jax.enable_x64(self.x64), self._report_failure(step):
            ids = _copy_unwritable(_join_ranks(slots.ids))
            given = (ids,) if self.lengths is None else (ids, slots.length)
            return step, slots, self.fetch(*given)

    def place_step(self, fetched: tuple[int, Slots, Any]) -> Batch:
        step, slots, data = fetched
        ids, weights = _join_ranks(slots.ids), _join_ranks(slots.weights)
        with jax.enable_x64(self.x64):
            with self._report_failure(step):
                check = partial(_check_rows, number=len(ids))
                data = jax.tree_util.tree_map_with_path(check, data)
                found = self._describe(data, slots.length)
            # before the others are met: what fetch has returned may be filled anew at any time
            with self._report_failure(step, "its rows could not be placed"):
                batch = self.placement.place(Batch(data, ids.astype(id_dtype()), weights))
            self.opening.check(found)
            return batch

    def _describe(self, rows: PyTree, length: int | None) -> RowFormat:
        if self.lengths is None or length is None:
            return describe_rows(rows)
        return self.lengths.describe(rows, length)

    @contextmanager
    def _report_failure(self, step: int, what: str = "fetch failed") -> Iterator[None]:
        failed = f"{what} at epoch {self.epoch}, step {step}"
        # what is wrong with the first rows is the others' business too: they wait for this process
        with self.opening.report_failure(failed):
            try:
                yield
            except BaseException as error:
                error.add_note(f"batches: {failed}.")
                raise


def _warn_of_one_draw(plan: Plan, epoch: int) -> None:
    order = plan.order if isinstance(plan, EpochPlan) else None
    if epoch and isinstance(order, GivenOrder) and order.repeats:
        warnings.warn(
            f"batches: epoch {epoch} reads the ids of epoch 0 again: the plan's order is one draw,"
            " for all epochs. Give EpochPlan.from_order a function of the epoch, such as"
            " weighted_order(weights, num_samples).",
            stacklevel=3,
        )


def _copy_unwritable(ids: np.ndarray) -> np.ndarray:
    # Of bytes, which nothing can make writable again. A fetch that sorts the ids it was given would
    # otherwise return rows in an order that nobody else knows of.
    return np.frombuffer(ids.tobytes(), ids.dtype).reshape(ids.shape)


def _join_ranks(slots: np.ndarray) -> np.ndarray:
    """The rows of all ranks in one axis."""
    return slots.reshape(-1, *slots.shape[2:])


def _check_takes_length(fetch: Fetch, plan: Plan) -> None:
    try:
        signature = inspect.signature(fetch)
    except (TypeError, ValueError):  # some callables written in C have none
        return
    try:
        signature.bind(None, None)
    except TypeError:
        raise TypeError(
            f"batches: fetch must take (ids, length) where the plan is a {type(plan).__name__}, got"
            f" {signature}. It pads every row to length, which is that of the step."
        ) from None


def _check_rows(path: Any, leaf: Any, *, number: int) -> np.ndarray:
    name = f"data{jax.tree_util.keystr(path)}"
    check_is_leaf(leaf, name, caller="batches")
    try:
        leaf = np.asarray(leaf)
    except Exception as error:  # a tensor on another device, or of a dtype that numpy has not
        error.add_note(f"batches: fetch must return arrays, got {type(leaf).__name__} at {name}.")
        raise
    if leaf.shape[:1] != (number,):
        raise ValueError(
            f"batches: fetch must return one row per id, got shape {leaf.shape} at {name} for "
            f"{number} ids. Index every array with ids; of a list of rows make one array."
        )
    check_device_values(leaf, name, caller="batches")
    return leaf


def _check_ids_fit(plan: Plan) -> None:
    largest = int(np.iinfo(id_dtype()).max)
    if plan.num_examples > largest + 1:
        raise ValueError(
            f"batches: plan must have ids of at most 32 bits while x64 is off, got "
            f"{plan.num_examples} examples. JAX would cut larger ids without a word: switch "
            "jax_enable_x64 on, or shard the data set into parts."
        )
