"""Where a run is: what a position holds, what it goes on with, and what it is refused for."""

import json
from dataclasses import fields, replace

import jax
import numpy as np
import pytest

import jax_ddp_weighting
from jax_ddp_weighting import (
    BudgetPlan,
    EpochPlan,
    Ledger,
    PackedPlan,
    RunPosition,
    gather_ledger,
    weighted_order,
)

PLAN = EpochPlan(47, num_replicas=3, batch_size=4, seed=5)
LENGTHS = np.random.default_rng(0).integers(1, 30, 47)


def ledger_of(plan, epoch, steps):
    ledger = Ledger(plan.num_examples, epoch=epoch)
    for step in range(steps):
        slots = plan.batch(epoch, step)
        ledger.add(slots.ids, slots.weights)
    return ledger


def position_at(step, plan=PLAN, epoch=2, **options):
    return RunPosition.of(plan, epoch, step, manifest_hash="data", **options)


def test_a_position_holds_all_that_a_run_goes_on_with_and_json_holds_it():
    ledger = ledger_of(PLAN, 2, 2)
    position = position_at(2, ledger=ledger, window=3, rng=jax.random.key(7), code="a1b2")
    values = json.loads(position.to_json())
    assert values == {
        "format": 1,
        "plan": {
            "kind": "EpochPlan",
            "num_examples": 47,
            "shuffle": True,
            "seed": 5,
            "order": "keyed",
            "tail": "mask",
            "num_replicas": 3,
            "batch_size": 4,
        },
        "epoch": 2,
        "position": 24,
        "manifest_hash": "data",
        "ledger": ledger.digest,
        "window": 3,
        "rng": {"impl": "threefry2x32", "data": [0, 7]},
        "code": "a1b2",
        "library_version": jax_ddp_weighting.__version__,
    }
    assert RunPosition.from_json(position.to_json()) == position
    assert RunPosition.from_dict(position.to_dict()) == position


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg", None])
def test_a_key_comes_back_as_it_was(impl):
    key = jax.random.PRNGKey(3) if impl is None else jax.random.key(3, impl=impl)
    again = RunPosition.from_json(position_at(0, rng=key).to_json()).key
    assert again.dtype == key.dtype
    assert jax.random.bits(again) == jax.random.bits(key)
    with pytest.raises(ValueError, match=r"rng must be given to RunPosition.of, got None"):
        position_at(0).key


PLANS = {
    "keyed": (PLAN, {}),
    "torch": (replace(PLAN, order="torch"), {}),
    "unshuffled": (replace(PLAN, shuffle=False, tail="drop"), {}),
    "drawn": (EpochPlan.from_order(weighted_order(np.arange(1, 48), 40), 3, 4, repeats=True), {}),
    "budget": (BudgetPlan(LENGTHS, 3, 64), {}),
    "packed": (PackedPlan(LENGTHS, 3, 2, 64), {}),
}


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_a_run_goes_on_from_every_step_on_any_number_of_ranks(name, ranks):
    plan, epoch = PLANS[name][0], 2
    size = "budget" if hasattr(plan, "budget") else "batch_size"
    steps = plan.steps_per_epoch
    steps = steps(epoch) if callable(steps) else steps

    def accepted(plan, steps):
        slots = [plan.batch(epoch, step) for step in range(steps)]
        return [each for s in slots for each in s.ids[s.weights > 0].tolist()]

    whole = sorted(accepted(plan, steps))
    for stopped in range(steps + 1):
        position = RunPosition.from_json(position_at(stopped, plan, epoch).to_json())
        rest = position.rest(plan, epoch, num_replicas=ranks)
        assert rest.num_replicas == ranks
        assert getattr(rest, size) == getattr(plan, size)
        left = rest.steps_per_epoch
        left = left(epoch) if callable(left) else left
        found = accepted(plan, stopped) + accepted(rest, left)
        assert sorted(found) == whole or plan.tail == "drop"
        assert set(found) <= set(range(47))
        # and once more from there: the position is one of the whole epoch
        if left > 1:
            again = RunPosition.of(rest, epoch, 1, manifest_hash="data").rest(plan, epoch)
            last = again.steps_per_epoch
            last = last(epoch) if callable(last) else last
            found = accepted(plan, stopped) + accepted(rest, 1) + accepted(again, last)
            assert sorted(found) == whole or plan.tail == "drop"
    later = position.rest(plan, epoch + 1, num_replicas=ranks)
    assert (later.num_replicas, later.start) == (ranks, 0)
    assert position.rest(plan, epoch + 1) is plan


