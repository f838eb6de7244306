"""What terms are divided by where that is not their own weight: a number, or a function of it."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, PyTree

from jax_ddp_weighting.distributed import mesh
from jax_ddp_weighting.distributed.mesh import AxisName
from jax_ddp_weighting.weighting.dtypes import widen
from jax_ddp_weighting.weighting.loss_terms import describe, is_number, name_sums
from jax_ddp_weighting.weighting.named_arguments import find_named

Divisors = Mapping[str, Any]
"""By term a number, or a function of the term's weight over the whole step."""


def check_divisors(
    divisors: Divisors | None, coefficients: Mapping[str, Any] | None, *, caller: str
) -> dict[str, Any]:
    """The divisors, checked: of those that are numbers the values, of functions that they are some.

    Args:
        divisors: what the user gave; None is none.
        coefficients: one factor per term, or None for a loss of one term, `"loss"`.
        caller: who speaks in errors.

    Raises:
        TypeError: they are no mapping, or one is neither a number nor a function.
        ValueError: one is for no term, is no scalar, or negative, NaN or infinite.
    """
    if divisors is None:
        return {}
    if not isinstance(divisors, Mapping):
        raise TypeError(
            f"{caller}: divisors must be a dict of a number or a function for each term that has "
            f"one, got {describe(divisors)}. The one unnamed term is 'loss': divisors="
            "{'loss': 50.0}."
        )
    terms = ["loss"] if coefficients is None else list(coefficients)
    unknown = [name for name in divisors if name not in terms]
    if unknown:
        hint = "" if coefficients is not None else " A dict of terms needs coefficients too."
        raise ValueError(
            f"{caller}: divisors must each be for a term of the loss, got one for {unknown[0]!r} "
            f"beside terms {terms}. Without coefficients the one term is 'loss'.{hint}"
        )
    return {
        name: each if callable(each) else _check_number(_to_host(each), name, caller)
        for name, each in divisors.items()
    }


def check_terms(sums: Any, divisors: Divisors) -> None:
    """Raises `ValueError` for a divisor of a term that `WeightedSum.once` has made."""
    for name, each in (name_sums(sums) or {}).items():
        if name in divisors and each.counted_once:
            raise ValueError(
                f"value_and_grad: divisors must be for terms that are sums over rows, got one for "
                f"{name!r}, which is counted once per step. Its total is added up over ranks and "
                "microbatches, and divided by how many they are: scale it by its coefficient."
            )


def apply_divisors(
    divisors: Divisors,
    weights: Mapping[str, Array],
    *,
    replicated: PyTree,
    axis_name: AxisName | None,
) -> dict[str, Array]:
    """What each term is divided by that has a divisor: scalars, float32 at least.

    Args:
        divisors: those of a step, checked.
        weights: each term's weight over the whole step, the same on every rank.
        replicated: what the step was given beside its rows, for functions that name it.
        axis_name: the mapped data axis, or None.

    Raises:
        TypeError: a function returns no number, or cannot be called.
        ValueError: it returns no scalar, or one that may vary over the ranks.
    """
    found = {}
    for name, divisor in divisors.items():
        argument = f"value_and_grad: divisors[{name!r}]"
        if callable(divisor):
            named = find_named(divisor, "weight", {"replicated": replicated}, argument=argument)
            divisor = divisor(_as_float(weights[name]), **named)
            _check_number(divisor, name, "value_and_grad")
        if (
            axis_name is not None
            and isinstance(divisor, Tracer)
            and mesh.varies(divisor, axis_name)
        ):
            raise ValueError(
                f"{argument} must be the same on every rank, got one that may vary over "
                f"{axis_name!r}. Make it of the weight that a function is given, which is the "
                "whole step's, and of what is replicated."
            )
        found[name] = _as_float(divisor)
    return found


def _to_host(number: Any) -> Any:
    """The number read back, where it is known: a constant is checked before anything is run."""
    known = isinstance(number, jax.Array) and not isinstance(number, Tracer)
    return np.asarray(number) if known and is_number(number) else number


def _check_number(divisor: Any, name: str, caller: str) -> Any:
    is_bool = isinstance(divisor, bool) or getattr(divisor, "dtype", None) == np.bool_
    if is_bool or not is_number(divisor, real=True):
        raise TypeError(
            f"{caller}: divisors[{name!r}] must be a real number, or a function of the term's "
            f"weight that returns one, got {describe(divisor)}. For instance 50.0, or lambda "
            "weight: jnp.maximum(weight, 1)."
        )
    if np.shape(divisor) != ():
        raise ValueError(
            f"{caller}: divisors[{name!r}] must be one number for the whole term, got shape "
            f"{np.shape(divisor)}. How much rows or classes count is a weight."
        )
    # What a device computes is not read back: a step on which it is negative or NaN is a bad one.
    if not isinstance(divisor, jax.Array) and not 0 <= divisor < np.inf:
        raise ValueError(
            f"{caller}: divisors[{name!r}] must be finite and at least 0, got {divisor}. A term "
            "that is divided by 0 counts for nothing."
        )
    return divisor


def _as_float(number: Any) -> Array:
    if not isinstance(number, jax.Array):  # a Python integer may have more bits than a device's
        return jnp.asarray(float(number), jnp.result_type(float))
    floating = jnp.issubdtype(number.dtype, jnp.floating)
    return number.astype(widen(jnp.float32, number.dtype) if floating else jnp.result_type(float))
