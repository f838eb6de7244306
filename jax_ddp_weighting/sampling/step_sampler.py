"""A plan's steps as batches of ids: the `batch_sampler=` of torch's DataLoader."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from jaxtyping import Float32, Int32

from jax_ddp_weighting._arguments import check_rank, check_up_to
from jax_ddp_weighting.sampling.plan import EpochPlan, check_plan
from jax_ddp_weighting.sampling.reading import Reader
from jax_ddp_weighting.sampling.resuming import make_state, read_state


class DistributedBatchSampler:
    """One rank's batches of ids, step by step, for ``DataLoader(dataset, batch_sampler=...)``.

    The rule: a batch holds the ids of the plan's slots that count. So every id comes as often as
    the plan says; a last batch may be short, and where a rank has none of the last step's rows,
    it has one step less than others. With ``padding=True`` every batch is full and every rank has
    every step, and what a row weighs must be asked: `weights(step)`. The plan's own weights, if it
    has any, must be asked for too.

    Args:
        plan: who reads what.
        rank: a rank of the plan.
        padding: whether batches hold the rows of weight 0 that fill them.

    Raises:
        TypeError: `plan` is no plan, or the rank no integer.
        ValueError: the plan has no such rank.

    Example:
        >>> plan = EpochPlan(5, num_replicas=2, batch_size=2, shuffle=False)
        >>> list(DistributedBatchSampler(plan, rank=1))
        [[1, 3]]
        >>> full = DistributedBatchSampler(plan, rank=1, padding=True)
        >>> list(full), full.weights(step=1)
        ([[1, 3], [0, 2]], array([0, 0], dtype=int32))
    """

    def __init__(self, plan: EpochPlan, rank: int, *, padding: bool = False) -> None:
        check_plan("DistributedBatchSampler: plan", plan)
        self.plan = plan
        self.rank = check_rank("DistributedBatchSampler: rank", rank, plan.num_replicas)
        self.padding = padding
        self.epoch = 0 if plan.only_epoch is None else plan.only_epoch
        self._rest: EpochPlan | None = None  # what was loaded, until it is read
        self._begun: tuple[EpochPlan, int] | None = None  # the plan of a pass, and its epoch
        self._read = 0
        self._reader = Reader()

    @property
    def num_replicas(self) -> int:
        """Number of ranks."""
        return self.plan.num_replicas

    @property
    def batch_size(self) -> int:
        """Rows of a full batch."""
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
        return self._count(self._find_plan())

    def _count(self, plan: EpochPlan) -> int:
        if self.padding or plan.tail == "drop":
            return plan.steps_per_epoch
        return -(-plan.accepted_by(self.rank) // plan.batch_size)

    def _find_plan(self) -> EpochPlan:
        rest = self._rest
        return self.plan if rest is None or rest.only_epoch != self.epoch else rest

    def __iter__(self) -> Iterator[list[int]]:
        return self._make_batches(self._find_plan(), self.epoch)

    def _make_batches(self, plan: EpochPlan, epoch: int) -> Iterator[list[int]]:
        mine = self._begun = (plan, epoch)
        self._rest, self._read = None, 0
        self._reader.note()
        # Rows of weight 0 that the plan's own weights make are no padding: they keep their place.
        accepted = plan.accepted_by(self.rank)
        for step in range(self._count(plan)):
            ids = plan.batch(epoch, step, ranks=[self.rank]).ids[0].tolist()
            if not self.padding:
                ids = ids[: accepted - step * plan.batch_size]
            if self._begun is mine:
                self._read = step + 1
            yield ids
        if self._begun is mine:  # where others have a step more, this rank has read it too
            self._read = plan.steps_per_epoch

    def weights(self, step: int) -> Int32[np.ndarray, " rows"] | Float32[np.ndarray, " rows"]:
        """What the rows of a batch weigh, of the pass under way, or else of the next.

        Args:
            step: which batch, from 0, of the pass: after a resume the first that was left.

        Returns:
            Weights ``[rows]`` of that batch: int32, or float32 where the plan has its own.

        Raises:
            ValueError: the pass has no such batch.
        """
        plan, epoch = self._begun or (self._find_plan(), self.epoch)
        if epoch != self.epoch or self._rest is not None:
            plan, epoch = self._find_plan(), self.epoch
        argument = "DistributedBatchSampler.weights: step"
        step = check_up_to(argument, step, self._count(plan) - 1, "Batches count from 0.")
        weights = plan.batch(epoch, step, ranks=[self.rank]).weights[0]
        if self.padding:
            return weights
        return weights[: plan.accepted_by(self.rank) - step * plan.batch_size]

    def state_dict(self, *, consumed: int | None = None) -> dict[str, Any]:
        """Where the sampler is, for any number of ranks, as a `DistributedSampler` says it.

        Args:
            consumed: batches that training has really used since the pass began. Needed where
                batches are read ahead, as by a loader with workers; those yielded by default.

        Raises:
            ValueError: `consumed` is more than there are; or it is not given where batches were
                read ahead, and so would be lost.
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
        if consumed is not None:
            remedy = "It counts this rank's batches since the pass began."
            read = check_up_to(argument, consumed, plan.steps_per_epoch, remedy)
        return make_state(self.plan, self.epoch, plan.position(read))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to where a state was saved: the next pass reads the rest of that epoch.

        The state may be of any rank, of any number of ranks and rows, and of a `DistributedSampler`
        of the same order.

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
            f" epoch={self.epoch})"
        )
