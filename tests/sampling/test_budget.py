"""Batches by tokens: one shape a step on all ranks, each id once, for all lengths and ranks."""

import copy
import os
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_ddp_weighting import BudgetPlan, CoverageError, EpochPlan, Ledger, audit_ids
from jax_ddp_weighting.sampling.shapes import find_least_padding

EXAMPLES = int(os.environ.get("LAW_EXAMPLES", "50"))
law = settings(max_examples=EXAMPLES, deadline=None)

LENGTHS = st.one_of(
    st.lists(st.integers(1, 40), max_size=60),
    st.lists(st.sampled_from([3, 3, 3, 7, 40]), max_size=60),  # ties, over every boundary
)


def log_normal(n, seed=0, median=100):
    drawn = np.random.default_rng(seed).lognormal(np.log(median), 0.8, n)
    return np.clip(drawn.astype(int), 1, 900)


def steps_of(plan, epoch):
    return [plan.batch(epoch, step) for step in range(plan.steps_per_epoch(epoch))]


def real_ids(slots):
    """The ids that count, a row on all ranks and then the next: in the order of their places."""
    return [
        int(slots.ids[rank, row])
        for row in range(slots.ids.shape[1])
        for rank in range(slots.ids.shape[0])
        if slots.weights[rank, row] > 0
    ]


def check_shapes(plan, steps, epoch):
    """Of every step: one shape on all ranks, within the budget, long enough for all that it has."""
    for number, slots in enumerate(steps):
        rows, length = plan.shape(epoch, number)
        assert slots.ids.shape == slots.weights.shape == (plan.num_replicas, rows)
        assert slots.length == length
        assert rows * length <= plan.budget
        assert all(plan.lengths[i] <= length for i in slots.ids.ravel())
    shapes = {plan.shape(epoch, number) for number in range(len(steps))}
    assert shapes <= set(plan.step_shapes)
    assert len(plan.step_shapes) <= plan.shapes


@law
@given(
    lengths=LENGTHS,
    ranks=st.integers(1, 6),
    budget=st.integers(40, 300),
    shapes=st.integers(1, 5),
    multiples=st.sampled_from([(1, 1), (1, 8), (2, 1), (3, 5)]),
    shuffle=st.booleans(),
    epoch=st.integers(0, 5),
)
def test_every_id_is_read_once_in_steps_of_few_shapes(
    lengths, ranks, budget, shapes, multiples, shuffle, epoch
):
    rows, length = multiples
    budget *= rows
    plan = BudgetPlan(
        lengths,
        ranks,
        budget,
        shapes=shapes,
        row_multiple=rows,
        length_multiple=length,
        shuffle=shuffle,
        seed=3,
    )
    assert all(each[0] % rows == 0 == each[1] % length for each in plan.step_shapes)
    steps = steps_of(plan, epoch)
    assert len(steps) == plan.steps_per_epoch == plan.steps_per_epoch(epoch + 1)
    check_shapes(plan, steps, epoch)
    read = [i for slots in steps for i in real_ids(slots)]
    assert sorted(read) == list(range(len(lengths)))
    assert plan.ids_in_order(epoch).tolist() == read
    assert plan.accepted_per_epoch == len(lengths)
    # only one step of an epoch has slots to spare
    assert sum((slots.weights == 0).any() for slots in steps) <= 1
    for rank in range(ranks):
        slots = plan.slots(epoch, rank)
        assert slots.ids.tolist() == [i for each in steps for i in each.ids[rank].tolist()]
        assert plan.num_samples == len(slots.ids)
        some = [plan.batch(epoch, step, [rank]) for step in range(len(steps))]
        assert all(np.array_equal(a.ids[0], b.ids[rank]) for a, b in zip(some, steps, strict=True))
    plan.audit(epoch).check_exactly_once()


