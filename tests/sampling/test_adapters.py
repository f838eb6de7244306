import pickle
import sys

import numpy as np
import pytest

from jax_ddp_weighting import DistributedSampler, EpochPlan, audit_ids
from jax_ddp_weighting.sampling.adapters import RankIndices


@pytest.mark.parametrize("tail", ["mask", "repeat", "drop"])
@pytest.mark.parametrize("order", ["keyed", "torch"])
@pytest.mark.parametrize(("n", "ranks"), [(10, 4), (500, 3), (2, 5)])
def test_a_source_is_what_the_sampler_yields_epoch_by_epoch(n, ranks, order, tail):
    for rank in range(ranks):
        sampler = DistributedSampler(n, ranks, rank, tail=tail, order=order)
        sampler.set_epoch(4)
        source = sampler.source(3)
        read = []
        for epoch in (4, 5, 6):
            sampler.set_epoch(epoch)
            read += list(sampler)
        assert [source[i] for i in range(len(source))] == read
        assert list(source) == read
        assert all(type(i) is int for i in read)


def test_a_source_can_be_asked_in_any_order_and_sent_to_workers():
    source = DistributedSampler(5000, 3, 1, order="keyed").source(2)
    twin = pickle.loads(pickle.dumps(source))
    at = np.random.default_rng(0).integers(-len(source), len(source), 50)
    read = list(source)
    assert [source[i] for i in at] == [twin[i] for i in at] == [read[i] for i in at]


def test_a_source_without_end_is_as_long_as_python_allows():
    source = RankIndices(EpochPlan(10, 4, 1), rank=2, num_epochs=None)
    assert sys.maxsize - 2 < len(source) <= sys.maxsize
    audit_ids([source[i] for i in range(2)], 10)
    assert source[2] == source.plan.slots(1, 2).ids[0]
    assert len(RankIndices(EpochPlan(2, 4, 1), rank=2, num_epochs=None)) == 0


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"rank": 4}, ValueError, r"RankIndices: rank must be in \[0, 4\), got 4"),
        (
            {"num_epochs": 0},
            ValueError,
            "num_epochs must be an integer of at least 1, or None, got 0",
        ),
        ({"first_epoch": -1}, ValueError, r"first_epoch must be an integer in \[0, 2\*\*63\), got"),
    ],
)
def test_a_bad_source_is_one_clear_error(options, error, text):
    with pytest.raises(error, match=text):
        RankIndices(EpochPlan(10, 4, 1), **{"rank": 0, **options})


@pytest.mark.parametrize("index", [3, -4])
def test_an_index_past_the_end_is_an_index_error(index):
    source = DistributedSampler(12, 4, 0).source()
    with pytest.raises(IndexError, match=rf"index must be in \[0, 3\), got {index}"):
        source[index]
    with pytest.raises(TypeError, match=r"index must be an integer, got '0' \(str\)"):
        source["0"]


def test_a_source_of_more_epochs_than_python_can_count_is_cut_at_what_it_can():
    source = RankIndices(EpochPlan(10, 4, 1), rank=1, num_epochs=2**62)
    assert sys.maxsize - 3 < len(source) <= sys.maxsize
