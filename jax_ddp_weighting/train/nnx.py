"""The same training step for an `nnx.Module` and its `nnx.Optimizer`, both updated in place."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh
from jax.stages import Lowered
from jaxtyping import Array, PyTree

from jax_ddp_weighting.data.batch import Batch
from jax_ddp_weighting.distributed.mesh import AxisName
from jax_ddp_weighting.train.batch_layout import BatchSpec
from jax_ddp_weighting.train.compilation import CompiledStep
from jax_ddp_weighting.train.loss_scale import is_scale
from jax_ddp_weighting.train.optimizer import (
    check_optimizer,
    make_arguments,
    run_optimizer,
)
from jax_ddp_weighting.train.shards import global_norm
from jax_ddp_weighting.train.step import (
    StepReport,
    check_call,
    global_step,
)
from jax_ddp_weighting.train.step_options import StepOptions, Varying
from jax_ddp_weighting.weighting.divisors import Divisors
from jax_ddp_weighting.weighting.loss_terms import LossFn
from jax_ddp_weighting.weighting.statistics import Statistics


@dataclass(frozen=True)
class NnxTrainStep:
    """A compiled step for an `nnx.Module`, as `make_nnx_train_step` makes it."""

    compiled: CompiledStep

    def __call__(
        self,
        model: nnx.Module,
        optimizer: nnx.Optimizer,
        batch: Batch,
        rng: Array | None = None,
        *,
        replicated: PyTree = None,
        **optimizer_args: Any,
    ) -> StepReport:
        """The report of a step; model and optimizer are updated in place."""
        carried = split_pair(model, optimizer)
        replicated = self.compiled.replicate(replicated)
        found, report = self.compiled(carried, batch, rng, optimizer_args, replicated)
        update_pair(model, optimizer, found)
        return report

    def lower(
        self,
        model: nnx.Module,
        optimizer: nnx.Optimizer,
        batch: Batch,
        rng: Array | None = None,
        *,
        replicated: PyTree = None,
        **optimizer_args: Any,
    ) -> Lowered:
        """JAX's `Lowered` of the step for these arguments: nothing is run."""
        carried = split_pair(model, optimizer)
        replicated = self.compiled.replicate(replicated)
        return self.compiled.lower(carried, batch, rng, optimizer_args, replicated)


def split_pair(model: Any, optimizer: Any) -> tuple[Any, ...]:
    """What a step carries of a model and its optimizer.

    Raises:
        TypeError: they are none.
    """
    _check_pair(model, optimizer)
    model_def, *states = nnx.split(model, optimizer.wrt, nnx.RngKey, ...)
    return (model_def, *states, optimizer)


def update_pair(model: nnx.Module, optimizer: nnx.Optimizer, carried: tuple[Any, ...]) -> None:
    """The model and its optimizer, updated in place by what a step has carried on."""
    _, *states, updated = carried
    nnx.update(model, *states)
    # An optimizer shares nothing, so that it is a plain pytree, much faster than nnx.update.
    for old, new in zip(_find_variables(optimizer), _find_variables(updated), strict=True):
        old.set_value(new.get_value())


