"""A rank's share of the global mean, for code that averages over ranks by itself."""

import math
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Scalar

from jax_ddp_weighting.distributed import mesh
from jax_ddp_weighting.distributed.mesh import AxisName
from jax_ddp_weighting.weighting.denominators import (
    sum_over_ranks,
    sum_step_weights,
    to_denominators,
)
from jax_ddp_weighting.weighting.loss_terms import check_scalars, describe, name_terms
from jax_ddp_weighting.weighting.param_specs import (
    ParamSpecs,
    check_types,
    name_leaves,
    sharded_axes,
)
from jax_ddp_weighting.weighting.sums import WeightedSum, divide

T = TypeVar("T")


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
    | `average_gradients(grad(rank_share(sum, "data")), "data")` | 2.5 | 2.5 | 2.5 |

    The last takes parameters that are sharded over the axis too, for which `pmean` is wrong in
    every regime: it would average different shards.

    So do not make parameters varying yourself and use this too. (`pcast` refuses `vmap`; leave it
    out there.) A sum that has been summed over the ranks already may be given: it is the same sum
    on every rank, and its mean and gradient are right.

    With microbatches accumulated by hand, give the rank's own weight of the *whole step* with each
    microbatch's total: `rank_share(WeightedSum(total, weight_of_all_microbatches), axis_name)`.

    A constant divisor `C` in place of the weight is given as each rank's share of it, with every
    microbatch's total the same: `rank_share(WeightedSum(total, C / jax.lax.axis_size(axis_name)),
    axis_name)`, since what is given as weight is summed over the ranks. (In `value_and_grad` it is
    `divisors={"loss": C}`.)

    Args:
        local: this rank's sum.
        axis_name: the mapped data axis, or a tuple of all the axes over which rows lie. One that is
            left out is not found here, where nothing is known of the parameters, as it is by
            `value_and_grad`, and the gradient comes out wrong.

    Returns:
        A scalar; 0 where the global weight is 0, and NaN where a rank's is negative or NaN. No
        gradient flows into the weight.

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

        Over a constant, 50, whatever the weights are:

        >>> def over_50(w, x, weights):
        ...     total = weighted_sum(w * x, weights).total
        ...     return rank_share(WeightedSum(total, 50.0 / jax.lax.axis_size("data")), "data")
        >>> gradient = jax.vmap(jax.grad(over_50), in_axes=(None, 0, 0), axis_name="data")
        >>> round(float(gradient(1.0, x, weights).mean()), 4)  # (1 + 3 + 5) / 50
        0.18
    """
    if not isinstance(local, WeightedSum):
        raise TypeError(
            f"rank_share: local must be a WeightedSum, got {describe(local)}. weighted_sum("
            "losses, weights) makes one; a mean has lost its denominator."
        )
    ranks = mesh.axis_size(axis_name, caller="rank_share")
    check_scalars({"local": local}, returned_by="rank_share: local")
    # Varying, also where it is the same on every rank, so that every rank pulls it back.
    local = mesh.vary(name_terms(local, None)["loss"], axis_name)
    weights = sum_step_weights(None, {"local": local}, accepted=False)
    whole = to_denominators(sum_over_ranks(weights, axis_name), None)
    share = jnp.where(whole.bad == 0, divide(local.total, whole.terms["local"]), jnp.nan)
    if mesh.is_checked(axis_name):
        return share + lax.stop_gradient(share * (ranks - 1))
    return share * ranks


def average_gradients(
    gradients: T, axis_name: AxisName, *, param_specs: ParamSpecs | None = None
) -> T:
    """The gradient of the global mean, of the ranks' gradients of their `rank_share`.

    The rule: a replicated parameter's is the `pmean` over the axis. That of a shard is summed over
    the ranks already, by the transpose of the collective that gathers it; it is averaged over the
    other axes alone, and divided by the number of ranks where `rank_share` is scaled by it, that
    is anywhere but in a checked `shard_map`.

    Args:
        gradients: of `rank_share(..., axis_name)` with respect to the parameters.
        axis_name: the axes that `rank_share` was given. In `pmap`, `vmap` and an unchecked
            `shard_map` these must be all mapped axes that the loss communicates over.
        param_specs: which parameters are sharded over mapped axes, as in `value_and_grad`; None
            for none of them.

    Returns:
        Gradients of the same types, each that of the rank's own shard.

    Raises:
        TypeError: a spec is no `PartitionSpec`.
        ValueError: the specs have another structure, or name an axis that is not mapped; or, in a
            checked `shard_map`, types contradict them: a gradient varies over an axis that its spec
            does not name, or does not vary over one that it names. Elsewhere: a spec names an axis
            that `axis_name` does not.

    Example:
        >>> def loss(w, x):  # two ranks hold one of two numbers each
        ...     whole = jax.lax.all_gather(w, "data", tiled=True)
        ...     return rank_share(weighted_sum(x @ whole), "data")
        >>> def step(w, x):
        ...     specs = jax.sharding.PartitionSpec("data")
        ...     return average_gradients(jax.grad(loss)(w, x), "data", param_specs=specs)
        >>> x = jnp.array([[[1.0, 2.0]], [[3.0, 4.0]]])
        >>> jax.vmap(step, axis_name="data")(jnp.ones((2, 1)), x).tolist()
        [[2.0], [3.0]]
    """
    mesh.axis_size(axis_name, caller="average_gradients")
    own = sharded_axes(param_specs, gradients, caller="average_gradients", noun="gradients")
    named, paths = mesh.names_of(axis_name), name_leaves(gradients, "gradients")
    check_types(own, named, gradients, paths, caller="average_gradients")
    leaves, structure = jax.tree.flatten(gradients)

    def average(leaf: jax.Array, path: str, axes: frozenset[str]) -> jax.Array:
        untyped = sorted(axis for axis in axes if not mesh.is_checked(axis))
        if not axes <= {*named, *mesh.varying_axes(leaf)}:
            raise ValueError(
                "average_gradients: axis_name must name every axis of param_specs where types do "
                f"not tell what varies, got {axis_name!r} and {untyped} at {path}. Give it to "
                "rank_share too."
            )
        others = tuple(axis for axis in named if axis not in axes)
        leaf = lax.pmean(leaf, others) if others else leaf
        scale = math.prod(mesh.axis_size(axis, caller="average_gradients") for axis in untyped)
        return leaf if scale == 1 else leaf / scale

    return structure.unflatten(list(map(average, leaves, paths, own)))