@law
@given(
    lengths=LENGTHS,
    ranks=st.integers(1, 6),
    budget=st.integers(40, 300),
    shapes=st.integers(1, 5),
    tail=st.sampled_from(["repeat", "drop"]),
    shuffle=st.booleans(),
)
def test_the_other_tails_keep_their_promises(lengths, ranks, budget, shapes, tail, shuffle):
    plan = BudgetPlan(lengths, ranks, budget, shapes=shapes, tail=tail, shuffle=shuffle)
    steps = steps_of(plan, 2)
    check_shapes(plan, steps, 2)
    read = [i for slots in steps for i in real_ids(slots)]
    assert all(slots.weights.all() for slots in steps)  # nothing is padding
    assert plan.accepted_per_epoch == len(read)
    if tail == "repeat":
        assert set(read) == set(range(len(lengths)))
    else:
        assert len(set(read)) == len(read)
        most = max((slots.ids.size for slots in steps), default=ranks)
        assert len(lengths) - len(read) < most


@law
@given(
    lengths=LENGTHS,
    ranks=st.integers(1, 6),
    budget=st.integers(40, 300),
    tail=st.sampled_from(["mask", "repeat", "drop"]),
    stops=st.lists(st.tuples(st.floats(0, 1), st.integers(1, 6), st.integers(40, 300)), max_size=3),
)
def test_an_epoch_resumes_anywhere_on_any_ranks_in_its_own_order(
    lengths, ranks, budget, tail, stops
):
    plan = BudgetPlan(lengths, ranks, budget, shapes=3, tail=tail, seed=1)
    due = plan.ids_in_order(4).tolist()
    read = []
    for share, others, other_budget in stops:
        stop = int(share * plan.steps_per_epoch)
        for step in range(stop):
            read += real_ids(plan.batch(4, step))
        assert read == due[: len(read)]
        plan = plan.resumed(4, plan.position(stop), num_replicas=others, budget=other_budget)
        check_shapes(plan, steps_of(plan, 4), 4)
        assert plan.accepted_per_epoch == len(due) - len(read)
    assert read + [i for slots in steps_of(plan, 4) for i in real_ids(slots)] == due
    assert plan.ids_in_order(4).tolist() == due[len(read) :]


@pytest.mark.parametrize("others", [1, 3, 4, 8])
def test_an_epoch_resumes_at_every_place(others):
    plan = BudgetPlan(log_normal(30), 4, 1800, shapes=4)
    due = plan.ids_in_order(1).tolist()
    left = set()
    for position in range(plan.epoch_length + 1):
        rest = plan.resumed(1, position, num_replicas=others)
        found = rest.ids_in_order(1).tolist()
        assert found == due[len(due) - len(found) :]
        left.add(len(found))
    assert left == set(range(31))


def test_on_as_many_ranks_the_rest_has_the_very_steps_of_the_epoch():
    plan = BudgetPlan(log_normal(300), 4, 1800)
    rest = plan.resumed(1, plan.position(7))
    assert rest.steps_per_epoch == plan.steps_per_epoch - 7
    for step in range(rest.steps_per_epoch):
        np.testing.assert_array_equal(rest.batch(1, step).ids, plan.batch(1, step + 7).ids)
    assert rest.step_shapes == plan.step_shapes


def test_every_epoch_has_other_steps_in_another_order():
    lengths = log_normal(500)
    plan = BudgetPlan(lengths, 8, 9000, seed=2)
    first, second = ([frozenset(real_ids(s)) for s in steps_of(plan, e)] for e in (0, 1))
    # who goes together: all but the rows of shapes that have but one row on each rank
    assert all(len(each) == 8 for each in set(first) & set(second))
    assert len(set(first) & set(second)) < 3
    shapes = [[plan.shape(epoch, step) for step in range(len(first))] for epoch in (0, 1)]
    assert shapes[0] != shapes[1]
    assert sorted(shapes[0]) == sorted(shapes[1])
    # and is the same wherever it is made
    again = BudgetPlan(list(lengths), 8, 9000, seed=2)
    assert [frozenset(real_ids(s)) for s in steps_of(again, 1)] == second
    other = BudgetPlan(lengths, 8, 9000, seed=3)
    assert len(set(second) & {frozenset(real_ids(s)) for s in steps_of(other, 1)}) < 3
    plain = BudgetPlan(lengths, 8, 9000, shuffle=False)
    assert plain.ids_in_order(0).tolist() == plain.ids_in_order(1).tolist()
    assert np.all(np.diff([slots.length for slots in steps_of(plain, 0)]) <= 0)


