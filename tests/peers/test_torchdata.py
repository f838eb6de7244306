"""What torchdata's tests hold of its stateful sampler and loader, asked of ours.

Facts of torchdata 0.11 (``test/stateful_dataloader``: the sampler's and the state's tests) with
numbers of theirs; the code is ours. Where ours differs on purpose, the test says how.
"""

import math

import pytest
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from jax_ddp_weighting import DistributedSampler

# torchdata 0.11 makes a call that torch 2.13 has deprecated
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")

KINDS = [
    StatefulDistributedSampler,
    DistributedSampler,
    lambda *a, **k: DistributedSampler(*a, **k).torch_sampler(),
]
each_kind = pytest.mark.parametrize("kind", KINDS, ids=["torchdata's", "ours", "our view"])


def loader_of(sampler, batch_size=10, **options):
    return StatefulDataLoader(range(100), batch_size=batch_size, sampler=sampler, **options)


def read(batches):
    return [i for batch in batches for i in batch.tolist()]


@each_kind
def test_what_was_given_can_be_asked_for(kind):
    sampler = kind(range(100), num_replicas=10, rank=0, shuffle=False, seed=42, drop_last=False)
    asked = (sampler.dataset, sampler.num_replicas, sampler.rank, sampler.shuffle, sampler.seed)
    assert (*asked, sampler.drop_last) == (range(100), 10, 0, False, 42, False)


@each_kind
@pytest.mark.parametrize("stop", [0, 1, 5, 9, 10])
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_new_loader_goes_on_where_the_state_was_taken(kind, stop, shuffle):
    """100 examples in batches of 10, stopped after 5; and at every other kind of place."""
    batches = iter(loader := loader_of(kind(range(100), 1, 0, shuffle)))
    for _ in range(stop):
        next(batches)
    state = loader.state_dict()
    rest = read(batches)
    resumed = loader_of(kind(range(100), 1, 0, shuffle))
    resumed.load_state_dict(state)
    assert read(resumed) == rest == list(kind(range(100), 1, 0, shuffle))[10 * stop :]


@each_kind
@pytest.mark.parametrize("every", [1, 3, 10, 50])
def test_a_state_between_snapshots_goes_on_too(kind, every):
    options = {"snapshot_every_n_steps": every}
    batches = iter(loader := loader_of(kind(range(100), 1, 0), batch_size=7, **options))
    for _ in range(5):
        next(batches)
    state = loader.state_dict()
    resumed = loader_of(kind(range(100), 1, 0), batch_size=7, **options)
    resumed.load_state_dict(state)
    assert read(resumed) == read(batches)


@each_kind
def test_a_state_taken_before_the_first_batch_and_twice_in_a_row(kind):
    loader = loader_of(kind(range(100), 1, 0))
    state = loader.state_dict()
    assert loader.state_dict().keys() == state.keys()
    resumed = loader_of(kind(range(100), 1, 0))
    resumed.load_state_dict(state)
    assert read(resumed) == read(loader) == list(kind(range(100), 1, 0))


@each_kind
def test_an_epoch_after_a_resumed_one_is_whole(kind):
    batches = iter(loader := loader_of(kind(range(100), 1, 0)))
    for _ in range(4):
        next(batches)
    sampler = kind(range(100), 1, 0)
    resumed = loader_of(sampler)
    resumed.load_state_dict(loader.state_dict())
    assert len(read(resumed)) == 60
    sampler.set_epoch(1)
    assert sorted(read(resumed)) == list(range(100))


@each_kind
def test_dropping_the_tail_shortens_a_share_to_the_floor(kind):
    lengths = {
        drop: len(read(loader_of(kind(range(100), 3, 0, False, drop_last=drop), 1)))
        for drop in (True, False)
    }
    assert lengths == {True: 100 // 3, False: math.ceil(100 / 3)}


@each_kind
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_loader_reads_in_the_samplers_order(kind, shuffle):
    ids = list(kind(range(100), 1, 0, shuffle))
    assert (ids == list(range(100))) == (not shuffle)
    assert read(loader_of(kind(range(100), 1, 0, shuffle), 32)) == ids


@each_kind
def test_five_ranks_cover_100_examples_once(kind):
    ids = [i for rank in range(5) for i in read(loader_of(kind(range(100), 5, rank, False), 1))]
    assert sorted(ids) == list(range(100))


# Stated differences


def test_a_state_says_which_order_it_is_of_and_not_only_how_many_ids():
    """torchdata's sampler counts what one rank yielded; ours says the place in a named order."""
    theirs, ours = (
        StatefulDistributedSampler(range(100), 10, 0),
        DistributedSampler(range(100), 10, 0),
    )
    for sampler in (theirs, ours):
        ids = iter(sampler)
        for _ in range(5):
            next(ids)
    assert theirs.state_dict() == {"yielded": 5}
    assert ours.state_dict()["position"] == 50
    other = DistributedSampler(range(100), 10, 0, seed=1)
    with pytest.raises(ValueError, match="seed must be this sampler's, 1, got 0"):
        other.load_state_dict(ours.state_dict())


def test_a_state_without_a_count_or_with_a_negative_one_is_refused_by_both():
    theirs, ours = (
        StatefulDistributedSampler(range(100), 10, 0),
        DistributedSampler(range(100), 10, 0),
    )
    for state in ({}, {"yielded": -1}):
        with pytest.raises(ValueError, match=r"Invalid state_dict|negative"):
            theirs.load_state_dict(state)
        with pytest.raises(ValueError, match="state must hold version"):
            ours.load_state_dict(state)
    with pytest.raises(ValueError, match=r"position must be in \[0, 100\], got -1"):
        ours.load_state_dict({**ours.state_dict(), "position": -1})


def test_an_iterator_under_way_is_not_moved_by_loading():
    """Theirs takes whatever place was loaded when it is first read; an iterator of ours gives what
    it was made for, and the next one takes the place.
    """
    state = DistributedSampler(range(100), 2, 0).state_dict(consumed=5)
    whole = list(DistributedSampler(range(100), 2, 0))
    sampler = DistributedSampler(range(100), 2, 0)
    under_way = iter(sampler)
    assert next(under_way) == whole[0]
    sampler.load_state_dict(state)
    assert next(under_way) == whole[1]
    assert list(sampler) == whole[5:]
