"""Rows of steps of several lengths, held to one form."""

import jax
from jaxtyping import PyTree

from jax_ddp_weighting.data.row_format import RowFormat, describe_rows


class RowLengths:
    """Says what rows look like as if all steps had the length of the first.

    The rule: at every step some leaf must have an axis of the step's length, and an axis that had
    the first step's length may have that of its own step; all else is as at the first step.

    Args:
        caller: who speaks in errors.
    """

    def __init__(self, caller: str) -> None:
        self._caller = caller
        self._first: tuple[int, list[tuple[int, ...]]] | None = None

    def describe(self, rows: PyTree, length: int) -> RowFormat:
        """The form of a step's rows, with the first step's length for its own.

        Args:
            rows: arrays with one leading axis of rows.
            length: what the plan says that they are padded to.

        Raises:
            ValueError: no leaf is as long.
        """
        leaves, structure = jax.tree.flatten(rows)
        shapes = [leaf.shape[1:] for leaf in leaves]
        if not any(length in shape for shape in shapes):
            raise ValueError(
                f"{self._caller}: fetch must return rows padded to the length that it is given,"
                f" {length}, got rows of shape {', '.join(map(str, shapes))}. The plan counts on"
                " it: longer rows are over its budget, and other lengths are compiled anew."
            )
        if self._first is None:
            self._first = length, shapes
        first_length, first = self._first
        if len(first) == len(shapes):  # else the structure differs, which the form says
            shapes = [
                _write_as(shape, wanted, length, first_length)
                for shape, wanted in zip(shapes, first, strict=True)
            ]
        alike = [
            jax.ShapeDtypeStruct((1, *shape), leaf.dtype)
            for shape, leaf in zip(shapes, leaves, strict=True)
        ]
        return describe_rows(structure.unflatten(alike))


def _write_as(
    shape: tuple[int, ...], first: tuple[int, ...], length: int, first_length: int
) -> tuple[int, ...]:
    """A row's shape, with the first step's length where that had it and this has its own."""
    if len(shape) != len(first):
        return shape
    return tuple(
        first_length if (size, before) == (length, first_length) else size
        for size, before in zip(shape, first, strict=True)
    )
