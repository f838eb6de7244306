"""A plan's batches for a loader, and somebody else's sampler as an order."""

import copy
import itertools
import json
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_ddp_weighting import (
    BudgetPlan,
    DistributedBatchSampler,
    DistributedSampler,
    EpochPlan,
    PackedPlan,
    sampler_order,
    weighted_order,
)
from jax_ddp_weighting.sampling import sampler_orders
from jax_ddp_weighting.sampling.kinds import count_steps

TAILS = st.sampled_from(["mask", "repeat", "drop"])


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(0, 40),
    ranks=st.integers(1, 5),
    size=st.integers(1, 4),
    tail=TAILS,
    data=st.data(),
)
def test_batches_are_the_slots_that_count_and_resume_anywhere(n, ranks, size, tail, data):
    plan = EpochPlan(n, ranks, size, tail=tail, seed=3)
    step = data.draw(st.integers(0, plan.steps_per_epoch))
    later = data.draw(st.integers(1, 5))
    first = []
    for rank in range(ranks):
        sampler, full = (
            DistributedBatchSampler(plan, rank, padding=padding) for padding in (False, True)
        )
        for each in (sampler, full):
            each.set_epoch(2)
        batches, filled = list(sampler), list(full)
        assert len(batches) == len(sampler) <= len(filled) == len(full) == plan.steps_per_epoch
        slots = [plan.batch(2, s, ranks=[rank]) for s in range(plan.steps_per_epoch)]
        assert filled == [each.ids[0].tolist() for each in slots]
        right = [each.ids[0][each.weights[0] > 0].tolist() for each in slots]
        assert batches == [ids for ids in right if ids]
        for s, each in enumerate(slots):
            assert full.weights(s).tolist() == each.weights[0].tolist()
        for s, ids in enumerate(batches):
            assert sampler.weights(s).tolist() == [1] * len(ids)
        begun = DistributedBatchSampler(plan, rank, padding=True)
        begun.set_epoch(2)
        reading = iter(begun)
        for _ in range(step):
            next(reading)
        state = json.loads(json.dumps(begun.state_dict()))
        assert state == begun.state_dict(consumed=step)
        first += [i for ids in batches[:step] for i in ids]
    other = EpochPlan(n, later, 2, tail=tail, seed=3)
    rest, by_ids = [], []
    for rank in range(later):
        sampler = DistributedBatchSampler(other, rank)
        sampler.load_state_dict(state)
        iter(sampler), sampler.state_dict()
        assert sampler.state_dict() == state or tail == "drop"  # which may leave out more
        rest += [i for ids in sampler for i in ids]
        ids = DistributedSampler(n, later, rank, tail=tail, seed=3, order="keyed")
        ids.load_state_dict(state)  # one state serves both
        by_ids += list(ids)
    if tail == "mask":
        assert sorted(first + rest) == list(range(n))
        assert sorted(rest) == sorted(by_ids)


LENGTHS = st.lists(st.integers(1, 9), min_size=0, max_size=30)
PLANS = {
    "budget": lambda lengths, ranks, tail: BudgetPlan(lengths, ranks, 18, shapes=3, tail=tail),
    "packed": lambda lengths, ranks, tail: PackedPlan(lengths, ranks, 2, 12, window=8),
}


@pytest.mark.parametrize("kind", PLANS)
@settings(max_examples=40, deadline=None)
@given(lengths=LENGTHS, ranks=st.integers(1, 4), tail=TAILS, data=st.data())
def test_plans_by_tokens_are_read_and_resumed_too(kind, lengths, ranks, tail, data):
    plan = PLANS[kind](lengths, ranks, tail)
    steps = count_steps(plan, 2)
    stop = data.draw(st.integers(0, steps))
    read = []
    for rank in range(ranks):
        full = DistributedBatchSampler(plan, rank, padding=True, lengths=True)
        short = DistributedBatchSampler(plan, rank)
        for each in (full, short):
            each.set_epoch(2)
        held, batches = [], list(full)
        assert len(batches) == len(full) == steps
        for step, batch in enumerate(batches):
            slots = plan.batch(2, step, [rank])
            assert {length for _, length in batch} <= {slots.length}
            rows, weights = [row for row, _ in batch], full.weights(step)
            assert weights.tolist() == slots.weights[0].tolist()
            if kind == "packed":
                assert rows == [[i for i in row if i >= 0] for row in slots.ids[0].tolist()]
                held.append([row for row in rows if row])
            else:
                assert rows == slots.ids[0].tolist()
                held.append([i for i, w in zip(rows, weights, strict=True) if w])
        assert list(short) == [batch for batch in held if batch]
        assert len(short) == len(list(short))
        assert short.state_dict()["position"] == full.state_dict()["position"]
        # stopped after some of this rank's batches, and gone on with
        begun = DistributedBatchSampler(plan, rank)
        begun.set_epoch(2)
        reading = iter(begun)
        first = [next(reading) for _ in range(min(stop, len(begun)))]
        if is_out_of_step(plan, 2, len(first)):  # below
            read += flatten(short)
            continue
        assert begun.state_dict() == begun.state_dict(consumed=len(first))
        begun.load_state_dict(json.loads(json.dumps(begun.state_dict())))
        read += flatten([*first, *begun])
    if plan.tail == "mask":
        assert sorted(read) == list(range(len(lengths)))


