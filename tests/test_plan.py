import dataclasses

import numpy as np
import pytest

from jax_ddp_weighting import EpochPlan, audit_ids


def naive_epoch(n, ranks, batch_size, tail, order):
    """An epoch in plain lists: step -> rank -> [(id, weight)]."""
    slots = n // (ranks * batch_size) * batch_size if tail == "drop" else -(-n // ranks)
    steps = []
    for step in range(-(-slots // batch_size)):
        rows = []
        for rank in range(ranks):
            row = []
            for j in range(step * batch_size, (step + 1) * batch_size):
                place = j * ranks + rank
                real = place < n or (tail == "repeat" and j < slots)
                row.append((order[place % n], int(real)))
            rows.append(row)
        steps.append(rows)
    return steps


def walked(plan, epoch=0):
    """All batches of an epoch, ids and weights as [ranks, slots]."""
    batches = [plan.batch(epoch, step) for step in range(plan.steps_per_epoch)]
    ids = np.concatenate([b.ids for b in batches], axis=1)
    return ids, np.concatenate([b.weights for b in batches], axis=1)


def whole_order(plan, epoch):
    one_rank = EpochPlan(
        plan.num_examples, 1, 1, shuffle=plan.shuffle, seed=plan.seed, order=plan.order
    )
    return one_rank.slots(epoch, 0).ids.tolist()


@pytest.mark.parametrize("order", ["keyed", "torch"])
@pytest.mark.parametrize(
    ("tail", "slots", "accepted", "unique", "duplicated"),
    [
        ("mask", 48, 47, 47, 0),  # one slot of padding, weight 0
        ("repeat", 48, 48, 47, 1),  # torch's copy
        ("drop", 45, 45, 45, 0),  # two ids left out
    ],
)
def test_47_ids_over_3_ranks(tail, slots, accepted, unique, duplicated, order):
    plan = EpochPlan(47, 3, 1, tail=tail, order=order)
    ids, weights = walked(plan, epoch=2)
    audit = audit_ids(ids, 47, weights=weights)
    assert ids.size == plan.num_samples * 3 == slots
    assert weights.sum() == plan.accepted_per_epoch == audit.accepted == accepted
    assert (audit.unique, len(audit.duplicated)) == (unique, duplicated)
    assert not np.array_equal(ids, walked(plan, epoch=3)[0])
    assert np.array_equal(ids, walked(plan, epoch=2)[0])


@pytest.mark.parametrize("tail", ["mask", "repeat", "drop"])
@pytest.mark.parametrize(
    ("n", "ranks", "batch_size"),
    [
        (47, 3, 1),
        (47, 3, 4),  # a short last batch and an uneven last round of ranks
        (48, 3, 4),  # nothing uneven
        (13, 4, 5),  # one step for everything
        (3, 8, 2),  # fewer examples than ranks
        (1, 1, 1),
        (0, 2, 2),  # nothing at all
        (101, 4, 8),
    ],
)
@pytest.mark.parametrize("shuffle", [True, False])
def test_a_plan_is_the_naive_one(n, ranks, batch_size, tail, shuffle):
    for order in ("keyed", "torch"):
        plan = EpochPlan(n, ranks, batch_size, tail=tail, shuffle=shuffle, seed=3, order=order)
        naive = naive_epoch(n, ranks, batch_size, tail, whole_order(plan, 1))
        assert plan.steps_per_epoch == len(naive)
        for step, rows in enumerate(naive):
            batch = plan.batch(1, step)
            assert batch.ids.shape == batch.weights.shape == (ranks, batch_size)
            assert batch.ids.dtype == np.int64
            assert batch.weights.dtype == np.int32
            assert batch.ids.tolist() == [[i for i, _ in row] for row in rows]
            assert batch.weights.tolist() == [[w for _, w in row] for row in rows]
            assert plan.accepted(step) == sum(w for row in rows for _, w in row)
        for rank in range(ranks):
            slots = plan.slots(1, rank)
            read = [slot for rows in naive for slot in rows[rank]][: plan.num_samples]
            assert list(zip(slots.ids.tolist(), slots.weights.tolist(), strict=True)) == read


def test_a_batch_of_some_ranks_is_their_rows():
    plan = EpochPlan(1000, 8, 16)
    whole, some = plan.batch(4, 3), plan.batch(4, 3, ranks=[6, 1])
    assert np.array_equal(some.ids, whole.ids[[6, 1]])
    assert np.array_equal(some.weights, whole.weights[[6, 1]])


def test_a_plan_is_frozen_and_comparable():
    plan = EpochPlan(10, 2, 3)
    assert plan == EpochPlan(10, 2, 3, seed=0)
    assert hash(plan) == hash(EpochPlan(10, 2, 3))
    assert plan != EpochPlan(10, 2, 3, seed=1)
    with pytest.raises(dataclasses.FrozenInstanceError, match="seed"):
        plan.seed = 1


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (
            {"num_examples": -1},
            ValueError,
            r"EpochPlan: num_examples must be an integer in \[0, 2\*\*62\], got -1",
        ),
        (
            {"num_examples": 2**62 + 1},
            ValueError,
            r"num_examples must be an integer in \[0, 2\*\*62\], got 46116",
        ),
        ({"num_examples": 4.0}, TypeError, r"num_examples must be an integer .* got 4.0 \(float\)"),
        (
            {"num_replicas": 0},
            ValueError,
            r"num_replicas must be an integer in \[1, 2\*\*31\], got 0",
        ),
        ({"batch_size": 0}, ValueError, r"batch_size must be an integer in \[1, 2\*\*31\], got 0"),
        (
            {"seed": 2**64},
            ValueError,
            r"seed must be an integer in \[-2\*\*63, 2\*\*64\), got 1844",
        ),
        ({"seed": "0"}, TypeError, r"seed must be an integer .* got '0' \(str\)"),
        ({"shuffle": 1}, TypeError, "shuffle must be True or False, got 1"),
        ({"tail": "pad"}, ValueError, 'tail must be "mask", "repeat" or "drop", got \'pad\''),
        ({"order": "random"}, ValueError, 'order must be "keyed" or "torch", got \'random\''),
    ],
)
def test_a_bad_plan_is_one_clear_error(change, error, text):
    arguments = {"num_examples": 10, "num_replicas": 2, "batch_size": 3, **change}
    with pytest.raises(error, match=text):
        EpochPlan(**arguments)


