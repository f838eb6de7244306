"""Gradient accumulation for optax in which every microbatch counts as its weight."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import wraps
from inspect import Parameter, Signature
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int, PyTree

from jax_ddp_weighting._arguments import check_integer, check_weights
from jax_ddp_weighting.distributed import mesh
from jax_ddp_weighting.train.shards import (
    Axes,
    check_updates,
    decide_over_shards,
    find_axes,
    find_typed_axes,
)
from jax_ddp_weighting.train.skipping import apply_unless
from jax_ddp_weighting.weighting.dtypes import widen
from jax_ddp_weighting.weighting.loss_terms import has_gradient
from jax_ddp_weighting.weighting.param_specs import ParamSpecs
from jax_ddp_weighting.weighting.sums import WeightedSum, divide

T = TypeVar("T")


class WeightedMultiStepsState(NamedTuple):
    """The state of `weighted_multi_steps`; what `optax.MultiStepsState` has means the same here.

    Attributes:
        mini_step: microbatches taken into the open window.
        gradient_step: steps that the inner optimizer has taken.
        inner_opt_state: the state of the inner optimizer.
        acc_grads: the weighted mean of the gradients in the open window (with
            `use_grad_mean=False` the sum of weight times gradient), at least float32, each leaf
            placed as its parameter is.
        skip_state: what `should_skip_update_fn` returned beside its verdict; () without one.
        weight: the weight of the open window, float32 (float64 under x64).
        acc_value: what `acc_grads` is, of the `value=` that updates were given.
        stepped: whether the last update closed a window that had weight, so that the inner
            optimizer stepped.
        bad_weights: updates so far whose weight was negative, infinite or NaN, and that were left
            out whole.
    """

    mini_step: Int[Array, ""]
    gradient_step: Int[Array, ""]
    inner_opt_state: PyTree
    acc_grads: PyTree
    skip_state: PyTree
    weight: Float[Array, ""]
    acc_value: Float[Array, ""]
    stepped: Bool[Array, ""]
    bad_weights: Int[Array, ""]


class WeightedMultiSteps(optax.GradientTransformationExtraArgs):
    """What `weighted_multi_steps` returns: an optax transformation that can be asked."""

    __slots__ = ()

    def has_updated(self, state: Any) -> Bool[Array, ""]:
        """Whether the update that returned this state stepped the inner optimizer.

        As `optax.MultiSteps.has_updated`, and true to windows without weight, which do not step.
        """
        return state.stepped


def weighted_multi_steps(
    optimizer: optax.GradientTransformation,
    every_k_steps: int | Callable[[Any], Any],
    *,
    gradients_of: str = "mean",
    use_grad_mean: bool = True,
    should_skip_update_fn: Callable[..., tuple[Any, PyTree]] | None = None,
    param_specs: ParamSpecs | None = None,
) -> WeightedMultiSteps:
    """One optimizer step per window of `k` microbatches, each of which counts as its weight.

    The rule: the inner optimizer is given `sum(weight * gradient) / sum(weight)` over the window,
    once, when the window closes; until then updates are zero. So clipping inside `optimizer` clips
    the window's mean, and schedules inside it count real steps. A window without weight does not
    touch the inner optimizer at all.

    `update(updates, state, params, *, weight, flush=False)` takes, beside what optax hands it:

    - `weight`: a scalar of at least 0, the microbatch's weight over all ranks. `updates` is the
      gradient of the microbatch's weighted mean over all ranks, as `value_and_grad` returns it
      beside `loss.terms["loss"].weight`. A gradient of weight 0 counts for nothing, even as NaN.
      So does one whose weight turns out negative, infinite or NaN on the device, where nothing
      can be raised: `state.bad_weights` counts them.
    - `flush`: a bool, traced or not, that closes the window with this microbatch, such as the last
      one of an epoch; the window is divided by the weight that it has, whatever its length.

    What `optax.MultiSteps` does otherwise: it gives every microbatch one vote, keeps a short last
    window waiting for the next epoch, and runs the inner optimizer for every microbatch, to throw
    the result away. On microbatch means 1 (one token) and 3 (three tokens) with `k = 2` it applies
    2.0; the mean over the four tokens, which is applied here, is 2.5.

    Wrap the whole optimizer. What stands beside it, `chain(weighted_multi_steps(...),
    add_decayed_weights(...))` or another group of `optax.partition`, runs at every microbatch, as
    it would beside `optax.MultiSteps`. (A training step lets none of them see a batch without
    weight; by itself this transformation cannot keep it from them.)

    A loss of several terms has several denominators, which one weight cannot carry: accumulate
    those with `value_and_grad(microbatches=...)`.

    Args:
        optimizer: what is applied once per window; it is given the window's weight as `weight=`.
            `value=` and `grad=` given to `update` reach it as those of the window; a `value_fn=`
            of one microbatch is none of the window, so that line searches are refused. Any other
            extra arguments reach it as they come with the microbatch that closes the window.
        every_k_steps: microbatches per window, at least 1; or a function of the number of steps
            taken so far, as in optax.
        gradients_of: `"mean"`, or `"total"` when `updates` are gradients of the microbatch's
            weighted total, which are then added as they are.
        use_grad_mean: whether the window's mean is applied; its total otherwise, as in optax.
        should_skip_update_fn: as in optax, `(updates, gradient_step, params) -> (skip, state)`,
            such as `optax.skip_not_finite`. A microbatch that it skips is left out whole, weight
            included, and takes no place in the window.
        param_specs: which parameters are sharded over mapped axes, as in `value_and_grad`. Inside a
            mapped function `optimizer` is given a rank's shards then, and must change them element
            by element: one that makes something of several, such as `optax.clip_by_global_norm`,
            would make it of each rank's own, and is refused; ours of that name takes the specs. In
            a checked `shard_map` types tell it too. (`optax.skip_not_finite` is asked of all
            shards, and other functions in its place are refused where they mix elements.) Where the
            axes are not mapped, as in a training step, specs say nothing.

    Returns:
        An `optax.GradientTransformationExtraArgs` that works in `jit`, `shard_map`, `pmap` and
        `vmap`, and that gradients flow through; its `has_updated(state)` is that of
        `optax.MultiSteps`. Inside a mapped function, reduce gradient and weight over the ranks
        first.

    Raises:
        TypeError: `optimizer` is no optax transformation; `update` is given no weight, or one that
            is no number; the inner optimizer calls `value_fn`; a spec is no `PartitionSpec`.
        ValueError: a number is out of range; the weight is no scalar, or negative;
            `should_skip_update_fn` returns no bool; specs do not fit; or what is given shards makes
            something of several elements.

    Matches: `optax.MultiSteps` of optax 0.2.8 where all weights are equal and the windows full
        (tests/train/test_accumulation.py, tests/train/test_multi_steps.py).

    Example:
        >>> tx = weighted_multi_steps(optax.sgd(1.0), 2)
        >>> w = jnp.float32(0)
        >>> state = tx.init(w)
        >>> for mean, tokens in [(1.0, 1), (3.0, 3)]:
        ...     updates, state = tx.update(jnp.float32(mean), state, w, weight=tokens)
        ...     print(float(updates), bool(tx.has_updated(state)))
        0.0 False
        -2.5 True
        >>> updates, state = tx.update(jnp.float32(5.0), state, w, weight=2, flush=True)
        >>> float(updates), int(state.gradient_step)
        (-5.0, 2)
    """
    _check_arguments(optimizer, every_k_steps, gradients_of)
    windows = _Windows(
        inner=optax.with_extra_args_support(optimizer),
        every_k_steps=every_k_steps,
        gradients_of=gradients_of,
        use_grad_mean=use_grad_mean,
        should_skip_update_fn=should_skip_update_fn,
        param_specs=param_specs,
    )
    return WeightedMultiSteps(windows.init, windows.update)


@dataclass(frozen=True)
class _Windows:
    """The arguments of `weighted_multi_steps`, checked, and the two functions that they make.

    `inner` is its `optimizer`; the other fields bear the names of its arguments.
    """

    inner: optax.GradientTransformationExtraArgs
    every_k_steps: int | Callable[[Any], Any]
    gradients_of: str
    use_grad_mean: bool
    should_skip_update_fn: Callable[..., tuple[Any, PyTree]] | None
    param_specs: ParamSpecs | None

    def init(self, params: PyTree) -> WeightedMultiStepsState:
        gradient_step = jnp.zeros((), jnp.int32)
        own = self._find_axes(params, gradient_step)
        zeros = jax.tree.map(lambda p: mesh.zeros_like(p, jnp.result_type(p)), params)
        return WeightedMultiStepsState(
            mini_step=jnp.zeros((), jnp.int32),
            gradient_step=gradient_step,
            inner_opt_state=self.inner.init(params),
            acc_grads=jax.tree.map(_make_accumulator, params),
            skip_state=self._ask_to_skip(zeros, gradient_step, params, own)[1],
            weight=jnp.zeros((), jnp.result_type(float)),
            acc_value=jnp.zeros((), jnp.result_type(float)),
            stepped=jnp.zeros((), bool),
            bad_weights=jnp.zeros((), jnp.int32),
        )

    def update(
        self,
        updates: PyTree,
        state: Any,  # a WeightedMultiStepsState; optax types states as any pytree
        params: PyTree | None = None,
        *,
        weight: Any = None,
        flush: bool | Bool[Array, ""] = False,
        **extra_args: Any,
    ) -> tuple[PyTree, WeightedMultiStepsState]:
        given = _check_weight(weight, state.weight.dtype)
        own = self._find_axes(updates, given)
        skip, skip_state = self._ask_to_skip(updates, state.gradient_step, params, own)
        bad = ~((given >= 0) & (given < jnp.inf))  # NaN too
        # Both at once, or a window would be divided by the weight of a gradient that it lacks.
        weight = jnp.where(bad | skip, 0, given)
        total = state.weight + weight
        acc_grads, acc_value = self._accumulate(updates, state, extra_args, weight, total)
        every_k = self.every_k_steps
        k = every_k(state.gradient_step) if callable(every_k) else every_k
        mini_step = jnp.where(skip, state.mini_step, state.mini_step + 1)
        closes = (~skip & (mini_step >= k)) | jnp.asarray(flush)
        steps = closes & (total > 0)

        def step(grads: PyTree, inner_opt_state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
            extra = _make_extra_args_of_window(extra_args, acc_value, grads)
            try:
                return self.inner.update(grads, inner_opt_state, params, weight=total, **extra)
            except TypeError as error:  # one that names its arguments, and knows no weight
                if "unexpected keyword argument 'weight'" not in str(error):
                    raise
                return self.inner.update(grads, inner_opt_state, params, **extra)

        new_updates, inner_opt_state = _step_if(
            steps, step, acc_grads, updates, state.inner_opt_state, params, own
        )
        return new_updates, WeightedMultiStepsState(
            mini_step=jnp.where(closes, 0, mini_step),
            gradient_step=state.gradient_step + steps.astype(jnp.int32),
            inner_opt_state=inner_opt_state,
            acc_grads=jax.tree.map(lambda acc: jnp.where(closes, 0, acc), acc_grads),
            skip_state=skip_state,
            weight=jnp.where(closes, 0, total),
            acc_value=jnp.where(closes, 0, acc_value),
            stepped=steps,
            bad_weights=state.bad_weights + bad.astype(jnp.int32),
        )

    def _find_axes(self, updates: PyTree, weight: Any) -> Axes:
        if self.param_specs is None:
            return find_typed_axes(updates, weight)
        return find_axes(self.param_specs, updates, caller="weighted_multi_steps", noun="updates")

    def _ask_to_skip(
        self, updates: PyTree, step: Array, params: PyTree | None, own: Axes
    ) -> tuple[Array, PyTree]:
        if self.should_skip_update_fn is None:
            return jnp.zeros((), bool), ()
        ask = decide_over_shards(self.should_skip_update_fn, own, caller="weighted_multi_steps")
        skip, skip_state = ask(updates, step, params)
        return _check_verdict(skip), skip_state

    def _accumulate(
        self, updates: PyTree, state: Any, given: dict[str, Any], weight: Array, total: Array
    ) -> tuple[PyTree, Array]:
        """The gradients and the value of the window, this microbatch among them."""

        def add(new: Array, acc: Array) -> Array:
            new, own, all_of_it = (x.astype(acc.dtype) for x in (new, weight, total))
            if self.use_grad_mean:
                # what `acc` moves by, so that it stays a mean: MultiSteps' field is one
                new = new if self.gradients_of == "total" else new * own
                change = divide(new - acc * own, all_of_it)
            else:
                change = new if self.gradients_of == "total" else new * own
            # selected, since an empty microbatch's gradient is often 0/0, and 0 * NaN is NaN
            return acc + jnp.where(weight > 0, change, 0)

        acc_value = state.acc_value
        acc_grads = jax.tree.map(add, updates, state.acc_grads)
        if _is_number(given.get("value")):
            acc_value = add(jnp.asarray(given["value"]), acc_value)
        return acc_grads, acc_value


def _step_if(
    steps: Array,
    step: Callable[[PyTree, PyTree, PyTree], tuple[PyTree, PyTree]],
    acc_grads: PyTree,
    updates: PyTree,
    inner_opt_state: PyTree,
    params: PyTree,
    own: Axes,
) -> tuple[PyTree, PyTree]:
    """What `step(gradients, state, params)` makes of the window; zeros and the old state without.

    Args:
        steps: whether the window steps.
        step: the inner optimizer's update.
        acc_grads: the window's gradients, which it is given in the dtypes of `updates`.
        updates: the microbatch's.
        inner_opt_state: the inner optimizer's state.
        params: the parameters, or None.
        own: the axes that each is sharded over.
    """
    check_updates(step, updates, inner_opt_state, params, own, caller="weighted_multi_steps")

    def step_window(inner_opt_state: PyTree) -> tuple[PyTree, PyTree]:
        grads = jax.tree.map(lambda g, acc: acc.astype(g.dtype), updates, acc_grads)
        return step(grads, inner_opt_state, params)

    # The zeros of a call that does not step must be of the type that the optimizer returns, which
    # need not be the gradient's: a loop carries one type.
    shapes, _ = jax.eval_shape(step_window, inner_opt_state)
    zeros = jax.tree.map(lambda g, s: mesh.zeros_like(g, s.dtype), updates, shapes)
    return apply_unless(~steps, lambda waiting: step_window(waiting[1]), (zeros, inner_opt_state))


def _make_extra_args_of_window(
    given: dict[str, Any], value: Array, grads: PyTree
) -> dict[str, Any]:
    """The extra arguments of the microbatch that closes a window, as those of the window."""
    of_window = dict(given)
    if _is_number(given.get("value")):
        of_window["value"] = value
    if given.get("grad") is not None:
        of_window["grad"] = grads
    for name in ("value_fn", "grad_fn"):
        if callable(given.get(name)):
            of_window[name] = accept_keywords(_make_refusal(name), [*given, "weight"])
    return of_window


def accept_keywords(fn: Callable[..., T], names: Iterable[str]) -> Callable[..., T]:
    """`fn(params)` under a signature that has the keywords too.

    optax's line searches read it, and refuse extra arguments that `value_fn` does not name.
    """

    @wraps(fn)
    def accepting(*args: Any, **_: Any) -> T:
        return fn(*args)

    keywords = [Parameter(name, Parameter.KEYWORD_ONLY, default=None) for name in sorted(names)]
    accepting.__signature__ = Signature(  # pyright: ignore[reportAttributeAccessIssue]
        [Parameter("params", Parameter.POSITIONAL_ONLY), *keywords]
    )
    return accepting


def _is_number(value: Any) -> bool:
    return isinstance(value, jax.Array | np.ndarray | np.generic | int | float)


def _make_refusal(name: str) -> Callable[..., Any]:
    def refuse(*_: Any) -> Any:
        raise TypeError(
            f"weighted_multi_steps: optimizer must not call {name}, got one that does. A window's "
            "earlier microbatches are gone when it closes, so that nobody can evaluate its loss "
            "elsewhere. Split the batch with microbatches= instead, or choose an optimizer "
            "without a search."
        )

    return refuse


def counts_windows(opt_state: PyTree) -> bool:
    """Whether the optimizer accumulates over calls, so that a call without weight has its place."""
    return any(map(is_window, jax.tree.leaves(opt_state, is_leaf=is_window)))


def is_window(node: Any) -> bool:
    """Whether the node of an optimizer's state is a window's."""
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
    return mesh.zeros_like(parameter, widen(jnp.float32, jnp.result_type(parameter)))


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
    on_device = isinstance(weight, jax.Array)
    kind = (weight if on_device else np.asarray(weight)).dtype
    if not any(jnp.issubdtype(kind, each) for each in (np.bool_, jnp.integer, jnp.floating)):
        raise TypeError(
            f"weighted_multi_steps: weight must be a number, got {weight!r}. It is the "
            "microbatch's weight over all ranks."
        )
    if on_device:  # weights on a device are not read back
        return weight.astype(dtype)
    remedy = "A microbatch that is not to count weighs 0."
    check_weights("weighted_multi_steps: weight", weight, remedy)
    return jnp.asarray(weight, dtype)


def _check_verdict(skip: Any) -> Array:
    if getattr(skip, "shape", None) != () or skip.dtype != jnp.bool_:
        raise ValueError(
            "weighted_multi_steps: should_skip_update_fn must return a bool scalar and a state, "
            f"got {skip!r} for the bool. optax.skip_not_finite is one."
        )
    return skip


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
