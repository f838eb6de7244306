"""One rank's part of a step: its loss called, its totals pulled back, microbatch by microbatch."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer
from jaxtyping import Array, PyTree

from jax_ddp_weighting._arguments import check_microbatches
from jax_ddp_weighting.distributed import mesh
from jax_ddp_weighting.distributed.mesh import AxisName
from jax_ddp_weighting.weighting.counts import Sum, as_sum
from jax_ddp_weighting.weighting.denominators import (
    Denominators,
    StepWeights,
    sum_over_ranks,
    sum_step_weights,
    to_denominators,
)
from jax_ddp_weighting.weighting.divisors import (
    Divisors,
    apply_divisors,
    check_divisors,
    check_terms,
)
from jax_ddp_weighting.weighting.dtypes import widen
from jax_ddp_weighting.weighting.halves import OwnRows, check_halves
from jax_ddp_weighting.weighting.loss_terms import (
    LossFn,
    check_axes,
    check_state,
    check_totals,
    has_gradient,
    name_sums,
    name_terms,
    unpack,
)
from jax_ddp_weighting.weighting.microbatches import Rows, take_microbatch
from jax_ddp_weighting.weighting.named_arguments import find_for_loss
from jax_ddp_weighting.weighting.param_specs import (
    ParamSpecs,
)
from jax_ddp_weighting.weighting.row_parts import count_terms
from jax_ddp_weighting.weighting.statistics import Statistics, check_statistics
from jax_ddp_weighting.weighting.sums import WeightedSum, divide


@dataclass(frozen=True)
class GradientOptions:
    """What a gradient is taken of, and how: the arguments of `value_and_grad`, checked.

    Attributes:
        loss_fn: the loss function.
        axis_name: the mapped data axis; None for the global view.
        microbatches: how many microbatches the rows are split into.
        coefficients: one factor per term, or None for a loss of one term.
        divisors: what terms are divided by that have a divisor, by name.
        statistics: what is summed over the step before any loss is taken, or None.
        has_aux: whether `loss_fn` returns auxiliary output.
        has_state: whether it takes and returns a state.
        has_accepted: whether the weight of the batch's rows is summed too, as a training step asks.
        param_specs: which parameters are sharded over mapped axes, or None for none of them.
        gather_per: None where `loss_fn` takes shards. Else it takes whole parameters, which are
            gathered for it once per `"step"`, or once per `"microbatch"`, with the memory of one
            rank's shards for what is accumulated.
        loss_of_shared: the loss function for parameters as they were given, where it has to treat
            them otherwise; None for the same.
        part_axes: those of the axes over which parts of rows lie, and not rows: each rank of them
            holds what is the whole row's, such as its weight. Only where types tell what varies.
        scale: what totals are multiplied by on their way back to the parameters, a float scalar, so
            that gradients in float16 do not vanish; they come divided by it, in float32 at least.
            With None they come as they are, in the dtypes of the parameters.
    """

    loss_fn: LossFn
    axis_name: AxisName | None = None
    microbatches: int = 1
    coefficients: Mapping[str, Any] | None = None
    divisors: Divisors | None = None
    statistics: Statistics | None = None
    has_aux: bool = False
    has_state: bool = False
    has_accepted: bool = False
    param_specs: ParamSpecs | None = None
    gather_per: str | None = None
    loss_of_shared: LossFn | None = None
    part_axes: tuple[str, ...] = ()
    scale: Any = None

    def __post_init__(self) -> None:
        checked = check_microbatches("value_and_grad: microbatches", self.microbatches)
        object.__setattr__(self, "microbatches", checked)
        divisors = check_divisors(self.divisors, self.coefficients, caller="value_and_grad")
        object.__setattr__(self, "divisors", divisors)
        check_statistics(self.statistics, caller="value_and_grad")

    @property
    def factors(self) -> Mapping[str, Any]:
        """One factor per term, also where there is only one."""
        return {"loss": 1.0} if self.coefficients is None else self.coefficients


class Sums(NamedTuple):
    """What one microbatch's loss comes to on one rank, nothing divided yet.

    Attributes:
        metrics: totals that pull nothing, by the names of their terms.
        weights: what is summed over the step.
        state: the model's new state.
        aux: a list of the auxiliary output, or empty.
    """

    metrics: dict[str, Sum]
    weights: StepWeights
    state: PyTree
    aux: list[Any]


def call_loss(
    options: GradientOptions,
    params: PyTree,
    rows: Rows,
    state: PyTree,
    *,
    shared: PyTree,
    again: bool = False,
) -> tuple[dict[str, Array], Sums]:
    """The totals to pull back, beside what no gradient flows through: a function for `jax.vjp`.

    Args:
        options: what is called, and how.
        params: parameters that are local to the rank.
        rows: the microbatch.
        state: the model's state before it.
        shared: the parameters as they were given, the same on every rank.
        again: whether it is called elsewhere too, where what costs a look at its program is looked
            at.
    """
    sums, *extras = _call(options, options.loss_fn, params, rows, state)
    if options.has_state:
        new_state, *aux = extras

        def call_again() -> PyTree:
            loss_fn = options.loss_of_shared or options.loss_fn
            return _call(options, loss_fn, shared, rows, state)[1]

        state = check_state(state, new_state, options.axis_name, call_again)
    else:
        aux = extras
    terms = name_terms(sums, options.coefficients)
    check_terms(sums, options.divisors or {})
    check_axes(terms, options.axis_name, params)
    if not again:
        _check_halves(terms, options, params, rows, state)
    pulls = {name for name in terms if has_gradient(options.factors[name])}
    check_totals({name: terms[name] for name in terms if name in pulls})
    once = frozenset(n for n, each in (name_sums(sums) or {}).items() if each.counted_once)
    terms = count_terms(terms, options.part_axes, once=once)
    weights = sum_step_weights(
        rows.batch, terms, accepted=options.has_accepted, part_axes=options.part_axes
    )
    pulled = {name: each.total for name, each in terms.items() if name in pulls}
    metrics = {name: as_sum(each.total) for name, each in terms.items() if name not in pulls}
    if options.axis_name is not None:
        # Also what is the same on every rank, so that it is pulled back from every rank.
        varied = mesh.vary((pulled, metrics, weights), options.axis_name)
        pulled, metrics, weights = varied
    return pulled, Sums(metrics, weights, state, aux)


def _call(
    options: GradientOptions, loss_fn: LossFn, params: PyTree, rows: Rows, state: PyTree
) -> tuple[Any, ...]:
    """What a loss function returns: sums, and a state and auxiliary output where it has them."""
    keys = rows.rng if rows.keys is None else rows.keys
    args = (rows.batch,) if keys is None else (rows.batch, keys)
    given = {} if rows.replicated is None else {"replicated": rows.replicated}
    given |= {} if rows.statistics is None else {"statistics": rows.statistics}
    others = [*(options.divisors or {}).values(), options.statistics]
    given = find_for_loss(options.loss_fn, given, others)
    given |= {"state": state} if options.has_state else {}
    named = [*["state"] * options.has_state, *["aux"] * options.has_aux]
    out = loss_fn(params, *args, **given)
    return unpack(out, *named) if named else (out,)


def _check_halves(
    terms: Mapping[str, WeightedSum],
    options: GradientOptions,
    params: PyTree,
    rows: Rows,
    state: PyTree,
) -> None:
    """Raises `ValueError` for a term of which one half alone is of the rank's own rows."""
    own = OwnRows(rows.batch, rows.keys)
    leaves, treedef = jax.tree.flatten((rows.statistics, rows.replicated, state))
    # What is known while tracing a loss may use as such: statistics alone are always computed.
    count = len(jax.tree.leaves(rows.statistics))
    whole = {i: x for i, x in enumerate(leaves) if i < count or isinstance(x, Tracer)}

    def take(own: OwnRows, whole: Mapping[int, Any]) -> Mapping[str, WeightedSum]:
        given = treedef.unflatten([whole.get(i, leaf) for i, leaf in enumerate(leaves)])
        statistics, replicated, state = given
        part = Rows(own.batch, rows.rng, own.keys, replicated, statistics)
        found = name_sums(_call(options, options.loss_fn, params, part, state)[0]) or {}
        return {name: found[name] for name in terms}

    check_halves(
        terms,
        take,
        own,
        whole,
        axis_name=options.axis_name,
        part_axes=options.part_axes,
        microbatches=options.microbatches,
    )


