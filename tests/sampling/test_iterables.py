"""Streams of unknown length over ranks and workers: each item once, resumable by position."""

import copy
import json
import multiprocessing
import pickle
from itertools import islice
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_ddp_weighting import ShardedIterable
from jax_ddp_weighting.sampling import iterables


def worker(monkeypatch, number=0, count=1):
    info = None if count == 1 else SimpleNamespace(id=number, num_workers=count)
    torch_data = SimpleNamespace(get_worker_info=lambda: info)
    monkeypatch.setitem(iterables.sys.modules, "torch.utils.data", torch_data)


def counted(n):
    return lambda epoch: (100 * epoch + i for i in range(n))


@settings(max_examples=100, deadline=None)
@given(
    n=st.integers(0, 40),
    ranks=st.integers(1, 5),
    workers=st.integers(1, 3),
    size=st.integers(1, 4),
)
def test_every_item_goes_to_one_worker_of_one_rank(n, ranks, workers, size):
    with pytest.MonkeyPatch.context() as monkeypatch:
        for rank in range(ranks):
            share = ShardedIterable(range(n), ranks, rank, batch_size=size)
            worker(monkeypatch)
            alone = list(share)
            assert alone == list(range(n))[rank::ranks]
            parts = []
            for number in range(workers):
                worker(monkeypatch, number, workers)
                parts.append(list(pickle.loads(pickle.dumps(share))))
                if size == 1:
                    assert parts[-1] == list(range(n))[rank + ranks * number :: ranks * workers]
            # a loader takes a batch from each worker in turn: the stream's own order
            batches = [[part[i : i + size] for i in range(0, len(part), size)] for part in parts]
            received = [
                item
                for turn in range(len(batches[0]))
                for each in batches
                for item in (each[turn] if turn < len(each) else [])
            ]
            assert received == alone