def test_who_is_left_out_changes_and_so_does_who_moves_up():
    plan = BudgetPlan(log_normal(101), 4, 900, tail="drop")
    out = [set(range(101)) - set(plan.ids_in_order(epoch).tolist()) for epoch in range(40)]
    assert {len(each) for each in out} == {len(out[0])}
    assert len(set.union(*out)) > 20
    # of many equal lengths on both sides of a boundary, others are in the longer shape every time
    lengths = np.array([9, 9] + [4] * 40 + [1] * 20)
    plan = BudgetPlan(lengths, 4, 36, shapes=3)
    ups = set()
    for epoch in range(30):
        steps = [slots for slots in steps_of(plan, epoch) if slots.length == 9]
        ups |= {i for slots in steps for i in real_ids(slots) if lengths[i] == 4}
    assert len(ups) > 20


@pytest.mark.parametrize(
    ("n", "budget", "ranks"), [(500, 900, 8), (500, 9000, 1), (1000, 9000, 8), (3000, 4000, 3)]
)
@pytest.mark.parametrize(("shapes", "best"), [(8, 0.21), (16, 0.12)])
def test_padding_is_within_two_points_of_the_best_lengths(n, budget, ranks, shapes, best):
    lengths = log_normal(n, seed=n)
    report = BudgetPlan(lengths, ranks, budget, shapes=shapes).padding()
    assert report.plan.padding < best + 0.02
    assert report.plan.shapes <= shapes
    # rows on all ranks come with the shapes: less than that nobody can have
    descending = np.sort(lengths)[::-1]
    assert report.plan.padding < find_least_padding(descending, shapes, ranks) + 0.015
    assert report.bound == find_least_padding(descending, shapes)
    if budget > 900:  # or plain steps have one row on each rank
        assert report.plan.padding + 0.2 < report.plain.padding


def test_the_least_padding_is_that_of_all_choices():
    def best(lengths, shapes):
        """All ways to cut the descending lengths, by recursion."""
        if not lengths:
            return 0
        if shapes == 1:
            return lengths[0] * len(lengths)
        cuts = range(1, len(lengths) + 1)
        return min(lengths[0] * cut + best(lengths[cut:], shapes - 1) for cut in cuts)

    for seed in range(20):
        lengths = sorted(np.random.default_rng(seed).integers(1, 30, 9).tolist(), reverse=True)
        for shapes in (1, 2, 3):
            wanted = 1 - sum(lengths) / best(lengths, shapes)
            assert find_least_padding(np.array(lengths), shapes) == pytest.approx(wanted)


def test_padding_is_what_a_walk_over_the_steps_counts():
    lengths = log_normal(300)
    plan = BudgetPlan(lengths, 3, 1800, shapes=4)
    report = plan.padding(2)
    tokens = sum(lengths[i] for i in plan.ids_in_order(2))
    slots = sum(each.ids.size * each.length for each in steps_of(plan, 2))
    assert report.plan.padding == pytest.approx(1 - tokens / slots)
    assert report.plan.steps == plan.steps_per_epoch
    assert report.plan.shapes == len(plan.step_shapes)
    descending = sorted(lengths.tolist(), reverse=True)
    rows = 1800 // descending[0] * 3
    paid = [rows * descending[start] for start in range(0, 300, rows)]
    assert report.grouped.padding == pytest.approx(1 - sum(descending) / sum(paid))
    assert 0.5 < report.plan.balance <= 1


def test_steps_are_an_int_and_can_be_asked_for_by_epoch():
    plan = BudgetPlan([3, 5, 2, 9], 1, 12)
    assert list(range(plan.steps_per_epoch)) == list(range(plan.steps_per_epoch(7)))
    with pytest.raises(ValueError, match=r"steps_per_epoch: epoch must be .* got -1"):
        plan.steps_per_epoch(-1)


def test_a_plan_of_nothing_has_no_steps():
    for tail in ("mask", "repeat", "drop"):
        plan = BudgetPlan([], 2, 10, tail=tail)
        assert (plan.steps_per_epoch, plan.step_shapes, plan.batch_size) == (0, (), 0)
        assert plan.padding().plan.padding == 0
        assert plan.resumed(0, 0).steps_per_epoch == 0
        plan.audit(0).check_exactly_once()


