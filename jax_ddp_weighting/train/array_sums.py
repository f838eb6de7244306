"""A number of each array's bits, the same however the array lies, to know it by when it is back."""

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from jax_ddp_weighting.distributed.coordination import this_process

ArraySums = dict[str, list[Any]]
"""By an array's path in the tree, as JSON has it: its dtype, and the number."""

_BLOCK = 1 << 18  # words that are looked at at once, so that they stay in the cache
_ALL = 2**64


def sum_arrays(tree: PyTree) -> ArraySums:
    """What this process's part of each array of a tree comes to.

    The rule: the bits of number ``i`` of an array, counted over the whole of it, times ``2i + 1``,
    added up modulo 2**64. One number that changes changes the sum, since ``2i + 1`` is odd, and so
    do two that change places but for one case in billions. Each number is counted on one of the
    processes that hold it; an array of the host's on the first.

    Args:
        tree: a pytree; leaves that are no arrays are left out.
    """
    found: ArraySums = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        if isinstance(leaf, jax.Array):
            shards = [each for each in leaf.addressable_shards if each.replica_id == 0]
            pieces = ((np.asarray(each.data), each.index) for each in shards)
        elif isinstance(leaf, np.ndarray | np.generic):
            whole = np.asarray(leaf), (slice(None),) * np.ndim(leaf)
            pieces = iter([whole] if this_process()[0] == 0 else [])
        else:
            continue
        total = sum(_sum_piece(piece, index, np.shape(leaf)) for piece, index in pieces)
        found[json.dumps(list(map(_name, path)))] = [str(np.dtype(leaf.dtype)), total % _ALL]
    return found


def add_sums(parts: Iterable[ArraySums]) -> ArraySums:
    """The sums of whole arrays, from those of all processes."""
    found: ArraySums = {}
    for part in parts:
        for path, (dtype, number) in part.items():
            found[path] = [dtype, (found.get(path, ["", 0])[1] + number) % _ALL]
    return found


def find_changed(saved: ArraySums, found: ArraySums) -> list[str]:
    """The paths of arrays that are not what was saved.

    What came back in another dtype than it was saved in was changed by the one who asked for that.
    """
    return [
        "/".join(json.loads(path))
        for path, (dtype, number) in saved.items()
        if path in found and found[path][0] == dtype and found[path][1] != number
    ]


def _name(key: Any) -> str:
    """A key of a path, the same for an attribute and an entry: Orbax takes one for the other."""
    for kind in ("name", "key", "idx"):
        if hasattr(key, kind):
            return str(getattr(key, kind))
    return str(key)


def _sum_piece(piece: np.ndarray, index: Sequence[slice], shape: tuple[int, ...]) -> int:
    if not piece.size:
        return 0
    # as words of 8 bytes at most: a number of 16 counts as two
    size = next(size for size in (8, 4, 2, 1) if piece.dtype.itemsize % size == 0)
    per_number = piece.dtype.itemsize // size
    rows = piece.shape[-1] if piece.ndim else 1
    words = np.ascontiguousarray(piece).reshape(-1, rows).view(np.dtype(f"u{size}"))
    strides = np.cumprod([1, *shape[:0:-1]], dtype=np.uint64)[::-1]  # numbers of the whole array
    starts = [each.start or 0 for each in index]
    firsts = np.zeros(piece.shape[:-1], np.uint64)
    for axis, length in enumerate(piece.shape[:-1]):
        along = np.arange(starts[axis], starts[axis] + length, dtype=np.uint64) * strides[axis]
        firsts += along.reshape([-1 if other == axis else 1 for other in range(piece.ndim - 1)])
    firsts = (firsts.reshape(-1) + np.uint64(starts[-1] if starts else 0)) * np.uint64(per_number)
    total = 0
    with np.errstate(over="ignore"):
        for block, first, column in _blocks(words, firsts):
            odd = 2 * np.arange(column, column + block.shape[1], dtype=np.uint64) + np.uint64(1)
            sums = block @ odd + 2 * first * block.sum(axis=1, dtype=np.uint64)
            total += int(sums.sum(dtype=np.uint64))
    return total


def _blocks(words: np.ndarray, firsts: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray, int]]:
    """Some rows and columns at a time, as uint64, with the rows' first places and the column."""
    wide = min(words.shape[1], _BLOCK)
    high = max(1, _BLOCK // wide)
    for row in range(0, len(words), high):
        for column in range(0, words.shape[1], wide):
            block = words[row : row + high, column : column + wide]
            yield block.astype(np.uint64), firsts[row : row + high], column