def flatten(batches):
    rows = [row for batch in batches for row in batch]
    return [i for row in rows for i in (row if isinstance(row, list) else [row])]


def is_out_of_step(plan, epoch, batches):
    """Whether ranks that have read so many batches each, as far as they have, stand elsewhere."""
    held = [
        [s for s in range(count_steps(plan, epoch)) if plan.batch(epoch, s, [rank]).weights.any()]
        for rank in range(plan.num_replicas)
    ]
    most = max(map(len, held))
    places = {tuple(steps[:batches]) for steps in held if steps[:batches]}
    trailing = [steps == list(range(len(steps))) for steps in held]
    return 0 < batches < most and not all(trailing) and len(places) > 1


@pytest.mark.parametrize("kind", [*PLANS, "epoch"])
@settings(max_examples=60, deadline=None)
@given(lengths=LENGTHS, ranks=st.integers(1, 4), data=st.data())
def test_ranks_that_read_in_step_have_one_state_or_none(kind, lengths, ranks, data):
    plan = (
        EpochPlan(len(lengths), ranks, 2)
        if kind == "epoch"
        else PLANS[kind](lengths, ranks, "mask")
    )
    stop = data.draw(st.integers(0, count_steps(plan, 0)))
    samplers = [DistributedBatchSampler(plan, rank) for rank in range(ranks)]
    read = [batch for each in samplers for batch in itertools.islice(iter(each), stop)]
    refused = []
    for saved in samplers:
        try:
            state = saved.state_dict()
        except ValueError as error:
            refused.append(str(error))
            continue
        rest = [DistributedBatchSampler(plan, rank) for rank in range(ranks)]
        for each in rest:
            each.load_state_dict(state)
        found = flatten(read) + [i for each in rest for i in flatten(each)]
        assert sorted(found) == list(range(len(lengths)))
    assert not refused or (kind == "budget" and is_out_of_step(plan, 0, stop))
    assert all("padding must be True where a rank has no rows" in text for text in refused)


def test_a_rank_without_rows_in_the_middle_is_told_and_one_with_padding_goes_on():
    plan = BudgetPlan([1, 4, 3], num_replicas=2, budget=6, shapes=2, seed=2)
    samplers = [DistributedBatchSampler(plan, rank) for rank in (0, 1)]
    assert [list(sampler) for sampler in samplers] == [[[0], [1]], [[2]]]
    for sampler in samplers:
        next(iter(sampler))
        with pytest.raises(
            ValueError, match=r"padding must be True .* got False and step 0 .* rank 1"
        ):
            sampler.state_dict()
    full = DistributedBatchSampler(plan, 1, padding=True)
    next(iter(full))
    again = DistributedBatchSampler(plan, 1, padding=True)
    again.load_state_dict(full.state_dict())
    assert list(again) == [[2]]


def test_who_counts_from_the_epochs_start_after_a_resume_is_told():
    sampler = DistributedBatchSampler(EpochPlan(20, 1, 2), 0)
    next(iter(sampler))
    with pytest.raises(ValueError, match="consumed must be at most what was read, 1, got 5"):
        sampler.state_dict(consumed=5)


def test_a_rank_with_a_step_less_has_read_the_epoch_when_it_has_ended():
    plan = EpochPlan(9, 4, 2, shuffle=False)
    samplers = [DistributedBatchSampler(plan, rank) for rank in range(4)]
    assert [len(list(sampler)) for sampler in samplers] == [2, 1, 1, 1]
    assert {sampler.state_dict()["position"] for sampler in samplers} == {9}


def test_it_can_be_pickled_and_copied_and_knows_the_plans_own_weights():
    order = weighted_order([1, 2, 0, 1], 6)
    plan = EpochPlan.from_order(order, 2, 2, weights=[0.5, 1, 1, 0])
    sampler = DistributedBatchSampler(plan, 1)
    sampler.set_epoch(3)
    for twin in (pickle.loads(pickle.dumps(sampler)), copy.deepcopy(sampler)):
        ids = [i for batch in twin for i in batch]
        assert ids == order(3)[1::2].tolist()
        weights = np.concatenate([twin.weights(step) for step in range(len(twin))])
        assert weights.tolist() == [[0.5, 1, 1, 0][i] for i in ids]


