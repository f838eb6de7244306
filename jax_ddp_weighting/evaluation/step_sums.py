"""What a metric function returns, summed over steps without rounding, and what comes of it."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array

from jax_ddp_weighting.data.batch import Batch
from jax_ddp_weighting.evaluation.exact_sums import ExactSum
from jax_ddp_weighting.weighting.loss_terms import check_arrays, describe, name_sums
from jax_ddp_weighting.weighting.sums import WeightedSum

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


def check_empty(empty: Any, *, caller: str) -> None:
    """Raises `ValueError` for what no mean without weight can be."""
    if empty not in ("raise", "nan"):
        raise ValueError(f'{caller}: empty must be "raise" or "nan", got {empty!r}.')


def count_accepted(weights: Array) -> Array:
    """How many rows have weight."""
    return jnp.sum(weights > 0, dtype=jnp.int32)


class StepSums:
    """Sums over steps, exact, by name: of a total and of its weight; `caller` speaks in errors."""

    def __init__(self, caller: str) -> None:
        self._caller = caller
        self._sums: dict[str, tuple[ExactSum, ExactSum]] = {}
        self._accepted = 0
        self.steps = 0

    def add(self, sums: Any, accepted: Array) -> None:
        """The sums of one step, on the devices, and how many of its rows had weight."""
        named = name_metrics(jax.device_get(sums), caller=self._caller)
        self._add(jax.tree.map(lambda leaf: np.asarray(leaf)[None], named), accepted)

    def add_all(self, sums: Any, accepted: Array) -> None:
        """Those of many steps, stacked, which are known to be metrics."""
        self._add(name_sums(jax.device_get(sums)) or {}, accepted)

    def _add(self, named: dict[str, WeightedSum], counts: Array) -> None:
        accepted = np.asarray(counts).reshape(-1)
        for name, each in named.items():
            self._check_weight(name, each.weight)
            new = {"total": each.total, "weight": each.weight}
            shapes = [np.shape(array)[1:] for array in new.values()]
            if name not in self._sums:
                self._sums[name] = ExactSum(shapes[0]), ExactSum(shapes[1])
            for (noun, more), into in zip(new.items(), self._sums[name], strict=True):
                if np.shape(more)[1:] != into.shape:
                    raise ValueError(
                        f"{self._caller}: metric_fn must return sums of one shape in every step, "
                        f"got {noun} {np.shape(more)[1:]} for {name!r} in step {self.steps}, and "
                        f"{into.shape} before. Number classes and bins once, for all steps."
                    )
                into.add_all(more)
        self._accepted += int(accepted.sum(dtype=np.int64))
        self.steps += len(accepted)

    def _check_weight(self, name: str, weights: np.ndarray) -> None:
        negative = np.argwhere(np.asarray(weights) < 0)
        if len(negative):
            step, *place = negative[0].tolist()
            at = f" at {place}" if place else ""
            raise ValueError(
                f"{self._caller}: weight must be at least 0, got {weights[step][tuple(place)]}{at} "
                f"for {name!r} in step {self.steps + step}. A row of negative weight makes it so; "
                "and so do integer weights that pass 2**31 in one step: take smaller batches, or "
                "float weights."
            )

    def evaluation(self, empty: str) -> Evaluation:
        """What they come to."""
        nothing = [name for name, (_, weight) in self._sums.items() if not weight.any()]
        if empty == "raise" and (nothing or not self._sums):
            what = f"got none for {', '.join(map(repr, nothing))}" if nothing else "got no batches"
            raise ValueError(
                f"{self._caller}: batches must hold weight for every metric, {what} "
                f"({self._accepted} accepted rows). "
                'empty="nan" makes such a mean nan.'
            )
        sums = {
            name: WeightedSum(*(_as_plain(each.rounded()) for each in pair))
            for name, pair in self._sums.items()
        }
        means = {name: _as_plain(a.divided_by(b)) for name, (a, b) in self._sums.items()}
        return Evaluation(means, sums, accepted=self._accepted, steps=self.steps)


def _as_plain(found: np.ndarray) -> Any:
    return found if found.ndim else found.item()


def name_metrics(sums: Any, *, caller: str) -> dict[str, WeightedSum]:
    """What a metric function returned, by name.

    Raises:
        TypeError: it is something else than `WeightedSum`s of real numbers.
        ValueError: a weight has another shape than its total, and is no scalar.
    """
    terms = name_sums(sums)
    if terms is None:
        raise TypeError(
            f"{caller}: metric_fn must return a dict of WeightedSums, got {describe(sums)}. "
            "Return weighted_sum(values, batch.weights): a mean has lost its denominator, and "
            "batches of unequal weight cannot be averaged any more."
        )
    check_arrays(terms, returned_by=f"{caller}: metric_fn")
    return terms


def check_no_rows(
    metric_fn: MetricFn, first: tuple[Any, ...], batch: Batch, sums: Any, *, caller: str
) -> None:
    """Raises `ValueError` where an axis of a sum is that of the rows, which nobody has summed over.

    A sum has no more elements for a batch of more rows. Nothing is computed to see that, and
    nothing is traced unless an axis is as long as the batch, as ten classes of ten rows are too.
    """
    rows = batch.weights.shape[0]
    if not any(rows in leaf.shape for leaf in jax.tree.leaves(sums)):
        return

    def double(leaf: Array) -> jax.ShapeDtypeStruct:
        sharding = None if isinstance(leaf, Tracer) else leaf.sharding
        return jax.ShapeDtypeStruct((2 * rows, *leaf.shape[1:]), leaf.dtype, sharding=sharding)

    try:
        more = jax.eval_shape(metric_fn, *first, jax.tree.map(double, batch))
    except Exception:  # of a batch that it was never meant to see: it cannot be asked
        return
    wider = name_metrics(more, caller=caller)
    for name, each in name_metrics(sums, caller=caller).items():
        one, two = np.shape(each.total), np.shape(wider[name].total)
        if one != two:
            raise ValueError(
                f"{caller}: metric_fn must sum over rows, to arrays of one shape or scalar sums, "
                f"got total {one} and weight {np.shape(each.weight)} for {name!r} of {rows} rows, "
                f"and total {two} of {2 * rows}. weighted_sum sums all, and with axis=0 leaves "
                "the other axes."
            )
