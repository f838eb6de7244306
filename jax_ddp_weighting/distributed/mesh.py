"""Data meshes, forced CPU devices, and the five ways JAX can hold a data axis.

This is the only file that knows how the regimes differ. They differ in one thing: under
`jax.shard_map` with its varying-axes check (the default), the gradient with respect to a value that
does not vary over the axis is summed over the axis by JAX itself; everywhere else it is not. So the
library makes parameters vary first (`vary`), which keeps gradients local until they are reduced
once, on purpose.
"""

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from jax_ddp_weighting._arguments import as_native, check_at_least, check_integer, list_some

AxisName = str | tuple[str, ...]
T = TypeVar("T")

ENGINES = ("jit", "shard_map", "shard_map_unchecked", "pmap", "vmap")
"""The regimes of a data axis: the global view of `jit`, `shard_map` with and without the
varying-axes check, `pmap`, and `vmap` with an axis name (what `chex.fake_pmap` makes of `pmap`)."""


def force_cpu_devices(num_devices: int) -> None:
    """Let this process see `num_devices` CPU devices, to test data-parallel code without a pod.

    Must come before the first JAX operation, because the devices are made when JAX starts. It
    selects the CPU platform too, so that a GPU on the machine does not take the devices' place.

    Args:
        num_devices: how many devices, at least 1.

    Raises:
        ValueError: `num_devices` is below 1.
        RuntimeError: JAX has started already with other devices.

    Example:
        >>> force_cpu_devices(4)  # doctest: +SKIP
        >>> len(jax.devices())  # doctest: +SKIP
        4
    """
    argument, remedy = "force_cpu_devices: num_devices", "One device is JAX's own default."
    num_devices = check_integer(argument, num_devices, 1, 2**20, remedy, rule="be at least 1")
    try:
        # not XLA_FLAGS: this config overrides them without a word
        jax.config.update("jax_num_cpu_devices", num_devices)
    except RuntimeError:
        found = jax.local_devices()
        if len(found) == num_devices and found[0].platform == "cpu":
            return
        raise RuntimeError(
            f"force_cpu_devices: num_devices must be set before the first JAX operation, got "
            f"{num_devices} when JAX had started with {len(found)} on {found[0].platform}. "
            "Move the call to the top of the program, before anything makes an array."
        ) from None
    jax.config.update("jax_platforms", "cpu")


def data_mesh(
    num_devices: int | None = None,
    *,
    axis_name: str = "data",
    devices: Sequence[Any] | None = None,
) -> Mesh:
    """A one-dimensional mesh whose axis holds the data-parallel ranks.

    The axis is of type `Auto`, so unplaced arrays are accepted; `jax.make_mesh` alone would make it
    `Explicit`. The library takes meshes of both types, and meshes with further axes.

    Args:
        num_devices: how many devices to use; all of them when None.
        axis_name: the name of the axis.
        devices: the devices to choose from, in order; `jax.devices()` when None.

    Returns:
        A `jax.sharding.Mesh` of shape `{axis_name: num_devices}`.

    Raises:
        ValueError: fewer devices are there than asked for, one comes twice, or `num_devices` is
            below 1.

    Example:
        >>> dict(data_mesh(1).shape)
        {'data': 1}
    """
    found = list(jax.devices() if devices is None else devices)
    wanted = len(found) if num_devices is None else num_devices
    check_at_least("data_mesh: num_devices", wanted, 1, "Leave it out to use all.", kind="")
    if len(set(found)) < len(found):
        raise ValueError(
            f"data_mesh: devices must be different ones, got {list_some(found)}. Each is one rank."
        )
    if wanted > len(found):
        platform = found[0].platform if found else "any platform"
        raise ValueError(
            f"data_mesh: {wanted} devices wanted on {platform}, {len(found)} found. "
            f"Call force_cpu_devices({wanted}) before the first JAX operation."
        )
    # make_mesh takes the first devices of the process unless it is told which
    return jax.make_mesh(
        (wanted,), (axis_name,), axis_types=(AxisType.Auto,), devices=found[:wanted]
    )


