"""One optimizer step over all ranks: the global gradient, applied once, or skipped when empty."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.stages import Lowered
from jaxtyping import Array, PyTree

from jax_ddp_weighting.data.batch import Batch
from jax_ddp_weighting.distributed.mesh import AxisName
from jax_ddp_weighting.train.batch_layout import BatchSpec
from jax_ddp_weighting.train.boxes import box_as, free_boxes
from jax_ddp_weighting.train.compilation import CompiledStep
from jax_ddp_weighting.train.loss_scale import (
    are_finite,
    check_optimizer_types,
    find_scale,
    update_scale,
)
from jax_ddp_weighting.train.optimizer import (
    check_optimizer,
    make_arguments,
    run_optimizer,
)
from jax_ddp_weighting.train.shards import global_norm
from jax_ddp_weighting.train.step import (
    StepReport,
    check_call,
    check_parameters,
    global_step,
)
from jax_ddp_weighting.train.step_options import StepOptions, Varying
from jax_ddp_weighting.weighting.divisors import Divisors
from jax_ddp_weighting.weighting.loss_terms import LossFn
from jax_ddp_weighting.weighting.statistics import Statistics


@dataclass(frozen=True)
class TrainStep:
    """A compiled step for a flax `TrainState`, as `make_train_step` makes it."""

    compiled: CompiledStep

    def __call__(
        self,
        state: Any,
        batch: Batch,
        rng: Array | None = None,
        *,
        replicated: PyTree = None,
        **optimizer_args: Any,
    ) -> tuple[Any, StepReport]:
        """The state after the step, and its report."""
        replicated = self.compiled.replicate(replicated)
        return self.compiled(state, batch, rng, optimizer_args, replicated)

    def lower(
        self,
        state: Any,
        batch: Batch,
        rng: Array | None = None,
        *,
        replicated: PyTree = None,
        **optimizer_args: Any,
    ) -> Lowered:
        """JAX's `Lowered` of the step for these arguments, or their shapes: nothing is run."""
        return self.compiled.lower(state, batch, rng, optimizer_args, replicated)


