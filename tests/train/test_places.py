"""Steps under what a program has set for itself: a mesh, strict promotion, 64 bits."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fitting import fetch, loss_fn, new_state
from flax.training.train_state import TrainState
from jax.sharding import AxisType

from jax_ddp_weighting import (
    Batch,
    BatchNorm,
    data_mesh,
    make_train_step,
    valid_labels,
    weighted_multi_steps,
    weighted_sum,
)
from jax_ddp_weighting.train.step_options import STEP_ENGINES


def unweighted(params, batch):
    x, y = batch.data
    losses = (x @ params["w"] + params["b"] - y) ** 2
    return weighted_sum(losses)


def ignoring(params, batch):
    labels, valid = valid_labels(batch.ids, ignore_index=3)
    assert labels.shape == valid.shape
    x, y = batch.data
    return weighted_sum((x @ params["w"] + params["b"] - y) ** 2, valid)


def all_three(params, batch):
    return {
        "weighted": loss_fn(params, batch),
        "unweighted": unweighted(params, batch),
        "ignoring": ignoring(params, batch),
    }


def end(mesh, fn, tx, **options):
    step = make_train_step(fn, mesh, grad_norm=True, **options)
    state = new_state(tx)
    for i in range(2):
        state, report = step(state, Batch.of(fetch(np.arange(8) + i)))
    return jax.device_get((state.params, report.loss.value, report.grad_norm))


COEFFICIENTS = {"weighted": 1.0, "unweighted": 0.5, "ignoring": 2.0}


@pytest.mark.parametrize("axes", ["same", "others"])
@pytest.mark.parametrize("engine", STEP_ENGINES)
def test_a_mesh_that_the_program_has_set_changes_nothing(engine, axes):
    devices = jax.devices()[:4]
    ours = jax.make_mesh((4,), ("data",), devices=devices)  # of type Explicit, JAX's default
    if axes == "same":
        theirs, fn, options = ours, all_three, {"coefficients": COEFFICIENTS}
        tx = optax.chain(optax.trace(0.9), optax.adam(0.1))
    else:
        theirs, fn, options = jax.make_mesh((2, 2), ("x", "y"), devices=devices), loss_fn, {}
        tx = optax.chain(optax.trace(0.9), weighted_multi_steps(optax.adam(0.1), 2))
    assert set(theirs.axis_types) == {AxisType.Explicit}
    right = end(data_mesh(1), fn, tx, **options)
    with jax.set_mesh(theirs):
        found = end(ours, fn, tx, engine=engine, microbatches=2, **options)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), found, right)


@pytest.mark.parametrize(
    ("engine", "dtype", "weights"),
    [
        ("shard_map", jnp.float32, np.int32),
        ("shard_map", jnp.bfloat16, np.float32),
        ("jit", jnp.bfloat16, np.int32),
        ("pmap", jnp.float32, np.float32),
    ],
)
def test_strict_promotion_is_for_the_programs_own_arithmetic(engine, dtype, weights):
    def fn(params, batch):
        return weighted_sum((params["w"] - batch.data) ** 2, batch.weights)

    def run():
        tx = weighted_multi_steps(optax.sgd(0.1, momentum=0.9), 2)
        state = TrainState.create(apply_fn=None, params={"w": jnp.zeros((), dtype)}, tx=tx)
        step = make_train_step(fn, data_mesh(2), engine=engine, microbatches=2, grad_norm=True)
        batch = Batch.of(jnp.arange(4).astype(dtype), weights=np.array([1, 2, 0, 1], weights))
        for _ in range(2):
            state, report = step(state, batch)
        return jax.device_get((state.params["w"], report.loss.value, report.grad_norm))

    right = run()
    with jax.numpy_dtype_promotion("strict"):
        jax.tree.map(np.testing.assert_array_equal, run(), right)


class Model(nn.Module):
    @nn.compact
    def __call__(self, x, weights):
        x = BatchNorm(use_running_average=False, axis_name="data")(x, weights=weights)
        return nn.Dense(1)(x)[:, 0]


class State(TrainState):
    batch_stats: dict


def normalised_run(x_dtype):
    model = Model()
    x, y = (leaf.astype(x_dtype) for leaf in fetch(np.arange(8)))

    def fn(variables, batch):
        x, y = batch.data
        out, updates = model.apply(variables, x, batch.weights, mutable=["batch_stats"])
        return weighted_sum((out - y) ** 2, batch.weights), updates

    variables = jax.jit(model.init)(jax.random.key(0), x, np.ones(8))
    state = State.create(
        apply_fn=None,
        params=variables["params"],
        tx=optax.sgd(0.1),
        batch_stats=variables["batch_stats"],
    )
    step = make_train_step(fn, data_mesh(2), mutable="batch_stats", microbatches=2)
    for _ in range(2):
        state, report = step(state, Batch.of((x, y)))
    return state, float(report.loss.value)


@pytest.mark.parametrize("x_dtype", [np.float32, np.float64])
def test_batch_norm_keeps_its_dtypes_under_x64(x_dtype):
    # flax's statistics are float32 by default, whatever is normalised
    _, right = normalised_run(np.float32)
    with jax.enable_x64(True):
        state, loss = normalised_run(x_dtype)
        assert {leaf.dtype for leaf in jax.tree.leaves(state.batch_stats)} == {np.dtype("float32")}
    assert loss == pytest.approx(right, rel=1e-5)
