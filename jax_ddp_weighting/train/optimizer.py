"""What a training step tells an optimizer, lets it see, and reports of it."""

import re
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, PyTree
from optax.contrib import DifferentiallyPrivateAggregateState

from jax_ddp_weighting.train.accumulation import (
    WeightedMultiStepsState,
    accept_keywords,
    counts_windows,
    is_window,
    window_weight,
)
from jax_ddp_weighting.train.skipping import apply_unless
from jax_ddp_weighting.train.step import StepReport
from jax_ddp_weighting.train.step_options import StepOptions
from jax_ddp_weighting.weighting.loss_terms import has_gradient

T = TypeVar("T")

Evaluate = Callable[[PyTree], tuple[Array, PyTree]]
"""`params -> (value, gradients)`: the global loss of a step's batch at any parameters."""


def run_optimizer(
    tx: Any,
    opt_state: PyTree,
    offered: dict[str, Any],
    given: Mapping[str, Any],
    skipped: Array,
    apply: Callable[[Any, T], T],
    carried: T,
    held: Array | None = None,
) -> tuple[T, Array]:
    """What is carried after one call of an optimizer, and whether that call stepped.

    Args:
        tx: the optimizer.
        opt_state: its state, of which only the structure is looked at.
        offered: extra arguments for it, as far as it takes them; see `make_arguments`.
        given: extra arguments that the step was given for it.
        skipped: whether the step has no weight. Then the optimizer is called only if it has a
            window, in which an empty microbatch has its place.
        apply: `apply(optimizer, carried) -> carried`, which calls the optimizer that it is given.
        carried: what is passed through.
        held: whether the optimizer is not called at all, window or not; None is never.
    """

    def call(pair: tuple[T, Array]) -> tuple[T, Array]:
        once = _OneCall(tx, offered, given, skipped)
        carried = apply(optax.GradientTransformationExtraArgs(tx.init, once.update), pair[0])
        return carried, once.stepped

    pair = carried, jnp.zeros((), bool)
    if counts_windows(opt_state):
        return call(pair) if held is None else apply_unless(held, call, pair)
    return apply_unless(skipped if held is None else skipped | held, call, pair)


class _OneCall:
    """An optimizer's `update`, given what a step knows, and a note of whether it stepped."""

    def __init__(
        self, tx: Any, offered: dict[str, Any], given: Mapping[str, Any], skipped: Array
    ) -> None:
        self.tx, self.offered, self.given, self.skipped = tx, offered, given, skipped
        self.stepped = ~skipped

    def update(
        self, updates: PyTree, state: PyTree, params: PyTree | None = None
    ) -> tuple[PyTree, PyTree]:
        updates, new_state = self._update(updates, state, params, self.offered)
        if counts_windows(state):
            updates, new_state, self.stepped = _keep_windows_alone(
                state, new_state, updates, ~self.skipped
            )
        self.stepped &= ~_is_rejected(new_state, updates)
        return updates, new_state

    def _update(
        self, updates: PyTree, state: PyTree, params: PyTree | None, offered: dict[str, Any]
    ) -> tuple[PyTree, PyTree]:
        arguments = {**offered, **self.given}
        if "value_fn" in arguments:
            arguments["value_fn"] = accept_keywords(arguments["value_fn"], arguments)
        try:
            return self.tx.update(updates, state, params, **arguments)
        except TypeError as error:
            # Some of optax's own, such as sam, take no arguments but theirs, and a chain hands on
            # all that it is given: what is refused is not offered.
            refused = re.search(r"unexpected keyword argument '(\w+)'", str(error))
            if refused is None or refused[1] not in offered:
                raise
            left = {name: each for name, each in offered.items() if name != refused[1]}
        return self._update(updates, state, params, left)


