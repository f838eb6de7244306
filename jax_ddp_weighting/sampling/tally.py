"""How often each id has been met: exact, at about one byte per example."""

import numpy as np
from jaxtyping import Bool, Int64, Integer

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
        self.meetings = 0
        self._met = np.zeros(num_examples, bool)
        self._repeated = (np.zeros(0, np.int64), np.zeros(0, np.int64))  # ids, further meetings
        self._pending: list[np.ndarray] = []
        self._num_pending = 0

    def add(self, ids: Integer[np.ndarray, " slots"]) -> None:
        """Meet some ids, all of them in range."""
        # Sorted blocks, because a scatter into `_met` in ascending order stays in the cache, and
        # because what comes twice within a block then stands side by side.
        narrow = np.uint32 if self.num_examples <= 2**32 else np.int64  # sorts in half the time
        for start in range(0, len(ids), _BLOCK):
            block = np.sort(ids[start : start + _BLOCK].astype(narrow))
            self.meetings += len(block)
            same = block[1:] == block[:-1]
            if same.any():
                self._meet_again(block[1:][same])
                block = block[np.append(True, ~same)]
            before = self._met.take(block)  # after the block's own copies are gone
            if before.any():
                self._meet_again(block[before])
            self._met[block] = True

    def merge(self, other: "Tally") -> None:
        """Meet all that another tally of the same ids has met."""
        # An id that either side met has one first meeting; of the other's first meetings those of
        # ids met here too are further ones, and all of its further ones are.
        ids, counts = other.repeated()
        self._meet_again(np.flatnonzero(self._met & other._met))
        self._meet_again(np.repeat(ids, counts - 1))
        self._met |= other._met
        self.meetings += other.meetings

    def repeated(self) -> tuple[Int64[np.ndarray, " ids"], Int64[np.ndarray, " ids"]]:
        """The ids met more than once, ascending, and how often each was met in all."""
        if self._pending:
            self._sum_up()
        ids, further = self._repeated
        return ids, further + 1

    @property
    def unique(self) -> int:
        """How many ids have been met."""
        # every meeting is an id's first or one of the further ones: no pass over the bytes
        return self.meetings - self._num_pending - int(self._repeated[1].sum())

    def have_met(self, ids: Int64[np.ndarray, " ids"]) -> Bool[np.ndarray, " ids"]:
        """Whether each of some ids has been met."""
        return self._met[ids]

    def renumbered(self, numbers: Int64[np.ndarray, " ids"]) -> "Tally":
        """The same meetings, renumbered: id ``i`` is ``numbers[i]``, and no later one was met."""
        twin = Tally(self.num_examples)
        twin._met[numbers] = self._met[: len(numbers)]
        twin.meetings = self.meetings
        ids, counts = self.repeated()
        by_number = np.argsort(numbers[ids])
        twin._repeated = numbers[ids][by_number], counts[by_number] - 1
        return twin

    def unmet(self, limit: int) -> Int64[np.ndarray, " ids"]:
        """The first `limit` ids not yet met, ascending."""
        # Piece by piece, since the first few of a billion unmet ids need no billion int64.
        found = [np.zeros(0, np.int64)]
        wanted = min(limit, self.num_examples - self.unique)
        start, step = 0, 1 << 20
        while wanted > 0:
            ids = np.flatnonzero(~self._met[start : start + step])[:wanted] + start
            found.append(ids)
            wanted -= len(ids)
            start += step
        return np.concatenate(found)

    def to_bytes(self) -> bytes:
        """All of it but the number of examples, in an eighth of a byte per example and more."""
        ids, counts = self.repeated()
        numbers = np.concatenate([[self.meetings, len(ids)], ids, counts - 1]).astype("<i8")
        return numbers.tobytes() + np.packbits(self._met).tobytes()

    @classmethod
    def from_bytes(cls, num_examples: int, data: bytes) -> "Tally":
        """What `to_bytes` gave."""
        tally = cls(num_examples)
        tally.meetings, count = (int(number) for number in np.frombuffer(data, "<i8", 2))
        numbers = np.frombuffer(data, "<i8", 2 * count, offset=16).astype(np.int64)
        tally._repeated = numbers[:count], numbers[count:]
        bits = np.frombuffer(data, np.uint8, offset=16 + 16 * count)
        tally._met = np.unpackbits(bits, count=num_examples).astype(bool)
        return tally

    def _meet_again(self, ids: Integer[np.ndarray, " slots"]) -> None:
        self._pending.append(ids.astype(np.int64))
        self._num_pending += len(ids)
        if self._num_pending > _PENDING:
            self._sum_up()

    def _sum_up(self) -> None:
        ids, further = self._repeated
        everything = np.concatenate([ids, *self._pending])
        counts = np.concatenate([further, np.ones(self._num_pending, np.int64)])
        unique, inverse = np.unique(everything, return_inverse=True)
        summed = np.zeros(len(unique), np.int64)
        np.add.at(summed, inverse, counts)
        self._repeated, self._pending, self._num_pending = (unique, summed), [], 0
