"""Laws of plans and samplers against plain lists, over inputs that Hypothesis makes up.

`LAW_EXAMPLES=100000 python -m pytest tests/sampling/test_laws.py` looks much further.
"""

import os

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_ddp_weighting import DistributedSampler, EpochPlan, audit_ids, keyed_order

EXAMPLES = int(os.environ.get("LAW_EXAMPLES", "500"))
law = settings(max_examples=EXAMPLES, deadline=None)

SEEDS = st.one_of(st.integers(0, 9), st.integers(-(2**63), 2**63))
TAILS = st.sampled_from(["mask", "repeat", "drop"])
ORDERS = st.sampled_from(["keyed", "torch", "as it comes", "own", "function"])


def order_in_plain_lists(kind, n, seed, epoch):
    if kind == "keyed":
        return [int(i) for i in keyed_order(range(n), n, seed=seed, epoch=epoch)]
    order = list(range(n))
    if kind == "torch":
        words = np.random.RandomState((seed + epoch) % 2**32)
        words = words.randint(0, 2**32, max(n - 1, 0), dtype=np.uint32).tolist()
        for i, word in enumerate(words):
            j = i + word % (n - i)
            order[i], order[j] = order[j], order[i]
    if kind == "function":
        return rolled(n, epoch)
    return order[::-1] if kind == "own" else order


def rolled(n, epoch):
    return [(i + epoch) % n for i in range(n)]


def epoch_in_plain_lists(order, ranks, batch_size, tail):
    """Step -> rank -> [(id, weight)], by the words of the documentation and nothing else."""
    n = len(order)
    places = list(range(n))
    if tail == "repeat":
        while len(places) % ranks:
            places.append(len(places))
    if tail == "drop":
        while len(places) % (ranks * batch_size):
            places.pop()
    weighted = [(order[place % n], 1) for place in places]
    while len(weighted) % (ranks * batch_size):  # fill
        weighted.append((order[len(weighted) % n], 0))
    steps = []
    while weighted:
        step, weighted = weighted[: ranks * batch_size], weighted[ranks * batch_size :]
        steps.append([step[rank::ranks] for rank in range(ranks)])
    return steps


def plan_of(kind, n, ranks, batch_size, seed, tail):
    if kind == "own":
        return EpochPlan.from_order(range(n - 1, -1, -1), ranks, batch_size, tail=tail)
    if kind == "function":
        return EpochPlan.from_order(lambda epoch: rolled(n, epoch), ranks, batch_size, tail=tail)
    shuffle = kind != "as it comes"
    order = kind if shuffle else "keyed"
    return EpochPlan(n, ranks, batch_size, shuffle=shuffle, seed=seed, tail=tail, order=order)


@law
@given(
    kind=ORDERS,
    n=st.integers(0, 90),
    ranks=st.integers(1, 12),
    batch_size=st.integers(1, 9),
    seed=SEEDS,
    epoch=st.integers(0, 9),
    tail=TAILS,
)
def test_a_plan_is_what_the_documentation_says(kind, n, ranks, batch_size, seed, epoch, tail):
    plan = plan_of(kind, n, ranks, batch_size, seed, tail)
    naive = epoch_in_plain_lists(
        order_in_plain_lists(kind, n, seed, epoch), ranks, batch_size, tail
    )
    batches = [plan.batch(epoch, step) for step in range(plan.steps_per_epoch)]
    assert [
        [
            list(zip(i.tolist(), w.tolist(), strict=True))
            for i, w in zip(b.ids, b.weights, strict=True)
        ]
        for b in batches
    ] == naive
    # every batch is full, and its closed form counts what is in it
    assert all(b.ids.shape == b.weights.shape == (ranks, batch_size) for b in batches)
    assert [plan.accepted(step) for step in range(len(batches))] == [
        b.weights.sum() for b in batches
    ]
    # a batch is a slice of the rank's slots, and the rest of it is fill
    for rank in range(ranks):
        slots = plan.slots(epoch, rank)
        for step, batch in enumerate(batches):
            part = slots.ids[step * batch_size : (step + 1) * batch_size]
            assert np.array_equal(batch.ids[rank][: len(part)], part)
            assert not batch.weights[rank][len(part) :].any()
        assert slots.weights.sum() == plan.accepted_by(rank)
    # the audit in closed form is that of the slots
    every = [plan.slots(epoch, rank) for rank in range(ranks)]
    walked = audit_ids(
        [slots.ids for slots in every], n, weights=[slots.weights for slots in every], epoch=epoch
    )
    assert plan.audit(epoch) == walked
    # and the tails keep their promises
    if tail == "mask":
        walked.check_exactly_once()
    if tail == "repeat":
        assert walked.unique == n
        assert len({len(slots.ids) for slots in every}) == 1
    if tail == "drop":
        assert not walked.duplicated
        assert walked.num_omitted < ranks * batch_size


@law
@given(
    n=st.one_of(
        st.integers(1, 2**62),
        st.builds(
            lambda k, d: max(1, min(2**k + d, 2**62)), st.integers(0, 62), st.integers(-2, 2)
        ),
    ),
    seed=SEEDS,
    epoch=st.integers(0, 2**63 - 1),
    data=st.data(),
)
def test_a_keyed_order_never_gives_an_id_twice(n, seed, epoch, data):
    start = data.draw(st.integers(0, n - 1))
    positions = np.arange(start, min(n, start + 300))
    ids = keyed_order(positions, n, seed=seed, epoch=epoch)
    assert len(set(ids.tolist())) == len(positions)
    assert ids.min() >= 0
    assert ids.max() < n
    # and a position has the same id whoever else is asked for
    some = data.draw(st.lists(st.integers(0, len(positions) - 1), max_size=5))
    assert np.array_equal(keyed_order(positions[some], n, seed=seed, epoch=epoch), ids[some])


@law
@given(
    n=st.integers(0, 130),
    ranks=st.integers(1, 9),
    tail=TAILS,
    kind=st.sampled_from(["torch", "keyed"]),
    stops=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 8)), max_size=5),
)
def test_any_schedule_of_stops_and_other_ranks_reads_what_one_run_reads(
    n, ranks, tail, kind, stops
):
    """Stop anywhere, save, resume on any number of ranks that divides the position, and so on."""
    counts = dict.fromkeys(range(n), 0)
    state = None
    for rounds, turn in [*stops, (n + 1, 0)]:
        samplers = [DistributedSampler(n, ranks, r, tail=tail, order=kind) for r in range(ranks)]
        for sampler in samplers:
            if state is None:
                sampler.set_epoch(3)
            else:
                sampler.load_state_dict(state)
        passes = [iter(sampler) for sampler in samplers]
        for _ in range(rounds):
            for i in (next(each, None) for each in passes):
                if i is not None:
                    counts[i] += 1
        state = samplers[0].state_dict()
        assert [sampler.state_dict() for sampler in samplers] == [state] * ranks
        if state["position"] == n:
            break
        others = [w for w in range(1, 10) if state["position"] % w == 0]
        ranks = others[turn % len(others)]
    assert state["position"] == n
    # only the last number of ranks has a tail
    extra = {"mask": 0, "repeat": -n % ranks, "drop": -(n % ranks)}[tail]
    assert sum(counts.values()) == n + extra
    if tail == "repeat":
        assert min(counts.values(), default=1) >= 1
    else:
        assert max(counts.values(), default=0) <= 1
