"""Exact evaluation: predictions by id, and metrics that do not move with the number of devices."""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import lru_cache, wraps
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, PyTree

from jax_ddp_weighting.data.batch import (
    MAKE_OR_READ_BATCHES,
    Batch,
    check_batch,
    pad_rows,
    place_batch,
)
from jax_ddp_weighting.distributed import mesh as meshes
from jax_ddp_weighting.distributed.coordination import WAIT_S, check_timeout
from jax_ddp_weighting.distributed.mesh import AxisName
from jax_ddp_weighting.distributed.placement import RankPlacement, check_tree_not_cut
from jax_ddp_weighting.distributed.waiting import Waiting
from jax_ddp_weighting.evaluation.step_sums import (
    Evaluation,
    MetricFn,
    StepSums,
    check_empty,
    check_no_rows,
    count_accepted,
)

# Steps in flight before the oldest is read: enough that the device never waits for the host, few
# enough that CPU devices, whose threads steps under way hold, cannot run out of them.
_AHEAD = 8


def evaluate(
    metric_fn: MetricFn,
    batches: Iterable[Batch],
    mesh: Mesh,
    *,
    params: PyTree = None,
    empty: Literal["raise", "nan"] = "raise",
    axis_name: AxisName = "data",
    timeout_s: float = WAIT_S,
) -> Evaluation:
    """The mean of each metric over all rows of all batches, each row counted as its weight, once.

    The rule: numerators and denominators are summed over rows, ranks and steps, and divided once.
    Within a step they are summed on the devices, as `metric_fn` does it; from step to step on the
    host, exactly, and rounded once, in the mean. So hits counted in integers give the same mean to
    the last bit for every number of ranks and rows per batch, up to 2**31 of weight per step and
    without limit over the steps; float32 losses are off by the rounding of one step's float32 sum
    at most, however many rows there are.

    `metric_fn` is compiled in the global view of `jit`: it sees all ranks' rows. It is compiled
    once for a run, as long as it is the same function object: define it once and hand parameters in
    as `params`. A function made anew each epoch is compiled anew each epoch.

    A rate of two sums, such as errors per word, is a `WeightedSum` of both, made by hand:
    `WeightedSum((errors * batch.weights).sum(), (words * batch.weights).sum())`. Not
    `weighted_sum(errors / words, words)`, in which a row of 0 words loses its errors. What is a
    function of a mean is taken last: a perplexity is `math.exp(found["nll"])`.

    A sum may hold arrays, such as one element a class, or a confusion matrix; the mean is
    elementwise, and one scalar weight may stand for all elements. The mean of an element without
    weight, as of a class that is absent, is NaN: never 0, and no error unless all are. The mean
    over those that are there is `found["iou"][found.sums["iou"].weight > 0].mean()`; `np.nanmean`
    would also leave out a class whose losses are NaN.

    In a run of several processes every process must give the same number of batches, as
    `batches(plan, ...)` does whatever the number of examples. One that does not come, gives fewer
    or is gone is named on the others, `timeout_s` after they began to wait for a result, and at
    most a quarter of that or 10 s more; where all wait, the devices are slow, and are waited for.
    An error of `batches` or `metric_fn` on one process is told to the others within seconds.

    Args:
        metric_fn: `metric_fn(batch)` returns a dict of `WeightedSum`s, each over its own weight, or
            a single one, which is named `"loss"`; `metric_fn(params, batch)` where `params` are
            given. `weighted_sum(logits.argmax(-1) == labels, batch.weights)` counts hits. Sums of
            arrays have one shape in all steps, and no axis of rows.
        batches: `Batch`es. Those smaller than the first whose rows have the same shapes are filled
            up with rows of weight 0, so that a short last one needs no second compilation; a plan
            by tokens needs one for each of its shapes.
        mesh: a mesh with the data axis.
        params: what `metric_fn` is given first, a pytree; placed on the mesh if it is elsewhere.
        empty: what the mean of a metric without any weight is: an error, or `"nan"`. Never 0, which
            would pass for a result.
        axis_name: the data axis.
        timeout_s: how many seconds to wait for other processes, before the first batch and for the
            result of a step.

    Returns:
        An `Evaluation`: a mapping of name to mean, with `accepted` and the exact `sums`; the same
        on every process.

    Raises:
        TypeError: `metric_fn` returns anything but `WeightedSum`s of real numbers, or a batch is no
            `Batch`.
        ValueError: a metric has no weight at all; a weight is negative, as integers are that have
            passed 2**31 in one step; a weight is an array of another shape than its total; a
            shape changes from step to step, or with the number of rows; a batch has `missing`
            weight; the mesh lacks the axis.
        RuntimeError: another process failed or is absent; it names it.

    Example:
        >>> def metric_fn(params, batch):
        ...     error = batch.data - params
        ...     return {
        ...         "close": weighted_sum(abs(error) < 1, batch.weights),
        ...         "squared error": weighted_sum(error**2, batch.weights),
        ...     }
        >>> plan = EpochPlan(5, num_replicas=1, batch_size=2, shuffle=False)
        >>> rows = np.array([1.0, 2.0, 2.5, 4.0, 9.0])
        >>> found = evaluate(
        ...     metric_fn, batches(plan, 0, lambda ids: rows[ids], data_mesh(1)), data_mesh(1),
        ...     params=2.0,
        ... )
        >>> found["close"], found.sums["close"].total, found.accepted
        (0.4, 2, 5)
    """
    check_empty(empty, caller="evaluate")
    meshes.num_ranks(mesh, axis_name, caller="evaluate")
    timeout_s = check_timeout("evaluate: timeout_s", timeout_s)
    waiting = Waiting(
        "evaluate", timeout_s, RankPlacement.of(mesh, axis_name, caller="evaluate").processes
    )
    waiting.meet()
    everywhere = meshes.replicated_sharding(mesh)
    check_tree_not_cut(params, "params", caller="evaluate")
    first = () if params is None else (meshes.place(params, everywhere),)
    with waiting.telling():
        totals = _sum_batches(metric_fn, batches, mesh, axis_name, first, waiting)
    return totals.evaluation(empty)


