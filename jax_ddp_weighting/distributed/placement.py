"""Where rows lie on a mesh: which ranks are this process's, and its rows as global arrays."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jax_ddp_weighting.distributed import mesh as meshes
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
        """The layout of a mesh; `caller` speaks in the error.

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
        """The layout of a mesh that has ranks on this process, for whoever is to bring rows.

        Raises:
            ValueError: the mesh lacks the axis, or holds no device of this process.
        """
        layout = cls.of(mesh, axis_name, caller=caller)
        if not layout.local:
            raise ValueError(
                f"{caller}: mesh must hold a device of this process, got processes "
                f"{', '.join(map(str, layout.processes))} for process {jax.process_index()}. Make "
                "it of jax.devices(), or call this on the processes that it holds."
            )
        return layout

    @property
    def processes(self) -> tuple[int, ...]:
        """The processes that hold any device of the mesh, in ascending order."""
        return tuple(self.held)

    @property
    def local(self) -> tuple[int, ...]:
        """The ranks of this process, in ascending order."""
        return self.held.get(jax.process_index(), ())

    def place_rows(self, rows: np.ndarray) -> jax.Array:
        """The global array of which every process gives its own ranks' rows.

        Args:
            rows: `[len(local) * width, ...]`, the ranks in ascending order; of one width on all.

        Returns:
            `[ranks * width, ...]`, sharded over the data axis.
        """
        width = len(rows) // len(self.local)
        first_row = {rank * width: place * width for place, rank in enumerate(self.local)}

        def shard(index: Any) -> np.ndarray:
            first = first_row[index[0].start or 0]
            return rows[first : first + width]

        shape = (self.ranks * width, *rows.shape[1:])
        return jax.make_array_from_callback(shape, self.sharding, shard)


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
