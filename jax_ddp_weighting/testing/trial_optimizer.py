"""The gradient that a step gave its optimizer: kept by one put in its place, or solved for."""

import copy
from dataclasses import is_dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import PyTree


class TrialState(NamedTuple):
    """What an optimizer on trial keeps.

    Attributes:
        gradient: the sum of all gradients that it was given.
        calls: how often it was called.
    """

    gradient: PyTree
    calls: Any


def put_on_trial(tx: Any) -> Any:
    """An optimizer in place of this one that moves nothing, and keeps what it is given.

    A window stays, with such a one inside it: how it accumulates is on trial too. That is
    `optax.MultiSteps` or `weighted_multi_steps`, whose functions are methods of what holds it.
    """
    trial = optax.GradientTransformationExtraArgs(_init, _update)
    window: Any = tx if isinstance(tx, optax.MultiSteps) else getattr(tx.update, "__self__", None)
    if isinstance(window, optax.MultiSteps):
        # The only place where it keeps its optimizer; there is no public one.
        window = copy.copy(window)
        window._opt = trial
        return window if isinstance(tx, optax.MultiSteps) else window.gradient_transformation()
    # known by its fields, since it lives in a room that this one imports nothing from
    if is_dataclass(window) and hasattr(window, "inner") and hasattr(window, "every_k_steps"):
        window = replace(window, inner=trial)  # pyright: ignore[reportArgumentType]
        return type(tx)(window.init, window.update)
    return trial


def is_window(state: Any) -> bool:
    """Whether this is the state of an optimizer that accumulates gradients over several calls."""
    return hasattr(state, "acc_grads") and hasattr(state, "inner_opt_state")


def holds_window(opt_state: PyTree) -> bool:
    """Whether an optimizer's state holds that of a window anywhere."""
    return any(map(is_window, jax.tree.leaves(opt_state, is_leaf=is_window)))


def count_updates(before: PyTree, after: PyTree) -> list[int]:
    """How many updates were made between two states of an optimizer, by each of its windows.

    Of an optimizer on trial without any, how often it was called.
    """

    def counts_of(opt_state: PyTree) -> list[int]:
        def is_leaf(node: Any) -> bool:
            return is_window(node) or isinstance(node, TrialState)

        found = [node for node in jax.tree.leaves(opt_state, is_leaf=is_leaf) if is_leaf(node)]
        counts = [node.gradient_step if is_window(node) else node.calls for node in found]
        return [int(jax.tree.leaves(each)[0]) for each in counts]  # in nnx each is a variable

    old, new = counts_of(before), counts_of(after)
    if len(old) != len(new):  # the step brought a state of its own
        return []
    return [b - a for a, b in zip(old, new, strict=True)]


def read_trial(opt_state: PyTree) -> list[Any] | None:
    """The leaves of the gradient that an optimizer on trial was given; None if it never was."""

    def is_trial(node: Any) -> bool:
        return isinstance(node, TrialState)

    found = [node for node in jax.tree.leaves(opt_state, is_leaf=is_trial) if is_trial(node)]
    if len(found) != 1 or not np.any(jax.tree.leaves(found[0].calls)[0]):
        return None
    return jax.tree.leaves(found[0].gradient)


def _init(params: PyTree) -> TrialState:
    return TrialState(jax.tree.map(jnp.zeros_like, params), jnp.zeros((), jnp.int32))


def _update(
    updates: PyTree, state: Any, params: PyTree | None = None, **_: Any
) -> tuple[PyTree, TrialState]:
    del params
    gradient = jax.tree.map(
        lambda kept, new: kept + new.astype(kept.dtype), state.gradient, updates
    )
    zeros = jax.tree.map(jnp.zeros_like, updates)
    return zeros, TrialState(gradient, state.calls + 1)


# --- solving for it -------------------------------------------------------------------------------


_REMEDY = (
    "Or run the step for this trial with optax.sgd(1.0) and say learning_rate=1.0, or let it "
    "return its gradient."
)


