"""The global weighted mean and its gradient: divided once, by the global weight.

A loss function returns a numerator and a denominator, never a mean. For `W` ranks that average
their gradients the rule is that rank `r` back-propagates

    total_r * W / (weight summed over all ranks and all microbatches)

`value_and_grad` applies it in every regime of a data axis with one spelling: parameters are made
local to the rank, every rank pulls its totals back divided by the global weight, and the gradients
are summed over the ranks once.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from jax_ddp_weighting.data.batch import Batch, check_batch_values
from jax_ddp_weighting.distributed import mesh
from jax_ddp_weighting.distributed.mesh import AxisName
from jax_ddp_weighting.distributed.placement import check_not_cut, check_tree_not_cut
from jax_ddp_weighting.weighting.counts import Sum, to_divisor, to_report
from jax_ddp_weighting.weighting.denominators import (
    Denominators,
    sum_over_ranks,
)
from jax_ddp_weighting.weighting.divisors import (
    Divisors,
)
from jax_ddp_weighting.weighting.dtypes import widen
from jax_ddp_weighting.weighting.loss_terms import (
    LossFn,
    check_coefficients,
    describe,
    has_gradient,
)
from jax_ddp_weighting.weighting.microbatches import Rows, check_rows, take_microbatch
from jax_ddp_weighting.weighting.param_specs import (
    Layout,
    ParamSpecs,
    find_layout,
    gather_whole,
    scatter_sum,
    type_as_shared,
)
from jax_ddp_weighting.weighting.rank_gradient import (
    GradientOptions,
    accumulate,
    call_loss,
    pull_back,
)
from jax_ddp_weighting.weighting.statistics import Statistics, sum_statistics
from jax_ddp_weighting.weighting.sums import WeightedSum, divide, find_means

OVERWRITTEN = "_overwrite_with_gradient"
"""flax's collection of what is no parameter: the "gradient" of such a leaf is its new value."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class GlobalLoss:
    """The loss of a whole step over all ranks and microbatches, the same number on every rank.

    Attributes:
        value: the sum over terms of coefficient times mean, a scalar.
        terms: each term's `WeightedSum` over the whole step, by name; a loss function that returned
            one `WeightedSum` has the one term `"loss"`. A sum of integers stays one: where 32 bits
            cannot hold it, it is 2**31 - 1 and the rest is in `beyond`, so that the mean is right.
        bad_weights: how many weights of the step cannot count, because they are negative, NaN,
            infinite, or a sum that passed 2**31 before it came here: rows of a `Batch`; and where
            no row is bad, or no `Batch` was given, terms, on each rank and microbatch; and, where
            all weights are good, divisors, and terms whose float weight over the whole step is too
            large to divide by (8.5e37 in float32). If there are any, nothing is counted: the value
            is NaN, and the gradient and all terms are 0, as in a step without weight.
        divisors: what a term was divided by in place of its weight, a scalar of at least float32,
            by the name of each term that was given a divisor.
        statistics: those of the whole step, as the loss function was given them; None without.
    """

    value: Any
    terms: dict[str, WeightedSum]
    bad_weights: Any = 0
    divisors: dict[str, Any] = field(default_factory=dict)
    statistics: Any = None

    @property
    def means(self) -> dict[str, Array]:
        """Each term over its divisor, or else its weight, before its coefficient; 0 over 0."""
        return find_means(self.terms, self.divisors)


