"""What all epochs of a plan by tokens have in common, and what one of them makes of it."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from jaxtyping import Int32, Int64

from jax_ddp_weighting.sampling.lengths import derive_seed
from jax_ddp_weighting.sampling.order import keyed_order
from jax_ddp_weighting.sampling.plan_options import Tail
from jax_ddp_weighting.sampling.shapes import Group, choose_groups


@dataclass(frozen=True, eq=False)
class Layout:
    """Groups of steps of one shape, and the examples in them; an epoch shuffles both.

    Attributes:
        groups: the groups, the longest first.
        ids: all examples by descending length.
        first_steps: how many steps lie before each group, and in all, before any shuffle.
        ties: places of one length that lie in several groups.
        num_replicas: number of ranks.
        seed: chooses the orders; None where nothing is shuffled.
        tail: what becomes of slots beyond the data.
    """

    groups: tuple[Group, ...]
    ids: Int64[np.ndarray, " examples"]
    first_steps: Int64[np.ndarray, " groups_and_end"]
    ties: tuple[tuple[int, int], ...]
    num_replicas: int
    seed: int | None
    tail: Tail

    @classmethod
    def choose(
        cls,
        lengths: Int64[np.ndarray, " examples"],
        num_replicas: int,
        budget: int,
        shapes: int,
        *,
        row_multiple: int,
        length_multiple: int,
        seed: int | None,
        tail: Tail,
    ) -> "Layout":
        """The layout that leaves the least padding, of the arguments of a `BudgetPlan`."""
        # by descending length; small types are sorted by radix, many times as fast
        largest = int(lengths.max(initial=0))
        ids = np.argsort((largest - lengths).astype(np.min_scalar_type(largest)), kind="stable")
        descending = lengths[ids]
        groups = choose_groups(
            descending,
            num_replicas,
            budget,
            shapes,
            cut=tail == "drop",
            row_multiple=row_multiple,
            length_multiple=length_multiple,
        )
        first_steps = np.cumsum([0, *(group.steps for group in groups)])
        ties = () if seed is None else _find_ties(descending, groups)
        return cls(groups, ids, first_steps, ties, num_replicas, seed, tail)

    @property
    def steps(self) -> int:
        """How many steps there are."""
        return int(self.first_steps[-1])

    @property
    def width(self) -> int:
        """Places that each step takes of an epoch: the slots of the largest."""
        return max((group.rows for group in self.groups), default=0) * self.num_replicas

    def order_steps(
        self, epoch: int, steps: Int64[np.ndarray, " steps"]
    ) -> tuple[Int64[np.ndarray, " steps"], Int64[np.ndarray, " steps"]]:
        """The group of some steps of the whole plan in an epoch, and which of the group's."""
        first = self.first_steps
        if self.seed is not None:
            steps = _shuffle_steps(self.steps, derive_seed(self.seed, "steps"), epoch)[steps]
        group = np.searchsorted(first, steps, side="right") - 1
        return group, steps - first[group]

    def count_slots(
        self, group: int | Int64[np.ndarray, " steps"], turn: Int64[np.ndarray, " steps"]
    ) -> Int64[np.ndarray, " steps"]:
        """Slots that count, of some of the whole plan's steps."""
        groups = self.groups
        slots = np.array([each.rows * self.num_replicas for each in groups], np.int64)[group]
        if self.tail == "repeat":
            return slots + 0 * turn
        counts = np.array([each.count for each in groups], np.int64)[group]
        return np.clip(counts - turn * slots, 0, slots)

    def look_up(
        self,
        epoch: int,
        number: int,
        turn: Int64[np.ndarray, " steps"],
        slots: Int64[np.ndarray, "*shape"],
    ) -> tuple[Int64[np.ndarray, "*shape"], Int32[np.ndarray, "*shape"]]:
        """Ids and weights at some slots of a group's steps, past their ends too.

        Args:
            epoch: the epoch.
            number: which group.
            turn: which of its steps; the last axis of `slots`, or one.
            slots: places in these steps, as the whole plan has them.
        """
        group = self.groups[number]
        weights = (slots < self.count_slots(number, turn)).astype(np.int32)
        places = (turn * (group.rows * self.num_replicas) + slots) % group.count
        if self.seed is not None:
            seed = derive_seed(self.seed, f"shape {number}")
            places = keyed_order(places, group.count, seed=seed, epoch=epoch)
        places = self._skip_dropped(epoch, group.start + places)
        # who of equal length is in which group is for the epoch to say
        for tie, (first, last) in enumerate(self.ties):
            tied = (places >= first) & (places < last)
            if self.seed is not None and tied.any():
                seed = derive_seed(self.seed, f"tie {tie}")
                inside = places[tied] - first
                places[tied] = first + keyed_order(inside, last - first, seed=seed, epoch=epoch)
        return self.ids[places], weights

    def _skip_dropped(self, epoch: int, places: Int64[np.ndarray, "*s"]) -> Int64[np.ndarray, "*s"]:
        """Places of the descending order, past those that are left out of this epoch."""
        read = sum(group.count for group in self.groups)
        dropped = len(self.ids) - read
        if not dropped:
            return places
        out = np.arange(dropped) + read
        if self.seed is not None:
            seed = derive_seed(self.seed, "dropped")
            out = np.sort(keyed_order(np.arange(dropped), len(self.ids), seed=seed, epoch=epoch))
        # the k-th that is left out lies behind `out[k] - k` that are not
        return places + np.searchsorted(out - np.arange(dropped), places, side="right")


@lru_cache(maxsize=4)  # this epoch's and the next one's, of training and of evaluation
def _shuffle_steps(steps: int, seed: int, epoch: int) -> Int64[np.ndarray, " steps"]:
    order = keyed_order(np.arange(steps), steps, seed=seed, epoch=epoch)
    order.flags.writeable = False
    return order


def _find_ties(
    descending: Int64[np.ndarray, " examples"], groups: tuple[Group, ...]
) -> tuple[tuple[int, int], ...]:
    """Runs of one length that lie on both sides of a group's start."""
    ascending = descending[::-1]
    ties = {}
    for group in groups[1:]:
        length = descending[group.start]
        if group.start and descending[group.start - 1] == length:
            last = len(descending) - np.searchsorted(ascending, length, side="left")
            first = len(descending) - np.searchsorted(ascending, length, side="right")
            ties[int(first), int(last)] = None
    return tuple(ties)
