"""Orders, batch samplers and sharded streams through torch's, torchdata's and grain's loaders."""

import copy
from collections import Counter

import grain
import numpy as np
import pytest
import torch
from absl import flags
from torch.utils.data import DataLoader, RandomSampler, SubsetRandomSampler, WeightedRandomSampler
from torch_workers import SPAWN, STOPPED
from torchdata.stateful_dataloader import StatefulDataLoader

from jax_ddp_weighting import (
    DistributedBatchSampler,
    DistributedSampler,
    EpochPlan,
    ShardedIterable,
    grouped_order,
    mixture_order,
    sampler_order,
    weighted_order,
)

# torchdata 0.11 makes a call that torch 2.13 has deprecated
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")

N = 40
ORDERS = {
    "weighted": weighted_order(np.arange(N), 30, seed=1),
    "grouped": grouped_order(np.arange(N) % 7, 8, seed=1),
    "mixture": mixture_order([10, 30], [0.4, 0.6], 32, seed=1),
}


@pytest.fixture(scope="module", autouse=True)
def parsed_flags():
    """Grain's workers read absl's flags, which only an absl program parses."""
    flags.FLAGS.mark_as_parsed()


def read(loader):
    return [i for batch in loader for i in batch.tolist()]


@pytest.mark.parametrize("name", ORDERS)
def test_torchs_loader_reads_each_epochs_order(name):
    order = ORDERS[name]
    for epoch in (0, 3):
        for rank in range(3):
            sampler = DistributedSampler(range(N), 3, rank, order=order, tail="mask")
            sampler.set_epoch(epoch)
            right = order(epoch)[rank::3].tolist()
            assert read(DataLoader(range(N), batch_size=4, sampler=sampler)) == right
            view = copy.deepcopy(sampler.torch_sampler())
            view.set_epoch(epoch + 1)
            right = order(epoch + 1)[rank::3].tolist()
            assert read(DataLoader(range(N), batch_size=4, sampler=view)) == right


def test_workers_that_are_spawned_read_the_same():
    sampler = DistributedSampler(range(N), 2, 1, order=ORDERS["weighted"], tail="mask")
    sampler.set_epoch(2)
    loader = DataLoader(range(N), batch_size=4, sampler=sampler, **SPAWN)
    assert read(loader) == ORDERS["weighted"](2)[1::2].tolist()


@pytest.mark.parametrize("name", ORDERS)
def test_torchdata_resumes_an_order_on_other_ranks(name):
    order, ids, state = ORDERS[name], [], None
    for rank in range(2):
        sampler = DistributedSampler(range(N), 2, rank, order=order, tail="mask")
        sampler.set_epoch(3)
        loader = StatefulDataLoader(range(N), batch_size=4, sampler=sampler)
        batches = iter(loader)
        ids += [i for _ in range(2) for i in next(batches).tolist()]
        state = loader.state_dict()
    for rank in range(3):
        sampler = DistributedSampler(range(N), 3, rank, order=order, tail="mask")
        loader = StatefulDataLoader(range(N), batch_size=4, sampler=sampler)
        loader.load_state_dict(state)
        ids += read(loader)
    assert Counter(ids) == Counter(order(3).tolist())


@pytest.mark.parametrize("name", ORDERS)
def test_grain_reads_each_epochs_order(name):
    order = ORDERS[name]
    right = np.concatenate([order(epoch) for epoch in range(3)])
    for rank in range(2):
        sampler = DistributedSampler(N, 2, rank, order=order, tail="mask")
        loader = grain.DataLoader(
            data_source=np.arange(N), sampler=sampler.grain_sampler(3), worker_count=0
        )
        assert list(loader) == right[rank::2].tolist()
        assert list(grain.MapDataset.source(sampler.source(3))) == right[rank::2].tolist()


def test_grains_workers_read_the_same():
    sampler = DistributedSampler(N, 2, 0, order=ORDERS["mixture"], tail="mask").grain_sampler(2)
    loader = grain.DataLoader(data_source=np.arange(N), sampler=sampler, worker_count=2)
    right = np.concatenate([ORDERS["mixture"](epoch) for epoch in range(2)])[::2]
    assert sorted(loader) == sorted(right.tolist())


