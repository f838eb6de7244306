"""A position: where an epoch was stopped, and what is left of it, for whoever reads on."""

import copy
import pickle
import subprocess
import sys
import threading
from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_ddp_weighting import DistributedSampler, EpochPlan, Ledger, audit_ids

OWN = [5, 19, 2, 11, 7, 3, 0, 14, 8, 1, 12]


def sampler_of(n=60, ranks=3, rank=1, **options):
    return DistributedSampler(n, ranks, rank, **options)


def loaded(slots=7, **options):
    """A sampler of 20 ids of which some were read before, and what is left of them."""
    sampler = sampler_of(**options)
    whole = list(sampler_of(**options))
    sampler.load_state_dict(sampler.state_dict(consumed=slots))
    return sampler, whole[slots:]


# Used up by reading


def test_a_loaded_position_is_used_up_by_reading_and_not_by_iter():
    sampler, rest = loaded()
    thrown_away, reader = iter(sampler), iter(sampler)
    assert list(reader) == rest
    assert len(rest) == 13
    del thrown_away
    assert len(list(iter(sampler_of()))) == 20


def test_the_iterator_that_is_read_need_not_be_the_last():
    sampler, rest = loaded()
    reader, _ = iter(sampler), iter(sampler)
    first = [next(reader) for _ in range(4)]
    assert first == rest[:4]
    assert sampler.state_dict()["position"] == (7 + 4) * 3
    assert list(reader) == rest[4:]


def test_looking_at_a_position_leaves_it():
    sampler, rest = loaded()
    before = sampler.state_dict()
    for look in (len, iter, repr, copy.copy, lambda s: s.indices(), lambda s: s.source()):
        look(sampler)
    assert sampler.state_dict() == before
    assert list(sampler) == rest


def test_a_position_is_used_once():
    sampler, rest = loaded()
    assert list(sampler) == rest
    with pytest.warns(UserWarning, match="epoch 0 is read again"):
        assert len(list(sampler)) == 20


def test_another_epoch_is_whole_and_uses_the_position_up():
    sampler, _ = loaded()
    sampler.set_epoch(1)
    assert len(sampler) == len(list(sampler)) == 20
    sampler.set_epoch(0)
    assert len(list(sampler)) == 20


# Held wherever it is looked at


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"tail": "mask", "n": 59, "rank": 2},
        {"tail": "drop", "n": 62},
        {"order": "keyed"},
        {"shuffle": False},
        {"shuffle": False, "order": OWN * 5, "repeats": True},
    ],
)
@pytest.mark.parametrize("slots", [0, 2, 7])
def test_a_loaded_position_holds_wherever_it_is_asked_for(options, slots):
    sampler, rest = loaded(slots, **options)
    assert len(sampler) == len(rest)
    assert sampler.indices().tolist() == rest
    assert list(sampler.source()) == rest
    for twin in (pickle.loads(pickle.dumps(sampler)), copy.deepcopy(sampler), copy.copy(sampler)):
        assert twin.state_dict() == sampler.state_dict()
        assert len(twin) == len(rest)
        assert list(twin) == rest
    assert list(sampler) == rest  # as before: copies are read apart


def test_the_rest_of_an_epoch_and_then_whole_ones():
    sampler, rest = loaded(order="keyed")
    later = sampler_of(order="keyed")
    later.set_epoch(1)
    assert list(sampler.source(2)) == rest + list(later)


def test_the_next_position_counts_from_the_one_that_was_loaded():
    sampler, rest = loaded()
    reader = iter(sampler)
    for _ in range(6):
        next(reader)
    again = sampler_of()
    again.load_state_dict(sampler.state_dict(consumed=4))
    assert list(again) == rest[4:]
    with pytest.raises(ValueError, match="consumed must be at most what was read, 6, got 11"):
        sampler.state_dict(consumed=7 + 4)


def test_a_rank_whose_last_slot_is_padding_counts_as_the_others_do():
    states = []
    for rank in range(3):
        sampler = sampler_of(50, 3, rank, tail="mask")
        reader = iter(sampler)
        for _ in range(len(sampler)):
            next(reader)
        states.append(sampler.state_dict(consumed=17))  # slots; rank 2 has 16 ids
    assert states == [states[0]] * 3
    assert states[0]["position"] == 50


