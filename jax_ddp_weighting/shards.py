"""The rows of an array that this process holds, read a shard at a time."""

from typing import Any

import jax
import numpy as np


class Column:
    """One array, or the parts of it that this process holds."""

    def __init__(self, array: Any) -> None:
        self._array = array
        self.dtype, self.shape = np.dtype(array.dtype), tuple(array.shape)
        self._parts: list[tuple[int, int, Any]] = []
        self._last: tuple[int, Any] = (-1, None)  # the part that was read last, on the host

    def lay_like(self, ids: "Column") -> None:
        """Spreads the rows of a global array as those of the ids are spread."""
        sharding = ids._array.sharding
        if not self._array.sharding.is_equivalent_to(sharding, self._array.ndim):
            self._array = jax.device_put(self._array, sharding)

    def split(self) -> None:
        """Finds the parts, and waits for what is still being computed."""
        self._parts = _parts(self._array)

    @property
    def cuts(self) -> set[int]:
        """The rows at which parts begin and end."""
        return {cut for start, stop, _ in self._parts for cut in (start, stop)}

    def holds(self, row: int) -> bool:
        """Whether the row is in one of the parts."""
        return any(start <= row < stop for start, stop, _ in self._parts)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Rows of one part, on the host."""
        for first, last, rows in self._parts:
            if first <= start < last:
                if self._last[0] != first:
                    self._last = (first, _on_host(rows))
                return self._last[1][start - first : stop - first]
        raise IndexError(f"rows {start} to {stop} are not here")

    def forget(self) -> None:
        """Drops the host copy of the part that was read last."""
        self._last = (-1, None)


def _parts(array: Any) -> list[tuple[int, int, Any]]:
    """`(start, stop, rows)` of the rows that this process is to hand in."""
    if not isinstance(array, jax.Array):
        return [(0, len(array), array)]
    array.block_until_ready()
    found = {}
    for shard in array.addressable_shards:
        if shard.data.shape[1:] != array.shape[1:]:
            return [(0, len(array), array)]  # rows lie in pieces: read them whole
        if array.is_fully_addressable or shard.replica_id == 0:
            start, stop, _ = shard.index[0].indices(len(array))
            found[start] = (start, stop, shard.data)
    return [found[start] for start in sorted(found)]


def _on_host(rows: Any) -> np.ndarray:
    if not isinstance(rows, jax.Array):
        return rows
    # An array keeps the host copy once made of it; a second face of the same buffers, dropped
    # after use, spares the caller that memory.
    shards = [shard.data for shard in rows.addressable_shards]
    return np.asarray(jax.make_array_from_single_device_arrays(rows.shape, rows.sharding, shards))
