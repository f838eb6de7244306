"""What every training step is made of: one gradient over all ranks, applied or skipped."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float, PyTree

from jax_ddp_weighting._arguments import check_at_least
from jax_ddp_weighting.data.batch import MAKE_OR_READ_BATCHES, Batch, check_batch, check_is_global
from jax_ddp_weighting.distributed import mesh as meshes
from jax_ddp_weighting.distributed.mesh import AxisName
from jax_ddp_weighting.train.batch_layout import BatchLayout, BatchSpec
from jax_ddp_weighting.weighting.divisors import Divisors, check_divisors
from jax_ddp_weighting.weighting.gradient import (
    GlobalLoss,
    StepGradient,
    take_gradient,
)
from jax_ddp_weighting.weighting.loss_terms import (
    check_factors,
    describe,
    has_gradient,
    is_number,
)
from jax_ddp_weighting.weighting.microbatches import check_rows
from jax_ddp_weighting.weighting.named_arguments import find_for_loss
from jax_ddp_weighting.weighting.rank_gradient import GradientOptions
from jax_ddp_weighting.weighting.statistics import Statistics, check_statistics

STEP_ENGINES = ("shard_map", "jit", "pmap")
RNG_PER = ("rank", "example")
GATHER_PER = ("step", "microbatch")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepReport:
    """What a step did, as device scalars: reading them waits for the step.

    Attributes:
        loss: the global loss and its terms.
        weight: the accepted weight of the batch, summed over all ranks; an integer where weights
            are integers (2**31 - 1, if 32 bits cannot hold it).
        skipped: whether the batch had no weight: nothing in it that pulls on the parameters counts
            (of a term that is given a divisor: the divisor is 0), or some of its weights are bad.
            Under `skip_empty=False` whether some are bad.
        stepped: whether the optimizer applied an update in this call: where the batch was not
            skipped (and `optax.apply_if_finite`, if it is there, let the update pass); under
            `weighted_multi_steps` where a window of any weight closed, be it on a skipped batch.
        grad_norm: the norm of the global gradient before the optimizer, float32 at least, if the
            step was made with `grad_norm=True`; else None.
        finite: whether the global gradient was finite, where the state holds a `DynamicScale`; else
            None. If not, nothing was applied, and the scale is smaller. True in a skipped step,
            which has no gradient.
    """

    loss: GlobalLoss
    weight: Array
    skipped: Bool[Array, ""]
    stepped: Bool[Array, ""]
    grad_norm: Float[Array, ""] | None = None
    finite: Bool[Array, ""] | None = None

    @property
    def bad_weights(self) -> Array:
        """How many weights could not count, so that nothing was applied; see `GlobalLoss`."""
        return self.loss.bad_weights

    @property
    def means(self) -> dict[str, Array]:
        """Each term's mean over its own weight or divisor, before its coefficient."""
        return self.loss.means


@dataclass(frozen=True)
class StepOptions:
    """How a step is run, checked; what the two makers of steps have in common.

    Attributes:
        caller: the maker, which speaks in errors.
        mesh: the mesh, with the data axis.
        microbatches: how many microbatches each rank splits its rows into.
        engine: one of `STEP_ENGINES`.
        coefficients: one factor per term, or None for a loss of one term.
        rng_per: one of `RNG_PER`.
        axis_name: the data axis.
        divisors: what terms are divided by that have a divisor, or None.
        skip_empty: whether a step in which nothing has weight is skipped.
        statistics: what is summed over the step before any loss is taken, or None.
        gather_per: one of `GATHER_PER`.
        batch_spec: how the rows lie on the mesh, where it is not over the data axis alone.
    """

    caller: str
    mesh: Mesh
    microbatches: int
    engine: str
    coefficients: Mapping[str, Any] | None
    rng_per: str
    axis_name: AxisName
    divisors: Divisors | None = None
    skip_empty: bool = True
    statistics: Statistics | None = None
    gather_per: str = "step"
    batch_spec: BatchSpec | None = None

    def __post_init__(self) -> None:
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
        if isinstance(self.mesh, AbstractMesh):
            raise TypeError(
                f"{self.caller}: mesh must have devices, got an AbstractMesh. data_mesh() makes a "
                "mesh of those that are there."
            )
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


