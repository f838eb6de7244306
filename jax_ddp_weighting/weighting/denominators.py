"""What a step is divided by: the weights of its terms over all rows, microbatches and ranks."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from jax_ddp_weighting.data.batch import Batch
from jax_ddp_weighting.distributed.mesh import AxisName
from jax_ddp_weighting.weighting.counts import (
    Count,
    Sum,
    as_sum,
    is_bad,
    is_count,
    sum_weights,
    to_divisor,
    to_report,
)
from jax_ddp_weighting.weighting.loss_terms import has_gradient
from jax_ddp_weighting.weighting.row_parts import count_once
from jax_ddp_weighting.weighting.sums import WeightedSum, divide

T = TypeVar("T")


class StepWeights(NamedTuple):
    """What is summed over rows, microbatches and ranks before anything is divided.

    Beside the terms' own weights travel those of the batch's rows, which belong to no term: in
    fields of their own, so that no name of a term can meet them, and in one pytree, so that one
    all-reduce per dtype carries them all.

    Attributes:
        bad: how many weights cannot count; they are in none of the sums.
        accepted: the weight of the batch's rows; None where nobody asks for it.
        missing: the weight of ranks that are not there any more; None but for `join_batches`.
        present: the weight of the rows that are there, beside `missing`.
        terms: each term's weight, by name.
    """

    bad: Array
    accepted: Sum | None
    missing: Sum | None
    present: Sum | None
    terms: dict[str, Sum]


def sum_step_weights(
    batch: Any,
    terms: Mapping[str, WeightedSum],
    *,
    accepted: bool,
    part_axes: tuple[str, ...] = (),
) -> StepWeights:
    """The weights of one rank's microbatch: those of its terms, and those of its rows.

    The rule for what is bad: a row of a `Batch` whose weight is negative, NaN or infinite; and
    where no row is, or no `Batch` was given, a term whose weight is.

    Args:
        batch: what a loss function was given; weights of rows are read from a `Batch` alone.
        terms: what it returned, widened.
        accepted: whether the weight of its rows is asked for.
        part_axes: the axes that parts of rows lie over, every rank of which holds a row's weight.
    """
    bad_terms = sum((is_bad(each.weight).astype(jnp.int32) for each in terms.values()), start=0)
    weights = {
        name: as_sum(jnp.where(is_bad(each.weight), 0, each.weight)) for name, each in terms.items()
    }
    if not isinstance(batch, Batch):
        return StepWeights(jnp.asarray(bad_terms), None, None, None, weights)
    rows, bad_rows = sum_weights(jnp.asarray(batch.weights))
    # a bad row is bad in its term too, where it must not be counted again
    bad = jnp.where(bad_rows > 0, count_once(bad_rows, part_axes), bad_terms)
    rows = count_once(rows, part_axes)
    if batch.missing is None:
        return StepWeights(bad, rows if accepted else None, None, None, weights)
    missing = count_once(sum_weights(jnp.asarray(batch.missing))[0], part_axes)
    return StepWeights(bad, rows if accepted else None, missing, rows, weights)


class Denominators(NamedTuple):
    """What a step is divided by, the same on every rank.

    Attributes:
        bad: how many weights of the step cannot count, and divisors.
        accepted: the weight of all ranks' rows; None where nobody asks for it.
        terms: what each term is divided by, a float: its weight, or the divisor it was given.
        weights: its weight as it is reported: an integer where weights are integers.
        beyond: what an integer of 32 bits leaves out of that, or None.
    """

    bad: Array
    accepted: Array | None
    terms: dict[str, Array]
    weights: dict[str, Array]
    beyond: dict[str, Array | None]


def to_denominators(
    step: StepWeights,
    coefficients: Mapping[str, Any] | None,
    divisors_of: Callable[[dict[str, Array]], dict[str, Array]] | None = None,
) -> Denominators:
    """What to divide by, of the weights summed over the whole step.

    The rule: all are 0 where any weight of the step is bad, or a sum of floats so large that 1 over
    it is below the least normal one: such a step counts for nothing, as one without weight does.
    And with `M` the weight of missing ranks and `V` that of those present, every term that pulls is
    divided by `1 + M / V` times its weight, whatever it is weighed in.

    Args:
        step: the sums.
        coefficients: one factor per term, or None for a loss of one.
        divisors_of: of the weights, stretched so, the divisors of the terms that have one. One that
            is negative, NaN or infinite is as bad as such a weight.
    """
    pulling = frozenset(
        name for name in step.terms if coefficients is None or has_gradient(coefficients[name])
    )
    found = _divide_by_weights(step, pulling)
    return found if divisors_of is None else _divide_otherwise(found, divisors_of(found.terms))


@partial(jax.jit, static_argnames="pulling", inline=True)
def _divide_by_weights(step: StepWeights, pulling: frozenset[str]) -> Denominators:
    bad = step.bad
    for each in step.terms.values():
        if not isinstance(each, Count) and jnp.issubdtype(each.dtype, jnp.floating):
            # each weight is finite, and 1 over their sum would be 0: of it, or of its last digits
            bad = bad + (each > 1 / jnp.finfo(each.dtype).tiny).astype(bad.dtype)
    good = bad == 0
    sums = jax.tree.map(lambda leaf: jnp.where(good, leaf, 0), step)
    terms = {name: to_divisor(each) for name, each in sums.terms.items()}
    reported = {name: to_report(each) for name, each in sums.terms.items()}
    if sums.missing is not None and sums.present is not None:
        stretch = 1 + divide(to_divisor(sums.missing), to_divisor(sums.present))
        for name in terms:
            if name in pulling:  # a metric is a mean over what is there
                terms[name] = terms[name] * stretch
                reported[name] = terms[name], None
    accepted = None if sums.accepted is None else to_report(sums.accepted)[0]
    weights = {name: weight for name, (weight, _) in reported.items()}
    beyond = {name: rest for name, (_, rest) in reported.items()}
    return Denominators(bad, accepted, terms, weights, beyond)


def _divide_otherwise(found: Denominators, divisors: dict[str, Array]) -> Denominators:
    """The same with other divisors for some terms; all 0 where one of these is bad."""
    bad = jnp.sum(jnp.stack([is_bad(each) for each in divisors.values()]).astype(jnp.int32))
    # of a step that was bad before, its weights are 0, and what was made of them says nothing
    bad = jnp.where(found.bad == 0, bad.astype(found.bad.dtype), found.bad)
    divided = found._replace(terms={**found.terms, **divisors})
    cleared = jax.tree.map(lambda leaf: jnp.where(bad == 0, leaf, jnp.zeros_like(leaf)), divided)
    return cleared._replace(bad=bad)


def sum_over_ranks(sums: T, axis_name: AxisName | None) -> T:
    """Sums each over the ranks, with one all-reduce per dtype instead of one per array."""
    sums = _carry(sums)  # after microbatches were added, and before ranks are
    if axis_name is None:
        return sums
    leaves, structure = jax.tree.flatten(sums)
    if isinstance(sums, StepWeights):
        # The count of bad weights goes with the integers, or, where there are none, as a float:
        # it is not worth an all-reduce of its own.
        dtypes = [leaf.dtype for leaf in jax.tree.leaves(sums._replace(bad=None))]
        at = next(i for i, leaf in enumerate(leaves) if leaf is sums.bad)
        if sums.bad.dtype not in dtypes:
            leaves[at] = sums.bad.astype(dtypes[0])
    for dtype in sorted({leaf.dtype for leaf in leaves}, key=str):
        places = [i for i, leaf in enumerate(leaves) if leaf.dtype == dtype]
        summed = _sum_each_over_ranks([leaves[i] for i in places], axis_name)
        for i, place in enumerate(places):
            leaves[place] = summed[i]
    return _carry(structure.unflatten(leaves))


def _sum_each_over_ranks(leaves: list[Array], axis_name: AxisName) -> Sequence[Array]:
    """Arrays of one dtype, by one all-reduce."""
    if all(leaf.ndim == 0 for leaf in leaves):
        return lax.psum(jnp.stack(leaves), axis_name)
    summed = lax.psum(jnp.concatenate([jnp.ravel(leaf) for leaf in leaves]), axis_name)
    ends = np.cumsum([leaf.size for leaf in leaves])
    parts = [summed[end - leaf.size : end] for leaf, end in zip(leaves, ends, strict=True)]
    return [part.reshape(leaf.shape) for part, leaf in zip(parts, leaves, strict=True)]


def _carry(sums: T) -> T:
    return jax.tree.map(lambda s: s.carried() if is_count(s) else s, sums, is_leaf=is_count)
