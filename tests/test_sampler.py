import json
import subprocess
import sys
from pathlib import Path

import pytest

from jax_ddp_weighting import DistributedSampler, audit_ids

RECORDED = json.loads((Path(__file__).parent / "data" / "torch_sampler.json").read_text())


def test_importing_the_sampler_imports_neither_jax_nor_scipy():
    """In a subprocess, since this one has imported everything."""
    program = (
        "import jax_ddp_weighting.sampler, sys;"
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
