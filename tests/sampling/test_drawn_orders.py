"""Weighted draws, length groups and mixtures: by their laws; beside numpy's draws, and biased."""

import copy
import json
import pickle
import subprocess
import sys
from collections import Counter
from fractions import Fraction
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from jax_ddp_weighting import (
    DistributedSampler,
    EpochPlan,
    EpochRecord,
    Ledger,
    audit_ids,
    grouped_order,
    mixture_order,
    weighted_order,
)
from jax_ddp_weighting.sampling.hashing import draw_uniform, hash_places

law = settings(max_examples=60, deadline=None)
WEIGHTS = [5, 0, 1, 2.5, 0.5, 1]
ORDERS = {
    "weighted": weighted_order([1, 0, 2, 5, 1, 3, 1, 2, 4, 1], 23, seed=1),
    "without": weighted_order([1, 0, 2, 5, 1, 3, 1, 2, 4, 1], 9, replacement=False, seed=1),
    "grouped": grouped_order([3, 9, 1, 4, 4, 2, 8, 4, 6, 1], 4, seed=1),
    "mixture": mixture_order([3, 7], [0.4, 0.6], 12, seed=1),
}
RECORDED = {  # the same on every machine: what it was on the first
    "weighted": (2, 9, 3, 5, 3, 7, 5, 5, 3, 8, 8, 8, 3, 3, 0, 5, 8, 3, 3, 8, 5, 2, 8),
    "without": (5, 3, 7, 4, 0, 6, 8, 2, 9),
    "grouped": (2, 0, 9, 5, 7, 8, 3, 4, 1, 6),
    "mixture": (8, 6, 0, 3, 2, 7, 9, 2, 5, 1, 4, 8),
}
every_order = pytest.mark.parametrize("name", ORDERS)


@every_order
def test_an_order_is_a_function_of_seed_and_epoch_alone(name):
    order = ORDERS[name]
    twins = copy.deepcopy(order), pickle.loads(pickle.dumps(order))
    for epoch in (3, 0, 7):
        for twin in twins:
            assert twin(epoch).tolist() == order(epoch).tolist()
            assert twin == order
            assert hash(twin) == hash(order)
            assert twin.digest == order.digest
        places = np.array([[5, 0], [2, 2]])
        assert order.take(epoch, places).tolist() == order(epoch)[places].tolist()
        assert order(epoch).dtype == np.int64
        assert len(order(epoch)) == order.num_samples
    assert len({tuple(order(epoch)) for epoch in range(50)}) == 50
    assert order != ORDERS["weighted" if name != "weighted" else "grouped"]


@every_order
def test_an_order_is_the_same_on_every_machine(name):
    assert tuple(ORDERS[name](2).tolist()) == RECORDED[name]


def test_an_order_is_the_same_in_another_process_with_other_hashes():
    code = (
        "import json; from jax_ddp_weighting import mixture_order, weighted_order;"
        "print(json.dumps([weighted_order([1, 2, 3], 9, seed=5)(4).tolist(),"
        " mixture_order([3, 7], [1, 2], 9, seed=5)(4).tolist()]))"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=True, env={"PYTHONHASHSEED": "7"}
    )
    assert json.loads(out.stdout) == [
        weighted_order([1, 2, 3], 9, seed=5)(4).tolist(),
        mixture_order([3, 7], [1, 2], 9, seed=5)(4).tolist(),
    ]


