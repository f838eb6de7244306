"""What a loss function returns: one sum, or several by name, each with a coefficient."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jax_ddp_weighting.sums import WeightedSum

LossFn = Callable[..., Any]
"""`(params, batch) -> WeightedSum`, or a dict of them; with `rng` as a third argument if one is
given; paired with auxiliary output if `has_aux`."""


def named_terms(sums: Any, coefficients: Mapping[str, Any] | None) -> dict[str, WeightedSum]:
    """What a loss function returned, as terms by name, each of which has a coefficient."""
    if isinstance(sums, WeightedSum):
        named = {"loss": sums}
        if coefficients is not None and set(coefficients) != {"loss"}:
            raise ValueError(
                f"value_and_grad: coefficients must name the terms of loss_fn, got "
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
                f"value_and_grad: coefficients must name every term of loss_fn, got {got} for "
                f"terms {sorted(named)}. Give each term its factor: "
                f"coefficients={{{', '.join(f'{name!r}: 1.0' for name in sorted(named))}}}."
            )
    else:
        raise TypeError(
            f"value_and_grad: loss_fn must return a WeightedSum or a dict of them, got "
            f"{described(sums)}. Return weighted_sum(losses, weights): a mean has lost its "
            "denominator, and ranks of unequal weight cannot be averaged any more."
        )
    for name, each in named.items():
        if jnp.shape(each.total) != () or jnp.shape(each.weight) != ():
            raise ValueError(
                f"value_and_grad: loss_fn must return scalar sums, got total "
                f"{jnp.shape(each.total)} and weight {jnp.shape(each.weight)} for term {name!r}. "
                "weighted_sum makes them."
            )
    return named


def counts(factor: Any) -> bool:
    """Whether a term has a part in the loss: a coefficient of plain 0 makes it a mere metric."""
    return not (isinstance(factor, int | float) and factor == 0)


def unpacked(out: Any) -> tuple[Any, Any]:
    """The pair that a loss function with auxiliary output returned."""
    if not (isinstance(out, tuple) and len(out) == 2):
        raise TypeError(
            f"value_and_grad: loss_fn must return (sums, aux) when has_aux=True, got "
            f"{described(out)}. Return a pair, or leave has_aux out."
        )
    return out


def described(value: Any) -> str:
    """What somebody returned in place of a sum, in a few words for an error."""
    if isinstance(value, jax.Array):
        return f"{value.dtype}{list(value.shape)}"
    if isinstance(value, Mapping):
        return f"a dict of {', '.join(sorted({described(each) for each in value.values()}))}"
    return type(value).__name__
