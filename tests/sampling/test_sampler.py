import copy
import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from jax_ddp_weighting import CoverageError, DistributedSampler, audit_ids

RECORDED = json.loads((Path(__file__).parents[1] / "recorded" / "torch_sampler.json").read_text())


def test_importing_the_sampler_imports_neither_jax_nor_scipy():
    """In a subprocess, since this one has imported everything."""
    program = (
        "import jax_ddp_weighting.sampling, sys;"
        "print([name for name in ('jax', 'scipy', 'torch') if name in sys.modules])"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == "[]"


def test_every_recorded_torch_sampler_is_matched():
    assert len(RECORDED["cases"]) == 332
    for n, ranks, drop_last, shuffle, seed, epoch, expected in RECORDED["cases"]:
        for rank in range(ranks):
            sampler = DistributedSampler(range(n), ranks, rank, shuffle, seed, drop_last)
            sampler.set_epoch(epoch)
            assert list(sampler) == expected[rank]
            assert len(sampler) == sampler.num_samples == len(expected[rank])
            assert sampler.total_size == sum(map(len, expected))


def test_the_recorded_samplers_tell_wrong_tails_apart():
    """The control: with `drop_last` turned round, every uneven case differs."""
    uneven = [case for case in RECORDED["cases"] if case[0] % case[1]]
    assert uneven
    for n, ranks, drop_last, shuffle, seed, epoch, expected in uneven:
        samplers = [
            DistributedSampler(n, ranks, rank, shuffle, seed, not drop_last)
            for rank in range(ranks)
        ]
        for sampler in samplers:
            sampler.set_epoch(epoch)
        assert [list(sampler) for sampler in samplers] != expected


@pytest.mark.parametrize("order", ["torch", "keyed"])
@pytest.mark.parametrize(
    ("tail", "lengths"),
    [("repeat", [16, 16, 16]), ("mask", [16, 16, 15]), ("drop", [15, 15, 15])],
)
def test_47_ids_over_3_ranks(tail, lengths, order):
    samplers = [DistributedSampler(47, 3, rank, tail=tail, order=order) for rank in range(3)]
    read = [list(sampler) for sampler in samplers]
    assert [len(sampler) for sampler in samplers] == [len(ids) for ids in read] == lengths
    audit = audit_ids(read, 47)
    assert audit.accepted == sum(lengths)
    assert audit.unique == min(47, sum(lengths))
    assert len(audit.duplicated) == (tail == "repeat")
    assert all(type(i) is int for ids in read for i in ids)


def test_a_forgotten_set_epoch_is_said_once():
    sampler = DistributedSampler(10, 2, 0)
    first = list(sampler)
    with pytest.warns(UserWarning, match="DistributedSampler: epoch 0 is read again.*set_epoch"):
        assert list(sampler) == first
    assert list(sampler) == first
    sampler.set_epoch(1)
    assert list(sampler) != first


def test_a_changed_dataset_is_an_error():
    dataset = list(range(10))
    sampler = DistributedSampler(dataset, 2, 0)
    del dataset[6:]
    with pytest.raises(ValueError, match=r"len\(dataset\) must stay 10, got 6"):
        iter(sampler)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            {"rank": 4},
            r"DistributedSampler: rank must be in \[0, 4\), got 4\. Ranks count from zero; the "
            r"last of 4 replicas is rank 3\.",
        ),
        ({"rank": -1}, r"rank must be in \[0, 4\), got -1"),
        (
            {"num_replicas": 0},
            r"DistributedSampler: num_replicas must be an integer in \[1, 2\*\*31\], got 0",
        ),
        (
            {"dataset": -1},
            r"DistributedSampler: len\(dataset\) must be an integer in \[0, 2\*\*62\], got -1",
        ),
        (
            {"drop_last": True, "tail": "mask"},
            'drop_last must agree with tail, got drop_last=True and tail="mask"',
        ),
        ({"tail": "pad"}, "tail must be"),
        ({"order": "sorted"}, "order must be"),
    ],
)
def test_a_bad_sampler_is_one_clear_error(arguments, text):
    with pytest.raises(ValueError, match=text):
        DistributedSampler(**{"dataset": 10, "num_replicas": 4, "rank": 0, **arguments})


def test_several_samplers_share_no_state():
    one, two = (DistributedSampler(10, 2, 0) for _ in range(2))
    first = iter(one)
    next(first)
    assert list(two) == list(DistributedSampler(10, 2, 0))
    two.set_epoch(1)
    assert one.epoch == 0


def test_a_pass_that_was_left_early_may_be_begun_again():
    sampler = DistributedSampler(10, 2, 0)
    first = next(iter(sampler))
    assert next(iter(sampler)) == first  # no warning: nothing was read twice as a whole
    assert len(list(sampler)) == 5