def make_train_step(
    loss_fn: LossFn,
    mesh: Mesh,
    *,
    microbatches: int = 1,
    engine: str = "shard_map",
    coefficients: Mapping[str, Any] | None = None,
    divisors: Divisors | None = None,
    statistics: Statistics | None = None,
    skip_empty: bool = True,
    mutable: str | Sequence[str] = (),
    rng_per: str = "rank",
    gather_per: str = "step",
    grad_norm: bool = False,
    donate: bool = True,
    batch_spec: BatchSpec | None = None,
    axis_name: AxisName | None = None,
) -> TrainStep:
    """A compiled step `(state, batch, rng=None) -> (state, report)` for a flax `TrainState`.

    The rule: the gradient of the global weighted mean is applied once per step. A step in which
    nothing has weight changes nothing: not the parameters, not the optimizer's state, not the count
    that schedules read, no collection. (A zero gradient would not do: AdamW moves parameters on
    one. Who wants it all the same says `skip_empty=False`.)

    What is to be reported beside the loss, such as an accuracy, is a term of coefficient 0: it is
    counted over all ranks and microbatches like the loss, and pulls on nothing.

    Losses are scaled for float16 where a field of the state, of any name, holds flax's
    `DynamicScale`: what is pulled back is multiplied by its scale, and the gradient divided by it
    in float32, before the norm, the optimizer or a window sees it. Losses are reported unscaled.
    The scale moves once per step by flax's own rule, by whether the gradient of all ranks is
    finite. A step in which it is not changes nothing else, the state's count included
    (`report.finite` and `report.stepped` are False, and a window goes on without that batch); a
    skipped step leaves the scale as it is. (Without a scale, `optax.apply_if_finite` leaves out
    infinite gradients.)

    Args:
        loss_fn: `loss_fn(params, batch)` for a `Batch` returns a `WeightedSum`, or a dict of them
            that `coefficients` combines; `loss_fn(params, batch, rng)` where the step is given an
            rng.
        mesh: a mesh with the data axis. Parameters may be sharded over any of its axes: each
            stays where it lies, and so does the optimizer's state.
        microbatches: how many microbatches each rank splits its rows into.
        engine: `"shard_map"`, `"jit"` (the global view) or `"pmap"`.
        coefficients: one factor per term: a number, or a function of `state.step`, the number of
            steps taken, such as a schedule of optax's. The term of a function pulls always, even in
            a step where it is 0. (With `weighted_multi_steps` the count is that of batches.)
        divisors: by term what it is divided by in place of its weight over the whole step: a
            number, or a function of that weight; see `value_and_grad`. A term with a divisor makes
            a step count wherever the divisor is above 0, with accepted rows or without: one with a
            constant is never skipped. A window of `weighted_multi_steps` is divided by weights,
            and takes none for the term that pulls.
        statistics: `statistics(params, batch)` returns sums over the rows that it is given, a
            pytree of arrays. They are added up over microbatches and ranks before any loss is
            taken, and given as `loss_fn(..., statistics=...)`; see `value_and_grad`. It is given
            variables where `loss_fn` is, and `rng` and `replicated` where it names them.
        skip_empty: whether a step in which nothing that pulls has weight (or a divisor above 0) is
            skipped. With False the optimizer is given a gradient of 0 then, and the collections
            move on; a step of bad weights changes nothing all the same.
        mutable: names of flax collections that the model updates, such as `"batch_stats"`, each a
            field of the state. `loss_fn` is then given variables in place of parameters,
            `{"params": ..., "batch_stats": ...}`, and returns `(sums, updates)`, the updates as
            `model.apply(variables, ..., mutable=[...])` returns them. Microbatches update them in
            order. They must come out the same on every rank, or the step raises.
        rng_per: `"rank"` folds the rng with the rank and the microbatch; the global view of `jit`
            has one rng for all rows. `"example"` gives `loss_fn` an array of keys `[rows]`, each
            made of the rng and the row's id alone, so that dropout is the same for every number of
            ranks, rows and microbatches.
        gather_per: of parameters that are sharded over the data axis, under `"shard_map"`: `"step"`
            gathers each once per step and scatters its gradient once, `"microbatch"` does so once
            per microbatch, and accumulates shards alone. (XLA decides it under `"jit"`.)
        grad_norm: whether `report.grad_norm` is the norm of the global gradient.
        donate: whether the step may write into the state that it is given. With False that state
            stays good, at the price of a second one in memory.
        batch_spec: how the rows lie on the mesh, where that is over more than the data axis: a
            `PartitionSpec` for every leaf of the batch's data, `P(("replica", "fsdp"))` or, where
            the tokens of a row lie on several ranks, `P("data", "seq")`; or a pytree of them, in
            the structure of the data or of its first levels. Weights and ids lie as the rows do.
            Over axes that `axis_name` does not name, `loss_fn` sees all that there is, as in the
            global view, and XLA splits the work: it is written as for one device. Over those that
            it names, a rank sees its own part, and `loss_fn` says by hand what ranks tell each
            other: with `axis_name=("data", "seq")` it is given its own tokens, and its sums are
            added up over both axes, those of weights too. (A key of `rng_per="example"` is then the
            row's on each of its ranks: fold the index on the axis in.)
        axis_name: the data axis, or several; by default those that `batch_spec` shards rows over,
            and `"data"` without it.

    Returns:
        A function that compiles once for a run, short last steps included. It places the state and
        the batch on the mesh if they are elsewhere, and donates the state that it was given: use
        the one that it returns. `step.lower(state, batch)` is JAX's `Lowered` of it.

        `replicated=` is a pytree of what is no row, such as class weights or a teacher: every rank
        and microbatch is given it whole, as `loss_fn(..., replicated=...)`. Placed on the mesh
        beforehand, it is not copied there at every step.

        Further keyword arguments go to the optimizer's `update`. One that takes extra arguments is
        given those of the step by itself: `value` and `grad`, the global loss and its gradient;
        `value_fn(params)` and `grad_fn(params, _)`, both for this batch at other parameters, as
        line searches and `optax.contrib.sam` ask for them; `terms`, each term's `WeightedSum`. An
        optimizer made by `weighted_multi_steps` is given the step's weight too, and a step without
        weight still has its place in the window.

        Of a loss of several terms one may be absent from a step that others have weight in. Its
        gradient is 0 then, but an optimizer such as AdamW still moves the parameters that only this
        term pulls on. Where they must stay, let the optimizer ask for the term (below).

    Raises:
        ValueError: the mesh lacks the axis, an option is unknown, the batch's rows do not divide by
            the ranks and microbatches, a collection may differ from rank to rank, or the state was
            given away to an earlier step, or it holds several `DynamicScale`s.
        TypeError: the step is given something else than a state, a `Batch` and a key, or an
            optimizer that accumulates by votes, such as `optax.MultiSteps`, or whose state is too
            narrow for unscaled gradients; a coefficient's function returns no number. See
            `value_and_grad` for what a loss function may do wrong.

    Example:
        >>> import optax
        >>> from flax.training.train_state import TrainState
        >>> def loss_fn(params, batch):
        ...     return weighted_sum((params["w"] - batch.data) ** 2, batch.weights)
        >>> step = make_train_step(loss_fn, data_mesh(1))
        >>> state = TrainState.create(
        ...     apply_fn=None, params={"w": jnp.float32(0)}, tx=optax.sgd(0.5)
        ... )
        >>> batch = Batch.of(np.array([1.0, 3.0, 9.0]), weights=np.array([1, 1, 0]))
        >>> state, report = step(state, batch)
        >>> float(state.params["w"]), float(report.loss.value), bool(report.skipped)
        (2.0, 5.0, False)

        A second term that grows over the first hundred steps:

        >>> def penalised(params, batch):
        ...     nll = loss_fn(params, batch)
        ...     return {"nll": nll, "penalty": nll.once(params["w"] ** 2)}
        >>> weights = {"nll": 1.0, "penalty": optax.linear_schedule(0.0, 0.1, 100)}
        >>> step = make_train_step(penalised, data_mesh(1), coefficients=weights)
        >>> state, report = step(state, batch)

        Dropout that does not depend on how rows are split:

        >>> def noisy_loss(params, batch, keys):
        ...     kept = jax.vmap(lambda key: jax.random.bernoulli(key, 0.5))(keys)
        ...     return weighted_sum(params["w"] * kept * batch.data, batch.weights)
        >>> step = make_train_step(noisy_loss, data_mesh(1), rng_per="example")
        >>> state, report = step(state, batch, jax.random.key(0))

        A target network, which is no row:

        >>> def towards(params, batch, *, replicated):
        ...     errors = params["w"] - replicated["w"] * batch.data
        ...     return weighted_sum(errors**2, batch.weights)
        >>> step = make_train_step(towards, data_mesh(1))
        >>> state, report = step(state, batch, replicated={"w": jnp.float32(0.5)})

        Parameters that stay where their own term is absent:

        >>> def only_with(name, tx):
        ...     def is_present(count, *, terms, **_):
        ...         return terms[name].weight > 0
        ...     return optax.conditionally_mask(tx, is_present, forward_extra_args=True)
        >>> tx = optax.partition(
        ...     {name: only_with(name, optax.adamw(0.1)) for name in "ab"}, {"a": "a", "b": "b"}
        ... )
        >>> def two_terms(params, batch):
        ...     rows = {"a": batch.data < 5, "b": batch.data > 5}
        ...     return {
        ...         k: weighted_sum((params[k] - batch.data) ** 2, batch.weights * rows[k])
        ...         for k in "ab"
        ...     }
        >>> step = make_train_step(two_terms, data_mesh(1), coefficients={"a": 1.0, "b": 1.0})
        >>> params = {"a": jnp.float32(1), "b": jnp.float32(1)}
        >>> state = TrainState.create(apply_fn=None, params=params, tx=tx)
        >>> state, report = step(state, batch)  # the row of value 9 has weight 0
        >>> float(state.params["a"]) > 1, float(state.params["b"])
        (True, 1.0)
    """
    options = StepOptions(
        "make_train_step",
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
    return TrainStep(compile_state_step(loss_fn, mutable, options))


def compile_state_step(
    loss_fn: LossFn, mutable: str | Sequence[str], options: StepOptions
) -> CompiledStep:
    """The step of a flax `TrainState`, for makers whose options are checked."""
    names = _read_names(mutable, caller=options.caller)
    step = step_state(global_step(loss_fn, _Variables(names, options), options), options, names)

    def check(state: Any, batch: Batch, rng: Any, extra: dict[str, Any], _: PyTree) -> None:
        _check_state(state, names)
        check_parameters(state.params, options)
        find_scale(state)
        check_call(batch, rng, options)
        check_optimizer(state.tx, state.opt_state, extra)

    return CompiledStep(step, options.mesh, options.rows, check=check, donate=options.donate)


def step_state(
    gradient_of: Callable[..., Any], options: StepOptions, names: Sequence[str]
) -> Callable[..., tuple[Any, StepReport]]:
    """A step of anything that is like a train state, to be compiled.

    Args:
        gradient_of: `global_step` of the loss.
        options: how it is run.
        names: the fields of the state that the loss updates beside the parameters.

    Returns:
        `step(placement, state, batch, rng, extra, replicated) -> (state, StepReport)`, of a state
        with the fields `params`, `opt_state`, `tx` and those of `names`, perhaps a `step` and a
        `DynamicScale`; with `replace(**fields)` and `apply_gradients(grads=, **fields)`.
    """

    def step(
        placement: Any,
        state: Any,
        batch: Batch,
        rng: Array | None,
        extra: dict[str, Any],
        replicated: PyTree,
    ) -> tuple[Any, StepReport]:
        old = {name: getattr(state, name) for name in names}
        scale = find_scale(state)
        varying = Varying(
            options.call_schedules(getattr(state, "step", None)), scale and scale[1].scale
        )
        given = old, batch, rng, replicated, varying
        gradient = partial(gradient_of, placement.params)
        report, gradients, collections = gradient(state.params, *given)

        def evaluate(params: PyTree) -> tuple[Array, PyTree]:
            elsewhere, gradients, _ = gradient(params, *given)
            return elsewhere.loss.value, gradients

        def apply(optimizer: Any, state: Any) -> Any:
            # TrainState knows no extra arguments, so they are bound to its optimizer for one call.
            bound = state.replace(tx=optimizer)
            bound = bound.apply_gradients(grads=gradients, **collections)
            if scale is not None:
                check_optimizer_types(state.opt_state, bound.opt_state)
            return bound.replace(tx=state.tx)

        offered = make_arguments(state.tx, state.opt_state, report, gradients, evaluate, options)
        skipped, held, changed = report.skipped, None, {}
        if scale is not None:
            name, dynamic_scale = scale
            finite = skipped | are_finite(gradients)
            report = replace(report, finite=finite)
            changed[name] = update_scale(dynamic_scale, finite, skipped)
            # In a window such a batch has no place, as one that optax's skip_not_finite leaves out;
            # but a window that is to be closed with it is closed with what it holds.
            skipped, held = skipped | ~finite, ~finite & ~jnp.asarray(extra.get("flush", False))
            if "weight" in offered:
                offered["weight"] = jnp.where(finite, offered["weight"], 0)
            collections = jax.tree.map(partial(jnp.where, finite), collections, old)
        state, stepped = run_optimizer(
            state.tx, state.opt_state, offered, extra, skipped, apply, state, held
        )
        norm = global_norm(gradients) if options.grad_norm else None
        return state.replace(**changed), replace(report, stepped=stepped, grad_norm=norm)

    return step


@dataclass(frozen=True)
class _Variables:
    """A flax model: parameters alone, or variables where it updates collections (a `ModelKind`)."""

    names: tuple[str, ...]
    options: StepOptions

    @property
    def noun(self) -> str:
        return "variables" if self.names else "params"

    def hand_out(self, params: PyTree, state: PyTree) -> tuple[Any, dict[str, Any]]:
        free = free_boxes({"params": params, **state}, self.options.mapped_axis)
        return free if self.names else free["params"], {}

    def take_back(self, first: Any, out: Any, state: PyTree) -> tuple[Any, PyTree]:
        caller, names = self.options.caller, self.names
        if not names:
            return out, state
        if not (isinstance(out, tuple) and len(out) == 2 and isinstance(out[1], Mapping)):
            raise TypeError(
                f"{caller}: loss_fn must return (sums, updates) where mutable is given, got "
                f"{type(out).__name__}. The updates are the second value of "
                f"model.apply(variables, ..., mutable={list(names)})."
            )
        sums, updates = out
        if set(updates) != set(names):
            raise ValueError(
                f"{caller}: loss_fn must return updates of {sorted(names)}, got "
                f"{sorted(updates)}. Name in mutable what model.apply(..., mutable=...) names."
            )
        return sums, {name: box_as(updates[name], state[name]) for name in names}

    def check_unused(self, first: Any, state: PyTree) -> None:
        """Nothing is ever used up: what the statistics are given is a pytree of arrays."""


def _read_names(mutable: Any, *, caller: str) -> tuple[str, ...]:
    """The names of collections, if they can be such.

    Raises:
        TypeError: they are no names.
        ValueError: one is that of a field that the step changes by itself, or comes twice.
    """
    if not isinstance(mutable, str | list | tuple | set | frozenset) or not all(
        isinstance(name, str) for name in mutable
    ):
        raise TypeError(
            f"{caller}: mutable must be names of collections, got {mutable!r}. For instance"
            ' ["batch_stats"].'
        )
    names = (mutable,) if isinstance(mutable, str) else tuple(mutable)
    own = [name for name in names if name in ("params", "opt_state", "step", "tx", "apply_fn")]
    if own or len(set(names)) < len(names):
        raise ValueError(
            f"{caller}: mutable must name each collection beside the parameters once, got"
            f" {names}. Parameters and the optimizer's state are the step's own."
        )
    return names


def _check_state(state: Any, names: tuple[str, ...]) -> None:
    if not (hasattr(state, "params") and hasattr(state, "apply_gradients")):
        raise TypeError(
            f"train step: state must be a flax TrainState, got {type(state).__name__}. "
            "TrainState.create(apply_fn=..., params=..., tx=...) makes one; for an nnx.Module "
            "there is make_nnx_train_step, for params and opt_state alone make_optax_step."
        )
    for name in names:
        if not hasattr(state, name):
            raise TypeError(
                f"train step: state must have a field for each name in mutable, got none for "
                f"{name!r}. Add it to a subclass, class State(TrainState): {name}: Any."
            )