@settings(max_examples=100, deadline=None)
@given(
    n=st.integers(0, 40),
    ranks=st.integers(1, 5),
    later=st.integers(1, 5),
    data=st.data(),
)
def test_every_position_resumes_on_every_number_of_ranks(n, ranks, later, data):
    read = data.draw(st.integers(0, n // ranks))
    by_hand = data.draw(st.booleans())
    shares = [ShardedIterable(counted(n), ranks, rank) for rank in range(ranks)]
    first, states = [], []
    for share in shares:
        share.set_epoch(3)
        first.append(list(islice(share, read)))
        states.append(json.loads(json.dumps(share.state_dict())))
        if by_hand:
            assert share.state_dict(consumed=read) == states[-1]
    assert all(state == states[0] for state in states)
    rest = [ShardedIterable(counted(n), later, rank) for rank in range(later)]
    for share in rest:
        share.load_state_dict(states[0])
        assert share.epoch == 3
        iter(share), share.state_dict()  # looking uses nothing up
    second = [list(share) for share in rest]
    assert sorted(item for part in first + second for item in part) == [300 + i for i in range(n)]
    # stopped again, and gone on with once more
    share = ShardedIterable(counted(n), 1, 0)
    share.load_state_dict(states[0])
    begun = list(islice(share, 2))
    last = ShardedIterable(counted(n), 1, 0)
    last.load_state_dict(share.state_dict())
    assert begun + list(last) == [300 + i for i in range(read * ranks, n)]


def test_a_rank_that_has_ended_has_nothing_left_whoever_had_the_last_item():
    for rank in range(3):
        share = ShardedIterable(range(7), 3, rank)
        taken = len(list(share))
        for state in (share.state_dict(), share.state_dict(consumed=taken)):
            again = ShardedIterable(range(7), 1, 0)
            again.load_state_dict(state)
            assert list(again) == []
        assert len(list(share)) == taken  # another pass begins anew
        share.set_epoch(1)
        assert share.state_dict() == {"version": 1, "epoch": 1, "position": 0}


def test_a_workers_own_state_goes_on_in_that_worker(monkeypatch):
    for rank in range(2):
        share = ShardedIterable(range(23), 2, rank, batch_size=2)
        worker(monkeypatch)
        alone = list(copy.deepcopy(share))
        for number in range(3):
            worker(monkeypatch, number, 3)
            mine = list(copy.deepcopy(share))
            assert set(mine) <= set(alone)
            for count in range(len(mine) + 1):
                begun = copy.deepcopy(share)
                first = list(islice(begun, count))
                state = begun.state_dict()
                again = copy.deepcopy(share)
                again.load_state_dict(state)
                assert again.state_dict() == state
                assert first + list(again) == mine


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning", "ignore:.*fork:RuntimeWarning")
def test_what_workers_have_read_is_asked_for(method):
    share = ShardedIterable(range(23), 2, 0)
    assert share.state_dict()["position"] == 0  # nobody has read anything
    context = multiprocessing.get_context(method)
    reading = context.Process(target=read_three, args=(share,))
    reading.start()
    reading.join()
    assert reading.exitcode == 0
    with pytest.raises(ValueError, match=r"consumed must be given .* a loader's workers, got None"):
        share.state_dict()
    state = share.state_dict(consumed=2)
    assert state["position"] == 4
    share.load_state_dict(state)
    assert share.state_dict() == state
    twin = copy.deepcopy(share)
    assert list(twin) == list(range(23))[4::2]


def read_three(share):
    assert list(islice(share, 3)) == [0, 2, 4]


def test_one_workers_state_is_refused_elsewhere(monkeypatch):
    worker(monkeypatch, 1, 3)
    share = ShardedIterable(range(23), 2, 0)
    list(islice(share, 2))
    state = share.state_dict()
    assert (state["worker"], state["workers"], state["taken"]) == (1, 3, 2)
    with pytest.raises(ValueError, match=r"num_replicas must be as when .* saved, 2, got 4"):
        ShardedIterable(range(23), 4, 0).load_state_dict(state)
    for number, count in ((0, 3), (1, 2), (0, 1)):
        worker(monkeypatch, number, count)
        other = ShardedIterable(range(23), 2, 0)
        other.load_state_dict(state)
        with pytest.raises(ValueError, match=rf"worker 1 of 3 must .* worker {number} of {count}"):
            list(other)


def test_a_sources_own_epochs_are_passed_on():
    class Source:
        epoch = 0

        def set_epoch(self, epoch):
            self.epoch = epoch

        def __iter__(self):
            return iter([self.epoch] * 3)

    share = ShardedIterable(Source(), 2, 0)
    share.set_epoch(5)
    assert list(share) == [5, 5]
    share = ShardedIterable(counted(2), 1, 0)
    assert list(share) == [0, 1]
    share.set_epoch(2)
    assert list(share) == [200, 201]


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        (
            (iter([1]), 2, 0),
            TypeError,
            r"source must be .*got list_iterator, which can be read but",
        ),
        (
            ((i for i in [1]), 2, 0),
            TypeError,
            r"source must .*got generator, which can be read but",
        ),
        ((5, 2, 0), TypeError, r"source must be .*got int, which cannot be read"),
        (([1], 2, 2), ValueError, r"rank must be in \[0, 2\), got 2"),
        (([1], 0, 0), ValueError, r"num_replicas must be .*, got 0"),
    ],
)
def test_bad_arguments_are_refused(arguments, error, match):
    with pytest.raises(error, match=f"^ShardedIterable: {match}"):
        ShardedIterable(*arguments)


@pytest.mark.parametrize(
    ("state", "error", "match"),
    [
        ([], TypeError, "state must be a mapping, got list"),
        ({}, ValueError, r"state must hold version 1, epoch and position, got \{\}"),
        ({"version": 2, "epoch": 0, "position": 0}, ValueError, "state must hold version 1"),
        ({"version": 1, "epoch": -1, "position": 0}, ValueError, "epoch must be .*, got -1"),
        ({"version": 1, "epoch": 0, "position": -1}, ValueError, "position must be .*, got -1"),
        ({"version": 1, "epoch": 0, "position": 0, "taken": 1}, TypeError, "workers must be"),
    ],
)
def test_bad_states_are_refused_and_change_nothing(state, error, match):
    share = ShardedIterable([1, 2], 1, 0)
    before = share.state_dict()
    with pytest.raises(error, match=match):
        share.load_state_dict(state)
    assert share.state_dict() == before