def test_bad_arguments_are_refused():
    plan = EpochPlan(9, 4, 2)
    with pytest.raises(TypeError, match=r"BatchSampler: plan must be an EpochPlan, .* got int"):
        DistributedBatchSampler(5, 0)
    with pytest.raises(ValueError, match=r"rank must be in \[0, 4\), got 4"):
        DistributedBatchSampler(plan, 4)
    with pytest.raises(ValueError, match=r"lengths must be False where the plan has none"):
        DistributedBatchSampler(plan, 0, lengths=True)
    packed = DistributedBatchSampler(PackedPlan([3, 4], 1, 1, 9), 0)
    state = packed.state_dict() | {"position": 9}
    with pytest.raises(ValueError, match=r"resumed: position must be in \[0, 1\], got 9"):
        packed.load_state_dict(state)
    sampler = DistributedBatchSampler(plan, 1)
    with pytest.raises(ValueError, match=r"weights: step must be in \[0, 0\], got 1"):
        sampler.weights(1)
    with pytest.raises(ValueError, match=r"consumed must be in \[0, 2\], got 3"):
        sampler.state_dict(consumed=3)
    with pytest.raises(ValueError, match="num_examples must be this sampler's, 9, got 8"):
        sampler.load_state_dict(DistributedBatchSampler(EpochPlan(8, 4, 2), 0).state_dict())
    with pytest.raises(ValueError, match=r"epoch must be .*, got -1"):
        sampler.set_epoch(-1)


# --- somebody else's sampler ----------------------------------------------------------------------


class Shuffled:
    """As many are written: told its epoch, it shuffles."""

    def __init__(self, n):
        self.n, self.epoch = n, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter(np.random.default_rng(self.epoch).permutation(self.n).tolist())


def test_a_samplers_own_epochs_are_dealt_out_and_resumed():
    for epoch in (0, 1, 4):
        whole = np.random.default_rng(epoch).permutation(10).tolist()
        shares = []
        for rank in range(3):
            sampler = DistributedSampler(
                10, 3, rank, order=sampler_order(Shuffled(10)), tail="mask"
            )
            sampler.set_epoch(epoch)
            shares.append(list(sampler))
            assert shares[-1] == whole[rank::3]
        state = sampler.state_dict(consumed=2)
        other = DistributedSampler(10, 1, 0, order=sampler_order(Shuffled(10)), tail="mask")
        other.load_state_dict(state)
        assert list(other) == whole[6:]
    assert sampler_order([2, 0, 1])(7) == [2, 0, 1]


class Generator:
    def manual_seed(self, seed):
        self.rng = np.random.default_rng(seed)


class Drawing:
    """As torch's: a generator, and no set_epoch."""

    def __init__(self):
        self.generator, self.replacement = Generator(), True

    def __iter__(self):
        return iter(self.generator.rng.integers(0, 5, 8).tolist())


def test_a_samplers_generator_is_seeded_by_seed_and_epoch():
    orders = [sampler_order(Drawing(), seed=seed) for seed in (0, 0, 1)]
    draws = [[tuple(order(epoch)) for epoch in (0, 1)] for order in orders]
    assert draws[0] == draws[1] != draws[2]
    assert draws[0][0] != draws[0][1]
    assert EpochPlan.from_order(orders[0], 2, 2, num_examples=5).epoch_length == 8


@pytest.mark.parametrize(
    ("sampler", "error", "match"),
    [
        (iter([1]), TypeError, "got list_iterator, which can be read but once"),
        (3, TypeError, "got int, which cannot be read"),
        (DistributedSampler(8, 2, 0), ValueError, "not be sharded already, got a .* of 2 replicas"),
    ],
)
def test_bad_samplers_are_refused(sampler, error, match):
    with pytest.raises(error, match=f"^sampler_order: sampler must .*{match}"):
        sampler_order(sampler)
    with pytest.raises(ValueError, match="sampler_order: seed must be"):
        sampler_order([1], seed=2**64)


@pytest.mark.parametrize("counted", [False, True])
def test_a_sampler_without_an_end_is_refused(counted, monkeypatch):
    monkeypatch.setattr(sampler_orders, "_UNCOUNTED", 100)

    class Endless:
        def __iter__(self):
            return itertools.cycle(range(7))

    class Counted(Endless):
        def __len__(self):
            return 7

    order = sampler_order(Counted() if counted else Endless())
    with pytest.raises(ValueError, match=r"must come to the end of its epoch, got more than 100"):
        EpochPlan.from_order(order, 2, 2, repeats=True)


def test_a_sampler_may_have_more_ids_than_are_read_of_one_without_a_length(monkeypatch):
    monkeypatch.setattr(sampler_orders, "_UNCOUNTED", 3)
    assert len(sampler_order(range(7))(0)) == 7
