"""How a training step is run: the options that its makers share, checked in one place."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, PyTree

from jax_ddp_weighting._arguments import check_at_least
from jax_ddp_weighting.distributed import mesh as meshes
from jax_ddp_weighting.distributed.mesh import AxisName
from jax_ddp_weighting.train.batch_layout import BatchLayout, BatchSpec, find_axis_name
from jax_ddp_weighting.weighting.divisors import Divisors, check_divisors
from jax_ddp_weighting.weighting.loss_terms import check_factors, describe, has_gradient, is_number
from jax_ddp_weighting.weighting.named_arguments import find_for_loss
from jax_ddp_weighting.weighting.statistics import Statistics, check_statistics

STEP_ENGINES = ("shard_map", "jit", "pmap")
RNG_PER = ("rank", "example")
GATHER_PER = ("step", "microbatch")


@dataclass(frozen=True)
class StepOptions:
    """How a step is run, checked; what all makers of steps have in common.

    Attributes:
        caller: the maker, which speaks in errors.
        mesh: the mesh, with the data axis.
        microbatches: how many microbatches each rank splits its rows into.
        engine: one of `STEP_ENGINES`.
        coefficients: one factor per term, or None for a loss of one term.
        divisors: what terms are divided by that have a divisor, or None.
        statistics: what is summed over the step before any loss is taken, or None.
        skip_empty: whether a step in which nothing has weight is skipped.
        rng_per: one of `RNG_PER`.
        gather_per: one of `GATHER_PER`.
        grad_norm: whether the norm of the gradient is reported.
        donate: whether the step may write into what it is given.
        batch_spec: how the rows lie on the mesh, where it is not over the data axis alone.
        axis_name: the data axis; of None, the one that `batch_spec` shards rows over.
    """

    caller: str
    mesh: Mesh
    microbatches: int = 1
    engine: str = "shard_map"
    coefficients: Mapping[str, Any] | None = None
    divisors: Divisors | None = None
    statistics: Statistics | None = None
    skip_empty: bool = True
    rng_per: str = "rank"
    gather_per: str = "step"
    grad_norm: bool = False
    donate: bool = True
    batch_spec: BatchSpec | None = None
    axis_name: Any = None  # an `AxisName` once it is checked

    def __post_init__(self) -> None:
        axis_name = find_axis_name(self.axis_name, self.batch_spec, caller=self.caller)
        object.__setattr__(self, "axis_name", axis_name)
        choices = {"engine": STEP_ENGINES, "rng_per": RNG_PER, "gather_per": GATHER_PER}
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"{self.caller}: {name} must be one of {', '.join(allowed)}, got "
                    f"{getattr(self, name)!r}. {allowed[0]!r} is the default."
                )
        argument, remedy = f"{self.caller}: microbatches", "1 takes each rank's rows whole."
        check_at_least(argument, self.microbatches, 1, remedy, kind="an integer, ")
        check_factors(self.coefficients, caller=self.caller)
        if self.coefficients is not None and not any(map(has_gradient, self.coefficients.values())):
            raise ValueError(
                f"{self.caller}: coefficients must have one that is not 0, got "
                f"{dict(self.coefficients)}. A term of coefficient 0 is reported and pulls on "
                "nothing."
            )
        divisors = check_divisors(self.divisors, self.coefficients, caller=self.caller)
        object.__setattr__(self, "divisors", divisors)
        if not isinstance(self.skip_empty, bool | np.bool_):
            raise TypeError(
                f"{self.caller}: skip_empty must be True or False, got {self.skip_empty!r}. False "
                "gives the optimizer a gradient of 0 where nothing in a batch has weight."
            )
        check_statistics(self.statistics, caller=self.caller)
        meshes.check_has_devices(self.mesh, caller=self.caller)
        if self.engine == "pmap":  # pmap's own arrays have axes of type Auto
            object.__setattr__(self, "mesh", Mesh(self.mesh.devices, self.mesh.axis_names))
        meshes.num_ranks(self.mesh, self.axis_name, caller=self.caller)
        if self.engine == "pmap" and self.batch_spec is not None:
            raise ValueError(
                f"{self.caller}: batch_spec must be left out under pmap, which splits rows alone, "
                f'got {self.batch_spec}. engine="shard_map" takes it.'
            )
        _ = self.rows  # which checks itself

    @cached_property
    def rows(self) -> BatchLayout:
        """How the rows lie on the mesh."""
        return BatchLayout(self.caller, self.mesh, self.axis_name, self.batch_spec)

    def find_for_loss(self, loss_fn: Callable[..., Any], given: Mapping[str, Any]) -> Any:
        """What of `given` the user's loss function is given by name."""
        others = [*(self.divisors or {}).values(), self.statistics]
        return find_for_loss(loss_fn, given, others)

    def call_schedules(self, count: Any) -> dict[str, Array]:
        """The coefficients that are functions of the step, at this one: float scalars by term.

        Raises:
            TypeError: one returns no real number, or nobody counts.
            ValueError: one returns no scalar.
        """
        schedules = {n: each for n, each in (self.coefficients or {}).items() if callable(each)}
        if schedules and count is None:
            raise TypeError(
                f"{self.caller}: coefficients must be numbers where the state has no step, got a "
                f"function for {next(iter(schedules))!r}. flax's TrainState counts its steps."
            )
        return {name: self._call_schedule(name, each, count) for name, each in schedules.items()}

    def _call_schedule(self, name: str, schedule: Callable[[Any], Any], count: Any) -> Array:
        factor = schedule(count)
        if not is_number(factor, real=True):
            raise TypeError(
                f"{self.caller}: coefficients[{name!r}] must return a real number for a step, got "
                f"{describe(factor)}. A schedule of optax's does."
            )
        if jnp.shape(factor) != ():
            raise ValueError(
                f"{self.caller}: coefficients[{name!r}] must return one number for the whole term, "
                f"got shape {jnp.shape(factor)}. How much rows or classes count is a weight."
            )
        floating = jnp.issubdtype(jnp.result_type(factor), jnp.floating)
        return jnp.asarray(factor, jnp.result_type(factor) if floating else jnp.result_type(float))

    @property
    def mapped_axis(self) -> AxisName | None:
        """The axis that a loss function sees; none in the global view of `jit`."""
        return None if self.engine == "jit" else self.axis_name

    def specs_of(self, params: PyTree, placement: PyTree) -> PyTree:
        """How parameters lie over the data axis, where a step takes them in shards; else None."""
        if self.engine != "shard_map":
            return None
        leaves = jax.tree.leaves(params)
        # None for what is traced in somebody's own jit, and so lies nowhere yet
        shardings = jax.tree.structure(params).flatten_up_to(placement)
        pairs = zip(leaves, shardings, strict=True)
        specs = [meshes.spec_over(sharding, self.axis_name, leaf.ndim) for leaf, sharding in pairs]
        if all(spec == PartitionSpec() for spec in specs):
            return None
        return jax.tree.structure(params).unflatten(specs)


class Varying(NamedTuple):
    """What of a step's options changes from step to step, and so is given to the program.

    Attributes:
        coefficients: those that are functions of the step, at this one, by term.
        scale: what losses are scaled by, or None.
    """

    coefficients: dict[str, Array]
    scale: Any = None
