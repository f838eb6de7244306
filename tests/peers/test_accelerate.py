"""What accelerate's tests hold of its sampler shards, asked of plans of ours.

Facts of accelerate 1.15 (``tests/test_data_loader.py``: batch samplers sharded over two processes)
with numbers of theirs; the code is ours. accelerate deals out whole batches, or parts of a batch;
a plan of ours deals out ids. So what is compared is what both promise: which examples a step of all
ranks holds, what the tail is filled with, and how many steps each rank makes.
"""

import pytest
from accelerate.data_loader import BatchSamplerShard, SkipBatchSampler
from torch.utils.data import BatchSampler

from jax_ddp_weighting import EpochPlan, audit_ids

RANKS, ROWS = 2, 3


def shard(n, drop_last, even, split=False):
    """step -> rank -> ids, as accelerate gives them."""
    batch = ROWS * RANKS if split else ROWS
    batches = BatchSampler(range(n), batch, drop_last)
    shards = [
        list(BatchSamplerShard(batches, RANKS, rank, split_batches=split, even_batches=even))
        for rank in range(RANKS)
    ]
    steps = max(map(len, shards))
    return [[part[step] if step < len(part) else [] for part in shards] for step in range(steps)]


def plan(n, tail):
    """step -> rank -> accepted ids, by a plan of ours."""
    ours = EpochPlan(n, RANKS, ROWS, shuffle=False, tail=tail)
    batches = [ours.batch(0, step) for step in range(ours.steps_per_epoch)]
    return [
        [row[weight > 0].tolist() for row, weight in zip(b.ids, b.weights, strict=True)]
        for b in batches
    ]


def union(steps):
    return [sorted(i for part in step for i in part) for step in steps]


@pytest.mark.parametrize("n", [24, 21, 22, 20, 2, 6, 7])
@pytest.mark.parametrize("split", [False, True])
def test_steps_of_all_ranks_hold_the_same_examples_where_the_tail_is_cut(n, split):
    """24 is a multiple of all ranks' rows, 21 of one rank's, 22 and 20 of neither, 2 is tiny."""
    assert union(shard(n, drop_last=True, even=True, split=split)) == union(plan(n, "drop"))


@pytest.mark.parametrize("n", [24, 21, 22, 20, 2, 6, 7])
@pytest.mark.parametrize("split", [False, True])
def test_steps_of_all_ranks_hold_the_same_examples_where_each_is_read_once(n, split):
    """accelerate without even batches, and a masked tail, are both every example once."""
    theirs, ours = shard(n, drop_last=False, even=False, split=split), plan(n, "mask")
    assert union(theirs) == union(ours)
    audit_ids([i for step in ours for part in step for i in part], n).check_exactly_once()


@pytest.mark.parametrize("n", [24, 21, 22, 20])
def test_both_read_every_example_where_the_tail_is_filled_with_the_first_ones(n):
    theirs, ours = shard(n, drop_last=False, even=True), plan(n, "repeat")
    for steps in (theirs, ours):
        ids = [i for step in steps for part in step for i in part]
        assert set(ids) == set(range(n))
        extra = sorted(ids)
        for i in range(n):
            extra.remove(i)
        assert extra == list(range(len(extra)))  # the order's start, and that once


@pytest.mark.parametrize("n", [24, 21, 22, 20, 2])
def test_ranks_make_the_same_number_of_steps(n):
    theirs = shard(n, drop_last=False, even=True)
    assert len(theirs) == EpochPlan(n, RANKS, ROWS, tail="mask").steps_per_epoch


@pytest.mark.parametrize("skip", [0, 1, 2, 4])
def test_skipping_batches_is_resuming_at_a_place(skip):
    """16 examples in batches of 4, of which 2 are skipped."""
    batches = BatchSampler(range(16), 4, drop_last=False)
    ours = EpochPlan(16, 1, 4, shuffle=False)
    rest = ours.resumed(0, ours.position(skip))
    assert [rest.batch(0, step).ids[0].tolist() for step in range(rest.steps_per_epoch)] == list(
        SkipBatchSampler(batches, skip)
    )


# Stated differences


def test_ids_are_dealt_out_one_by_one_and_not_by_batches():
    """Rank 0 of accelerate reads 0, 1, 2; ours, as torch's sampler does, 0, 2, 4."""
    assert shard(24, False, True)[0] == [[0, 1, 2], [3, 4, 5]]
    assert plan(24, "mask")[0] == [[0, 2, 4], [1, 3, 5]]


@pytest.mark.parametrize(
    ("n", "theirs", "ours"), [(21, 24, 22), (22, 24, 22), (20, 24, 20), (2, 6, 2)]
)
def test_a_repeated_tail_fills_rounds_and_not_batches(n, theirs, ours):
    """accelerate fills every rank's last batch with copies that count; ours, as torch's sampler
    does, fills the last round of ranks, and the rest of the last step weighs nothing.
    """
    counted = [
        sum(len(part) for step in steps for part in step)
        for steps in (shard(n, False, True), plan(n, "repeat"))
    ]
    assert counted == [theirs, ours]


def test_ranks_without_even_batches_make_the_same_steps_all_the_same():
    """accelerate's rank 1 is one step short, and a collective would wait for it."""
    assert [len(part) for part in shard(21, False, False)[-1]] == [3, 0]
    assert EpochPlan(21, RANKS, ROWS).batch(0, 3).weights.tolist() == [[1, 1, 0], [1, 0, 0]]
