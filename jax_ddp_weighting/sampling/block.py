"""Steps of a plan made several at a time, for who reads them one after the other."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

_SLOTS = 2**15  # of a block at most: a quarter of a megabyte of ids


class Block(NamedTuple):
    """Some consecutive steps of an epoch, of some ranks: never changed, so that threads share it.

    Attributes:
        epoch: the epoch.
        first: the first step.
        steps: how many.
        ranks: which ranks, as they were asked for.
        size: rows of a rank in one step.
        ids: ``[ranks, steps * size]``.
        weights: of the same shape.
    """

    epoch: int
    first: int
    steps: int
    ranks: list[int] | None
    size: int
    ids: np.ndarray
    weights: np.ndarray

    @classmethod
    def of(
        cls,
        epoch: int,
        first: int,
        steps: int,
        ranks: Sequence[int] | None,
        ids: np.ndarray,
        weights: np.ndarray,
    ) -> "Block":
        """A block of what a plan has checked and looked up."""
        ranks = None if ranks is None else [int(rank) for rank in ranks]
        return cls(epoch, first, steps, ranks, ids.shape[1] // steps, ids, weights)

    def take(self, epoch: Any, step: Any, ranks: Any) -> tuple[np.ndarray, np.ndarray] | None:
        """Ids and weights of a step that is in it; None for all else, sound or not."""
        # Exact types, since what is equal to an int, as True is to 1, may yet be refused.
        if type(step) is not int or type(epoch) is not int or epoch != self.epoch:
            return None
        number = step - self.first
        if not 0 <= number < self.steps or not self._has(ranks):
            return None
        return self.copy_step(number)

    def copy_step(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Ids and weights of one of its steps, in arrays of the caller's own."""
        rows = slice(number * self.size, (number + 1) * self.size)
        return self.ids[:, rows].copy(), self.weights[:, rows].copy()

    def count_next(self, epoch: int, step: int, ranks: Any, rows: int) -> int:
        """How many steps the next block holds, of so many rows each: 1, unless it follows this one.

        Twice as many as this one, so that who stops reading has paid for at most as much again.
        """
        if epoch != self.epoch or step != self.first + self.steps or not self._has(ranks):
            return 1
        return min(2 * self.steps, max(_SLOTS // rows, 1))

    def _has(self, ranks: Any) -> bool:
        if ranks is None or self.ranks is None:
            return ranks is self.ranks
        exact = type(ranks) is list or type(ranks) is tuple
        return exact and list(ranks) == self.ranks and all(type(rank) is int for rank in ranks)