def test_a_position_is_refused_by_name_where_it_does_not_belong():
    ledger = ledger_of(PLAN, 2, 2)
    position = position_at(2, ledger=ledger, window=1, code="a")
    right = {"manifest_hash": "data", "ledger": ledger, "window": 1, "code": "a"}
    position.check(PLAN, **right)
    position.check(replace(PLAN, num_replicas=5, batch_size=9), **right)  # may be others
    for plan, said in (
        (replace(PLAN, seed=6), "plan's seed 5, here 6"),
        (replace(PLAN, num_examples=46), "plan's num_examples 47, here 46"),
        (replace(PLAN, order="torch"), "plan's order 'keyed', here 'torch'"),
        (replace(PLAN, tail="drop"), "plan's tail 'mask', here 'drop'"),
        (replace(PLAN, shuffle=False), "plan's shuffle True, here False"),
        (replace(PLAN, weights=np.ones(47)), "plan's weights None, here "),
        (BudgetPlan(LENGTHS, 3, 64), "plan's kind 'EpochPlan', here 'BudgetPlan'"),
    ):
        with pytest.raises(ValueError, match=said):
            position.check(plan, **right)
        with pytest.raises(ValueError, match=said.removeprefix("plan's ")):
            position.rest(plan, 2)
    for name, other, said in (
        ("manifest_hash", "other", "manifest_hash 'data', here 'other'"),
        ("code", "b", "code 'a', here 'b'"),
        ("window", 0, "window 1, here 0"),
        ("ledger", ledger_of(PLAN, 2, 1), f"ledger '{ledger.digest}', here '"),
    ):
        with pytest.raises(ValueError, match=said):
            position.check(PLAN, **right | {name: other})
    older = replace(position, library_version="0.0.1")
    with pytest.raises(ValueError, match=r"library_version '0.0.1', here"):
        older.check(PLAN, **right)
    older.check(PLAN, **right, other_version=True)
    with pytest.raises(ValueError, match=r"seed 5, here 6; manifest_hash .*; code 'a', here ''"):
        position.check(replace(PLAN, seed=6), manifest_hash="m")  # all at once
    # an order that weighs its examples belongs to the plan that has the weights
    weighed = position_at(1, replace(PLAN, weights=np.ones(47)))
    with pytest.raises(ValueError, match="weights"):
        weighed.check(PLAN, manifest_hash="data")
    with pytest.raises(ValueError, match="epoch must be at least 2, the one that was stopped"):
        position.rest(PLAN, 1)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"epoch": -1}, ValueError, "RunPosition: epoch must be an integer"),
        ({"position": 1.5}, TypeError, "RunPosition: position must be an integer"),
        ({"window": -1}, ValueError, "RunPosition: window must be an integer of at least 0"),
        ({"plan": "keyed"}, TypeError, "plan must be what a plan's fingerprint holds"),
        ({"ledger": None}, TypeError, "ledger must be a string, got None"),
    ],
)
def test_a_position_checks_itself(changed, error, message):
    with pytest.raises(error, match=message):
        replace(position_at(1), **changed)


def test_what_is_no_position_is_refused():
    values = position_at(1).to_dict()
    for wrong in ({**values, "more": 1}, {**values, "format": 2}, {"epoch": 1}):
        with pytest.raises(ValueError, match="values must be a position of format 1, got"):
            RunPosition.from_dict(wrong)
    for name in (field.name for field in fields(RunPosition)):
        with pytest.raises(ValueError, match="values must be a position"):
            RunPosition.from_dict({k: v for k, v in values.items() if k != name})
    with pytest.raises(TypeError, match="values must be a mapping, got list"):
        RunPosition.from_json("[]")
    with pytest.raises(ValueError, match="Expecting value"):
        RunPosition.from_json("not json")
    with pytest.raises(TypeError, match="plan must be an EpochPlan, a BudgetPlan or a PackedPlan"):
        RunPosition.of(None, 0, 0, manifest_hash="m")
    with pytest.raises(ValueError, match=r"step must be in \[0, 4\], got 5"):
        position_at(5)
    with pytest.raises(TypeError, match="manifest_hash must be a hash, got ''"):
        RunPosition.of(PLAN, 0, 0, manifest_hash="")
    with pytest.raises(ValueError, match="ledger must be of epoch 2, got epoch 1"):
        position_at(1, ledger=ledger_of(PLAN, 1, 1))


def test_a_ledger_travels_as_bytes_and_its_digest_is_what_it_holds():
    ledger = ledger_of(PLAN, 2, 3)
    again = Ledger.from_bytes(ledger.to_bytes())
    assert again.digest == ledger.digest
    assert again.due().tolist() == ledger.due().tolist()
    backwards = Ledger(47, epoch=2)
    for step in (2, 0, 1):
        part = Ledger(47, epoch=2)
        slots = PLAN.batch(2, step)
        part.add(slots.ids, slots.weights)
        backwards.merge(part)
    assert backwards.digest == ledger.digest  # whatever the order
    backwards.add([0])
    assert backwards.digest != ledger.digest
    with pytest.raises(ValueError, match=r"Ledger.from_bytes: data must hold a whole ledger, got"):
        Ledger.from_bytes(ledger.to_bytes()[:-1])
    with pytest.raises(ValueError, match=r"must hold a ledger of this version, got 3 bytes"):
        Ledger.from_bytes(b"abc")
    alone = gather_ledger(ledger)
    assert alone is not ledger
    assert alone.digest == ledger.digest
    with pytest.raises(TypeError, match="gather_ledger: ledger must be a Ledger, got list"):
        gather_ledger([])
