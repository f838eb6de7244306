"""Orders that a function gives, epoch by epoch: asked once, checked, and known to everything."""

import copy
import pickle

import numpy as np
import pytest

from jax_ddp_weighting import (
    DistributedSampler,
    EpochPlan,
    EpochRecord,
    Ledger,
    audit_ids,
    check_agreement,
    weighted_order,
)
from jax_ddp_weighting.data.agreement import _findings


def rolled(epoch):
    return (np.arange(10) + 3 * epoch) % 10


def reversed_later(epoch):
    return rolled(epoch)[:: -1 if epoch else 1]


class Counting:
    def __init__(self, function=rolled):
        self.function, self.epochs = function, []

    def __call__(self, epoch):
        self.epochs.append(epoch)
        return self.function(epoch)


def read(plan, epoch):
    """Ids that count, in the order's own order."""
    slots = [plan.batch(epoch, step) for step in range(plan.steps_per_epoch)]
    return [i for s in slots for i, w in zip(s.ids.T.flat, s.weights.T.flat, strict=True) if w]


def test_every_epoch_has_the_functions_ids_in_plans_and_samplers():
    plan = EpochPlan.from_order(rolled, 3, 2)
    for epoch in (0, 1, 5):
        assert read(plan, epoch) == rolled(epoch).tolist()
        shares = []
        for rank in range(3):
            sampler = DistributedSampler(10, 3, rank, order=rolled, tail="mask")
            sampler.set_epoch(epoch)
            assert list(sampler) == sampler.indices().tolist() == list(sampler.source())
            shares.append(sampler.indices())
            assert shares[-1].tolist() == rolled(epoch)[rank::3].tolist()
        found, walked = plan.audit(epoch), audit_ids(shares, 10, epoch=epoch)
        assert (found.unique, found.accepted, found.per_rank) == (10, 10, walked.per_rank)


def test_a_function_is_asked_once_for_each_epoch():
    order = Counting()
    plan = EpochPlan.from_order(order, 2, 2)
    assert plan.num_examples == plan.epoch_length == 10
    for epoch in (0, 1, 2, 1, 0):
        read(plan, epoch)
        plan.audit(epoch), plan.fingerprint, plan.fingerprint_of(epoch)
        plan.resumed(epoch, 4, num_replicas=3).batch(epoch, 0)
    assert order.epochs == [0, 1, 2]
    order = Counting()
    sampler = DistributedSampler(10, 2, 0, order=order)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        list(sampler), sampler.state_dict()
    assert order.epochs == [0, 1, 2]


def test_few_epochs_of_many_ids_are_kept_and_the_rest_asked_for_again(monkeypatch):
    from jax_ddp_weighting.sampling import order_functions

    monkeypatch.setattr(order_functions, "_KEPT", 20)
    order = Counting()
    plan = EpochPlan.from_order(order, 2, 2)
    for epoch in (0, 1, 0, 1, 2, 0):
        read(plan, epoch)
    assert order.epochs == [0, 1, 2, 0]


def test_what_changes_when_it_is_asked_again_is_refused(monkeypatch):
    from jax_ddp_weighting.sampling import order_functions

    monkeypatch.setattr(order_functions, "_KEPT", 20)
    rng = np.random.default_rng(0)
    plan = EpochPlan.from_order(lambda epoch: rng.permutation(10), 2, 2)
    read(plan, 1), read(plan, 2)
    with pytest.raises(ValueError, match=r"epoch 0: .* the same ids for the same epoch.*Seed"):
        read(plan, 0)


def late(bad):
    return lambda epoch: bad if epoch == 2 else np.arange(10)


