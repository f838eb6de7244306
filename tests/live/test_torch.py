"""Orders, samplers and loaders against torch itself, of the version that is installed."""

import copy
import itertools
import os
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler
from torch.utils.data import DistributedSampler as TorchSampler
from torch_workers import SPAWN, STOPPED

from jax_ddp_weighting import CoverageError, DistributedSampler, audit_ids, torch_order

# 8 GB and some minutes: LARGE_ORDERS=1 compares both sides of the change in torch's rule
LARGE = [214_748_363, 214_748_364] if os.environ.get("LARGE_ORDERS") else []


def torchs(n, seed):
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed)).numpy()


@pytest.mark.parametrize(
    "n", [0, 1, 2, 3, 10, 1000, 65_536, 65_537, 65_538, 1_000_003, 2**24 + 1, *LARGE]
)
def test_an_order_is_torchs(n):
    assert np.array_equal(torch_order(n, 5), torchs(n, 5))


@settings(max_examples=300, deadline=None)
@given(n=st.integers(0, 300), seed=st.integers(-(2**63), 2**64 - 1))
def test_an_order_is_torchs_for_every_seed(n, seed):
    assert np.array_equal(torch_order(n, seed), torchs(n, seed))


def test_the_comparison_of_orders_can_fail():
    assert not np.array_equal(torch_order(1000, 5), torchs(1000, 6))


@pytest.mark.parametrize("seed", [2**64, -(2**63) - 1])
def test_a_seed_that_torch_refuses_is_refused(seed):
    with pytest.raises(ValueError, match="Overflow"):
        torch.Generator().manual_seed(seed)
    with pytest.raises(ValueError, match="torch_order: seed must be an integer in"):
        torch_order(10, seed)


