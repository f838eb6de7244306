"""What a step leaves out without a copy of what it leaves alone."""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jaxtyping import Array, Bool

T = TypeVar("T")
Leaves = list[Any]


def apply_unless(skipped: Bool[Array, ""], apply: Callable[[T], T], carried: T) -> T:
    """`apply(carried)`, or `carried` as it is; differentiable in all that `apply` is made of.

    A loop of one turn or none, because a loop works in place: `lax.cond` would copy what it is to
    leave alone, parameters and moments, at every step (a tenth of a small step's time on the CPU).
    """
    leaves, structure = jax.tree.flatten(carried)
    apply_flat, closed_over = _hoist(
        lambda *flat: jax.tree.leaves(apply(structure.unflatten(flat))), leaves
    )
    return structure.unflatten(_apply_in_loop(apply_flat, skipped, leaves, closed_over))


def _hoist(
    fn: Callable[..., Leaves], leaves: Leaves
) -> tuple[Callable[[Leaves, Leaves], Leaves], Leaves]:
    """The function with all that it has closed over as an argument, which JAX can differentiate.

    (`jax.closure_convert` leaves integers and keys where they are, and they leak.)
    """
    closed = jax.make_jaxpr(fn)(*leaves)

    def hoisted(leaves: Leaves, closed_over: Leaves) -> Leaves:
        return jaxpr_as_fun(ClosedJaxpr(closed.jaxpr, closed_over))(*leaves)

    return hoisted, closed.consts


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _apply_in_loop(apply: Any, skipped: Array, leaves: Leaves, closed_over: Leaves) -> Leaves:
    def turn(loop: tuple[Array, Leaves]) -> tuple[Array, Leaves]:
        return jnp.zeros_like(loop[0]), apply(loop[1], closed_over)

    return jax.lax.while_loop(lambda loop: loop[0], turn, (~skipped, leaves))[1]


@_apply_in_loop.defjvp
def _differentiate(apply: Any, primals: Any, tangents: Any) -> tuple[Leaves, Leaves]:
    # Only where somebody differentiates: JAX cannot go backwards through a loop of unknown length.
    skipped, *arguments = primals

    def choose(leaves: Leaves, closed_over: Leaves) -> Leaves:
        return jax.lax.cond(skipped, lambda x: x, lambda x: apply(x, closed_over), leaves)

    return jax.jvp(choose, tuple(arguments), tuple(tangents[1:]))
