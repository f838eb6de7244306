"""Plans by tokens, and packed rows, behind torch's DataLoader and grain: on all ranks alike."""

import grain
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from jax_ddp_weighting import BudgetPlan, PackedPlan, audit_ids, pack_rows

LENGTHS = np.random.default_rng(0).integers(1, 40, 83)
RANKS = 3


class Padded(Dataset):
    """Examples by (id, length): a batch sampler may hand out whatever the data set takes."""

    def __len__(self):
        return len(LENGTHS)

    def __getitem__(self, asked):
        i, length, weight = asked
        row = torch.zeros(length, dtype=torch.int64)
        row[: LENGTHS[i]] = int(i) + 1
        return {"tokens": row, "id": int(i), "weight": int(weight)}


class StepsOfRank:
    """A plan's steps as a `batch_sampler=`."""

    def __init__(self, plan, rank, epoch):
        self.plan, self.rank, self.epoch = plan, rank, epoch

    def __len__(self):
        return self.plan.steps_per_epoch(self.epoch)

    def __iter__(self):
        for step in range(len(self)):
            slots = self.plan.batch(self.epoch, step, [self.rank])
            rows = zip(slots.ids[0].tolist(), slots.weights[0].tolist(), strict=True)
            yield [(i, slots.length, weight) for i, weight in rows]


def loader_of(plan, rank, **options):
    return DataLoader(Padded(), batch_sampler=StepsOfRank(plan, rank, 2), **options)


def test_torchs_loader_reads_a_budget_plan():
    plan = BudgetPlan(LENGTHS, RANKS, 160, shapes=3)
    read = [list(loader_of(plan, rank)) for rank in range(RANKS)]
    for step, batches in enumerate(zip(*read, strict=True)):
        assert {tuple(batch["tokens"].shape) for batch in batches} == {plan.shape(2, step)}
        for rank, batch in enumerate(batches):
            slots = plan.batch(2, step)
            assert batch["id"].tolist() == slots.ids[rank].tolist()
            held = (batch["tokens"] > 0).sum(1).tolist()
            assert held == LENGTHS[slots.ids[rank]].tolist()
    ids, weights = (
        [[batch[name].numpy() for batch in batches] for batches in read]
        for name in ("id", "weight")
    )
    audit_ids(ids, len(LENGTHS), weights=weights).check_exactly_once()


def test_a_worker_reads_the_same():
    plan = BudgetPlan(LENGTHS, RANKS, 160, shapes=3)
    # not forked, since JAX has threads in this process
    worked = loader_of(plan, 1, num_workers=1, multiprocessing_context="spawn")
    for ours, theirs in zip(loader_of(plan, 1), worked, strict=True):
        assert torch.equal(ours["tokens"], theirs["tokens"])
        assert torch.equal(ours["weight"], theirs["weight"])


def test_grain_reads_a_budget_plan_and_goes_on_from_its_state():
    plan = BudgetPlan(LENGTHS, RANKS, 160, shapes=3)

    def fetch(step):
        slots = plan.batch(1, step, [1])
        return {"ids": slots.ids[0], "weights": slots.weights[0], "length": slots.length}

    def iterator():
        source = grain.MapDataset.range(plan.steps_per_epoch).map(fetch)
        return iter(source.to_iter_dataset())

    whole = list(iterator())
    assert [(len(each["ids"]), each["length"]) for each in whole] == [
        plan.shape(1, step) for step in range(plan.steps_per_epoch)
    ]
    stopped = iterator()
    for _ in range(4):
        next(stopped)
    resumed = iterator()
    resumed.set_state(stopped.get_state())
    for ours, theirs in zip(whole[4:], resumed, strict=True):
        np.testing.assert_array_equal(ours["ids"], theirs["ids"])


def test_grain_reads_packed_rows():
    plan = PackedPlan(LENGTHS, RANKS, 2, 96)
    tokens = []
    for rank in range(RANKS):

        def fetch(step, rank=rank):
            slots = plan.batch(0, step, [rank])
            return pack_rows(slots.ids[0], lambda i: np.full(LENGTHS[i], i + 1), slots.length)

        for rows in grain.MapDataset.range(plan.steps_per_epoch(0)).map(fetch):
            assert rows.tokens.shape == (2, 96)
            tokens += rows.tokens[rows.segment_ids > 0].tolist()
    assert sorted(tokens) == np.repeat(np.arange(83) + 1, LENGTHS).tolist()
