"""A plan's steps as batches of ids: the `batch_sampler=` of torch's DataLoader."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float32, Int32

from jax_ddp_weighting._arguments import check_rank, check_up_to
from jax_ddp_weighting.sampling.budget import BudgetPlan
from jax_ddp_weighting.sampling.kinds import Plan, check_any_plan, count_steps
from jax_ddp_weighting.sampling.packed_rows import NO_SEQUENCE
from jax_ddp_weighting.sampling.packing import PackedPlan
from jax_ddp_weighting.sampling.plan import EpochPlan
from jax_ddp_weighting.sampling.reading import Reader
from jax_ddp_weighting.sampling.resuming import make_state, read_state


class DistributedBatchSampler:
    """One rank's batches of ids, step by step, for ``DataLoader(dataset, batch_sampler=...)``.

    The rule: a batch holds the ids of the plan's slots that count. So every id comes as often as
    the plan says; a batch may be short, and where a rank has none of a step's rows, it has one
    step less than others. With ``padding=True`` every batch is full and every rank has every step,
    and what a row weighs must be asked: `weights(step)`. The plan's own weights, if it has any,
    must be asked for too. Steps of a `BudgetPlan` differ in their shapes, and the one that a rank
    may have no rows of lies anywhere: ranks that train in step need ``padding=True`` there.

    Rows of a `BudgetPlan` are padded to the length of their step, which only the plan knows: with
    ``lengths=True`` each comes as ``(id, length)``, and the data set pads it. A row of a
    `PackedPlan` is the list of its sequences' ids, for `pack_rows`; it is empty where it only
    fills a step.

    Args:
        plan: who reads what: a plan of any kind.
        rank: a rank of the plan.
        padding: whether batches hold the rows of weight 0 that fill them.
        lengths: whether each row comes with the length that it is padded to; an `EpochPlan` knows
            none.

    Raises:
        TypeError: `plan` is no plan, or the rank no integer.
        ValueError: the plan has no such rank, or no lengths.

    Example:
        >>> plan = EpochPlan(5, num_replicas=2, batch_size=2, shuffle=False)
        >>> list(DistributedBatchSampler(plan, rank=1))
        [[1, 3]]
        >>> full = DistributedBatchSampler(plan, rank=1, padding=True)
        >>> list(full), full.weights(step=1)
        ([[1, 3], [0, 2]], array([0, 0], dtype=int32))
        >>> plan = BudgetPlan([3, 5, 2, 9, 4, 2], num_replicas=1, budget=12, shapes=3)
        >>> list(DistributedBatchSampler(plan, rank=0, lengths=True))
        [[(3, 9)], [(2, 3), (5, 3), (0, 3)], [(1, 5), (4, 5)]]
    """

    def __init__(
        self, plan: Plan, rank: int, *, padding: bool = False, lengths: bool = False
    ) -> None:
        check_any_plan("DistributedBatchSampler: plan", plan)
        if lengths and isinstance(plan, EpochPlan):
            raise ValueError(
                "DistributedBatchSampler: lengths must be False where the plan has none, got True"
                " with an EpochPlan. A BudgetPlan and a PackedPlan have lengths."
            )
        self.plan = plan
        self.rank = check_rank("DistributedBatchSampler: rank", rank, plan.num_replicas)
        self.padding = padding
        self.lengths = lengths
        self.epoch = 0 if plan.only_epoch is None else plan.only_epoch
        self._rest: Plan | None = None  # what was loaded, until it is read
        self._begun: tuple[Plan, int] | None = None  # the plan of a pass, and its epoch
        self._read = 0  # batches of that pass; -1 when it has ended
        self._reader = Reader()

    @property
    def num_replicas(self) -> int:
        """Number of ranks."""
        return self.plan.num_replicas

    @property
    def batch_size(self) -> int:
        """Rows of a full batch; the most of any where steps differ in it."""
        return self.plan.batch_size

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next pass reads; from its start, unless it was resumed.

        Raises:
            TypeError: the epoch is no integer.
            ValueError: the plan has no such epoch.
        """
        self.epoch = self.plan.check_epoch("DistributedBatchSampler.set_epoch", epoch)

    def __len__(self) -> int:
        """Batches of the next pass."""
        return len(self._find_steps(self._find_plan(), self.epoch))

    def _find_steps(self, plan: Plan, epoch: int) -> Sequence[int]:
        """The steps of the plan that this rank has batches of."""
        if self.padding:
            return range(count_steps(plan, epoch))
        if isinstance(plan, BudgetPlan):
            return np.flatnonzero(plan.accepted_by(epoch, self.rank)).tolist()
        # those of other plans end with the last step
        return range(-(-_count_accepted(plan, epoch, self.rank) // plan.batch_size))

    def _find_plan(self) -> Plan:
        rest = self._rest
        return self.plan if rest is None or rest.only_epoch != self.epoch else rest

    def __iter__(self) -> Iterator[list[Any]]:
        return self._make_batches(self._find_plan(), self.epoch)

    def _make_batches(self, plan: Plan, epoch: int) -> Iterator[list[Any]]:
        mine = self._begun = (plan, epoch)
        self._rest, self._read = None, 0
        self._reader.note()
        for number, step in enumerate(self._find_steps(plan, epoch)):
            batch = self._make_batch(plan, epoch, step)
            if self._begun is mine:
                self._read = number + 1
            yield batch
        if self._begun is mine:  # where others have a step more, this rank has read it too
            self._reader.note_end()
            self._read = -1

    def _make_batch(self, plan: Plan, epoch: int, step: int) -> list[Any]:
        slots = plan.batch(epoch, step, ranks=[self.rank])
        rows = slots.ids[0].tolist()
        if isinstance(plan, PackedPlan):
            rows = [[i for i in row if i != NO_SEQUENCE] for row in rows]
        rows = rows[: self._count_rows(plan, epoch, step)]
        return [(row, slots.length) for row in rows] if self.lengths else rows

    def _count_rows(self, plan: Plan, epoch: int, step: int) -> int | None:
        """How many of a step's rows are handed out; None for all."""
        # Rows of weight 0 that the plan's own weights make are no padding: they keep their place.
        if self.padding:
            return None
        if isinstance(plan, BudgetPlan):
            return int(plan.accepted_by(epoch, self.rank, steps=[step])[0])
        return _count_accepted(plan, epoch, self.rank) - step * plan.batch_size

    def weights(
        self, step: int
    ) -> Int32[np.ndarray, " rows"] | Float32[np.ndarray, " rows"] | Int32[np.ndarray, "rows most"]:
        """What the rows of a batch weigh, of the pass under way, or else of the next.

        Args:
            step: which batch, from 0, of the pass: after a resume the first that was left.

        Returns:
            Weights ``[rows]`` of that batch: int32, or float32 where the plan has its own. Of a
            `PackedPlan` int32 ``[rows, most]``: of each sequence of a row.

        Raises:
            ValueError: the pass has no such batch.
        """
        plan, epoch = self._begun or (self._find_plan(), self.epoch)
        if epoch != self.epoch or self._rest is not None:
            plan, epoch = self._find_plan(), self.epoch
        argument = "DistributedBatchSampler.weights: step"
        steps = self._find_steps(plan, epoch)
        step = steps[check_up_to(argument, step, len(steps) - 1, "Batches count from 0.")]
        weights = plan.batch(epoch, step, ranks=[self.rank]).weights[0]
        return weights[: self._count_rows(plan, epoch, step)]

    def state_dict(self, *, consumed: int | None = None) -> dict[str, Any]:
        """Where the sampler is, for any number of ranks, as a `DistributedSampler` says it.

        Args:
            consumed: batches that training has really used since the pass began. Needed where
                batches are read ahead, as by a loader with workers or by `join_batches`; those
                yielded by default.

        Raises:
            ValueError: `consumed` is more than there are or were read; or it is not given where
                batches were read ahead, and so would be lost; or without padding a rank had no rows
                of a step in the middle, so that ranks are at different steps.
        """
        argument = "DistributedBatchSampler.state_dict: consumed"
        begun = self._begun
        if begun is None or begun[1] != self.epoch or self._rest is not None:
            plan, read = self._find_plan(), 0
        else:
            plan, read = begun[0], self._read
            ahead = self._reader.find_ahead()
            if consumed is None and ahead is not None:
                raise ValueError(
                    f"{argument} must be given where batches are read ahead of training, here by"
                    f" {ahead}, got None. It counts the batches that were used since the pass"
                    " began. Between epochs, call set_epoch first."
                )
        steps, every = self._find_steps(plan, self.epoch), count_steps(plan, self.epoch)
        if consumed is not None:
            remedy = "It counts this rank's batches since the pass began."
            given = check_up_to(argument, consumed, every, remedy)
            if begun is not None and plan is begun[0] and 0 <= read < given:
                raise ValueError(
                    f"{argument} must be at most what was read, {read}, got {given}. {remedy}"
                )
            read = given
        # read up to behind the last batch: a step that this rank has no rows of is others' to read
        behind = every if read < 0 else steps[read - 1] + 1 if 0 < read <= len(steps) else read
        if 0 < read < every and not self.padding and isinstance(plan, BudgetPlan):
            self._check_in_step(plan, behind)
        return make_state(self.plan, self.epoch, plan.position(behind))

    def _check_in_step(self, plan: BudgetPlan, behind: int) -> None:
        last = plan.num_replicas - 1  # the first to go without rows
        rows = plan.accepted_by(self.epoch, last, steps=range(behind))
        if not rows.all():
            raise ValueError(
                "DistributedBatchSampler.state_dict: padding must be True where a rank has no rows"
                f" of a step in the middle, got False and step {int(np.argmin(rows))} without rows"
                f" for rank {last}. Ranks that have read equally many batches are at different"
                " steps, and no position is theirs."
            )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to where a state was saved: the next pass reads the rest of that epoch.

        The state may be of any rank, of any number of ranks and rows, and of a `DistributedSampler`
        of the same order. Only steps of a `BudgetPlan` hang on its ranks and its budget: to go on
        with others, make the sampler of ``plan.resumed(epoch, position, num_replicas=...)``.

        Raises:
            TypeError: the state is no mapping, or a number in it is none.
            ValueError: the state is of another order. Nothing was changed then.
        """
        epoch, position = read_state("DistributedBatchSampler", self.plan, state)
        rest = self.plan.resumed(epoch, position) if position else None
        self.epoch, self._rest, self._begun, self._read = epoch, rest, None, 0

    def __repr__(self) -> str:
        return (
            f"DistributedBatchSampler({self.plan!r}, rank={self.rank}, padding={self.padding},"
            f" lengths={self.lengths}, epoch={self.epoch})"
        )


def _count_accepted(plan: EpochPlan | PackedPlan, epoch: int, rank: int) -> int:
    """Rows of one rank that hold something."""
    if isinstance(plan, PackedPlan):
        return plan.dealt_rows(epoch).accepted_by(rank)
    return plan.accepted_by(rank)