def make_arguments(
    tx: Any,
    opt_state: PyTree,
    report: StepReport,
    gradients: PyTree,
    evaluate: Evaluate,
    options: StepOptions,
) -> dict[str, Any]:
    """The extra arguments that an optimizer is given by a step, as far as it takes any.

    All of them are the whole step's: `value` and `grad` over all ranks, `value_fn` and `grad_fn`
    as functions of the parameters for this step's batch, `terms` by name, and for windows the
    `weight`.
    """
    arguments: dict[str, Any] = {}
    if counts_windows(opt_state):
        _check_window_options(options)
        arguments["weight"] = window_weight(report.loss.terms, options.coefficients)
    if not isinstance(tx, optax.GradientTransformationExtraArgs):
        return arguments
    return arguments | {
        "value": report.loss.value,
        "grad": gradients,
        "terms": report.loss.terms,
        # a pytree without leaves, because line searches carry what they are given through loops
        "grad_fn": jax.tree_util.Partial(lambda params, *_: evaluate(params)[1]),
        "value_fn": _make_value_fn(evaluate),
    }


def _check_window_options(options: StepOptions) -> None:
    factors = options.coefficients or {"loss": 1.0}
    given = [name for name in options.divisors or () if has_gradient(factors[name])]
    if given:
        raise ValueError(
            f"train step: divisors must be left out under weighted_multi_steps, got one for "
            f"{given[0]!r}. A window is divided by the weights of its steps, and a divisor of one "
            "step is none of the window: split the batch with microbatches= instead."
        )
    if not options.skip_empty:
        raise ValueError(
            "train step: skip_empty must be True under weighted_multi_steps, got False. A batch "
            "without weight has its place in the window, and a window without weight does not "
            "step: split the batch with microbatches= instead."
        )


def _make_value_fn(evaluate: Evaluate) -> Callable[[PyTree], Array]:
    """The loss as a function whose derivative is the step's gradient, not one through its parts."""

    @jax.custom_vjp
    def value_fn(params: PyTree) -> Array:
        return evaluate(params)[0]

    def pull_back(gradients: PyTree, cotangent: Array) -> tuple[PyTree]:
        return (jax.tree.map(lambda g: (g * cotangent).astype(g.dtype), gradients),)

    def forward(params: PyTree) -> tuple[Array, PyTree]:
        value, gradients = evaluate(params)
        # a derivative has its parameter's dtype, where a loss scale may have given a wider gradient
        return value, jax.tree.map(lambda g, p: g.astype(p.dtype), gradients, params)

    value_fn.defvjp(forward, pull_back)
    return value_fn


def check_optimizer(tx: Any, opt_state: PyTree, given: Mapping[str, Any]) -> None:
    """Raises `TypeError` for an optimizer that counts wrongly, or takes less than it is given."""
    for node in jax.tree.leaves(opt_state, is_leaf=_wants_examples):
        if _wants_examples(node):
            raise TypeError(
                "train step: optimizer must take the gradient of the whole batch, got "
                "optax.contrib.differentially_private_aggregate, which takes the first dimension "
                "of each parameter for examples. Clip each example's own gradient, "
                "per_example_gradients(...), in a loop of your own."
            )
    for node in jax.tree.leaves(opt_state, is_leaf=_counts_calls):
        if _counts_calls(node):
            name = "MultiSteps" if isinstance(node, optax.MultiStepsState) else "apply_every"
            raise TypeError(
                f"train step: optimizer must count microbatches as their weight, got optax.{name}, "
                "which gives each of them one vote. Use weighted_multi_steps(optimizer, k) in its "
                "place, or split each batch with microbatches=."
            )
    if given and not isinstance(tx, optax.GradientTransformationExtraArgs):
        raise TypeError(
            f"train step: optimizer must take extra arguments to be given {sorted(given)}, got "
            f"{type(tx).__name__}. weighted_multi_steps, for one, takes flush."
        )


def _wants_examples(node: Any) -> bool:
    return isinstance(node, DifferentiallyPrivateAggregateState)


def _counts_calls(node: Any) -> bool:
    return isinstance(node, optax.MultiStepsState | optax.ApplyEvery)


