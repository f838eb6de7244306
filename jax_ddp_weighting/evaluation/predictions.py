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


@dataclass(frozen=True)
class Predictions:
    """Predictions in the order of their ids, each id once.

    Args:
        ids: int64 (uint64 where one needs it, or strings) ``[rows]``, ascending, no two alike.
        predictions: a pytree of host arrays ``[rows, ...]``; row ``j`` belongs to ``ids[j]``.
        lengths: where rows were padded: int32 ``[rows]`` for each leaf, the width that the row had;
            None for leaves without a width. None where padding was not asked for.
        duplicated: id -> accepted rows, where equal copies were dropped; ascending, the first
            10,000 of them.
        num_duplicated: how many ids had copies, listed or not.
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
            CoverageError: an id has no prediction. It names the ids.

        Example:
            >>> found = gather_by_id([7, 5, 6], [1, 1, 1], [0.7, 0.5, 0.6])
            >>> found.take([7, 6]).tolist()
            [0.7, 0.6]
        """
        asked = np.asarray(ids)
        wanted, inside = asked, np.ones(asked.shape, bool)
        if {asked.dtype.kind, self.ids.dtype.kind} == {"i", "u"}:  # numpy compares them as floats
            held = np.iinfo(self.ids.dtype)
            inside = (asked >= held.min) & (asked <= held.max)
            wanted = np.where(inside, asked, 0).astype(self.ids.dtype)
        if len(self.ids):
            places = np.searchsorted(self.ids, wanted).clip(max=len(self.ids) - 1)
            inside &= self.ids[places] == wanted
        else:
            places, inside = np.zeros(asked.shape, int), np.zeros(asked.shape, bool)
        missing = np.unique(asked[~inside])
        if missing.size:
            raise CoverageError(
                f"Predictions.take: ids must have predictions, got {list_some(missing.tolist())} "
                f"without one. {len(self.ids)} ids have one."
            )
        return jax.tree.map(lambda leaf: leaf[places], self.predictions)


Allocate = Callable[[str, tuple[int, ...], np.dtype], np.ndarray]
"""`(name, shape, dtype)` -> an array to fill."""


@dataclass(frozen=True)
class Leaf:
    """What one leaf of the predictions is, in every process and every part of them.

    `shape` is that of a row, the widest where `ragged` ones are padded with `fill`.
    """

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    ragged: bool = False
    fill: Any = None

    def padded(self, rows: np.ndarray) -> np.ndarray:
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
    return [leaf.padded(each) for each, leaf in zip(rows, leaves, strict=True)] + widths


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
        leaves.append(_agreed(leaf["name"], dtypes, shapes, pad, caller))
    return leaves


def _agreed(
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
    return Leaf(name, dtype, max(shapes), ragged=True, fill=_fill(pad, name, dtype, caller))


def _fill(pad: Any, name: str, dtype: np.dtype, caller: str) -> np.ndarray:
    """What fills rows up: `pad`, if the dtype holds it as it is, but for a float's rounding."""
    try:
        given = np.asarray(pad)
        with np.errstate(invalid="ignore", over="ignore"):  # what has no place is seen below
            fill = given.astype(dtype)
        if _held(given, fill):
            return fill
    except (TypeError, ValueError, OverflowError):
        pass  # refused below, as is what the dtype takes but does not hold
    raise TypeError(
        f"{caller}: pad must be a value of the predictions' dtype, got {pad!r} for {dtype} at "
        f"predictions{name}. Choose one that it holds."
    )


def _held(given: np.ndarray, fill: np.ndarray) -> bool:
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
    """Rows put at the places of their ids, whatever order they come in. Filled once.

    Args:
        places: where each row goes.
        leaves: what the predictions are.
        allocate: makes the arrays, in memory where None.
    """

    def __init__(
        self, places: IdIndex, leaves: Sequence[Leaf], allocate: Allocate | None = None
    ) -> None:
        allocate = allocate or (lambda _, shape, dtype: np.empty(shape, dtype))
        self._places = places
        self._leaves = leaves
        rows = len(places.ids)
        names = [leaf.name for leaf in leaves]
        names += [f"{leaf.name}.lengths" for leaf in leaves if leaf.ragged]
        self._columns = [
            allocate(name, (rows, *shape), dtype)
            for name, (dtype, shape) in zip(names, columns_like(leaves), strict=True)
        ]
        self._several = None if places.counts is None else places.counts > 1
        self._written = np.zeros(rows if places.counts is not None else 0, bool)
        self._conflicts: set[int] = set()

    def put(self, first: int, columns: Sequence[np.ndarray]) -> None:
        """Rows `first`, `first + 1`, ... of `places.place`, as `columns_of` gives them."""
        place = self._places.place[first : first + len(columns[0])]
        if self._several is not None:
            several = self._several[place]
            if several.any():
                self._put_copies(place[several], [column[several] for column in columns])
                place = place[~several]
                columns = [column[~several] for column in columns]
        for into, column in zip(self._columns, columns, strict=True):
            into[place] = column

    def _put_copies(self, place: np.ndarray, columns: Sequence[np.ndarray]) -> None:
        new = np.flatnonzero(~self._written[place])
        new = new[np.unique(place[new], return_index=True)[1]]
        alike = np.ones(len(place), bool)
        for j, (into, column) in enumerate(zip(self._columns, columns, strict=True)):
            into[place[new]] = column[new]
            if j < len(self._leaves):
                alike &= _rows_alike(into[place], column)
            else:  # copies that were padded to different widths before: the widest
                np.maximum.at(into, place, column)
        self._written[place[new]] = True
        self._conflicts.update(place[~alike].tolist())

    def conflicts(self) -> list[Any]:
        """The ids that several rows claim with different predictions, ascending."""
        return self._places.ids[sorted(self._conflicts)].tolist()

    def result(self, unflatten: Callable[[list[Any]], PyTree]) -> Predictions:
        """The predictions, once every row has been put."""
        duplicated, number = self._places.duplicated()
        widths = iter(self._columns[len(self._leaves) :])
        lengths = [next(widths) if leaf.ragged else None for leaf in self._leaves]
        return Predictions(
            self._places.ids,
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


def _rows_alike(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    same = a == b
    if a.dtype.kind not in "US":
        same |= (a != a) & (b != b)  # NaN is NaN here
    return same.reshape(len(a), -1).all(axis=1)
