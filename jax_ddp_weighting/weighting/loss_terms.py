"""What a loss function returns: one sum or several by name, and what its model keeps."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, PyTree

from jax_ddp_weighting.data.batch import Batch
from jax_ddp_weighting.distributed import mesh
from jax_ddp_weighting.distributed.mesh import AxisName
from jax_ddp_weighting.weighting.counts import (
    Sum,
    as_sum,
    is_bad,
    sum_weights,
    to_divisor,
    to_report,
)
from jax_ddp_weighting.weighting.sums import WeightedSum, divide

LossFn = Callable[..., Any]
"""`(params, batch) -> WeightedSum`, or a dict of them; with `rng` as a third argument if one is
given; paired with auxiliary output if `has_aux`."""


def name_sums(sums: Any) -> dict[str, WeightedSum] | None:
    """Sums by name, a single one as `"loss"`; None for whatever else somebody returned."""
    if isinstance(sums, WeightedSum):
        return {"loss": sums}
    if isinstance(sums, Mapping) and sums:
        return dict(sums) if all(isinstance(s, WeightedSum) for s in sums.values()) else None
    return None


def check_scalars(
    terms: Mapping[str, WeightedSum], *, returned_by: str, called: str = "term "
) -> None:
    """Raises unless every sum is one of scalars; the others speak in the error.

    Raises:
        TypeError: a total or a weight is no number, or a weight is complex.
        ValueError: one is no scalar.
    """
    for name, each in terms.items():
        if not (_is_number(each.total) and _is_number(each.weight, real=True)):
            raise TypeError(
                f"{returned_by} must return sums of numbers, got total {describe(each.total)} and "
                f"weight {describe(each.weight)} for {called}{name!r}. weighted_sum makes them."
            )
        if jnp.shape(each.total) != () or jnp.shape(each.weight) != ():
            raise ValueError(
                f"{returned_by} must return scalar sums, got total {jnp.shape(each.total)} and "
                f"weight {jnp.shape(each.weight)} for {called}{name!r}. weighted_sum makes them."
            )


def _is_number(value: Any, *, real: bool = False) -> bool:
    if not hasattr(value, "dtype"):
        return isinstance(value, int | float | (int if real else complex))
    kinds = (jnp.bool_, jnp.integer, jnp.floating if real else jnp.inexact)
    return any(jnp.issubdtype(value.dtype, kind) for kind in kinds)


def name_terms(
    sums: Any, coefficients: Mapping[str, Any] | None, *, caller: str = "value_and_grad"
) -> dict[str, WeightedSum]:
    """What a loss function returned, as terms by name, each of which has a coefficient.

    They come widened: what a loss function has summed by hand may be as narrow as int8.
    """
    terms = name_sums(sums)
    if terms is None:
        raise TypeError(
            f"{caller}: loss_fn must return a WeightedSum or a dict of them, got "
            f"{describe(sums)}. Return weighted_sum(losses, weights): a mean has lost its "
            "denominator, and ranks of unequal weight cannot be averaged any more."
        )
    if isinstance(sums, WeightedSum):  # which needs no coefficient, and may be given its own
        if coefficients is not None and set(coefficients) != {"loss"}:
            raise ValueError(
                f"{caller}: coefficients must name the terms of loss_fn, got "
                f"{sorted(coefficients)} for one unnamed WeightedSum. Return a dict of terms, or "
                "leave coefficients out."
            )
    elif coefficients is None or set(coefficients) != set(terms):
        got = "none" if coefficients is None else sorted(coefficients)
        raise ValueError(
            f"{caller}: coefficients must name every term of loss_fn, got {got} for "
            f"terms {sorted(terms)}. Give each term its factor: "
            f"coefficients={{{', '.join(f'{name!r}: 1.0' for name in sorted(terms))}}}."
        )
    check_scalars(terms, returned_by=f"{caller}: loss_fn")
    return {name: each.whole() for name, each in terms.items()}


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
    batch: Any, terms: Mapping[str, WeightedSum], *, accepted: bool
) -> StepWeights:
    """The weights of one rank's microbatch: those of its terms, and those of its rows.

    The rule for what is bad: a row of a `Batch` whose weight is negative, NaN or infinite; and
    where no row is, or no `Batch` was given, a term whose weight is.

    Args:
        batch: what a loss function was given; weights of rows are read from a `Batch` alone.
        terms: what it returned, widened.
        accepted: whether the weight of its rows is asked for.
    """
    bad_terms = sum((is_bad(each.weight).astype(jnp.int32) for each in terms.values()), start=0)
    weights = {
        name: as_sum(jnp.where(is_bad(each.weight), 0, each.weight)) for name, each in terms.items()
    }
    if not isinstance(batch, Batch):
        return StepWeights(jnp.asarray(bad_terms), None, None, None, weights)
    rows, bad_rows = sum_weights(jnp.asarray(batch.weights))
    # a bad row is bad in its term too, where it must not be counted again
    bad = jnp.where(bad_rows > 0, bad_rows, bad_terms)
    if batch.missing is None:
        return StepWeights(bad, rows if accepted else None, None, None, weights)
    missing, _ = sum_weights(jnp.asarray(batch.missing))
    return StepWeights(bad, rows if accepted else None, missing, rows, weights)


class Denominators(NamedTuple):
    """What a step is divided by, the same on every rank.

    Attributes:
        bad: how many weights of the step cannot count.
        accepted: the weight of all ranks' rows; None where nobody asks for it.
        terms: what each term is divided by, a float.
        weights: the same as it is reported: an integer where weights are integers.
        beyond: what an integer of 32 bits leaves out of it, or None.
    """

    bad: Array
    accepted: Array | None
    terms: dict[str, Array]
    weights: dict[str, Array]
    beyond: dict[str, Array | None]


def to_denominators(step: StepWeights, coefficients: Mapping[str, Any] | None) -> Denominators:
    """What to divide by, of the weights summed over the whole step.

    The rule: all are 0 where any weight of the step is bad, so that it counts for nothing, as a
    step without weight does. And with `M` the weight of missing ranks and `V` that of those
    present, every term that pulls is divided by `1 + M / V` times its weight, whatever it is
    weighed in.
    """
    good = step.bad == 0
    sums = jax.tree.map(lambda leaf: jnp.where(good, leaf, 0), step)
    terms = {name: to_divisor(each) for name, each in sums.terms.items()}
    reported = {name: to_report(each) for name, each in sums.terms.items()}
    if sums.missing is not None and sums.present is not None:
        stretch = 1 + divide(to_divisor(sums.missing), to_divisor(sums.present))
        factors = coefficients or {"loss": 1.0}
        for name in terms:
            if has_gradient(factors[name]):  # a metric is a mean over what is there
                terms[name] = terms[name] * stretch
                reported[name] = terms[name], None
    accepted = None if sums.accepted is None else to_report(sums.accepted)[0]
    weights = {name: weight for name, (weight, _) in reported.items()}
    beyond = {name: rest for name, (_, rest) in reported.items()}
    return Denominators(step.bad, accepted, terms, weights, beyond)


def has_gradient(factor: Any) -> bool:
    """Whether a term has a part in the loss: a coefficient of 0 makes it a mere metric.

    However the 0 is spelled: as a number, a bool, or an array on the host or on a device. Of a
    traced coefficient nothing is known while the program is made, so its term pulls.
    """
    return isinstance(factor, Tracer) or bool(np.any(np.asarray(factor) != 0))


def unpack(out: Any, *extras: str) -> tuple[Any, ...]:
    """The sums, and whatever else a loss function said that it returns."""
    if not (isinstance(out, tuple) and len(out) == 1 + len(extras)):
        options = [f"has_{extra}" for extra in extras]
        raise TypeError(
            f"value_and_grad: loss_fn must return (sums, {', '.join(extras)}) when "
            f"{' and '.join(f'{option}=True' for option in options)}, got {describe(out)}. "
            f"Return a tuple, or leave {' and '.join(options)} out."
        )
    return out


def check_state(
    old: PyTree, new: PyTree, axis_name: AxisName | None, again: Callable[[], PyTree]
) -> PyTree:
    """The new state of a model, if it has the form of the old one and is the same on every rank.

    Args:
        old: the state that went in.
        new: the state that came out.
        axis_name: the mapped data axis, or None.
        again: the new state once more, computed from the parameters as they were given. Those that
            gradients are taken of have been made to vary over the ranks, in type alone, and so has
            what a model keeps of them, such as the norm of a weight. Only what varies even so may
            differ from rank to rank.
    """
    if jax.tree.structure(old) != jax.tree.structure(new):
        raise ValueError(
            "value_and_grad: loss_fn must return a state of the structure it was given, got "
            f"{jax.tree.structure(new)} for {jax.tree.structure(old)}. Return all that came in, "
            "and nothing else."
        )
    new = jax.tree_util.tree_map_with_path(_check_form, old, new)
    if axis_name is None or not any(mesh.varies(leaf, axis_name) for leaf in jax.tree.leaves(new)):
        return new

    def check_same(path: Any, leaf: Array, shared: Any) -> Array:
        if not mesh.varies(leaf, axis_name):
            return leaf
        shared = jnp.asarray(shared)
        if mesh.varies(shared, axis_name):
            raise ValueError(
                "value_and_grad: loss_fn must return a state that is the same on every rank, got "
                f"one that may vary over {axis_name!r} at state{jax.tree_util.keystr(path)}. Sum "
                "what it is made of over the ranks, as a BatchNorm that is given the axis does."
            )
        return shared

    return jax.tree_util.tree_map_with_path(check_same, new, again())


def _check_form(path: Any, before: Any, after: Any) -> Array:
    before, after = jnp.asarray(before), jnp.asarray(after)
    if (before.shape, before.dtype) != (after.shape, after.dtype):
        raise ValueError(
            f"value_and_grad: loss_fn must return a state of the form it was given, got "
            f"{describe(after)} for {describe(before)} at state"
            f"{jax.tree_util.keystr(path)}. Cast it back, or initialise it so."
        )
    return after


def describe(value: Any) -> str:
    """What somebody returned in place of a sum, in a few words for an error."""
    if hasattr(value, "dtype"):
        return f"{value.dtype}{list(value.shape)}"
    if isinstance(value, tuple):
        return f"a tuple of {', '.join(describe(each) for each in value)}"
    if isinstance(value, Mapping):
        return f"a dict of {', '.join(sorted({describe(each) for each in value.values()}))}"
    return type(value).__name__
