"""Gradient accumulation for optax in which every microbatch counts as its weight."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int, PyTree

from jax_ddp_weighting._arguments import check_integer, check_weights
from jax_ddp_weighting.distributed import mesh
from jax_ddp_weighting.weighting.loss_terms import has_gradient
from jax_ddp_weighting.weighting.sums import WeightedSum, divide

T = TypeVar("T")


def apply_unless(skipped: Bool[Array, ""], apply: Callable[[T], T], carried: T) -> T:
    """`apply(carried)`, or `carried` as it is.

    A loop of one turn or none, because a loop works in place: `lax.cond` would copy what it is to
    leave alone, parameters and moments, at every step (a tenth of a small step's time on the CPU).
    """

    def turn(loop: tuple[Array, T]) -> tuple[Array, T]:
        return jnp.zeros_like(loop[0]), apply(loop[1])

    return jax.lax.while_loop(lambda loop: loop[0], turn, (~skipped, carried))[1]


class WeightedMultiStepsState(NamedTuple):
    """The state of `weighted_multi_steps`; named as `optax.MultiStepsState` where it is the same.

    Attributes:
        mini_step: microbatches taken into the open window.
        gradient_step: steps that the inner optimizer has taken.
        weight: the weight of the open window, float32 (float64 under x64).
        acc_grads: the sum of weight times gradient over the open window, at least float32, each
            leaf placed as its parameter is.
        inner_opt_state: the state of the inner optimizer.
    """

    mini_step: Int[Array, ""]
    gradient_step: Int[Array, ""]
    weight: Float[Array, ""]
    acc_grads: PyTree
    inner_opt_state: PyTree


def weighted_multi_steps(
    optimizer: optax.GradientTransformation,
    every_k_steps: int | Callable[[Any], Any],
    *,
    gradients_of: str = "mean",
) -> optax.GradientTransformationExtraArgs:
    """One optimizer step per window of `k` microbatches, each of which counts as its weight.

    The rule: the inner optimizer is given `sum(weight * gradient) / sum(weight)` over the window,
    once, when the window closes; until then updates are zero. So clipping inside `optimizer` clips
    the window's mean, and schedules inside it count real steps. A window without weight does not
    touch the inner optimizer at all.

    `update(updates, state, params, *, weight, flush=False)` takes, beside what optax hands it:

    - `weight`: a scalar of at least 0, the microbatch's weight over all ranks. `updates` is the
      gradient of the microbatch's weighted mean over all ranks, as `value_and_grad` returns it
      beside `loss.terms["loss"].weight`. A gradient of weight 0 counts for nothing, even as NaN.
    - `flush`: a bool, traced or not, that closes the window with this microbatch, such as the last
      one of an epoch; the window is divided by the weight that it has, whatever its length.

    What `optax.MultiSteps` does otherwise: it gives every microbatch one vote, keeps a short last
    window waiting for the next epoch, and runs the inner optimizer for every microbatch, to throw
    the result away. On microbatch means 1 (one token) and 3 (three tokens) with `k = 2` it applies
    2.0; the mean over the four tokens, which is applied here, is 2.5.

    A loss of several terms has several denominators, which one weight cannot carry: accumulate
    those with `value_and_grad(microbatches=...)`.

    Args:
        optimizer: what is applied once per window; it is given the window's weight as `weight=`,
            and any other extra arguments as they come.
        every_k_steps: microbatches per window, at least 1; or a function of the number of steps
            taken so far, as in optax.
        gradients_of: `"mean"`, or `"total"` when `updates` are gradients of the microbatch's
            weighted total, which are then added as they are.

    Returns:
        An `optax.GradientTransformationExtraArgs` that works in `jit`, `shard_map`, `pmap` and
        `vmap`. Inside a mapped function, reduce gradient and weight over the ranks first.

    Raises:
        TypeError: `optimizer` is no optax transformation; `update` is given no weight, or one that
            is no number.
        ValueError: a number is out of range; the weight is no scalar, or negative.

    Matches: `optax.MultiSteps` of optax 0.2.8 where all weights are equal and the windows full
        (tests/train/test_accumulation.py).

    Example:
        >>> tx = weighted_multi_steps(optax.sgd(1.0), 2)
        >>> w = jnp.float32(0)
        >>> state = tx.init(w)
        >>> for mean, tokens in [(1.0, 1), (3.0, 3)]:
        ...     updates, state = tx.update(jnp.float32(mean), state, w, weight=tokens)
        ...     print(float(updates))
        0.0
        -2.5
        >>> updates, state = tx.update(jnp.float32(5.0), state, w, weight=2, flush=True)
        >>> float(updates), int(state.gradient_step)
        (-5.0, 2)
    """
    _check_arguments(optimizer, every_k_steps, gradients_of)
    inner = optax.with_extra_args_support(optimizer)

    def init(params: PyTree) -> WeightedMultiStepsState:
        return WeightedMultiStepsState(
            mini_step=jnp.zeros((), jnp.int32),
            gradient_step=jnp.zeros((), jnp.int32),
            weight=jnp.zeros((), jnp.result_type(float)),
            acc_grads=jax.tree.map(_make_accumulator, params),
            inner_opt_state=inner.init(params),
        )

    def update(
        updates: PyTree,
        state: Any,  # a WeightedMultiStepsState; optax types states as any pytree
        params: PyTree | None = None,
        *,
        weight: Any = None,
        flush: bool | Bool[Array, ""] = False,
        **extra_args: Any,
    ) -> tuple[PyTree, WeightedMultiStepsState]:
        weight = _check_weight(weight, state.weight.dtype)

        def add(gradient: Array, total: Array) -> Array:
            gradient = gradient.astype(total.dtype)
            share = gradient * weight.astype(total.dtype) if gradients_of == "mean" else gradient
            # selected, since an empty microbatch's gradient is often 0/0, and 0 * NaN is NaN
            return total + jnp.where(weight > 0, share, 0)

        totals = jax.tree.map(add, updates, state.acc_grads)
        weight = state.weight + weight
        k = every_k_steps(state.gradient_step) if callable(every_k_steps) else every_k_steps
        closes = (state.mini_step + 1 >= k) | jnp.asarray(flush)
        steps = closes & (weight > 0)

        def step(inner_opt_state: PyTree) -> tuple[PyTree, PyTree]:
            means = jax.tree.map(
                lambda gradient, total: divide(total, weight).astype(gradient.dtype),
                updates,
                totals,
            )
            return inner.update(means, inner_opt_state, params, weight=weight, **extra_args)

        # The zeros of a call that does not step must be of the type that the optimizer returns,
        # which need not be the gradient's: a loop carries one type.
        shapes, _ = jax.eval_shape(step, state.inner_opt_state)
        zeros = jax.tree.map(lambda g, s: mesh.zeros_like(g, s.dtype), updates, shapes)
        new_updates, inner_opt_state = apply_unless(
            ~steps, lambda waiting: step(waiting[1]), (zeros, state.inner_opt_state)
        )
        return new_updates, WeightedMultiStepsState(
            mini_step=jnp.where(closes, 0, state.mini_step + 1),
            gradient_step=state.gradient_step + steps,
            weight=jnp.where(closes, 0, weight),
            acc_grads=jax.tree.map(lambda total: jnp.where(closes, 0, total), totals),
            inner_opt_state=inner_opt_state,
        )

    return optax.GradientTransformationExtraArgs(init, update)


def counts_windows(opt_state: PyTree) -> bool:
    """Whether the optimizer accumulates over calls, so that a call without weight has its place."""
    return any(map(_is_window, jax.tree.leaves(opt_state, is_leaf=_is_window)))


def _is_window(node: Any) -> bool:
    return isinstance(node, WeightedMultiStepsState)


def window_weight(
    terms: Mapping[str, WeightedSum], coefficients: Mapping[str, Any] | None
) -> Array:
    """What a step weighs in a window of `weighted_multi_steps`: the weight of its one term."""
    factors = coefficients or {"loss": 1.0}
    pulling = [name for name in terms if has_gradient(factors[name])]
    if len(pulling) != 1:
        raise ValueError(
            "train step: loss_fn must return one term under weighted_multi_steps, got terms "
            f"{pulling}. Each has a denominator of its own, which one weight cannot carry: split "
            "the batch with microbatches= instead."
        )
    return terms[pulling[0]].whole().weight


def _make_accumulator(parameter: Array) -> Array:
    # At least float32, since bfloat16 stops adding small gradients; made of the parameter, so that
    # it lies where the parameter lies and varies over the axes that it varies over.
    return mesh.zeros_like(parameter, jnp.promote_types(jnp.float32, jnp.result_type(parameter)))


def _check_weight(weight: Any, dtype: Any) -> Array:
    if weight is None:
        raise TypeError(
            "weighted_multi_steps: weight must be given to update, got None. Pass the microbatch's "
            "weight over all ranks, update(..., weight=loss.terms['loss'].weight)."
        )
    if np.shape(weight) != ():
        raise ValueError(
            f"weighted_multi_steps: weight must be a scalar, got shape {np.shape(weight)}. Sum the "
            "weights of the microbatch's rows or tokens."
        )
    if isinstance(weight, jax.Array):  # weights on a device are not read back
        return weight.astype(dtype)
    if np.asarray(weight).dtype.kind not in "biuf":
        raise TypeError(
            f"weighted_multi_steps: weight must be a number, got {weight!r}. It is the "
            "microbatch's weight over all ranks."
        )
    remedy = "A microbatch that is not to count weighs 0."
    check_weights("weighted_multi_steps: weight", weight, remedy)
    return jnp.asarray(weight, dtype)


def _check_arguments(optimizer: Any, every_k_steps: Any, gradients_of: str) -> None:
    if not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        raise TypeError(
            "weighted_multi_steps: optimizer must be an optax transformation, got "
            f"{type(optimizer).__name__}. Give it, for instance, optax.adamw(1e-3)."
        )
    if not callable(every_k_steps):
        rule = "be a number of microbatches, at least 1, or a function of the step count"
        argument = "weighted_multi_steps: every_k_steps"
        remedy = "1 applies every microbatch by itself."
        check_integer(argument, every_k_steps, 1, 2**31 - 1, remedy, rule=rule)
    if gradients_of not in ("mean", "total"):
        raise ValueError(
            f"weighted_multi_steps: gradients_of must be 'mean' or 'total', got "
            f"{gradients_of!r}. value_and_grad returns gradients of the mean."
        )
