"""Where a state lies on the mesh, and what becomes of the arrays that a step was given."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fitting import fetch, loss_fn, new_state
from flax.training.train_state import TrainState
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jax_ddp_weighting import (
    Batch,
    data_mesh,
    make_train_step,
    weighted_sum,
)
from jax_ddp_weighting.distributed import mesh as meshes


def test_the_users_own_arrays_survive_the_donation():
    class Keyed(TrainState):
        key: Any

    params, key = new_state(optax.sgd(0.1)).params, jax.random.key(0)
    state = Keyed.create(apply_fn=None, params=params, tx=optax.sgd(0.1), key=key)
    step = make_train_step(loss_fn, data_mesh(1))
    after, _ = step(state, Batch.of(fetch(np.arange(8))))
    np.testing.assert_array_equal(params["w"], np.zeros(3))
    assert not key.is_deleted()
    step(after, Batch.of(fetch(np.arange(8))))
    assert after.params["w"].is_deleted()


def test_a_state_may_hold_the_same_array_twice():
    class Averaged(TrainState):
        ema: Any

    mesh = data_mesh(2)
    params = meshes.place({"w": jnp.ones(3), "b": jnp.ones(())}, meshes.replicated_sharding(mesh))
    state = Averaged.create(apply_fn=None, params=params, tx=optax.sgd(0.1), ema=params)
    state, _ = make_train_step(loss_fn, mesh)(state, Batch.of(fetch(np.arange(8))))
    np.testing.assert_array_equal(state.ema["w"], np.ones(3))


WIDE = np.random.default_rng(1).normal(size=(16, 8)).astype(np.float32)


def two_layers(params, batch):
    hidden = jnp.tanh(batch.data @ params["in"])  # axes of type Explicit allow no sharded sums here
    return weighted_sum(
        jnp.sum((hidden * jnp.sum(params["out"], 0, keepdims=True)) ** 2, -1), batch.weights
    )


# where each parameter lies, by name of the layout
LAYOUTS = {
    "model": {"in": PartitionSpec(None, "model"), "out": PartitionSpec(None, "model")},
    "fsdp": {"in": PartitionSpec("data", None), "out": PartitionSpec("data", "model")},
}


@pytest.mark.parametrize(
    ("engine", "layout", "axis_type"),
    [
        ("jit", "model", AxisType.Auto),
        ("jit", "fsdp", AxisType.Auto),
        ("shard_map", "model", AxisType.Auto),
        ("jit", "model", AxisType.Explicit),
        ("shard_map", "model", AxisType.Explicit),
    ],
)
def test_sharded_parameters_stay_where_they_lie_and_train_as_on_one_device(
    engine, layout, axis_type
):
    rng = np.random.default_rng(2)
    params = {name: rng.normal(size=(8, 8)).astype(np.float32) / 3 for name in ("in", "out")}
    weights = np.arange(16) % 3

    def run(mesh, engine, layout):
        placed = {
            name: jax.device_put(value, NamedSharding(mesh, LAYOUTS[layout][name]))
            if layout
            else value
            for name, value in params.items()
        }
        state = TrainState.create(apply_fn=None, params=placed, tx=optax.adam(1e-2))
        step = make_train_step(two_layers, mesh, engine=engine, microbatches=2)
        for _ in range(3):
            state, report = step(state, Batch.of(WIDE, weights=weights))
        return state, report

    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(axis_type,) * 2)
    state, report = run(mesh, engine, layout)
    for tree in (state.params, state.opt_state[0].mu, state.opt_state[0].nu):
        for name, leaf in tree.items():
            assert leaf.sharding.is_equivalent_to(NamedSharding(mesh, LAYOUTS[layout][name]), 2)
    right, expected = run(data_mesh(1), "jit", None)
    assert report.loss.value == pytest.approx(float(expected.loss.value), rel=1e-5)
    for name in params:
        np.testing.assert_allclose(state.params[name], right.params[name], rtol=1e-4, atol=1e-6)
        assert np.max(np.abs(state.params[name] - params[name])) > 1e-2


@pytest.mark.parametrize("leaf", [jnp.float32(0.07), jnp.array(0.07), jnp.log(1 / 0.07), 0.07])
@pytest.mark.parametrize("tx", [optax.sgd(0.1), optax.adamw(1e-3)])
def test_a_weakly_typed_parameter_compiles_no_second_step(leaf, tx):
    traces = []

    def loss_fn(params, batch):
        traces.append(1)
        return weighted_sum((params["w"] - batch.data) ** 2, batch.weights)

    step = make_train_step(loss_fn, data_mesh(2))
    state = TrainState.create(apply_fn=None, params={"w": leaf}, tx=tx)
    counts = []
    for _ in range(3):
        state, _ = step(state, Batch.of(np.arange(8, dtype=np.float32)))
        counts.append(len(traces))
    assert counts[0] == counts[-1]
