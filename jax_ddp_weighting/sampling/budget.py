"""Batches by tokens: every step of one of a few shapes, the same on all ranks, each id once."""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from jaxtyping import Int64

from jax_ddp_weighting._arguments import (
    check_below,
    check_epoch,
    check_integer,
    check_limit,
    check_num_replicas,
    check_rank,
    check_seed,
    check_up_to,
)
from jax_ddp_weighting.sampling.audit import LISTED, EpochAudit, audit_ids
from jax_ddp_weighting.sampling.dealing import Dealing
from jax_ddp_weighting.sampling.layout import Layout
from jax_ddp_weighting.sampling.lengths import (
    check_lengths,
    check_ranks,
    digest_lengths,
)
from jax_ddp_weighting.sampling.order import keyed_order
from jax_ddp_weighting.sampling.padding import PaddingReport, measure_padding
from jax_ddp_weighting.sampling.plan_options import Tail, check_epoch_of, check_shuffle, check_tail
from jax_ddp_weighting.sampling.slots import Slots

_PLACES = "BudgetPlan.position(step) gives one."


class EpochSteps(int):
    """A number of steps that can be asked for by epoch too, as where epochs differ in it."""

    def __call__(self, epoch: int) -> int:
        """The same number: every epoch has so many.

        Raises:
            TypeError: the epoch is no integer.
            ValueError: the epoch is negative.
        """
        check_epoch("BudgetPlan.steps_per_epoch: epoch", epoch)
        return int(self)