def num_ranks(mesh: Mesh | AbstractMesh, axis_name: AxisName, *, caller: str) -> int:
    """How many ranks the mesh's data axis holds; `caller` speaks in the error.

    Raises:
        TypeError: `mesh` is none.
        ValueError: the mesh has no such axis, or it is mapped already.
    """
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise TypeError(
            f"{caller}: mesh must be a jax.sharding.Mesh, got {type(mesh).__name__}. data_mesh() "
            "makes one."
        )
    size = 1
    if not isinstance(axis_name, str | tuple | list):
        raise TypeError(
            f"{caller}: axis_name must be the name of an axis, or a tuple of names, got "
            f"{axis_name!r}. The mesh has axes {tuple(mesh.axis_names)}."
        )
    for name in _names(axis_name):
        if name not in mesh.shape:
            raise ValueError(
                f"{caller}: mesh must have the axis {name!r}, got axes {tuple(mesh.axis_names)}. "
                "Make it with data_mesh(), or name your data axis with axis_name=."
            )
        if mesh.axis_types[mesh.axis_names.index(name)] is AxisType.Manual:
            raise ValueError(
                f"{caller}: mesh must have axes of type Auto or Explicit, got Manual for {name!r}. "
                "data_mesh() makes such a mesh; inside a shard_map that maps the axis already, "
                "call value_and_grad with axis_name=."
            )
        size *= mesh.shape[name]
    return size


def check_has_devices(mesh: Mesh | AbstractMesh, *, caller: str) -> None:
    """Raises `TypeError` for a mesh that nothing can be placed on; `caller` speaks in the error."""
    if isinstance(mesh, AbstractMesh):
        raise TypeError(
            f"{caller}: mesh must have devices, got an AbstractMesh. data_mesh() makes a mesh of "
            "those that are there."
        )


def row_sharding(mesh: Mesh, axis_name: AxisName) -> NamedSharding:
    """Rows spread over the ranks: how a batch lies on the mesh."""
    return NamedSharding(mesh, PartitionSpec(axis_name))


def replicated_sharding(mesh: Mesh) -> NamedSharding:
    """The same on every device: how a state lies on the mesh unless it is sharded on purpose."""
    return NamedSharding(mesh, PartitionSpec())


def free_bytes(mesh: Mesh) -> int | None:
    """What is free on the fullest of this process's devices; None where devices do not tell."""
    found = []
    for device in mesh.local_devices:
        stats = device.memory_stats()
        if not stats or "bytes_limit" not in stats:
            return None
        found.append(stats["bytes_limit"] - stats.get("bytes_in_use", 0))
    return min(found, default=None)


def spec_over(sharding: Any, axis_name: AxisName, ndim: int) -> PartitionSpec:
    """How an array lies over the axis, and nothing else; `P()` where it is whole on every rank."""
    if not isinstance(sharding, NamedSharding):
        return PartitionSpec()
    entries = (*sharding.spec, *[None] * ndim)[:ndim]
    spec = keep_names(PartitionSpec(*entries), _names(axis_name))
    return spec if any(spec) else PartitionSpec()


def place(tree: T, sharding: PyTree) -> T:
    """The tree on the mesh: leaves that lie on it stay as they are, others move to `sharding`.

    Placing once keeps a step at one compilation: JAX compiles anew when the placement of an input
    changes, as it would between a fresh state and the state that the first step returned.

    Args:
        tree: any pytree of arrays.
        sharding: a `NamedSharding` for all leaves, or one for each in the structure of the tree.
    """

    def lies_there(leaf: Any, wanted: NamedSharding) -> bool:
        # any sharding on the mesh will do: a parameter sharded on purpose stays sharded
        current = getattr(leaf, "sharding", None)
        return isinstance(current, NamedSharding) and current.mesh == wanted.mesh

    def place(leaf: Any, wanted: NamedSharding) -> Any:
        if lies_there(leaf, wanted):
            return leaf
        # A copy, so that donating the placed tree leaves the caller's own arrays alone. (Whatever
        # it is told, device_put aliases keys, and arrays that lie on one of several devices.)
        own = jnp.copy(leaf) if isinstance(leaf, jax.Array) else as_native(np.array(leaf))
        return jax.device_put(own, wanted)

    leaves, structure = jax.tree.flatten(tree)
    one = isinstance(sharding, NamedSharding)
    wanted = [sharding] * len(leaves) if one else jax.tree.leaves(sharding)
    if all(map(lies_there, leaves, wanted)):
        return tree  # as on every step but the first, which must cost nothing
    return structure.unflatten(list(map(place, leaves, wanted)))


