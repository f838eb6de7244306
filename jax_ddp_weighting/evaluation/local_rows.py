"""The accepted rows that this process holds, wherever they lie, a few at a time.

Ids, weights and predictions come as host arrays, as device arrays, or as global arrays of which
this process holds some shards; at once, or step by step.
"""

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from jax_ddp_weighting._arguments import as_native, check_not_masked, check_weights
from jax_ddp_weighting.evaluation.predictions import dtype_name, fill_tree, spell_tree
from jax_ddp_weighting.sampling.names import as_fixed_width, read_ids


class Column:
    """One array, or the pieces of it that this process holds."""

    def __init__(self, array: Any) -> None:
        self._array = array
        self.dtype, self.shape = np.dtype(array.dtype), tuple(array.shape)
        self._pieces: list[tuple[int, int, Any]] = []
        self._last: tuple[int, Any] = (-1, None)  # the piece read last, on the host

    def lay_like(self, ids: "Column") -> None:
        """Spreads the rows of a global array as those of the ids are spread."""
        sharding = ids._array.sharding
        if not self._array.sharding.is_equivalent_to(sharding, self._array.ndim):
            self._array = jax.device_put(self._array, sharding)

    def split(self) -> None:
        """Finds the pieces, and waits for what is still being computed."""
        self._pieces = _find_pieces(self._array)

    @property
    def cuts(self) -> set[int]:
        """The rows at which pieces begin and end."""
        return {cut for start, stop, _ in self._pieces for cut in (start, stop)}

    def holds(self, row: int) -> bool:
        """Whether the row is in one of the pieces."""
        return any(start <= row < stop for start, stop, _ in self._pieces)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Rows of one piece, on the host."""
        for first, last, rows in self._pieces:
            if first <= start < last:
                if self._last[0] != first:
                    self._last = (first, _copy_to_host(rows))
                return self._last[1][start - first : stop - first]
        raise IndexError(f"rows {start} to {stop} are not here")

    def forget(self) -> None:
        """Drops the host copy of the piece that was read last."""
        self._last = (-1, None)


def _find_pieces(array: Any) -> list[tuple[int, int, Any]]:
    """`(start, stop, rows)` of the rows that this process is to hand in."""
    if not isinstance(array, jax.Array):
        return [(0, len(array), array)]
    array.block_until_ready()
    found = {}
    for shard in array.addressable_shards:
        if shard.data.shape[1:] != array.shape[1:]:
            # A row is spread over several devices: only JAX can put it together again.
            return [(0, len(array), array)]
        # Of copies on several processes one hands rows in, the first. Where all copies are here,
        # the dict keeps one of them, whichever its number.
        if array.is_fully_addressable or shard.replica_id == 0:
            start, stop, _ = shard.index[0].indices(len(array))
            found[start] = (start, stop, shard.data)
    return [found[start] for start in sorted(found)]


def _copy_to_host(rows: Any) -> np.ndarray:
    if not isinstance(rows, jax.Array):
        return rows
    # An array keeps the host copy once made of it; a second face of the same buffers, dropped
    # after use, spares the caller that memory.
    shards = [shard.data for shard in rows.addressable_shards]
    return np.asarray(jax.make_array_from_single_device_arrays(rows.shape, rows.sharding, shards))


_SHOWN = 10  # rows that an error shows for one id


class LocalRows:
    """This process's rows, of which only the accepted ones are given out.

    Args:
        ids, weights, predictions: as `gather_by_id` has them.
        caller: who speaks in errors.

    Raises:
        TypeError: ids are neither integers nor strings, or a leaf holds neither numbers nor
            strings.
        ValueError: arrays have different lengths, or steps different structures.
    """

    def __init__(self, ids: Any, weights: Any, predictions: PyTree, *, caller: str) -> None:
        self._caller = caller
        self._by_step = isinstance(ids, list | tuple) and any(np.ndim(each) for each in ids)
        if self._by_step:
            weights = [None] * len(ids) if weights is None else weights
            for name, each in (("weights", weights), ("predictions", predictions)):
                if not isinstance(each, list | tuple) or len(each) != len(ids):
                    got = len(each) if isinstance(each, list | tuple) else type(each).__name__
                    raise ValueError(
                        f"{caller}: {name} must have one entry per step where ids are a list of "
                        f"{len(ids)} steps, got {got}. Append to all three in the same step."
                    )
            steps = list(zip(ids, weights, predictions, strict=True))
        else:
            steps = [(ids, weights, predictions)]
        self._steps = [self._step(number, *step) for number, step in enumerate(steps)]
        # An empty list says nothing of what the other processes hold: it takes their structure.
        self._says_structure = not (isinstance(predictions, list | tuple) and not predictions)
        self._treedef = self._steps[0].treedef
        for number, step in enumerate(self._steps):
            if step.treedef != self._treedef:
                raise ValueError(
                    f"{caller}: predictions must have one structure in every step, got "
                    f"{self._treedef} in step 0 and {step.treedef} in step {number}. Return the "
                    "same pytree from every step."
                )

    def _step(self, number: int, ids: Any, weights: Any, predictions: PyTree) -> "_Step":
        where = f" of step {number}" if self._by_step else ""
        return _Step(ids, weights, predictions, where, self._caller)

    def unflatten(self, leaves: list[Any]) -> PyTree:
        """A pytree of the structure of the predictions."""
        return jax.tree.unflatten(self._treedef, leaves)

    def take_structure(self, spelled: Any) -> None:
        """Takes the structure of other processes' predictions, where there is none here."""
        if not self._says_structure:
            self._treedef = jax.tree.structure(fill_tree(spelled, [0] * _count_leaves(spelled)))

    def describe(self) -> dict[str, Any]:
        """What other processes must know before rows travel, as JSON holds it."""
        # A step without rows says nothing of dtypes: [] is float64 to numpy, whatever is meant.
        steps = [step for step in self._steps if step.rows] or self._steps
        return {
            "rows": sum(step.rows for step in self._steps),
            "global": any(step.is_global for step in self._steps),
            "structure": str(self._treedef) if self._says_structure else None,
            "spelled": self._spell_structure(),
            "leaves": [
                {
                    "name": name,
                    "dtypes": sorted(map(dtype_name, {step.leaves[j].dtype for step in steps})),
                    "shapes": sorted({step.leaves[j].shape[1:] for step in steps}),
                }
                for j, name in enumerate(steps[0].names)
            ],
        }

    def _spell_structure(self) -> Any:
        try:
            numbers = list(range(self._treedef.num_leaves))
            return spell_tree(self.unflatten(numbers), caller=self._caller)
        except TypeError:  # of a kind that JSON has no word for: it is compared as text alone
            return None

    def lay(self) -> None:
        """Has the devices lay global arrays alike, which all processes must do; waits for none."""
        for step in self._steps:
            step.lay()

    def read(self) -> dict[str, Any]:
        """Waits for the arrays, once they are laid, and reads the weights.

        Returns:
            `count` of the accepted rows, and of their ids the `span`, lowest and highest, or the
            `width` of strings; as JSON holds it.

        Raises:
            ValueError: a weight is negative, NaN or infinite.
        """
        for step in self._steps:
            step.read()
        facts: dict[str, Any] = {"count": int(sum(step.count for step in self._steps))}
        for ids in self.ids(1 << 20):
            if ids.dtype.kind == "U":
                facts["width"] = max(facts.get("width", 1), ids.dtype.itemsize // 4)
            else:
                low, high = facts.get("span", (int(ids[0]), int(ids[0])))
                facts["span"] = min(low, int(ids.min())), max(high, int(ids.max()))
        return facts

    def ids(self, size: int) -> Iterator[np.ndarray]:
        """The ids of accepted rows, at most `size` at a time."""
        for step in self._steps:
            for start, stop, kept in step.blocks(size):
                yield step.ids.read(start, stop)[kept]
            step.ids.forget()

    def leaves(self, size: int) -> Iterator[list[np.ndarray]]:
        """The predictions of accepted rows, in the order of `ids`, at most `size` at a time."""
        for step in self._steps:
            for start, stop, kept in step.blocks(size):
                yield [leaf.read(start, stop)[kept] for leaf in step.leaves]
            for leaf in step.leaves:
                leaf.forget()

    def claims(self, wanted: Any) -> list[str]:
        """The first accepted rows that claim an id, in words."""
        claims: list[str] = []
        for step in self._steps:
            for start, stop, kept in step.blocks(1 << 16):
                rows = np.arange(start, stop)[kept]
                same = step.ids.read(start, stop)[kept] == wanted
                claims += [f"row {row}{step.where}" for row in rows[same][:_SHOWN]]
        return claims[:_SHOWN]


class _Step:
    """Arrays of one number of rows that lie alike."""

    def __init__(
        self, ids: Any, weights: Any, predictions: PyTree, where: str, caller: str
    ) -> None:
        self.where, self._caller = where, caller
        if isinstance(ids, list | tuple):
            ids = read_ids(f"{caller}: ids", ids)
        ids = _array(f"{caller}: ids{where}", ids)
        if ids.ndim != 1:
            raise ValueError(
                f"{caller}: ids must be [rows], got shape {ids.shape}{where}. Flatten ids, weights "
                "and predictions alike."
            )
        ids = _check_ids(ids, where, caller)
        self.rows = len(ids)
        weights = None if weights is None else _array(f"{caller}: weights{where}", weights)
        paths, self.treedef = jax.tree_util.tree_flatten_with_path(
            predictions, is_leaf=_is_list_of_scalars
        )
        if not paths:
            raise ValueError(
                f"{caller}: predictions must hold arrays, got {predictions!r}{where}. Give one "
                "array [rows, ...], or a pytree of them."
            )
        self.names = [jax.tree_util.keystr(path) for path, _ in paths]
        arrays = [
            _array(f"{caller}: predictions{name}{where}", leaf)
            for name, (_, leaf) in zip(self.names, paths, strict=True)
        ]
        everything = [ids, *arrays] + ([] if weights is None else [weights])
        spread = [isinstance(x, jax.Array) and not x.is_fully_addressable for x in everything]
        if any(spread) and not all(spread):
            raise ValueError(
                f"{caller}: ids, weights and predictions must be all global arrays or all this "
                f"process's own rows, got some of each{where}. Keep ids and weights as the batch "
                "has them."
            )
        self.is_global = any(spread)
        if weights is not None:
            _check_weights(weights, ids, where, caller)
        arrays = [
            _check_leaf(leaf, ids, name, where, caller)
            for name, leaf in zip(self.names, arrays, strict=True)
        ]
        self.ids = Column(ids)
        self.leaves = [Column(leaf) for leaf in arrays]
        self._weights = None if weights is None else Column(weights)
        self.count = 0
        self._accepted: list[tuple[int, int, Any]] = []

    def _columns(self) -> list[Column]:
        return [self.ids, *self.leaves] + ([] if self._weights is None else [self._weights])

    def lay(self) -> None:
        """Has the devices lay the arrays alike."""
        if self.is_global:
            for column in self._columns():
                column.lay_like(self.ids)

    def read(self) -> None:
        """Waits for the arrays, and finds the accepted rows."""
        columns, weights = self._columns(), self._weights
        for column in columns:
            column.split()
        # Columns may be cut differently (ids on the host, predictions on devices): between two
        # neighbouring cuts every one of them lies in one piece.
        cuts = sorted({cut for column in columns for cut in column.cuts})
        for start, stop in pairwise(cuts):
            if not self.ids.holds(start):
                continue  # a global array's rows of other processes
            kept = (
                None if weights is None else self._find_accepted(weights.read(start, stop), start)
            )
            self.count += stop - start if kept is None else int(np.count_nonzero(kept))
            self._accepted.append((start, stop, kept))
        self._weights = None  # nobody asks for them again

    def _find_accepted(self, weights: np.ndarray, first: int) -> np.ndarray | None:
        """Which rows are accepted; None where all are."""
        argument, remedy = f"{self._caller}: weights", "A row that is not to count weighs 0."
        check_weights(argument, weights, remedy, first=first, where=self.where)
        return None if weights.min() > 0 else weights > 0

    def blocks(self, size: int) -> Iterator[tuple[int, int, Any]]:
        """`(start, stop, kept)` of at most `size` rows each; `kept` indexes the accepted ones."""
        for first, last, accepted in self._accepted:
            for start in range(first, last, size):
                stop = min(start + size, last)
                if accepted is None:
                    yield start, stop, slice(None)
                else:
                    kept = accepted[start - first : stop - first]
                    if kept.any():
                        yield start, stop, kept


def _array(argument: str, values: Any) -> Any:
    check_not_masked(argument, values)
    return values if isinstance(values, jax.Array) else as_native(np.asarray(values))


def _count_leaves(spelled: Any) -> int:
    if isinstance(spelled, dict | list):
        inside = spelled.values() if isinstance(spelled, dict) else spelled
        return sum(map(_count_leaves, inside))
    return int(spelled is not None)


def _is_list_of_scalars(value: Any) -> bool:
    """Whether a list is an array spelled out, rather than a pytree of arrays."""
    return isinstance(value, list) and all(
        _is_list_of_scalars(each) or (np.ndim(each) == 0 and not isinstance(each, Mapping | list))
        for each in value
    )


def _check_ids(ids: Any, where: str, caller: str) -> Any:
    if not len(ids) and ids.dtype.kind == "f":  # what numpy makes of []
        return np.zeros(0, np.int64)
    if ids.dtype.kind in "OT" and all(isinstance(i, str) for i in ids):
        return as_fixed_width(ids)
    if ids.dtype.kind not in "iuU":
        raise TypeError(
            f"{caller}: ids must be integers or strings, got {ids.dtype}{where}. "
            "A float has lost its last digits from 2**53 on."
        )
    return ids


def _check_weights(weights: Any, ids: Any, where: str, caller: str) -> None:
    if weights.shape != ids.shape:
        raise ValueError(
            f"{caller}: weights must have the shape of ids, got weights {weights.shape} and ids "
            f"{ids.shape}{where}. A row has one weight."
        )
    if weights.dtype.kind not in "biufV":
        raise TypeError(
            f"{caller}: weights must be numbers, got {weights.dtype}{where}. 1 counts, 0 is "
            "padding."
        )


def _check_leaf(leaf: Any, ids: Any, name: str, where: str, caller: str) -> Any:
    plain = isinstance(leaf.dtype, np.dtype) and not leaf.dtype.names and leaf.ndim > 0
    if plain and leaf.dtype.kind in "OT" and all(isinstance(x, str) for x in leaf.flat):
        leaf = as_fixed_width(leaf)
    if not plain or leaf.dtype.kind not in "biufcUSV":
        raise TypeError(
            f"{caller}: predictions must be arrays [rows, ...] of numbers or strings, got "
            f"{leaf.dtype}{list(leaf.shape)} at predictions{name}{where}. Bring what belongs to a "
            "row into arrays."
        )
    if leaf.shape[:1] != ids.shape:
        raise ValueError(
            f"{caller}: predictions must have one row per id, got shape {leaf.shape} at "
            f"predictions{name} and {len(ids)} ids{where}. Gather whole batches, padding rows and "
            "their weights included."
        )
    return leaf
