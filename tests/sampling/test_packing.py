"""Sequences packed into rows: each once and whole, in the same rows on every rank and machine."""

import copy
import os
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_ddp_weighting import (
    CoverageError,
    DistributedBatchSampler,
    Ledger,
    PackedPlan,
    pack_rows,
)
from jax_ddp_weighting.sampling.first_fit import fit_first

EXAMPLES = int(os.environ.get("LAW_EXAMPLES", "50"))
law = settings(max_examples=EXAMPLES, deadline=None)


def log_normal(n, seed=0, median=100):
    drawn = np.random.default_rng(seed).lognormal(np.log(median), 0.8, n)
    return np.clip(drawn.astype(int), 1, 900)


def rows_of(plan, epoch):
    """The rows of an epoch in their order, as lists of ids."""
    rows = []
    for step in range(plan.steps_per_epoch(epoch)):
        ids = plan.batch(epoch, step).ids
        for row in range(ids.shape[1]):
            rows += [[i for i in ids[rank, row].tolist() if i >= 0] for rank in range(len(ids))]
    while rows and not rows[-1]:
        rows.pop()
    return rows


def first_fit_in_plain_lists(lengths, length, most):
    room, rows = [], []
    for each in lengths:
        fits = [r for r, (free, held) in enumerate(room) if each <= free and held < most]
        row = fits[0] if fits else len(room)
        if not fits:
            room.append([length, 0])
        room[row][0] -= each
        room[row][1] += 1
        rows.append(row)
    return rows


@law
@given(
    windows=st.lists(
        st.lists(st.integers(1, 20), min_size=12, max_size=12), min_size=1, max_size=4
    ),
    length=st.integers(20, 60),
    most=st.integers(1, 5),
)
def test_first_fit_is_what_plain_lists_do(windows, length, most):
    found = fit_first(np.array(windows), length, most)
    assert found.tolist() == [first_fit_in_plain_lists(each, length, most) for each in windows]


