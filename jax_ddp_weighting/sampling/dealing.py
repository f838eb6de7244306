"""The steps of a plan by tokens: those of its layout, or what is left of them, dealt out anew."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32, Int64

from jax_ddp_weighting.sampling.layout import Layout
from jax_ddp_weighting.sampling.shapes import fit_rows
from jax_ddp_weighting.sampling.slots import Slots


class _Parts(NamedTuple):
    """What some steps read: each a part of a step of the whole plan."""

    group: Int64[np.ndarray, " steps"]
    turn: Int64[np.ndarray, " steps"]  # which of the group's steps
    offset: Int64[np.ndarray, " steps"]  # how many of its slots were read before
    step: Int64[np.ndarray, " steps"]  # which of the whole plan's


@dataclass(frozen=True, eq=False)
class Dealing:
    """Steps of some ranks, of which each reads one of the layout's steps, or a part of one.

    Attributes:
        layout: the steps of whole epochs, for as many ranks as it says.
        num_replicas: the ranks that read now.
        budget: tokens of a rank's step now.
        row_multiple: what rows are a multiple of.
        start: places of the epoch that were read before.
        only_epoch: the epoch whose rest is dealt out; None where epochs are read whole, by the
            ranks that the layout is for.
    """

    layout: Layout
    num_replicas: int
    budget: int
    row_multiple: int
    start: int = 0
    only_epoch: int | None = None

    @cached_property
    def rows(self) -> tuple[int, ...]:
        """Rows per rank of each group's steps."""
        groups = self.layout.groups
        if self.only_epoch is None:
            return tuple(group.rows for group in groups)
        # of a step of the layout, dealt to these ranks in as few steps as the budget allows
        width, times = self.num_replicas * self.row_multiple, self.row_multiple
        rounds = (-(-group.rows * self.layout.num_replicas // width) for group in groups)
        most = (self.budget // group.length // times for group in groups)
        return tuple(int(fit_rows(*each)[0]) * times for each in zip(rounds, most, strict=True))

    @property
    def steps(self) -> int:
        """How many steps there are."""
        if self.only_epoch is None:
            return self.layout.steps
        return int(self._ends[-1]) if len(self._ends) else 0

    @property
    def num_samples(self) -> int:
        """Slots per rank."""
        if self.only_epoch is None:
            return sum(group.rows * group.steps for group in self.layout.groups)
        part = self._find_parts(self.only_epoch, np.arange(self.steps))
        return int(np.array(self.rows, np.int64)[part.group].sum())

    @property
    def accepted(self) -> int:
        """Slots of weight 1, over all ranks."""
        if self.only_epoch is not None:
            return int(self._left.sum())
        if self.layout.tail == "repeat":
            return self.num_samples * self.num_replicas
        return sum(group.count for group in self.layout.groups)

    def find_place(self, step: int) -> int:
        """Places of the epoch that have been read before a step."""
        if self.only_epoch is None:
            return step * self.layout.width
        part = self._find_parts(self.only_epoch, np.array([step]))
        return int(part.step[0] * self.layout.width + part.offset[0])

    def find_shape(self, epoch: int, step: int) -> tuple[int, int]:
        """The rows and the length of a step."""
        group = int(self._find_parts(epoch, np.array([step])).group[0])
        return self.rows[group], self.layout.groups[group].length

    def count_accepted(
        self, epoch: int, rank: int, steps: Int64[np.ndarray, " steps"]
    ) -> Int64[np.ndarray, " steps"]:
        """Rows of weight 1 that a rank has in each of some steps."""
        part = self._find_parts(epoch, steps)
        rows = np.array(self.rows, np.int64)[part.group]
        left = self.layout.count_slots(part.group, part.turn) - part.offset
        # slots rank, rank + W, ... of the step are this rank's
        return np.clip(-((rank - left) // self.num_replicas), 0, rows)

    def read_step(self, epoch: int, step: int, ranks: Int64[np.ndarray, " ranks"]) -> Slots:
        """The slots of a step, ``[ranks, rows]``, with the length of its rows."""
        part = self._find_parts(epoch, np.array([step]))
        group = int(part.group[0])
        rows = np.arange(self.rows[group])
        slots = part.offset + rows * self.num_replicas + ranks[:, None]
        ids, weights = self.layout.look_up(epoch, group, part.turn, slots)
        return Slots(ids, weights, self.layout.groups[group].length)

    def read_steps(
        self, epoch: int, ranks: Sequence[int]
    ) -> tuple[Int64[np.ndarray, "ranks slots"], Int32[np.ndarray, "ranks slots"]]:
        """Ids and weights of all steps of some ranks, in order."""
        part = self._find_parts(epoch, np.arange(self.steps))
        rows = np.array(self.rows, np.int64)[part.group]
        ends = np.cumsum(rows)
        shape = (len(ranks), int(rows.sum()))
        ids, weights = np.zeros(shape, np.int64), np.zeros(shape, np.int32)
        wanted = np.array(ranks, np.int64)
        for group, height in enumerate(self.rows):  # all steps of one shape at once
            steps = np.flatnonzero(part.group == group)
            row = np.arange(height)
            slots = part.offset[steps] + (row * self.num_replicas + wanted[:, None])[..., None]
            columns = ((ends - rows)[steps] + row[:, None]).reshape(-1)
            found = self.layout.look_up(epoch, group, part.turn[steps], slots)
            for into, each in zip((ids, weights), found, strict=True):
                into[:, columns] = each.reshape(len(wanted), -1)
        return ids, weights

    def _find_parts(self, epoch: int, steps: Int64[np.ndarray, " steps"]) -> _Parts:
        """What some steps read."""
        if self.only_epoch is None:
            return _Parts(*self.layout.order_steps(epoch, steps), np.zeros_like(steps), steps)
        ends = self._ends
        whole_steps = np.searchsorted(ends, steps, side="right")
        group, turn = self.layout.order_steps(epoch, whole_steps)
        rows = np.array(self.rows, np.int64)[group]
        before = np.concatenate([[0], ends])[whole_steps]
        first, begun = divmod(self.start, max(self.layout.width, 1))
        offset = (steps - before) * rows * self.num_replicas + begun * (whole_steps == first)
        return _Parts(group, turn, offset, whole_steps)

    @cached_property
    def _left(self) -> Int64[np.ndarray, " steps"]:
        """Slots that count and are left to read, of each step of the whole plan."""
        every = np.arange(self.layout.steps)
        left = self.layout.count_slots(*self.layout.order_steps(self.only_epoch or 0, every))
        step, offset = divmod(self.start, max(self.layout.width, 1))
        left[:step] = 0
        left[step : step + 1] = np.maximum(left[step : step + 1] - offset, 0)
        return left

    @cached_property
    def _ends(self) -> Int64[np.ndarray, " steps"]:
        """How many steps of the rest lie before the end of each of the whole plan's."""
        group, _ = self.layout.order_steps(self.only_epoch or 0, np.arange(self.layout.steps))
        slots = np.array(self.rows, np.int64)[group] * self.num_replicas
        return np.cumsum(-(-self._left // slots))
