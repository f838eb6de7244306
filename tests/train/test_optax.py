"""Forty optimizers of optax against a loop on one device, with a step without weight between."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from optax import contrib

from jax_ddp_weighting import Batch, data_mesh, make_train_step, weighted_sum

X = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
Y = np.tanh(X @ np.float32([1.0, -2.0, 0.5])) + np.float32(0.3)
WEIGHTS = np.int32([1, 2, 0, 0, 1, 1, 3, 0])
START = {"w": np.full((3, 2), 0.1, np.float32), "b": np.float32([0.1, 0.2])}

OPTIMIZERS = {
    **{
        name: getattr(optax, name)(0.05)
        for name in (
            *("adabelief", "adadelta", "adagrad", "adafactor", "adam", "adamax", "adamaxw"),
            *("adamw", "adan", "amsgrad", "fromage", "lamb", "lars", "lion", "nadam", "nadamw"),
            *("novograd", "radam", "rmsprop", "rprop", "sgd", "sign_sgd", "sm3"),
            *("yogi", "optimistic_gradient_descent", "optimistic_adam_v2"),
        )
    },
    "momentum": optax.sgd(0.05, momentum=0.9, nesterov=True),
    "schedule": optax.adamw(optax.linear_schedule(0.1, 0.01, 3), weight_decay=0.1),
    "clipped": optax.chain(optax.clip_by_global_norm(0.1), optax.adam(0.05)),
    "lookahead-like": optax.chain(optax.trace(0.9), optax.ema(0.5), optax.scale(-0.05)),
    "injected": optax.inject_hyperparams(optax.adamw)(optax.exponential_decay(0.1, 1, 0.5)),
    "partition": optax.partition(
        {"w": optax.adamw(0.05), "b": optax.sgd(0.1, momentum=0.5)}, {"w": "w", "b": "b"}
    ),
    "polyak_sgd": optax.polyak_sgd(0.1),
    "lbfgs": optax.lbfgs(),
    "plateau": optax.chain(optax.sgd(0.1), contrib.reduce_on_plateau(patience=0, factor=0.5)),
    "ademamix": contrib.ademamix(0.05),
    "prodigy": contrib.prodigy(),
    "muon": contrib.muon(0.05),
    "schedule_free": contrib.schedule_free_adamw(0.05),
    "momo": contrib.momo(0.1),
}


def loss_fn(params, batch):
    x, y = batch.data
    out = jnp.sum(x @ params["w"] + params["b"][None], axis=-1)
    return weighted_sum((out - y) ** 2, batch.weights)


def batch_of(i):
    return Batch.of((np.roll(X, i, 0), np.roll(Y, i, 0)), np.roll(WEIGHTS, i))


def naive_loop(tx):
    tx = optax.with_extra_args_support(tx)
    params = jax.tree.map(jnp.asarray, START)
    state = tx.init(params)

    @jax.jit
    def step(params, state, batch):
        def value_fn(params):
            return loss_fn(params, batch).mean()

        value, grad = jax.value_and_grad(value_fn)(params)
        extra = {"value": value, "grad": grad, "value_fn": value_fn}
        updates, state = tx.update(grad, state, params, **extra)
        return optax.apply_updates(params, updates), state

    for i in range(3):
        params, state = step(params, state, batch_of(i))
    return jax.device_get((params, state))


def test_there_are_forty():
    assert len(OPTIMIZERS) >= 40


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_run_is_one_devices_and_a_step_without_weight_is_not_in_it(name):
    tx = OPTIMIZERS[name]
    params, opt_state = naive_loop(tx)
    step = make_train_step(loss_fn, data_mesh(2))
    state = TrainState.create(apply_fn=None, params=jax.tree.map(jnp.asarray, START), tx=tx)
    for i in range(3):
        state, _ = step(state, batch_of(i))
        before = jax.device_get(state)
        empty = Batch.of((X * np.float32(np.nan), Y), np.zeros(8, np.int32))
        state, report = step(state, empty)
        assert report.skipped
        assert not report.stepped
        jax.tree.map(np.testing.assert_array_equal, before, jax.device_get(state))
    found = jax.device_get((state.params, state.opt_state))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-5),
        found,
        (params, opt_state),
    )
    assert any(np.any(found[0][leaf] != START[leaf]) for leaf in START)