@every_order
@pytest.mark.parametrize(("world", "later"), [(1, 3), (2, 5), (3, 2), (4, 1)])
def test_every_position_resumes_on_every_other_number_of_ranks(name, world, later):
    order = ORDERS[name]
    plan = EpochPlan.from_order(order, world, 2)
    wanted, epoch = order(5).tolist(), 5
    for step in range(plan.steps_per_epoch + 1):
        rest = plan.resumed(epoch, plan.position(step), num_replicas=later, batch_size=3)
        ids = in_order(plan, epoch, 0, step) + in_order(rest, epoch, 0, rest.steps_per_epoch)
        assert ids == wanted
    for read in range(order.num_samples // world + 1):
        sampler = DistributedSampler(order.num_examples, world, 0, order=order, tail="mask")
        sampler.set_epoch(epoch)
        begun = iter(sampler)
        first = [i for _, i in zip(range(read), begun)]  # noqa: B905 - one asks no more
        state = json.loads(json.dumps(sampler.state_dict()))
        assert first == wanted[: read * world : world]
        for rank in range(later):
            other = DistributedSampler(order.num_examples, later, rank, order=order, tail="mask")
            other.load_state_dict(state)
            assert list(other) == wanted[state["position"] :][rank::later]


def in_order(plan, epoch, start, stop):
    slots = [plan.batch(epoch, step) for step in range(start, stop)]
    return [i for s in slots for i, w in zip(s.ids.T.flat, s.weights.T.flat, strict=True) if w]


@every_order
def test_records_states_and_audits_know_them(name):
    order = ORDERS[name]
    plan = EpochPlan.from_order(order, 2, 3)
    assert EpochRecord.of(plan, 4, "a").order == plan.fingerprint["order"] == order.digest
    found = plan.audit(4)
    walked = audit_ids(order(4), order.num_examples, epoch=4)
    assert (found.duplicated, found.omitted, found.accepted) == (
        walked.duplicated,
        walked.omitted,
        walked.accepted,
    )
    ledger = Ledger(order.num_examples, epoch=4)
    ledger.add(order(4)[:3])
    due = [i for i in dict.fromkeys(order(4).tolist()) if i not in order(4)[:3]]
    assert ledger.due(plan).tolist() == due


# --- weighted -------------------------------------------------------------------------------------


def p_value(counts, weights):
    weights = np.asarray(weights, float)
    counts, weights = np.asarray(counts)[weights > 0], weights[weights > 0]
    return float(chisquare(counts, weights / weights.sum() * counts.sum()).pvalue)


def drawn(how, weights, size):
    if how == "ours":
        return weighted_order(weights, size, seed=11)(2)
    rng = np.random.default_rng(11)
    if how == "numpy":
        return rng.choice(len(weights), size, p=np.array(weights) / np.sum(weights))
    biased = np.array(weights, float)
    biased[0] *= 1.03  # three in a hundred, of one id
    return rng.choice(len(weights), size, p=biased / biased.sum())


@pytest.mark.parametrize(("how", "passes"), [("ours", True), ("numpy", True), ("biased", False)])
def test_draws_come_as_often_as_their_weights_say(how, passes):
    counts = np.bincount(drawn(how, WEIGHTS, 100_000), minlength=6)
    assert counts[1] == 0
    assert (p_value(counts, WEIGHTS) > 1e-3) is passes


@pytest.mark.parametrize(("how", "passes"), [("ours", True), ("numpy", True), ("sticky", False)])
def test_draws_hang_neither_on_their_neighbours_nor_on_the_epoch_before(how, passes):
    weights = np.array([1, 2, 3])
    rng = np.random.default_rng(5)
    if how == "ours":
        order = weighted_order(weights, 20_000, seed=7)
        one, two = order(0), order(1)
    else:
        one, two = (rng.choice(3, 20_000, p=weights / 6) for _ in range(2))
    if how == "sticky":  # one in twenty is its neighbour's copy
        one[1:][rng.random(19_999) < 0.05] = one[:-1][rng.random(19_999) < 0.05][0]
    pairs = np.outer(weights, weights).ravel()
    beside = np.bincount(one[:-1:2] * 3 + one[1::2], minlength=9)
    between = np.bincount(one * 3 + two, minlength=9)
    assert (min(p_value(beside, pairs), p_value(between, pairs)) > 1e-3) is passes


def successive(order, weights):
    """The probability of an order of draws without replacement, draw by draw."""
    left, probability = sum(weights), 1.0
    for i in order:
        probability *= weights[i] / left
        left -= weights[i]
    return probability


@pytest.mark.parametrize(("how", "passes"), [("ours", True), ("numpy", True), ("sorted", False)])
def test_draws_without_replacement_come_as_draws_from_what_is_left(how, passes):
    weights, cases = [1, 2, 4, 0, 3], list(permutations([0, 1, 2, 4], 3))
    rng = np.random.default_rng(3)
    p = np.array(weights) / 10
    if how == "ours":
        order = weighted_order(weights, 3, replacement=False, seed=9)
        found = [tuple(order(epoch).tolist()) for epoch in range(2000)]
    else:
        found = [tuple(rng.choice(5, 3, replace=False, p=p).tolist()) for _ in range(2000)]
    if how == "sorted":  # the right sets in the wrong order
        found = [tuple(sorted(each)) for each in found]
    counts, wanted = Counter(found), [successive(case, weights) for case in cases]
    assert sum(wanted) == pytest.approx(1)
    assert (p_value([counts[case] for case in cases], wanted) > 1e-3) is passes


@law
@given(
    weights=st.lists(st.sampled_from([0, 1, 1e-300, 1e300, 0.3]), min_size=1, max_size=40),
    data=st.data(),
    seed=st.integers(-(2**63), 2**64 - 1),
    epoch=st.integers(0, 2**63 - 1),
)
def test_draws_without_replacement_are_different_ids_above_0(weights, data, seed, epoch):
    drawable = [i for i, weight in enumerate(weights) if weight]
    if not drawable:
        weights, drawable = [1.0], [0]
    count = data.draw(st.integers(1, len(drawable)))
    ids = weighted_order(weights, count, replacement=False, seed=seed)(epoch).tolist()
    assert len(set(ids)) == count
    assert set(ids) <= set(drawable)
    again = weighted_order(weights, 50, seed=seed)(epoch)
    assert set(again.tolist()) <= set(drawable)


def test_words_are_those_of_splitmix64():
    """Steele, Lea and Flood's generator, seeded with 1234567: as published implementations give."""
    words = hash_places(np.arange(3), 1234567)
    assert words.tolist() == [6457827717110365317, 3203168211198807973, 9817491932198370423]
    uniform = draw_uniform(np.arange(200_000), 3)
    assert uniform.min() >= 0
    assert uniform.max() < 1
    assert chisquare(np.bincount((uniform * 64).astype(int))).pvalue > 1e-3


@pytest.mark.parametrize(
    ("weights", "options", "error", "match"),
    [
        ([1, -2], {}, ValueError, r"weights must be finite and at least 0, got -2\.0 at row 1"),
        ([1, np.nan], {}, ValueError, r"weights must be finite and at least 0, got nan at row 1"),
        ([np.inf, 1], {}, ValueError, r"weights must be finite and at least 0, got inf at row 0"),
        ([0, 0.0], {}, ValueError, r"weights must not all be 0, got 2 of them"),
        ([], {}, ValueError, r"weights must not all be 0, got 0 of them"),
        ([[1, 2]], {}, ValueError, r"weights must have one axis, got shape \(1, 2\)"),
        (3.0, {}, ValueError, r"weights must have one axis, got shape \(\)"),
        (["a"], {}, TypeError, r"weights must be numbers, got <U1"),
        ([1j], {}, TypeError, r"weights must be numbers, got complex128"),
        ([1, 0], {"num_samples": 0}, ValueError, r"num_samples must be .* at least 1, got 0"),
        ([1, 0], {"num_samples": 1.5}, TypeError, r"num_samples must be .*, got 1\.5"),
        ([1, 0], {"replacement": 0}, TypeError, r"replacement must be True or False, got 0"),
        ([1, 0], {"seed": -(2**64)}, ValueError, r"seed must be .* in \[-2\*\*63, 2\*\*64\)"),
        (
            [1, 0, 2],
            {"num_samples": 3, "replacement": False},
            ValueError,
            r"num_samples must be at most 2, the number of weights above 0.*got 3",
        ),
    ],
)
def test_bad_weights_are_refused(weights, options, error, match):
    with pytest.raises(error, match=f"^weighted_order: {match}"):
        weighted_order(weights, **{"num_samples": 2, **options})


def test_the_callers_weights_may_change():
    weights = np.array([1.0, 0.0])
    order = weighted_order(weights, 4)
    weights[:] = 0, 1
    assert order(0).tolist() == [0, 0, 0, 0]
    with pytest.raises(ValueError, match="read-only"):
        order.weights[0] = 0


# --- length groups --------------------------------------------------------------------------------


@law
@given(
    lengths=st.lists(st.integers(0, 30), max_size=60),
    group=st.integers(1, 12),
    seed=st.integers(0, 5),
    epoch=st.integers(0, 5),
)
def test_groups_hold_neighbours_in_length_and_every_id_once(lengths, group, seed, epoch):
    ids = grouped_order(lengths, group, seed=seed)(epoch).tolist()
    assert sorted(ids) == list(range(len(lengths)))
    whole = len(lengths) // group
    blocks = [sorted(lengths[i] for i in ids[b * group : (b + 1) * group]) for b in range(whole)]
    # sorted by length, the blocks follow one another, and so every length lies in its block
    flat = [length for block in sorted(blocks) for length in block]
    assert flat == sorted(flat)


def test_groups_are_shuffled_and_so_are_their_ids():
    lengths = np.arange(64)
    order = grouped_order(lengths, 8)
    epochs = [order(epoch).reshape(8, 8) for epoch in range(200)]
    first_blocks = np.bincount([block[0].min() // 8 for block in epochs], minlength=8)
    first_ids = np.bincount([block[0, 0] % 8 for block in epochs], minlength=8)
    assert min(chisquare(first_blocks).pvalue, chisquare(first_ids).pvalue) > 1e-3
    # equal lengths meet others in every epoch
    same = grouped_order(np.repeat([1, 2], 8), 4)
    assert len({frozenset(same(epoch)[:4].tolist()) for epoch in range(40)}) > 20


@pytest.mark.parametrize(
    ("lengths", "group", "error", "match"),
    [
        ([1, -1], 2, ValueError, r"lengths must be finite and at least 0, got -1\.0 at row 1"),
        ([1, np.nan], 2, ValueError, r"lengths must be finite and at least 0, got nan at row 1"),
        ([[1]], 2, ValueError, r"lengths must have one axis, got shape \(1, 1\)"),
        (["a"], 2, TypeError, r"lengths must be numbers, got <U1"),
        ([1, 2], 0, ValueError, r"group must be .* at least 1, got 0"),
        ([1, 2], 2.5, TypeError, r"group must be .*, got 2\.5"),
    ],
)
def test_bad_lengths_are_refused(lengths, group, error, match):
    with pytest.raises(error, match=f"^grouped_order: {match}"):
        grouped_order(lengths, group)


# --- mixtures -------------------------------------------------------------------------------------

SOURCES = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 40)), min_size=1, max_size=6).filter(
    lambda sources: any(share for _, share in sources)
)