def test_an_audit_names_what_a_tail_or_a_rest_leaves_out():
    lengths = log_normal(50)
    dropped = BudgetPlan(lengths, 4, 900, tail="drop").audit(0)
    with pytest.raises(CoverageError, match=r'2 of 50 ids omitted .* tail="drop" cuts the tail'):
        dropped.check_exactly_once()
    plan = BudgetPlan(lengths, 4, 900)
    rest = plan.resumed(0, plan.position(2))
    with pytest.raises(CoverageError, match="the rest of an epoch, from place"):
        rest.audit(0).check_exactly_once()
    repeated = BudgetPlan(lengths, 4, 900, tail="repeat").audit(0)
    assert repeated.num_duplicated == 2
    # ragged, as a loop over steps leaves them
    steps = steps_of(plan, 0)
    ids = [[slots.ids[rank] for slots in steps] for rank in range(4)]
    weights = [[slots.weights[rank] for slots in steps] for rank in range(4)]
    audit_ids(ids, 50, weights=weights).check_exactly_once()


def test_a_ledger_gives_what_is_due_in_the_epochs_order():
    plan = BudgetPlan(log_normal(50), 4, 900)
    ledger = Ledger(50, epoch=3)
    for step in range(3):
        slots = plan.batch(3, step)
        ledger.add(slots.ids, slots.weights)
    rest = plan.resumed(3, plan.position(3), num_replicas=3)
    assert ledger.due(plan).tolist() == rest.ids_in_order(3).tolist()
    assert ledger.due(rest).tolist() == ledger.due(plan).tolist()
    assert ledger.due(plan, limit=4).tolist() == ledger.due(plan).tolist()[:4]
    for slots in steps_of(rest, 3):
        ledger.add(slots.ids, slots.weights)
    ledger.check_exactly_once()


def test_plans_are_equal_where_they_read_the_same():
    lengths = log_normal(40)
    plan = BudgetPlan(lengths, 2, 900)
    assert plan == BudgetPlan(lengths.tolist(), 2, 900)
    assert hash(plan) == hash(BudgetPlan(lengths.astype(np.uint16), 2, 900))
    others = [
        BudgetPlan(lengths[::-1], 2, 900),
        BudgetPlan(lengths, 3, 900),
        BudgetPlan(lengths, 2, 901),
        BudgetPlan(lengths, 2, 900, shapes=7),
        BudgetPlan(lengths, 2, 900, seed=1),
        BudgetPlan(lengths, 2, 900, tail="drop"),
        plan.resumed(0, plan.position(1)),
        EpochPlan(40, 2, 900),
    ]
    assert all(plan != other for other in others)
    for copied in (pickle.loads(pickle.dumps(plan)), copy.deepcopy(plan)):
        assert copied == plan
        np.testing.assert_array_equal(copied.batch(1, 2).ids, plan.batch(1, 2).ids)
    assert repr(plan).startswith("BudgetPlan(40 lengths, num_replicas=2, budget=900, shapes=8")


def test_a_plan_keeps_the_lengths_that_it_was_given():
    lengths = log_normal(40)
    plan = BudgetPlan(lengths, 2, 900)
    before = plan.fingerprint
    lengths[:] = 1
    assert plan.fingerprint == before
    with pytest.raises(ValueError, match="read-only"):
        plan.lengths[0] = 1


