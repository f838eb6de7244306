"""Who reads what: one epoch's grid of slots, the same on every rank, made a part at a time."""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from jaxtyping import Float, Int64, Integer

from jax_ddp_weighting._arguments import (
    check_below,
    check_epoch,
    check_integer,
    check_length,
    check_limit,
    check_num_replicas,
    check_rank,
    check_seed,
    check_up_to,
)
from jax_ddp_weighting.sampling.audit import LISTED, EpochAudit
from jax_ddp_weighting.sampling.block import Block
from jax_ddp_weighting.sampling.epoch_order import EpochOrder, Order
from jax_ddp_weighting.sampling.example_weights import ExampleWeights
from jax_ddp_weighting.sampling.order import GivenOrder
from jax_ddp_weighting.sampling.order_functions import CalledOrder, OrderFunction
from jax_ddp_weighting.sampling.plan_options import Tail, check_epoch_of, check_shuffle, check_tail
from jax_ddp_weighting.sampling.run_audit import Run, count_run, walk_run
from jax_ddp_weighting.sampling.slots import Slots

_PLACES = "It counts places of the epoch's order."


@dataclass(frozen=True)
class EpochPlan:
    """Who reads what, when, in every epoch: frozen, and the same on every rank.

    Rank ``r`` reads ``order[r::num_replicas]`` in batches of `batch_size`, torch's interleaving:
    row ``j`` of step ``t`` on rank ``r`` is place ``(t * batch_size + j) * num_replicas + r`` of
    the order, so that one step over all ranks is a contiguous run of it. Past the data, ids repeat
    from the order's start; `tail` decides what they weigh.

    | `tail`   | slots beyond the data               | an epoch is                              |
    |----------|-------------------------------------|------------------------------------------|
    | "mask"   | repeated ids at weight 0            | every id exactly once                    |
    | "repeat" | repeated ids at weight 1, as torch  | every id at least once                   |
    | "drop"   | cut, to whole steps of all ranks    | no copies, less than a step left out     |

    Args:
        num_examples: length of the dataset, at most ``2**62``.
        num_replicas: number of data-parallel ranks.
        batch_size: rows per rank and step.
        shuffle: whether an epoch has an order of its own; otherwise ids are read as they come.
        seed: chooses the orders; an integer in ``[-2**63, 2**64)``.
        tail: "mask", "repeat" or "drop".
        order: "keyed", at the cost of the rows asked for; or "torch", exactly torch's, for which
            the epoch's whole order is made once and kept. `from_order` takes one of your own.

        start: places of the order that were read before, see `resumed`: rank ``r`` reads
            ``order[start:][r::num_replicas]``, and "an epoch" is the rest of one.
        only_epoch: the one epoch that `start` belongs to; any epoch where it is None.
        weights: a weight for each example, ``[num_examples]``, finite and at least 0, as for
            importance or to balance classes: what a slot weighs that would weigh 1. An example of
            weight 0 keeps its slots, and is accepted in none. All 1 by default.

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
    order: Order | GivenOrder | CalledOrder = "keyed"
    start: int = 0
    only_epoch: int | None = None
    weights: Any = None

    def __post_init__(self) -> None:
        remedy = "It is the number of rows per rank and step."
        checked = {
            "num_examples": check_length("EpochPlan: num_examples", self.num_examples),
            "num_replicas": check_num_replicas("EpochPlan: num_replicas", self.num_replicas),
            "batch_size": check_integer("EpochPlan: batch_size", self.batch_size, 1, 2**31, remedy),
            "seed": check_seed("EpochPlan: seed", self.seed),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        check_shuffle("EpochPlan", self.shuffle)
        check_tail("EpochPlan", self.tail)
        if self.weights is not None:
            own = ExampleWeights.of(self.weights, self.num_examples, "EpochPlan: weights")
            object.__setattr__(self, "weights", own)
        _ = self._order  # which checks itself
        self._check_start()

    def _check_start(self) -> None:
        start = check_up_to("EpochPlan: start", self.start, self.epoch_length, _PLACES)
        object.__setattr__(self, "start", start)
        if self.only_epoch is not None:
            epoch = check_epoch("EpochPlan: only_epoch", self.only_epoch)
            object.__setattr__(self, "only_epoch", epoch)
        elif start:  # every later epoch would lose the same places, without a word
            raise ValueError(
                f"EpochPlan: only_epoch must be given with a start, got start={start} alone. Write"
                " plan.resumed(epoch, position)."
            )

    @classmethod
    def from_order(
        cls,
        ids: Integer[np.ndarray, "..."] | Sequence[int] | OrderFunction,
        num_replicas: int,
        batch_size: int,
        *,
        num_examples: int | None = None,
        tail: Tail = "mask",
        repeats: bool = False,
        weights: Float[np.ndarray, "..."] | Sequence[float] | None = None,
    ) -> "EpochPlan":
        """A plan over an order of your own: weighted, mixed, grouped by length, a subset.

        It is sharded, and its tail treated, by the rules of every other plan. An array is kept as
        given, and every epoch reads it; a function gives each epoch its own ids. It is called once
        for an epoch in a process (again for one that is long past), must return as many ids as for
        epoch 0, which it is asked for at once, and the same ones on every rank: `check_agreement`
        and `batches` compare them. See `weighted_order`, `grouped_order` and `mixture_order`.

        Args:
            ids: integer ids of shape ``[entries]``, in reading order; or a function of the epoch
                that returns them. To be pickled, or sent to a loader's workers, it must not be a
                lambda.
            num_replicas: number of data-parallel ranks.
            batch_size: rows per rank and step.
            num_examples: length of the dataset that the ids point into; ``len(ids)`` by default,
                or what the function says.
            tail: "mask", "repeat" or "drop", of the order's end.
            repeats: allow an id to come several times, as where one draws with replacement.
            weights: a weight for each example, as for an `EpochPlan`.

        Returns:
            An `EpochPlan` whose order is `ids`.

        Raises:
            TypeError: ids are no integers, or another argument is of another type.
            ValueError: ids are out of range, or come twice unasked; or a function returned another
                number of ids than before, or others for the same epoch.

        Example:
            >>> plan = EpochPlan.from_order([7, 3, 5], 2, 2, num_examples=10)
            >>> plan.batch(epoch=0, step=0).ids.tolist()
            [[7, 5], [3, 7]]
            >>> plan.audit(0).omitted
            (0, 1, 2, 4, 6, 8, 9)
            >>> plan = EpochPlan.from_order(lambda epoch: np.roll(np.arange(4), epoch), 2, 2)
            >>> [plan.batch(epoch, step=0).ids.tolist() for epoch in (0, 1)]
            [[[0, 2], [1, 3]], [[3, 1], [0, 2]]]
        """
        if num_examples is not None:
            num_examples = check_length("EpochPlan.from_order: num_examples", num_examples)
        if callable(ids):
            order = CalledOrder(ids, repeats, num_examples)
            length = order.num_examples
        else:
            order = GivenOrder(ids, repeats)
            length = len(order.ids) if num_examples is None else num_examples
        assert length is not None
        shuffle = isinstance(order, CalledOrder)  # whether epochs have orders of their own
        options: dict[str, Any] = {"tail": tail, "order": order, "weights": weights}
        return cls(length, num_replicas, batch_size, shuffle=shuffle, **options)

    def resumed(
        self,
        epoch: int,
        position: int,
        *,
        num_replicas: int | None = None,
        batch_size: int | None = None,
    ) -> "EpochPlan":
        """The plan for the rest of an epoch, on any number of ranks and in batches of any size.

        What is left of the order is dealt out anew from its first place on, in its own order: with
        ``tail="mask"``, what was read before and what this plan reads is every id once. The epochs
        after it are those of the whole plan, with the new numbers.

        Args:
            epoch: the epoch that was stopped; the plan knows no other.
            position: how many places of the epoch's order have been read, from `position`, or as
                the state of a `DistributedSampler` has it.
            num_replicas: number of ranks from now on; as before by default.
            batch_size: rows per rank and step from now on; as before by default.

        Returns:
            An `EpochPlan` whose steps count from 0 again.

        Raises:
            TypeError: a number is none.
            ValueError: the order has no such position, or a number is out of range.

        Example:
            >>> plan = EpochPlan(16, num_replicas=4, batch_size=1, shuffle=False)
            >>> rest = plan.resumed(0, plan.position(step=2), num_replicas=3, batch_size=2)
            >>> rest.batch(epoch=0, step=0).ids.tolist()
            [[8, 11], [9, 12], [10, 13]]
        """
        place = check_up_to("EpochPlan.resumed: position", position, self.epoch_length, _PLACES)
        return replace(
            self,
            start=place,
            only_epoch=epoch,
            num_replicas=self.num_replicas if num_replicas is None else num_replicas,
            batch_size=self.batch_size if batch_size is None else batch_size,
        )

    def position(self, step: int) -> int:
        """Places of the epoch's order that have been read before a step: what to resume from.

        Args:
            step: the next step to read, in ``[0, steps_per_epoch]``.

        Raises:
            ValueError: the epoch has no such step.
        """
        step = check_up_to("EpochPlan.position: step", step, self.steps_per_epoch)
        if step == self.steps_per_epoch:  # what tail="drop" leaves out is no rest either
            return self.epoch_length
        return self.start + step * self.num_replicas * self.batch_size

    @property
    def _left(self) -> int:
        return self.epoch_length - self.start

    @cached_property
    def _order(self) -> EpochOrder:
        return EpochOrder(self.num_examples, self.shuffle, self.seed, self.order)

    @property
    def epoch_length(self) -> int:
        """Entries of an epoch's order: the number of examples, unless the order is your own."""
        return self._order.length

    @property
    def num_samples(self) -> int:
        """Slots per rank and epoch, before short last batches are filled."""
        if self.tail == "drop":  # whole steps, where torch would cut to whole rounds of ranks
            return self.steps_per_epoch * self.batch_size
        return -(-self._left // self.num_replicas)

    @property
    def steps_per_epoch(self) -> int:
        """Steps of every rank in an epoch: the same number on all of them."""
        rows = self.num_replicas * self.batch_size
        if self.tail == "drop":
            return self._left // rows
        return -(-self._left // rows)

    @property
    def accepted_per_epoch(self) -> int:
        """Slots of weight 1 in an epoch, over all ranks: the first places of the order.

        Weights of the plan's own do not change it: slots of weight 0 that they make are in it.
        """
        if self.tail == "mask":
            return self._left
        return self.num_samples * self.num_replicas

    @property
    def fingerprint(self) -> dict[str, Any]:
        """What decides the order and the tail, as plain JSON-able values: not who reads it.

        Where a function of your own gives the orders, that of epoch 0; see `fingerprint_of`.
        """
        return self.fingerprint_of(0)

    def fingerprint_of(self, epoch: int) -> dict[str, Any]:
        """What decides the order and the tail of an epoch, as plain JSON-able values.

        Args:
            epoch: the epoch, whose ids a function of your own is asked for: their digest stands for
                it. Of every other order all epochs have one fingerprint.
        """
        found = {
            "num_examples": self.num_examples,
            "shuffle": self.shuffle,
            "seed": self.seed,
            "order": self._order.describe(epoch),
            "tail": self.tail,
        }
        return found if self.weights is None else found | {"weights": self.weights.digest}

    def accepted(self, step: int) -> int:
        """Slots of weight 1 in one step, over all ranks, in closed form.

        Args:
            step: a step in ``[0, steps_per_epoch)``.

        Raises:
            ValueError: the epoch has no such step.
        """
        # A step is a contiguous run of places, of which those below `accepted_per_epoch` count.
        rows = self.num_replicas * self.batch_size
        before = self._check_step("EpochPlan.accepted: step", step) * rows
        return max(0, min(self.accepted_per_epoch - before, rows))

    def accepted_by(self, rank: int) -> int:
        """Slots of weight 1 in an epoch of one rank, in closed form.

        Args:
            rank: a rank in ``[0, num_replicas)``.

        Raises:
            ValueError: the plan has no such rank.
        """
        rank = check_rank("EpochPlan.accepted_by: rank", rank, self.num_replicas)
        # the places rank, rank + W, rank + 2 W, ... below `accepted`: (accepted - rank) / W, up
        return -((rank - self.accepted_per_epoch) // self.num_replicas)

    def slots(self, epoch: int, rank: int, *, start: int = 0, stop: int | None = None) -> Slots:
        """One rank's slots of an epoch, or a run of them, at the cost of that run.

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
        epoch = self.check_epoch("EpochPlan.slots", epoch)
        rank = check_rank("EpochPlan.slots: rank", rank, self.num_replicas)
        last = self.num_samples
        stop = last if stop is None else stop
        stop = check_up_to("EpochPlan.slots: stop", stop, last)
        start = check_up_to("EpochPlan.slots: start", start, stop)
        rows = self._take_rows(epoch, np.array([rank]), start, stop)
        return Slots(rows.ids[0], rows.weights[0])

    def batch(self, epoch: int, step: int, ranks: Sequence[int] | None = None) -> Slots:
        """The slots of one step: always full, so that a compiled step sees one shape.

        The rows that fill a short last batch weigh 0. In keyed order the cost is that of the rows
        returned, whatever the epoch's length and the step. Who asks for one step after the other is
        given them from blocks of several, made at once: the same rows, for much less.

        Args:
            epoch: the epoch, at least 0.
            step: a step in ``[0, steps_per_epoch)``.
            ranks: the ranks whose rows are wanted; all by default.

        Returns:
            Slots of shape ``[len(ranks), batch_size]``.

        Raises:
            ValueError: the plan has no such epoch, step or rank.
        """
        before: Block | None = self.__dict__.get("_block")
        if before is not None and (found := before.take(epoch, step, ranks)) is not None:
            return Slots(*found)
        epoch = self.check_epoch("EpochPlan.batch", epoch)
        step = self._check_step("EpochPlan.batch: step", step)
        if ranks is None:
            wanted = np.arange(self.num_replicas)
        elif np.ndim(ranks) == 0:
            raise TypeError(
                f"EpochPlan.batch: ranks must be a sequence of ranks, got {ranks}."
                f" Write [{ranks}] for one."
            )
        else:
            some = [check_rank("EpochPlan.batch: ranks", r, self.num_replicas) for r in ranks]
            wanted = np.array(some, np.int64)
        steps = 1
        if before is not None:
            rows = max(len(wanted) * self.batch_size, 1)
            steps = min(before.count_next(epoch, step, ranks, rows), self.steps_per_epoch - step)
        start = step * self.batch_size
        slots = self._take_rows(epoch, wanted, start, start + steps * self.batch_size)
        # Who reads one step after the other is given them from a block of several: most of what a
        # few rows cost are the calls of numpy. Not a field: it is no part of what the plan is.
        block = Block.of(epoch, step, steps, ranks, slots.ids, slots.weights)
        self.__dict__["_block"] = block
        return Slots(*block.copy_step(0))

    def __getstate__(self) -> dict[str, Any]:
        """What is pickled and copied: the fields, and nothing that is made of them."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    def audit(self, epoch: int, *, limit: int = LISTED) -> EpochAudit:
        """What the slots of an epoch cover, in closed form, without walking them.

        Equal to `audit_ids` of the `slots` of all ranks; an order of your own, and weights, are
        walked. Where more ids are concerned than `limit`,
        those that the order names first are listed.

        Args:
            epoch: the epoch, at least 0.
            limit: how many ids of a kind to list; the rest are counted.

        Returns:
            An `EpochAudit`.

        Raises:
            ValueError: there is no such epoch.
        """
        epoch = self.check_epoch("EpochPlan.audit", epoch)
        limit = check_limit("EpochPlan.audit: limit", limit)
        run = Run(self._order, self.start, self.accepted_per_epoch, self.num_replicas)
        if not isinstance(self.order, str) or self.weights is not None:
            found = walk_run(run, epoch, self.weights, limit)
        else:
            found = count_run(run, epoch, limit)
        return replace(
            found, slots=self.num_samples * self.num_replicas, remedy=self._find_remedy()
        )

    def _find_remedy(self) -> str | None:
        """What helps where an epoch does not hold every id once; None where it is the tail's."""
        if self.start:
            return (
                f"This plan is the rest of an epoch, from place {self.start} of its order on; a"
                " Ledger counts it together with what was read before."
            )
        order = self.order
        if not isinstance(order, str) and (order.repeats or order.length < self.num_examples):
            return "An order of your own is read as it is; name every id in it once."
        if self.weights is not None:
            return "An example of weight 0 is not accepted; weights above 0 accept all."
        return None

    def _take_rows(
        self, epoch: int, ranks: Int64[np.ndarray, " ranks"], start: int, stop: int
    ) -> Slots:
        """Rows `start` to `stop` of some ranks, past the epoch's end too, as ``[ranks, rows]``."""
        places = np.arange(start, stop) * self.num_replicas + ranks[:, None]
        weights = (places < self.accepted_per_epoch).astype(np.int32)
        places += self.start
        # a division for each row, and only the last step has any beyond the end
        beyond = places >= self.epoch_length
        if beyond.any():
            places[beyond] %= self.epoch_length
        ids = self._order.look_up(epoch, places)
        if self.weights is not None:
            weights = np.where(weights > 0, self.weights.values[ids], np.float32(0))
        return Slots(ids, weights)

    def check_epoch(self, function: str, epoch: int) -> int:
        """`epoch` as a Python int, if this plan has it; `function` is who asks."""
        epoch = check_epoch_of(self.only_epoch, function, epoch)
        self._order.check_epoch(function, epoch)
        return epoch

    def _check_step(self, argument: str, step: int) -> int:
        steps = self.steps_per_epoch
        return check_below(argument, step, steps, f"An epoch of this plan has {steps} steps.")


def check_plan(argument: str, plan: object) -> None:
    """Raises unless `plan` is one."""
    if not isinstance(plan, EpochPlan):
        raise TypeError(
            f"{argument} must be an EpochPlan, got {type(plan).__name__}. Make one with"
            " EpochPlan(num_examples, num_replicas, batch_size); a sampler's, of one row a step, is"
            " its `plan`."
        )