def _divide_by(options: GradientOptions, weights: StepWeights, rows: Rows) -> Denominators:
    over_ranks = sum_over_ranks(weights, options.axis_name)
    if not options.divisors:
        return to_denominators(over_ranks, options.coefficients)
    # here, where the whole step's weights are known, outside the loop over microbatches
    divisors_of = partial(
        apply_divisors,
        options.divisors,
        replicated=rows.replicated,
        axis_name=options.axis_name,
    )
    return to_denominators(over_ranks, options.coefficients, divisors_of)


class Pulled(NamedTuple):
    """What pulling one microbatch, or all of them, back to the parameters has given.

    Attributes:
        gradients: the rank's own share of the gradient of the global mean.
        totals: the rank's own totals, by term.
        divided_by: the weights over the whole step, all ranks.
        state: the model's new state.
        aux: a list of the auxiliary output, or empty.
    """

    gradients: PyTree
    totals: dict[str, Sum]
    divided_by: Denominators
    state: PyTree
    aux: list[Any]


def pull_back(
    options: GradientOptions,
    params: PyTree,
    rows: Rows,
    state: PyTree,
    divided_by: Denominators | None = None,
    *,
    shared: PyTree,
) -> Pulled:
    """One microbatch's gradient, each total divided by the weight of the whole step.

    Dividing what is pulled back, and not the gradients, costs one scalar per term.

    Args:
        options: what it is taken of, and how.
        params: parameters that are local to the rank.
        rows: the microbatch.
        state: the model's state before it.
        divided_by: what the whole step is divided by, where the rows are not all of it.
        shared: the parameters as they were given, the same on every rank.
    """
    again = divided_by is not None

    def call(params: PyTree) -> tuple[dict[str, Array], Sums]:
        return call_loss(options, params, rows, state, shared=shared, again=again)

    totals, pull, sums = jax.vjp(call, params, has_aux=True)
    whole = _divide_by(options, sums.weights, rows) if divided_by is None else divided_by
    cotangents = {}
    for name, total in totals.items():
        each = divide(jnp.asarray(options.factors[name], total.dtype), whole.terms[name])
        # here, before anything of float16 is multiplied by it
        each = each if options.scale is None else each * jnp.asarray(options.scale, each.dtype)
        cotangents[name] = _like(each, total)
    gradients = pull(cotangents)[0]
    return Pulled(gradients, {**totals, **sums.metrics}, whole, sums.state, sums.aux)


