"""Weights that a plan carries: what a slot weighs, in batches, audits and ledgers."""

import pickle
from dataclasses import replace

import numpy as np
import pytest

from jax_ddp_weighting import (
    EpochPlan,
    EpochRecord,
    Ledger,
    audit_ids,
    batches,
    data_mesh,
    mixture_order,
    weighted_order,
)

OWN = np.array([0.5, 0, 2, 1, 3, 0.25, 1, 0, 4, 1, 7])
PLANS = {
    "mask": EpochPlan(11, 3, 2, weights=OWN),
    "repeat": EpochPlan(11, 3, 2, tail="repeat", weights=OWN),
    "drop": EpochPlan(11, 3, 2, tail="drop", weights=OWN, order="torch"),
    "unshuffled": EpochPlan(11, 3, 2, shuffle=False, weights=OWN),
    "drawn": EpochPlan.from_order(weighted_order(np.arange(1, 12), 14), 3, 2, weights=OWN),
    "rest": EpochPlan(11, 3, 2, weights=OWN).resumed(1, 4, num_replicas=4, batch_size=1),
}


def without(plan):
    return replace(plan, weights=None)


@pytest.mark.parametrize("name", PLANS)
def test_a_slot_weighs_what_its_example_does_and_padding_nothing(name):
    plan = PLANS[name]
    for step in range(plan.steps_per_epoch):
        slots, plain = plan.batch(1, step), without(plan).batch(1, step)
        assert slots.ids.tolist() == plain.ids.tolist()
        assert slots.weights.dtype == np.float32
        assert slots.weights.tolist() == (OWN[plain.ids] * plain.weights).tolist()


@pytest.mark.parametrize("name", PLANS)
def test_an_audit_counts_what_weighs_more_than_nothing(name):
    plan = PLANS[name]
    slots = [plan.slots(1, rank) for rank in range(plan.num_replicas)]
    ids, weights = [s.ids for s in slots], [s.weights for s in slots]
    assert plan.audit(1) == audit_ids(ids, 11, weights=weights, epoch=1)
    ledger = Ledger(11, epoch=1)
    for step in range(plan.steps_per_epoch):
        batch = plan.batch(1, step)
        ledger.add(batch.ids, batch.weights)
    assert ledger.audit().unique == plan.audit(1).unique
    due = set(ledger.due(plan).tolist())  # what weighs 0 never is
    assert not due & {1, 7}
    assert bool(due) is (name in ("drop", "rest"))


def test_a_mixture_says_what_its_sources_weighed_for():
    weights = np.array([1, 0, 1, 0, 1, 1])
    plan = EpochPlan.from_order(mixture_order([2, 4], [1, 2], 6), 2, 3, weights=weights)
    first, second = plan.audit(0).sources
    assert (first.draws, first.unique, first.due) == (1, 1, 0)
    assert (second.draws, second.unique, second.epochs) == (3, 3, 1)


def test_plans_of_other_weights_are_others():
    plan = EpochPlan(11, 3, 2, weights=OWN)
    twin, other = (EpochPlan(11, 3, 2, weights=w) for w in (OWN.tolist(), OWN[::-1]))
    assert plan == twin == pickle.loads(pickle.dumps(plan))
    assert hash(plan) == hash(twin)
    assert plan.fingerprint == twin.fingerprint
    assert plan not in (other, without(plan))
    assert np.asarray(plan.weights).tolist() == OWN.tolist()
    records = [EpochRecord.of(p, 0, "a").order for p in (plan, twin, other, without(plan))]
    assert len(set(records)) == 3
    assert records[0] == records[1] == f"keyed with {plan.weights.digest}"
    assert records[3] == "keyed"


def test_batches_carry_them():
    plan = EpochPlan(11, 1, 4, weights=OWN)
    seen = list(batches(plan, 2, lambda ids: ids * 2.0, data_mesh(1)))
    for step, batch in enumerate(seen):
        assert batch.weights.dtype == np.float32
        assert batch.weights.tolist() == plan.batch(2, step).weights[0].tolist()
    assert sum(float(batch.weights.sum()) for batch in seen) == OWN.sum()


def test_the_callers_weights_may_change():
    weights = np.ones(3)
    plan = EpochPlan(3, 1, 3, weights=weights)
    weights[:] = 5
    assert plan.batch(0, 0).weights.tolist() == [[1, 1, 1]]


@pytest.mark.parametrize(
    ("weights", "error", "match"),
    [
        ([1, -1, 0], ValueError, r"must be finite and at least 0, got -1 at row 1"),
        ([1, np.nan, 0], ValueError, r"must be finite and at least 0, got nan at row 1"),
        ([1, np.inf, 0], ValueError, r"must be finite and at least 0, got inf at row 1"),
        ([1, 1e300, 0], ValueError, r"must stay finite, and above 0, in float32, got 1e\+300 at"),
        ([1, 1, 1e-300], ValueError, r"must stay finite, and above 0, in float32, got 1e-300 at"),
        ([1, 1], ValueError, r"must be one for each example, \[3\], got shape \(2,\)"),
        ([[1, 1, 1]], ValueError, r"must be one for each example, \[3\], got shape \(1, 3\)"),
        (2.0, ValueError, r"must be one for each example, \[3\], got shape \(\)"),
        (["a", "b", "c"], TypeError, r"must be numbers, got <U1"),
    ],
)
def test_bad_weights_are_refused(weights, error, match):
    for make in (
        lambda: EpochPlan(3, 1, 1, weights=weights),
        lambda: EpochPlan.from_order([0, 2, 1], 1, 1, weights=weights),
    ):
        with pytest.raises(error, match=f"^EpochPlan: weights {match}"):
            make()
