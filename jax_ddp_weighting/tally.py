"""How often each id has been met: exact, at one byte per example."""

import numpy as np
from jaxtyping import Int64, Integer

_BLOCK = 16_384  # ids sorted at once
_PENDING = 1 << 20  # further meetings kept as they came, before they are summed up


class Tally:
    """Counts meetings of the ids ``[0, num_examples)``, block by block.

    A byte per example says whether its id was met; only meetings after the first are kept apart.

    Args:
        num_examples: how many ids there are.
    """

    def __init__(self, num_examples: int) -> None:
        self.num_examples = num_examples
        self.met = np.zeros(num_examples, bool)
        self.meetings = 0
        self._again: list[np.ndarray] = []
        self._pending = 0
        self._repeated = (np.zeros(0, np.int64), np.zeros(0, np.int64))

    def add(self, ids: Integer[np.ndarray, " slots"]) -> None:
        """Meet some ids, all of them in range."""
        narrow = np.uint32 if self.num_examples <= 2**32 else np.int64  # sorts in half the time
        for start in range(0, len(ids), _BLOCK):
            block = np.sort(ids[start : start + _BLOCK].astype(narrow))
            self.meetings += len(block)
            same = block[1:] == block[:-1]
            if same.any():
                self._meet_again(block[1:][same])
                block = block[np.append(True, ~same)]
            before = self.met.take(block)
            if before.any():
                self._meet_again(block[before])
            self.met[block] = True

    def _meet_again(self, ids: Integer[np.ndarray, " slots"]) -> None:
        self._again.append(ids.astype(np.int64))
        self._pending += len(ids)
        if self._pending > _PENDING:
            self._sum_up()

    def _sum_up(self) -> None:
        ids, further = self._repeated
        everything = np.concatenate([ids, *self._again])
        counts = np.concatenate([further, np.ones(self._pending, np.int64)])
        unique, inverse = np.unique(everything, return_inverse=True)
        summed = np.zeros(len(unique), np.int64)
        np.add.at(summed, inverse, counts)
        self._repeated, self._again, self._pending = (unique, summed), [], 0

    def repeated(self) -> tuple[Int64[np.ndarray, " ids"], Int64[np.ndarray, " ids"]]:
        """The ids met more than once, ascending, and how often each was met in all."""
        if self._pending:
            self._sum_up()
        ids, further = self._repeated
        return ids, further + 1

    @property
    def unique(self) -> int:
        """How many ids have been met."""
        return self.meetings - int((self.repeated()[1] - 1).sum())

    def unmet(self, limit: int) -> Int64[np.ndarray, " ids"]:
        """The first `limit` ids not yet met, ascending."""
        found: list[np.ndarray] = [np.zeros(0, np.int64)]
        wanted = min(limit, self.num_examples - self.unique)
        start, step = 0, 1 << 20
        while wanted > 0:
            ids = np.flatnonzero(~self.met[start : start + step])[:wanted] + start
            found.append(ids)
            wanted -= len(ids)
            start += step
        return np.concatenate(found)