@law
@given(
    sources=SOURCES,
    num_samples=st.integers(1, 40),
    seed=st.integers(0, 3),
    first=st.integers(0, 30),
)
def test_a_mixture_keeps_shares_and_every_sources_own_epochs(sources, num_samples, seed, first):
    lengths, shares = (list(column) for column in zip(*sources, strict=True))
    order = mixture_order(lengths, shares, num_samples, seed=seed)
    starts, total = np.cumsum([0, *lengths]), sum(shares)
    draws = [i for epoch in range(first + 3) for i in order(epoch).tolist()]
    source_of = [int(np.searchsorted(starts, i, side="right")) - 1 for i in draws]
    seen = [0] * len(lengths)
    for count, source in enumerate(source_of, 1):
        seen[source] += 1
        for drawn, share in zip(seen, shares, strict=True):
            assert abs(drawn - Fraction(share * count, total)) < 1
    for source, length in enumerate(lengths):
        own = [i for i, s in zip(draws, source_of, strict=True) if s == source]
        for start in range(0, len(own), length):  # its epochs: no id twice, all in all of them
            one = own[start : start + length]
            assert len(set(one)) == len(one)
            assert len(one) < length or set(one) == set(range(starts[source], starts[source + 1]))
    # the audit says where each source is
    last = first + 2
    audit = EpochPlan.from_order(order, 2, 3).audit(last)
    ids = order(last).tolist()
    for source, (found, length) in enumerate(zip(audit.sources, lengths, strict=True)):
        own = [i for i in ids if starts[source] <= i < starts[source + 1]]
        done = source_of.count(source)
        assert (found.draws, found.unique) == (len(own), len(set(own)))
        assert (found.epochs, found.due) == (done // length, -done % length)
    assert audit.accepted == sum(found.draws for found in audit.sources)
    if not order.repeats:
        assert all(len(set(order(e).tolist())) == num_samples for e in range(first + 3))


def test_a_mixture_of_any_floats_keeps_its_shares_nearly():
    for shares in ([0.7, 0.2, 0.1], [1 / 3, 1 / 3, 1 / 3], [0.9, *[0.01] * 10], [0.123, 0.877]):
        order = mixture_order([50] * len(shares), shares, 1000)
        counts = np.zeros(len(shares))
        for draw, source in enumerate(order(0) // 50, 1):
            counts[source] += 1
            assert np.abs(counts - np.array(shares) * draw).max() < 1.001
    order = mixture_order([5, 5], [np.pi / 4, 1 - np.pi / 4], 1000)
    assert 2**11 < order.period <= 2**16
    assert abs((order(0) < 5).sum() - 1000 * np.pi / 4) < 1.02
    order = mixture_order([5, 5, 5], [1e-5, np.pi / 4, 1 - np.pi / 4 - 1e-5], 1000)
    assert 2**16 < order.period <= 2**20
    assert abs(order.parts[0] / order.period - 1e-5) < 1e-6


def test_a_mixture_is_to_be_had_far_away_at_once():
    order = mixture_order([10**12, 10**15, 3], [5, 4, 1], 10**9)
    epoch, places = 10**6, np.array([0, 1, 10**9 - 1])
    assert len(set(order.take(epoch, places).tolist())) == 3
    plan = EpochPlan.from_order(order, 64, 8)
    assert plan.batch(epoch, plan.steps_per_epoch - 1, ranks=[5]).ids.shape == (1, 8)
    with pytest.raises(ValueError, match=r"draws of all epochs must be at most 2\*\*62"):
        order.take(2**62, places)


def test_the_order_within_a_source_is_any_one():
    order = mixture_order([4, 2], [1, 1], 8, seed=2)
    found = Counter(tuple(i for i in order(epoch).tolist() if i < 4) for epoch in range(1200))
    assert len(found) == 24
    assert chisquare(list(found.values())).pvalue > 1e-3


@pytest.mark.parametrize(
    ("lengths", "shares", "error", "match"),
    [
        ([4, 4], [1], ValueError, r"proportions must be one for each source, got shape \(1,\)"),
        ([4], [1, 1], ValueError, r"proportions must be one for each source, got shape \(2,\)"),
        ([], [], ValueError, r"proportions must be one for each source, got shape \(0,\) for 0"),
        ([4, 4], [1, -1], ValueError, r"proportions must be finite and at least 0, got -1 at row"),
        ([4, 4], [0.5, np.nan], ValueError, r"proportions must be finite and at least 0, got nan"),
        ([4, 4], [0, 0], ValueError, r"proportions must not all be 0"),
        ([4, 4], [0.5, 0.6], ValueError, r"proportions must add up to 1, or be whole.*got 1\.1 in"),
        ([4, 4], ["a", "b"], TypeError, r"proportions must be numbers, got <U1"),
        ([0, 4], [1, 1], ValueError, r"lengths must be above 0 where a proportion is, got 0 for"),
        ([-1, 4], [1, 1], ValueError, r"lengths must be .*, got -1"),
        ([4.5, 4], [1, 1], TypeError, r"lengths must be .*, got 4\.5"),
        (4, [1], TypeError, r"lengths must be a sequence, got 4"),
        ([4, 4, 4], [1e-9, 0.5, 0.5 - 1e-9], ValueError, r"proportions must be at least about a m"),
        ([2**62, 1], [1, 1], ValueError, r"lengths must add up to at most 2\*\*62"),
    ],
)
def test_bad_mixtures_are_refused(lengths, shares, error, match):
    with pytest.raises(error, match=f"^mixture_order: {match}"):
        mixture_order(lengths, shares, 5)


def test_a_source_without_a_share_is_never_read():
    assert set(mixture_order([2, 0, 3], [1, 0, 0], 6)(0).tolist()) == {0, 1}
    with pytest.raises(ValueError, match=r"num_samples must be .* at least 1, got 0"):
        mixture_order([2], [1], 0)
