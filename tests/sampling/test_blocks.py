"""Steps read one after the other come from blocks; nobody can tell but by the clock."""

import pickle
import threading
from copy import deepcopy

import numpy as np
import pytest

from jax_ddp_weighting import EpochPlan, torch_order
from jax_ddp_weighting.sampling.block import Block

PLANS = {
    "keyed": EpochPlan(10_007, 3, 16, seed=1),
    "torch": EpochPlan(1_003, 2, 7, order="torch", tail="repeat"),
    "own weights": EpochPlan(203, 4, 5, weights=np.linspace(0, 2, 203)),
    "own order": EpochPlan.from_order(lambda epoch: np.roll(np.arange(101), epoch), 2, 6),
    "a rest": EpochPlan(503, 2, 6).resumed(3, 24),
}


def fresh(plan, epoch, step, ranks):
    return deepcopy(plan).batch(epoch, step, ranks)


def same(ours, theirs):
    pairs = ((ours.ids, theirs.ids), (ours.weights, theirs.weights))
    return all(a.dtype == b.dtype and np.array_equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("name", PLANS)
def test_a_step_is_the_same_however_it_was_come_by(name):
    plan = deepcopy(PLANS[name])
    steps = plan.steps_per_epoch
    epoch = plan.only_epoch or 0
    wanted = {step: fresh(plan, epoch, step, [1]) for step in range(min(steps, 60))}
    for step, each in wanted.items():
        found = plan.batch(epoch, step, [1])
        assert same(found, each)
        found.ids[...] = -5  # an array of the caller's own
        found.weights[...] = 7
    for step in reversed(wanted):
        assert same(plan.batch(epoch, step, (1,)), wanted[step])
    assert same(plan.batch(epoch, steps - 1), fresh(plan, epoch, steps - 1, None))
    for step in range(3):
        assert same(plan.batch(epoch, step), fresh(plan, epoch, step, None))
        assert same(plan.batch(epoch, step, [1, 0]), fresh(plan, epoch, step, [1, 0]))
    if plan.only_epoch is None:
        assert not same(plan.batch(1, 1, [1]), wanted[1])


def test_blocks_grow_and_are_not_made_for_who_jumps_about(monkeypatch):
    made = []
    plan = EpochPlan(100_000, 2, 8)
    take = EpochPlan._take_rows

    def counting(self, epoch, ranks, start, stop):
        made.append((stop - start) // self.batch_size)
        return take(self, epoch, ranks, start, stop)

    monkeypatch.setattr(EpochPlan, "_take_rows", counting)
    for step in range(40):
        plan.batch(0, step, [0])
    assert made == [1, 2, 4, 8, 16, 32]
    made.clear()
    for step in (99, 7, 3000, 98, 100):
        plan.batch(0, step, [0])
    assert made == [1] * 5
    made.clear()
    for step in range(6_240, 6_250):  # the last step is the epoch's: no block goes beyond
        plan.batch(0, step, [0])
    assert sum(made) == 10
    wide = EpochPlan(2**20, 1, 2**15)
    made.clear()
    for step in range(4):
        wide.batch(0, step)
    assert made == [1] * 4


def test_what_is_refused_is_refused_after_a_block_too():
    plan = EpochPlan(101, 2, 5)
    for step in range(3):
        plan.batch(0, step, [1])
    for arguments, error, match in (
        ((0, True, [1]), TypeError, "step"),
        ((False, 2, [1]), TypeError, "epoch"),
        ((0, 2.0, [1]), TypeError, "step"),
        ((0, 2, [True]), TypeError, "ranks"),
        ((0, 11, [1]), ValueError, "step must be in"),
        ((0, 2, 1), TypeError, "ranks must be a sequence of ranks, got 1"),
        ((0, 2, [2]), ValueError, "ranks must be in"),
    ):
        with pytest.raises(error, match=match):
            plan.batch(*arguments)
    assert same(plan.batch(np.int64(0), np.int32(2), np.array([1])), fresh(plan, 0, 2, [1]))


def test_a_plan_with_a_block_is_the_same_plan():
    plan, other = EpochPlan(10_007, 2, 5), EpochPlan(10_007, 2, 5)
    for step in range(20):
        plan.batch(0, step)
    assert plan == other
    assert hash(plan) == hash(other)
    assert repr(plan) == repr(other)
    assert pickle.dumps(plan) == pickle.dumps(other)
    assert same(pickle.loads(pickle.dumps(plan)).batch(0, 3), other.batch(0, 3))
    assert isinstance(plan.__dict__["_block"], Block)


def test_threads_share_a_plan_and_torchs_words():
    plan, wrong = EpochPlan(40_009, 2, 8), []
    orders = [torch_order(500, seed) for seed in range(8)]
    wanted = [[fresh(plan, epoch, step, [0]) for step in range(50)] for epoch in range(4)]

    def read(epoch):
        for _ in range(20):
            for step in range(50):
                if not same(plan.batch(epoch, step, [0]), wanted[epoch][step]):
                    wrong.append((epoch, step))
            if not np.array_equal(torch_order(500, epoch), orders[epoch]):
                wrong.append(epoch)

    threads = [threading.Thread(target=read, args=(epoch,)) for epoch in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
