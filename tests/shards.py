"""Parameters in shards, one per rank of a mesh of several axes, in the regimes that map axes."""

from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, PartitionSpec

REGIMES = ("shard_map", "shard_map_unchecked", "pmap", "vmap")


def names(entry):
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def own_slices(spec, shape, axes, at):
    """The slice of an array of `shape` that lies on the rank `at`, a number for each axis."""
    slices = []
    for entry, size in zip((*spec, *[None] * (len(shape) - len(spec))), shape, strict=True):
        count, index = 1, 0
        for name in names(entry):
            count, index = count * axes[name], index * axes[name] + at[name]
        assert size % count == 0
        slices.append(slice(index * (size // count), (index + 1) * (size // count)))
    return tuple(slices)


def ranks_of(axes):
    return [dict(zip(axes, at, strict=True)) for at in product(*map(range, axes.values()))]


def split(leaf, spec, axes):
    """Every rank's shard, `[*axes, *shard]`."""
    leaf = np.asarray(leaf)
    shards = [leaf[own_slices(spec, leaf.shape, axes, at)] for at in ranks_of(axes)]
    return np.stack(shards).reshape(*axes.values(), *shards[0].shape)


def join(stacked, spec, axes):
    """The array of these shards; ranks that hold the same must agree to the last bits."""
    stacked = np.asarray(stacked)
    counts = [
        int(np.prod([axes[name] for name in names(entry)], dtype=int))
        for entry in (*spec, *[None] * (stacked.ndim - len(axes) - len(spec)))
    ]
    shape = tuple(n * count for n, count in zip(stacked.shape[len(axes) :], counts, strict=True))
    whole = np.full(shape, np.nan)
    for at in ranks_of(axes):
        place, shard = own_slices(spec, shape, axes, at), stacked[tuple(at.values())]
        if not np.isnan(whole[place]).all():
            np.testing.assert_allclose(shard, whole[place], rtol=1e-13, atol=1e-15)
        whole[place] = shard
    return whole


def make_mesh(axes):
    devices = jax.devices()[: int(np.prod(list(axes.values())))]
    kinds = (AxisType.Auto,) * len(axes)
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=kinds, devices=devices)


def is_spec(node):
    return isinstance(node, PartitionSpec)


def by_leaf(specs, tree):
    return jax.tree.leaves(jax.tree.broadcast(specs, tree, is_leaf=is_spec), is_leaf=is_spec)


def run(regime, fn, params, specs, rows, row_specs, axes):
    """`fn(params, rows) -> (loss, gradients)` on every rank's shards: loss and whole gradients."""
    if regime.startswith("shard_map"):
        mapped = jax.shard_map(
            fn,
            mesh=make_mesh(axes),
            in_specs=(specs, row_specs),
            out_specs=(PartitionSpec(), specs),
            check_vma=regime == "shard_map",
        )
        return jax.jit(mapped)(params, rows)

    def spread(tree, specs):
        leaves, structure = jax.tree.flatten(tree)
        pairs = zip(leaves, by_leaf(specs, tree), strict=True)
        return structure.unflatten([split(leaf, spec, axes) for leaf, spec in pairs])

    mapped = fn
    if regime == "pmap":
        (name,) = axes
        mapped = jax.pmap(fn, name)
    else:
        for name in reversed(axes):
            mapped = jax.vmap(mapped, axis_name=name)
        mapped = jax.jit(mapped)
    loss, gradients = mapped(spread(params, specs), spread(rows, row_specs))
    leaves, structure = jax.tree.flatten(gradients)
    pairs = zip(leaves, by_leaf(specs, gradients), strict=True)
    whole = structure.unflatten([join(leaf, spec, axes) for leaf, spec in pairs])
    return jax.tree.map(lambda leaf: join(leaf, PartitionSpec(), axes), loss), whole


def gather(params, specs):
    """All parameters whole, as a loss does it that is sharded by hand."""

    def whole(leaf, spec):
        for dim, entry in enumerate(spec):
            for name in reversed(names(entry)):
                leaf = lax.all_gather(leaf, name, axis=dim, tiled=True)
        return leaf

    leaves, structure = jax.tree.flatten(params)
    return structure.unflatten(list(map(whole, leaves, by_leaf(specs, params))))


def assert_the_same(found, right):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(right), strict=True):
        scale = np.max(np.abs(b))
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12 * scale)


def on_one_device(sums, params, rows):
    """Value and gradient of `sums(params, rows) -> (total, weight)`, in one piece."""

    def mean(params):
        total, weight = sums(params, rows)
        return total / weight

    return jax.jit(jax.value_and_grad(mean))(jax.tree.map(jnp.asarray, params))
