"""Exact evaluation: predictions by id, and metrics that do not move with the number of devices."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, wraps
from typing import Any, Literal

import jax
import jax.numpy as jnp
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
from jax_ddp_weighting.distributed.placement import RankPlacement
from jax_ddp_weighting.distributed.waiting import Waiting
from jax_ddp_weighting.evaluation.exact_sums import ExactSum
from jax_ddp_weighting.weighting.loss_terms import check_arrays, describe, name_sums
from jax_ddp_weighting.weighting.sums import WeightedSum

# Steps in flight before the oldest is read: enough that the device never waits for the host, few
# enough that CPU devices, whose threads steps under way hold, cannot run out of them.
_AHEAD = 8

MetricFn = Callable[..., Any]
"""`(batch) -> dict[str, WeightedSum]`, or `(params, batch)` where params are given."""


@dataclass(frozen=True)
class Evaluation(Mapping[str, Any]):
    """What `evaluate` found: the mean of each metric by name, as a mapping, and what is behind it.

    Attributes:
        means: name -> mean, a Python float, divided once, from exact sums; NaN where there was no
            weight and that was allowed. Of a sum of arrays a float64 array, NaN where an element
            has no weight.
        sums: name -> the `WeightedSum` behind it: Python integers where the metric was counted in
            integers, floats otherwise; of arrays int64 or float64 (and Python's integers as objects
            where int64 does not hold one). Evaluations of parts of a data set add up by these.
        accepted: how many rows had weight, over all ranks and steps.
        steps: how many batches there were.

    Example:
        >>> def metric_fn(batch):
        ...     return {"hits": weighted_sum(batch.data, batch.weights)}
        >>> two_steps = [Batch.of(np.array([True, True, False])), Batch.of(np.array([False]))]
        >>> found = evaluate(metric_fn, two_steps, data_mesh(1))
        >>> found["hits"], found.sums["hits"], found.accepted, found.steps
        (0.5, WeightedSum(total=2, weight=4), 4, 2)
    """

    means: Mapping[str, Any]
    sums: Mapping[str, WeightedSum]
    accepted: int
    steps: int

    def __getitem__(self, name: str) -> Any:
        return self.means[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.means)

    def __len__(self) -> int:
        return len(self.means)


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
        RuntimeError: another process is absent; it names it.

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
    if empty not in ("raise", "nan"):
        raise ValueError(f'evaluate: empty must be "raise" or "nan", got {empty!r}.')
    ranks = meshes.num_ranks(mesh, axis_name, caller="evaluate")
    timeout_s = check_timeout("evaluate: timeout_s", timeout_s)
    waiting = Waiting(
        "evaluate", timeout_s, RankPlacement.of(mesh, axis_name, caller="evaluate").processes
    )
    waiting.meet()
    everywhere = meshes.replicated_sharding(mesh)
    first = () if params is None else (meshes.place(params, everywhere),)
    # jit keeps what it compiled by the function itself, so a second `evaluate` compiles nothing
    compiled = jax.jit(_count_too(metric_fn), out_shardings=everywhere)
    totals = _Totals(waiting)
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
            _check_no_rows(metric_fn, first, batch, sums)
        in_flight.append((sums, accepted))
        if len(in_flight) > _AHEAD:
            totals.add(in_flight.popleft())
    while in_flight:
        totals.add(in_flight.popleft())
    return totals.evaluation(empty)


@lru_cache(maxsize=64)
def _count_too(metric_fn: MetricFn) -> Callable[..., tuple[Any, Array]]:
    """The metric and how many rows are accepted, in one program: the same one for a metric.

    XLA's CPU client runs a program as small as the count alone in the thread that asks for it,
    where nothing bounds the wait for other processes.
    """

    @wraps(metric_fn)  # by its name it is found in logs of compilations and profiles
    def measure(*arguments: Any) -> tuple[Any, Array]:
        return metric_fn(*arguments), jnp.sum(arguments[-1].weights > 0, dtype=jnp.int32)

    return measure


class _Totals:
    """Sums over steps, exact, by name: of a total and of its weight."""

    def __init__(self, waiting: Waiting) -> None:
        self._waiting = waiting
        self._sums: dict[str, tuple[ExactSum, ExactSum]] = {}
        self._accepted = 0
        self.steps = 0

    def add(self, on_devices: tuple[Any, Array]) -> None:
        sums, accepted = self._waiting.wait(lambda: on_devices, jax.device_get)
        for name, each in _named(sums).items():
            self._check_weight(name, each.weight)
            new = {"total": each.total, "weight": each.weight}
            if name not in self._sums:
                self._sums[name] = ExactSum(np.shape(each.total)), ExactSum(np.shape(each.weight))
            for (noun, more), into in zip(new.items(), self._sums[name], strict=True):
                if np.shape(more) != into.shape:
                    raise ValueError(
                        "evaluate: metric_fn must return sums of one shape in every step, got "
                        f"{noun} {np.shape(more)} for {name!r} in step {self.steps}, and "
                        f"{into.shape} before. Number classes and bins once, for all steps."
                    )
                into.add(more)
        self._accepted += int(accepted)
        self.steps += 1

    def _check_weight(self, name: str, weight: np.ndarray) -> None:
        negative = np.argwhere(np.asarray(weight) < 0)
        if len(negative):
            place = tuple(negative[0].tolist())
            at = f" at {list(place)}" if place else ""
            raise ValueError(
                f"evaluate: weight must be at least 0, got {weight[place]}{at} for {name!r} in "
                f"step {self.steps}. Integer weights that pass 2**31 in one step wrap round: take "
                "smaller batches or float weights."
            )

    def evaluation(self, empty: str) -> Evaluation:
        nothing = [name for name, (_, weight) in self._sums.items() if not weight.any()]
        if empty == "raise" and (nothing or not self._sums):
            what = f"got none for {', '.join(map(repr, nothing))}" if nothing else "got no batches"
            raise ValueError(
                f"evaluate: batches must hold weight for every metric, {what} ({self._accepted} "
                'accepted rows). empty="nan" makes such a mean nan.'
            )
        sums = {
            name: WeightedSum(*(_as_plain(each.rounded()) for each in pair))
            for name, pair in self._sums.items()
        }
        means = {name: _as_plain(a.divided_by(b)) for name, (a, b) in self._sums.items()}
        return Evaluation(means, sums, accepted=self._accepted, steps=self.steps)


def _as_plain(found: np.ndarray) -> Any:
    return found if found.ndim else found.item()


def _named(sums: Any) -> dict[str, WeightedSum]:
    terms = name_sums(sums)
    if terms is None:
        raise TypeError(
            f"evaluate: metric_fn must return a dict of WeightedSums, got {describe(sums)}. "
            "Return weighted_sum(values, batch.weights): a mean has lost its denominator, and "
            "batches of unequal weight cannot be averaged any more."
        )
    check_arrays(terms, returned_by="evaluate: metric_fn")
    return terms


def _check_no_rows(metric_fn: MetricFn, first: tuple[Any, ...], batch: Batch, sums: Any) -> None:
    """Raises `ValueError` where an axis of a sum is that of the rows, which nobody has summed over.

    A sum has no more elements for a batch of more rows. Nothing is computed to see that, and
    nothing is traced unless an axis is as long as the batch, as ten classes of ten rows are too.
    """
    rows = batch.weights.shape[0]
    if not any(rows in leaf.shape for leaf in jax.tree.leaves(sums)):
        return

    def double(leaf: Array) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((2 * rows, *leaf.shape[1:]), leaf.dtype, sharding=leaf.sharding)

    try:
        more = jax.eval_shape(metric_fn, *first, jax.tree.map(double, batch))
    except Exception:  # of a batch that it was never meant to see: it cannot be asked
        return
    wider = _named(more)
    for name, each in _named(sums).items():
        one, two = np.shape(each.total), np.shape(wider[name].total)
        if one != two:
            raise ValueError(
                "evaluate: metric_fn must sum over rows, to arrays of one shape or scalar sums, "
                f"got total {one} and weight {np.shape(each.weight)} for {name!r} of {rows} rows, "
                f"and total {two} of {2 * rows}. weighted_sum sums all, and with axis=0 leaves "
                "the other axes."
            )
