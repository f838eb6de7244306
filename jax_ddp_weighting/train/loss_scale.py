"""Loss scaling for float16: flax's `DynamicScale`, where the state of a training step holds one."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax.training.dynamic_scale import DynamicScale
from jaxtyping import Array, Bool, PyTree

_REMEDY = "Keep one as a field of the state: class State(TrainState): dynamic_scale: DynamicScale."


def find_scale(state: Any) -> tuple[str, DynamicScale] | None:
    """The field of a train state that is a `DynamicScale`, whatever its name, and the scale.

    Raises:
        ValueError: there are several, or one that lies deeper or is no part of the pytree: it would
            be passed over without a word.
    """
    leaves = jax.tree_util.tree_leaves_with_path(state, is_leaf=is_scale)
    places = [jax.tree_util.keystr(path) for path, leaf in leaves if is_scale(leaf)]
    fields = dataclasses.fields(state) if dataclasses.is_dataclass(state) else ()
    own = [each.name for each in fields if is_scale(getattr(state, each.name))]
    places += [f".{name} (pytree_node=False)" for name in own if f".{name}" not in places]
    if not places:
        return None
    if places != [f".{name}" for name in own] or len(own) > 1:
        raise ValueError(
            "train step: state must hold one DynamicScale, in a field of its own, got "
            f"{', '.join('state' + place for place in places)}. {_REMEDY}"
        )
    scale = getattr(state, own[0])
    # of a number, an array, or the shape of one, as `lower` takes it
    dtype = getattr(scale.scale, "dtype", None) or jnp.result_type(scale.scale)
    if not jnp.issubdtype(dtype, jnp.floating) or dtype.itemsize < 4:
        raise TypeError(
            f"train step: state.{own[0]} must hold its scale in float32, got {dtype}, in which it "
            "cannot be halved and doubled. Make it of a float: DynamicScale(scale=65536.0)."
        )
    return own[0], scale


def is_scale(node: Any) -> bool:
    """Whether it is a `DynamicScale`."""
    return isinstance(node, DynamicScale)


def are_finite(gradients: PyTree) -> Bool[Array, ""]:
    """Whether no entry of any gradient is infinite or NaN."""
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(each)) for each in jax.tree.leaves(gradients)]))


def update_scale(scale: DynamicScale, finite: Array, skipped: Array) -> DynamicScale:
    """The scale after a step, by flax's own rule; as it was after one that was skipped.

    Args:
        scale: that of the step.
        finite: whether the step's gradient was.
        skipped: whether it had none, because nothing in it has weight: that says nothing about how
            large a scale may be.
    """

    # The rule stands in flax's value_and_grad, which is asked about a gradient of 0 or infinity.
    def stand_in(x: Array) -> Array:
        return x * jnp.where(finite, 0, jnp.inf).astype(x.dtype)

    updated = scale.value_and_grad(stand_in)(jnp.ones((), jnp.float32)).dynamic_scale

    def choose(old: Any, new: Any) -> Array:
        old = jnp.asarray(old)
        return jnp.where(skipped, old, jnp.asarray(new).astype(old.dtype))

    return jax.tree.map(choose, scale, updated)


def check_optimizer_types(old: PyTree, new: PyTree) -> None:
    """Raises `TypeError` for an optimizer's state that gradients in float32 have widened."""
    leaves = jax.tree_util.tree_leaves_with_path(old)
    for (path, before), after in zip(leaves, jax.tree.leaves(new), strict=True):
        if jnp.result_type(before) != jnp.result_type(after):
            raise TypeError(
                "train step: optimizer must keep its state in float32 where a DynamicScale is "
                f"used, got {jnp.result_type(before)} at opt_state"
                f"{jax.tree_util.keystr(path)}, which gradients in float32 make "
                f"{jnp.result_type(after)}. Keep params in float32 and cast them in loss_fn, as "
                "flax's modules do with dtype=jnp.float16; or make the state by tx.init of "
                "parameters cast to float32."
            )
