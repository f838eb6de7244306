"""The same training step for parameters and an optax state alone, as in haiku and equinox."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jax.stages import Lowered
from jaxtyping import Array, PyTree

from jax_ddp_weighting.data.batch import Batch
from jax_ddp_weighting.distributed.mesh import AxisName
from jax_ddp_weighting.train.batch_layout import BatchSpec
from jax_ddp_weighting.train.boxes import free_boxes
from jax_ddp_weighting.train.compilation import CompiledStep
from jax_ddp_weighting.train.loss_scale import is_scale
from jax_ddp_weighting.train.optimizer import check_optimizer
from jax_ddp_weighting.train.step import (
    StepReport,
    check_call,
    check_parameters,
    global_step,
)
from jax_ddp_weighting.train.step_options import StepOptions
from jax_ddp_weighting.train.train_state import step_state
from jax_ddp_weighting.weighting.divisors import Divisors
from jax_ddp_weighting.weighting.loss_terms import LossFn
from jax_ddp_weighting.weighting.statistics import Statistics


class Carried(NamedTuple):
    """What a step is given and gives back; a pytree of arrays alone."""

    params: PyTree
    opt_state: PyTree
    model_state: PyTree
    step: Any

    def hand_back(self) -> tuple[PyTree, ...]:
        """What the user goes on with: the model's state where there is one, the count not."""
        kept = () if self.model_state is None else (self.model_state,)
        return self.params, self.opt_state, *kept


def carry(
    params: PyTree, opt_state: PyTree, state: PyTree, count: Any, *, has_state: bool
) -> Carried:
    """What a step or an epoch is given.

    Raises:
        TypeError: there is a state that nobody asked for.
    """
    if state is not None and not has_state:
        raise TypeError(
            "train step: state must be left out where the step was made without has_state, "
            f"got {type(state).__name__}. With has_state=True the loss is given it, and "
            "returns the next."
        )
    # a copy, as it is donated with the rest
    count = count if count is None else jnp.array(count, jnp.int32)
    return Carried(params, opt_state, state, count)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=Carried._fields,
    meta_fields=["tx"],
)
@dataclass(frozen=True)
class _State:
    """The same with its optimizer, as a step takes a train state."""

    params: PyTree
    opt_state: PyTree
    model_state: PyTree
    step: Any
    tx: Any

    def replace(self, **fields: Any) -> "_State":
        return replace(self, **fields)

    def apply_gradients(self, *, grads: PyTree, **fields: Any) -> "_State":
        updates, opt_state = self.tx.update(grads, self.opt_state, self.params)
        params = optax.apply_updates(self.params, updates)
        step = None if self.step is None else self.step + 1  # as a TrainState counts, for an epoch
        return replace(self, params=params, opt_state=opt_state, step=step, **fields)


@dataclass(frozen=True)
class OptaxStep:
    """A compiled step for parameters and an optax state, as `make_optax_step` makes it."""

    compiled: CompiledStep
    has_state: bool

    def __call__(
        self,
        params: PyTree,
        opt_state: PyTree,
        batch: Batch,
        rng: Array | None = None,
        *,
        state: PyTree = None,
        count: Any = None,
        replicated: PyTree = None,
        **optimizer_args: Any,
    ) -> tuple[Any, ...]:
        """Parameters and optimizer's state after the step, the model's if it has one, report."""
        carried = carry(params, opt_state, state, count, has_state=self.has_state)
        replicated = self.compiled.replicate(replicated)
        carried, report = self.compiled(carried, batch, rng, optimizer_args, replicated)
        return *carried.hand_back(), report

    def lower(
        self,
        params: PyTree,
        opt_state: PyTree,
        batch: Batch,
        rng: Array | None = None,
        *,
        state: PyTree = None,
        count: Any = None,
        replicated: PyTree = None,
        **optimizer_args: Any,
    ) -> Lowered:
        """JAX's `Lowered` of the step for these arguments, or their shapes: nothing is run."""
        carried = carry(params, opt_state, state, count, has_state=self.has_state)
        replicated = self.compiled.replicate(replicated)
        return self.compiled.lower(carried, batch, rng, optimizer_args, replicated)