def constrain(tree: T, shardings: PyTree) -> T:
    """Inside `jit` the tree, each leaf where its sharding says, over axes of type Auto or Explicit.

    Args:
        tree: any pytree of arrays.
        shardings: a `NamedSharding` for each leaf, in the structure of the tree.
    """

    def put(leaf: Any, wanted: NamedSharding) -> Any:
        mesh, kinds = wanted.mesh, zip(wanted.mesh.axis_names, wanted.mesh.axis_types, strict=True)
        explicit = {name for name, kind in kinds if kind is AxisType.Explicit}
        if explicit:
            # which a constraint may not name; over the others it says nothing
            leaf = jax.sharding.reshard(
                leaf, NamedSharding(mesh, keep_names(wanted.spec, explicit))
            )
        if explicit == set(mesh.axis_names):
            return leaf
        auto = keep_names(wanted.spec, set(mesh.axis_names) - explicit)
        return jax.lax.with_sharding_constraint(leaf, NamedSharding(mesh, auto))

    return jax.tree.map(put, tree, shardings)


def keep_names(spec: PartitionSpec, names: Collection[str]) -> PartitionSpec:
    """The spec, in which no other axes are named."""
    kept = [tuple(name for name in names_of(entry) if name in names) for entry in spec]
    return PartitionSpec(*(each[0] if len(each) == 1 else each or None for each in kept))


# --- inside a mapped function ---------------------------------------------------------------------


def axis_size(axis_name: AxisName, *, caller: str) -> int:
    """The number of ranks on the axis of the function that is being mapped.

    Raises:
        ValueError: the axis is not mapped here.
    """
    try:
        return jax.lax.axis_size(axis_name)
    except NameError:  # JAX's own words for an axis that nobody has mapped
        raise ValueError(
            f"{caller}: axis_name must be an axis mapped here, got {axis_name!r}. Call it inside "
            "shard_map, pmap or vmap over that axis; under plain jit leave axis_name=None."
        ) from None


def is_checked(axis_name: AxisName) -> bool:
    """Whether the axis is held by `shard_map` with its varying-axes check, as JAX's default is.

    The rank's own index is the one value that varies over the axis in every regime, so its type
    says whether types tell what varies.
    """
    return set(_names(axis_name)) <= _varying(jax.lax.axis_index(axis_name))


def vary(tree: T, axis_name: AxisName) -> T:
    """The same values, typed as varying over the axis, so that gradients stay local to the rank.

    A no-op where types do not tell what varies: `shard_map(check_vma=False)`, `pmap`, `vmap`.
    """
    if not is_checked(axis_name):
        return tree
    return jax.tree.map(partial(_vary_over, axes=frozenset(_names(axis_name))), tree)


def varies(value: jax.Array, axis_name: AxisName) -> bool:
    """Whether the value's type says that it may differ from rank to rank of the axis.

    Never where types do not tell what varies: `shard_map(check_vma=False)`, `pmap`, `vmap`.
    """
    return not _varying(value).isdisjoint(_names(axis_name))


def varying_axes(value: Any) -> frozenset[str]:
    """The mapped axes over which the value's type says that it may differ.

    None where types do not tell: `shard_map(check_vma=False)`, `pmap`, `vmap`.
    """
    return _varying(value)


def names_of(axis_name: AxisName | None) -> tuple[str, ...]:
    """The names of one axis, of several, or of none."""
    return () if axis_name is None else _names(axis_name)


def is_mapped(name: str) -> bool:
    """Whether the axis is mapped here."""
    try:
        jax.lax.axis_size(name)
    except NameError:
        return False
    return True


def manual_axes() -> tuple[str, ...]:
    """The axes that the `shard_map`s around here map."""
    return tuple(jax.sharding.get_abstract_mesh().manual_axes)


def unnamed_axes(
    tree: PyTree, axis_name: AxisName | None, *, parameters: PyTree
) -> tuple[str, ...]:
    """Mapped axes over which the tree varies, and which neither the name nor all parameters have.

    Rows lie over such an axis, and their gradient would be summed over it by JAX, undivided. An
    axis over which all parameters vary is another matter: every rank of it has a model of its own,
    as in an ensemble. None where types do not tell what varies.
    """
    named = frozenset() if axis_name is None else frozenset(_names(axis_name))
    leaves = jax.tree.leaves(parameters)
    own = frozenset.intersection(*map(_varying, leaves)) if leaves else frozenset()
    over = frozenset().union(*map(_varying, jax.tree.leaves(tree)))
    return tuple(sorted(over - named - own))