# Any number of ranks


def deal(order, start, ranks, batch_size, tail):
    """The rest of an order in plain lists: step -> rank -> [(id, weight)]."""
    places = list(range(start, len(order)))
    if tail == "repeat":
        while len(places) % ranks:
            places.append(start + len(places))
    if tail == "drop":
        while len(places) % (ranks * batch_size):
            places.pop()
    slots = [(order[place % len(order)], 1) for place in places]
    while len(slots) % (ranks * batch_size):
        slots.append((order[(start + len(slots)) % len(order)], 0))
    rows = ranks * batch_size
    steps = [slots[i : i + rows] for i in range(0, len(slots), rows)]
    return [[step[rank::ranks] for rank in range(ranks)] for step in steps]


def plan_of(kind, n, ranks, batch_size, tail, seed):
    if kind == "own":
        order = np.random.default_rng(seed).permutation(n)
        return EpochPlan.from_order(order, ranks, batch_size, tail=tail)
    return EpochPlan(
        n,
        ranks,
        batch_size,
        shuffle=kind != "as it comes",
        seed=seed,
        tail=tail,
        order="torch" if kind == "torch" else "keyed",
    )


def read_steps(plan, epoch, stop=None):
    """step -> rank -> [(id, weight)]"""
    steps = plan.steps_per_epoch if stop is None else stop
    batches = [plan.batch(epoch, step) for step in range(steps)]
    return [
        [
            list(zip(ids.tolist(), weights.tolist(), strict=True))
            for ids, weights in zip(batch.ids, batch.weights, strict=True)
        ]
        for batch in batches
    ]


def accepted(steps):
    return [i for step in steps for rank in step for i, weight in rank if weight]


@settings(max_examples=200, deadline=None)
@given(
    kind=st.sampled_from(["keyed", "torch", "as it comes", "own"]),
    n=st.integers(0, 70),
    tail=st.sampled_from(["mask", "repeat", "drop"]),
    seed=st.integers(0, 5),
    epoch=st.integers(0, 3),
    shapes=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 6)), min_size=2, max_size=4),
    data=st.data(),
)
def test_a_plan_resumes_on_any_ranks_and_batches_in_the_orders_own_order(
    kind, n, tail, seed, epoch, shapes, data
):
    plan = plan_of(kind, n, *shapes[0], tail, seed)
    order = plan_of(kind, n, 1, 1, "mask", seed).slots(epoch, 0).ids.tolist()
    read, position = [], 0
    for turn, (ranks, batch_size) in enumerate(shapes):
        if turn:
            plan = plan.resumed(epoch, position, num_replicas=ranks, batch_size=batch_size)
        steps = plan.steps_per_epoch
        last = turn == len(shapes) - 1
        stop = steps if last else data.draw(st.integers(0, steps))
        done = read_steps(plan, epoch, stop)
        assert done == deal(order, position, ranks, batch_size, tail)[:stop]
        assert [plan.accepted(step) for step in range(stop)] == [
            sum(weight for rank in step for _, weight in rank) for step in done
        ]
        for rank in range(ranks):  # a sampler's view of the same rest
            slots = plan.slots(epoch, rank)
            assert slots.weights.sum() == plan.accepted_by(rank)
        every = [plan.slots(epoch, rank) for rank in range(ranks)]
        walked = audit_ids(
            [each.ids for each in every], n, weights=[each.weights for each in every], epoch=epoch
        )
        assert plan.audit(epoch) == walked
        read += accepted(done)
        position = plan.position(stop)
    if tail == "mask":
        assert sorted(read) == list(range(n))
    elif tail == "repeat":
        assert set(read) == set(range(n))
    else:
        assert len(set(read)) == len(read)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 6, 7])