def global_step(
    loss_fn: Callable[..., Any], options: StepOptions, statistics: Statistics | None
) -> Callable[..., Any]:
    """The gradient of a step over all ranks, and the state that its model keeps.

    Args:
        loss_fn: `loss_fn(params, batch, [rng], state=state)` returns `(sums, state)`.
        options: how it is run.
        statistics: `statistics(params, batch, state=state)`, the options' own, or None.

    Returns:
        A function `(placement, params, state, batch, rng, replicated, varying) -> (StepReport,
        gradients, state)` to be compiled, of which the placement is the shardings of the
        parameters, and `varying` what changes from step to step beside the others. In a step
        without weight the gradients are 0 and the state is the one that came in. Where weights are
        bad it is so too, but for the gradients, which are not to be used.
    """
    fixed = GradientOptions(
        loss_fn,
        options.mapped_axis,
        options.microbatches,
        options.coefficients,
        options.divisors,
        statistics,
        has_state=True,
        has_accepted=True,
        part_axes=options.rows.part_axes if options.engine == "shard_map" else (),
    )

    def rank_gradient(
        specs: PyTree, everywhere: tuple[PyTree, PyTree, Any, PyTree, Varying], batch: Batch
    ) -> Any:
        params, state, rng, replicated, varying = everywhere
        gradient = fixed
        if specs is not None:
            gradient = replace(gradient, param_specs=specs, gather_per=options.gather_per)
        if varying.coefficients:
            coefficients = {**(fixed.coefficients or {}), **varying.coefficients}
            gradient = replace(gradient, coefficients=coefficients)
        if varying.scale is not None:
            gradient = replace(gradient, scale=varying.scale)
        keys = None
        if rng is not None and options.rng_per == "example":
            keys, rng = _example_keys(rng, batch.ids), None
        elif rng is not None and options.mapped_axis is not None:
            rng = jax.random.fold_in(rng, jax.lax.axis_index(options.mapped_axis))
        return take_gradient(
            gradient, params, batch, rng=rng, row_keys=keys, state=state, replicated=replicated
        )

    def over_ranks(engine: str, specs: PyTree, batch: Batch) -> Callable[..., Any]:
        p: Any = PartitionSpec()
        return meshes.over_ranks(
            partial(rank_gradient, specs),
            options.mesh,
            axis_name=options.axis_name,
            engine=engine,
            in_specs=None if specs is None else (specs, p, p, p, p),
            out_specs=None if specs is None else StepGradient(p, specs, p, p, []),
            row_specs=options.rows.mapped_specs_of(batch),
        )

    def step(
        placement: PyTree,
        params: PyTree,
        state: PyTree,
        batch: Batch,
        rng: Array | None,
        replicated: PyTree,
        varying: Varying,
    ) -> tuple[StepReport, PyTree, PyTree]:
        batch = options.rows.constrain(batch)
        inputs = ((params, state, rng, replicated, varying), batch)
        if options.engine == "pmap" and jax.tree.leaves(state):
            # pmap would return one rank's state for all of them; the types of a checked shard_map
            # tell whether it is the same on every rank.
            jax.eval_shape(over_ranks("shard_map", None, batch), *inputs)
        specs = options.specs_of(params, placement)
        with options.rows.explain_axes():
            found = over_ranks(options.engine, specs, batch)(*inputs)
        skipped = _is_empty(found, fixed) if options.skip_empty else found.loss.bad_weights != 0
        state = jax.tree.map(lambda old, new: jnp.where(skipped, old, new), state, found.state)
        report = StepReport(found.loss, found.accepted, skipped, ~skipped)
        return report, found.gradients, state

    return step


def _is_empty(found: StepGradient, gradient: GradientOptions) -> Array:
    """Whether nothing in the step counts that pulls on the parameters, or its weights are bad."""
    loss, pulls = found.loss, [n for n in found.loss.terms if has_gradient(gradient.factors[n])]
    # With bad weights all of these are 0, so that such a step is one without weight.
    given = [loss.divisors[name] > 0 for name in pulls if name in loss.divisors]
    pulling = [loss.terms[name].weight > 0 for name in pulls if name not in loss.divisors]
    counts = given
    if pulling:
        # Both are asked: a batch may have rows whose terms all weigh 0, such as ignored labels, and
        # a term that is weighed in something else than rows counts for nothing without any.
        counts = [*given, (found.accepted != 0) & jnp.any(jnp.stack(pulling))]
    return ~(jnp.any(jnp.stack(counts)) if given else counts[0])


_THREEFRY = "threefry2x32"


