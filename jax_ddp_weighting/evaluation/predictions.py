"""Predictions in the order of their ids: each id once, conflicts found, nothing by position."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from jax_ddp_weighting._arguments import list_some
from jax_ddp_weighting.evaluation.id_index import IdIndex
from jax_ddp_weighting.sampling.audit import CoverageError
from jax_ddp_weighting.sampling.names import as_fixed_width, read_ids


@dataclass(frozen=True)
class Predictions:
    """What `gather_by_id` and `read_parts` return: predictions in the order of their ids.

    Attributes:
        ids: int64 (uint64 where one needs it, or strings) ``[rows]``, ascending, no two alike.
        predictions: a pytree of host arrays ``[rows, ...]``; row ``j`` belongs to ``ids[j]``.
        lengths: where rows were padded: int32 ``[rows]`` for each leaf, the width that the row had;
            None for leaves without a width. None where padding was not asked for.
        duplicated: id -> accepted rows, where equal copies were dropped; ascending, the first
            10,000 of them.
        num_duplicated: how many ids had copies, listed or not.

    Example:
        >>> found = gather_by_id([7, 5, 7], None, {"score": np.array([0.7, 0.5, 0.7])})
        >>> found.ids.tolist(), found.predictions["score"].tolist(), found.duplicated
        ([5, 7], [0.5, 0.7], {7: 2})
    """

    ids: Any
    predictions: Any
    lengths: Any = None
    duplicated: Mapping[Any, int] = field(default_factory=dict)
    num_duplicated: int = 0

    def __len__(self) -> int:
        return len(self.ids)

    def take(self, ids: Any) -> PyTree:
        """The predictions for some ids, in the order in which they are asked for.

        So the order in which rows were read is never lost: it is the order of the ids read.

        Args:
            ids: ids ``[rows]`` of the same kind; repeated ones are repeated.

        Returns:
            The pytree of predictions, arrays ``[rows, ...]``.

        Raises:
            TypeError: ids are neither integers nor strings.
            CoverageError: an id has no prediction. It names the ids.

        Example:
            >>> found = gather_by_id([7, 5, 6], [1, 1, 1], [0.7, 0.5, 0.6])
            >>> found.take([7, 6]).tolist()
            [0.7, 0.6]
        """
        asked = read_ids("Predictions.take: ids", ids)
        if not asked.size:
            asked = asked.astype(self.ids.dtype)
        if asked.dtype.kind not in "iuUTO":
            raise TypeError(
                f"Predictions.take: ids must be integers or strings, got {asked.dtype}. Of a mask"
                " give the ids, take(ids[mask])."
            )
        if asked.dtype.kind == "T":  # which numpy does not look up among those of fixed width
            asked = as_fixed_width(asked)
        wanted, inside = asked, np.ones(asked.shape, bool)
        if {asked.dtype.kind, self.ids.dtype.kind} == {"i", "u"}:  # numpy compares them as floats
            held = np.iinfo(self.ids.dtype)
            inside = (asked >= held.min) & (asked <= held.max)
            wanted = np.where(inside, asked, 0).astype(self.ids.dtype)
        if len(self.ids):
            positions = np.searchsorted(self.ids, wanted).clip(max=len(self.ids) - 1)
            inside &= self.ids[positions] == wanted
        else:
            positions, inside = np.zeros(asked.shape, int), np.zeros(asked.shape, bool)
        missing = np.unique(asked[~inside])
        if missing.size:
            raise CoverageError(
                f"Predictions.take: ids must have predictions, got {list_some(missing.tolist())} "
                f"without one. {len(self.ids)} ids have one."
            )
        return jax.tree.map(lambda leaf: leaf[positions], self.predictions)


Allocate = Callable[[list[str], list[tuple[tuple[int, ...], np.dtype]]], list[np.ndarray]]
"""`(names, shapes and dtypes)` -> arrays to fill, all at once: their names may collide."""


@dataclass(frozen=True)
class Leaf:
    """What one leaf of the predictions is, in every process and every step.

    Attributes:
        name: its path, as `jax.tree_util.keystr` writes it.
        dtype: its dtype; of strings the widest.
        shape: that of a row, the widest where rows are ragged.
        ragged: whether rows may differ in their first axis, so that their widths travel too.
        fill: what narrower rows are filled up with, a scalar of the dtype; None where none are.
    """

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    ragged: bool = False
    fill: Any = None

    def pad(self, rows: np.ndarray) -> np.ndarray:
        """The rows, as wide as the widest."""
        if rows.shape[1:] == self.shape:
            return rows
        wide = np.full((len(rows), *self.shape), self.fill, self.dtype)
        wide[:, : rows.shape[1]] = rows
        return wide


def columns_like(leaves: Sequence[Leaf]) -> list[tuple[np.dtype, tuple[int, ...]]]:
    """Each column's dtype and shape of a row: the leaves, then the widths of ragged ones."""
    widths = [(np.dtype(np.int32), ()) for leaf in leaves if leaf.ragged]
    return [(leaf.dtype, leaf.shape) for leaf in leaves] + widths