def zeros_like(value: Any, dtype: Any) -> jax.Array:
    """Zeros that vary over the axes that `value` varies over, sharded as its type is."""
    # jnp.zeros_like forgets how a value is sharded over axes of type Explicit; a select does not
    return jnp.where(False, value, 0).astype(dtype)


def vary_like(value: jax.Array, model: jax.Array) -> jax.Array:
    """`value`, typed as varying over every axis over which `model` varies."""
    return _vary_over(value, axes=_varying(model))


def _vary_over(value: Any, *, axes: frozenset[str]) -> Any:
    missing = tuple(sorted(axes - _varying(value)))  # pcast refuses what varies already
    return jax.lax.pcast(value, missing, to="varying") if missing else value


def _varying(value: Any) -> frozenset[str]:
    kind: Any = jax.typeof(value)
    # where JAX keeps it has moved: `vma` up to 0.9
    return kind.manual_axis_type.varying if hasattr(kind, "manual_axis_type") else kind.vma


def _names(axis_name: AxisName) -> tuple[str, ...]:
    return (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)


# --- entering a mapped function -------------------------------------------------------------------


def over_ranks(
    fn: Callable[..., Any],
    mesh: Mesh | AbstractMesh,
    *,
    axis_name: AxisName = "data",
    engine: str = "shard_map",
    in_specs: PyTree = None,
    out_specs: PyTree = None,
    row_specs: PyTree = None,
) -> Callable[[PyTree, PyTree], PyTree]:
    """`fn(replicated, rows)`, run once per rank on the rank's own rows, in the chosen regime.

    Args:
        fn: what each rank runs; its result must be the same on every rank, reduced by `fn` itself.
        mesh: a mesh with the axis; `vmap` uses its size only, so an abstract one will do.
        axis_name: the data axis.
        engine: one of `ENGINES`. Under `"jit"`, `fn` sees all rows at once and no axis.
        in_specs: under `shard_map`, how the first argument lies over the axis, where not all of it
            is the same on every rank.
        out_specs: the same of the result.
        row_specs: under `shard_map`, how rows lie over the axes, where that is not the first
            dimension of every leaf over all of them.

    Returns:
        A function of `(replicated, rows)`: the first as it is on every rank, every leaf of the
        second of shape `[num_ranks * rows, ...]`.

    Raises:
        ValueError: the mesh lacks the axis, the engine is unknown, or `pmap`, which knows one axis,
            is given a mesh of several.
    """
    ranks = num_ranks(mesh, axis_name, caller="over_ranks")
    if engine == "jit":
        return fn
    if engine in ("shard_map", "shard_map_unchecked"):
        return jax.shard_map(
            fn,
            mesh=mesh,
            in_specs=(in_specs or PartitionSpec(), row_specs or PartitionSpec(axis_name)),
            out_specs=out_specs or PartitionSpec(),
            # other axes of the mesh stay automatic, so that parameters may be sharded over them
            axis_names=set(_names(axis_name)),
            check_vma=engine == "shard_map",
        )
    names = _names(axis_name)
    first, shape = names[0], tuple(mesh.shape[name] for name in names)
    if engine == "pmap" and isinstance(mesh, Mesh):
        if len(names) > 1 or mesh.size != ranks:
            raise ValueError(
                f"over_ranks: mesh must have one axis under pmap, got axes {mesh.axis_names} and "
                f"axis_name={axis_name!r}. Use shard_map, or jit, for meshes of several axes."
            )
        mapped = jax.pmap(
            fn, first, in_axes=(None, 0), out_axes=None, devices=list(mesh.devices.flat)
        )
    elif engine == "vmap":
        mapped = fn
        # the innermost vmap takes the last leading axis, so the last name is mapped first
        for name in reversed(names):
            mapped = jax.vmap(mapped, in_axes=(None, 0), out_axes=None, axis_name=name)
    else:
        raise ValueError(
            f"over_ranks: engine must be one of {', '.join(ENGINES)}, got {engine!r}. "
            '"shard_map" is JAX\'s current default.'
        )

    def stacked(replicated: PyTree, rows: PyTree) -> PyTree:
        by_rank = jax.tree.map(
            lambda x: jnp.reshape(x, (*shape, x.shape[0] // ranks, *x.shape[1:])), rows
        )
        return mapped(replicated, by_rank)

    return stacked