def _example_keys(rng: Array, ids: Array) -> Array:
    """One key per row, of the rng and the row's id alone, the high half of the id first.

    Always of the threefry kind, into which a key of another kind is folded word by word: under
    `vmap`, the bits that `rbg` keys give to a row depend on the other rows that are there.
    """
    typed = jnp.issubdtype(rng.dtype, jax.dtypes.prng_key)
    if typed and str(jax.random.key_impl(rng)) != _THREEFRY:
        words_of_rng, rng = jax.random.key_data(rng), jax.random.key(0, impl=_THREEFRY)
        for word in jnp.ravel(words_of_rng).astype(jnp.uint32):
            rng = jax.random.fold_in(rng, word)
    words = [jnp.zeros_like(ids), ids]
    if ids.dtype.itemsize > 4:
        words = [ids >> 32, ids & 0xFFFFFFFF]
    fold = jax.vmap(jax.random.fold_in, in_axes=(None, 0))
    high = fold(rng, words[0].astype(jnp.uint32))
    return jax.vmap(jax.random.fold_in)(high, words[1].astype(jnp.uint32))


def check_takes(
    caller: str, loss_fn: Callable[..., Any], names: str, count: int, given: Mapping[str, Any]
) -> None:
    """Raises `TypeError` unless `loss_fn` can be called with what the step was given.

    Args:
        caller: the maker of the step, which speaks in the error.
        loss_fn: what will be called.
        names: its positional arguments in order, for the error.
        count: how many they are.
        given: what comes by name, such as `replicated`.
    """
    signature = inspect.signature(loss_fn)
    try:
        signature.bind(*range(count), **given)
    except TypeError:
        if given:
            raise TypeError(
                f"{caller}: loss_fn must take ({names}, *, {', '.join(given)}) when the step is "
                f"given {' and '.join(given)}, got {signature}. Give it only what the loss "
                "function takes."
            ) from None
        rng = "an rng" if count == 3 else "no rng"
        raise TypeError(
            f"{caller}: loss_fn must take ({names}) when the step is given {rng}, got "
            f"{signature}. Give the step an rng if the loss function takes one, and only then."
        ) from None


def check_call(batch: Any, rng: Any, options: StepOptions) -> None:
    """Raises `TypeError` or `ValueError` for what no step can be made of, before tracing."""
    _check_batch(batch, options)
    _check_rng(rng, options)
    if options.rng_per == "example" and len(jnp.shape(batch.ids)) != 1:
        raise ValueError(
            "train step: ids must be one for each row where rng_per='example', got shape "
            f"{jnp.shape(batch.ids)}. The rows of a PackedPlan hold several; rng_per='rank' takes "
            "them."
        )


def _check_batch(batch: Any, options: StepOptions) -> None:
    check_batch("train step: batch must be a Batch", batch, MAKE_OR_READ_BATCHES)
    if batch.weights is None:
        raise TypeError("train step: batch must have weights, got None. Batch.of(data) makes them.")
    # of the whole batch: the ranks would split what is no row without a word
    check_rows(batch, caller="train step")
    check_is_global(batch, options.mesh, caller="train step")
    rows, ranks = batch.weights.shape[0], options.rows.ranks
    if rows % ranks:
        raise ValueError(
            f"train step: batch must have rows that divide by {ranks} ranks, got {rows}. Fill up "
            "with rows of weight 0, as batches(plan, ...) does."
        )
    if rows // ranks % options.microbatches:
        raise ValueError(
            f"train step: batch must have rows per rank that divide by {options.microbatches} "
            f"microbatches, got {rows // ranks}. Fill up with rows of weight 0: give the plan a "
            "batch_size that the microbatches divide."
        )
    options.rows.specs_of(batch)  # which checks that it fits


def _check_rng(rng: Any, options: StepOptions) -> None:
    if rng is None:
        if options.rng_per == "example":
            raise ValueError(
                "train step: rng must be given where rng_per='example', got None. Call "
                "step(..., rng) with a fresh key for every step, such as fold_in(key, step)."
            )
        return
    check_key(rng)


def check_key(rng: Any) -> None:
    """Raises `TypeError` unless it is one key, typed or not."""
    typed = isinstance(rng, jax.Array) and jnp.issubdtype(rng.dtype, jax.dtypes.prng_key)
    if getattr(rng, "shape", None) != (() if typed else (2,)):
        raise TypeError(
            f"train step: rng must be one key, got {rng!r}. jax.random.key(seed) makes one, and "
            "jax.random.fold_in(key, step) another for every step."
        )