@pytest.mark.parametrize("batch_size", [1, 3, 4])
def test_one_step_of_four_ranks_and_then_any_number(ranks, batch_size):
    plan = EpochPlan(16, 1, 4)
    first = accepted(read_steps(plan, 2, 1))
    rest = plan.resumed(2, plan.position(1), num_replicas=ranks, batch_size=batch_size)
    after = read_steps(rest, 2)
    audit_ids(first + accepted(after), 16).check_exactly_once()
    in_order = [i for step in after for rows in zip(*step, strict=True) for i, w in rows if w]
    assert first + in_order == plan.slots(2, 0).ids.tolist()
    # steps counted on other ranks instead: the control
    wrong = first + accepted(read_steps(EpochPlan(16, 2, 4), 2)[1:])
    assert audit_ids(wrong, 16).num_omitted == 4


@settings(max_examples=100, deadline=None)
@given(
    n=st.integers(1, 80),
    tail=st.sampled_from(["mask", "repeat", "drop"]),
    kind=st.sampled_from(["torch", "keyed"]),
    ranks=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    rounds=st.lists(st.integers(0, 12), min_size=5, max_size=5),
)
def test_samplers_stop_and_go_on_with_any_ranks(n, tail, kind, ranks, rounds):
    counts = dict.fromkeys(range(n), 0)
    state = None
    for turn, world in enumerate(ranks):
        samplers = [DistributedSampler(n, world, r, tail=tail, order=kind) for r in range(world)]
        for sampler in samplers:
            sampler.set_epoch(2)
            if state is not None:
                sampler.load_state_dict(state)
        passes = [iter(sampler) for sampler in samplers]
        for _ in range(rounds[turn] if turn < len(ranks) - 1 else n + 1):
            for i in (next(each, None) for each in passes):
                if i is not None:
                    counts[i] += 1
        states = [sampler.state_dict() for sampler in samplers]
        state = states[0]
        assert states == [state] * world
    assert state["position"] == n
    if tail == "mask":
        assert set(counts.values()) == {1}
    elif tail == "repeat":
        assert min(counts.values()) >= 1
    else:
        assert max(counts.values()) <= 1


@pytest.mark.parametrize(
    ("ask", "text"),
    [
        (lambda p: p.resumed(0, 17), r"EpochPlan.resumed: position must be in \[0, 16\], got 17"),
        (lambda p: p.resumed(-1, 3), r"only_epoch must be an integer in \[0, 2\*\*63\), got -1"),
        (lambda p: p.position(5), r"EpochPlan.position: step must be in \[0, 4\], got 5"),
        (
            lambda p: p.resumed(3, 4).batch(4, 0),
            "EpochPlan.batch: epoch must be 3, the one that this plan is the rest of, got 4",
        ),
        (lambda p: p.resumed(3, 4).slots(0, 0), "EpochPlan.slots: epoch must be 3, .* got 0"),
        (lambda p: p.resumed(3, 4).audit(0), "EpochPlan.audit: epoch must be 3, .* got 0"),
        (lambda p: p.resumed(3, 16).batch(3, 0), r"step must be in \[0, 0\), got 0"),
        (
            lambda p: EpochPlan(16, 2, 2, start=4),
            r"only_epoch must be given with a start, got start=4 .* plan.resumed\(epoch, pos",
        ),
        (lambda p: EpochPlan(16, 2, 2, start=17), r"EpochPlan: start must be in \[0, 16\], got"),
    ],
)
def test_a_rest_that_is_not_there_is_one_clear_error(ask, text):
    with pytest.raises(ValueError, match=text):
        ask(EpochPlan(16, 2, 2))


def test_a_position_of_a_sampler_is_one_of_a_plan():
    sampler = sampler_of(tail="mask", order="keyed")
    reader = iter(sampler)
    read = [next(reader) for _ in range(7)]
    rest = EpochPlan(60, 1, 1).resumed(0, sampler.state_dict()["position"])
    assert sorted(read) != rest.slots(0, 0).ids.tolist()
    order = EpochPlan(60, 1, 1).slots(0, 0).ids
    assert rest.slots(0, 0).ids.tolist() == order[21:].tolist()


# Read ahead