def value_and_grad(
    loss_fn: LossFn,
    *,
    axis_name: AxisName | None = None,
    microbatches: int = 1,
    coefficients: Mapping[str, Any] | None = None,
    divisors: Divisors | None = None,
    statistics: Statistics | None = None,
    param_specs: ParamSpecs | None = None,
    has_aux: bool = False,
    has_state: bool = False,
) -> Callable[..., tuple[Any, PyTree]]:
    """The global weighted mean and its gradient, the same in every regime and on every rank.

    The rule: `sum over terms of coefficient * (total / weight)`, each term over its own weight
    summed over all ranks and microbatches, divided once; or over the divisor that it is given. A
    term of weight 0, or of divisor 0, contributes value 0 and gradient 0.

    With several microbatches the weights are summed first, in a pass whose forward computation XLA
    removes because only the weights are used; the gradients are then accumulated by `lax.scan`, in
    at least float32, with the memory of one microbatch, and cross the network once per step. (In
    the global view XLA chooses where it reduces, and that is at every microbatch: several
    microbatches are cheaper inside `shard_map`.)

    Args:
        loss_fn: `loss_fn(params, batch)` returns a `WeightedSum` (see `weighted_sum`), or a dict of
            them that `coefficients` combines. No gradient flows into weights.
        axis_name: the mapped data axis (or a tuple of axes) inside `shard_map`, `pmap` or `vmap`;
            None for the global view of `jit`, and for one device. It names every axis that rows lie
            over, or parts of rows, such as the tokens of a long one; and no other, or what is
            summed counts the same rows as often as that axis has ranks.
        microbatches: how many microbatches to split the rows into. Microbatch `k` of `K` holds rows
            `k, k + K, k + 2K, ...`, so that the rows of a sharded batch stay on their device.
        coefficients: one factor per term, for loss functions that return a dict. A term of
            coefficient 0 is a metric: it is summed and reported, and pulls no gradient. Of a traced
            coefficient nothing is known beforehand, so its term is no metric, even where it is 0.
            One that changes with the step is such a traced number, `{"kl": schedule(count)}` inside
            one's own `jit`; a function is taken by training steps alone, which have a count. And a
            traced factor on all of them is a loss scale: gradients come back multiplied by it in
            the dtypes of `params`, to be divided by it in float32.
        divisors: by term (the one unnamed term is `"loss"`) what it is divided by in place of its
            weight, whatever the regime and however many ranks and microbatches there are. A number,
            finite and at least 0, such as the expected size of a batch. Or a function of the term's
            weight over the whole step, called once per step: `lambda weight:
            jnp.maximum(weight, 1)`. It is given a float scalar (float32, or float64 under x64, also
            where weights are integers; in batches of `join_batches` stretched by what is missing,
            as `Batch.missing` says) and returns a real scalar; one that is negative, NaN or
            infinite makes the step a bad one (`GlobalLoss.bad_weights`). If it names `replicated`
            too, it is given that of the step: `lambda weight, *, replicated:
            0.9 * replicated["ema"] + 0.1 * weight` is a moving average, whose next `ema` is
            `loss.divisors["loss"]`. No gradient flows into divisors. A metric may have one; a term
            of `WeightedSum.once` may not, since its weight counts ranks and microbatches.
        statistics: `statistics(params, batch)` returns a pytree of arrays, sums over the rows that
            it is given. They are added up over microbatches and ranks before any loss is taken, and
            handed on as `loss_fn(..., statistics=...)`, the same to every rank and microbatch, and
            in `GlobalLoss.statistics`: the share of tokens of each expert, the size of each class,
            a global normaliser. No gradient flows through them. Floats come in float32 at least;
            integers are added up exactly, to 2**47, and come as floats. It is given `rng`, `state`
            and `replicated` too, as the loss function is, where its signature names them by these
            names and the step has them; the state is that before the step in every microbatch.
            Costs one more forward pass of this function, and one all-reduce per dtype.
        param_specs: which parameters are sharded over mapped axes: a pytree of `PartitionSpec`s, in
            the structure of `params` or of its first levels, or one for all. What is not sharded
            over an axis of `axis_name` must be the same on every rank of it. `loss_fn` is given the
            rank's shards, and does by hand what it does with them: `all_gather(..., tiled=True)`
            where a parameter is needed whole, `psum` of partial products, `all_to_all` to experts.
            Each shard gets its own gradient, summed once: over the ranks that use it by the
            transposes of those collectives, and over the axes that its spec does not name. Where
            `loss_fn` communicates over a mapped axis that `axis_name` does not name, its total must
            be the same on every rank of that axis. In the global view, where JAX knows how arrays
            lie, specs say nothing.
        has_aux: `loss_fn` returns `(sums, aux)`.
        has_state: `loss_fn(params, batch, state=state)` returns `(sums, state)`, or
            `(sums, state, aux)`. A state is what a model keeps beside its parameters, such as
            running batch statistics. It passes through the microbatches in order, and has no
            gradient; what it draws or decides about weights is as it is in the real pass.

    Returns:
        A function `(params, batch, rng=None) -> (GlobalLoss, gradients)`, or
        `((GlobalLoss, aux), gradients)` with `has_aux`; or
        `(params, batch, rng=None, *, state) -> ((GlobalLoss, state), gradients)` with `has_state`,
        `aux` coming last with both. `batch` is a pytree of arrays with one leading axis of rows,
        the same number in every leaf. What is no row goes in as `replicated=`, a pytree that every
        rank and microbatch is given whole, as `loss_fn(..., replicated=...)`: class weights, a
        teacher, a target network. (A `loss_fn` that does not name it is not given what was meant
        for a divisor or for statistics that do.) Gradients have the shapes and dtypes of `params`.
        `aux` is the rank's own, stacked along a new leading axis when there are several
        microbatches. A given `rng` is folded with the microbatch's number and passed as
        `loss_fn(params, batch, rng)`.

    Raises:
        TypeError: `loss_fn` returns anything but `WeightedSum`s, or a term that pulls has a total
            that is no float; parameters are not floats; a state is given without `has_state`; a
            divisor is no number, or statistics return something else than numbers.
        ValueError: leaves of the batch differ in their number of rows, or the microbatches do not
            divide it; `coefficients` do not name the terms; a divisor is for no term, no scalar,
            negative or NaN; the shape of a statistic depends on the number of rows, or it was
            summed over the ranks already; the axis is not mapped, or rows lie
            over another one too; a parameter is sharded over an axis that its spec does not name
            (found by its type in a checked `shard_map`, elsewhere where `loss_fn` gathers it), or a
            spec cannot be right; the state comes back in another shape, or not the same on every
            rank (both as far as types tell: in `shard_map` with its varying-axes check).

    Matches: one device that holds the whole batch, to 1e-12 in float64, in all five regimes on jax
        0.10.2 and 0.12.0 (tests/weighting/test_gradient.py).

    Example:
        >>> def loss_fn(w, batch):
        ...     x, weights = batch
        ...     return weighted_sum(w * x, weights)
        >>> batch = jnp.array([1.0, 3.0, 3.0, 3.0]), jnp.array([1, 1, 1, 0])
        >>> loss, gradient = value_and_grad(loss_fn, microbatches=2)(2.0, batch)
        >>> round(float(loss.value), 4), round(float(gradient), 4)
        (4.6667, 2.3333)

        Class weights are no rows:

        >>> def class_loss(w, batch, replicated):
        ...     x, labels = batch
        ...     return weighted_sum(w * x, replicated[labels])
        >>> batch = jnp.array([1.0, 3.0, 3.0, 3.0]), jnp.array([0, 1, 1, 1])
        >>> step = value_and_grad(class_loss, microbatches=2)
        >>> loss, gradient = step(2.0, batch, replicated=jnp.array([3.0, 1.0]))
        >>> float(gradient)  # (3 * 1 + 1 * 9) / 6
        2.0

        A divisor from outside, such as the length that all answers are divided by:

        >>> batch = jnp.array([1.0, 3.0, 3.0, 3.0]), jnp.array([1, 1, 1, 0])
        >>> step = value_and_grad(loss_fn, microbatches=2, divisors={"loss": 50.0})
        >>> loss, gradient = step(2.0, batch)
        >>> round(float(gradient), 4), int(loss.terms["loss"].weight), float(loss.divisors["loss"])
        (0.14, 3, 50.0)

        Classes weighed by how rare they are in the whole step:

        >>> def class_sizes(w, batch):
        ...     return jnp.zeros(2).at[batch[1]].add(1)
        >>> def balanced_loss(w, batch, statistics):
        ...     x, labels = batch
        ...     return weighted_sum(w * x, 1 / statistics[labels])
        >>> batch = jnp.array([1.0, 3.0, 3.0, 3.0]), jnp.array([0, 1, 1, 1])
        >>> step = value_and_grad(balanced_loss, microbatches=2, statistics=class_sizes)
        >>> loss, gradient = step(2.0, batch)
        >>> float(gradient)  # (1 + 3) / 2
        2.0

        A parameter of which each rank holds a part, gathered by hand:

        >>> from jax.sharding import PartitionSpec as P
        >>> def gathering_loss(shard, x):
        ...     return weighted_sum(x @ jax.lax.all_gather(shard, "data", tiled=True))
        >>> step = value_and_grad(gathering_loss, axis_name="data", param_specs=P("data"))
        >>> mapped = jax.shard_map(
        ...     step, mesh=data_mesh(1), in_specs=P("data"), out_specs=(P(), P("data"))
        ... )
        >>> loss, gradient = mapped(jnp.ones(2), jnp.array([[1.0, 2.0], [3.0, 4.0]]))
        >>> gradient.tolist()
        [2.0, 3.0]
    """
    check_coefficients(coefficients, caller="value_and_grad")
    options = GradientOptions(
        loss_fn,
        axis_name,
        microbatches,
        coefficients,
        divisors,
        statistics,
        has_aux=has_aux,
        has_state=has_state,
        param_specs=param_specs,
    )

    def global_value_and_grad(
        params: PyTree,
        batch: PyTree,
        rng: Array | None = None,
        *,
        state: PyTree = None,
        replicated: PyTree = None,
    ) -> tuple[Any, PyTree]:
        found = take_gradient(options, params, batch, rng=rng, state=state, replicated=replicated)
        # A bad weight may stand in a product, where 0 times NaN is NaN: chosen, not multiplied.
        # (A training step applies no gradient then, and need not pay for the choice.)
        good = found.loss.bad_weights == 0
        gradients = jax.tree.map(lambda g: jnp.where(good, g, jnp.zeros_like(g)), found.gradients)
        extras = [found.state] * has_state + found.aux
        return ((found.loss, *extras) if extras else found.loss), gradients

    return global_value_and_grad


