"""Optimizers that are given a rank's shards: norms over all of them, and what needs more refused.

In the global view, where training steps call their optimizers, an array is whole whatever it lies
over. Inside a mapped function a rank has its shards alone, and whatever an optimizer makes of
several elements at once, a norm, a count, a mean, it makes of these.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jaxtyping import Array, Float, PyTree

from jax_ddp_weighting.distributed import mesh
from jax_ddp_weighting.distributed.collectives import trace
from jax_ddp_weighting.weighting.dtypes import widen
from jax_ddp_weighting.weighting.param_specs import (
    ParamSpecs,
    check_types,
    name_leaves,
    sharded_axes,
)

Axes = list[frozenset[str]]
"""For each leaf the mapped axes that it is sharded over."""


def global_norm(tree: PyTree, *, param_specs: ParamSpecs | None = None) -> Float[Array, ""]:
    """The norm of all leaves as one vector, in float32 at least, of their shards on all ranks.

    The rule: the squares of a leaf are summed over the mapped axes that its spec names, one
    all-reduce for all leaves that share their axes. Where these axes are not mapped, as in the
    global view of `jit`, leaves are whole, and specs say nothing.

    Args:
        tree: gradients, updates or parameters.
        param_specs: which of them are sharded over mapped axes, as in `value_and_grad`; None for
            none of them.

    Returns:
        A scalar, the same on every rank; 0 of a tree without leaves.

    Raises:
        TypeError: a spec is no `PartitionSpec`.
        ValueError: the specs have another structure; or, where types tell, a leaf varies over an
            axis that its spec does not name and another's does, or does not vary over one that it
            names.

    Matches: `optax.global_norm` of the whole tree (tests/train/test_shards.py).

    Example:
        >>> specs = {"w": jax.sharding.PartitionSpec("data"), "b": jax.sharding.PartitionSpec()}
        >>> def norm(w, b):
        ...     return global_norm({"w": w, "b": b}, param_specs=specs)
        >>> shards = jnp.array([[2.0], [6.0]])  # of two ranks
        >>> jax.vmap(norm, in_axes=(0, None), axis_name="data")(shards, jnp.float32(3)).tolist()
        [7.0, 7.0]
    """
    own = find_axes(param_specs, tree, caller="global_norm", noun="tree")
    return _sum_squares(tree, own)


def clip_by_global_norm(
    max_norm: float, *, param_specs: ParamSpecs | None = None
) -> optax.GradientTransformation:
    """`optax.clip_by_global_norm` for a rank's shards: by the norm of all ranks' shards.

    The rule: updates are scaled by `max_norm / global_norm(updates)` where their norm is at least
    `max_norm`. optax's own, given shards inside a mapped function, takes the norm of these, another
    one on every rank.

    Args:
        max_norm: the largest norm.
        param_specs: which updates are sharded over mapped axes, as in `value_and_grad`. Where these
            axes are not mapped, as in a training step, they say nothing.

    Returns:
        An optax transformation, to be chained with others.

    Raises:
        TypeError: `max_norm` is no number; or as `global_norm` says, when it is called.
        ValueError: `max_norm` is negative or NaN; or the same.

    Matches: `optax.clip_by_global_norm` of optax 0.2.8 on the whole tree
        (tests/train/test_shards.py).

    Example:
        >>> spec = jax.sharding.PartitionSpec("data")
        >>> tx = clip_by_global_norm(1.0, param_specs=spec)
        >>> shards = jnp.array([[3.0], [4.0]])  # of two ranks
        >>> clipped = jax.vmap(lambda g: tx.update(g, tx.init(g))[0], axis_name="data")(shards)
        >>> [round(float(each), 2) for each in clipped[:, 0]]
        [0.6, 0.8]
    """
    if isinstance(max_norm, int | float | np.generic | np.ndarray):  # it may be traced
        if not max_norm >= 0:
            raise ValueError(
                f"clip_by_global_norm: max_norm must be at least 0, got {max_norm}. A negative one"
                " would turn every update round."
            )
    elif not isinstance(max_norm, jax.Array):
        raise TypeError(
            f"clip_by_global_norm: max_norm must be a number, got {type(max_norm).__name__}. Of a"
            " schedule make one with optax.inject_hyperparams."
        )

    def update(
        updates: PyTree, state: optax.OptState, params: PyTree | None = None
    ) -> tuple[PyTree, optax.OptState]:
        del params
        own = find_axes(param_specs, updates, caller="clip_by_global_norm", noun="updates")
        norm = _sum_squares(updates, own)
        is_small = norm < max_norm

        def clip(leaf: Array) -> Array:
            scaled = (leaf / norm.astype(leaf.dtype)) * max_norm
            return jnp.where(is_small, leaf, scaled.astype(leaf.dtype))

        return jax.tree.map(clip, updates), state

    return optax.GradientTransformation(optax.init_empty_state, update)


def find_axes(specs: ParamSpecs | None, tree: PyTree, *, caller: str, noun: str) -> Axes:
    """For each leaf the mapped axes that its spec names, as far as types agree.

    Raises:
        TypeError: a spec is no `PartitionSpec`.
        ValueError: the specs do not fit the tree, or its types.
    """
    own = sharded_axes(specs, tree, caller=caller, noun=noun)
    own = [frozenset(filter(mesh.is_mapped, axes)) for axes in own]
    used = tuple(sorted(frozenset().union(*own)))
    check_types(own, used, tree, name_leaves(tree, noun), caller=caller)
    return own


def _sum_squares(tree: PyTree, own: Axes) -> Array:
    def square(leaf: Any) -> Array:
        leaf = jnp.asarray(leaf)
        leaf = leaf.astype(widen(jnp.float32, leaf.dtype))
        return jnp.sum(jnp.real(leaf * jnp.conj(leaf)))

    squares = list(map(square, jax.tree.leaves(tree)))
    dtype = widen(*(each.dtype for each in squares)) if squares else jnp.float32
    return jnp.sqrt(_sum_over([each.astype(dtype) for each in squares], own))


def _sum_over(numbers: list[Array], own: Axes) -> Array:
    """The sum of scalars of one dtype, each summed over its axes; one all-reduce for all alike."""
    total = jnp.zeros((), jnp.result_type(*numbers) if numbers else float)
    for axes in dict.fromkeys(own):
        parts = [each for each, at in zip(numbers, own, strict=True) if at == axes]
        part = sum(parts[1:], start=parts[0])
        total = total + (lax.psum(part, tuple(sorted(axes))) if axes else part)
    return total


def check_updates(
    update: Callable[..., tuple[PyTree, PyTree]],
    updates: PyTree,
    state: PyTree,
    params: PyTree | None,
    own: Sequence[frozenset[str]],
    *,
    caller: str,
) -> None:
    """Raises `ValueError` for an optimizer that makes something of a rank's shards alone.

    Args:
        update: `update(updates, state, params) -> (updates, state)`.
        updates: shards.
        state: the optimizer's.
        params: shards, or None.
        own: for each leaf of the updates the mapped axes that it is sharded over.
        caller: who speaks in the error.
    """
    every = frozenset().union(*own)
    if not every:
        return
    # of a state it is not known which parameter an array in it belongs to
    of_state = [every if jnp.ndim(leaf) else frozenset() for leaf in jax.tree.leaves(state)]
    of_params = own if params is not None else []
    program = trace(lambda given: update(*given), (updates, state, params))
    partial = program.find_partial([*own, *of_state, *of_params])
    axes = frozenset().union(*partial)
    if axes:
        raise ValueError(
            f"{caller}: optimizer must change shards element by element, got one that makes "
            f"something of several elements, such as a norm, of which each rank of "
            f"{tuple(sorted(axes))} has its own shards' alone. Clip by jax_ddp_weighting's "
            "clip_by_global_norm(max_norm, param_specs=...), or apply the optimizer outside the "
            "mapped function, as make_train_step does. If every rank has a model of its own, pass "
            "param_specs=PartitionSpec()."
        )


def find_typed_axes(updates: PyTree, weight: Any) -> Axes:
    """The same as types tell: the axes over which a leaf varies, and what it weighs does not."""
    common = mesh.varying_axes(weight)
    return [mesh.varying_axes(leaf) - common for leaf in jax.tree.leaves(updates)]


Decide = Callable[..., tuple[Any, PyTree]]
"""`(updates, gradient_step, params) -> (skip, state)`, as optax asks whether to skip an update."""


def decide_over_shards(decide: Decide, own: Axes, *, caller: str) -> Decide:
    """The function, the same on every rank: `optax.skip_not_finite` asked of all ranks' shards.

    Args:
        decide: any such function.
        own: for each leaf of the updates the mapped axes that it is sharded over.
        caller: who speaks in errors.

    Raises:
        ValueError: when it is called, that another one makes something of several elements.
    """
    if not any(own):
        return decide

    def count_not_finite(
        updates: PyTree, step: Array, params: PyTree | None
    ) -> tuple[Array, PyTree]:
        del step, params
        counts = [jnp.sum(~jnp.isfinite(leaf)) for leaf in jax.tree.leaves(updates)]
        count = _sum_over(counts, own)
        return count > 0, {"should_skip": count > 0, "num_not_finite": count}

    def check(updates: PyTree, step: Array, params: PyTree | None) -> tuple[Any, PyTree]:
        program = trace(lambda given: decide(given[0], step, given[1]), (updates, params))
        partial = program.find_partial([*own, *(own if params is not None else [])])
        axes = frozenset().union(*partial)
        if axes:
            raise ValueError(
                f"{caller}: should_skip_update_fn must decide the same on every rank, got one that "
                "makes something of several elements of shards, of which each rank of "
                f"{tuple(sorted(axes))} has its own alone. optax.skip_not_finite is asked of all "
                "shards; others may use jax_ddp_weighting's global_norm(updates, param_specs=...)."
            )
        return decide(updates, step, params)

    return count_not_finite if decide is optax.skip_not_finite else check
