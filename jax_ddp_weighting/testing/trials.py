"""A step run once on copies, whatever it carries, and the gradient that it applied there."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from jax_ddp_weighting.data.batch import Batch
from jax_ddp_weighting.testing.trial_optimizer import (
    count_updates,
    holds_window,
    put_on_trial,
    read_trial,
    undo,
)

Gradient = Callable[[Callable[..., Any], Sequence[Batch], tuple[Any, ...]], list[Any]]
"""`(step, batches, rest) -> leaves`: the gradient that one run of a step applied, `rest` being what
it is given beside what it carries and a batch."""


def prepare_trial(
    state: Any, *, learning_rate: float | None, optimizer: Any
) -> tuple[Any, Any, Gradient]:
    """The parameters of what a step carries, which variables they are, and how it is run.

    Args:
        state: parameters, a train state, `(params, opt_state)` where an optimizer is given, an
            `nnx.Module`, or one and its `nnx.Optimizer`.
        learning_rate: that of a step of plain SGD, or None.
        optimizer: the optax optimizer that the step applies, or None.
    """
    from flax import nnx  # here: most of this needs no flax

    if isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], nnx.Optimizer):
        return state[0], state[1].wrt, _of_pair(*state, learning_rate)
    if isinstance(state, nnx.Module):
        return state, nnx.Param, _of_module(state, learning_rate)
    if hasattr(state, "params") and hasattr(state, "opt_state"):
        own: Any = state
        return own.params, None, _of_train_state(own, learning_rate, optimizer)
    if optimizer is not None:
        if not (isinstance(state, tuple) and len(state) == 2):
            raise TypeError(
                "diagnose_step: params must be (params, opt_state) where optimizer is given, got "
                f"{type(state).__name__}. The step is called with both and the batch, and returns "
                "both."
            )
        return state[0], None, _of_parts(*state, optimizer)
    return state, None, _of_params(state, learning_rate)


def copy_tree(tree: PyTree) -> PyTree:
    """Copies of all arrays, which a step may write into or donate."""

    def copy(leaf: Any) -> Any:
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            data = jnp.copy(jax.random.key_data(leaf))
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
        if isinstance(leaf, jax.Array):
            return jnp.copy(leaf)
        return np.copy(leaf) if isinstance(leaf, np.ndarray) else leaf

    return jax.tree.map(copy, tree)


# --- parameters alone -----------------------------------------------------------------------------


def _of_params(params: PyTree, learning_rate: float | None) -> Gradient:
    structure = jax.tree.structure(params)

    def gradient(step: Any, batches: Sequence[Batch], rest: tuple[Any, ...]) -> list[Any]:
        if learning_rate is None and len(batches) > 1:
            raise ValueError(
                "diagnose_step: calls must be 1 for a step that returns its gradient, got "
                f"{len(batches)}. Which of them is applied is not known; sum them up in a function "
                "of the whole batch, or give the optimizer's state too."
            )
        result = params
        for batch in batches:
            result = step(*copy_tree((result, batch, *rest)))
            if jax.tree.structure(result) != structure and isinstance(result, tuple) and result:
                result = result[0]  # (parameters, metrics), as most steps return it
            if jax.tree.structure(result) != structure:
                raise ValueError(
                    "diagnose_step: step must return the parameters, or the gradient where there "
                    "is no learning_rate, in the structure of params, got "
                    f"{jax.tree.structure(result)} for {structure}. Return them alone, or first in "
                    "a tuple; a train state goes in and out as it is."
                )
        return (
            jax.tree.leaves(result)
            if learning_rate is None
            else _undo_sgd(params, result, learning_rate)
        )

    return gradient


def _undo_sgd(before: PyTree, after: PyTree, learning_rate: float) -> list[np.ndarray]:
    pairs = zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
    return [(np.asarray(a, float) - np.asarray(b, float)) / learning_rate for a, b in pairs]


# --- train states ---------------------------------------------------------------------------------


def _of_train_state(state: Any, learning_rate: float | None, optimizer: Any) -> Gradient:
    def run(start: Any, step: Any, batches: Sequence[Batch], rest: tuple[Any, ...]) -> Any:
        for batch in batches:
            start = _find_state(step(*copy_tree((start, batch, *rest))), type(state))
        return start

    def try_trial(tx: Any, step: Any, batches: Any, rest: tuple[Any, ...]) -> list[Any] | None:
        trial = put_on_trial(tx)
        start = state.replace(tx=trial, opt_state=trial.init(copy_tree(state.params)))
        _check_window(state.opt_state, start.opt_state)
        try:
            after = run(start, step, batches, rest)
        except Exception:  # whatever it is: the step may hold an optimizer of its own
            return None
        _check_updates(start.opt_state, after.opt_state, len(batches))
        return read_trial(after.opt_state)

    def gradient(step: Any, batches: Sequence[Batch], rest: tuple[Any, ...]) -> list[Any]:
        if learning_rate is not None:
            after = run(state, step, batches, rest)
            _check_updates(state.opt_state, after.opt_state, len(batches))
            return _undo_sgd(state.params, after.params, learning_rate)
        tx = getattr(state, "tx", None)
        if optimizer is None and tx is not None and hasattr(state, "replace"):
            found = try_trial(tx, step, batches, rest)
            if found is not None:
                return found
        applied = tx if optimizer is None else optimizer
        if applied is None:
            raise ValueError(
                "diagnose_step: optimizer must be given where the state holds none, got None for "
                f"{type(state).__name__}. It is the optax optimizer that the step applies."
            )
        after = run(state, step, batches, rest)
        _check_updates(state.opt_state, after.opt_state, len(batches))
        return undo(
            applied,
            state.params,
            state.opt_state,
            (after.params, after.opt_state),
        )

    return gradient


def _check_window(opt_state: PyTree, on_trial: PyTree) -> None:
    if holds_window(opt_state) and not holds_window(on_trial):
        raise ValueError(
            "diagnose_step: state must keep its window where its optimizer is put on trial, got "
            "one inside of other transformations. Build the state for this trial with "
            "optax.sgd(1.0) as the window's own optimizer, and say learning_rate=1.0."
        )


def _check_updates(before: PyTree, after: PyTree, calls: int) -> None:
    """Raises unless every window has closed once; or what is on trial was called once a call."""
    counts = count_updates(before, after)
    if holds_window(after) and not all(counts):
        raise ValueError(
            "diagnose_step: calls must be as many as the optimizer accumulates, got fewer: its "
            "window has not closed. Say calls=k for optax.MultiSteps(..., every_k_schedule=k) or "
            "weighted_multi_steps(..., k)."
        )
    most = max(counts, default=1)
    # a step of one call may well update several times, as it goes over its own microbatches
    if most > 1 and (calls > 1 or holds_window(after)):
        rest = calls % most
        remedy = f"Say calls={calls // most}." if not rest else "Give the rows of one update."
        raise ValueError(
            f"diagnose_step: calls must make one update, got {calls} that make {most}. {remedy}"
        )


def _find_state(result: Any, kind: type) -> Any:
    """The state that a step returned, alone or in a tuple."""
    if isinstance(result, kind):
        return result
    found = [each for each in result if isinstance(each, kind)] if isinstance(result, tuple) else []
    if len(found) != 1:
        raise ValueError(
            f"diagnose_step: step must return the {kind.__name__}, alone or in a tuple, got "
            f"{type(result).__name__} with {len(found)} of them. (state, metrics) is usual."
        )
    return found[0]


# --- parameters and the optimizer's state ---------------------------------------------------------


def _of_parts(params: PyTree, opt_state: PyTree, optimizer: Any) -> Gradient:
    def gradient(step: Any, batches: Sequence[Batch], rest: tuple[Any, ...]) -> list[Any]:
        carried = params, opt_state
        for batch in batches:
            result = step(*copy_tree((*carried, batch, *rest)))
            carried = _find_parts(result, carried)
        _check_updates(opt_state, carried[1], len(batches))
        return undo(optimizer, params, opt_state, carried)

    return gradient


def _find_parts(result: Any, carried: tuple[Any, Any]) -> tuple[Any, Any]:
    """The parameters and the optimizer's state among what a step returned, in this order."""
    returned = list(result) if isinstance(result, tuple) else [result]
    found = []
    for name, own in zip(("params", "opt_state"), carried, strict=True):
        place = next((i for i, each in enumerate(returned) if _is_alike(each, own)), None)
        if place is None:
            raise ValueError(
                f"diagnose_step: step must return {name} as it was given, in a tuple, got "
                f"{jax.tree.structure(result)}. (params, opt_state, metrics) is usual."
            )
        found.append(returned.pop(place))
    return found[0], found[1]