def _sum_batches(
    metric_fn: MetricFn,
    batches: Iterable[Batch],
    mesh: Mesh,
    axis_name: AxisName,
    first: tuple[PyTree, ...],
    waiting: Waiting,
) -> StepSums:
    """The sums of all batches' metrics."""
    ranks = meshes.num_ranks(mesh, axis_name, caller="evaluate")
    everywhere = meshes.replicated_sharding(mesh)
    # jit keeps what it compiled by the function itself, so a second `evaluate` compiles nothing
    compiled = jax.jit(_find_counting(metric_fn), out_shardings=everywhere)
    totals = StepSums("evaluate")

    def read(step: tuple[Any, Array]) -> None:
        totals.add(*waiting.wait(lambda: step, jax.device_get))

    if isinstance(batches, Batch):
        raise TypeError(
            "evaluate: batches must be an iterable of Batches, got one Batch. Write [batch]."
        )
    in_flight: deque[tuple[Any, Array]] = deque()
    # by the form of a row: of a plan by tokens, batches of long rows have few, and of short many
    rows: dict[tuple[tuple[int, ...], ...], int] = {}
    filled = None
    for batch in batches:
        check_batch("evaluate: batches must be Batches", batch, MAKE_OR_READ_BATCHES)
        if batch.missing is not None:
            raise ValueError(
                "evaluate: batches must count the rows that are there, got Batch.missing, votes of "
                'ranks that have ended. join_batches with convention="initial_ranks" makes them '
                'for training; "example" counts every row of an evaluation once.'
            )
        found = batch.weights.shape[0]
        # The first batch of a form sets the shape that is compiled, and shorter ones are filled up.
        form = tuple(np.shape(leaf)[1:] for leaf in jax.tree.leaves(batch.data))
        if filled is None or found:
            least = rows.setdefault(form, max(1, -(-found // ranks)) * ranks)
            filled = pad_rows(batch, max(least, found + -found % ranks))
        else:  # no rows, so no shapes and dtypes to go by: those before, at weight 0
            filled = replace(filled, weights=np.zeros_like(filled.weights))
        sharding = meshes.row_sharding(mesh, axis_name)
        batch = place_batch(filled, sharding, caller="evaluate")
        sums, accepted = compiled(*first, batch)
        if not in_flight and not totals.steps:
            check_no_rows(metric_fn, first, batch, sums, caller="evaluate")
        in_flight.append((sums, accepted))
        if len(in_flight) > _AHEAD:
            read(in_flight.popleft())
    while in_flight:
        read(in_flight.popleft())
    return totals


def _find_counting(metric_fn: MetricFn) -> Callable[..., tuple[Any, Array]]:
    """What `_count_too` makes; made anew, and so compiled anew, of what no cache can hold."""
    try:
        hash(metric_fn)
    except TypeError:  # a dataclass with a `__call__`, or one that holds arrays
        return _count_too.__wrapped__(metric_fn)
    return _count_too(metric_fn)


@lru_cache(maxsize=64)
def _count_too(metric_fn: MetricFn) -> Callable[..., tuple[Any, Array]]:
    """The metric and how many rows are accepted, in one program: the same one for a metric.

    XLA's CPU client runs a program as small as the count alone in the thread that asks for it,
    where nothing bounds the wait for other processes.
    """

    @wraps(metric_fn)  # by its name it is found in logs of compilations and profiles
    def measure(*arguments: Any) -> tuple[Any, Array]:
        return metric_fn(*arguments), count_accepted(arguments[-1].weights)

    return measure