class StepGradient(NamedTuple):
    """What a whole step comes to, over all ranks and microbatches.

    Attributes:
        loss: the global loss and its terms.
        gradients: of the global mean, as the parameters are; not to be used where weights are bad.
        accepted: the weight of the batch's rows, if it was asked for.
        state: what the model keeps; None where it has no state.
        aux: a list of the rank's auxiliary output, or empty.
    """

    loss: GlobalLoss
    gradients: PyTree
    accepted: Array | None
    state: PyTree
    aux: list[Any]


def take_gradient(
    options: GradientOptions,
    params: PyTree,
    batch: PyTree,
    *,
    rng: Array | None = None,
    row_keys: Array | None = None,
    state: PyTree = None,
    replicated: PyTree = None,
) -> StepGradient:
    """The gradient of a step; what `value_and_grad` and every training step are made of.

    Args:
        options: what it is taken of, and how.
        params: parameters, floats; the same on every rank, but for those that are sharded.
        batch: the rank's rows.
        rng: one key, which is folded with the microbatch's number.
        row_keys: keys `[rows]` in place of it, which go where their rows go.
        state: what the model keeps beside its parameters.
        replicated: what every rank and microbatch is given whole; None is nothing.
    """
    axis_name = options.axis_name
    if state is not None and not options.has_state:
        raise TypeError(
            "value_and_grad: state must be left out unless has_state=True, got "
            f"{describe(state)}. With it, loss_fn(params, batch, state=state) returns "
            "(sums, state)."
        )
    check_rows(batch, caller="value_and_grad")
    _check_on_host(batch, replicated)
    shared = jax.tree_util.tree_map_with_path(partial(_parameter, options), params)
    params = own = shared
    specs, gathers = options.param_specs, options.gather_per
    if gathers == "microbatch":
        statistics = options.statistics
        if statistics is not None:
            statistics = _gather_first(statistics, specs, typed=bool(options.part_axes))
        options = replace(
            options,
            loss_fn=_gather_first(options.loss_fn, specs),
            # a state that is made of parameters is the same on every rank, and must be typed so
            loss_of_shared=_gather_first(options.loss_fn, specs, typed=True),
            statistics=statistics,
        )
    elif gathers == "step":
        params = gather_whole(own, specs)
        shared = type_as_shared(params, specs)
    if axis_name is not None:
        mesh.axis_size(axis_name, caller="value_and_grad")
        # Local parameters: else a checked shard_map sums their gradient by itself, and does so
        # inside the loop, at every microbatch.
        params = mesh.vary(params, axis_name)
    rows = Rows(batch, rng, row_keys, replicated)
    if options.statistics is not None:
        statistics = sum_statistics(
            options.statistics,
            # typed as shared at a price, where types are to tell what is made of tokens
            params if gathers == "step" and not options.part_axes else shared,
            rows,
            state,
            microbatches=options.microbatches,
            axis_name=axis_name,
            part_axes=options.part_axes,
        )
        rows = rows._replace(statistics=statistics)
    layout = _find_layout(options, own, params, rows, state, shared=shared)
    take = pull_back if options.microbatches == 1 else accumulate
    found = take(options, params, rows, state, shared=shared)
    totals, gradients = sum_over_ranks(found.totals, axis_name), found.gradients
    if options.scale is not None:
        gradients = jax.tree.map(partial(_unscale, scale=options.scale), gradients)
    if gathers == "step":
        gradients = scatter_sum(gradients, specs)
    gradients = layout.sum_gradients(gradients)
    good = found.divided_by.bad == 0
    totals = jax.tree.map(lambda total: jnp.where(good, total, jnp.zeros_like(total)), totals)
    loss = _report(options, totals, found.divided_by, rows.statistics)
    return StepGradient(loss, gradients, found.divided_by.accepted, found.state, found.aux)


