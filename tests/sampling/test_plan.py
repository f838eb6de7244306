import dataclasses
import pickle
import tracemalloc

import numpy as np
import pytest

from jax_ddp_weighting import EpochPlan, audit_ids, keyed_order


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
        (
            {"order": "torch", "num_examples": 2**31},
            ValueError,
            r'num_examples must be below 2\*\*31 with order="torch", got 2147483648',
        ),
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


def test_ranks_are_a_sequence():
    with pytest.raises(TypeError, match=r"ranks must be a sequence of ranks, got 1\. Write \[1\]"):
        EpochPlan(10, 2, 3).batch(0, 0, 1)


def test_a_plan_can_be_pickled():
    for plan in (EpochPlan(10, 2, 3), EpochPlan.from_order([2, 0, 1], 1, 2)):
        twin = pickle.loads(pickle.dumps(plan))
        assert twin == plan
        assert np.array_equal(twin.batch(1, 0).ids, plan.batch(1, 0).ids)


# The audit in closed form


@pytest.mark.parametrize("tail", ["mask", "repeat", "drop"])
@pytest.mark.parametrize(
    ("n", "ranks", "batch_size"), [(47, 3, 4), (3, 8, 1), (2, 7, 2), (0, 2, 1)]
)
def test_the_closed_form_is_the_audit_of_the_slots(n, ranks, batch_size, tail):
    for order in ("keyed", "torch"):
        plan = EpochPlan(n, ranks, batch_size, tail=tail, order=order)
        slots = [plan.slots(3, rank) for rank in range(ranks)]
        walked = audit_ids([s.ids for s in slots], n, weights=[s.weights for s in slots], epoch=3)
        assert plan.audit(3) == walked


def test_the_audit_of_a_plan_too_large_to_walk():
    plan = EpochPlan(10**12, 65_536, 4096, tail="drop")
    audit = plan.audit(1, limit=5)
    assert audit.num_omitted == 10**12 % (65_536 * 4096)
    assert len(audit.omitted) == 5
    assert audit.accepted == audit.unique == 10**12 - audit.num_omitted
    EpochPlan(10**12, 65_536, 4096).audit(1).check_exactly_once()
    copies = EpochPlan(10**12, 65_536, 4096, tail="repeat").audit(1, limit=10**6)
    assert len(copies.duplicated) == copies.num_duplicated == -(10**12) % 65_536


def test_an_audit_that_lists_less_counts_as_much():
    whole, short = (EpochPlan(1000, 30, 20, tail="drop").audit(0, limit=k) for k in (10_000, 7))
    assert len(whole.omitted) == whole.num_omitted == short.num_omitted == 400
    assert set(short.omitted) < set(whole.omitted)
    assert len(short.omitted) == 7


# An order of one's own


@pytest.mark.parametrize("tail", ["mask", "repeat", "drop"])
@pytest.mark.parametrize("batch_size", [1, 4])
def test_an_order_of_ones_own_is_read_by_the_same_rules(tail, batch_size):
    own = [5, 19, 2, 11, 7, 3, 0]
    plan = EpochPlan.from_order(own, 3, batch_size, num_examples=20, tail=tail)
    naive = naive_epoch(7, 3, batch_size, tail, own)
    for epoch in (0, 9):
        for step, rows in enumerate(naive):
            assert plan.batch(epoch, step).ids.tolist() == [[i for i, _ in row] for row in rows]
    slots = [plan.slots(0, rank) for rank in range(3)]
    walked = audit_ids([s.ids for s in slots], 20, weights=[s.weights for s in slots], epoch=0)
    assert plan.audit(0) == walked


def test_ids_drawn_with_replacement_are_counted():
    plan = EpochPlan.from_order([4, 4, 1, 4], 2, 2, num_examples=5, repeats=True)
    audit = plan.audit(0)
    assert (audit.duplicated, audit.omitted) == ({4: 3}, (0, 2, 3))


def test_a_plan_keeps_its_own_copy_of_an_order():
    own = np.array([2, 0, 1])
    plan = EpochPlan.from_order(own, 1, 3)
    own[:] = 0
    assert plan.batch(0, 0).ids.tolist() == [[2, 0, 1]]
    with pytest.raises(ValueError, match="read-only"):
        plan.order.ids[0] = 1


def test_plans_of_equal_orders_are_equal():
    one, same = (EpochPlan.from_order([2, 0, 1], 1, 3) for _ in range(2))
    other = EpochPlan.from_order([2, 1, 0], 1, 3)
    assert one == same
    assert hash(one) == hash(same)
    assert one != other
    assert one.fingerprint != other.fingerprint


@pytest.mark.parametrize(
    ("ids", "options", "error", "text"),
    [
        ([0, 1, 1, 2, 2], {}, ValueError, r"got 1, 2 more than once\. Pass repeats=True"),
        (
            [0] * 2 + list(range(1, 43)) * 2,
            {},
            ValueError,
            "got 0, 1, 2, 3, 4, 5, 6, 7, 8, 9 and 33 more more than once",
        ),
        ([0, 3], {}, ValueError, r"ids of an order must be in \[0, 2\), got 3\. .* give num_exam"),
        ([0, -3], {"num_examples": 9}, ValueError, "ids must be at least 0, got -3"),
        ([0.0, 1.0], {}, TypeError, "ids must be integers, got float64"),
    ],
)
def test_a_bad_order_of_ones_own_is_one_clear_error(ids, options, error, text):
    with pytest.raises(error, match=text):
        EpochPlan.from_order(ids, 2, 2, **options)


def test_an_order_of_ones_own_is_not_shuffled():
    order = EpochPlan.from_order([1, 0], 1, 1).order
    with pytest.raises(ValueError, match="shuffle must be False with an order of your own"):
        EpochPlan(2, 1, 1, order=order)


# Cost: what is asked for, whatever the epoch's length


@pytest.mark.parametrize(("n", "ranks"), [(10**9, 1024), (10**12, 65_536), (2**62, 2**20)])
def test_a_batch_anywhere_costs_its_rows(n, ranks):
    keyed_order(range(5000), 5000, seed=0, epoch=0)  # what is allocated once
    tracemalloc.start()
    plan = EpochPlan(n, ranks, 1024, seed=1)
    for epoch, step in ((0, 0), (7, plan.steps_per_epoch - 1)):
        plan.batch(epoch, step, ranks=[0, ranks - 1])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2 * 1024 * 100  # bytes
