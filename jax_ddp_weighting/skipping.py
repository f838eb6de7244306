"""What is applied, or left as it is: an optimizer step that may have nothing to apply."""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

T = TypeVar("T")


def applied_unless(skipped: Bool[Array, ""], apply: Callable[[T], T], carried: T) -> T:
    """`apply(carried)`, or `carried` as it is.

    A loop of one turn or none, because a loop works in place: `lax.cond` would copy what it is to
    leave alone, parameters and moments, at every step (a tenth of a small step's time on the CPU).
    """

    def turn(loop: tuple[Array, T]) -> tuple[Array, T]:
        return jnp.zeros_like(loop[0]), apply(loop[1])

    return jax.lax.while_loop(lambda loop: loop[0], turn, (~skipped, carried))[1]
