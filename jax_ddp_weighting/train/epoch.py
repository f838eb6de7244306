"""An epoch of a flax `TrainState` as one program, without a host between its steps."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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
from jax_ddp_weighting.train.train_state import compile_state_step
from jax_ddp_weighting.weighting.loss_terms import LossFn


@dataclass(frozen=True)
class TrainEpoch:
    """A compiled epoch for a flax `TrainState`, as `make_train_epoch` makes it."""

    program: EpochProgram

    def __call__(
        self,
        state: Any,
        data: PyTree,
        epoch: Any = None,
        rng: Array | None = None,
        *,
        epochs: Any = None,
        start_step: int = 0,
        replicated: PyTree = None,
        on_device: DevicePlan | None = None,
        **optimizer_args: Any,
    ) -> tuple[Any, EpochReport]:
        """The state after the epoch, and the reports of its steps."""
        return self.program(
            state,
            *(data, epoch, rng),
            epochs=epochs,
            start_step=start_step,
            replicated=replicated,
            on_device=on_device,
            **optimizer_args,
        )

    def lower(self, state: Any, *args: Any, **named: Any) -> Lowered:
        """JAX's `Lowered` for the arguments of a call, or their shapes: nothing is run."""
        return self.program.lower(state, *args, **named)


def make_train_epoch(
    loss_fn: LossFn,
    mesh: Mesh,
    plan: EpochPlan,
    *,
    axis_name: AxisName = "data",
    engine: str = "shard_map",
    donate: bool = True,
    progress: Progress | None = None,
    progress_every: int = 1,
    mutable: str | Sequence[str] = (),
    **options: Any,
) -> TrainEpoch:
    """A compiled epoch `(state, data, epoch, rng=None) -> (state, reports)` for a `TrainState`.

    The rule: all steps of the plan's epoch run in one `lax.scan`, with ids made on the device
    (`DevicePlan`) and rows taken there from data that lie there whole. The state that comes out is
    bit for bit that of the loop over `batches` and `make_train_step`, and so are the reports: a
    step is compiled inside the scan as it is alone, between barriers.

    Args:
        loss_fn: as `make_train_step` takes it.
        mesh: a mesh with the data axis.
        plan: who reads what; its `num_replicas` is the size of the mesh's data axis.
        axis_name: the data axis.
        engine: `"shard_map"` or `"jit"`.
        donate: whether the program may write into the state that it is given, as in a step. With
            False that state stays good. Within the epoch it is written in place either way.
        progress: `progress(epoch, step, loss)`, called on the host with two ints and a float after
            every `progress_every`-th step of an epoch, and its last, while the program runs: once a
            step, not once a rank, and on the first process alone. It must not call JAX. Left out,
            nothing leaves the devices.
        progress_every: of every how many steps it is told.
        mutable: names of flax collections that the model updates, as in `make_train_step`.
        options: the others of `make_train_step`: `microbatches`, `coefficients`, `divisors`,
            `statistics`, `skip_empty`, `rng_per`, `gather_per`, `grad_norm`, `batch_spec`.

    Returns:
        A function that compiles once for all epochs. `data` is a pytree of arrays
        `[num_examples, ...]`, whose row `i` is example `i`; placed on the mesh beforehand,
        replicated or with rows sharded over the data axis, they are not copied there for every
        epoch. `epoch` is an integer. Each step's rng is `fold_in(fold_in(rng, epoch), step)`: one
        rng does for a run. `reports` is an `EpochReport`: the steps' own reports, stacked.

        `epochs=` in place of `epoch` runs several in one program: a number (from 0 on), a range,
        or integers in any order. It compiles once for each number of them, whichever they are, and
        reports are `[epochs, steps]`. `start_step=` is the first step to run, of an epoch that was
        stopped: it compiles anew. `replicated=` and further keyword arguments are those of a step,
        the same in each. `.lower(...)` takes the same arguments.

        It can be called within a compiled program, and mapped by `jax.vmap` over states, rngs and
        plans, as for an ensemble. `on_device=` is then a `DevicePlan` made beforehand, where the
        epoch is traced or each member has a plan of its own seed. A member is equal to its own run
        to rounding: XLA multiplies several matrices at once by another kernel than one, which adds
        up in another order. By `jax.lax.map` in place of `vmap` it is equal to the last bit.

    Raises:
        TypeError: the plan is none, or as `make_train_step` says; the function is given no epoch.
        ValueError: the mesh has not the plan's number of ranks, the plan has no steps, the engine
            is another, or as `make_train_step` says. The function, when called: data have another
            number of rows than the plan examples, or do not fit; a number is out of range; the
            state was given away; `on_device` is of a plan of other sizes, or missing.

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

        Three more in one program:

        >>> state, reports = run_epoch(state, np.full(5, 3.0), epochs=range(2, 5))
        >>> reports.weight.tolist()
        [[2, 2, 1], [2, 2, 1], [2, 2, 1]]
    """
    of_epoch = EpochOptions(
        *("make_train_epoch", mesh, plan, axis_name, engine, donate, progress, progress_every)
    )
    step = compile_state_step(loss_fn, mutable, of_epoch.of_step(options))
    return TrainEpoch(EpochProgram(step, of_epoch))