def _is_alike(one: Any, other: Any) -> bool:
    if jax.tree.structure(one) != jax.tree.structure(other):
        return False
    shapes = [list(map(np.shape, jax.tree.leaves(each))) for each in (one, other)]
    return shapes[0] == shapes[1]


# --- nnx ------------------------------------------------------------------------------------------


def _copy_nodes(*nodes: Any) -> Any:
    """Copies of nnx modules that share nothing with them, and among themselves what they did."""
    from flax import nnx

    graph, state = nnx.split(nodes)
    return nnx.merge(graph, copy_tree(state))


def _of_module(model: Any, learning_rate: float | None) -> Gradient:
    from flax import nnx

    def gradient(step: Any, batches: Sequence[Batch], rest: tuple[Any, ...]) -> list[Any]:
        (own,) = _copy_nodes(model)
        before = copy_tree(nnx.state(own, nnx.Param))
        result = None
        for batch in batches:
            result = step(own, *copy_tree((batch, *rest)))
        if learning_rate is not None:
            return _undo_sgd(before, nnx.state(own, nnx.Param), learning_rate)
        if isinstance(result, tuple) and result and not isinstance(result, nnx.State):
            result = result[0]
        if jax.tree.structure(nnx.as_pure(result)) != jax.tree.structure(nnx.as_pure(before)):
            raise ValueError(
                "diagnose_step: step must return the gradient of the model's nnx.Params where "
                f"there is neither an optimizer nor a learning_rate, got {type(result).__name__}. "
                "Give (model, optimizer) in place of the model for step(model, optimizer, batch)."
            )
        return jax.tree.leaves(result)

    return gradient


def _of_pair(model: Any, optimizer: Any, learning_rate: float | None) -> Gradient:
    from flax import nnx

    def gradient(step: Any, batches: Sequence[Batch], rest: tuple[Any, ...]) -> list[Any]:
        own, theirs = _copy_nodes(model, optimizer)
        if learning_rate is None:
            trial = put_on_trial(optimizer.tx)
            theirs = type(optimizer)(own, trial, wrt=optimizer.wrt)
            _check_window(optimizer.opt_state, theirs.opt_state)
        before, opt_state = copy_tree((nnx.state(own, optimizer.wrt), theirs.opt_state))
        for batch in batches:
            step(own, theirs, *copy_tree((batch, *rest)))
        _check_updates(opt_state, theirs.opt_state, len(batches))
        if learning_rate is not None:
            return _undo_sgd(before, nnx.state(own, optimizer.wrt), learning_rate)
        found = read_trial(theirs.opt_state)
        if found is None:
            raise ValueError(
                "diagnose_step: step must call the optimizer that it is given, got one that did "
                "not. Say learning_rate where it is plain SGD, or let it return its gradient."
            )
        return found

    return gradient
