"""Who reads what: one epoch's grid of slots, the same on every rank, made a part at a time."""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from functools import lru_cache
from typing import Literal, get_args

import numpy as np
from jaxtyping import Int32, Int64

from jax_ddp_weighting.order import (
    MAX_EXAMPLES,
    check_integer,
    check_seed,
    keyed_order,
    torch_order,
)

Tail = Literal["mask", "repeat", "drop"]
Order = Literal["keyed", "torch"]


@dataclass(frozen=True)
class Slots:
    """Some slots of an epoch: which example sits in each, and how much it counts.

    Args:
        ids: int64 example ids, any shape.
        weights: int32 of the same shape: 1 where the slot counts, 0 where it is padding. Integers,
            so that a sum of them counts exactly.
    """

    ids: Int64[np.ndarray, "*shape"]
    weights: Int32[np.ndarray, "*shape"]


@dataclass(frozen=True)
class EpochPlan:
    """Who reads what, when, in every epoch: frozen, and the same on every rank.

    Rank ``r`` reads ``order[r::num_replicas]`` in batches of `batch_size`, torch's interleaving:
    row ``j`` of step ``t`` on rank ``r`` is place ``(t * batch_size + j) * num_replicas + r`` of
    the order, so that one step over all ranks is a contiguous run of it. Past the data, ids repeat
    from the order's start; `tail` decides what they weigh.

    ==========  ====================================  ===========================================
    `tail`      slots beyond the data                 an epoch is
    ==========  ====================================  ===========================================
    "mask"      repeated ids at weight 0              every id exactly once
    "repeat"    repeated ids at weight 1, as torch    every id at least once
    "drop"      cut, to whole steps of all ranks      no copies, up to a step's rows left out
    ==========  ====================================  ===========================================

    Args:
        num_examples: length of the dataset, at most ``2**62``.
        num_replicas: number of data-parallel ranks.
        batch_size: rows per rank and step.
        shuffle: whether an epoch has an order of its own; otherwise ids are read as they come.
        seed: chooses the orders; an integer in ``[-2**63, 2**64)``.
        tail: "mask", "repeat" or "drop".
        order: "keyed", at the cost of the rows asked for; or "torch", exactly torch's, for which
            the epoch's whole order is made once and kept.

    Raises:
        TypeError: an argument is of another type.
        ValueError: an argument is out of range, or unknown.

    Example:
        >>> plan = EpochPlan(47, num_replicas=3, batch_size=8)
        >>> plan.steps_per_epoch, plan.num_samples, plan.accepted(0), plan.accepted(1)
        (2, 16, 24, 23)
        >>> plan.batch(epoch=0, step=1).weights[2]
        array([1, 1, 1, 1, 1, 1, 1, 0], dtype=int32)
    """

    num_examples: int
    num_replicas: int
    batch_size: int
    _: KW_ONLY
    shuffle: bool = True
    seed: int = 0
    tail: Tail = "mask"
    order: Order = "keyed"

    def __post_init__(self) -> None:
        checked = {
            "num_examples": check_integer(
                "EpochPlan: num_examples",
                self.num_examples,
                0,
                MAX_EXAMPLES,
                "be an integer in [0, 2**62]",
            ),
            "num_replicas": check_integer(
                "EpochPlan: num_replicas",
                self.num_replicas,
                1,
                2**31,
                "be an integer of at least 1",
                "It is the number of data-parallel ranks.",
            ),
            "batch_size": check_integer(
                "EpochPlan: batch_size",
                self.batch_size,
                1,
                2**31,
                "be an integer of at least 1",
                "It is the number of rows per rank and step.",
            ),
            "seed": check_seed("EpochPlan: seed", self.seed),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        if not isinstance(self.shuffle, bool):
            raise TypeError(f"EpochPlan: shuffle must be True or False, got {self.shuffle!r}.")
        if self.tail not in get_args(Tail):
            raise ValueError(
                f'EpochPlan: tail must be "mask", "repeat" or "drop", got {self.tail!r}.'
                ' "mask" keeps every id once.'
            )
        if self.order not in get_args(Order):
            raise ValueError(
                f'EpochPlan: order must be "keyed" or "torch", got {self.order!r}.'
                ' "torch" is for the exact order of torch\'s sampler.'
            )

    @property
    def num_samples(self) -> int:
        """Slots per rank and epoch, before short last batches are filled."""
        if self.tail == "drop":
            return self.steps_per_epoch * self.batch_size
        return -(-self.num_examples // self.num_replicas)

    @property
    def steps_per_epoch(self) -> int:
        """Steps of every rank in an epoch: the same number on all of them."""
        rows = self.num_replicas * self.batch_size
        if self.tail == "drop":
            return self.num_examples // rows
        return -(-self.num_examples // rows)

    @property
    def accepted_per_epoch(self) -> int:
        """Slots of weight 1 in an epoch, over all ranks: they come first in the order."""
        if self.tail == "mask":
            return self.num_examples
        return self.num_samples * self.num_replicas

    def accepted(self, step: int) -> int:
        """Slots of weight 1 in one step, over all ranks, in closed form.

        Args:
            step: a step in ``[0, steps_per_epoch)``.

        Raises:
            ValueError: the epoch has no such step.
        """
        rows = self.num_replicas * self.batch_size
        before = self._step("EpochPlan.accepted: step", step) * rows
        return max(0, min(self.accepted_per_epoch - before, rows))

    def slots(self, epoch: int, rank: int, *, start: int = 0, stop: int | None = None) -> Slots:
        """One rank's slots of an epoch, or a run of them.

        Args:
            epoch: the epoch, at least 0.
            rank: a rank in ``[0, num_replicas)``.
            start: first slot of this rank to return.
            stop: the slot to stop before; `num_samples` by default.

        Returns:
            Slots of shape ``[stop - start]``, in reading order.

        Raises:
            ValueError: the plan has no such epoch, rank or slots.
        """
        rank = self._rank("EpochPlan.slots: rank", rank)
        last = self.num_samples
        stop = last if stop is None else stop
        stop = check_integer("EpochPlan.slots: stop", stop, 0, last, f"be in [0, {last}]")
        start = check_integer("EpochPlan.slots: start", start, 0, stop, f"be in [0, {stop}]")
        rows = self._rows("EpochPlan.slots: epoch", epoch, np.array([rank]), start, stop)
        return Slots(rows.ids[0], rows.weights[0])

    def batch(self, epoch: int, step: int, ranks: Sequence[int] | None = None) -> Slots:
        """The slots of one step: always full, so that a compiled step sees one shape.

        The rows that fill a short last batch weigh 0.

        Args:
            epoch: the epoch, at least 0.
            step: a step in ``[0, steps_per_epoch)``.
            ranks: the ranks whose rows are wanted; all by default.

        Returns:
            Slots of shape ``[len(ranks), batch_size]``.

        Raises:
            ValueError: the plan has no such epoch, step or rank.
        """
        start = self._step("EpochPlan.batch: step", step) * self.batch_size
        if ranks is None:
            wanted = np.arange(self.num_replicas)
        else:
            wanted = np.array([self._rank("EpochPlan.batch: ranks", r) for r in ranks], np.int64)
        return self._rows("EpochPlan.batch: epoch", epoch, wanted, start, start + self.batch_size)

    def _rows(self, argument, epoch, ranks, start: int, stop: int) -> Slots:
        """Rows `start` to `stop` of some ranks, past the epoch's end too, as [ranks, rows]."""
        epoch = check_integer(
            argument, epoch, 0, 2**63, "be an integer of at least 0", "Epochs count from 0."
        )
        places = np.arange(start, stop) * self.num_replicas + ranks[:, None]
        # A row past the last slot is fill, even where the data, repeated, would reach that far.
        weights = (places < self.accepted_per_epoch).astype(np.int32)
        beyond = places >= self.num_examples
        if beyond.any():
            places[beyond] %= self.num_examples
        return Slots(self._ids(epoch, places), weights)

    def _ids(self, epoch: int, places: Int64[np.ndarray, "*shape"]) -> Int64[np.ndarray, "*shape"]:
        if not self.shuffle:
            return places
        if self.order == "torch":
            return _whole_torch_order(self.num_examples, self.seed + epoch)[places]
        return keyed_order(places, self.num_examples, seed=self.seed, epoch=epoch)

    def _step(self, argument: str, step: int) -> int:
        steps = self.steps_per_epoch
        return check_integer(
            argument,
            step,
            0,
            steps - 1,
            f"be in [0, {steps})",
            f"An epoch of this plan has {steps} steps.",
        )

    def _rank(self, argument: str, rank: int) -> int:
        ranks = self.num_replicas
        return check_integer(
            argument,
            rank,
            0,
            ranks - 1,
            f"be in [0, {ranks})",
            f"Ranks count from zero; the last of {ranks} replicas is rank {ranks - 1}.",
        )


@lru_cache(maxsize=2)  # one for training, one for evaluation: an order is 8 bytes an example
def _whole_torch_order(num_examples: int, seed: int) -> Int64[np.ndarray, " num_examples"]:
    order = torch_order(num_examples, seed)
    order.flags.writeable = False
    return order
