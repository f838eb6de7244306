"""What the makers of epochs have in common: all steps of a plan in one compiled scan."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh
from jaxtyping import Array, PyTree

from jax_ddp_weighting._arguments import check_at_least, check_epoch, check_integer, check_up_to
from jax_ddp_weighting.data.device_plan import DevicePlan
from jax_ddp_weighting.data.device_rows import check_plan_of_mesh, check_rows_of_plan, take_batch
from jax_ddp_weighting.distributed import mesh as meshes
from jax_ddp_weighting.distributed.mesh import AxisName
from jax_ddp_weighting.distributed.placement import check_tree_not_cut
from jax_ddp_weighting.sampling.plan import EpochPlan
from jax_ddp_weighting.train.compilation import CompiledStep
from jax_ddp_weighting.train.step import check_key
from jax_ddp_weighting.train.step_options import StepOptions
from jax_ddp_weighting.weighting.gradient import GlobalLoss

CALLER = "train epoch"

Progress = Callable[[int, int, float], object]
"""`(epoch, step, loss)`, of a step that has been taken."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class EpochReport:
    """What the steps of an epoch did: the fields of a `StepReport`, stacked over steps.

    Where several epochs were run with `epochs=`, every array is ``[epochs, steps]``.

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


class Turns(NamedTuple):
    """Which steps a program takes, in order: two arrays of one shape, ``[steps]`` or with epochs.

    Attributes:
        epochs: int32, the epoch of each.
        steps: uint32, its number in the epoch.
    """

    epochs: Any
    steps: Any


@dataclass(frozen=True)
class EpochOptions:
    """How an epoch is run, checked.

    Attributes:
        caller: the maker, which speaks in errors.
        mesh: the mesh; its axes become those of type Auto.
        plan: who reads what.
        axis_name: the data axis.
        engine: `"shard_map"` or `"jit"`.
        donate: whether what is carried may be written into.
        progress: what is told of steps, or None.
        progress_every: of every how many.
    """

    caller: str
    mesh: Mesh
    plan: EpochPlan
    axis_name: AxisName
    engine: str
    donate: bool
    progress: Progress | None
    progress_every: int

    def __post_init__(self) -> None:
        if self.engine not in ("shard_map", "jit"):
            raise ValueError(
                f'{self.caller}: engine must be "shard_map" or "jit", got {self.engine!r}. pmap is'
                " a program of its own and cannot be part of one."
            )
        check_plan_of_mesh(self.plan, self.mesh, self.axis_name, caller=self.caller)
        # over such axes rows may be taken without a word on where they go
        object.__setattr__(self, "mesh", Mesh(self.mesh.devices, self.mesh.axis_names))
        if self.progress is not None and not callable(self.progress):
            raise TypeError(
                f"{self.caller}: progress must be a function (epoch, step, loss), got "
                f"{type(self.progress).__name__}. Left out, nothing leaves the devices."
            )
        argument, remedy = f"{self.caller}: progress_every", "1 tells of every step."
        check_at_least(argument, self.progress_every, 1, remedy)

    def of_step(self, options: Mapping[str, Any]) -> StepOptions:
        """The options of the steps: those that an epoch has itself, and the others, as they came.

        Raises:
            TypeError: one has another name than those of a step.
        """
        own = {"engine": self.engine, "axis_name": self.axis_name, "donate": self.donate}
        known = {each.name for each in fields(StepOptions)} - {"caller", "mesh", *own}
        for name in options:
            if name not in known:
                raise TypeError(
                    f"{self.caller}() got an unexpected keyword argument {name!r}. Its steps take "
                    f"{', '.join(sorted(known))}."
                )
        return StepOptions(self.caller, self.mesh, **own, **options)


class EpochProgram:
    """`(carried, data, ...) -> (carried, reports)` of a whole epoch, or several, compiled once.

    The rule: a step inside is the step alone, to the last bit. What goes into it and what comes out
    passes a barrier, so that XLA fuses its operations with each other as it does outside, and not
    with those that make ids, take rows or stack reports: a product that is fused with another sum
    is rounded once where it was rounded twice.

    Args:
        step: the step, as its own maker has made it.
        options: how it is run.
    """

    def __init__(self, step: CompiledStep, options: EpochOptions) -> None:
        self._step, self.options = step, options
        self._rows = meshes.row_sharding(options.mesh, options.axis_name)
        self._everywhere = meshes.replicated_sharding(options.mesh)
        self._placed: DevicePlan | None = None  # of which all but the epochs stays

        def epoch(placement: Any, *given: Any) -> tuple[Any, EpochReport]:
            return self._run(placement, *given)

        self._compiled = CompiledStep(
            epoch, options.mesh, None, check=self._check, donate=options.donate
        )

    def __call__(self, carried: Any, *given: Any, **named: Any) -> tuple[Any, EpochReport]:
        """What is carried after the steps, and their reports; arguments as `_prepare` has them."""
        return self._compiled(carried, *self._prepare(*given, **named))

    def lower(self, carried: Any, *given: Any, **named: Any) -> Any:
        """JAX's `Lowered` of the program for these arguments, arrays or their shapes."""
        return self._compiled.lower(carried, *self._prepare(*given, **named))

    def _prepare(
        self,
        data: PyTree,
        epoch: Any = None,
        rng: Array | None = None,
        *,
        epochs: Any = None,
        start_step: int = 0,
        replicated: PyTree = None,
        on_device: DevicePlan | None = None,
        **extra: Any,
    ) -> tuple[Any, ...]:
        if rng is not None:
            check_key(rng)
        turns, known = self._find_turns(epoch, epochs, start_step)
        if on_device is None:
            if known is None:
                raise ValueError(
                    f"{CALLER}: on_device must be given where the epoch is traced, got None. Its"
                    " ids, such as those of an order function of yours, are made on the host"
                    " beforehand: on_device=DevicePlan.of(plan, epochs=...) is their table."
                )
            on_device = self._place_plan(known)
        else:
            self._check_on_device(on_device)
            on_device = meshes.place(on_device, self._everywhere)
        check_tree_not_cut(replicated, "replicated", caller="train epoch")
        rng, replicated, extra = meshes.place((rng, replicated, extra), self._everywhere)
        return data, on_device, turns, rng, extra, replicated

    def _find_turns(
        self, epoch: Any, epochs: Any, start_step: int
    ) -> tuple[Turns, list[int] | None]:
        steps = self.options.plan.steps_per_epoch
        if (epoch is None) == (epochs is None):
            raise TypeError(
                f"{CALLER}: epoch must be given, or else epochs=, got"
                f" {'neither' if epoch is None else 'both'}. epoch=3 is one of them;"
                " epochs=range(3, 8) is five in one program."
            )
        remedy = "A later step belongs to the next epoch."
        first = check_up_to(f"{CALLER}: start_step", start_step, steps, remedy)
        numbers = np.arange(first, steps, dtype=np.uint32)
        if isinstance(epoch, Tracer):
            if not jnp.issubdtype(epoch.dtype, jnp.integer) or epoch.shape:
                raise TypeError(
                    f"{CALLER}: epoch must be an integer, got {epoch.dtype}{list(epoch.shape)}."
                )
            of_each = jnp.broadcast_to(epoch.astype(jnp.int32), numbers.shape)
            return Turns(of_each, numbers), None
        if epochs is None:
            known = [check_epoch(f"{CALLER}: epoch", epoch)]
        else:
            known = _find_epochs(epochs)
            if first:
                raise ValueError(
                    f"{CALLER}: start_step must be 0 with epochs=, got {first}. Run the rest of the"
                    " epoch that was stopped first, and then the others."
                )
        limit = 2**31 - 1  # of a traced epoch
        for each in known:
            check_up_to(f"{CALLER}: epoch", each, limit, "A traced epoch has 32 bits.")
        of_each = np.repeat(np.array(known, np.int32)[:, None], len(numbers), axis=1)
        turns = Turns(of_each, np.broadcast_to(numbers, of_each.shape))
        return (turns if epochs is not None else Turns(turns[0][0], numbers)), known

    def _place_plan(self, epochs: list[int]) -> DevicePlan:
        on_host = DevicePlan.on_host(self.options.plan, epochs)
        if self._placed is None:
            placed = meshes.place(on_host, self._everywhere)
            if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(placed)):
                return placed  # inside somebody's own jit, from which it must not leak
            self._placed = placed
        # as numpy arrays, which a compiled call places faster than anything that does so before
        return self._placed.of_epochs(on_host)

    def _check_on_device(self, on_device: Any) -> None:
        if not isinstance(on_device, DevicePlan):
            raise TypeError(
                f"{CALLER}: on_device must be a DevicePlan, got {type(on_device).__name__}."
                " DevicePlan.of(plan, epochs=...) makes one."
            )
        names = ("num_examples", "num_replicas", "batch_size", "steps_per_epoch")
        for name in names:
            ours, theirs = getattr(self.options.plan, name), getattr(on_device, name)
            if ours != theirs:
                raise ValueError(
                    f"{CALLER}: on_device must be of a plan like the one that the epoch was made"
                    f" for, got {name} {theirs} where it has {ours}. Another seed or order will do."
                )

    def _check(self, carried: Any, data: PyTree, *given: Any) -> None:
        del carried, given  # the step itself looks at them when it is traced
        check_rows_of_plan(data, self.options.plan, self.options.mesh, caller=CALLER)

    def _run(
        self,
        placement: Any,
        carried: Any,
        data: PyTree,
        on_device: DevicePlan,
        turns: Turns,
        rng: Array | None,
        extra: dict[str, Any],
        replicated: PyTree,
    ) -> tuple[Any, EpochReport]:
        step = self._step.bind(placement)

        def take_turn(carried: Any, turn: Turns) -> tuple[Any, EpochReport]:
            batch = take_batch(on_device, turn.epochs, turn.steps, data, self._rows)
            key = rng
            if rng is not None:
                key = jax.random.fold_in(jax.random.fold_in(rng, turn.epochs), turn.steps)
            given = jax.lax.optimization_barrier((carried, batch, key, extra, replicated))
            carried, report = jax.lax.optimization_barrier(step(*given))
            carried = jax.tree.map(_pin, carried, placement)
            report = EpochReport(
                **{name: getattr(report, name) for name in EpochReport.__dataclass_fields__}
            )
            self._tell(turn, report)
            return carried, report

        shape = turns.steps.shape
        flat = jax.tree.map(lambda leaf: leaf.reshape(-1), turns)
        carried, reports = jax.lax.scan(take_turn, carried, flat)
        reshaped = jax.tree.map(lambda leaf: leaf.reshape(*shape, *leaf.shape[1:]), reports)
        return carried, reshaped

    def _tell(self, turn: Turns, report: EpochReport) -> None:
        progress, every = self.options.progress, self.options.progress_every
        if progress is None:
            return
        number = turn.steps + 1
        due = (number % every == 0) | (number == self.options.plan.steps_per_epoch)

        def tell(epoch: Any, step: Any, loss: Any) -> None:
            progress(int(epoch), int(step), float(loss))

        # out here, in the view of all ranks, so that a step is told once
        jax.lax.cond(
            due,
            lambda *given: jax.debug.callback(tell, *given),
            lambda *_: None,
            *(turn.epochs, turn.steps, report.loss.value),
        )


def _find_epochs(epochs: Any) -> list[int]:
    argument = f"{CALLER}: epochs"
    if isinstance(epochs, range | Sequence | np.ndarray) and not isinstance(epochs, str):
        known = [check_epoch(argument, each) for each in epochs]
    else:
        remedy = "It is how many, from 0 on; a range says which."
        known = list(range(check_integer(argument, epochs, 1, 2**31 - 1, remedy)))
    if not known:
        raise ValueError(f"{argument} must be at least one, got none. epochs=1 is the first.")
    return known


def _pin(leaf: Any, sharding: Any) -> Any:
    """A leaf of what is carried, where it lay before: XLA is not to move it within the loop."""
    return leaf if sharding is None else jax.lax.with_sharding_constraint(leaf, sharding)