def _check_on_host(batch: PyTree, replicated: PyTree) -> None:
    """Refuses what JAX would cut on its way to a device, where it was not placed before."""
    if isinstance(batch, Batch):
        check_batch_values(batch, check_not_cut, caller="value_and_grad")
    else:
        check_tree_not_cut(batch, "batch", caller="value_and_grad")
    check_tree_not_cut(replicated, "replicated", caller="value_and_grad")


def _gather_first(
    fn: Callable[..., Any], specs: ParamSpecs, *, typed: bool = False
) -> Callable[..., Any]:
    """The function of shards; `typed` if what it is given is to be typed as shared."""

    @wraps(fn)  # by its signature it is known what it takes
    def of_shards(params: PyTree, *args: Any, **given: Any) -> Any:
        whole = gather_whole(params, specs)
        return fn(type_as_shared(whole, specs) if typed else whole, *args, **given)

    return of_shards


def _find_layout(
    options: GradientOptions,
    own: PyTree,
    params: PyTree,
    rows: Rows,
    state: PyTree,
    *,
    shared: PyTree,
) -> Layout:
    """Over which axes each gradient is to be summed."""

    def totals_of(params: PyTree, rows: Rows, state: PyTree) -> dict[str, Array]:
        first = take_microbatch(rows, 0, options.microbatches)
        return call_loss(options, params, first, state, shared=shared, again=True)[0]

    return find_layout(
        options.param_specs,
        options.axis_name,
        own,
        totals_of,
        rows,
        state,
        varied=params,
        caller="value_and_grad",
    )