def _is_rejected(state: PyTree, updates: PyTree) -> Array:
    """Whether `optax.apply_if_finite` has left out an update, as it reports itself."""
    verdicts: list[Array] = []

    def look(node: Any) -> bool:
        if isinstance(node, optax.ApplyIfFiniteState):
            verdicts.append(~node.last_finite)
        return False

    jax.tree.leaves(state, is_leaf=look)
    if not verdicts:
        return jnp.zeros((), bool)
    # it gives in after some errors in a row: then the verdict is the same, and the updates are not
    zero = [jnp.all(leaf == 0) for leaf in jax.tree.leaves(updates)]
    return jnp.any(jnp.stack(verdicts)) & jnp.all(jnp.stack(zero))


# --- windows beside other parts of an optimizer ---------------------------------------------------


def _keep_windows_alone(
    old: PyTree, new: PyTree, updates: PyTree, live: Array
) -> tuple[PyTree, PyTree, Array]:
    """The updates and the state that a call may leave, and whether it stepped.

    The rule: a batch without weight is there for windows alone. What comes before a window in a
    chain, or beside it in a partition, keeps its state, and its parameters stay; what comes after a
    window that closes sees the window's gradient, and goes on.
    """
    state, stepped = _merge(old, new, live)
    leaves, structure = jax.tree.flatten(updates)
    windows = [
        (closed.gradient_step != opened.gradient_step, _find_covered(closed, structure))
        for opened, closed in zip(*map(_find_windows, (old, new)), strict=True)
    ]
    moved = []
    for i, leaf in enumerate(leaves):
        over_it = [steps for steps, covered in windows if covered[i]]
        moves = jnp.any(jnp.stack([live, *over_it]))
        moved.append(jnp.where(moves, leaf, jnp.zeros((), leaf.dtype)))
        if not over_it:  # a parameter of no window steps with every batch
            stepped |= live
    return structure.unflatten(moved), state, stepped


def _merge(old: PyTree, new: PyTree, live: Array) -> tuple[PyTree, Array]:
    """The new state where it is given anything of weight, else the old; whether a window stepped.

    `live` says whether what comes in has weight.
    """
    if is_window(new):
        stepped = new.gradient_step != old.gradient_step
        if counts_windows(new.inner_opt_state):
            stepped &= _merge(old.inner_opt_state, new.inner_opt_state, stepped)[1]
        return new, stepped
    if not counts_windows(new):
        return jax.tree.map(lambda a, b: jnp.where(live, b, a), old, new), jnp.zeros((), bool)
    olds, _ = jax.tree.flatten(old, is_leaf=lambda node: node is not old)
    news, structure = jax.tree.flatten(new, is_leaf=lambda node: node is not new)
    merged = list(news)
    stepped = jnp.zeros((), bool)
    in_order = type(new) is tuple or isinstance(new, OrderedDict)  # optax's chain, named_chain
    beside = isinstance(new, dict) and not in_order  # the groups of optax.partition
    order = range(len(news))
    if not (in_order or beside):  # a wrapper counts calls: last, once it is known what is inside
        order = sorted(order, key=lambda i: not counts_windows(news[i]))
    for i in order:
        lives = live if beside else live | stepped
        merged[i], inside = _merge(olds[i], news[i], lives)
        stepped |= inside
    return structure.unflatten(merged), stepped


def _find_windows(state: PyTree) -> list[WeightedMultiStepsState]:
    return [node for node in jax.tree.leaves(state, is_leaf=is_window) if is_window(node)]


def _find_covered(window: WeightedMultiStepsState, structure: Any) -> list[bool]:
    """For each parameter of the optimizer whether the window accumulates its gradient."""

    def is_masked(node: Any) -> bool:
        return isinstance(node, optax.MaskedNode)

    nodes, own = jax.tree.flatten(window.acc_grads, is_leaf=is_masked)
    if own != structure:  # as inside optax.flatten: one array of all parameters
        return [True] * structure.num_leaves
    return [not is_masked(node) for node in nodes]
