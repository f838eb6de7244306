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

from jax_ddp_weighting import mesh
from jax_ddp_weighting.mesh import AxisName
from jax_ddp_weighting.sums import WeightedSum as WeightedSum
from jax_ddp_weighting.sums import divided
from jax_ddp_weighting.sums import valid_labels as valid_labels
from jax_ddp_weighting.sums import weighted_sum as weighted_sum


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
    `pmean` of its gradient with respect to replicated parameters is the gradient of the global mean
    in `shard_map` with and without the varying-axes check, in `pmap` and in `vmap`. Under the check
    JAX has summed that gradient over the ranks already, so there it is scaled without the `W`; the
    textbook spelling, with it, is `W` times too large there.

    With microbatches accumulated by hand, give the rank's own weight of the *whole step* with each
    microbatch's total: `rank_share(WeightedSum(total, weight_of_all_microbatches), axis_name)`.

    Args:
        local: this rank's sum.
        axis_name: the mapped data axis, or a tuple of axes.

    Returns:
        A scalar; 0 where the global weight is 0.

    Raises:
        ValueError: the axis is not mapped here.

    Example:
        >>> def loss(w, x, weights):
        ...     return rank_share(weighted_sum(w * x, weights), "data")
        >>> x, weights = jnp.array([[1.0, 0.0], [3.0, 5.0]]), jnp.array([[1, 0], [1, 1]])
        >>> gradient = jax.vmap(jax.grad(loss), in_axes=(None, 0, 0), axis_name="data")
        >>> float(gradient(1.0, x, weights).mean())  # (1 + 3 + 5) / 3
        3.0
    """
    ranks = mesh.axis_size(axis_name, caller="rank_share")
    share = divided(local.total, lax.psum(local.weight, axis_name))
    if mesh.is_checked(axis_name):
        return share + lax.stop_gradient(share * (ranks - 1))
    return share * ranks


LossFn = Callable[..., Any]
"""`(params, batch) -> WeightedSum`, or a dict of them; with `rng` as a third argument if one is
given; paired with auxiliary output if `has_aux`."""


def value_and_grad(
    loss_fn: LossFn,
    *,
    axis_name: AxisName | None = None,
    microbatches: int = 1,
    coefficients: Mapping[str, Any] | None = None,
    has_aux: bool = False,
) -> Callable[..., tuple[Any, PyTree]]:
    """The global weighted mean and its gradient, the same in every regime and on every rank.

    The rule: `sum over terms of coefficient * (total / weight)`, each term over its own weight
    summed over all ranks and microbatches, divided once. A term of weight 0 contributes value 0 and
    gradient 0.

    With several microbatches the weights are summed first, in a pass whose forward computation XLA
    removes because only the weights are used; the gradients are then accumulated by `lax.scan`, in
    at least float32, with the memory of one microbatch, and cross the network once per step.

    Args:
        loss_fn: `loss_fn(params, batch)` returns a `WeightedSum` (see `weighted_sum`), or a dict of
            them that `coefficients` combines.
        axis_name: the mapped data axis (or a tuple of axes) inside `shard_map`, `pmap` or `vmap`;
            None for the global view of `jit`, and for one device.
        microbatches: how many microbatches to split the rows into. Microbatch `k` of `K` holds rows
            `k, k + K, k + 2K, ...`, so that the rows of a sharded batch stay on their device.
        coefficients: one factor per term, for loss functions that return a dict.
        has_aux: `loss_fn` returns `(sums, aux)`.

    Returns:
        A function `(params, batch, rng=None) -> (GlobalLoss, gradients)`, or
        `((GlobalLoss, aux), gradients)` with `has_aux`. `batch` is a pytree of arrays with one
        leading axis of rows. Gradients have the shapes and dtypes of `params`. `aux` is the rank's
        own, stacked along a new leading axis when there are several microbatches. A given `rng` is
        folded with the microbatch's number and passed as `loss_fn(params, batch, rng)`.

    Raises:
        TypeError: `loss_fn` returns anything but `WeightedSum`s; parameters are not floats.
        ValueError: the microbatches do not divide the rows; `coefficients` do not name the terms;
            the axis is not mapped.

    Matches: one device that holds the whole batch, to 1e-12 in float64, in all five regimes on jax
        0.10.2 and 0.12.0 (tests/test_weighting.py).

    Example:
        >>> def loss_fn(w, batch):
        ...     x, weights = batch
        ...     return weighted_sum(w * x, weights)
        >>> batch = jnp.array([1.0, 3.0, 3.0, 3.0]), jnp.array([1, 1, 1, 0])
        >>> loss, gradient = value_and_grad(loss_fn, microbatches=2)(2.0, batch)
        >>> round(float(loss.value), 4), round(float(gradient), 4)
        (4.6667, 2.3333)
    """
    if microbatches < 1:
        raise ValueError(
            f"value_and_grad: microbatches must be at least 1, got {microbatches}. "
            "1 takes the batch whole."
        )

    def global_value_and_grad(
        params: PyTree, batch: PyTree, rng: Array | None = None
    ) -> tuple[Any, PyTree]:
        params = jax.tree_util.tree_map_with_path(_parameter, params)
        if axis_name is not None:
            mesh.axis_size(axis_name, caller="value_and_grad")
            params = mesh.vary(params, axis_name)

        def sums_of(params: PyTree, k: Any) -> tuple[dict[str, Any], tuple[dict[str, Any], Any]]:
            args = (_microbatch(batch, k, microbatches),)
            if rng is not None:
                args += (rng if microbatches == 1 else jax.random.fold_in(rng, k),)
            out = loss_fn(params, *args)
            sums, aux = _unpacked(out) if has_aux else (out, None)
            sums = named_terms(sums, coefficients)
            totals = {name: jnp.asarray(each.total) for name, each in sums.items()}
            weights = {name: jnp.asarray(each.weight) for name, each in sums.items()}
            return totals, (weights, aux)

        factors = coefficients if coefficients is not None else {"loss": 1.0}

        def pulled_back(totals: dict[str, Array], pull: Any, weights: dict[str, Array]) -> PyTree:
            cotangents = {
                name: mesh.vary_like(
                    divided(jnp.asarray(factors[name], total.dtype), weights[name]).astype(
                        total.dtype
                    ),
                    total,
                )
                for name, total in totals.items()
            }
            return pull(cotangents)[0]

        if microbatches == 1:
            totals, pull, (weights, aux) = jax.vjp(
                lambda params: sums_of(params, 0), params, has_aux=True
            )
            weights = _psum_scalars(weights, axis_name)
            gradients = pulled_back(totals, pull, weights)
        else:
            steps = jnp.arange(microbatches)
            _, weights = lax.scan(lambda _, k: (None, sums_of(params, k)[1][0]), None, steps)
            weights = _psum_scalars(jax.tree.map(jnp.sum, weights), axis_name)

            def accumulated(gradients: PyTree, k: Array) -> tuple[PyTree, Any]:
                totals, pull, (_, aux) = jax.vjp(
                    lambda params: sums_of(params, k), params, has_aux=True
                )
                added = pulled_back(totals, pull, weights)
                return jax.tree.map(lambda a, b: a + b.astype(a.dtype), gradients, added), (
                    totals,
                    aux,
                )

            gradients, (totals, aux) = lax.scan(accumulated, _zeros_like(params), steps)
            totals = jax.tree.map(jnp.sum, totals)
            gradients = jax.tree.map(lambda g, p: g.astype(p.dtype), gradients, params)

        totals = _psum_scalars(totals, axis_name)
        if axis_name is not None:
            gradients = lax.psum(gradients, axis_name)
        terms = {name: WeightedSum(totals[name], weights[name]) for name in totals}
        value = sum((factors[name] * term.mean() for name, term in terms.items()), start=0.0)
        loss = GlobalLoss(value, terms)
        return ((loss, aux), gradients) if has_aux else (loss, gradients)

    return global_value_and_grad


def _psum_scalars(scalars: dict[str, Array], axis_name: AxisName | None) -> dict[str, Array]:
    """Sums each over the ranks, with one all-reduce per dtype instead of one per scalar."""
    if axis_name is None:
        return scalars
    summed: dict[str, Array] = {}
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
                f"{jax.tree_util.keystr(path)}. Pad with rows of weight 0, or choose another "
                "number."
            )
        split = jnp.reshape(leaf, (shape[0] // microbatches, microbatches, *shape[1:]))
        return lax.dynamic_index_in_dim(split, k, axis=1, keepdims=False)

    return jax.tree_util.tree_map_with_path(rows, batch)


def _zeros_like(params: PyTree) -> PyTree:
    def zeros(leaf: Array) -> Array:
        dtype = jnp.promote_types(jnp.float32, leaf.dtype)
        return mesh.vary_like(jnp.zeros(leaf.shape, dtype), leaf)

    return jax.tree.map(zeros, params)


def _parameter(path: Any, leaf: Any) -> Array:
    leaf = jnp.asarray(leaf)
    if not jnp.issubdtype(leaf.dtype, jnp.inexact):
        raise TypeError(
            f"value_and_grad: params must be floating point, got {leaf.dtype} at params"
            f"{jax.tree_util.keystr(path)}. Keep counters and keys outside params."
        )
    return leaf


def _unpacked(out: Any) -> tuple[Any, Any]:
    if not (isinstance(out, tuple) and len(out) == 2):
        raise TypeError(
            f"value_and_grad: loss_fn must return (sums, aux) when has_aux=True, got "
            f"{_described(out)}. Return a pair, or leave has_aux out."
        )
    return out


def named_terms(sums: Any, coefficients: Mapping[str, Any] | None) -> dict[str, WeightedSum]:
    """What a loss function returned, as terms by name, each of which has a coefficient."""
    if isinstance(sums, WeightedSum):
        named = {"loss": sums}
        if coefficients is not None and set(coefficients) != {"loss"}:
            raise ValueError(
                f"value_and_grad: coefficients must name the terms of loss_fn, got "
                f"{sorted(coefficients)} for one unnamed WeightedSum. Return a dict of terms, or "
                "leave coefficients out."
            )
    elif (
        isinstance(sums, Mapping)
        and sums
        and all(isinstance(each, WeightedSum) for each in sums.values())
    ):
        named = dict(sums)
        if coefficients is None or set(coefficients) != set(named):
            got = "none" if coefficients is None else sorted(coefficients)
            raise ValueError(
                f"value_and_grad: coefficients must name every term of loss_fn, got {got} for "
                f"terms {sorted(named)}. Give each term its factor: "
                f"coefficients={{{', '.join(f'{name!r}: 1.0' for name in sorted(named))}}}."
            )
    else:
        raise TypeError(
            f"value_and_grad: loss_fn must return a WeightedSum or a dict of them, got "
            f"{_described(sums)}. Return weighted_sum(losses, weights): a mean has lost its "
            "denominator, and ranks of unequal weight cannot be averaged any more."
        )
    for name, each in named.items():
        if jnp.shape(each.total) != () or jnp.shape(each.weight) != ():
            raise ValueError(
                f"value_and_grad: loss_fn must return scalar sums, got total "
                f"{jnp.shape(each.total)} and weight {jnp.shape(each.weight)} for term {name!r}. "
                "weighted_sum makes them."
            )
    return named


def _described(value: Any) -> str:
    if isinstance(value, jax.Array):
        return f"{value.dtype}{list(value.shape)}"
    if isinstance(value, Mapping):
        return f"a dict of {', '.join(sorted({_described(each) for each in value.values()}))}"
    return type(value).__name__
