"""An epoch of an `nnx.Module` and its `nnx.Optimizer` as one program, both updated in place."""

from dataclasses import dataclass
from typing import Any

from flax import nnx
from jax.sharding import Mesh
from jax.stages import Lowered
from jaxtyping import Array, PyTree

from jax_ddp_weighting.data.device_plan import DevicePlan
from jax_ddp_weighting.distributed.mesh import AxisName
from jax_ddp_weighting.sampling.plan import EpochPlan
from jax_ddp_weighting.train.epoch_program import (
    EpochOptions,
    EpochProgram,
    EpochReport,
    Progress,
)
from jax_ddp_weighting.train.nnx import compile_nnx_step, split_pair, update_pair
from jax_ddp_weighting.weighting.loss_terms import LossFn


@dataclass(frozen=True)
class NnxTrainEpoch:
    """A compiled epoch for an `nnx.Module`, as `make_nnx_train_epoch` makes it."""

    program: EpochProgram

    def __call__(
        self,
        model: nnx.Module,
        optimizer: nnx.Optimizer,
        data: PyTree,
        epoch: Any = None,
        rng: Array | None = None,
        *,
        epochs: Any = None,
        start_step: int = 0,
        replicated: PyTree = None,
        on_device: DevicePlan | None = None,
        **optimizer_args: Any,
    ) -> EpochReport:
        """The reports of the epoch's steps; model and optimizer are updated in place."""
        carried, reports = self.program(
            split_pair(model, optimizer),
            *(data, epoch, rng),
            epochs=epochs,
            start_step=start_step,
            replicated=replicated,
            on_device=on_device,
            **optimizer_args,
        )
        update_pair(model, optimizer, carried)
        return reports

    def lower(
        self, model: nnx.Module, optimizer: nnx.Optimizer, *args: Any, **named: Any
    ) -> Lowered:
        """JAX's `Lowered` for the arguments of a call: nothing is run."""
        return self.program.lower(split_pair(model, optimizer), *args, **named)


def make_nnx_train_epoch(
    loss_fn: LossFn,
    mesh: Mesh,
    plan: EpochPlan,
    *,
    axis_name: AxisName = "data",
    engine: str = "shard_map",
    donate: bool = True,
    progress: Progress | None = None,
    progress_every: int = 1,
    **options: Any,
) -> NnxTrainEpoch:
    """A compiled epoch `(model, optimizer, data, epoch, rng=None) -> reports`, updating in place.

    The rule: as in `make_train_epoch`, all steps of the plan's epoch run in one `lax.scan`. Model
    and optimizer are bit for bit those of the loop over `batches` and `make_nnx_train_step`, with
    batch statistics and the model's own random streams.

    Args:
        loss_fn: as `make_nnx_train_step` takes it.
        mesh: a mesh with the data axis.
        plan: who reads what; its `num_replicas` is the size of the mesh's data axis.
        axis_name: the data axis.
        engine: `"shard_map"` or `"jit"`.
        donate: whether the program may write into the arrays of model and optimizer, as in a step.
        progress: `progress(epoch, step, loss)`, as in `make_train_epoch`.
        progress_every: of every how many steps it is told.
        options: the others of `make_nnx_train_step`: `microbatches`, `coefficients`, `divisors`,
            `statistics`, `skip_empty`, `rng_per`, `gather_per`, `grad_norm`, `batch_spec`.

    Returns:
        A function that compiles once for all epochs, and for each structure of the model, as after
        `model.eval()`. `data`, `epoch`, `rng` and all that goes by name are as `make_train_epoch`
        has them, `epochs=`, `start_step=`, `replicated=`, `on_device=` and `.lower(...)` too.
        `reports` is an `EpochReport`.

    Raises:
        TypeError: as `make_train_epoch` and `make_nnx_train_step` say.
        ValueError: as they say.

    Example:
        >>> import optax
        >>> from flax import nnx
        >>> from jax_ddp_weighting import data_mesh, weighted_sum
        >>> def loss_fn(model, batch):
        ...     losses = (model(batch.data["x"])[:, 0] - batch.data["y"]) ** 2
        ...     return weighted_sum(losses, batch.weights)
        >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
        >>> optimizer = nnx.Optimizer(model, optax.adamw(0.1), wrt=nnx.Param)
        >>> plan = EpochPlan(5, num_replicas=1, batch_size=2)
        >>> run_epoch = make_nnx_train_epoch(loss_fn, data_mesh(1), plan)
        >>> data = {"x": np.ones((5, 2), np.float32), "y": np.ones(5, np.float32)}
        >>> reports = run_epoch(model, optimizer, data, epochs=8)
        >>> reports.loss.value.shape, int(optimizer.step[...])
        ((8, 3), 24)
    """
    of_epoch = EpochOptions(
        *("make_nnx_train_epoch", mesh, plan, axis_name, engine, donate, progress, progress_every)
    )
    step = compile_nnx_step(loss_fn, of_epoch.of_step(options))
    return NnxTrainEpoch(EpochProgram(step, of_epoch))