@law
@given(
    lengths=st.lists(st.integers(1, 30), max_size=50),
    ranks=st.integers(1, 5),
    batch_size=st.integers(1, 4),
    length=st.integers(30, 90),
    window=st.integers(1, 60),
    most=st.one_of(st.none(), st.integers(1, 6)),
    shuffle=st.booleans(),
)
def test_every_sequence_is_in_one_row_that_holds_it(
    lengths, ranks, batch_size, length, window, most, shuffle
):
    plan = PackedPlan(lengths, ranks, batch_size, length, window=window, most=most, shuffle=shuffle)
    rows = rows_of(plan, 3)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in row) <= length for row in rows)
    assert all(1 <= len(row) <= plan.most for row in rows)
    assert plan.ids_in_order(3).tolist() == [i for row in rows for i in row]
    assert plan.steps_per_epoch(3) == -(-len(rows) // (ranks * batch_size))
    if rows:
        assert plan.padding(3) == pytest.approx(1 - sum(lengths) / (len(rows) * length))
    for step in range(plan.steps_per_epoch(3)):
        slots = plan.batch(3, step)
        assert slots.ids.shape == slots.weights.shape == (ranks, batch_size, plan.most)
        assert slots.length == length
        assert np.array_equal(slots.weights, slots.ids >= 0)
        for rank in range(ranks):
            assert np.array_equal(plan.batch(3, step, [rank]).ids[0], slots.ids[rank])
    plan.audit(3).check_exactly_once()
    # the rows are the same for other ranks: only who reads them differs
    assert (
        rows_of(PackedPlan(lengths, 1, 1, length, window=window, most=most, shuffle=shuffle), 3)
        == rows
    )


@law
@given(
    lengths=st.lists(st.integers(1, 30), max_size=50),
    ranks=st.integers(1, 5),
    stops=st.lists(st.tuples(st.floats(0, 1), st.integers(1, 5), st.integers(1, 4)), max_size=3),
)
def test_an_epoch_resumes_anywhere_on_any_ranks_in_its_own_order(lengths, ranks, stops):
    plan = PackedPlan(lengths, ranks, 2, 40, window=20)
    due, read = rows_of(plan, 2), []
    for share, others, batch_size in stops:
        stop = int(share * plan.steps_per_epoch(2))
        read += rows_of(plan, 2)[: stop * plan.num_replicas * plan.batch_size]
        plan = plan.resumed(2, plan.position(stop), num_replicas=others, batch_size=batch_size)
        assert plan.accepted_per_epoch == sum(map(len, due[len(read) :]))
    assert read + rows_of(plan, 2) == due


def test_every_epoch_has_other_rows():
    lengths = log_normal(500)
    plan = PackedPlan(lengths, 2, 4, 1024, seed=1)
    first, second = ({frozenset(row) for row in rows_of(plan, epoch)} for epoch in (0, 1))
    assert len(first & second) < 3
    again = PackedPlan(lengths.tolist(), 2, 4, 1024, seed=1)
    assert {frozenset(row) for row in rows_of(again, 1)} == second
    # and no row's place tells of its lengths
    means = [np.mean(lengths[row]) for row in rows_of(plan, 0)]
    assert abs(np.corrcoef(means, np.arange(len(means)))[0, 1]) < 0.4
    plain = PackedPlan(lengths, 2, 4, 1024, shuffle=False)
    assert rows_of(plain, 0) == rows_of(plain, 1)


@pytest.mark.parametrize("n", [500, 1000, 3000])
@pytest.mark.parametrize("length", [1024, 2048])
def test_little_of_the_rows_is_padding(n, length):
    plan = PackedPlan(log_normal(n, seed=n), 4, 4, length)
    assert max(plan.padding(epoch) for epoch in range(3)) < 0.03
    # one behind the other, as they come, is worse
    lengths, rows, room = plan.lengths.tolist(), 1, length
    for each in lengths:
        if each > room:
            rows, room = rows + 1, length
        room -= each
    assert 1 - sum(lengths) / (rows * length) > 0.05


def test_a_ledger_and_an_audit_count_packed_sequences():
    plan = PackedPlan(log_normal(200), 2, 2, 1024)
    ledger = Ledger(200, epoch=1)
    for step in range(3):
        slots = plan.batch(1, step)
        ledger.add(slots.ids, slots.weights)
    rest = plan.resumed(1, plan.position(3), num_replicas=3)
    assert ledger.due(plan).tolist() == ledger.due(rest).tolist() == rest.ids_in_order(1).tolist()
    with pytest.raises(CoverageError, match="of 200 ids omitted"):
        rest.audit(1).check_exactly_once()
    for step in range(rest.steps_per_epoch(1)):
        slots = rest.batch(1, step)
        ledger.add(slots.ids, slots.weights)
    ledger.check_exactly_once()


@pytest.mark.parametrize(("ranks", "rows"), [(1, 1), (4, 2), (3, 1), (1, 7)])
def test_the_end_of_an_epoch_is_its_end_on_any_other_ranks_and_rows(ranks, rows):
    """Five rows in one step of eight: the last step's end is past the last row."""
    lengths = [6] * 5
    old, new = PackedPlan(lengths, 4, 2, length=10), PackedPlan(lengths, ranks, rows, length=10)
    for epoch in (0, 2):
        done = DistributedBatchSampler(old, 0)
        done.set_epoch(epoch)
        list(done)
        ended = old.position(old.steps_per_epoch(epoch), epoch=epoch)
        assert done.state_dict()["position"] == ended == 5
        assert new.resumed(epoch, ended).steps_per_epoch(epoch) == 0
        sampler = DistributedBatchSampler(new, 0)
        sampler.load_state_dict(done.state_dict())
        assert list(sampler) == []
        again = DistributedBatchSampler(old, 0)
        again.load_state_dict(sampler.state_dict())
        assert list(again) == []
        rest = old.resumed(epoch, 3, num_replicas=2)  # whose epoch is known
        assert rest.position(0) == 3
        assert rest.position(1) == 5
        with pytest.raises(ValueError, match=r"position\(step, epoch=\.\.\.\) ends with the last"):
            PackedPlan(lengths, 1, 1, length=10).resumed(epoch, old.position(1))


@law
@given(st.lists(st.integers(1, 7), max_size=14), st.data())
def test_chains_of_resumes_read_every_sequence_once_by_plan_and_by_state(lengths, data):
    plan, read = PackedPlan(lengths, 2, 2, length=10), []
    for _ in range(4):
        steps = plan.steps_per_epoch(1)
        stop = data.draw(st.sampled_from([0, steps]) | st.integers(0, steps))
        for step in range(stop):
            slots = plan.batch(1, step)
            read += slots.ids[slots.weights > 0].tolist()
        other = PackedPlan(
            lengths, data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3)), length=10
        )
        sampler = DistributedBatchSampler(plan, 0)
        sampler.set_epoch(1)
        state = sampler.state_dict(consumed=stop)
        assert state["position"] == plan.position(stop, epoch=1)
        twin = DistributedBatchSampler(other, 0)
        twin.load_state_dict(state)
        plan = other.resumed(1, state["position"])
        assert list(twin) == list(DistributedBatchSampler(plan, 0))
    for step in range(plan.steps_per_epoch(1)):
        slots = plan.batch(1, step)
        read += slots.ids[slots.weights > 0].tolist()
    assert sorted(read) == list(range(len(lengths)))


