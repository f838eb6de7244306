"""One optimizer step over all ranks: the global gradient, applied once, or skipped when empty."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Bool, PyTree

from jax_ddp_weighting import mesh as meshes
from jax_ddp_weighting.feed import Batch
from jax_ddp_weighting.mesh import AxisName
from jax_ddp_weighting.sums import WeightedSum
from jax_ddp_weighting.weighting import GlobalLoss, LossFn, named_terms, value_and_grad

ENGINES = ("shard_map", "jit", "pmap")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepReport:
    """What a step did, as device scalars: reading them waits for the step.

    Attributes:
        loss: the global loss and its terms.
        weight: the accepted weight of the batch, summed over all ranks.
        skipped: whether nothing was applied, because nothing in the step had any weight.
    """

    loss: GlobalLoss
    weight: Array
    skipped: Bool[Array, ""]

    @property
    def means(self) -> dict[str, Array]:
        """Each term's mean over its own weight, before its coefficient."""
        return {name: term.mean() for name, term in self.loss.terms.items()}


TrainStep = Callable[..., tuple[Any, StepReport]]


def make_train_step(
    loss_fn: LossFn,
    mesh: Mesh,
    *,
    microbatches: int = 1,
    engine: str = "shard_map",
    coefficients: Mapping[str, Any] | None = None,
    axis_name: AxisName = "data",
) -> TrainStep:
    """A compiled step `(state, batch, rng=None) -> (state, report)` for a flax `TrainState`.

    The rule: the gradient of the global weighted mean is applied once per step. A step in which
    nothing has weight changes nothing: not the parameters, not the optimizer's state, not the count
    that schedules read. (A zero gradient would not do: AdamW moves parameters on one.)

    Args:
        loss_fn: `loss_fn(params, batch)` for a `Batch` returns a `WeightedSum`, or a dict of them
            that `coefficients` combines; `loss_fn(params, batch, rng)` where the step is given an
            rng, which is folded with the rank and the microbatch.
        mesh: a mesh with the data axis. Parameters may be sharded over other axes.
        microbatches: how many microbatches each rank splits its rows into.
        engine: `"shard_map"`, `"jit"` (the global view: one rng for all rows) or `"pmap"`.
        coefficients: one factor per term.
        axis_name: the data axis.

    Returns:
        A function that compiles once for a run, short last steps included. It places the state and
        the batch on the mesh if they are elsewhere, and donates the state that it was given: use
        the one that it returns.

    Raises:
        ValueError: the mesh lacks the axis, the engine is unknown, or the batch's rows do not
            divide by the ranks. See `value_and_grad` for what a loss function may do wrong.
        TypeError: the step is given something else than a `Batch`.

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
    """
    if engine not in ENGINES:
        raise ValueError(
            f"make_train_step: engine must be one of {', '.join(ENGINES)}, got {engine!r}. "
            '"shard_map" is the default.'
        )
    ranks = meshes.num_ranks(mesh, axis_name, caller="make_train_step")
    if engine == "pmap":  # pmap's own arrays have axes of type Auto
        mesh = Mesh(mesh.devices, mesh.axis_names)
    mapped_axis = None if engine == "jit" else axis_name
    factors = {**(coefficients or {"loss": 1.0}), _ACCEPTED: 0.0}
    gradient = value_and_grad(
        _with_accepted(loss_fn, coefficients),
        axis_name=mapped_axis,
        microbatches=microbatches,
        coefficients=factors,
    )

    def rank_gradient(replicated: tuple[PyTree, Array | None], batch: Batch) -> Any:
        params, rng = replicated
        if rng is not None and mapped_axis is not None:
            rng = jax.random.fold_in(rng, jax.lax.axis_index(mapped_axis))
        return gradient(params, batch, rng)

    mesh_gradient = meshes.over_ranks(rank_gradient, mesh, axis_name=axis_name, engine=engine)

    def step(state: Any, batch: Batch, rng: Array | None) -> tuple[Any, StepReport]:
        loss, gradients = mesh_gradient((state.params, rng), batch)
        terms = dict(loss.terms)
        weight = terms.pop(_ACCEPTED).weight
        counted = [term.weight > 0 for term in terms.values()]
        skipped = (weight == 0) | ~jnp.any(jnp.stack(counted))
        state = jax.lax.cond(skipped, lambda: state, lambda: state.apply_gradients(grads=gradients))
        return state, StepReport(GlobalLoss(loss.value, terms), weight, skipped)

    @cache
    def compiled(structure: Any, shardings: tuple[Any, ...]) -> Any:
        # Pinned, so that XLA cannot return the state placed otherwise than it came: a second
        # compilation, and for sharded parameters a slow one-off reshuffle.
        placement = structure.unflatten(shardings)
        return jax.jit(step, donate_argnums=0, out_shardings=(placement, None))

    def train_step(state: Any, batch: Batch, rng: Array | None = None) -> tuple[Any, StepReport]:
        _check_batch(batch, ranks)
        state = meshes.placed(state, meshes.replicated_sharding(mesh))
        batch = meshes.placed(batch, meshes.row_sharding(mesh, axis_name))
        leaves, structure = jax.tree.flatten(state)
        return compiled(structure, tuple(leaf.sharding for leaf in leaves))(state, batch, rng)

    return train_step


_ACCEPTED = "accepted rows"  # a term of no value whose weight rides along with the others'


def _with_accepted(loss_fn: LossFn, coefficients: Mapping[str, Any] | None) -> LossFn:
    def with_accepted(params: PyTree, batch: Batch, *rng: Array) -> dict[str, WeightedSum]:
        terms = named_terms(loss_fn(params, batch, *rng), coefficients)
        return {**terms, _ACCEPTED: WeightedSum(jnp.zeros(()), jnp.sum(batch.weights))}

    return with_accepted


def _check_batch(batch: Any, ranks: int) -> None:
    if not isinstance(batch, Batch):
        raise TypeError(
            f"train step: batch must be a Batch, got {type(batch).__name__}. "
            "Batch.of(data, weights) makes one; batches(plan, ...) yields them."
        )
    rows = batch.weights.shape[0]
    if rows % ranks:
        raise ValueError(
            f"train step: batch must have rows that divide by {ranks} ranks, got {rows}. Fill up "
            "with rows of weight 0, as batches(plan, ...) does."
        )