def _report(
    options: GradientOptions,
    totals: dict[str, Sum],
    divided_by: Denominators,
    statistics: PyTree,
) -> GlobalLoss:
    terms, value = {}, jnp.zeros(())
    for name, weight in divided_by.weights.items():
        if has_gradient(options.factors[name]):  # else left out: the mean of a metric may be NaN
            mean = divide(to_divisor(totals[name]), divided_by.terms[name])
            value = value + options.factors[name] * mean
        total, rest = to_report(totals[name])
        rests = rest, divided_by.beyond[name]
        beyond = None
        if any(each is not None for each in rests):
            beyond = WeightedSum(*(jnp.zeros(()) if each is None else each for each in rests))
        terms[name] = WeightedSum(total, weight, beyond)
    value = jnp.where(divided_by.bad == 0, value, jnp.nan)
    divisors = {name: divided_by.terms[name] for name in options.divisors or ()}
    return GlobalLoss(value, terms, divided_by.bad, divisors, statistics)


def _unscale(gradient: Array, scale: Any) -> Array:
    gradient = gradient.astype(widen(jnp.float32, gradient.dtype))
    return gradient / jnp.asarray(scale, gradient.dtype)


def _parameter(options: GradientOptions, path: Any, leaf: Any) -> Array:
    where = jax.tree_util.keystr(path)
    if not hasattr(leaf, "dtype") and not isinstance(leaf, int | float | complex):
        raise TypeError(
            f"value_and_grad: params must be arrays, got {type(leaf).__name__} at params{where}. "
            "Keep what is not trained beside them."
        )
    sums = options.axis_name is not None or options.microbatches > 1 or options.scale is not None
    if sums and OVERWRITTEN in where:
        raise ValueError(
            "value_and_grad: params must hold no values that are handed on as gradients where "
            f"gradients are added up or scaled, got params{where}. flax keeps the scales of fp8 "
            "there: take the gradient in the global view of jit, axis_name=None, without "
            "microbatches and loss scale."
        )
    leaf = jnp.asarray(leaf)
    if not jnp.issubdtype(leaf.dtype, jnp.inexact):
        raise TypeError(
            f"value_and_grad: params must be floating point, got {leaf.dtype} at params"
            f"{where}. Keep counters and keys outside params."
        )
    return leaf
