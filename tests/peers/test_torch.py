"""What torch's own tests hold of its samplers, asked of ours.

Facts of torch's test suite (``test/test_dataloader.py`` and its distributed sampler tests, torch
2.13) with numbers of theirs; the code is ours. Where ours differs on purpose, the test says how.
"""

import math

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, TensorDataset
from torch.utils.data import DistributedSampler as TorchSampler

from jax_ddp_weighting import DistributedSampler

KINDS = [
    TorchSampler,
    DistributedSampler,
    lambda *a, **k: DistributedSampler(*a, **k).torch_sampler(),
]
each_kind = pytest.mark.parametrize("kind", KINDS, ids=["torch's", "ours", "our view"])


@each_kind
@pytest.mark.parametrize("world", [1, 2, 3, 4, 5, 8, 16])
@pytest.mark.parametrize("drop_last", [False, True])
def test_a_dataset_of_101_and_the_world_is_shared_evenly(kind, world, drop_last):
    """A dataset of 100 + world + 1, and a tiny one of half the world less one."""
    for size in (100 + world + 1, max(world // 2 - 1, 1)):
        samplers = [kind(range(size), world, rank, drop_last=drop_last) for rank in range(world)]
        uneven = drop_last and size % world
        each = math.ceil((size - world) / world) if uneven else math.ceil(size / world)
        shares = [list(sampler) for sampler in samplers]
        assert [len(share) for share in shares] == [each] * world
        assert [len(sampler) for sampler in samplers] == [each] * world
        assert {sampler.num_samples for sampler in samplers} == {each}
        assert {sampler.total_size for sampler in samplers} == {each * world}
        if not drop_last:
            assert {i for share in shares for i in share} == set(range(size))


@each_kind
@pytest.mark.parametrize(("world", "rank"), [(3, -1), (3, 3), (10, 15)])
def test_a_rank_that_is_not_there_is_refused(kind, world, rank):
    with pytest.raises(ValueError, match=r"[Ii]nvalid rank|rank must be in"):
        kind(range(100), world, rank)


@each_kind
def test_an_epochs_shuffle_is_the_same_each_time_and_another_by_epoch_and_seed(kind):
    def order(epoch, seed):
        sampler = kind(range(100), 10, 0, shuffle=True, seed=seed)
        sampler.set_epoch(epoch)
        return list(sampler)

    assert order(0, 0) == order(0, 0)
    assert order(0, 0) != order(1, 0)
    assert order(0, 0) != order(0, 10)
    assert order(1, 0) == order(0, 1)  # torch adds the two


@each_kind
def test_without_shuffling_ranks_are_interleaved(kind):
    shares = [list(kind(range(10), 4, rank, shuffle=False)) for rank in range(4)]
    assert shares == [[0, 4, 8], [1, 5, 9], [2, 6, 0], [3, 7, 1]]


@each_kind
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(("size", "batch"), [(100, 3), (103, 5), (7, 10)])
def test_a_batch_sampler_and_a_loader_over_it_cut_the_same_batches(kind, size, batch, drop_last):
    sampler = kind(range(size), 2, 1, shuffle=False)
    ids = list(range(1, size, 2)) + ([0] if size % 2 else [])
    batches = [ids[i : i + batch] for i in range(0, len(ids), batch)]
    batches = [each for each in batches if not drop_last or len(each) == batch]
    cut = BatchSampler(sampler, batch, drop_last)
    assert (len(cut), list(cut)) == (len(batches), batches)
    loader = DataLoader(
        TensorDataset(torch.arange(size)), batch_size=batch, sampler=sampler, drop_last=drop_last
    )
    assert len(loader) == len(batches)
    assert [rows.tolist() for (rows,) in loader] == batches


# Stated differences


def test_a_dataset_that_grows_is_refused_in_words():
    """torch's breaks on an assertion; ours says that every rank planned for the old length."""
    data = list(range(10))
    theirs, ours = TorchSampler(data, 2, 0), DistributedSampler(data, 2, 0)
    data.extend(range(10, 14))
    with pytest.raises(AssertionError, match="does not match total_size"):
        list(theirs)
    with pytest.raises(ValueError, match=r"len\(dataset\) must stay 10, got 14"):
        list(ours)


def test_ranks_are_asked_of_jax_and_not_of_a_process_group():
    """Without arguments torch's wants a process group; ours asks JAX for its processes."""
    with pytest.raises((RuntimeError, ValueError), match="process group"):
        TorchSampler(range(10))
    assert len(DistributedSampler(range(10))) == 10


def test_an_epoch_that_is_read_twice_is_said():
    """torch reads it again without a word."""
    theirs, ours = TorchSampler(range(10), 2, 0), DistributedSampler(range(10), 2, 0)
    assert list(theirs) == list(theirs) == list(ours)
    with pytest.warns(UserWarning, match="epoch 0 is read again"):
        assert list(ours) == list(theirs)
