"""A straight line to fit, and one number: the problems that the tests of steps train on."""

import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState

from jax_ddp_weighting import weighted_sum

X = np.random.default_rng(0).normal(size=(47, 3)).astype(np.float32)
Y = X @ np.float32([1.0, -2.0, 0.5]) + np.float32(0.1)


def loss_fn(params, batch):
    x, y = batch.data
    return weighted_sum((x @ params["w"] + params["b"] - y) ** 2, batch.weights)


def new_state(tx):
    params = {"w": jnp.zeros(3), "b": jnp.zeros(())}
    return TrainState.create(apply_fn=None, params=params, tx=tx)


def fetch(ids):
    return X[ids], Y[ids]


def scalar_state():
    return TrainState.create(apply_fn=None, params={"w": jnp.float32(0)}, tx=optax.sgd(0.1))


def scalar_loss(params, batch, *_):
    return weighted_sum((params["w"] - batch.data) ** 2, batch.weights)