def make_optax_step(
    loss_fn: LossFn,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    *,
    microbatches: int = 1,
    engine: str = "shard_map",
    coefficients: Mapping[str, Any] | None = None,
    divisors: Divisors | None = None,
    statistics: Statistics | None = None,
    skip_empty: bool = True,
    has_state: bool = False,
    rng_per: str = "rank",
    gather_per: str = "step",
    grad_norm: bool = False,
    donate: bool = True,
    batch_spec: BatchSpec | None = None,
    axis_name: AxisName | None = None,
) -> OptaxStep:
    """A compiled step `(params, opt_state, batch, rng=None) -> (params, opt_state, report)`.

    The rule: as in `make_train_step`, the gradient of the global weighted mean is applied once per
    step, and a step in which nothing has weight changes nothing. Parameters are any pytree of
    floating arrays: those of haiku, the arrays of an equinox module, a `NamedTuple`, a dict.

    Args:
        loss_fn: as `make_train_step` takes it, without `mutable`.
        optimizer: the optax optimizer, whose state `optimizer.init(params)` the step is given
            first. `weighted_multi_steps` accumulates over several calls.
        mesh: a mesh with the data axis, over any of whose axes parameters may be sharded.
        microbatches: how many microbatches each rank splits its rows into.
        engine: `"shard_map"`, `"jit"` (the global view) or `"pmap"`.
        coefficients: one factor per term, as in `make_train_step`; functions of the number of steps
            taken are called with `count=`.
        divisors: what terms are divided by in place of their weights, as in `make_train_step`.
        statistics: `statistics(params, batch)`, sums over all rows of the step, as in
            `make_train_step`; given `state` where it names it.
        skip_empty: whether a step in which nothing has weight is skipped, as in `make_train_step`.
        has_state: whether the model keeps a state beside its parameters, such as haiku's of
            `transform_with_state` or equinox's `State`. `loss_fn` is then given it as `state=`, and
            returns `(sums, state)`. Microbatches update it in order; it must come out the same on
            every rank, or the step raises.
        rng_per: `"rank"` or `"example"`, what the keys of `loss_fn` are made of, as in
            `make_train_step`.
        gather_per: when parameters that are sharded over the data axis are gathered, as in
            `make_train_step`.
        grad_norm: whether `report.grad_norm` is the norm of the global gradient.
        donate: whether the step may write into the arrays that it is given. With False they stay
            good, at the price of a second set in memory.
        batch_spec: how the rows lie on the mesh, where that is over more than the data axis, as in
            `make_train_step`.
        axis_name: the data axis, or several, as in `make_train_step`.

    Returns:
        A function that compiles once for a run, short last steps included. It places parameters,
        states and the batch on the mesh if they are elsewhere, and donates all but the batch: use
        those that it returns. With `has_state` it is `step(params, opt_state, batch, rng, state=)`
        and returns `(params, opt_state, state, report)`. `count=` is the number of steps taken, for
        coefficients that are functions; `replicated=` is a pytree of what is no row, as in
        `make_train_step`. Further keyword arguments go to the optimizer's `update`; what an
        optimizer is given by itself is listed at `make_train_step`. `step.lower(params, opt_state,
        batch)` is JAX's `Lowered` of it.

    Raises:
        ValueError: as `make_train_step`.
        TypeError: the optimizer is none; the parameters are no floating arrays; a state is missing,
            or given to a step that takes none; a coefficient is a function, and no count is given;
            or one of them holds a `DynamicScale`, which `make_train_step` alone knows.

    Example:
        >>> import optax
        >>> def loss_fn(params, batch):
        ...     return weighted_sum((params["w"] - batch.data) ** 2, batch.weights)
        >>> optimizer = optax.sgd(0.5)
        >>> step = make_optax_step(loss_fn, optimizer, data_mesh(1))
        >>> params = {"w": jnp.float32(0)}
        >>> opt_state = optimizer.init(params)
        >>> batch = Batch.of(np.array([1.0, 3.0, 9.0]), weights=np.array([1, 1, 0]))
        >>> params, opt_state, report = step(params, opt_state, batch)
        >>> float(params["w"]), float(report.loss.value)
        (2.0, 5.0)

        A model that keeps a state, here the sum of what it has seen:

        >>> def counting(params, batch, *, state):
        ...     seen = jax.lax.psum(jnp.sum(batch.data * batch.weights), "data")
        ...     return loss_fn(params, batch), state + seen
        >>> step = make_optax_step(counting, optimizer, data_mesh(1), has_state=True)
        >>> params, opt_state, seen, report = step(
        ...     params, opt_state, batch, state=jnp.float32(0)
        ... )
        >>> float(seen)
        4.0
    """
    options = StepOptions(
        "make_optax_step",
        mesh,
        microbatches=microbatches,
        engine=engine,
        coefficients=coefficients,
        divisors=divisors,
        statistics=statistics,
        skip_empty=skip_empty,
        rng_per=rng_per,
        gather_per=gather_per,
        grad_norm=grad_norm,
        donate=donate,
        batch_spec=batch_spec,
        axis_name=axis_name,
    )
    return OptaxStep(compile_optax_step(loss_fn, optimizer, has_state, options), has_state)


