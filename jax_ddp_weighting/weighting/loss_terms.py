"""What a loss function returns: one sum or several by name, and what its model keeps."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from jax_ddp_weighting.data.batch import Batch
from jax_ddp_weighting.distributed import mesh
from jax_ddp_weighting.distributed.mesh import AxisName
from jax_ddp_weighting.weighting.sums import WeightedSum, divide

LossFn = Callable[..., Any]
"""`(params, batch) -> WeightedSum`, or a dict of them; with `rng` as a third argument if one is
given; paired with auxiliary output if `has_aux`."""


def name_terms(
    sums: Any, coefficients: Mapping[str, Any] | None, *, caller: str = "value_and_grad"
) -> dict[str, WeightedSum]:
    """What a loss function returned, as terms by name, each of which has a coefficient."""
    if isinstance(sums, WeightedSum):
        named = {"loss": sums}
        if coefficients is not None and set(coefficients) != {"loss"}:
            raise ValueError(
                f"{caller}: coefficients must name the terms of loss_fn, got "
                f"{sorted(coefficients)} for one unnamed WeightedSum. Return a dict of terms, or "
                "leave coefficients out."
            )
    elif (
        isinstance(sums, Mapping)
        and sums
        and all(isinstance(each, WeightedSum) for each in sums.values())
    ):
        named = dict(sums)
        if coefficients is None or set(coefficients) != set(named):
            got = "none" if coefficients is None else sorted(coefficients)
            raise ValueError(
                f"{caller}: coefficients must name every term of loss_fn, got {got} for "
                f"terms {sorted(named)}. Give each term its factor: "
                f"coefficients={{{', '.join(f'{name!r}: 1.0' for name in sorted(named))}}}."
            )
    else:
        raise TypeError(
            f"{caller}: loss_fn must return a WeightedSum or a dict of them, got "
            f"{describe(sums)}. Return weighted_sum(losses, weights): a mean has lost its "
            "denominator, and ranks of unequal weight cannot be averaged any more."
        )
    for name, each in named.items():
        if jnp.shape(each.total) != () or jnp.shape(each.weight) != ():
            raise ValueError(
                f"{caller}: loss_fn must return scalar sums, got total "
                f"{jnp.shape(each.total)} and weight {jnp.shape(each.weight)} for term {name!r}. "
                "weighted_sum makes them."
            )
    return named


def missing_weights(batch: Any) -> dict[str, Array]:
    """What a batch's ranks weigh, missing and present, under names that are no term's.

    Nothing, but for batches of `join_batches` that count ranks which are not there any more.
    """
    if not isinstance(batch, Batch) or batch.missing is None:
        return {}
    return {_MISSING: jnp.sum(batch.missing), _PRESENT: jnp.sum(batch.weights)}


def add_missing(
    weights: dict[str, Array], coefficients: Mapping[str, Any] | None
) -> dict[str, Array]:
    """The weights of a whole step, as if ranks that are missing had weighed what the others do.

    The rule: with `M` the weight of the missing ranks and `V` that of those present, every term
    that counts is divided by `1 + M / V` times its weight, whatever it is weighed in.
    """
    if _MISSING not in weights:
        return weights
    terms = {name: each for name, each in weights.items() if name not in (_MISSING, _PRESENT)}
    stretch = 1 + divide(weights[_MISSING], weights[_PRESENT])
    factors = coefficients or {"loss": 1.0}
    return {
        name: weight * stretch if has_gradient(factors[name]) else weight
        for name, weight in terms.items()
    }


_MISSING, _PRESENT = "\0missing", "\0present"


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
    if isinstance(value, jax.Array):
        return f"{value.dtype}{list(value.shape)}"
    if isinstance(value, tuple):
        return f"a tuple of {', '.join(describe(each) for each in value)}"
    if isinstance(value, Mapping):
        return f"a dict of {', '.join(sorted({describe(each) for each in value.values()}))}"
    return type(value).__name__
