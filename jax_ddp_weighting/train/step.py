"""What every training step is made of: one gradient over all ranks, applied or skipped."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, PyTree

from jax_ddp_weighting.data.batch import MAKE_OR_READ_BATCHES, Batch, check_batch, check_is_global
from jax_ddp_weighting.distributed import mesh as meshes
from jax_ddp_weighting.train.model_kind import ModelKind, as_step_loss, as_step_statistics
from jax_ddp_weighting.train.step_options import StepOptions, Varying
from jax_ddp_weighting.weighting.gradient import (
    OVERWRITTEN,
    GlobalLoss,
    StepGradient,
    take_gradient,
)
from jax_ddp_weighting.weighting.loss_terms import LossFn, has_gradient
from jax_ddp_weighting.weighting.microbatches import check_rows
from jax_ddp_weighting.weighting.rank_gradient import GradientOptions


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


def global_step(loss_fn: LossFn, kind: ModelKind, options: StepOptions) -> Callable[..., Any]:
    """The gradient of a step over all ranks, and the state that its model keeps.

    Args:
        loss_fn: the loss, as the user wrote it.
        kind: what it is given of parameters and state.
        options: how it is run.

    Returns:
        A function `(placement, params, state, batch, rng, replicated, varying) -> (StepReport,
        gradients, state)` to be compiled, of which the placement is the shardings of the
        parameters, and `varying` what changes from step to step beside the others. In a step
        without weight the gradients are 0 and the state is the one that came in. Where weights are
        bad it is so too, but for the gradients, which are not to be used.
    """
    fixed = GradientOptions(
        as_step_loss(loss_fn, kind, options),
        options.mapped_axis,
        options.microbatches,
        options.coefficients,
        options.divisors,
        as_step_statistics(kind, options),
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


def check_parameters(params: PyTree, options: StepOptions) -> None:
    """Raises for what is carried among parameters and is none, before tracing.

    Raises:
        TypeError: they are a pair of parameters, or a leaf is no array.
        ValueError: flax's fp8 scales are among them, which a step adds up as if they were
            gradients.
    """
    if isinstance(params, optax.LookaheadParams):
        raise TypeError(
            "train step: params must be one set of parameters, got optax.LookaheadParams. "
            "optax.lookahead wants gradients of the fast ones alone, which no step takes: call "
            "value_and_grad(...)(params.fast, batch) and the optimizer in a loop of your own."
        )
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        where = f"params{jax.tree_util.keystr(path)}"
        if not hasattr(leaf, "dtype") and not isinstance(leaf, int | float | complex):
            raise TypeError(
                f"train step: params must be arrays, got {type(leaf).__name__} at {where}. Keep "
                "what is not trained beside them. (Of an equinox module, eqx.partition(model, "
                "eqx.is_inexact_array) gives the parameters.)"
            )
        sums = options.engine != "jit" or options.microbatches > 1 or options.grad_norm
        if sums and OVERWRITTEN in where:
            raise ValueError(
                f"train step: params must hold no values that are handed on as gradients, got "
                f"{where}, where gradients are added up. flax keeps the scales of fp8 there: use "
                'engine="jit", without microbatches and grad_norm.'
            )


def check_key(rng: Any) -> None:
    """Raises `TypeError` unless it is one key, typed or not."""
    typed = isinstance(rng, jax.Array) and jnp.issubdtype(rng.dtype, jax.dtypes.prng_key)
    if getattr(rng, "shape", None) != (() if typed else (2,)):
        raise TypeError(
            f"train step: rng must be one key, got {rng!r}. jax.random.key(seed) makes one, and "
            "jax.random.fold_in(key, step) another for every step."
        )
