import pickle
import sys

import numpy as np
import pytest

from jax_ddp_weighting import DistributedSampler, EpochPlan
from jax_ddp_weighting.sampling.adapters import RankIndices


def yielded(n, ranks, epochs, **options):
    """Every rank's ids of some epochs, as its sampler yields them."""
    shares = []
    for rank in range(ranks):
        sampler = DistributedSampler(n, ranks, rank, **options)
        share = []
        for epoch in epochs:
            sampler.set_epoch(epoch)
            share.append(list(sampler))
        shares.append(share)
    return shares


@pytest.mark.parametrize("tail", ["mask", "repeat", "drop"])
@pytest.mark.parametrize("order", ["keyed", "torch"])
@pytest.mark.parametrize(("n", "ranks"), [(12, 4), (10, 4), (501, 3), (500, 3), (2, 5), (53, 4)])
@pytest.mark.parametrize("epochs", [1, 3])
def test_a_source_deals_out_what_the_samplers_yield_one_epoch_after_the_other(
    n, ranks, order, tail, epochs
):
    shares = yielded(n, ranks, range(4, 4 + epochs), order=order, tail=tail)
    stream = []  # the epochs' rounds, one after the other
    for epoch in range(epochs):
        parts = [share[epoch] for share in shares]
        stream += [part[j] for j in range(len(parts[0])) for part in parts if j < len(part)]
    for rank in range(ranks):
        sampler = DistributedSampler(n, ranks, rank, order=order, tail=tail)
        sampler.set_epoch(4)
        source = sampler.source(epochs)
        read = [source[i] for i in range(len(source))]
        assert read == list(source) == stream[rank::ranks]
        assert all(type(i) is int for i in read)
        if epochs == 1 or tail != "mask" or n % ranks == 0:
            assert read == [i for part in shares[rank] for i in part]


@pytest.mark.parametrize(("n", "ranks"), [(53, 4), (10, 4), (7, 8), (2, 5)])
@pytest.mark.parametrize("epochs", [100, None])
def test_ranks_make_the_same_steps_over_many_epochs(n, ranks, epochs):
    """53 ids over 4 ranks: epoch by epoch one rank would read 1400 of 100 epochs, others 1300."""
    sources = [DistributedSampler(n, ranks, r, tail="mask").source(epochs) for r in range(ranks)]
    lengths = {len(source) for source in sources}
    if epochs is None:
        assert len(lengths) == 1
    else:
        assert max(lengths) - min(lengths) <= 1
        assert sum(len(source) for source in sources) == 100 * n
    assert len({-(-length // 4) for length in lengths}) == 1  # batches of 4
    read = [[source[i] for i in range(100 * n // ranks)] for source in sources]
    stream = [i for round_ in zip(*read, strict=True) for i in round_]
    for epoch in range(len(stream) // n):  # every epoch is whole before the next begins
        assert sorted(stream[epoch * n : (epoch + 1) * n]) == list(range(n))


def test_a_source_can_be_asked_in_any_order_and_sent_to_workers():
    source = DistributedSampler(5000, 3, 1, order="keyed").source(2)
    twin = pickle.loads(pickle.dumps(source))
    at = np.random.default_rng(0).integers(-len(source), len(source), 50)
    read = list(source)
    assert [source[i] for i in at] == [twin[i] for i in at] == [read[i] for i in at]


def test_a_source_without_end_is_as_long_as_python_allows():
    plan = EpochPlan(10, 4, 1)
    sources = [RankIndices(plan, rank, num_epochs=None) for rank in range(4)]
    assert [len(source) for source in sources] == [sys.maxsize] * 4
    # 10 slots are two rounds and a half: rank 2 begins the next epoch
    assert [source[2] for source in sources] == [
        *plan.slots(0, 0).ids[2:3],
        *plan.slots(0, 1).ids[2:3],
        *plan.slots(1, 0).ids[:1],
        *plan.slots(1, 1).ids[:1],
    ]
    assert len(RankIndices(EpochPlan(0, 4, 1), rank=2, num_epochs=None)) == 0


def test_a_source_starts_where_the_sampler_was_loaded():
    whole = yielded(10, 2, range(3, 6), tail="mask", order="keyed")
    for rank in range(2):
        sampler = DistributedSampler(10, 2, rank, tail="mask", order="keyed")
        sampler.set_epoch(3)
        sampler.load_state_dict(sampler.state_dict(consumed=2))
        read = [i for part in whole[rank] for i in part]
        for source in (sampler.source(3), pickle.loads(pickle.dumps(sampler.source(3)))):
            assert list(source) == read[2:]
        assert list(sampler.source()) == list(sampler) == read[2:5]


def test_a_source_of_the_rest_of_another_epoch_is_refused():
    plan = EpochPlan(10, 4, 1).resumed(3, 4)
    assert list(RankIndices(plan, 0, first_epoch=3)) == plan.slots(3, 0).ids[:2].tolist()
    with pytest.raises(ValueError, match=r"RankIndices: first_epoch.* must be 3, .* got 0"):
        RankIndices(plan, 0)


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
