"""Exact evaluation: predictions by id, and metrics that do not move with the number of devices."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from math import isfinite, nan
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
from jax_ddp_weighting.distributed.mesh import AxisName
from jax_ddp_weighting.weighting.loss_terms import check_scalars, describe, name_sums
from jax_ddp_weighting.weighting.sums import WeightedSum

# Steps in flight before the oldest is read: enough that the device never waits for the host, few
# enough that CPU devices, whose threads steps under way hold, cannot run out of them.
_AHEAD = 8

MetricFn = Callable[..., Any]
"""`(batch) -> dict[str, WeightedSum]`, or `(params, batch)` where params are given."""


@dataclass(frozen=True)
class Evaluation(Mapping[str, float]):
    """What `evaluate` found: the mean of each metric by name, as a mapping, and what is behind it.

    Attributes:
        means: name -> mean, a Python float, divided once, from exact sums; NaN where there was no
            weight and that was allowed.
        sums: name -> the `WeightedSum` behind it: Python integers where the metric was counted in
            integers, floats otherwise. Evaluations of parts of a data set add up by these.
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

    means: Mapping[str, float]
    sums: Mapping[str, WeightedSum]
    accepted: int
    steps: int

    def __getitem__(self, name: str) -> float:
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
) -> Evaluation:
    """The mean of each metric over all rows of all batches, each row counted as its weight, once.

    The rule: numerators and denominators are summed over rows, ranks and steps, and divided once.
    Within a step they are summed on the devices, as `metric_fn` does it; from step to step on the
    host, as exact rationals that are rounded once, in the mean. So hits counted in integers give
    the same mean to the last bit for every number of ranks and rows per batch, up to 2**31 of
    weight per step and without limit over the steps; float32 losses are off by the rounding of one
    step's float32 sum at most, however many rows there are.

    `metric_fn` is compiled in the global view of `jit`: it sees all ranks' rows. It is compiled
    once for a run, as long as it is the same function object: define it once and hand parameters in
    as `params`. A function made anew each epoch is compiled anew each epoch.

    A rate of two sums, such as errors per word, is a `WeightedSum` of both, made by hand:
    `WeightedSum((errors * batch.weights).sum(), (words * batch.weights).sum())`. Not
    `weighted_sum(errors / words, words)`, in which a row of 0 words loses its errors.

    In a run of several processes every process must give the same number of batches, as
    `batches(plan, ...)` does whatever the number of examples.

    Args:
        metric_fn: `metric_fn(batch)` returns a dict of `WeightedSum`s, each over its own weight, or
            a single one, which is named `"loss"`; `metric_fn(params, batch)` where `params` are
            given. `weighted_sum(logits.argmax(-1) == labels, batch.weights)` counts hits.
        batches: `Batch`es. Those smaller than the first whose rows have the same shapes are filled
            up with rows of weight 0, so that a short last one needs no second compilation; a plan
            by tokens needs one for each of its shapes.
        mesh: a mesh with the data axis.
        params: what `metric_fn` is given first, a pytree; placed on the mesh if it is elsewhere.
        empty: what the mean of a metric without any weight is: an error, or `"nan"`. Never 0, which
            would pass for a result.
        axis_name: the data axis.

    Returns:
        An `Evaluation`: a mapping of name to mean, with `accepted` and the exact `sums`; the same
        on every process.

    Raises:
        TypeError: `metric_fn` returns anything but `WeightedSum`s, or a batch is no `Batch`.
        ValueError: a metric has no weight at all; a weight is negative, as integers are that have
            passed 2**31 in one step; a batch has `missing` weight; the mesh lacks the axis.

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
    everywhere = meshes.replicated_sharding(mesh)
    first = () if params is None else (meshes.place(params, everywhere),)
    # jit keeps what it compiled by the function itself, so a second `evaluate` compiles nothing
    compiled = jax.jit(metric_fn, out_shardings=everywhere)
    count = jax.jit(_count_accepted, out_shardings=everywhere)
    totals = _Totals()
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
        in_flight.append((compiled(*first, batch), count(batch.weights)))
        if len(in_flight) > _AHEAD:
            totals.add(*in_flight.popleft())
    while in_flight:
        totals.add(*in_flight.popleft())
    return totals.evaluation(empty)


def _count_accepted(weights: Array) -> Array:
    return jnp.sum(weights > 0, dtype=jnp.int32)


class _Totals:
    """Sums over steps, exact: integers, and rationals for floats."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[Any, Any]] = {}
        self._accepted = 0
        self._steps = 0

    def add(self, sums: Any, accepted: Array) -> None:
        for name, each in _named(jax.device_get(sums)).items():
            total, weight = self._sums.get(name, (0, 0))
            more = _as_exact(each.weight)
            if more < 0:
                raise ValueError(
                    f"evaluate: weight must be at least 0, got {more} for {name!r} in step "
                    f"{self._steps}. Integer weights that pass 2**31 in one step wrap round: take "
                    "smaller batches or float weights."
                )
            self._sums[name] = _add(total, _as_exact(each.total)), _add(weight, more)
        self._accepted += int(accepted)
        self._steps += 1

    def evaluation(self, empty: str) -> Evaluation:
        nothing = [name for name, (_, weight) in self._sums.items() if weight == 0]
        if empty == "raise" and (nothing or not self._sums):
            what = f"got none for {', '.join(map(repr, nothing))}" if nothing else "got no batches"
            raise ValueError(
                f"evaluate: batches must hold weight for every metric, {what} ({self._accepted} "
                'accepted rows). empty="nan" makes such a mean nan.'
            )
        return Evaluation(
            means={name: _divide(*each) for name, each in self._sums.items()},
            sums={name: WeightedSum(*map(_as_plain, each)) for name, each in self._sums.items()},
            accepted=self._accepted,
            steps=self._steps,
        )


Exact = int | Fraction | float
"""An exact number, or a float that is none: NaN or infinity."""


def _as_exact(value: np.ndarray) -> Exact:
    number = value.item()
    return Fraction(number) if isinstance(number, float) and isfinite(number) else number


def _add(a: Exact, b: Exact) -> Exact:
    return a + b  # a rational plus nan is nan


def _divide(total: Exact, weight: Exact) -> float:
    return float(total / weight) if weight else nan


def _as_plain(number: Exact) -> int | float:
    return number if isinstance(number, int) else float(number)


def _named(sums: Any) -> dict[str, WeightedSum]:
    terms = name_sums(sums)
    if terms is None:
        raise TypeError(
            f"evaluate: metric_fn must return a dict of WeightedSums, got {describe(sums)}. "
            "Return weighted_sum(values, batch.weights): a mean has lost its denominator, and "
            "batches of unequal weight cannot be averaged any more."
        )
    check_scalars(terms, returned_by="evaluate: metric_fn", called="")
    return terms
