"""Rows of a step as a table of ranks and microbatches, as diagnoses show what they counted."""

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, eq=False)
class RowTable:
    """Where each row of a step is: its rank, its microbatch there, and its place in it.

    Attributes:
        at: these three, each ``[rows]``.
        shape: how many ranks there are, microbatches, and rows of one at most.
    """

    at: tuple[np.ndarray, np.ndarray, np.ndarray]
    shape: tuple[int, int, int]

    @classmethod
    def of(
        cls, rank: np.ndarray, microbatch: np.ndarray, ranks: int, microbatches: int
    ) -> "RowTable":
        """The table of rows with these numbers, those of one microbatch in the order they come."""
        part = rank * microbatches + microbatch
        order = np.argsort(part, kind="stable")
        place = np.empty(len(part), int)
        place[order] = np.arange(len(part)) - np.searchsorted(part[order], part[order])
        return cls((rank, microbatch, place), (ranks, microbatches, int(place.max()) + 1))

    def lay_out(self, values: np.ndarray, rows: Any = slice(None)) -> np.ndarray:
        """What some rows have, by default all, ``[ranks, microbatches, rows]``; elsewhere 0."""
        table = np.zeros(self.shape)
        rank, microbatch, place = (each[rows] for each in self.at)
        table[rank, microbatch, place] = values
        return table
