"""What a loss function returns: one sum or several by name, and what its model keeps."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from jax_ddp_weighting.data.batch import Batch
from jax_ddp_weighting.distributed import mesh
from jax_ddp_weighting.distributed.mesh import AxisName
from jax_ddp_weighting.weighting.sums import WeightedSum, divide, weighted_sum

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
    """Raises `ValueError` unless every sum is one of scalars; the others speak in the error."""
    for name, each in terms.items():
        if jnp.shape(each.total) != () or jnp.shape(each.weight) != ():
            raise ValueError(
                f"{returned_by} must return scalar sums, got total {jnp.shape(each.total)} and "
                f"weight {jnp.shape(each.weight)} for {called}{name!r}. weighted_sum makes them."
            )


def name_terms(
    sums: Any, coefficients: Mapping[str, Any] | None, *, caller: str = "value_and_grad"
) -> dict[str, WeightedSum]:
    """What a loss function returned, as terms by name, each of which has a coefficient."""
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
    return terms


class StepWeights(NamedTuple):
    """What is summed over rows, microbatches and ranks before anything is divided.

    Beside the terms' own weights travel those of the batch's rows, which belong to no term: in
    fields of their own, so that no name of a term can meet them, and in one pytree, so that one
    all-reduce per dtype carries them all.

    Attributes:
        accepted: the weight of the batch's rows; None where nobody asks for it.
        missing: the weight of ranks that are not there any more; None but for `join_batches`.
        present: the weight of the rows that are there, beside `missing`.
        terms: each term's weight, by name.
    """

    accepted: Array | None
    missing: Array | None
    present: Array | None
    terms: dict[str, Array]


def row_weights(batch: Any, *, accepted: bool) -> StepWeights:
    """What a batch's rows weigh, without any terms yet.

    Args:
        batch: what a loss function is given; weights of rows are read from a `Batch` alone.
        accepted: whether the weight of its rows is asked for.
    """
    rows = jnp.asarray(batch.weights) if accepted else None
    # the weight alone: zeros in place of losses, summed up, would cost a small step 1 %
    counted = None if rows is None else weighted_sum(jnp.zeros(rows.shape), rows).weight
    if not isinstance(batch, Batch) or batch.missing is None:
        return StepWeights(counted, None, None, {})
    return StepWeights(counted, jnp.sum(batch.missing), jnp.sum(batch.weights), {})


def add_missing(weights: StepWeights, coefficients: Mapping[str, Any] | None) -> dict[str, Array]:
    """The terms' weights of a whole step, as if missing ranks had weighed what the others do.

    The rule: with `M` the weight of the missing ranks and `V` that of those present, every term
    that counts is divided by `1 + M / V` times its weight, whatever it is weighed in.
    """
    if weights.missing is None:
        return weights.terms
    stretch = 1 + divide(weights.missing, weights.present)
    factors = coefficients or {"loss": 1.0}
    return {
        # a metric is a mean over what is there, so it is not stretched
        name: weight * stretch if has_gradient(factors[name]) else weight
        for name, weight in weights.terms.items()
    }


def has_gradient(factor: Any) -> bool:
    """Whether a term has a part in the loss: a coefficient of plain 0 makes it a mere metric."""
    return not (isinstance(factor, int | float) and factor == 0)


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


def check_state(old: PyTree, new: PyTree, axis_name: AxisName | None) -> PyTree:
    """The new state of a model, if it has the form of the old one and is the same on every rank."""
    if jax.tree.structure(old) != jax.tree.structure(new):
        raise ValueError(
            "value_and_grad: loss_fn must return a state of the structure it was given, got "
            f"{jax.tree.structure(new)} for {jax.tree.structure(old)}. Return all that came in, "
            "and nothing else."
        )

    def checked(path: Any, before: Any, after: Any) -> Array:
        before, after = jnp.asarray(before), jnp.asarray(after)
        if (before.shape, before.dtype) != (after.shape, after.dtype):
            raise ValueError(
                f"value_and_grad: loss_fn must return a state of the form it was given, got "
                f"{describe(after)} for {describe(before)} at state"
                f"{jax.tree_util.keystr(path)}. Cast it back, or initialise it so."
            )
        if axis_name is not None and mesh.varies(after, axis_name):
            raise ValueError(
                "value_and_grad: loss_fn must return a state that is the same on every rank, got "
                f"one that may vary over {axis_name!r} at state{jax.tree_util.keystr(path)}. Sum "
                "what it is made of over the ranks, as a BatchNorm that is given the axis does."
            )
        return after

    return jax.tree_util.tree_map_with_path(checked, old, new)


def describe(value: Any) -> str:
    """What somebody returned in place of a sum, in a few words for an error."""
    if hasattr(value, "dtype"):
        return f"{value.dtype}{list(value.shape)}"
    if isinstance(value, tuple):
        return f"a tuple of {', '.join(describe(each) for each in value)}"
    if isinstance(value, Mapping):
        return f"a dict of {', '.join(sorted({describe(each) for each in value.values()}))}"
    return type(value).__name__