def columns_of(rows: Sequence[np.ndarray], leaves: Sequence[Leaf]) -> list[np.ndarray]:
    """Rows as columns: padded, with the widths that they had."""
    widths = [
        np.full(len(each), each.shape[1], np.int32)
        for each, leaf in zip(rows, leaves, strict=True)
        if leaf.ragged
    ]
    return [leaf.pad(each) for each, leaf in zip(rows, leaves, strict=True)] + widths


def agree_leaves(
    found: Sequence[tuple[str, Sequence[Mapping[str, Any]]]], pad: Any, *, caller: str
) -> list[Leaf]:
    """What the leaves are, where several sources tell what theirs are.

    Args:
        found: `(where, leaves)` of each source that has rows: of each leaf its `name`, and the
            `dtypes` and `shapes` of its rows.
        pad: what to fill narrower rows with; None refuses them.
        caller: who speaks in errors.

    Raises:
        TypeError: a leaf has several dtypes.
        ValueError: a leaf has rows of several shapes and `pad` is None, or of shapes that differ in
            more than the first axis of a row.
    """
    leaves = []
    for j, leaf in enumerate(found[0][1]):
        dtypes: dict[Any, str] = {}
        shapes: dict[tuple[int, ...], str] = {}
        for where, others in found:
            for dtype in others[j]["dtypes"]:
                dtypes.setdefault(dtype_of(dtype), where)
            for shape in others[j]["shapes"]:
                shapes.setdefault(tuple(shape), where)
        leaves.append(_agree_leaf(leaf["name"], dtypes, shapes, pad, caller))
    return leaves


def _agree_leaf(
    name: str, dtypes: Mapping[Any, str], shapes: Mapping[Any, str], pad: Any, caller: str
) -> Leaf:
    def differing(found: Mapping[Any, str]) -> str:
        (a, at), (b, bt), *_ = found.items()
        return f"got {a}{at} and {b}{bt} at predictions{name}"

    dtype = max(dtypes, key=lambda dtype: dtype.itemsize)
    if len(dtypes) > 1 and not (dtype.kind in "US" and len({each.kind for each in dtypes}) == 1):
        raise TypeError(
            f"{caller}: predictions must have one dtype everywhere, {differing(dtypes)}. "
            "Cast them to one first."
        )
    if len(shapes) == 1:
        (shape,) = shapes
        return Leaf(name, dtype, shape, ragged=pad is not None and len(shape) > 0)
    if len({(len(shape), *shape[1:]) for shape in shapes}) > 1:
        raise ValueError(
            f"{caller}: predictions must have rows of one shape everywhere, or of one shape but "
            f"for their first axis where pad= is given, {differing(shapes)}. Bring them to one "
            "shape."
        )
    if pad is None:
        raise ValueError(
            f"{caller}: predictions must have rows of one shape everywhere, {differing(shapes)}. "
            "pad= fills narrower rows up to the widest and keeps their lengths."
        )
    return Leaf(name, dtype, max(shapes), ragged=True, fill=_check_fill(pad, name, dtype, caller))


def _check_fill(pad: Any, name: str, dtype: np.dtype, caller: str) -> np.ndarray:
    """What fills rows up: `pad`, if the dtype holds it as it is, but for a float's rounding."""
    try:
        given = np.asarray(pad)
        with np.errstate(invalid="ignore", over="ignore"):  # what has no place is seen below
            fill = given.astype(dtype)
        if _holds(given, fill):
            return fill
    except (TypeError, ValueError, OverflowError):
        pass  # refused below, as is what the dtype takes but does not hold
    raise TypeError(
        f"{caller}: pad must be a value of the predictions' dtype, got {pad!r} for {dtype} at "
        f"predictions{name}. Choose one that it holds."
    )


def _holds(given: np.ndarray, fill: np.ndarray) -> bool:
    text = fill.dtype.kind in "US"
    if given.shape != () or text != (given.dtype.kind in "US"):
        return False
    if text or fill.dtype.kind in "iub":
        return bool(fill == given)
    return bool(np.isfinite(fill) == np.isfinite(given))


def dtype_of(name: str) -> np.dtype:
    """The dtype that `dtype_name` named; numpy alone does not know bfloat16 and its kin."""
    return np.dtype(name) if name[0] in "<>|=" else jax.numpy.dtype(name)


def dtype_name(dtype: np.dtype) -> str:
    """A dtype's name, which includes the width of strings."""
    return dtype.str if dtype.kind in "US" else dtype.name