@dataclass(frozen=True, eq=False, repr=False)
class BudgetPlan:
    """Batches by tokens over ranks: who reads what, in steps of a few shapes, in every epoch.

    The rule: every step has one shape ``(rows, length)``, the same on all ranks, out of at most
    `shapes`, with ``rows * length <= budget``; every id is read exactly once an epoch. Lengths are
    chosen, by dynamic programming over those that are there, so that padding is least. An epoch's
    order says which of the ids of a shape go together, and when their steps come; it is a function
    of (seed, epoch) alone, the same on every machine. The number of steps is the same in every
    epoch and on every rank.

    Slots to spare are in one step of the shortest shape alone; `tail` decides what they weigh:

    | `tail`   | slots beyond the data                  | an epoch is                          |
    |----------|----------------------------------------|--------------------------------------|
    | "mask"   | repeated ids at weight 0               | every id exactly once                |
    | "repeat" | repeated ids at weight 1, as torch     | every id at least once               |
    | "drop"   | none: ids that fill no step are left   | no copies, less than a step left out |
    |          | out, others in every epoch             |                                      |

    A shape of eight examples or more has two steps an epoch at least, where it has rows for them.
    So with few examples for the budget, fewer `shapes` make larger steps.

    Args:
        lengths: integers ``[examples]``, each in ``[1, budget]``: how many tokens, frames or nodes
            an example has.
        num_replicas: number of data-parallel ranks.
        budget: how many tokens a rank's step holds at most, padding included.
        shapes: how many shapes there are at most, and so compilations of a step.
        row_multiple: what the rows of every shape are a multiple of, such as microbatches.
        length_multiple: what the lengths of all shapes are a multiple of, as devices like them.
        seed: chooses the orders; an integer in ``[-2**63, 2**64)``.
        shuffle: whether an epoch has an order of its own; otherwise ids are read by length, the
            longest first.
        tail: "mask", "repeat" or "drop".
        start: places of the epoch that were read before, see `resumed`.
        only_epoch: the one epoch that `start` belongs to; any epoch where it is None.
        whole: the plan that this one is the rest of an epoch of.

    Raises:
        TypeError: an argument is of another type.
        ValueError: an argument is out of range, or unknown.

    Example:
        >>> plan = BudgetPlan([3, 5, 2, 9, 4, 2], num_replicas=1, budget=12, shapes=3)
        >>> plan.step_shapes, plan.steps_per_epoch
        (((1, 9), (2, 5), (3, 3)), 3)
        >>> slots = plan.batch(epoch=0, step=1)
        >>> slots.length, slots.ids.tolist(), slots.weights.tolist()
        (3, [[2, 5, 0]], [[1, 1, 1]])
    """

    lengths: Any  # whatever is given; int64[examples] once it is checked
    num_replicas: int
    budget: int
    _: KW_ONLY
    shapes: int = 8
    row_multiple: int = 1
    length_multiple: int = 1
    seed: int = 0
    shuffle: bool = True
    tail: Tail = "mask"
    start: int = 0
    only_epoch: int | None = None
    whole: "BudgetPlan | None" = None

    def __post_init__(self) -> None:
        tokens = "It is the number of tokens of a rank's step, padding included."
        budget = check_integer("BudgetPlan: budget", self.budget, 1, 2**40, tokens)
        compiled = "Each is a compilation of a step."
        checked = {
            "budget": budget,
            "num_replicas": check_num_replicas("BudgetPlan: num_replicas", self.num_replicas),
            "shapes": check_integer("BudgetPlan: shapes", self.shapes, 1, 2**31, compiled),
            "seed": check_seed("BudgetPlan: seed", self.seed),
            "lengths": check_lengths("BudgetPlan", self.lengths, budget, "budget"),
            "row_multiple": check_integer(
                "BudgetPlan: row_multiple", self.row_multiple, 1, 2**31, "1 allows any."
            ),
            "length_multiple": check_integer(
                "BudgetPlan: length_multiple", self.length_multiple, 1, 2**31, "1 allows any."
            ),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        check_shuffle("BudgetPlan", self.shuffle)
        check_tail("BudgetPlan", self.tail)
        longest = self._round_up(int(self.lengths.max(initial=0)))
        if longest * self.row_multiple > budget:
            raise ValueError(
                f"BudgetPlan: budget must hold {self.row_multiple} rows of length {longest}, the"
                f" longest that there is, got {budget}. Give a larger budget, or smaller"
                " row_multiple and length_multiple."
            )
        self._check_start()

    def _round_up(self, length: int) -> int:
        return -(-length // self.length_multiple) * self.length_multiple

    def _check_start(self) -> None:
        if self.only_epoch is not None:
            epoch = check_epoch("BudgetPlan: only_epoch", self.only_epoch)
            object.__setattr__(self, "only_epoch", epoch)
        if (self.whole is None) != (self.only_epoch is None) or (
            self.whole is None and self.start != 0
        ):
            raise ValueError(
                "BudgetPlan: start, only_epoch and whole must be given together, got"
                f" start={self.start} and only_epoch={self.only_epoch}. Write"
                " plan.resumed(epoch, position)."
            )
        if self.whole is not None:
            start = check_up_to("BudgetPlan: start", self.start, self.epoch_length, _PLACES)
            object.__setattr__(self, "start", start)

    def resumed(
        self,
        epoch: int,
        position: int,
        *,
        num_replicas: int | None = None,
        budget: int | None = None,
    ) -> "BudgetPlan":
        """The plan for the rest of an epoch, on any number of ranks and with any budget.

        The rule: what is left is read in the epoch's own order. Each step of the whole plan is
        dealt out anew: to more ranks as one step of fewer rows, to fewer ranks as several, so that
        none is over the budget. The shapes are again as many at most, of the same lengths; what
        such a step has to spare weighs 0, whatever the tail.

        A position is one of the plan that it came from, whose steps hang on its ranks and its
        budget too: make that plan again, as it was, and resume it.

        Args:
            epoch: the epoch that was stopped; the plan knows no other.
            position: how far the epoch was read, from `position` of the plan that read it.
            num_replicas: number of ranks from now on; as before by default.
            budget: tokens of a rank's step from now on; as before by default.

        Returns:
            A `BudgetPlan` whose steps count from 0 again. It can be resumed from in turn.

        Raises:
            TypeError: a number is none.
            ValueError: the epoch has no such position, or a number is out of range.

        Example:
            >>> plan = BudgetPlan([3, 5, 2, 9, 4, 2], num_replicas=1, budget=12, shapes=3)
            >>> rest = plan.resumed(0, plan.position(step=1), num_replicas=2)
            >>> for step in range(rest.steps_per_epoch):
            ...     slots = rest.batch(0, step)
            ...     print(slots.length, slots.ids.tolist(), slots.weights.tolist())
            3 [[2, 0], [5, 2]] [[1, 1], [1, 0]]
            5 [[1], [4]] [[1], [1]]
        """
        place = check_up_to("BudgetPlan.resumed: position", position, self.epoch_length, _PLACES)
        return replace(
            self,
            start=place,
            only_epoch=self.check_epoch("BudgetPlan.resumed", epoch),
            whole=self.epoch_plan(),
            num_replicas=self.num_replicas if num_replicas is None else num_replicas,
            budget=self.budget if budget is None else budget,
        )

    def epoch_plan(self) -> "BudgetPlan":
        """The plan of whole epochs that this one is the rest of; itself where it is whole."""
        return self if self.whole is None else self.whole

    def position(self, step: int) -> int:
        """Places of the epoch that have been read before a step: what to resume from.

        Every step of a whole plan takes `epoch_length / steps_per_epoch` places, whatever its
        shape, so that a position means as much in every epoch.

        Args:
            step: the next step to read, in ``[0, steps_per_epoch]``.

        Raises:
            ValueError: the epoch has no such step.
        """
        step = check_up_to("BudgetPlan.position: step", step, self.steps_per_epoch)
        if step == self.steps_per_epoch:
            return self.epoch_length
        return self._dealing.find_place(step)

    @property
    def num_examples(self) -> int:
        """How many examples there are."""
        return len(self.lengths)

    @property
    def epoch_length(self) -> int:
        """Places of an epoch: where positions end."""
        return self._layout.steps * self._layout.width

    @property
    def steps_per_epoch(self) -> EpochSteps:
        """Steps of every rank in an epoch: an int, that takes an epoch too and is the same then."""
        return EpochSteps(self._dealing.steps)

    @property
    def step_shapes(self) -> tuple[tuple[int, int], ...]:
        """All shapes ``(rows, length)`` that steps have, the longest first: what is compiled."""
        lengths = (group.length for group in self._layout.groups)
        found = zip(self._dealing.rows, lengths, strict=True)
        return tuple(dict.fromkeys(found))

    @property
    def batch_size(self) -> int:
        """The most rows per rank of any step."""
        return max(self._dealing.rows, default=0)

    @property
    def num_samples(self) -> int:
        """Slots per rank and epoch."""
        return self._dealing.num_samples

    @property
    def accepted_per_epoch(self) -> int:
        """Slots of weight 1 in an epoch, over all ranks."""
        return self._dealing.accepted

    def accepted_by(
        self, epoch: int, rank: int, *, steps: Sequence[int] | None = None
    ) -> Int64[np.ndarray, " steps"]:
        """Rows of weight 1 that one rank has in each of some steps.

        Args:
            epoch: the epoch, at least 0.
            rank: a rank in ``[0, num_replicas)``.
            steps: the steps that are asked about; all by default.

        Raises:
            ValueError: the plan has no such epoch or rank.
        """
        epoch = self.check_epoch("BudgetPlan.accepted_by", epoch)
        rank = check_rank("BudgetPlan.accepted_by: rank", rank, self.num_replicas)
        every = np.arange(self.steps_per_epoch) if steps is None else np.array(steps, np.int64)
        return self._dealing.count_accepted(epoch, rank, every)

    @property
    def fingerprint(self) -> dict[str, Any]:
        """What decides the order and the tail, as plain JSON-able values: not who reads it."""
        whole = self.epoch_plan()
        return {
            "num_examples": self.num_examples,
            "shuffle": self.shuffle,
            "seed": self.seed,
            "order": f"by budget {whole.budget} of {whole.num_replicas} ranks in"
            f" {self.shapes} shapes of multiples {self.row_multiple} x {self.length_multiple},"
            f" lengths {self._digest}",
            "tail": self.tail,
        }

    def fingerprint_of(self, epoch: int) -> dict[str, Any]:
        """The same for one epoch: of this plan all epochs have one."""
        return self.fingerprint

    def shape(self, epoch: int, step: int) -> tuple[int, int]:
        """The rows and the length of a step, on every rank.

        Raises:
            ValueError: the plan has no such epoch or step.
        """
        epoch = self.check_epoch("BudgetPlan.shape", epoch)
        step = self._check_step("BudgetPlan.shape: step", step)
        return self._dealing.find_shape(epoch, step)

    def batch(self, epoch: int, step: int, ranks: Sequence[int] | None = None) -> Slots:
        """The slots of one step, at the cost of its rows.

        Args:
            epoch: the epoch, at least 0.
            step: a step in ``[0, steps_per_epoch)``.
            ranks: the ranks whose rows are wanted; all by default.

        Returns:
            Slots of shape ``[len(ranks), rows]``, with the `length` that rows are padded to.

        Raises:
            ValueError: the plan has no such epoch, step or rank.
        """
        epoch = self.check_epoch("BudgetPlan.batch", epoch)
        step = self._check_step("BudgetPlan.batch: step", step)
        wanted = check_ranks("BudgetPlan.batch: ranks", ranks, self.num_replicas)
        return self._dealing.read_step(epoch, step, wanted)

    def slots(self, epoch: int, rank: int) -> Slots:
        """One rank's slots of an epoch, of all steps in order.

        Raises:
            ValueError: the plan has no such epoch or rank.
        """
        epoch = self.check_epoch("BudgetPlan.slots", epoch)
        rank = check_rank("BudgetPlan.slots: rank", rank, self.num_replicas)
        ids, weights = self._dealing.read_steps(epoch, [rank])
        return Slots(ids[0], weights[0])

    def ids_in_order(self, epoch: int) -> Int64[np.ndarray, " ids"]:
        """The ids that count in an epoch, in the order of their places.

        Raises:
            ValueError: the plan has no such epoch.
        """
        epoch = self.check_epoch("BudgetPlan.ids_in_order", epoch)
        ids, weights = self._dealing.read_steps(epoch, range(self.num_replicas))
        return ids.T[weights.T > 0]  # a row on all ranks, then the next

    def audit(self, epoch: int, *, limit: int = LISTED) -> EpochAudit:
        """What the slots of an epoch cover, by `audit_ids` of the slots of all ranks.

        Args:
            epoch: the epoch, at least 0.
            limit: how many ids of a kind to list; the rest are counted.

        Raises:
            ValueError: there is no such epoch.
        """
        epoch = self.check_epoch("BudgetPlan.audit", epoch)
        limit = check_limit("BudgetPlan.audit: limit", limit)
        ids, weights = self._dealing.read_steps(epoch, range(self.num_replicas))
        found = audit_ids(ids, self.num_examples, weights=weights, epoch=epoch, limit=limit)
        if self.whole is None:
            return found
        remedy = (
            f"This plan is the rest of an epoch, from place {self.start} on; a Ledger counts it"
            " together with what was read before."
        )
        return replace(found, remedy=remedy)

    def padding(self, epoch: int = 0) -> PaddingReport:
        """How much of an epoch's steps is padding, beside other ways to batch the same lengths.

        Raises:
            ValueError: the plan has no such epoch.

        Example:
            >>> lengths = np.random.default_rng(0).integers(1, 100, 1000)
            >>> report = BudgetPlan(lengths, num_replicas=2, budget=800, shapes=4).padding()
            >>> f"{report.plan.padding:.2f} in {report.plan.shapes} shapes"
            '0.19 in 4 shapes'
            >>> f"{report.plain.padding:.2f} in {report.plain.shapes} shapes"
            '0.46 in 16 shapes'
        """
        epoch = self.check_epoch("BudgetPlan.padding", epoch)
        order = keyed_order(
            np.arange(self.num_examples), self.num_examples, seed=self.seed, epoch=epoch
        )
        steps = (self.batch(epoch, step) for step in range(self.steps_per_epoch))
        return measure_padding(
            self.lengths, order, steps, self.num_replicas, self.budget, self.shapes
        )

    @cached_property
    def _digest(self) -> str:
        return digest_lengths(self.lengths)

    @cached_property
    def _layout(self) -> Layout:
        if self.whole is not None:
            return self.whole._layout
        return Layout.choose(
            self.lengths,
            self.num_replicas,
            self.budget,
            self.shapes,
            row_multiple=self.row_multiple,
            length_multiple=self.length_multiple,
            seed=self.seed if self.shuffle else None,
            tail=self.tail,
        )

    @cached_property
    def _dealing(self) -> Dealing:
        to_whom = (self.num_replicas, self.budget, self.row_multiple)
        return Dealing(self._layout, *to_whom, self.start, self.only_epoch)

    def _check_step(self, argument: str, step: int) -> int:
        steps = int(self.steps_per_epoch)
        return check_below(argument, step, steps, f"An epoch of this plan has {steps} steps.")

    def check_epoch(self, function: str, epoch: int) -> int:
        """`epoch` as a Python int, if this plan has it; `function` is who asks."""
        return check_epoch_of(self.only_epoch, function, epoch)

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    def _compare(self) -> tuple[Any, ...]:
        return (
            *self.fingerprint.values(),
            *(self.num_replicas, self.budget, self.start, self.only_epoch),
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BudgetPlan) and self._compare() == other._compare()

    def __hash__(self) -> int:
        return hash(self._compare())

    def __repr__(self) -> str:
        rest = "" if self.whole is None else f", start={self.start}, only_epoch={self.only_epoch}"
        return (
            f"BudgetPlan({self.num_examples} lengths, num_replicas={self.num_replicas},"
            f" budget={self.budget}, shapes={self.shapes}, seed={self.seed},"
            f" shuffle={self.shuffle}, tail={self.tail!r}{rest})"
        )
