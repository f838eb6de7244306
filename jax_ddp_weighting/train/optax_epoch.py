"""An epoch of parameters and an optax state alone as one program."""

from dataclasses import dataclass
from typing import Any

import optax
from jax.sharding import Mesh
from jax.stages import Lowered
from jaxtyping import Array, PyTree

from jax_ddp_weighting.data.device_plan import DevicePlan
from jax_ddp_weighting.distributed.mesh import AxisName
from jax_ddp_weighting.sampling.plan import EpochPlan
from jax_ddp_weighting.train.epoch_program import EpochOptions, EpochProgram, Progress
from jax_ddp_weighting.train.optax_step import carry, compile_optax_step
from jax_ddp_weighting.weighting.loss_terms import LossFn


@dataclass(frozen=True)
class OptaxEpoch:
    """A compiled epoch for parameters and an optax state, as `make_optax_epoch` makes it."""

    program: EpochProgram
    has_state: bool

    def __call__(
        self,
        params: PyTree,
        opt_state: PyTree,
        data: PyTree,
        epoch: Any = None,
        rng: Array | None = None,
        *,
        state: PyTree = None,
        count: Any = None,
        epochs: Any = None,
        start_step: int = 0,
        replicated: PyTree = None,
        on_device: DevicePlan | None = None,
        **optimizer_args: Any,
    ) -> tuple[Any, ...]:
        """Parameters and optimizer's state after the epoch, the model's if it has one, reports."""
        carried, reports = self.program(
            carry(params, opt_state, state, count, has_state=self.has_state),
            *(data, epoch, rng),
            epochs=epochs,
            start_step=start_step,
            replicated=replicated,
            on_device=on_device,
            **optimizer_args,
        )
        return *carried.hand_back(), reports

    def lower(
        self,
        params: PyTree,
        opt_state: PyTree,
        *args: Any,
        state: PyTree = None,
        count: Any = None,
        **named: Any,
    ) -> Lowered:
        """JAX's `Lowered` for the arguments of a call, or their shapes: nothing is run."""
        carried = carry(params, opt_state, state, count, has_state=self.has_state)
        return self.program.lower(carried, *args, **named)


def make_optax_epoch(
    loss_fn: LossFn,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    plan: EpochPlan,
    *,
    axis_name: AxisName = "data",
    engine: str = "shard_map",
    donate: bool = True,
    progress: Progress | None = None,
    progress_every: int = 1,
    has_state: bool = False,
    **options: Any,
) -> OptaxEpoch:
    """A compiled epoch `(params, opt_state, data, epoch, ...) -> (params, opt_state, reports)`.

    The rule: as in `make_train_epoch`, all steps of the plan's epoch run in one `lax.scan`.
    Parameters and states are bit for bit those of the loop over `batches` and `make_optax_step`.

    Args:
        loss_fn: as `make_optax_step` takes it.
        optimizer: the optax optimizer.
        mesh: a mesh with the data axis.
        plan: who reads what; its `num_replicas` is the size of the mesh's data axis.
        axis_name: the data axis.
        engine: `"shard_map"` or `"jit"`.
        donate: whether the program may write into the arrays that it is given, as in a step.
        progress: `progress(epoch, step, loss)`, as in `make_train_epoch`.
        progress_every: of every how many steps it is told.
        has_state: whether the model keeps a state beside its parameters, as in `make_optax_step`.
        options: the others of `make_optax_step`: `microbatches`, `coefficients`, `divisors`,
            `statistics`, `skip_empty`, `rng_per`, `gather_per`, `grad_norm`, `batch_spec`.

    Returns:
        A function that compiles once for all epochs. `data`, `epoch`, `rng` and all that goes by
        name are as `make_train_epoch` has them, `epochs=`, `start_step=`, `replicated=`,
        `on_device=` and `.lower(...)` too. With `has_state` it is given `state=` and returns
        `(params, opt_state, state, reports)`. `count=` is the number of steps taken before, for
        coefficients that are functions; within it goes on as a `TrainState` counts, with every step
        that is not skipped (with every batch under `weighted_multi_steps`). `reports` is an
        `EpochReport`.

    Raises:
        TypeError: as `make_train_epoch` and `make_optax_step` say.
        ValueError: as they say.

    Example:
        >>> import optax
        >>> from jax_ddp_weighting import data_mesh, weighted_sum
        >>> def loss_fn(params, batch):
        ...     return weighted_sum((params["w"] - batch.data) ** 2, batch.weights)
        >>> plan, optimizer = EpochPlan(5, num_replicas=1, batch_size=2), optax.sgd(0.5)
        >>> run_epoch = make_optax_epoch(loss_fn, optimizer, data_mesh(1), plan)
        >>> params = {"w": jnp.float32(0)}
        >>> opt_state = optimizer.init(params)
        >>> for epoch in range(2):
        ...     params, opt_state, reports = run_epoch(params, opt_state, np.full(5, 3.0), epoch)
        >>> float(params["w"]), reports.weight.tolist()
        (3.0, [2, 2, 1])
    """
    of_epoch = EpochOptions(
        *("make_optax_epoch", mesh, plan, axis_name, engine, donate, progress, progress_every)
    )
    step = compile_optax_step(loss_fn, optimizer, has_state, of_epoch.of_step(options))
    return OptaxEpoch(EpochProgram(step, of_epoch), has_state)