def accumulate(
    options: GradientOptions, params: PyTree, rows: Rows, state: PyTree, *, shared: PyTree
) -> Pulled:
    """The same of several microbatches: their weights first, then one gradient after the other."""
    numbers = jnp.arange(options.microbatches)

    def microbatch(k: Array) -> Rows:
        return take_microbatch(rows, k, options.microbatches)

    def weigh(state: PyTree, k: Array) -> tuple[PyTree, StepWeights]:
        # The state goes on as it does below, for the model may draw weights from a stream in it.
        # Where it has no say in them, XLA removes it with the rest of the forward pass.
        _, sums = call_loss(options, params, microbatch(k), state, shared=shared)
        return sums.state, sums.weights

    _, weights = lax.scan(weigh, state, numbers)
    whole = _divide_by(options, jax.tree.map(partial(jnp.sum, axis=0), weights), rows)

    def add(carry: tuple[PyTree, PyTree], k: Array) -> tuple[Any, Any]:
        gradients, state = carry
        found = pull_back(options, params, microbatch(k), state, whole, shared=shared)
        gradients = jax.tree.map(lambda a, b: a + b.astype(a.dtype), gradients, found.gradients)
        return (gradients, found.state), (found.totals, found.aux)

    # in float32 at least: small gradients vanish in a bfloat16 sum
    zeros = jax.tree.map(_zeros_like, params)
    (gradients, state), (totals, aux) = lax.scan(add, (zeros, state), numbers)
    if options.scale is None:  # else they are divided by it first
        gradients = jax.tree.map(lambda g, p: g.astype(p.dtype), gradients, params)
    totals = jax.tree.map(partial(jnp.sum, axis=0), totals)
    return Pulled(gradients, totals, whole, state, aux)


def _like(value: Array, model: Array) -> Array:
    return mesh.vary_like(value.astype(model.dtype), model)


def _zeros_like(leaf: Array) -> Array:
    return mesh.zeros_like(leaf, widen(jnp.float32, leaf.dtype))