def compile_optax_step(
    loss_fn: LossFn, optimizer: Any, has_state: bool, options: StepOptions
) -> CompiledStep:
    """The step of parameters and an optax state, for makers whose options are checked."""
    _check_is_optimizer(optimizer, caller=options.caller)
    names = ("model_state",) if has_state else ()
    gradient_of = global_step(loss_fn, _Parameters(has_state, options), options)
    of_state = step_state(gradient_of, options, names)

    def step(placement: Any, carried: Carried, *rest: Any) -> tuple[Carried, StepReport]:
        state, report = of_state(placement, _State(*carried, tx=optimizer), *rest)
        return Carried(state.params, state.opt_state, state.model_state, state.step), report

    def check(carried: Carried, batch: Batch, rng: Any, extra: dict[str, Any], _: PyTree) -> None:
        _check_carried(carried, options, has_state)
        check_parameters(carried.params, options)
        check_call(batch, rng, options)
        check_optimizer(optimizer, carried.opt_state, extra)

    return CompiledStep(step, options.mesh, options.rows, check=check, donate=options.donate)


@dataclass(frozen=True)
class _Parameters:
    """Parameters of any pytree, and perhaps a state that is given by name (a `ModelKind`)."""

    has_state: bool
    options: StepOptions
    noun: str = "params"

    def hand_out(self, params: PyTree, state: PyTree) -> tuple[Any, dict[str, Any]]:
        named = {"state": state["model_state"]} if self.has_state else {}
        return free_boxes(params, self.options.mapped_axis), named

    def take_back(self, first: Any, out: Any, state: PyTree) -> tuple[Any, PyTree]:
        if not self.has_state:
            return out, state
        if not (isinstance(out, tuple) and len(out) == 2):
            raise TypeError(
                f"{self.options.caller}: loss_fn must return (sums, state) where has_state is "
                f"given, got {type(out).__name__}. The state is the one after this batch."
            )
        return out[0], {"model_state": out[1]}

    def check_unused(self, first: Any, state: PyTree) -> None:
        """Nothing is ever used up: what the statistics are given is a pytree of arrays."""


def _check_is_optimizer(optimizer: Any, *, caller: str) -> None:
    if not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        raise TypeError(
            f"{caller}: optimizer must be one of optax, got {type(optimizer).__name__}. "
            "optax.adamw(1e-3) is one."
        )


def _check_carried(carried: Carried, options: StepOptions, has_state: bool) -> None:
    if hasattr(carried.params, "apply_gradients"):
        raise TypeError(
            "train step: params must be parameters alone, got "
            f"{type(carried.params).__name__}. For a flax TrainState there is make_train_step."
        )
    for path, leaf in jax.tree_util.tree_leaves_with_path(carried.params):
        dtype = getattr(leaf, "dtype", None)
        if dtype is None or not jnp.issubdtype(dtype, jnp.inexact):
            raise TypeError(
                "train step: params must be floating arrays, got "
                f"{type(leaf).__name__ if dtype is None else dtype} at params"
                f"{jax.tree_util.keystr(path)}. Keep what is not trained beside them: in the loss "
                "function, or as replicated=. (Of an equinox module, eqx.partition(model, "
                "eqx.is_inexact_array) gives the parameters.)"
            )
    if has_state and carried.model_state is None:
        raise TypeError(
            "train step: state must be given where the step was made with has_state, got None. "
            "Call step(params, opt_state, batch, state=state)."
        )
    schedules = [n for n, each in (options.coefficients or {}).items() if callable(each)]
    if schedules and carried.step is None:
        raise TypeError(
            f"train step: count must be given where coefficients[{schedules[0]!r}] is a function, "
            "got None. Call step(params, opt_state, batch, count=i) with the number of steps taken."
        )
    if any(map(is_scale, jax.tree.leaves(tuple(carried), is_leaf=is_scale))):
        raise TypeError(
            "train step: params and states must hold no DynamicScale, got one. It is used where a "
            "flax TrainState holds it, by make_train_step."
        )