@pytest.mark.parametrize(
    ("ask", "text"),
    [
        (
            lambda p: p.batch(0, 2),
            r"EpochPlan.batch: step must be in \[0, 2\), got 2\. An epoch of this plan has 2 steps",
        ),
        (lambda p: p.batch(0, -1), r"step must be in \[0, 2\), got -1"),
        (lambda p: p.accepted(2), r"EpochPlan.accepted: step must be in \[0, 2\), got 2"),
        (
            lambda p: p.batch(-1, 0),
            r"EpochPlan.batch: epoch must be an integer in \[0, 2\*\*63\), got -1",
        ),
        (
            lambda p: p.slots(-1, 0),
            r"EpochPlan.slots: epoch must be an integer in \[0, 2\*\*63\), got -1",
        ),
        (
            lambda p: p.slots(0, 2),
            r"EpochPlan.slots: rank must be in \[0, 2\), got 2\. Ranks count from zero",
        ),
        (lambda p: p.batch(0, 0, [0, 2]), r"EpochPlan.batch: ranks must be in \[0, 2\), got 2"),
        (lambda p: p.slots(0, 0, stop=6), r"EpochPlan.slots: stop must be in \[0, 5\], got 6"),
    ],
)
def test_asking_a_plan_for_what_it_has_not_is_one_clear_error(ask, text):
    with pytest.raises(ValueError, match=text):
        ask(EpochPlan(10, 2, 3))
