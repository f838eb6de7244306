"""Plans by tokens, and packed rows, behind torch's DataLoader and grain: on all ranks alike."""

import grain
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from jax_ddp_weighting import BudgetPlan, DistributedBatchSampler, PackedPlan, audit_ids, pack_rows

LENGTHS = np.random.default_rng(0).integers(1, 40, 83)
RANKS = 3


class Padded(Dataset):
    """Examples by (id, length): what a batch sampler hands out with `lengths=True`."""

    def __len__(self):
        return len(LENGTHS)

    def __getitem__(self, asked):
        i, length = asked
        row = torch.zeros(length, dtype=torch.int64)
        row[: LENGTHS[i]] = i + 1
        return {"tokens": row, "id": i}


def loader_of(plan, rank, **options):
    sampler = DistributedBatchSampler(plan, rank, padding=True, lengths=True)
    sampler.set_epoch(2)
    return DataLoader(Padded(), batch_sampler=sampler, **options)


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
    ids = [[batch["id"].numpy() for batch in batches] for batches in read]
    samplers = (loader_of(plan, rank).batch_sampler for rank in range(RANKS))
    weights = [[each.weights(step) for step in range(len(each))] for each in samplers]
    audit_ids(ids, len(LENGTHS), weights=weights).check_exactly_once()


def test_a_worker_reads_the_same():
    plan = BudgetPlan(LENGTHS, RANKS, 160, shapes=3)
    # not forked, since JAX has threads in this process
    worked = loader_of(plan, 1, num_workers=1, multiprocessing_context="spawn")
    for ours, theirs in zip(loader_of(plan, 1), worked, strict=True):
        assert torch.equal(ours["tokens"], theirs["tokens"])
        assert torch.equal(ours["id"], theirs["id"])


class Rows(Dataset):
    """Packed rows by the ids of their sequences."""

    def __len__(self):
        return len(LENGTHS)

    def __getitem__(self, row):
        ids = np.full((1, 20), -1)
        ids[0, : len(row)] = row
        return pack_rows(ids, lambda i: np.full(LENGTHS[i], i + 1), 96).tokens[0]


def test_torchs_loader_reads_packed_rows_of_which_some_are_empty():
    plan, tokens = PackedPlan(LENGTHS, RANKS, 4, 96), []
    for rank in range(RANKS):
        sampler = DistributedBatchSampler(plan, rank, padding=True)
        for rows in DataLoader(Rows(), batch_sampler=sampler):
            assert rows.shape == (4, 96)
            tokens += rows[rows > 0].tolist()
    assert sorted(tokens) == np.repeat(np.arange(83) + 1, LENGTHS).tolist()


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
