"""An epoch as one program: every step of a plan in one compiled scan, without a host between."""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, PyTree

from jax_ddp_weighting._arguments import check_epoch, check_up_to
from jax_ddp_weighting.data.batch import Batch
from jax_ddp_weighting.data.device_plan import DevicePlan
from jax_ddp_weighting.distributed import mesh as meshes
from jax_ddp_weighting.distributed.mesh import AxisName
from jax_ddp_weighting.distributed.placement import check_device_values, id_dtype
from jax_ddp_weighting.sampling.plan import EpochPlan, check_plan
from jax_ddp_weighting.train.train_state import TrainStep, make_train_step
from jax_ddp_weighting.weighting.gradient import GlobalLoss
from jax_ddp_weighting.weighting.loss_terms import LossFn


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class EpochReport:
    """What the steps of an epoch did: the fields of a `StepReport`, stacked over steps.

    Attributes:
        loss: each step's global loss and its terms, every array of it ``[steps]``.
        weight: ``[steps]``, the accepted weight of each.
        skipped: ``[steps]``, whether it had no weight.
        stepped: ``[steps]``, whether the optimizer applied an update.
        grad_norm: ``[steps]`` with `grad_norm=True`, else None.
        finite: ``[steps]``, whether the gradient was finite, where the state has a `DynamicScale`;
            else None.
    """

    loss: GlobalLoss
    weight: Array
    skipped: Array
    stepped: Array
    grad_norm: Array | None = None
    finite: Array | None = None

    @property
    def bad_weights(self) -> Array:
        """``[steps]``, how many weights of each could not count."""
        return self.loss.bad_weights

    @property
    def means(self) -> dict[str, Array]:
        """Each term's means ``[steps]``, over its own weight or divisor."""
        return self.loss.means


@dataclass(frozen=True, eq=False)
class TrainEpoch:
    """A compiled epoch for a flax `TrainState`, as `make_train_epoch` makes it."""

    step: TrainStep
    mesh: Mesh
    plan: EpochPlan
    axis_name: AxisName
    _jitted: dict[Any, Any] = field(default_factory=dict)  # by structure and placement of the state

    def __call__(
        self,
        state: Any,
        data: PyTree,
        epoch: int,
        rng: Array | None = None,
        *,
        start_step: int = 0,
        replicated: PyTree = None,
        **optimizer_args: Any,
    ) -> tuple[Any, EpochReport]:
        """The state after the epoch, and the reports of its steps."""
        ambient = jax.sharding.get_abstract_mesh()
        if not ambient.empty and ambient != self.mesh.abstract_mesh:
            # a mesh that was set for the program would be taken for the one that ours lie on
            with jax.set_mesh(self.mesh):
                options = {"start_step": start_step, "replicated": replicated, **optimizer_args}
                return self(state, data, epoch, rng, **options)
        epoch = check_epoch("train epoch: epoch", epoch)
        steps = self.plan.steps_per_epoch
        remedy = "A later step belongs to the next epoch."
        start_step = check_up_to("train epoch: start_step", start_step, steps, remedy)
        on_device = DevicePlan.of(self.plan, [epoch])
        self._check_data(data)
        everywhere = meshes.replicated_sharding(self.mesh)
        data, on_device, rng, replicated, optimizer_args = meshes.place(
            (data, on_device, rng, replicated, optimizer_args), everywhere
        )
        # of strong types, as a step returns them: what a scan carries cannot change its type
        state = jax.tree.map(
            lambda leaf: jax.lax.convert_element_type(leaf, leaf.dtype),
            meshes.place(_as_arrays(state), everywhere),
        )
        numbers = jnp.arange(start_step, steps, dtype=jnp.uint32)
        run = self._compile(state)
        return run(state, data, on_device, numbers, epoch, rng, replicated, optimizer_args)

    def _compile(self, state: Any) -> Any:
        leaves, structure = jax.tree.flatten(state)
        placement = [leaf.sharding for leaf in leaves]
        key = (structure, tuple(placement))
        if key not in self._jitted:
            # pinned, so that the next epoch finds the state placed as this one did
            shardings = (structure.unflatten(placement), None)
            self._jitted[key] = jax.jit(self._run, out_shardings=shardings)
        return self._jitted[key]

    def _run(
        self,
        state: Any,
        data: PyTree,
        on_device: DevicePlan,
        numbers: Array,
        epoch: Array,
        rng: Array | None,
        replicated: PyTree,
        optimizer_args: dict[str, Any],
    ) -> tuple[Any, EpochReport]:
        rows = meshes.row_sharding(self.mesh, self.axis_name)

        def run_step(state: Any, number: Array) -> tuple[Any, EpochReport]:
            batch = _take_batch(on_device, epoch, number, data, rows)
            key = None
            if rng is not None:
                key = jax.random.fold_in(jax.random.fold_in(rng, epoch), number)
            state, report = self.step(state, batch, key, replicated=replicated, **optimizer_args)
            fields = EpochReport.__dataclass_fields__
            return state, EpochReport(**{name: getattr(report, name) for name in fields})

        return jax.lax.scan(run_step, state, numbers)

    def _check_data(self, data: PyTree) -> None:
        n = self.plan.num_examples
        leaves = jax.tree_util.tree_leaves_with_path(data)
        for path, leaf in leaves:
            name = f"data{jax.tree_util.keystr(path)}"
            if np.shape(leaf)[:1] != (n,):
                raise ValueError(
                    f"train epoch: data must have a row for each of the plan's {n} examples, got"
                    f" shape {np.shape(leaf)} at {name}. Row i is example i, whatever the order."
                )
            if not isinstance(leaf, jax.Array):
                check_device_values(np.asarray(leaf), name, caller="train epoch")
        if not leaves:
            raise ValueError("train epoch: data must be arrays, got none.")