def test_what_another_thread_reads_needs_to_be_counted_by_who_trains():
    sampler = sampler_of()
    reader = iter(sampler)
    ahead = threading.Thread(target=lambda: [next(reader) for _ in range(9)])
    ahead.start()
    ahead.join()
    with pytest.raises(ValueError, match=r"consumed must be given .* by another thread, got None"):
        sampler.state_dict()
    assert sampler.state_dict(consumed=5)["position"] == 15
    sampler.set_epoch(1)  # between epochs nothing is under way
    assert sampler.state_dict()["position"] == 0


class Loader:
    """Reads some batches ahead of who iterates, as torch's loaders with workers do."""

    def __init__(self, sampler, batch_size, ahead):
        self.sampler, self.batch_size, self.ahead = sampler, batch_size, ahead
        self._num_workers, self._task_info = 1, {}

    def _next_index(self):
        return [i for _, i in zip(range(self.batch_size), self.reader, strict=False)]

    def __iter__(self):
        self.reader = iter(self.sampler)
        sent = 0
        while True:
            while len(self._task_info) < self.ahead and (ids := self._next_index()):
                self._task_info[sent] = ids
                sent += 1
            if not self._task_info:
                return
            yield self._task_info.pop(min(self._task_info))


def test_behind_a_loader_that_reads_ahead_no_id_is_lost():
    samplers = [sampler_of(240, 3, rank) for rank in range(3)]
    read, states = [], []
    for sampler in samplers:
        batches = iter(Loader(sampler, 4, ahead=4))
        read += chain.from_iterable(next(batches) for _ in range(3))
        with pytest.raises(ValueError, match=r"consumed must be given .* a loader with workers"):
            sampler.state_dict()
        with pytest.raises(ValueError, match="consumed must be given"):  # nor through a copy
            copy.deepcopy(sampler).state_dict()
        states.append(sampler.state_dict(consumed=3 * 4))
    assert states == [states[0]] * 3
    for rank in range(5):
        resumed = sampler_of(240, 5, rank, tail="mask")
        resumed.load_state_dict({**states[0], "tail": "mask"})
        read += list(resumed)
    audit_ids(read, 240).check_exactly_once()


def test_a_loader_that_has_handed_out_all_that_it_read_needs_no_count():
    sampler = sampler_of()
    batches = iter(Loader(sampler, 4, ahead=4))
    for _ in range(4):
        next(batches)
    with pytest.raises(ValueError, match="consumed must be given"):
        sampler.state_dict()  # the last one is under way
    assert len(list(batches)) == 1
    assert sampler.state_dict()["position"] == 60


# The torch view, whatever the Python: a stand-in for torch, which is not there for all of them

VIEW = """
import copy, pickle, sys, types
from typing import Any, Protocol, runtime_checkable

class Theirs:
    def __init__(self, dataset):
        self.dataset = dataset

torch = types.ModuleType("torch")
torch.utils, data = types.ModuleType("torch.utils"), types.ModuleType("torch.utils.data")
torch.utils.data, data.DistributedSampler = data, Theirs
sys.modules.update({"torch": torch, "torch.utils": torch.utils, "torch.utils.data": data})

@runtime_checkable
class Stateful(Protocol):
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...

from jax_ddp_weighting.sampling import DistributedSampler

ours = DistributedSampler(20, 2, 1, seed=3)
view = ours.torch_sampler()
assert isinstance(view, Stateful) and isinstance(view, Theirs) and isinstance(ours, Stateful)
view.epoch = 7
assert ours.epoch == view.epoch == 7
whole = list(view)
assert whole == ours.indices().tolist()
view.load_state_dict(view.state_dict(consumed=4))
assert len(view) == len(ours) == 6
for twin in (pickle.loads(pickle.dumps(view)), copy.deepcopy(view)):
    assert isinstance(twin, Theirs) and twin.seed == 3
    assert list(twin) == whole[4:] and len(twin) == 10
    twin.set_epoch(1)
assert ours.epoch == 7 and list(view) == whole[4:]  # nothing is shared
try:
    view.nothing
except AttributeError as error:
    assert "nothing" in str(error)
else:
    raise AssertionError
print("fine")
"""


