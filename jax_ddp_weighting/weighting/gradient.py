"""The global weighted mean and its gradient: divided once, by the global weight.

A loss function returns a numerator and a denominator, never a mean. For `W` ranks that average
their gradients the rule is that rank `r` back-propagates

    total_r * W / (weight summed over all ranks and all microbatches)

`value_and_grad` applies it in every regime of a data axis with one spelling: parameters are made
local to the rank, every rank pulls its totals back divided by the global weight, and the gradients
are summed over the ranks once.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, PyTree, Scalar

from jax_ddp_weighting._arguments import check_microbatches
from jax_ddp_weighting.distributed import mesh
from jax_ddp_weighting.distributed.mesh import AxisName
from jax_ddp_weighting.weighting.dtypes import widen
from jax_ddp_weighting.weighting.loss_terms import (
    LossFn,
    add_missing,
    check_state,
    describe,
    has_gradient,
    missing_weights,
    name_terms,
    unpack,
)
from jax_ddp_weighting.weighting.sums import WeightedSum, divide


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class GlobalLoss:
    """The loss of a whole step over all ranks and microbatches, the same number on every rank.

    Attributes:
        value: the sum over terms of coefficient times mean, a scalar.
        terms: each term's `WeightedSum` over the whole step, by name; a loss function that returned
            one `WeightedSum` has the one term `"loss"`.
    """

    value: Any
    terms: dict[str, WeightedSum]


def rank_share(local: WeightedSum, axis_name: AxisName) -> Scalar:
    """The rank's share of the global mean, for code that averages over ranks by its own `pmean`.

    The rule: its value is `total * W / psum(weight)`, so that `pmean` of it is the global mean; and
    `pmean` of its gradient with respect to replicated parameters is the gradient of the global
    mean, in every regime. Under the varying-axes check of `shard_map`, JAX has summed that gradient
    over the ranks already, so there it is scaled without the `W`.

    Where each spelling of the same is right. Two ranks, one weight: rank 0 holds one row of
    gradient 1, rank 1 three rows of gradient 3, so right is 2.5. `S` and `D` are a rank's total and
    weight, `W` the number of ranks, `vary` is `jax.lax.pcast(..., to="varying")` of the parameters:

    | inside the mapped function | `shard_map` | `shard_map(check_vma=False)` | `pmap`, `vmap` |
    |---|---|---|---|
    | `pmean(grad(rank_share(sum, "data")))` | 2.5 | 2.5 | 2.5 |
    | `psum(grad(rank_share(sum, "data")))` | 5.0 | 5.0 | 5.0 |
    | `pmean(grad(S * W / psum(D)))`, the textbook rule | 5.0 | 2.5 | 2.5 |
    | `psum(grad(S)) / psum(D)` | 5.0 | 2.5 | 2.5 |
    | `pmean(grad(psum(S) / psum(D)))` | 2.5 | 2.5 | 2.5 |
    | `grad(psum(S) / psum(D))`, nothing after | 2.5 | 0.5 and 4.5 | 0.5 and 4.5 |
    | `pmean(grad(S / D))`, the mean of local means | 4.0 | 2.0 | 2.0 |
    | `vary`, then `psum(grad(S / psum(D)))` | 2.5 | 2.5 | 2.5 |
    | `vary`, then `pmean(grad(rank_share(sum, "data")))` | 1.25 | 2.5 | 2.5 |

    So do not make parameters varying yourself and use this too. (`pcast` refuses `vmap`; leave it
    out there.) A sum that has been summed over the ranks already may be given: it is the same sum
    on every rank, and its mean and gradient are right.

    With microbatches accumulated by hand, give the rank's own weight of the *whole step* with each
    microbatch's total: `rank_share(WeightedSum(total, weight_of_all_microbatches), axis_name)`.

    Args:
        local: this rank's sum.
        axis_name: the mapped data axis, or a tuple of axes.

    Returns:
        A scalar; 0 where the global weight is 0. No gradient flows into the weight.

    Raises:
        TypeError: `local` is not a `WeightedSum`.
        ValueError: the axis is not mapped here.

    Example:
        >>> def loss(w, x, weights):
        ...     return rank_share(weighted_sum(w * x, weights), "data")
        >>> x, weights = jnp.array([[1.0, 0.0], [3.0, 5.0]]), jnp.array([[1, 0], [1, 1]])
        >>> gradient = jax.vmap(jax.grad(loss), in_axes=(None, 0, 0), axis_name="data")
        >>> float(gradient(1.0, x, weights).mean())  # (1 + 3 + 5) / 3
        3.0
    """
    if not isinstance(local, WeightedSum):
        raise TypeError(
            f"rank_share: local must be a WeightedSum, got {describe(local)}. weighted_sum("
            "losses, weights) makes one; a mean has lost its denominator."
        )
    ranks = mesh.axis_size(axis_name, caller="rank_share")
    # Varying, also where it is the same on every rank, so that every rank pulls it back.
    local = mesh.vary(jax.tree.map(jnp.asarray, local), axis_name)
    share = divide(local.total, lax.psum(local.weight, axis_name))
    if mesh.is_checked(axis_name):
        return share + lax.stop_gradient(share * (ranks - 1))
    return share * ranks


Totals = dict[str, Array]


def value_and_grad(
    loss_fn: LossFn,
    *,
    axis_name: AxisName | None = None,
    microbatches: int = 1,
    coefficients: Mapping[str, Any] | None = None,
    has_aux: bool = False,
    has_state: bool = False,
) -> Callable[..., tuple[Any, PyTree]]:
    """The global weighted mean and its gradient, the same in every regime and on every rank.

    The rule: `sum over terms of coefficient * (total / weight)`, each term over its own weight
    summed over all ranks and microbatches, divided once. A term of weight 0 contributes value 0 and
    gradient 0.

    With several microbatches the weights are summed first, in a pass whose forward computation XLA
    removes because only the weights are used; the gradients are then accumulated by `lax.scan`, in
    at least float32, with the memory of one microbatch, and cross the network once per step. (In
    the global view XLA chooses where it reduces, and that is at every microbatch: several
    microbatches are cheaper inside `shard_map`.)

    Args:
        loss_fn: `loss_fn(params, batch)` returns a `WeightedSum` (see `weighted_sum`), or a dict of
            them that `coefficients` combines. No gradient flows into weights.
        axis_name: the mapped data axis (or a tuple of axes) inside `shard_map`, `pmap` or `vmap`;
            None for the global view of `jit`, and for one device. Parameters must be the same on
            every rank of it; parameters sharded over it belong under `jit`.
        microbatches: how many microbatches to split the rows into. Microbatch `k` of `K` holds rows
            `k, k + K, k + 2K, ...`, so that the rows of a sharded batch stay on their device.
        coefficients: one factor per term, for loss functions that return a dict. A term of
            coefficient 0 is a metric: it is summed and reported, and pulls no gradient.
        has_aux: `loss_fn` returns `(sums, aux)`.
        has_state: `loss_fn(params, batch, state=state)` returns `(sums, state)`, or
            `(sums, state, aux)`. A state is what a model keeps beside its parameters, such as
            running batch statistics. It passes through the microbatches in order, and has no
            gradient and no say in the weights.

    Returns:
        A function `(params, batch, rng=None) -> (GlobalLoss, gradients)`, or
        `((GlobalLoss, aux), gradients)` with `has_aux`; or
        `(params, batch, rng=None, *, state) -> ((GlobalLoss, state), gradients)` with `has_state`,
        `aux` coming last with both. `batch` is a pytree of arrays with one leading axis of rows.
        Gradients have the shapes and dtypes of `params`. `aux` is the rank's
        own, stacked along a new leading axis when there are several microbatches. A given `rng` is
        folded with the microbatch's number and passed as `loss_fn(params, batch, rng)`.

    Raises:
        TypeError: `loss_fn` returns anything but `WeightedSum`s; parameters are not floats.
        ValueError: the microbatches do not divide the rows; `coefficients` do not name the terms;
            the axis is not mapped; the state comes back in another shape, or not the same on every
            rank (as far as types tell: in `shard_map` with its varying-axes check).

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
    """
    microbatches = check_microbatches("value_and_grad: microbatches", microbatches)

    def global_value_and_grad(
        params: PyTree, batch: PyTree, rng: Array | None = None, *, state: PyTree = None
    ) -> tuple[Any, PyTree]:
        params = jax.tree_util.tree_map_with_path(_parameter, params)
        if axis_name is not None:
            mesh.axis_size(axis_name, caller="value_and_grad")
            params = mesh.vary(params, axis_name)

        factors = coefficients if coefficients is not None else {"loss": 1.0}

        def sums_of(params: PyTree, k: Any, state: PyTree) -> tuple[Totals, Any]:
            """The totals to pull back, beside what no gradient flows through."""
            args = (_microbatch(batch, k, microbatches),)
            if rng is not None:
                args += (rng if microbatches == 1 else jax.random.fold_in(rng, k),)
            if has_state:
                out = loss_fn(params, *args, state=state)
                sums, new_state, *aux = unpack(out, "state", *["aux"] * has_aux)
                state = check_state(state, new_state, axis_name)
            else:
                out = loss_fn(params, *args)
                sums, *aux = unpack(out, "aux") if has_aux else (out,)
            sums = jax.tree.map(jnp.asarray, name_terms(sums, coefficients))
            present = missing_weights(args[0])
            if axis_name is not None:
                # Also what is the same on every rank, so that it is pulled back from every rank.
                sums, present = mesh.vary((sums, present), axis_name)
            pulled, metrics = {}, {}
            for name, each in sums.items():
                pulls = has_gradient(factors[name]) and jnp.issubdtype(
                    each.total.dtype, jnp.inexact
                )
                (pulled if pulls else metrics)[name] = each.total
            weights = {name: each.weight for name, each in sums.items()} | present
            return pulled, (metrics, weights, state, aux)

        def of_step(weights: Totals) -> Totals:
            return add_missing(_psum_scalars(weights, axis_name), coefficients)

        def gradients_of(
            k: Any, state: PyTree, weights_of: Callable[[Totals], Totals]
        ) -> tuple[PyTree, Totals, Totals, PyTree, list[Any]]:
            pulled, pull, (metrics, weights, state, aux) = jax.vjp(
                lambda params: sums_of(params, k, state), params, has_aux=True
            )
            weights = weights_of(weights)
            cotangents = {
                name: _like(divide(jnp.asarray(factors[name], total.dtype), weights[name]), total)
                for name, total in pulled.items()
            }
            return pull(cotangents)[0], {**pulled, **metrics}, weights, state, aux

        if microbatches == 1:
            gradients, totals, weights, state, aux = gradients_of(0, state, of_step)
        else:
            steps = jnp.arange(microbatches)

            def weights_at(carry: None, k: Array) -> tuple[None, Totals]:
                _, (_, weights, _, _) = sums_of(params, k, state)
                return carry, weights

            _, weights = lax.scan(weights_at, None, steps)
            weights = of_step(jax.tree.map(jnp.sum, weights))

            def accumulated(carry: tuple[PyTree, PyTree], k: Array) -> tuple[Any, Any]:
                gradients, state = carry
                added, totals, _, state, aux = gradients_of(k, state, lambda _: weights)
                gradients = jax.tree.map(lambda a, b: a + b.astype(a.dtype), gradients, added)
                return (gradients, state), (totals, aux)

            (gradients, state), (totals, aux) = lax.scan(
                accumulated, (jax.tree.map(_zeros_like, params), state), steps
            )
            totals = jax.tree.map(jnp.sum, totals)
            gradients = jax.tree.map(lambda g, p: g.astype(p.dtype), gradients, params)

        totals = _psum_scalars(totals, axis_name)
        if axis_name is not None:
            gradients = lax.psum(gradients, axis_name)
        terms = {name: WeightedSum(totals[name], weights[name]) for name in weights}
        counted = [
            factors[name] * terms[name].mean() for name in terms if has_gradient(factors[name])
        ]
        value = sum(counted, start=jnp.zeros(()))
        loss = GlobalLoss(value, terms)
        extras = [state] * has_state + aux
        return ((loss, *extras) if extras else loss), gradients

    return global_value_and_grad


def _like(value: Array, model: Array) -> Array:
    return mesh.vary_like(value.astype(model.dtype), model)


def _psum_scalars(scalars: Totals, axis_name: AxisName | None) -> Totals:
    """Sums each over the ranks, with one all-reduce per dtype instead of one per scalar."""
    if axis_name is None:
        return scalars
    summed: Totals = {}
    for dtype in sorted({each.dtype for each in scalars.values()}, key=str):
        names = [name for name in scalars if scalars[name].dtype == dtype]
        total = lax.psum(jnp.stack([scalars[name] for name in names]), axis_name)
        summed |= {name: total[i] for i, name in enumerate(names)}
    return {name: summed[name] for name in scalars}


def _microbatch(batch: PyTree, k: Any, microbatches: int) -> PyTree:
    if microbatches == 1:
        return batch

    def rows(path: Any, leaf: Array) -> Array:
        shape = jnp.shape(leaf)
        if not shape or shape[0] % microbatches:
            raise ValueError(
                f"value_and_grad: microbatches must divide the rows of every leaf of batch, got "
                f"{microbatches} microbatches and shape {shape} at batch"
                f"{jax.tree_util.keystr(path)}. Pad with rows of weight 0, as Batch.padded("
                f"{microbatches}) does, or choose another number."
            )
        split = jnp.reshape(leaf, (shape[0] // microbatches, microbatches, *shape[1:]))
        return lax.dynamic_index_in_dim(split, k, axis=1, keepdims=False)

    return jax.tree_util.tree_map_with_path(rows, batch)


def _zeros_like(leaf: Array) -> Array:
    return mesh.zeros_like(leaf, widen(jnp.float32, leaf.dtype))


def _parameter(path: Any, leaf: Any) -> Array:
    leaf = jnp.asarray(leaf)
    if not jnp.issubdtype(leaf.dtype, jnp.inexact):
        raise TypeError(
            f"value_and_grad: params must be floating point, got {leaf.dtype} at params"
            f"{jax.tree_util.keystr(path)}. Keep counters and keys outside params."
        )
    return leaf