def make_nnx_train_step(
    loss_fn: LossFn,
    mesh: Mesh,
    *,
    microbatches: int = 1,
    engine: str = "shard_map",
    coefficients: Mapping[str, Any] | None = None,
    divisors: Divisors | None = None,
    statistics: Statistics | None = None,
    skip_empty: bool = True,
    rng_per: str = "rank",
    gather_per: str = "step",
    grad_norm: bool = False,
    donate: bool = True,
    batch_spec: BatchSpec | None = None,
    axis_name: AxisName | None = None,
) -> NnxTrainStep:
    """A compiled step `(model, optimizer, batch, rng=None) -> report` that updates both in place.

    The rule: as in `make_train_step`, the gradient of the global weighted mean is applied once per
    step, and a step in which nothing has weight changes nothing. The gradient is taken with respect
    to the optimizer's `wrt`. All other variables of the model, such as batch statistics, pass
    through the microbatches in order and must come out the same on every rank.

    Args:
        loss_fn: `loss_fn(model, batch)` for a `Batch` returns a `WeightedSum`, or a dict of them
            that `coefficients` combines; `loss_fn(model, batch, rng)` where the step is given an
            rng. It may update the model's variables, and add or remove none.
        mesh: a mesh with the data axis, over any of whose axes parameters may be sharded.
        microbatches: how many microbatches each rank splits its rows into.
        engine: `"shard_map"`, `"jit"` (the global view) or `"pmap"`.
        coefficients: one factor per term, as in `make_train_step`; functions of the step are called
            with `optimizer.step`.
        divisors: what terms are divided by in place of their weights, as in `make_train_step`.
        statistics: `statistics(model, batch)`, sums over all rows of the step, as in
            `make_train_step`. What it changes in the model is dropped.
        skip_empty: whether a step in which nothing has weight is skipped, as in `make_train_step`.
        rng_per: `"rank"` folds the rng, and the model's own random streams, with the rank; the
            global view of `jit` has one for all rows. `"example"` gives `loss_fn` an array of keys
            `[rows]`, each made of the rng and the row's id alone, and refuses a model that draws
            from streams of its own.
        gather_per: when parameters that are sharded over the data axis are gathered, as in
            `make_train_step`.
        grad_norm: whether `report.grad_norm` is the norm of the global gradient.
        donate: whether the step may write into the arrays of the model and the optimizer. With
            False whoever else holds them may go on reading, at the price of a second set in memory.
        batch_spec: how the rows lie on the mesh, where that is over more than the data axis, as in
            `make_train_step`.
        axis_name: the data axis, or several, as in `make_train_step`.

    Returns:
        A function that compiles once for a run, short last steps included, and as often as the
        model's structure changes, as by `model.eval()`. It places the model and the optimizer on
        the mesh if they are elsewhere. Arrays that they held before are donated: read them from the
        model. `step.lower(model, optimizer, batch)` is JAX's `Lowered` of it. `replicated=` is a
        pytree of what is no row, as in `make_train_step`. Further keyword arguments go to the
        optimizer's `update`; what an optimizer is given by itself is listed at `make_train_step`.

    Raises:
        ValueError: as `make_train_step`; or a variable was added or removed, or a random stream
            drawn from where keys are per example.
            The step: the optimizer is one of another model, or trains none of its parameters.
        TypeError: the step is given something else than a model, an `nnx.Optimizer`, a `Batch` and
            a key; or a `DynamicScale` in one of them, which `make_train_step` alone knows.

    Example:
        >>> import optax
        >>> from flax import nnx
        >>> def loss_fn(model, batch):
        ...     losses = (model(batch.data["x"])[:, 0] - batch.data["y"]) ** 2
        ...     return weighted_sum(losses, batch.weights)
        >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
        >>> optimizer = nnx.Optimizer(model, optax.adamw(0.1), wrt=nnx.Param)
        >>> step = make_nnx_train_step(loss_fn, data_mesh(1))
        >>> rows = {"x": np.ones((4, 2), np.float32), "y": np.ones(4, np.float32)}
        >>> batch = Batch.of(rows, weights=np.array([1, 1, 1, 0]))
        >>> losses = [float(step(model, optimizer, batch).loss.value) for _ in range(20)]
        >>> losses[-1] < 0.1 * losses[0], int(optimizer.step[...])
        (True, 20)
    """
    options = StepOptions(
        "make_nnx_train_step",
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
    return NnxTrainStep(compile_nnx_step(loss_fn, options))


def compile_nnx_step(loss_fn: LossFn, options: StepOptions) -> CompiledStep:
    """The step of a model and its optimizer, for makers whose options are checked."""

    def step(
        placement: Any,
        carried: Any,
        batch: Batch,
        rng: Array | None,
        extra: dict[str, Any],
        replicated: PyTree,
    ) -> tuple[Any, StepReport]:
        model_def, params, keys, rest, optimizer = carried
        kind = _Module(model_def, optimizer.wrt, options)
        gradient = partial(global_step(loss_fn, kind, options), placement[1])
        old = {"streams": keys, "variables": rest}
        given = old, batch, rng, replicated, Varying(options.call_schedules(optimizer.step[...]))
        report, gradients, state = gradient(params, *given)

        def evaluate(arrays: PyTree) -> tuple[Array, PyTree]:
            # an optimizer sees arrays where a model has variables
            elsewhere = jax.tree.unflatten(jax.tree.structure(params), jax.tree.leaves(arrays))
            found, gradients, _ = gradient(elsewhere, *given)
            return found.loss.value, nnx.as_pure(gradients)

        def apply(bound: Any, trained: Any) -> Any:
            params, optimizer = trained
            model = nnx.merge(model_def, params, keys, state["variables"], copy=True)
            updated = jax.tree.map(lambda leaf: leaf, optimizer)
            updated.tx = bound
            updated.update(model, gradients)
            updated.tx = optimizer.tx
            return nnx.state(model, optimizer.wrt), updated

        tx, opt_state, pure = optimizer.tx, optimizer.opt_state, nnx.as_pure(gradients)
        offered = make_arguments(tx, opt_state, report, pure, evaluate, options)
        for_tx = nnx.as_pure(extra)
        (params, optimizer), stepped = run_optimizer(
            tx, opt_state, offered, for_tx, report.skipped, apply, (params, optimizer)
        )
        norm = global_norm(gradients) if options.grad_norm else None
        carried = (model_def, params, keys, state["variables"], optimizer)
        return carried, replace(report, stepped=stepped, grad_norm=norm)

    def check(carried: Any, batch: Batch, rng: Any, extra: dict[str, Any], _: PyTree) -> None:
        *model, optimizer = carried
        _check_without_scale(nnx.merge(*model, copy=True), optimizer)
        _check_trains(model[1], optimizer)
        check_call(batch, rng, options)
        check_optimizer(optimizer.tx, optimizer.opt_state, extra)

    return CompiledStep(step, options.mesh, options.rows, check=check, donate=options.donate)


@dataclass(frozen=True)
class _Module:
    """An `nnx.Module` of a rank's own, with random streams of the rank's own (a `ModelKind`)."""

    model_def: Any
    wrt: Any
    options: StepOptions
    noun: str = "model"

    def hand_out(self, params: PyTree, state: PyTree) -> tuple[Any, dict[str, Any]]:
        keys, axis_name = state["streams"], self.options.mapped_axis
        if axis_name is not None and self.options.rng_per != "example":
            rank = jax.lax.axis_index(axis_name)
            keys = jax.tree.map(lambda key: _fold_rank(key, rank), keys)
        return nnx.merge(self.model_def, params, keys, state["variables"], copy=True), {}

    def take_back(self, first: Any, out: Any, state: PyTree) -> tuple[Any, PyTree]:
        new_def, _, _, variables = self._split(first)
        if new_def != self.model_def:
            raise ValueError(
                f"{self.options.caller}: loss_fn must leave the model's structure as it is, got a "
                "model with other variables or attributes than before. Return what you would keep "
                "in them as a term, or take them out with nnx.pop."
            )
        self._check_nothing_drawn("loss_fn", state, variables)
        return out, {"streams": state["streams"], "variables": variables}

    def check_unused(self, first: Any, state: PyTree) -> None:
        self._check_nothing_drawn("statistics", state, self._split(first)[3])

    def _split(self, model: Any) -> Any:
        return nnx.split(model, self.wrt, nnx.RngKey, ...)

    def _check_nothing_drawn(self, name: str, state: PyTree, variables: PyTree) -> None:
        if self.options.rng_per != "example":
            return
        of_each = (state["variables"], variables)
        counts = [jax.tree.leaves(nnx.filter_state(each, nnx.RngCount)) for each in of_each]
        if any(old is not new for old, new in zip(*counts, strict=True)):
            raise ValueError(
                f"{self.options.caller}: {name} must draw from its rng alone where "
                "rng_per='example', got a model that drew from a stream of its own, which knows no "
                "examples. Pass keys to its layers, or build it without rngs."
            )


def _find_variables(tree: Any) -> list[nnx.Variable]:
    return jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, nnx.Variable))


