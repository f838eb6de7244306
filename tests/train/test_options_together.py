"""Options of training steps used together: each is tried alone elsewhere, and they share a step."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.dynamic_scale import DynamicScale
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding, PartitionSpec

from jax_ddp_weighting import (
    Batch,
    EpochPlan,
    batches,
    data_mesh,
    make_train_epoch,
    make_train_step,
    weighted_sum,
)

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(16, 8)).astype(np.float32), RNG.normal(size=16).astype(np.float32)
WEIGHTS = np.array([1, 2, 0, 1, 1, 0, 0, 0, 1, 1, 1, 3, 1, 1, 1, 1], np.int32)


class State(TrainState):
    dynamic_scale: Any = None


def count(params, batch):
    return {"rows": jnp.sum(batch.weights)}


def loss_fn(params, batch, statistics):
    x, y = batch.data
    errors = (jnp.tanh(x @ params["w"]) @ params["v"] - y) ** 2
    fit = weighted_sum(errors * 8 / statistics["rows"], batch.weights)
    return {"fit": fit, "norm": fit.once(jnp.sum(params["v"] ** 2))}


OPTIONS = {
    "coefficients": {"fit": 1.0, "norm": lambda step: 0.1 * step},
    "divisors": {"fit": lambda weight: jnp.maximum(weight, 30)},
    "statistics": count,
}


def new_state(mesh, *, sharded, scaled):
    params = {
        "w": jnp.linspace(-1.0, 1.0, 64).reshape(8, 8),
        "v": jnp.linspace(0.0, 1.0, 8),
    }
    if sharded:
        params = jax.device_put(params, NamedSharding(mesh, PartitionSpec("data")))
    scale = DynamicScale(growth_interval=2, scale=jnp.float32(2.0**10)) if scaled else None
    return State.create(apply_fn=None, params=params, tx=optax.adam(0.05), dynamic_scale=scale)


def run(ranks=1, *, sharded=False, scaled=False, **options):
    mesh = data_mesh(ranks)
    state = new_state(mesh, sharded=sharded, scaled=scaled)
    step = make_train_step(loss_fn, mesh, grad_norm=True, **OPTIONS | options)
    seen = []
    for i in range(3):
        batch = Batch.of((np.roll(X, i, 0), np.roll(Y, i)), np.roll(WEIGHTS, i))
        state, report = step(state, batch)
        seen.append((report.loss.value, report.grad_norm))
    return jax.device_get((state.params, seen))


@pytest.fixture(scope="module")
def alone():
    return run()


def assert_alike(found, right):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, right)


@pytest.mark.parametrize(
    ("ranks", "sharded", "options"),
    [
        (4, True, {"microbatches": 2}),
        (4, True, {"microbatches": 2, "gather_per": "microbatch"}),
        (2, True, {"microbatches": 4, "engine": "jit"}),
        (2, False, {"microbatches": 2, "engine": "pmap"}),
    ],
)
def test_a_scaled_and_sharded_step_of_many_options_is_one_devices(ranks, sharded, options, alone):
    assert_alike(run(ranks, sharded=sharded, scaled=True, **options), alone)


@pytest.mark.parametrize("left_out", ["divisors", "coefficients"])
def test_each_option_shows_in_that_comparison(left_out, alone):
    without = {"divisors": None} if left_out == "divisors" else {}
    if left_out == "coefficients":
        without = {"coefficients": {"fit": 1.0, "norm": 0.1}}
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        assert_alike(run(**without), alone)


def test_an_epoch_of_many_options_is_its_loop():
    mesh = data_mesh(2)
    plan = EpochPlan(16, num_replicas=2, batch_size=3, seed=3)
    run_epoch = make_train_epoch(loss_fn, mesh, plan, **OPTIONS)
    step = make_train_step(loss_fn, mesh, **OPTIONS)
    state, looped = (new_state(mesh, sharded=True, scaled=True) for _ in range(2))
    for epoch in range(2):
        state, reports = run_epoch(state, (X, Y), epoch)
        values = []
        for batch in batches(plan, epoch, lambda ids: (X[ids], Y[ids]), mesh):
            looped, report = step(looped, batch)
            values.append(report.loss.value)
        np.testing.assert_array_equal(reports.loss.value, values)
        assert np.all(reports.finite)
    kept = [(each.params, each.opt_state, each.dynamic_scale) for each in (state, looped)]
    jax.tree.map(np.testing.assert_array_equal, *kept)
    assert state.params["w"].sharding.spec == PartitionSpec("data")