@pytest.mark.parametrize(
    ("ids", "error", "match"),
    [
        (np.arange(9), ValueError, r"epoch 2: .* as many ids as before, 10, got 9\. Ranks count"),
        (np.arange(11), ValueError, r"as many ids as before, 10, got 11"),
        ([], ValueError, r"as many ids as before, 10, got 0"),
        (np.arange(1, 11), ValueError, r"epoch 2: ids must be in \[0, 10\), got 10\."),
        (np.arange(-1, 9), ValueError, r"epoch 2: ids must be at least 0, got -1"),
        ([0] * 10, ValueError, r"epoch 2: ids must name every example once, got 0 more"),
        (np.zeros((2, 5), int), ValueError, r"epoch 2: ids must have one axis, got shape \(2, 5\)"),
        (np.arange(10.0), TypeError, r"epoch 2: ids must be integers, got float64"),
        (iter(range(10)), TypeError, r"epoch 2: ids must be an array or a sequence, got a range_"),
        (None, TypeError, r"epoch 2: ids must be an array or a sequence, got a NoneType"),
    ],
)
def test_each_epoch_is_checked_as_an_array_is(ids, error, match):
    for plan in (
        EpochPlan.from_order(late(ids), 2, 2),
        DistributedSampler(10, 2, 0, order=late(ids)).plan,
    ):
        read(plan, 1)
        for look in (
            lambda p: p.batch(2, 0),
            lambda p: p.slots(2, 0),
            lambda p: p.audit(2),
            lambda p: EpochRecord.of(p, 2, "a"),
            lambda p: Ledger(10, epoch=2).due(p),
        ):
            with pytest.raises(error, match=match):
                look(plan)