def make_train_epoch(
    loss_fn: LossFn,
    mesh: Mesh,
    plan: EpochPlan,
    *,
    axis_name: AxisName = "data",
    engine: str = "shard_map",
    **options: Any,
) -> TrainEpoch:
    """A compiled epoch `(state, data, epoch, rng=None) -> (state, reports)` for a `TrainState`.

    The rule: all steps of the plan's epoch run in one `lax.scan`, with ids made on the device
    (`DevicePlan`) and rows taken there from data that lie there whole. The state that comes out is
    that of the loop over `batches` and `make_train_step`: to the last bit where XLA fuses a step
    inside the scan as it does alone, as for plain losses, and to rounding elsewhere, as seen with
    divisors, statistics and a schedule together.

    Args:
        loss_fn: as `make_train_step` takes it.
        mesh: a mesh with the data axis.
        plan: who reads what; its `num_replicas` is the size of the mesh's data axis.
        axis_name: the data axis.
        engine: `"shard_map"` or `"jit"`.
        options: those of `make_train_step`, but for `donate`: the state that is given stays good.

    Returns:
        A function that compiles once for all epochs. `data` is a pytree of arrays
        `[num_examples, ...]`, whose row `i` is example `i`; placed on the mesh beforehand,
        replicated or with rows sharded over the data axis, they are not copied there for every
        epoch. `epoch` is an integer. Each step's rng is `fold_in(fold_in(rng, epoch), step)`: one
        rng does for a run. `start_step=` is the first step to run, of an epoch that was stopped: it
        compiles anew. `replicated=` and further keyword arguments are those of a step, the same in
        each. `reports` is an `EpochReport`: the steps' own reports, stacked.

    Raises:
        TypeError: the plan is none, or as `make_train_step` says.
        ValueError: the mesh has not the plan's number of ranks, the plan has no steps, the engine
            is another, or as `make_train_step` says. The function, when called: data have another
            number of rows than the plan examples, or a number is out of range.

    Example:
        >>> import optax
        >>> from flax.training.train_state import TrainState
        >>> from jax_ddp_weighting import data_mesh, weighted_sum
        >>> def loss_fn(params, batch):
        ...     return weighted_sum((params["w"] - batch.data) ** 2, batch.weights)
        >>> plan = EpochPlan(5, num_replicas=1, batch_size=2)
        >>> run_epoch = make_train_epoch(loss_fn, data_mesh(1), plan)
        >>> params = {"w": jnp.float32(0)}
        >>> state = TrainState.create(apply_fn=None, params=params, tx=optax.sgd(0.5))
        >>> for epoch in range(2):
        ...     state, reports = run_epoch(state, np.full(5, 3.0), epoch)
        >>> float(state.params["w"]), reports.weight.tolist()
        (3.0, [2, 2, 1])
    """
    check_plan("make_train_epoch: plan", plan)
    if engine not in ("shard_map", "jit"):
        raise ValueError(
            f'make_train_epoch: engine must be "shard_map" or "jit", got {engine!r}. pmap is a'
            " program of its own and cannot be part of one."
        )
    if "donate" in options:
        raise TypeError(
            "make_train_epoch: donate must be left out, got one. The state that is given stays"
            " good, and within the epoch it is written in place."
        )
    ranks = meshes.num_ranks(mesh, axis_name, caller="make_train_epoch")
    if plan.num_replicas != ranks:
        raise ValueError(
            f"make_train_epoch: plan must have as many ranks as the mesh's {axis_name!r} axis, got"
            f" {plan.num_replicas} and {ranks}. Make the plan with num_replicas={ranks}."
        )
    if not plan.steps_per_epoch:
        raise ValueError(
            f"make_train_epoch: plan must have a step, got {plan.num_examples} examples for"
            f" {ranks} ranks of {plan.batch_size} rows and tail={plan.tail!r}."
        )
    # of axes of type Auto, over which rows may be taken without a word on where they go
    auto = Mesh(mesh.devices, mesh.axis_names)
    step = make_train_step(
        loss_fn, auto, axis_name=axis_name, engine=engine, donate=False, **options
    )
    return TrainEpoch(step, auto, plan, axis_name)


def _take_batch(
    on_device: DevicePlan, epoch: Array, number: Array, data: PyTree, rows: NamedSharding
) -> Batch:
    """The rows of a step of all ranks, each where its rank is."""
    slots = on_device.batch(epoch, number)
    ids, weights = (
        jax.lax.with_sharding_constraint(leaf.reshape(-1), rows)
        for leaf in (slots.ids, slots.weights)
    )

    def take(leaf: Array) -> Array:
        # As integers: where rows are sharded XLA adds up what each device has, and -0 + 0 is 0.
        bits = leaf
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            unsigned = jnp.dtype(f"uint{8 * leaf.dtype.itemsize}")
            bits = jax.lax.bitcast_convert_type(leaf, unsigned)
        taken = bits.at[ids].get(mode="promise_in_bounds")
        if bits is not leaf:
            taken = jax.lax.bitcast_convert_type(taken, leaf.dtype)
        return jax.lax.with_sharding_constraint(taken, rows)

    return Batch(jax.tree.map(take, data), ids.astype(id_dtype()), weights)


def _as_arrays(state: Any) -> Any:
    """The state, its plain numbers as arrays."""
    return jax.tree.map(lambda leaf: leaf if hasattr(leaf, "dtype") else jnp.asarray(leaf), state)
