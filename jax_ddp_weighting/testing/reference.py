"""What is right for a loss that needs all rows at once: its value and gradient on one device."""

import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from jax_ddp_weighting.data.batch import Batch
from jax_ddp_weighting.weighting.counts import to_divisor
from jax_ddp_weighting.weighting.divisors import Divisors, apply_divisors
from jax_ddp_weighting.weighting.loss_terms import (
    describe,
    has_gradient,
    is_number,
    name_sums,
    name_terms,
)
from jax_ddp_weighting.weighting.sums import divide


def take_reference(
    reference: Callable[..., Any],
    given: tuple[PyTree, Any, PyTree],
    batch: Batch,
    *,
    coefficients: Mapping[str, Any] | None,
    divisors: Divisors | None,
) -> dict[str, PyTree]:
    """The loss and the gradients of a reference, as those of a gradient on trial are compared.

    Args:
        reference: `reference(params, batch, [rng], [state=state])` returns a scalar, or sums; in a
            tuple, what is first.
        given: parameters, a key or None, a state or None.
        batch: the whole batch.
        coefficients: one factor per term, where it returns several.
        divisors: what terms are divided by that have a divisor.

    Raises:
        TypeError: it returns something else.
    """
    params, rng, state = given
    positional = () if rng is None else (rng,)
    keywords = {} if state is None else {"state": state}

    def value_of(params: PyTree) -> Array:
        out: Any = reference(params, batch, *positional, **keywords)
        out = out[0] if isinstance(out, tuple) and out else out
        if name_sums(out) is not None:
            return combine_terms(out, coefficients, divisors)
        if not is_number(out, real=True) or jnp.shape(out) != ():
            raise TypeError(
                "check_gradients: reference must return a scalar, or sums as loss_fn does, got "
                f"{describe(out)}. It is the loss of the whole batch, in plain JAX."
            )
        return jnp.asarray(out)

    value, gradients = jax.value_and_grad(value_of)(params)
    return {"loss": value, "params": gradients}


def combine_terms(
    sums: Any, coefficients: Mapping[str, Any] | None, divisors: Divisors | None
) -> Array:
    """The loss that the sums of a whole batch come to."""
    terms = name_terms(sums, coefficients, caller="check_gradients")
    weights = {name: to_divisor(each.weight) for name, each in terms.items()}
    weights |= apply_divisors(divisors or {}, weights, replicated=None, axis_name=None)
    factors = coefficients or {"loss": 1.0}
    means = [
        factors[name] * divide(each.total, weights[name])
        for name, each in terms.items()
        if has_gradient(factors[name])
    ]
    return reduce(operator.add, means)


@contextmanager
def explain_axis() -> Iterator[None]:
    """Says what to do about a loss that uses an axis where none is mapped.

    Raises:
        ValueError: in place of JAX's own error.
    """
    try:
        yield
    except NameError as error:
        if "unbound axis" not in str(error):
            raise
        raise ValueError(
            "check_gradients: loss_fn must not use an axis where none is mapped, got "
            f"{str(error).splitlines()[0]!r}. Of a loss that needs the rows of all ranks, say what "
            "is right: reference=, the same of the whole batch on one device; and leave 'jit' out "
            "of engines, where there is no axis."
        ) from None