def test_the_first_epoch_is_checked_at_once_and_names_who_asks():
    with pytest.raises(ValueError, match=r"^EpochPlan\.from_order: epoch 0: ids must be at least"):
        EpochPlan.from_order(lambda epoch: [-1, 0], 2, 2)
    with pytest.raises(ValueError, match=r"^DistributedSampler: order: epoch 0: ids must be in \["):
        DistributedSampler(4, 2, 0, order=lambda epoch: [4, 0])
    with pytest.raises(ZeroDivisionError) as error:
        EpochPlan.from_order(lambda epoch: 1 // epoch, 2, 2)
    assert error.value.__notes__ == [
        "EpochPlan.from_order: the order's function failed at epoch 0."
    ]


def test_plans_are_told_apart_by_the_ids_of_the_epoch_and_not_by_the_function():
    one, twin, other = (
        EpochPlan.from_order(f, 2, 2) for f in (rolled, lambda epoch: rolled(epoch), reversed_later)
    )
    for epoch in (0, 3):
        assert one.fingerprint_of(epoch) == twin.fingerprint_of(epoch)
        assert EpochRecord.of(one, epoch, "a") == EpochRecord.of(twin, epoch, "a")
    assert EpochRecord.of(one, 0, "a") == EpochRecord.of(other, 0, "a")
    records = {rank: EpochRecord.of(p, 3, "a").to_json() for rank, p in enumerate((one, other))}
    assert "order" in _findings(records, among=(0, 1), timeout_s=1)
    check_agreement(EpochRecord.of(one, 3, "a"))
    assert one != twin
    assert one == EpochPlan.from_order(rolled, 2, 2)
    assert hash(one) == hash(EpochPlan.from_order(rolled, 2, 2))


def test_a_state_is_of_the_ids_of_its_epoch():
    def sampler(order):
        made = DistributedSampler(10, 2, 0, order=order)
        made.set_epoch(3)
        return made

    before = sampler(rolled)
    ids = iter(before)
    first = [next(ids) for _ in range(2)]
    state = before.state_dict()
    after = sampler(lambda epoch: rolled(epoch))
    after.load_state_dict(state)
    assert [*first, *after] == rolled(3)[::2].tolist()
    with pytest.raises(ValueError, match=r"order must be this sampler's, 'given .*another order"):
        sampler(reversed_later).load_state_dict(state)


def test_pickles_and_copies_read_the_same_and_notice_what_changed():
    plan = EpochPlan.from_order(rolled, 2, 2)
    sampler = DistributedSampler(10, 2, 1, order=rolled)
    sampler.set_epoch(4)
    for twin in (pickle.loads(pickle.dumps(plan)), copy.deepcopy(plan)):
        assert twin == plan
        assert hash(twin) == hash(plan)
        assert read(twin, 4) == read(plan, 4)
    for twin in (pickle.loads(pickle.dumps(sampler)), copy.deepcopy(sampler)):
        assert list(twin) == rolled(4)[1::2].tolist()
    changed = pickle.loads(pickle.dumps(plan))
    changed.order.__dict__["function"] = reversed_later
    read(changed, 0)
    read(plan, 1)
    changed = pickle.loads(pickle.dumps(plan))
    changed.order.__dict__["function"] = reversed_later
    with pytest.raises(ValueError, match="the same ids for the same epoch"):
        read(changed, 1)


def test_the_rest_of_an_epoch_is_dealt_to_any_number_of_ranks_and_the_ledger_knows_what_is_due():
    plan = EpochPlan.from_order(rolled, 3, 1)
    ledger = Ledger(10, epoch=2)
    ledger.add(plan.batch(2, 0).ids)
    rest = plan.resumed(2, plan.position(1), num_replicas=2, batch_size=2)
    assert read(rest, 2) == rolled(2)[3:].tolist() == ledger.due(plan).tolist()
    for step in range(rest.steps_per_epoch):
        slots = rest.batch(2, step)
        ledger.add(slots.ids, slots.weights)
    ledger.check_exactly_once()


def test_a_second_epoch_over_one_array_is_said_and_a_shuffled_one_refused():
    draw = [3, 3, 1, 0]
    with pytest.raises(ValueError, match=r"shuffle must be False .* A function of the epoch gives"):
        DistributedSampler(4, 2, 0, order=draw, repeats=True)
    sampler = DistributedSampler(4, 2, 0, shuffle=False, order=draw, repeats=True)
    with pytest.warns(UserWarning, match=r"all epochs of this source read the same ids again"):
        sampler.source(2)
    sampler = DistributedSampler(4, 2, 0, shuffle=False, order=draw, repeats=True)
    with pytest.warns(UserWarning, match=r"holds one order.* Give a function of the epoch"):
        sampler.set_epoch(1)


def test_a_pass_that_is_read_again_without_a_new_epoch_is_said():
    sampler = DistributedSampler(6, 2, 0, order=weighted_order([1, 2, 3, 4, 5, 6], 8))
    list(sampler)
    with pytest.warns(UserWarning, match="epoch 0 is read again"):
        list(sampler)


def test_a_weighted_draw_is_new_in_each_epoch_and_the_same_on_all_ranks():
    """8 draws from 6 ids, through a sampler on two ranks: what is drawn is what the order draws."""
    order = weighted_order([1, 2, 3, 0, 1, 1], 8, seed=3)
    draws = []
    for epoch in range(4):
        shares = []
        for rank in range(2):
            sampler = DistributedSampler(6, 2, rank, order=order)
            sampler.set_epoch(epoch)
            shares.append(list(sampler))
        draws.append([i for pair in zip(*shares, strict=True) for i in pair])
        assert draws[-1] == order(epoch).tolist()
        assert 3 not in draws[-1]
    assert len({tuple(draw) for draw in draws}) == 4


def test_an_order_for_another_dataset_is_refused():
    order = weighted_order([1, 2, 3], 8)
    with pytest.raises(ValueError, match=r"num_examples must be .* of, 3, got 6\. Give a weight"):
        DistributedSampler(6, 2, 0, order=order)
    with pytest.raises(ValueError, match=r"num_examples must be .* of, 3, got 6\."):
        EpochPlan.from_order(order, 2, 2, num_examples=6)
    assert EpochPlan.from_order(order, 2, 2).num_examples == 3
