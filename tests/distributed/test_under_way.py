"""How many steps are under way: never more than the bound, whatever the devices do."""

import random

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

from jax_ddp_weighting import Batch, data_mesh, make_train_step, weighted_sum
from jax_ddp_weighting.distributed import under_way


class Devices:
    """What finishes steps in their order, some time after somebody has begun to wait for one."""

    def __init__(self, seed):
        self.chance, self.given, self.most = random.Random(seed), [], 0

    def give(self):
        step = Step(self)
        self.given.append(step)
        return step

    def work(self):
        if self.given and self.chance.random() < 0.3:
            self.given.pop(0).finished = True

    def count(self):
        self.most = max(self.most, len(self.given))


class Step:
    finished = False

    def __init__(self, devices):
        self.devices = devices

    def is_deleted(self):
        return False

    def is_ready(self):
        self.devices.work()  # as time goes by
        return self.finished

    def block_until_ready(self):
        assert self.finished


def most_under_way(seed, monkeypatch, steps=200):
    """The most unfinished steps that there are when a step returns."""
    monkeypatch.setattr(under_way, "_under_way", type(under_way._under_way)())
    monkeypatch.setattr(under_way.time, "sleep", lambda seconds: None)
    devices = Devices(seed)
    for _ in range(steps):
        under_way.hold_back(devices.give())
        devices.count()
    return devices.most


@pytest.mark.parametrize("seed", range(5))
def test_unfinished_steps_never_pass_the_bound(seed, monkeypatch):
    assert most_under_way(seed, monkeypatch) == under_way.STEPS_UNDER_WAY == 2


def test_a_bound_that_does_not_hold_is_seen(monkeypatch):
    """One more than the bound, and no wait at all."""
    wait = under_way._wait_until_ready
    monkeypatch.setattr(under_way, "STEPS_UNDER_WAY", 3)
    assert most_under_way(0, monkeypatch) == 3
    monkeypatch.setattr(under_way, "STEPS_UNDER_WAY", 2)
    monkeypatch.setattr(under_way, "_wait_until_ready", lambda array: None)
    assert most_under_way(0, monkeypatch) == 200
    monkeypatch.setattr(under_way, "_wait_until_ready", wait)
    assert most_under_way(0, monkeypatch) == 2


def test_real_steps_never_pass_the_bound(monkeypatch):
    """Steps of two devices, given out faster than they are run."""
    monkeypatch.setattr(under_way, "_under_way", type(under_way._under_way)())

    def loss_fn(params, batch):
        return weighted_sum(jnp.tanh(batch.data @ params["w"] @ params["w"]).sum(1), batch.weights)

    params = {"w": jnp.eye(256)}
    state = TrainState.create(apply_fn=None, params=params, tx=optax.sgd(1e-3))
    step = make_train_step(loss_fn, data_mesh(2))
    batch = Batch.of(np.ones((64, 256), np.float32))
    losses, most = [], 0
    for _ in range(60):
        state, report = step(state, batch)
        losses.append(jax.tree.leaves(report)[0])
        most = max(most, sum(not loss.is_ready() for loss in losses))
    assert most <= under_way.STEPS_UNDER_WAY
    assert int(state.step) == 60
