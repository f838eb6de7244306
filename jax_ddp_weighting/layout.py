"""Where rows lie on a mesh: which ranks are this process's, and its rows as global arrays."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jax_ddp_weighting import mesh as meshes
from jax_ddp_weighting.mesh import AxisName


@dataclass(frozen=True)
class Layout:
    """Which rows of a mesh's data axis this process holds, whatever devices it holds them on.

    The rule: rank `r` is the r-th place of the axis. Where its device sits, on which process and
    with which number, is the mesh's affair: processes may hold ranks in any order, and several of
    them may hold the same one where the mesh has further axes.

    Attributes:
        sharding: rows over the data axis.
        ranks: how many ranks the axis holds.
        local: the ranks of this process, in ascending order.
        processes: the processes that hold any device of the mesh, in ascending order.
    """

    sharding: NamedSharding
    ranks: int
    local: tuple[int, ...]
    processes: tuple[int, ...]

    @classmethod
    def of(cls, mesh: Mesh, axis_name: AxisName, *, caller: str) -> "Layout":
        """The layout of a mesh; `caller` speaks in the error.

        Raises:
            ValueError: the mesh lacks the axis.
        """
        ranks = meshes.num_ranks(mesh, axis_name, caller=caller)
        sharding = meshes.row_sharding(mesh, axis_name)
        places = sharding.addressable_devices_indices_map((ranks,)).values()
        local = {index[0].start or 0 for index in places if index}
        processes = {device.process_index for device in mesh.devices.flat}
        return cls(sharding, ranks, tuple(sorted(local)), tuple(sorted(processes)))

    def globally(self, rows: np.ndarray) -> jax.Array:
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