@settings(max_examples=500, deadline=None)
@given(
    n=st.integers(1, 200),
    ranks=st.integers(1, 20),
    shuffle=st.booleans(),
    seed=st.integers(0, 2**40),
    drop_last=st.booleans(),
    epoch=st.integers(0, 50),
)
def test_a_sampler_is_torchs(n, ranks, shuffle, seed, drop_last, epoch):
    for rank in {0, ranks // 2, ranks - 1}:
        arguments = (range(n), ranks, rank, shuffle, seed, drop_last)
        ours, theirs = DistributedSampler(*arguments), TorchSampler(*arguments)
        for sampler in (ours, theirs):
            sampler.set_epoch(epoch)
        assert list(ours) == list(theirs)
        for name in ("num_samples", "total_size", "num_replicas", "rank", "epoch", "drop_last"):
            assert getattr(ours, name) == getattr(theirs, name)
        assert len(ours) == len(theirs)


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_that_torch_refuses_is_refused(rank):
    with pytest.raises(ValueError, match=r"Invalid rank"):
        TorchSampler(range(10), 4, rank)
    with pytest.raises(ValueError, match=r"rank must be in \[0, 4\)"):
        DistributedSampler(range(10), 4, rank)


def loaded(sampler, **options):
    loader = DataLoader(TensorDataset(torch.arange(101)), sampler=sampler, **options)
    return loader, lambda: [batch.tolist() for (batch,) in loader]


@pytest.mark.parametrize("drop_last", [False, True])
def test_the_batches_of_a_loader_are_those_over_torchs_sampler(drop_last):
    for rank in range(4):
        arguments = (range(101), 4, rank)
        ours, theirs = DistributedSampler(*arguments), TorchSampler(*arguments)
        (loader, read), (other, wanted) = (
            loaded(sampler, batch_size=8, drop_last=drop_last) for sampler in (ours, theirs)
        )
        assert len(loader) == len(other)
        for epoch in range(3):
            ours.set_epoch(epoch)
            theirs.set_epoch(epoch)
            assert read() == wanted()


def test_a_loader_reads_by_a_sampler_with_workers_that_stay():
    ours = DistributedSampler(range(101), 4, 1, order="keyed", tail="mask")
    _, read = loaded(ours, batch_size=8, persistent_workers=True, **SPAWN)
    for epoch in range(3):
        ours.set_epoch(epoch)
        assert [i for batch in read() for i in batch] == ours.indices().tolist()


def test_a_forgotten_set_epoch_is_said_through_a_loader():
    _, read = loaded(DistributedSampler(range(101), 4, 1), batch_size=8)
    read()
    with pytest.warns(UserWarning, match="epoch 0 is read again"):
        read()


def test_every_id_comes_once_through_masked_loaders_and_101_of_104_otherwise():
    """Report "loader over torch sampler": torch pads to 104, its loader drops to 96."""
    for tail, drop_last, missing in (("mask", False, ()), ("repeat", True, tuple(range(96, 101)))):
        ranks = []
        for rank in range(4):
            sampler = DistributedSampler(range(101), 4, rank, False, tail=tail)
            _, read = loaded(sampler, batch_size=8, drop_last=drop_last)
            ranks.append([i for batch in read() for i in batch])
        assert audit_ids(ranks, 101).omitted == missing


def test_a_loader_resumes_where_training_was_and_not_where_it_read_ahead():
    whole = loaded(DistributedSampler(range(101), 4, 1), batch_size=4)[1]()
    sampler = DistributedSampler(range(101), 4, 1)
    options = STOPPED | {"num_workers": 1, "prefetch_factor": 3}
    loader, _ = loaded(sampler, batch_size=4, **options)
    batches = iter(loader)
    for _ in range(2):
        next(batches)
    with pytest.raises(ValueError, match=r"consumed must be given .* a loader with workers"):
        sampler.state_dict()  # it has read ahead
    resumed = DistributedSampler(range(101), 4, 1)
    resumed.load_state_dict(sampler.state_dict(consumed=2 * 4))
    assert loaded(resumed, batch_size=4)[1]() == whole[2:]


def test_the_view_is_of_torchs_class_and_reads_as_the_sampler_does():
    ours = DistributedSampler(range(101), 4, 1, seed=3)
    view = ours.torch_sampler()
    assert isinstance(view, TorchSampler)
    assert not isinstance(ours, TorchSampler)
    view.set_epoch(2)
    assert (ours.epoch, view.epoch, view.seed, len(view)) == (2, 2, 3, 26)
    assert list(view) == ours.indices().tolist()
    assert view.state_dict() == ours.state_dict()
    assert "seed=3" in repr(view)
    _, read = loaded(view, batch_size=8)
    view.set_epoch(3)
    assert [i for batch in read() for i in batch] == ours.indices().tolist()


def test_the_view_is_copied_pickled_and_set_as_torchs_own():
    ours = DistributedSampler(range(101), 4, 1, seed=3)
    view, theirs = ours.torch_sampler(), TorchSampler(range(101), 4, 1, seed=3)
    for sampler in (view, theirs):
        sampler.epoch = 7
    assert ours.epoch == 7
    assert list(view) == list(theirs)
    view.load_state_dict(view.state_dict(consumed=20))
    for twin in (pickle.loads(pickle.dumps(view)), copy.deepcopy(view)):
        assert isinstance(twin, TorchSampler)
        assert list(twin) == list(theirs)[20:]
        twin.set_epoch(0)
    assert ours.epoch == 7  # nothing is shared
    assert len(view) == 6
    assert list(view) == list(theirs)[20:]


class Eager:
    """A batch sampler that asks for its ids when it is made an iterator of."""

    def __init__(self, sampler):
        self.sampler = sampler

    def __len__(self):
        return -(-len(self.sampler) // 4)

    def __iter__(self):
        ids = iter(self.sampler)
        return iter(lambda: [*itertools.islice(ids, 4)], [])


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_that_calls_iter_twice_reads_the_rest_of_a_loaded_epoch(workers):
    sampler = DistributedSampler(range(60), 3, 1)
    whole = list(DistributedSampler(range(60), 3, 1))
    sampler.load_state_dict(sampler.state_dict(consumed=7))
    options = SPAWN if workers else {}
    loader = DataLoader(TensorDataset(torch.arange(60)), batch_sampler=Eager(sampler), **options)
    assert [i for (batch,) in loader for i in batch.tolist()] == whole[7:]


@pytest.mark.parametrize("inner", [DistributedSampler, TorchSampler])
def test_torchs_sampler_over_a_sampler_is_found_and_ours_is_refused(inner):
    """A trainer that wraps whatever sampler it is given."""
    twice = []
    for rank in range(4):
        share = list(inner(range(101), 4, rank))
        twice.append([share[i] for i in TorchSampler(share, 4, rank, shuffle=False)])
    with pytest.raises(CoverageError, match=r"\d+ of 101 ids omitted"):
        audit_ids(twice, 101).check_exactly_once()
    with pytest.raises(ValueError, match="dataset must not be sharded already"):
        DistributedSampler(inner(range(101), 4, 1), 4, 1)
    with pytest.raises(ValueError, match="dataset must not be sharded already"):
        DistributedSampler(DataLoader(range(101), sampler=inner(range(101), 4, 1)), 4, 1)


def test_a_weighted_sampler_is_sharded_as_it_was_drawn():
    draws = WeightedRandomSampler(
        np.arange(1.0, 21.0), 50, generator=torch.Generator().manual_seed(0)
    )
    own = list(draws)
    shares = [
        list(DistributedSampler(20, 4, r, False, tail="mask", order=own, repeats=True))
        for r in range(4)
    ]
    assert shares == [own[r::4] for r in range(4)]