def test_the_torch_view_is_stateful_picklable_and_passes_through():
    """In a subprocess, whose torch is a stand-in."""
    run = subprocess.run([sys.executable, "-c", VIEW], capture_output=True, text=True)
    assert run.stdout.strip() == "fine", run.stderr


# A ledger's rest, in the order of training


@pytest.mark.parametrize("kind", ["keyed", "torch", "as it comes", "own"])
def test_a_ledger_gives_the_rest_in_the_epochs_own_order(kind):
    plan = plan_of(kind, 40, 3, 2, "mask", 1)
    ledger = Ledger(40, epoch=4)
    for step in (0, 1, 3):  # the third step was lost
        batch = plan.batch(4, step)
        ledger.add(batch.ids, batch.weights)
    order = plan_of(kind, 40, 1, 1, "mask", 1).slots(4, 0).ids.tolist()
    rest = order[12:18] + order[24:]
    assert ledger.due(plan).tolist() == rest
    assert ledger.due(plan, limit=8).tolist() == rest[:8]
    assert ledger.due().tolist() == sorted(rest)
    again = EpochPlan.from_order(ledger.due(plan), 5, 3, num_examples=40)
    for step in range(again.steps_per_epoch):
        batch = again.batch(0, step)
        ledger.add(batch.ids, batch.weights)
    ledger.check_exactly_once()


def test_a_ledgers_rest_is_shuffled_anew_only_when_that_is_asked_for():
    plan = EpochPlan(40, 3, 2)
    ledger = Ledger(40, epoch=4)
    ledger.add(plan.batch(4, 0).ids)
    rest = ledger.due(plan).tolist()
    shuffled = [ledger.due(plan, reshuffle=seed).tolist() for seed in (0, 0, 1)]
    assert shuffled[0] == shuffled[1] != shuffled[2]
    assert sorted(shuffled[0]) == sorted(shuffled[2]) == sorted(rest)
    assert rest not in shuffled
    assert sorted(ledger.due(reshuffle=0).tolist()) == sorted(rest)


def test_a_ledgers_rest_of_a_part_of_the_data_is_of_that_part():
    plan = EpochPlan.from_order([7, 3, 3, 5, 0], 1, 2, num_examples=10, repeats=True)
    ledger = Ledger(10, epoch=0)
    assert ledger.due(plan).tolist() == [7, 3, 5, 0]  # each id once
    ledger.add([3, 9])
    assert ledger.due(plan).tolist() == [7, 5, 0]


@pytest.mark.parametrize(
    ("ledger", "plan", "error", "text"),
    [
        (
            Ledger(10, epoch=0),
            EpochPlan(11, 1, 1),
            ValueError,
            "plan must be of 10 examples, .* 11",
        ),
        (Ledger(10), EpochPlan(10, 1, 1), ValueError, r"epoch must be known .* Ledger\(10, epoch="),
        (Ledger(10, epoch=0), [1, 2], TypeError, "plan must be an EpochPlan, .* got list"),
    ],
)
def test_a_rest_in_an_order_that_is_none_of_the_ledgers_is_refused(ledger, plan, error, text):
    with pytest.raises(error, match=f"Ledger.due: {text}"):
        ledger.due(plan)


# One order for all epochs


def test_a_draw_that_is_kept_for_a_second_epoch_is_said():
    draw = [0, 5, 5, 2, 1, 0, 3, 3]
    sampler = DistributedSampler(6, 2, 0, shuffle=False, order=draw, repeats=True)
    assert list(sampler) == draw[::2]
    with pytest.warns(UserWarning, match="epoch 1 reads the ids of epoch 0 again: order= holds"):
        sampler.set_epoch(1)
    assert list(sampler) == draw[::2]


def test_an_order_that_is_read_in_a_second_epoch_is_said_once():
    sampler = DistributedSampler(10, 2, 0, shuffle=False, order=range(9, -1, -1))
    sampler.set_epoch(5)  # of its own accord that is nothing
    assert len(list(sampler)) == 5
    sampler.set_epoch(6)
    with pytest.warns(UserWarning, match="epoch 6 reads the ids of epoch 5 again"):
        assert len(list(sampler)) == 5
    sampler.set_epoch(7)
    assert len(list(sampler)) == 5
