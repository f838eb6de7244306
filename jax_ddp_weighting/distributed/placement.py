"""Where rows lie on a mesh: which ranks are this process's, and its rows as global arrays."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jaxtyping import PyTree

from jax_ddp_weighting._arguments import as_native
from jax_ddp_weighting.distributed import mesh as meshes
from jax_ddp_weighting.distributed.coordination import name_ranks
from jax_ddp_weighting.distributed.mesh import AxisName


@dataclass(frozen=True)
class RankPlacement:
    """Which rows of a mesh's data axis this process holds, whatever devices it holds them on.

    The rule: rank `r` is the r-th place of the axis. Where its device sits, on which process and
    with which number, is the mesh's affair: processes may hold ranks in any order, and several of
    them may hold the same one where the mesh has further axes.

    Attributes:
        mesh: the mesh.
        sharding: rows over the data axis.
        ranks: how many ranks the axis holds.
        held: the ranks that each process holds, both in ascending order.
    """

    mesh: Mesh
    sharding: NamedSharding
    ranks: int
    held: dict[int, tuple[int, ...]]

    @classmethod
    def of(cls, mesh: Mesh, axis_name: AxisName, *, caller: str) -> "RankPlacement":
        """The ranks of a mesh; `caller` speaks in the error.

        Raises:
            ValueError: the mesh lacks the axis.
        """
        ranks = meshes.num_ranks(mesh, axis_name, caller=caller)
        sharding = meshes.row_sharding(mesh, axis_name)
        held: dict[int, set[int]] = {}
        for device, index in sharding.devices_indices_map((ranks,)).items():
            held.setdefault(device.process_index, set()).add(index[0].start or 0)
        return cls(
            mesh, sharding, ranks, {each: tuple(sorted(held[each])) for each in sorted(held)}
        )

    @classmethod
    def here(cls, mesh: Mesh, axis_name: AxisName, *, caller: str) -> "RankPlacement":
        """The ranks of a mesh that has ranks on this process, for whoever is to bring rows.

        Raises:
            ValueError: the mesh lacks the axis, or holds no device of this process.
        """
        placement = cls.of(mesh, axis_name, caller=caller)
        if not placement.local:
            raise ValueError(
                f"{caller}: mesh must hold a device of this process, got processes "
                f"{', '.join(map(str, placement.processes))} for process {jax.process_index()}. "
                "Make it of jax.devices(), or call this on the processes that it holds."
            )
        return placement

    @property
    def processes(self) -> tuple[int, ...]:
        """The processes that hold any device of the mesh, in ascending order."""
        return tuple(self.held)

    @property
    def local(self) -> tuple[int, ...]:
        """The ranks of this process, in ascending order."""
        return self.held.get(jax.process_index(), ())

    def place(self, tree: PyTree) -> PyTree:
        """The global arrays of which every process gives its own ranks' rows.

        The rule: what was given may be written again once this returns. On CPU devices it is copied
        once, into memory that JAX then takes as it is; elsewhere the transfer is the copy, and this
        waits for it.

        Args:
            tree: a pytree of arrays `[len(local) * width, ...]` on the host, the ranks in ascending
                order; of one width on all processes.

        Returns:
            A pytree of arrays `[ranks * width, ...]`, sharded over the data axis.
        """
        split = self._split if self._shares_host_memory else self._lend
        placed = jax.tree.map(lambda rows: self.place_shards(split(rows)), tree)
        if not self._shares_host_memory:
            # A transfer reads the host's memory after the call that starts it has returned, through
            # a staging buffer or not. To wait costs less than a copy for each transfer would.
            jax.block_until_ready(placed)
        return placed

    def place_shards(self, shards: Sequence[np.ndarray]) -> jax.Array:
        """The global array of one array `[width, ...]` for each local rank, in ascending order.

        The arrays must be nobody else's, as those of `copy_aligned` are: JAX may take their memory
        as it is, and read it for as long as the global array lives.
        """
        width, *shape = shards[0].shape
        of_rank = dict(zip(self.local, shards, strict=True))

        def shard(index: Any) -> np.ndarray:
            return of_rank[(index[0].start or 0) // width]

        return jax.make_array_from_callback((self.ranks * width, *shape), self.sharding, shard)

    @property
    def _shares_host_memory(self) -> bool:
        return any(device.platform == "cpu" for device in self.mesh.local_devices)

    def _lend(self, rows: np.ndarray) -> list[np.ndarray]:
        return np.split(as_native(rows), len(self.local))

    def _split(self, rows: np.ndarray) -> list[np.ndarray]:
        return [copy_aligned(each) for each in self._lend(rows)]


def name_holders(processes: Sequence[int], placement: RankPlacement) -> str:
    """The ranks of processes, and the processes."""
    ranks = [rank for process in processes for rank in placement.held[process]]
    return f"{name_ranks(ranks)} ({name_ranks(processes, 'process')})"


# What XLA's CPU client asks of memory that it is to use as it is. A copy on this boundary is the
# only one: from any other place XLA would copy once more, and in a thread of its own, later.
_BOUNDARY = 64


def empty_aligned(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """An array for `place_shards`, not filled yet, of the dtype that `dtype` has on a device."""
    dtype = device_dtype(dtype)
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + _BOUNDARY, np.uint8)
    start = -memory.ctypes.data % _BOUNDARY
    return memory[start : start + size].view(dtype).reshape(shape)


def copy_aligned(rows: np.ndarray) -> np.ndarray:
    """A copy for `place_shards`, in the dtype that the rows have on a device."""
    copied = empty_aligned(rows.shape, rows.dtype)
    np.copyto(copied, rows, casting="same_kind")
    return copied


def device_dtype(dtype: Any) -> np.dtype:
    """What a dtype becomes on a device: 32 bits wide at most, unless x64 is on."""
    if isinstance(dtype, np.dtype) and not dtype.isnative:  # as of a file, which JAX would refuse
        dtype = dtype.newbyteorder("=")
    return jax.dtypes.canonicalize_dtype(dtype)


def check_device_values(values: np.ndarray, name: str, *, caller: str) -> None:
    """Refuses values on the host that a device cannot hold, or not whole.

    Args:
        values: an array on the host.
        name: what it is in errors: ``"data['tokens']"``.
        caller: who speaks in errors.

    Raises:
        TypeError: the values are no numbers, or of a dtype that devices do not have.
        ValueError: a value would be cut.
    """
    if not _are_numbers(values):
        raise TypeError(
            f"{caller}: {name} must be numbers, got {values.dtype}. Devices hold nothing else: "
            "encode it, or look it up on the host by id."
        )
    if values.dtype.type in (np.longdouble, np.clongdouble):
        raise TypeError(
            f"{caller}: {name} must be of a dtype that devices have, got {values.dtype}. Cast it "
            f"to {'float64' if values.dtype.kind == 'f' else 'complex128'}."
        )
    check_not_cut(values, name, caller=caller)


def check_not_cut(values: np.ndarray, name: str, *, caller: str) -> None:
    """Refuses numbers on the host that a device would cut; looks at nothing else.

    The rule: integers come through whole, and finite numbers stay finite. What a float of 64 bits
    loses in rounding to 32 is JAX's usual conversion, and no error.

    Raises:
        ValueError: a value would be cut.
    """
    if not (values.size and _are_numbers(values)):
        return
    dtype = device_dtype(values.dtype)
    if dtype == values.dtype:  # as nearly always: nothing is looked at
        return
    if dtype.kind in "iu":
        held = np.iinfo(dtype)
        for extreme in (values.max(), values.min()):
            if not held.min <= extreme <= held.max:
                raise ValueError(
                    f"{caller}: {name} must be of at most 32 bits while x64 is off, got {extreme}. "
                    "JAX would cut it without a word: switch jax_enable_x64 on, or give smaller "
                    "numbers."
                )
        return
    for part in (np.real(values), np.imag(values)) if dtype.kind == "c" else (values,):
        largest = _largest(part)
        if largest > np.finfo(np.float32).max:
            raise ValueError(
                f"{caller}: {name} must be within float32 while x64 is off, got {largest}. JAX "
                "would make it infinite without a word: switch jax_enable_x64 on, or scale it."
            )


def check_tree_not_cut(tree: PyTree, name: str, *, caller: str) -> None:
    """Refuses a tree that is on the host, all or in part, and holds numbers that would be cut.

    Args:
        tree: any pytree; what is on devices, or traced, is as it is.
        name: what it is in errors: ``"params"``.
        caller: who speaks in errors.

    Raises:
        ValueError: a value would be cut; names the leaf.
    """
    on_host = np.ndarray | np.generic | int
    if not any(isinstance(leaf, on_host) for leaf in jax.tree.leaves(tree)):
        return  # as on every step but the first
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if isinstance(leaf, on_host):
            where = f"{name}{jax.tree_util.keystr(path)}"
            check_not_cut(np.asarray(leaf), where, caller=caller)


def check_not_lost(weights: np.ndarray, *, caller: str) -> None:
    """Refuses weights on the host that a device would round to 0, which is padding's weight.

    Raises:
        ValueError: one is below float32's least while x64 is off.
    """
    if weights.dtype.kind != "f":
        return
    dtype = device_dtype(weights.dtype)
    if dtype == weights.dtype:
        return
    with np.errstate(over="ignore", under="ignore"):
        lost = (weights.astype(dtype) == 0) & (weights > 0)
    if lost.any():
        raise ValueError(
            f"{caller}: weights must be above float32's least while x64 is off, or 0, got "
            f"{weights[lost].flat[0]}. JAX would make it 0, and the row padding: scale them."
        )


def _are_numbers(values: np.ndarray) -> bool:
    return jnp.issubdtype(values.dtype, jnp.number) or values.dtype == bool


def _largest(values: np.ndarray) -> Any:
    """The largest finite magnitude, 0 where there is none."""
    with np.errstate(over="ignore"):
        largest = np.fmax(np.fmax.reduce(values, axis=None), -np.fmin.reduce(values, axis=None))
        if not np.isfinite(largest):  # infinities and NaN are what they are; look past them
            largest = np.abs(values[np.isfinite(values)]).max(initial=0)
    return largest


def id_dtype() -> Any:
    """What ids are on a device: int64 where x64 is on, else int32."""
    return jnp.result_type(int)


def device_ids(ids: np.ndarray, *, caller: str) -> np.ndarray:
    """Ids as they are on a device.

    Raises:
        ValueError: an id would be cut.
    """
    dtype = id_dtype()
    if ids.size and ids.dtype != dtype:
        held = np.iinfo(dtype)
        off = " while x64 is off" if held.bits == 32 else ""
        for extreme in (ids.max(), ids.min()):
            if not held.min <= extreme <= held.max:
                raise ValueError(
                    f"{caller}: ids must be of at most {held.bits} bits{off}, got {extreme}. JAX "
                    "would cut it without a word: switch jax_enable_x64 on, or shard the data set "
                    "into parts."
                )
    return ids.astype(dtype)
