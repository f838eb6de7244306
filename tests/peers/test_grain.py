"""What grain's tests hold of its samplers, asked of ours.

Facts of grain 0.2.18 (its tests of ``SequentialSampler`` and ``IndexSampler``) with numbers of
theirs; the code is ours. Where ours differs on purpose, the test says how.
"""

import numpy as np
import pytest
from grain.python import IndexSampler, SequentialSampler
from grain.sharding import NoSharding, ShardOptions

from jax_ddp_weighting import DistributedSampler


def theirs(n, shard=0, shards=1, *, drop=False, epochs=1, shuffle=False, seed=32):
    options = ShardOptions(shard, shards, drop_remainder=drop)
    sampler = IndexSampler(n, options, shuffle=shuffle, num_epochs=epochs, seed=seed)
    found = []
    for index in range(shard, len(sampler), shards):  # what grain's loader asks a shard for
        found.append(sampler[index])
    return found


def ours(n, shard=0, shards=1, *, drop=False, epochs=1, shuffle=False, seed=32):
    sampler = DistributedSampler(
        n,
        shards,
        shard,
        shuffle,
        seed,
        tail="drop" if drop else "mask",
        order="keyed",
    ).grain_sampler(epochs)
    return [sampler[index] for index in range(len(sampler))]


def keys(found):
    return [each.record_key for each in found]


both = pytest.mark.parametrize("read", [theirs, ours])


@both
def test_four_records_come_in_sequence(read):
    assert keys(read(4)) == [0, 1, 2, 3]


@both
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("epochs", [1, 2])
def test_200_records_of_two_epochs_are_400_and_each_epoch_is_whole(read, shuffle, epochs):
    found = keys(read(200, epochs=epochs, shuffle=shuffle))
    assert len(found) == 200 * epochs
    for epoch in range(epochs):
        assert sorted(found[200 * epoch : 200 * (epoch + 1)]) == list(range(200))
    assert (found[:5] == list(range(5))) == (not shuffle)


@both
def test_two_epochs_have_two_orders(read):
    found = keys(read(50, epochs=2, shuffle=True))
    assert found[:50] != found[50:]


@both
@pytest.mark.parametrize("epochs", [1, 2])
@pytest.mark.parametrize(("n", "drop"), [(6, True), (6, False)])
def test_shards_of_six_records_over_three_read_each_once_an_epoch(read, n, drop, epochs):
    found = [i for shard in range(3) for i in keys(read(n, shard, 3, drop=drop, epochs=epochs))]
    assert sorted(found) == sorted(list(range(n)) * epochs)


@both
def test_every_record_has_a_random_stream_of_its_own(read):
    found = [each for shard in range(3) for each in read(8, shard, 3, epochs=2, shuffle=True)]
    assert len({each.rng.random() for each in found}) == len(found)
    again = [each for shard in range(3) for each in read(8, shard, 3, epochs=2, shuffle=True)]
    assert again[3].rng.random() == read(8, 0, 3, epochs=2, shuffle=True)[3].rng.random()


@pytest.mark.parametrize("epochs", [0, -1])
def test_no_epochs_are_refused(epochs):
    with pytest.raises(ValueError, match="number of epochs must be greater"):
        theirs(18, epochs=epochs)
    with pytest.raises(ValueError, match="num_epochs must be an integer of at least 1"):
        ours(18, epochs=epochs)


def test_an_index_past_the_end_is_an_index_error():
    sampler = IndexSampler(42, NoSharding(), num_epochs=1)
    mine = DistributedSampler(42, 1, 0).grain_sampler()
    for each in (sampler, mine):
        with pytest.raises(IndexError, match=r"42"):
            each[42]


@pytest.mark.parametrize("seed", [(3, 4), "3"])
def test_a_seed_that_is_no_integer_is_a_type_error(seed):
    with pytest.raises(TypeError, match="seed"):
        theirs(4, shuffle=True, seed=seed)
    with pytest.raises(TypeError, match="seed must be an integer"):
        ours(4, shuffle=True, seed=seed)


# Stated differences


def test_a_negative_index_counts_from_the_end_as_pythons_do():
    """grain's raises."""
    with pytest.raises(IndexError, match="-1"):
        SequentialSampler(42, NoSharding())[-1]
    mine = DistributedSampler(42, 1, 0, shuffle=False).source()
    assert mine[-1] == 41


def test_indices_are_a_ranks_own_and_not_the_loaders():
    """grain's loader asks one sampler for every third index; ours is one rank's, asked for each."""
    assert [each.index for each in theirs(8, 1, 3)] == [1, 4, 7]
    assert [each.index for each in ours(8, 1, 3)] == [0, 1, 2]


@pytest.mark.parametrize("shuffle", [False, True])
def test_records_are_dealt_out_over_the_whole_data_and_not_within_blocks(shuffle):
    """grain's shard 0 of three reads records 0 and 1 of six, and never others: it shuffles within
    the shard. Ours are dealt out of the epoch's order in turn, as torch's.
    """
    for epochs in (1, 2):
        assert set(keys(theirs(6, 0, 3, epochs=epochs, shuffle=shuffle))) == {0, 1}
    assert keys(ours(6, 0, 3)) == [0, 3]
    seen = {i for seed in range(20) for i in keys(ours(6, 0, 3, shuffle=True, seed=seed))}
    assert seen == set(range(6))


@pytest.mark.parametrize("epochs", [1, 2])
def test_eight_records_over_three_shards_come_once_an_epoch(epochs):
    """grain's shards repeat some records in two epochs and leave others behind; ours do not."""
    counts = [
        np.bincount(
            [i for shard in range(3) for i in keys(read(8, shard, 3, epochs=epochs))], minlength=8
        ).tolist()
        for read in (theirs, ours)
    ]
    assert counts[1] == [epochs] * 8
    assert (counts[0] == [epochs] * 8) == (epochs == 1)


def test_a_dropped_remainder_is_the_orders_end_and_not_each_shards():
    """Of eight over three both read six: grain's all but an end of each shard's block."""
    read = [
        sorted(i for shard in range(3) for i in keys(kind(8, shard, 3, drop=True)))
        for kind in (theirs, ours)
    ]
    assert read[1] == [0, 1, 2, 3, 4, 5]
    assert len(read[0]) == 6


def test_a_seed_of_64_bits_and_an_empty_data_set_are_taken():
    """grain's seeds are of 32 bits, and its data sets of one record at least."""
    with pytest.raises(ValueError, match="32-bit integer"):
        theirs(4, shuffle=True, seed=2**32)
    assert sorted(keys(ours(4, shuffle=True, seed=2**32))) == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="number of records must be greater"):
        SequentialSampler(0, NoSharding())
    assert keys(ours(0)) == []
