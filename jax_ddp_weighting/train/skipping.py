"""What a step leaves out without a copy of what it leaves alone."""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jaxtyping import Array, Bool, PyTree

T = TypeVar("T")
Leaves = list[Any]


def apply_unless(skipped: Bool[Array, ""], apply: Callable[[T], T], carried: T) -> T:
    """`apply(carried)`, or `carried` as it is; differentiable in all that `apply` is made of.

    A loop of one turn or none, because a loop works in place: `lax.cond` would copy what it is to
    leave alone, parameters and moments, at every step (a tenth of a small step's time on the CPU).
    """
    named, structure = jax.tree_util.tree_flatten_with_path(carried)
    leaves = [leaf for _, leaf in named]

    def apply_flat(*leaves: Any) -> Leaves:
        applied = apply(structure.unflatten(leaves))
        _check_kept(named, applied)
        return jax.tree.leaves(applied)

    hoisted, closed_over = _hoist(apply_flat, leaves)
    return structure.unflatten(_apply_in_loop(hoisted, skipped, leaves, closed_over))


def _check_kept(named: list[tuple[Any, Any]], applied: PyTree) -> None:
    """Raises `TypeError` for what has other shapes or dtypes after one call: it cannot go on so."""
    rule = "train step: optimizer must leave parameters and its state in their shapes and dtypes"
    cure = "Make its state of these very parameters, tx.init(params), and cast what it promotes."
    news = jax.tree.leaves(applied)
    if len(news) != len(named):
        raise TypeError(f"{rule}, got {len(news)} arrays for {len(named)}. {cure}")
    for (path, old), new in zip(named, news, strict=True):
        came, left = jax.typeof(old), jax.typeof(new)
        if (came.shape, came.dtype) != (left.shape, left.dtype) and not came.weak_type:
            raise TypeError(
                f"{rule}, got {left.str_short()} for {came.str_short()} at "
                f"{jax.tree_util.keystr(path)}. {cure}"
            )


def _hoist(
    fn: Callable[..., Leaves], leaves: Leaves
) -> tuple[Callable[[Leaves, Leaves], Leaves], Leaves]:
    """The function with all that it has closed over as an argument, which JAX can differentiate.

    (`jax.closure_convert` leaves integers and keys where they are, and they leak.)
    """
    closed = jax.make_jaxpr(fn)(*leaves)
    # without its constants, as from jax 0.12 on a jaxpr holds them: JAX's caches would keep tracers
    jaxpr = ClosedJaxpr(closed.jaxpr, [None] * len(closed.consts)).jaxpr

    def hoisted(leaves: Leaves, closed_over: Leaves) -> Leaves:
        return jaxpr_as_fun(ClosedJaxpr(jaxpr, closed_over))(*leaves)

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