@pytest.mark.parametrize("dtype", [np.int32, np.uint8, np.float32])
def test_rows_are_laid_out_as_plain_lists_would(dtype):
    sequences = [np.arange(1, n + 1).astype(dtype) + 10 * n for n in (3, 1, 4, 2)]
    ids = np.array([[[0, 2, -1], [1, -1, -1]], [[3, 1, -1], [-1, -1, -1]]])
    for per in ("token", "sequence"):
        rows = pack_rows(ids, sequences.__getitem__, 8, per=per)
        assert rows.tokens.dtype == dtype
        for place in np.ndindex(2, 2):
            tokens, segments, positions, weights = [], [], [], []
            for number, i in enumerate([i for i in ids[place] if i >= 0], 1):
                n = len(sequences[i])
                tokens += sequences[i].tolist()
                segments += [number] * n
                positions += range(n)
                weights += [1 if per == "token" else np.float32(1 / n)] * n
            fill = [0] * (8 - len(tokens))
            for found, wanted in zip(rows, (tokens, segments, positions, weights), strict=True):
                assert found[place].tolist() == wanted + fill


def test_plans_are_equal_where_they_read_the_same():
    lengths = log_normal(40)
    plan = PackedPlan(lengths, 2, 2, 900)
    assert plan == PackedPlan(lengths.tolist(), 2, 2, 900)
    assert hash(plan) == hash(PackedPlan(lengths.tolist(), 2, 2, 900))
    for other in (
        PackedPlan(lengths, 2, 2, 901),
        PackedPlan(lengths, 2, 2, 900, window=10),
        PackedPlan(lengths, 2, 2, 900, most=3),
        PackedPlan(lengths, 3, 2, 900),
        plan.resumed(0, 1),
    ):
        assert plan != other
    for copied in (pickle.loads(pickle.dumps(plan)), copy.deepcopy(plan)):
        assert copied == plan
        assert rows_of(copied, 1) == rows_of(plan, 1)
    assert repr(plan).startswith("PackedPlan(40 lengths, num_replicas=2, batch_size=2, length=900")


BAD = [
    ({"lengths": [3, 13]}, ValueError, r"at most the length, 12, got 13 of examples 1"),
    ({"lengths": [0]}, ValueError, r"lengths must be at least 1, got 0"),
    ({"lengths": [2.5]}, TypeError, r"lengths must be integers, got float64"),
    ({"length": 0}, ValueError, r"length must be .* got 0"),
    ({"batch_size": 0}, ValueError, r"batch_size must be .* got 0"),
    ({"num_replicas": 0}, ValueError, r"num_replicas must be .* got 0"),
    ({"window": 0}, ValueError, r"window must be .* got 0"),
    ({"window": 2**15}, ValueError, r"window must be an integer in \[1, 16384\], got 32768"),
    ({"most": 0}, ValueError, r"most must be .* got 0"),
    ({"shuffle": None}, TypeError, r"shuffle must be True or False, got None"),
    ({"start": 1}, ValueError, r"only_epoch must be given with a start, got start=1"),
]


@pytest.mark.parametrize(("arguments", "error", "text"), BAD)
def test_what_no_plan_can_be_made_of_is_refused_in_words(arguments, error, text):
    right = {"lengths": [3, 5, 2, 9], "num_replicas": 2, "batch_size": 1, "length": 12}
    PackedPlan(**right)
    with pytest.raises(error, match=rf"^PackedPlan: .*{text}"):
        PackedPlan(**(right | arguments))


def test_what_a_plan_does_not_have_is_refused_in_words():
    plan = PackedPlan([3, 5, 2, 9], 2, 1, 12)
    for ask, text in (
        (lambda: plan.batch(0, 1), r"PackedPlan.batch: step must be in \[0, 1\), got 1"),
        (lambda: plan.batch(0, 0, [2]), r"PackedPlan.batch: ranks must be in \[0, 2\), got 2"),
        (lambda: plan.steps_per_epoch(-1), r"PackedPlan.steps_per_epoch: epoch must be"),
        (lambda: plan.position(-1), r"PackedPlan.position: step must be"),
        (lambda: plan.resumed(0, 9), r"PackedPlan.resumed: position must be in \[0, 2\], got 9"),
        (lambda: plan.resumed(1, 0).batch(0, 0), r"epoch must be 1, the one that this plan is"),
    ):
        with pytest.raises(ValueError, match=text):
            ask()


def test_rows_that_do_not_fit_are_refused_in_words():
    ids = np.array([[0, 1]])
    for sequence, per, text in (
        (lambda i: np.zeros(4), "token", r"must hold 6 tokens at most, got 8 of ids \[0, 1\]"),
        (lambda i: np.zeros((2, 2)), "token", r"must return the tokens of one .* shape \(2, 2\)"),
        (lambda i: [], "token", r"must return the tokens of one sequence"),
        (lambda i: [1], "row", r'per must be "token" or "sequence", got \'row\''),
    ):
        with pytest.raises(ValueError, match=text):
            pack_rows(ids, sequence, 6, per=per)