def _fold_rank(key: Array, rank: Array) -> Array:
    fold = jax.random.fold_in
    for _ in range(key.ndim):  # a stream may have been split
        fold = jax.vmap(fold, in_axes=(0, None))
    return fold(key, rank)


def _check_without_scale(model: Any, optimizer: Any) -> None:
    for tree in (model, optimizer):
        for path, node in nnx.iter_graph(tree):
            if is_scale(node.get_value() if isinstance(node, nnx.Variable) else node):
                where = ".".join(map(str, path))
                raise TypeError(
                    "train step: model and optimizer must hold no DynamicScale, got one at "
                    f"{where}. It is used where a flax TrainState holds it, by make_train_step; "
                    "for nnx take value_and_grad with the scale as a traced coefficient, and "
                    "divide the gradients by it in float32."
                )


def _check_trains(params: PyTree, optimizer: Any) -> None:
    """Raises `ValueError` for an optimizer that was made for other parameters, or that has none."""
    if not jax.tree.leaves(params):
        raise ValueError(
            f"train step: optimizer must train parameters of the model, got wrt={optimizer.wrt!r}, "
            "which none of its variables is. nnx.Optimizer(model, tx, wrt=nnx.Param) trains all."
        )
    known = set(_name_leaves(params))
    states = jax.tree.leaves(optimizer.opt_state, is_leaf=lambda node: isinstance(node, nnx.State))
    for state in states:
        named = _name_leaves(state) if isinstance(state, nnx.State) else []
        strange = [name for name in named if name not in known]
        if strange:
            raise ValueError(
                "train step: optimizer must be made for this model, got one whose state is of "
                f"{strange[0]}, which the model has not. Make it of the model that it is to train, "
                "nnx.Optimizer(model, tx, wrt=nnx.Param)."
            )


def _name_leaves(tree: PyTree) -> list[str]:
    return [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


def _check_pair(model: Any, optimizer: Any) -> None:
    if not isinstance(model, nnx.Module):
        raise TypeError(
            f"train step: model must be an nnx.Module, got {type(model).__name__}. For a flax "
            "TrainState there is make_train_step."
        )
    if not isinstance(optimizer, nnx.Optimizer) or isinstance(optimizer, nnx.ModelAndOptimizer):
        raise TypeError(
            f"train step: optimizer must be an nnx.Optimizer, got {type(optimizer).__name__}. "
            "nnx.Optimizer(model, tx, wrt=nnx.Param) makes one."
        )