@pytest.mark.parametrize("options", [{"shuffle": False}, {"shuffle": False, "order": range(10)}])
def test_an_order_that_never_changes_is_read_again_without_a_word(options):
    sampler = DistributedSampler(10, 2, 0, **options)
    assert list(sampler) == list(sampler)


def test_an_epoch_without_ids_is_read_again_without_a_word():
    sampler = DistributedSampler(0, 2, 0)
    assert list(sampler) == list(sampler) == []


@pytest.mark.parametrize("order", ["torch", "keyed"])
def test_a_share_longer_than_a_chunk_is_read_whole(order):
    sampler = DistributedSampler(60_001, 3, 1, order=order, tail="mask")
    ids = list(sampler)
    assert ids == sampler.indices().tolist()
    assert ids == sampler.plan.slots(0, 1).ids.tolist()[:20_000]
    assert len(ids) == len(sampler) == 20_000


def test_the_ranks_are_jaxs_processes_unless_they_are_given():
    sampler = DistributedSampler(10)
    assert (sampler.num_replicas, sampler.rank) == (1, 0)


def test_a_sampler_shows_what_torchs_shows():
    sampler = DistributedSampler(range(10), 4, 1, True, 5, True)
    shown = (sampler.dataset, sampler.num_replicas, sampler.rank, sampler.epoch, sampler.drop_last)
    assert shown == (range(10), 4, 1, 0, True)
    assert (sampler.shuffle, sampler.seed) == (True, 5)
    assert (sampler.num_samples, sampler.total_size) == (2, 8)


def test_a_sampler_can_be_pickled_and_copied_in_the_middle_of_a_pass():
    sampler = DistributedSampler(20, 2, 0)
    reader = iter(sampler)
    next(reader)
    for twin in (pickle.loads(pickle.dumps(sampler)), copy.deepcopy(sampler)):
        assert twin.state_dict() == sampler.state_dict()


# A dataset that is a share already


class Loader:
    def __init__(self, sampler):
        self.sampler = sampler

    def __len__(self):
        return 5


@pytest.mark.parametrize(
    "share",
    [
        DistributedSampler(20, 4, 1),
        DistributedSampler(20, 4, 1).source(),
        Loader(DistributedSampler(20, 4, 1)),
    ],
)
def test_a_share_of_a_share_is_refused(share):
    with pytest.raises(ValueError, match=r"dataset must not be sharded already.* of rank 1 of 4"):
        DistributedSampler(share, 4, 1)


def test_a_sampler_of_one_rank_is_no_share():
    assert len(DistributedSampler(DistributedSampler(20, 1, 0), 4, 1)) == 5


def test_a_share_given_as_an_order_is_refused():
    share = list(DistributedSampler(20, 4, 1))
    with pytest.raises(ValueError, match=r"ids of an order must be in \[0, 5\).*sharded already"):
        DistributedSampler(len(share), 4, 1, shuffle=False, order=share)


def test_sharding_twice_that_nobody_can_see_is_found_by_id():
    """A loader that reads every second id of a rank's share, as one that shards again does."""
    twice = [list(DistributedSampler(20, 2, rank))[rank::2] for rank in range(2)]
    with pytest.raises(CoverageError, match=r"10 of 20 ids omitted \("):
        audit_ids(twice, 20).check_exactly_once()


# Own orders


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        (
            {"order": [1, 0]},
            ValueError,
            "shuffle must be False with an order of your own, got True",
        ),
        ({"order": [1, 1, 0]}, ValueError, r"got 1 more than once\. Pass repeats=True"),
        ({"order": [1, 9, 10]}, ValueError, r"ids of an order must be in \[0, 10\), got 10"),
        ({"order": [1, -2]}, ValueError, "ids must be at least 0, got -2"),
        ({"order": [0.5]}, TypeError, "ids must be integers, got float64"),
        (
            {"order": [[0, 1]]},
            ValueError,
            r"ids must have one axis, got shape \(1, 2\)",
        ),
    ],
)
def test_a_bad_order_of_ones_own_is_one_clear_error(options, error, text):
    shuffle = text.startswith("shuffle")
    with pytest.raises(error, match=text):
        DistributedSampler(10, 2, 0, shuffle, **options)


def test_ids_drawn_with_replacement_are_kept_when_that_is_said():
    drawn = [3, 3, 0, 9, 3, 1, 0]
    shares = [
        list(DistributedSampler(10, 2, r, False, tail="mask", order=drawn, repeats=True))
        for r in range(2)
    ]
    assert shares == [drawn[0::2], drawn[1::2]]