def undo(
    optimizer: optax.GradientTransformation, params: PyTree, opt_state: PyTree, after: Any
) -> list[np.ndarray]:
    """The gradient with which an optimizer went from one state to another, leaf by leaf.

    The rule: what is affine in the gradient, element by element, gives it back: the update of SGD,
    a trace, Adam's first moment. What is affine is found by calling the optimizer.

    Args:
        optimizer: the transformation that the step applies; under windows the one inside them.
        params: the parameters before the step.
        opt_state: the optimizer's state before the step.
        after: parameters and optimizer's state after it.

    Raises:
        ValueError: the optimizer has windows; the states are none of this optimizer; no part of
            them is affine in the gradient; or another gradient explains one part than another.
    """
    new_params, new_state = after
    own = jax.eval_shape(optimizer.init, params)
    if is_window(own):
        raise ValueError(
            "diagnose_step: optimizer must be the one inside the windows, got one that accumulates "
            "itself, as weighted_multi_steps and optax.MultiSteps do. Give what it was made of."
        )
    structure = jax.tree.structure(own)
    old, new = (_find_own(each, structure) for each in (opt_state, new_state))
    moved = jax.tree.map(lambda a, b: jnp.asarray(b) - jnp.asarray(a), params, new_params)
    observed = [*_find_like(new, params), jax.tree.leaves(moved)]

    def call(gradient: list[Any]) -> list[list[Any]]:
        given = jax.tree.unflatten(jax.tree.structure(params), gradient)
        updates, state = optimizer.update(given, old, params)
        return [*_find_like(state, params), jax.tree.leaves(updates)]

    rng = np.random.default_rng(0)
    leaves = list(map(jnp.asarray, jax.tree.leaves(params)))
    # two that are large and differ, since a clip lets small ones pass
    tried = [
        [jnp.asarray(scale * rng.normal(size=leaf.shape), leaf.dtype) for leaf in leaves]
        for scale in (1.0, 30.0)
    ]
    at_zero = call([jnp.zeros_like(leaf) for leaf in leaves])
    at_one = call([jnp.ones_like(leaf) for leaf in leaves])
    found = list(map(call, tried))
    for i, seen in enumerate(observed):
        slopes = [_as_float(b) - _as_float(a) for a, b in zip(at_zero[i], at_one[i], strict=True)]
        affine = all(
            np.allclose(_as_float(at), _as_float(a) + slope * _as_float(g), rtol=1e-3, atol=1e-6)
            for each, given in zip(found, tried, strict=True)
            for at, a, slope, g in zip(each[i], at_zero[i], slopes, given, strict=True)
        )
        if not affine or not all(np.all(slope) for slope in slopes):
            continue
        solved = [
            (_as_float(leaf) - _as_float(a)) / slope
            for leaf, a, slope in zip(seen, at_zero[i], slopes, strict=True)
        ]
        _check_explains(call, solved, observed)
        return solved
    raise ValueError(
        "diagnose_step: optimizer must leave its gradient where it can be read, as SGD, momentum "
        f"and Adam do, got one of which nothing is proportional to it. {_REMEDY}"
    )


def _check_explains(call: Any, solved: list[np.ndarray], observed: list[list[Any]]) -> None:
    """Raises unless the optimizer does with this gradient what the step was seen to do."""
    again = call([jnp.asarray(each, jnp.result_type(float)) for each in solved])
    for own, seen in zip(again, observed, strict=True):
        gap = [_as_float(a) - _as_float(b) for a, b in zip(own, seen, strict=True)]
        size = np.sqrt(sum(np.sum(_as_float(each) ** 2) for each in seen))
        if np.sqrt(sum(np.sum(each**2) for each in gap)) > 0.02 * size:
            raise ValueError(
                "diagnose_step: optimizer must be the one that the step applies, once, got one "
                f"that moves from the same state to another. {_REMEDY}"
            )


def _find_own(opt_state: PyTree, structure: Any) -> PyTree:
    """The state of the optimizer itself, inside of windows."""
    while jax.tree.structure(opt_state) != structure and is_window(opt_state):
        opt_state = opt_state.inner_opt_state
    if jax.tree.structure(opt_state) != structure:
        raise ValueError(
            "diagnose_step: optimizer must be the one that the step's state belongs to, got one "
            f"whose state is {structure} for {jax.tree.structure(opt_state)}. {_REMEDY}"
        )
    return opt_state


def _find_like(state: PyTree, params: PyTree) -> list[list[Any]]:
    """The parts of an optimizer's state that hold one number for each parameter, as leaves."""
    structure, shapes = jax.tree.structure(params), list(map(np.shape, jax.tree.leaves(params)))

    def is_like(node: Any) -> bool:
        if jax.tree.structure(node) != structure:
            return False
        return list(map(np.shape, jax.tree.leaves(node))) == shapes

    nodes = jax.tree.leaves(state, is_leaf=is_like)
    return [jax.tree.leaves(node) for node in nodes if is_like(node)]


def _as_float(leaf: Any) -> np.ndarray:
    return np.asarray(leaf, float)
