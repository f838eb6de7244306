"""Every way to hold a data axis, as one list to parametrise tests with."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh

from jax_ddp_weighting import mesh as meshes

# name -> (engine of mesh.over_ranks, type of the mesh's axis)
REGIMES = {
    "jit": ("jit", AxisType.Auto),
    "jit_explicit": ("jit", AxisType.Explicit),
    "shard_map": ("shard_map", AxisType.Auto),
    "shard_map_explicit": ("shard_map", AxisType.Explicit),
    "shard_map_unchecked": ("shard_map_unchecked", AxisType.Auto),
    "shard_map_unchecked_explicit": ("shard_map_unchecked", AxisType.Explicit),
    "pmap": ("pmap", AxisType.Auto),
    "fake_pmap": ("pmap", AxisType.Auto),
    "vmap": ("vmap", AxisType.Auto),
}
MAPPED = [name for name in REGIMES if not name.startswith("jit")]


def make_mesh(regime: str, ranks: int) -> Mesh:
    return jax.make_mesh(
        (ranks,), ("data",), axis_types=(REGIMES[regime][1],), devices=jax.devices()[:ranks]
    )


def run(regime: str, ranks: int, make_fn, params, rows):
    """`make_fn(axis_name)(params, rows)` in the regime; rows have a leading axis over all ranks."""
    engine, _ = REGIMES[regime]
    mesh = make_mesh(regime, ranks)
    fn = make_fn(None if engine == "jit" else "data")
    if engine != "vmap" and engine != "pmap":
        params = meshes.placed(params, meshes.replicated_sharding(mesh))
        rows = meshes.placed(rows, meshes.row_sharding(mesh, "data"))
    if regime == "fake_pmap":
        with chex.fake_pmap():  # it knows no out_axes: results come stacked over the ranks
            by_rank = jax.tree.map(lambda x: x.reshape(ranks, -1, *x.shape[1:]), rows)
            stacked = jax.pmap(fn, "data", in_axes=(None, 0))(params, by_rank)
        jax.tree.map(
            lambda x: np.testing.assert_array_equal(x, np.broadcast_to(x[0], x.shape)), stacked
        )
        return jax.tree.map(lambda x: x[0], stacked)
    mapped = meshes.over_ranks(fn, mesh, engine=engine)
    return mapped(params, rows) if engine == "pmap" else jax.jit(mapped)(params, rows)


def padded(ranks: list[list[np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """Uneven rows of (rank, microbatch), as one array each of values and weights.

    Rows are padded with NaN at weight 0, and laid out so that microbatch k holds rows k, k + K, ...
    """
    width = max((len(rows) for rank in ranks for rows in rank), default=0) or 1
    values = np.full((len(ranks), width, len(ranks[0])), np.nan)
    weights = np.zeros((len(ranks), width, len(ranks[0])))
    for r, rank in enumerate(ranks):
        for k, rows in enumerate(rank):
            for j, (value, weight) in enumerate(rows):
                values[r, j, k], weights[r, j, k] = value, weight
    return values.reshape(-1), weights.reshape(-1)


def as_float(tree):
    return jax.tree.map(lambda x: float(jnp.asarray(x)), tree)