BAD = [
    ({"lengths": [3, 13, 5, 14]}, ValueError, r"at most the budget, 12, got 13, 14 of .* 1, 3"),
    ({"lengths": [3, 0]}, ValueError, r"lengths must be at least 1, got 0 of examples 1"),
    ({"lengths": [3, -2]}, ValueError, r"lengths must be at least 1, got -2"),
    ({"lengths": [3.0, 2.0]}, TypeError, r"lengths must be integers, got float64"),
    ({"lengths": [float("nan")]}, TypeError, r"lengths must be integers, got float64"),
    ({"lengths": [True, False]}, TypeError, r"lengths must be integers, got bool"),
    ({"lengths": ["a"]}, TypeError, r"lengths must be integers, got <U1"),
    ({"lengths": [[1, 2]]}, ValueError, r"lengths must have one axis, got shape \(1, 2\)"),
    ({"lengths": (i for i in (1, 2))}, TypeError, r"got a generator\. Make a list"),
    ({"lengths": 3}, ValueError, r"lengths must have one axis"),
    ({"budget": 0}, ValueError, r"budget must be .* got 0"),
    ({"budget": -5}, ValueError, r"budget must be .* got -5"),
    ({"budget": 12.0}, TypeError, r"budget must be .* got 12\.0 \(float\)"),
    ({"shapes": 0}, ValueError, r"shapes must be .* got 0"),
    ({"shapes": True}, TypeError, r"shapes must be .* got True"),
    ({"num_replicas": 0}, ValueError, r"num_replicas must be .* got 0"),
    ({"seed": 2**64}, ValueError, r"seed must be"),
    ({"shuffle": 1}, TypeError, r"shuffle must be True or False, got 1"),
    ({"tail": "cut"}, ValueError, r'tail must be "mask", "repeat" or "drop", got \'cut\''),
    ({"row_multiple": 2}, ValueError, r"must hold 2 rows of length 9, .* got 12"),
    ({"length_multiple": 8}, ValueError, r"must hold 1 rows of length 16, .* got 12"),
    ({"length_multiple": 0}, ValueError, r"length_multiple must be .* got 0"),
    ({"start": 3}, ValueError, r"must be given together, got start=3 .* plan\.resumed"),
    ({"only_epoch": 3}, ValueError, r"must be given together"),
]


@pytest.mark.parametrize(("arguments", "error", "text"), BAD)
def test_what_no_plan_can_be_made_of_is_refused_in_words(arguments, error, text):
    right = {"lengths": [3, 5, 2, 9], "num_replicas": 2, "budget": 12}
    BudgetPlan(**right)
    with pytest.raises(error, match=rf"^BudgetPlan: .*{text}"):
        BudgetPlan(**(right | arguments))


def test_what_a_plan_does_not_have_is_refused_in_words():
    plan = BudgetPlan([3, 5, 2, 9], 2, 12)
    last = plan.steps_per_epoch
    for ask, text in (
        (lambda: plan.batch(0, last), r"BudgetPlan.batch: step must be in \[0, \d\), got"),
        (lambda: plan.batch(-1, 0), r"BudgetPlan.batch: epoch must be"),
        (lambda: plan.batch(0, 0, [2]), r"BudgetPlan.batch: ranks must be in \[0, 2\), got 2"),
        (lambda: plan.shape(0, -1), r"BudgetPlan.shape: step must be in"),
        (lambda: plan.position(last + 1), r"BudgetPlan.position: step must be in"),
        (lambda: plan.slots(0, 2), r"BudgetPlan.slots: rank must be in"),
        (lambda: plan.resumed(0, 99), r"BudgetPlan.resumed: position must be in .* got 99"),
        (lambda: plan.resumed(0, 0, budget=8), r"lengths must be at most the budget, 8, got 9"),
        (lambda: plan.resumed(1, 0).batch(2, 0), r"epoch must be 1, the one that this plan is"),
        (lambda: plan.resumed(1, 0).resumed(2, 0), r"resumed: epoch must be 1, the one"),
    ):
        with pytest.raises(ValueError, match=text):
            ask()
    with pytest.raises(TypeError, match=r"BudgetPlan.batch: ranks must be a sequence"):
        plan.batch(0, 0, 1)


RECORDED_SHAPES = ((4, 892), (5, 747), (7, 568), (10, 363), (18, 183))
RECORDED_IDS = [989, 1185, 289, 1517]


def test_a_plan_is_the_same_on_every_machine():
    """Recorded: a plan that changes would break off every epoch that is under way."""
    lengths = [(i * i * 7919) % 897 + 1 for i in range(2000)]
    plan = BudgetPlan(lengths, 2, 4000, shapes=5, seed=7)
    assert plan.step_shapes == RECORDED_SHAPES
    assert plan.batch(3, 11).ids[0].tolist() == RECORDED_IDS