def test_a_plan_is_a_loaders_batch_sampler():
    plan = EpochPlan(N - 1, 3, 4)
    ids, weights = [], 0
    for rank in range(3):
        sampler = DistributedBatchSampler(plan, rank, padding=True)
        for options in ({}, SPAWN) if rank == 0 else ({},):
            sampler.set_epoch(1)
            batches = list(DataLoader(range(N), batch_sampler=sampler, **options))
            assert {len(batch) for batch in batches} == {4}
        for step, batch in enumerate(batches):
            mine = sampler.weights(step)
            weights += mine.sum()
            ids += batch[torch.from_numpy(mine) > 0].tolist()
    assert sorted(ids) == list(range(N - 1))
    assert weights == N - 1


def test_a_batch_sampler_behind_workers_asks_what_was_consumed_and_torchdata_knows():
    plan = EpochPlan(N, 2, 4)
    sampler = DistributedBatchSampler(plan, 0)
    batches = iter(DataLoader(range(N), batch_sampler=sampler, **STOPPED))
    next(batches)
    with pytest.raises(ValueError, match=r"consumed must be given where batches are read ahead"):
        sampler.state_dict()
    assert sampler.state_dict(consumed=1)["position"] == 8
    loader = StatefulDataLoader(range(N), batch_sampler=DistributedBatchSampler(plan, 0))
    batches = iter(loader)
    first = next(batches).tolist()
    state = loader.state_dict()
    other = StatefulDataLoader(range(N), batch_sampler=DistributedBatchSampler(plan, 0))
    other.load_state_dict(state)
    assert first + read(other) == plan.slots(0, 0).ids.tolist()


@pytest.mark.parametrize(
    "make",
    [
        lambda: WeightedRandomSampler(np.arange(1, 9).tolist(), 12),
        lambda: RandomSampler(range(8)),
        lambda: SubsetRandomSampler([1, 3, 5, 7]),
    ],
)
def test_torchs_own_samplers_are_new_in_each_epoch_and_the_same_on_all_ranks(make):
    draws = []
    for epoch in range(3):
        shares = []
        for rank in range(2):
            torch.manual_seed(100 * rank)  # ranks' own streams differ, and do not matter
            sampler = DistributedSampler(8, 2, rank, order=sampler_order(make()), tail="mask")
            sampler.set_epoch(epoch)
            shares.append(list(sampler))
        draws.append(tuple(i for pair in zip(*shares, strict=True) for i in pair))
    assert len(set(draws)) == 3
    if len(draws[0]) < 12:
        assert all(len(set(draw)) == len(draw) for draw in draws)


@pytest.mark.parametrize(("workers", "size"), [(0, 4), (2, 4)])
def test_a_stream_is_dealt_to_ranks_and_workers(workers, size):
    received = []
    for rank in range(2):
        share = ShardedIterable(range(37), 2, rank, batch_size=size)
        options = SPAWN if workers else {}
        received.append(read(DataLoader(share.torch_dataset(), batch_size=size, **options)))
        assert received[-1] == list(range(37))[rank::2]
        if rank == 0 and workers:
            with pytest.raises(ValueError, match=r"consumed must be given .* a loader's workers"):
                share.state_dict()
            assert share.state_dict(consumed=2 * size)["position"] == 4 * size
            share.set_epoch(1)
            assert share.state_dict()["position"] == 0
            break


@pytest.mark.parametrize("workers", [0, 2])
def test_torchdata_resumes_a_stream(workers):
    options = STOPPED if workers else {"collate_fn": list}

    def loader():
        share = ShardedIterable(range(37), 2, 1, batch_size=4)
        return StatefulDataLoader(share.torch_dataset(), batch_size=4, **options)

    first = loader()
    batches = iter(first)
    ids = [i for _ in range(3) for i in next(batches)]
    state = first.state_dict()
    del batches
    second = loader()
    second.load_state_dict(state)
    assert ids + [i for batch in second for i in batch] == list(range(37))[1::2]
