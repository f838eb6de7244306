"""Every way to hold a data axis, as one list to parametrise tests with."""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec

from jax_ddp_weighting.distributed import mesh as meshes

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

TWO = ("replica", "data")
# The same, on meshes of two axes: name -> (engine, type, axes and sizes, data axis).
# Always four ranks, or two where the other axis is not a data axis.
SEVERAL_AXES = {
    "jit_two_axes": ("jit", AxisType.Auto, {"replica": 2, "data": 2}, TWO),
    "shard_map_two_axes": ("shard_map", AxisType.Auto, {"replica": 2, "data": 2}, TWO),
    "shard_map_two_axes_explicit": (
        "shard_map",
        AxisType.Explicit,
        {"replica": 2, "data": 2},
        TWO,
    ),
    "shard_map_unchecked_two_axes": (
        "shard_map_unchecked",
        AxisType.Auto,
        {"replica": 2, "data": 2},
        TWO,
    ),
    "vmap_two_axes": ("vmap", AxisType.Auto, {"replica": 2, "data": 2}, TWO),
    # (in a checked shard_map JAX itself refuses a psum over vmap's axis and its own together)
    "vmap_in_shard_map_unchecked": ("mixed", AxisType.Auto, {"data": 2}, TWO),
    "partial_manual": ("shard_map", AxisType.Auto, {"data": 4, "model": 2}, "data"),
    "partial_manual_explicit": ("shard_map", AxisType.Explicit, {"data": 4, "model": 2}, "data"),
    "partial_manual_unchecked": (
        "shard_map_unchecked",
        AxisType.Auto,
        {"data": 4, "model": 2},
        "data",
    ),
}


def make_mesh(regime: str, ranks: int) -> Mesh:
    if regime in SEVERAL_AXES:
        _, axis_type, axes, _ = SEVERAL_AXES[regime]
    else:
        axis_type, axes = REGIMES[regime][1], {"data": ranks}
    shape, names = tuple(axes.values()), tuple(axes)
    devices = jax.devices()[: int(np.prod(shape))]
    return jax.make_mesh(shape, names, axis_types=(axis_type,) * len(names), devices=devices)


def axis_of(regime: str) -> str | tuple[str, ...]:
    return SEVERAL_AXES[regime][3] if regime in SEVERAL_AXES else "data"


def prepared(regime: str, ranks: int, make_fn):
    """A function of `(params, rows)` that compiles once; rows lead with an axis over all ranks."""
    engine = (SEVERAL_AXES if regime in SEVERAL_AXES else REGIMES)[regime][0]
    mesh, axis_name = make_mesh(regime, ranks), axis_of(regime)
    fn = make_fn(None if engine == "jit" else axis_name)
    if regime == "fake_pmap":
        return partial(_run_fake_pmap, _fake_pmap(fn, ranks))
    if engine == "mixed":
        mapped = _vmap_in_shard_map(fn, mesh)
    else:
        mapped = meshes.over_ranks(fn, mesh, axis_name=axis_name, engine=engine)
    run = mapped if engine == "pmap" else jax.jit(mapped)
    if engine not in ("jit", "shard_map", "shard_map_unchecked"):
        return run

    def placed(params, rows):
        params = meshes.place(params, meshes.replicated_sharding(mesh))
        return run(params, meshes.place(rows, meshes.row_sharding(mesh, axis_name)))

    return placed


def run(regime: str, ranks: int, make_fn, params, rows):
    """`make_fn(axis_name)(params, rows)` in the regime."""
    return prepared(regime, ranks, make_fn)(params, rows)


def _fake_pmap(fn, ranks):
    """Under `jit`, so that all calls of one shape share a compilation, as those of pmap do."""

    @jax.jit
    def stacked(params, rows):
        by_rank = jax.tree.map(lambda x: x.reshape(ranks, -1, *x.shape[1:]), rows)
        with chex.fake_pmap():  # it knows no out_axes: results come stacked over the ranks
            return jax.pmap(fn, "data", in_axes=(None, 0))(params, by_rank)

    return stacked


def _run_fake_pmap(stacked, params, rows):
    found = stacked(params, rows)
    jax.tree.map(lambda x: np.testing.assert_array_equal(x, np.broadcast_to(x[0], x.shape)), found)
    return jax.tree.map(lambda x: x[0], found)


def _vmap_in_shard_map(fn, mesh):
    """Each device holds two replicas by `vmap`; the devices are the data axis."""

    def on_device(params, rows):
        rows = jax.tree.map(lambda x: jnp.reshape(x, (2, -1, *x.shape[1:])), rows)
        return jax.vmap(fn, in_axes=(None, 0), out_axes=None, axis_name="replica")(params, rows)

    return jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=(PartitionSpec(), PartitionSpec("data")),
        out_specs=PartitionSpec(),
        check_vma=False,
    )


def padded(
    ranks: list[list[np.ndarray]], *, shape: tuple[int, int, int] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Uneven rows of (rank, microbatch), as one array each of values and weights.

    Rows are padded with NaN at weight 0, and laid out so that microbatch k holds rows k, k + K, ...
    A `shape` of (ranks, rows, microbatches) larger than needed adds empty ones.
    """
    width = max((len(rows) for rank in ranks for rows in rank), default=0) or 1
    shape = (len(ranks), width, len(ranks[0])) if shape is None else shape
    values = np.full(shape, np.nan)
    weights = np.zeros(values.shape)
    for r, rank in enumerate(ranks):
        for k, rows in enumerate(rank):
            for j, (value, weight) in enumerate(rows):
                values[r, j, k], weights[r, j, k] = value, weight
    return values.reshape(-1), weights.reshape(-1)


def as_float(tree):
    return jax.tree.map(lambda x: float(jnp.asarray(x)), tree)
