"""An evaluation as one program: every step of a plan over data that lie on the devices."""

from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.stages import Lowered
from jaxtyping import Array, PyTree

from jax_ddp_weighting._arguments import check_epoch
from jax_ddp_weighting.data.device_plan import DevicePlan
from jax_ddp_weighting.data.device_rows import check_plan_of_mesh, check_rows_of_plan, take_batch
from jax_ddp_weighting.distributed import mesh as meshes
from jax_ddp_weighting.distributed.mesh import AxisName
from jax_ddp_weighting.distributed.placement import check_tree_not_cut
from jax_ddp_weighting.evaluation.step_sums import (
    Evaluation,
    MetricFn,
    StepSums,
    check_empty,
    check_no_rows,
    count_accepted,
    name_metrics,
)
from jax_ddp_weighting.sampling.plan import EpochPlan

_CALLER = "make_evaluation"


@dataclass(frozen=True, eq=False)
class DeviceEvaluation:
    """A compiled evaluation, as `make_evaluation` makes it."""

    metric_fn: MetricFn
    mesh: Mesh
    plan: EpochPlan
    axis_name: AxisName
    empty: Literal["raise", "nan"]
    _jitted: Any = field(init=False)

    def __post_init__(self) -> None:
        everywhere = meshes.replicated_sharding(self.mesh)
        object.__setattr__(self, "_jitted", jax.jit(self._run, out_shardings=everywhere))

    def __call__(self, params: PyTree, data: PyTree, epoch: int = 0) -> Evaluation:
        """What the metrics come to over the epoch."""
        ambient = jax.sharding.get_abstract_mesh()
        if not ambient.empty and ambient != self.mesh.abstract_mesh:
            with jax.set_mesh(self.mesh):
                return self(params, data, epoch)
        totals = StepSums(_CALLER)
        totals.add_all(*self._jitted(*self._prepare(params, data, epoch)))
        return totals.evaluation(self.empty)

    def lower(self, params: PyTree, data: PyTree, epoch: int = 0) -> Lowered:
        """JAX's `Lowered` of the program for these arguments: nothing is run."""
        return self._jitted.lower(*self._prepare(params, data, epoch))

    def _prepare(self, params: PyTree, data: PyTree, epoch: int) -> tuple[Any, ...]:
        epoch = check_epoch(f"{_CALLER}: epoch", epoch)
        check_rows_of_plan(data, self.plan, self.mesh, caller=_CALLER)
        check_tree_not_cut(params, "params", caller=_CALLER)
        on_host = DevicePlan.on_host(self.plan, [epoch])
        everywhere = meshes.replicated_sharding(self.mesh)
        params, data, on_device = meshes.place((params, data, on_host), everywhere)
        return params, data, on_device, np.int32(epoch)

    def _run(
        self, params: PyTree, data: PyTree, on_device: DevicePlan, epoch: Array
    ) -> tuple[Any, Array]:
        rows = meshes.row_sharding(self.mesh, self.axis_name)
        everywhere = meshes.replicated_sharding(self.mesh)

        def take_turn(carried: None, number: Array) -> tuple[None, tuple[Any, Array]]:
            # between barriers, so that XLA fuses and rounds as it does in a program of one step
            batch = take_batch(on_device, epoch, number, data, rows)
            given, batch = jax.lax.optimization_barrier((params, batch))
            first = () if params is None else (given,)
            sums = self.metric_fn(*first, batch)
            name_metrics(sums, caller=_CALLER)
            sums = jax.tree.map(jnp.asarray, sums)  # Python's numbers, such as a length
            check_no_rows(self.metric_fn, first, batch, sums, caller=_CALLER)
            found = jax.lax.optimization_barrier((sums, count_accepted(batch.weights)))
            return carried, jax.lax.with_sharding_constraint(found, everywhere)

        numbers = jnp.arange(self.plan.steps_per_epoch, dtype=jnp.uint32)
        return jax.lax.scan(take_turn, None, numbers)[1]


def make_evaluation(
    metric_fn: MetricFn,
    mesh: Mesh,
    plan: EpochPlan,
    *,
    empty: Literal["raise", "nan"] = "raise",
    axis_name: AxisName = "data",
) -> DeviceEvaluation:
    """A compiled evaluation `(params, data, epoch=0) -> Evaluation` over all steps of a plan.

    The rule: what `evaluate` finds over `batches(plan, epoch, ...)`, to the last bit, in one
    program: ids are made and rows are taken on the devices, each step's sums are taken there as
    `metric_fn` takes them, and all of them are read at once, summed exactly, and divided once.
    Padding counts nowhere, whatever the number of ranks and rows.

    Args:
        metric_fn: as `evaluate` takes it: `metric_fn(params, batch)`, or `metric_fn(batch)` where
            params are None, returns a dict of `WeightedSum`s, or a single one.
        mesh: a mesh with the data axis.
        plan: who reads what; its `num_replicas` is the size of the mesh's data axis. Metrics of an
            evaluation need no shuffling.
        empty: what the mean of a metric without any weight is: an error, or `"nan"`.
        axis_name: the data axis.

    Returns:
        A function that compiles once, whichever the epoch and the params. `data` is a pytree of
        arrays `[num_examples, ...]`, as `make_train_epoch` takes them. The sums of every step are
        in memory until all are read: large arrays, such as a confusion matrix of thousands of
        classes, times the number of steps. `.lower(...)` takes the same arguments.

    Raises:
        TypeError: the plan is no `EpochPlan`, or `metric_fn` returns anything but `WeightedSum`s of
            real numbers.
        ValueError: the mesh has not the plan's number of ranks, or the plan has no steps. The
            function, when called: data have another number of rows than the plan examples, or do
            not fit; a metric has no weight at all; and as `evaluate` says.

    Example:
        >>> from jax_ddp_weighting import data_mesh, weighted_sum
        >>> def metric_fn(params, batch):
        ...     return {"close": weighted_sum(abs(batch.data - params) < 1, batch.weights)}
        >>> plan = EpochPlan(5, num_replicas=1, batch_size=2, shuffle=False)
        >>> run = make_evaluation(metric_fn, data_mesh(1), plan)
        >>> found = run(2.0, np.array([1.0, 2.0, 2.5, 4.0, 9.0]))
        >>> found["close"], found.sums["close"].total, found.accepted
        (0.4, 2, 5)
    """
    check_empty(empty, caller=_CALLER)
    check_plan_of_mesh(plan, mesh, axis_name, caller=_CALLER)
    # of axes of type Auto, over which rows may be taken without a word on where they go
    auto = Mesh(mesh.devices, mesh.axis_names)
    return DeviceEvaluation(metric_fn, auto, plan, axis_name, empty)
