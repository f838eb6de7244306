"""Options and arguments that a step refuses, before anything is lost."""

import jax
import numpy as np
import optax
import pytest
from fitting import X, fetch, loss_fn, new_state, scalar_loss, scalar_state

from jax_ddp_weighting import (
    Batch,
    data_mesh,
    make_train_step,
)
from jax_ddp_weighting.distributed import mesh as meshes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"engine": "ddp"}, "engine must be one of shard_map, jit, pmap, got 'ddp'"),
        ({"rng_per": "row"}, "rng_per must be one of rank, example, got 'row'"),
        ({"axis_name": "batch"}, "mesh must have the axis 'batch'"),
        ({"microbatches": 0}, "microbatches must be an integer, at least 1, got 0"),
    ],
)
def test_bad_options_are_refused_at_once(options, message):
    with pytest.raises(ValueError, match=f"make_train_step: {message}"):
        make_train_step(loss_fn, data_mesh(2), **options)


def test_bad_calls_are_refused():
    state, batch = new_state(optax.sgd(0.1)), Batch.of(fetch(np.arange(4)))
    step = make_train_step(loss_fn, data_mesh(2), microbatches=2)
    with pytest.raises(TypeError, match="batch must be a Batch, got dict"):
        step(state, {"x": X})
    with pytest.raises(ValueError, match="rows that divide by 2 ranks, got 5"):
        step(state, Batch.of(fetch(np.arange(5))))
    with pytest.raises(ValueError, match="rows per rank that divide by 2 microbatches, got 3"):
        step(state, Batch.of(fetch(np.arange(6))))
    with pytest.raises(TypeError, match="state must be a flax TrainState, got dict"):
        step(state.params, batch)
    with pytest.raises(TypeError, match="rng must be one key, got 0"):
        step(state, batch, 0)
    with pytest.raises(TypeError, match="rng must be one key, got Array"):
        step(state, batch, jax.random.split(jax.random.key(0)))
    with pytest.raises(
        TypeError, match=r"must take \(params, batch, rng\) when the step is given an rng, got \(pa"
    ):
        step(state, batch, jax.random.key(0))
    plain = state.replace(tx=optax.GradientTransformation(state.tx.init, state.tx.update))
    with pytest.raises(TypeError, match=r"extra arguments to be given \['flush'\], got Gradient"):
        step(plain, batch, flush=True)
    with pytest.raises(TypeError, match="a field for each name in mutable, got none for 'stats'"):
        make_train_step(loss_fn, data_mesh(2), mutable="stats")(state, batch)
    with pytest.raises(ValueError, match="rng must be given where rng_per='example', got None"):
        make_train_step(loss_fn, data_mesh(2), rng_per="example")(state, batch)


def test_bad_calls_after_good_ones_are_refused_and_lose_nothing():
    mesh = data_mesh(2)

    def rows(count):
        return meshes.place(Batch.of(fetch(np.arange(count))), meshes.row_sharding(mesh, "data"))

    step = make_train_step(lambda params, batch, rng: loss_fn(params, batch), mesh, microbatches=2)
    keys = jax.random.split(jax.random.key(0), 3)
    state, _ = step(new_state(optax.sgd(0.1)), rows(8), keys[0])
    with pytest.raises(ValueError, match="rows per rank that divide by 2 microbatches, got 3"):
        step(state, rows(6), keys[1])
    with pytest.raises(TypeError, match="rng must be one key, got"):
        step(state, rows(8), keys)
    with pytest.raises(TypeError, match="batch must be a Batch, got tuple"):
        step(state, rows(8).data, keys[1])
    with pytest.raises(TypeError, match="state must be a flax TrainState, got dict"):
        step(state.params, rows(8), keys[1])
    _, report = step(state, rows(8), keys[1])
    assert int(report.weight) == 8


@pytest.mark.parametrize("wide", [2**32 + 5, -(2**40) - 1])
def test_ids_that_a_device_would_cut_are_refused(wide):
    batch = Batch.of(np.zeros(2, np.float32), ids=np.array([5, wide]))
    step = make_train_step(scalar_loss, data_mesh(1), rng_per="example")
    with pytest.raises(ValueError, match=rf"ids must be of at most 32 bits .* got {wide}"):
        step(scalar_state(), batch, jax.random.key(0))
    with jax.enable_x64(True):
        step(scalar_state(), batch, jax.random.key(0))


def test_coefficients_of_which_none_trains_are_refused():
    with pytest.raises(ValueError, match=r"coefficients must have one that is not 0, got \{'a': 0"):
        make_train_step(scalar_loss, data_mesh(1), coefficients={"a": 0.0})
    with pytest.raises(
        TypeError, match=r"make_train_step: mesh must be a jax\.sharding\.Mesh, got"
    ):
        make_train_step(scalar_loss, 4)


def test_a_mesh_without_devices_is_refused():
    mesh = jax.sharding.AbstractMesh((2,), ("data",))
    with pytest.raises(TypeError, match="make_train_step: mesh must have devices, got an Abstract"):
        make_train_step(lambda params, batch: None, mesh)