class Table:
    """Rows put where their ids belong, whatever order they come in. Filled once.

    Args:
        index: where each row goes.
        leaves: what the predictions are.
        allocate: makes the arrays, in memory where None.
    """

    def __init__(
        self, index: IdIndex, leaves: Sequence[Leaf], allocate: Allocate | None = None
    ) -> None:
        self._index = index
        self._leaves = leaves
        rows = len(index.ids)
        names = [leaf.name for leaf in leaves]
        names += [f"{leaf.name}.lengths" for leaf in leaves if leaf.ragged]
        forms = [((rows, *shape), dtype) for dtype, shape in columns_like(leaves)]
        if allocate is None:
            self._columns = [np.empty(shape, dtype) for shape, dtype in forms]
        else:
            self._columns = allocate(names, forms)
        self._several = None if index.counts is None else index.counts > 1
        self._written = np.zeros(rows if index.counts is not None else 0, bool)
        self._conflicts: set[int] = set()

    def put(self, first: int, columns: Sequence[np.ndarray]) -> None:
        """Rows `first`, `first + 1`, ... of the index, as `columns_of` gives them."""
        positions = self._index.positions[first : first + len(columns[0])]
        if self._several is not None:
            several = self._several[positions]
            if several.any():
                self._put_copies(positions[several], [column[several] for column in columns])
                positions = positions[~several]
                columns = [column[~several] for column in columns]
        for into, column in zip(self._columns, columns, strict=True):
            into[positions] = column

    def _put_copies(self, positions: np.ndarray, columns: Sequence[np.ndarray]) -> None:
        """Rows whose ids have several: the first is kept, and the others are compared with it."""
        new = np.flatnonzero(~self._written[positions])
        # Copies may come in one block: of those, too, the first alone is written.
        new = new[np.unique(positions[new], return_index=True)[1]]
        alike = np.ones(len(positions), bool)
        for j, (into, column) in enumerate(zip(self._columns, columns, strict=True)):
            into[positions[new]] = column[new]
            if j < len(self._leaves):
                alike &= _are_rows_alike(into[positions], column)
            else:  # copies that were padded to different widths before: the widest
                np.maximum.at(into, positions, column)
        self._written[positions[new]] = True
        self._conflicts.update(positions[~alike].tolist())

    def conflicts(self) -> list[Any]:
        """The ids that several rows claim with different predictions, ascending."""
        return self._index.ids[sorted(self._conflicts)].tolist()

    def result(
        self,
        unflatten: Callable[[list[Any]], PyTree],
        finish: Callable[[list[np.ndarray]], list[np.ndarray]] | None = None,
    ) -> Predictions:
        """The predictions, once every row has been put; `finish` is handed the filled arrays."""
        if finish is not None:
            self._columns = finish(self._columns)
        duplicated, number = self._index.duplicated()
        widths = iter(self._columns[len(self._leaves) :])
        lengths = [next(widths) if leaf.ragged else None for leaf in self._leaves]
        return Predictions(
            self._index.ids,
            unflatten(self._columns[: len(self._leaves)]),
            unflatten(lengths) if any(leaf.ragged for leaf in self._leaves) else None,
            duplicated,
            number,
        )


def conflict_error(caller: str, claimed: Any, rows: Sequence[str], number: int) -> ValueError:
    """The error that says where rows claim one id with different predictions.

    Args:
        caller: who speaks.
        claimed: the first such id.
        rows: where its rows sit.
        number: how many such ids there are.
    """
    more = f", and on {number - 1} more ids" if number > 1 else ""
    return ValueError(
        f"{caller}: predictions must agree where rows claim one id, got different ones for id "
        f"{claimed!r}: {list_some(rows)}{more}. Neither can be believed: padding rows and copies "
        'weigh 0, as tail="mask" has them.'
    )


def _are_rows_alike(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    same = a == b
    if a.dtype.kind not in "US":
        same |= (a != a) & (b != b)  # the same bytes were sent: NaN is NaN here
    return same.reshape(len(a), -1).all(axis=1)


def spell_tree(tree: Any, *, caller: str) -> Any:
    """A pytree of integers as JSON holds it; `caller` speaks in errors.

    Raises:
        TypeError: it holds something other than dicts with string keys, lists and tuples.
    """
    if isinstance(tree, dict) and all(isinstance(key, str) for key in tree):
        return {"dict": {key: spell_tree(each, caller=caller) for key, each in tree.items()}}
    if type(tree) in (list, tuple):
        return {type(tree).__name__: [spell_tree(each, caller=caller) for each in tree]}
    if tree is None or isinstance(tree, int):
        return tree
    raise TypeError(
        f"{caller}: predictions must be dicts with string keys, lists, tuples and arrays, got "
        f"{type(tree).__name__}. Turn it into a dict of arrays."
    )


def fill_tree(spelled: Any, leaves: list[Any]) -> Any:
    """The pytree that `spell_tree` spelled out, with these leaves."""
    if not isinstance(spelled, dict):
        return None if spelled is None else leaves[spelled]
    ((kind, inside),) = spelled.items()
    if kind == "dict":
        return {key: fill_tree(each, leaves) for key, each in inside.items()}
    filled = [fill_tree(each, leaves) for each in inside]
    return tuple(filled) if kind == "tuple" else filled
