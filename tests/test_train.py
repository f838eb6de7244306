"""A training step: one device's step, whatever the engine; skipped where nothing has weight."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax.sharding import AxisType

from jax_ddp_weighting import Batch, EpochPlan, batches, data_mesh, make_train_step, weighted_sum
from jax_ddp_weighting.step import ENGINES

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


def reference_losses(plan, epochs, tx):
    """The same run on one device, written with plain JAX and without padding rows."""
    state, losses = new_state(tx), []
    for epoch in range(epochs):
        for step in range(plan.steps_per_epoch):
            slots = plan.batch(epoch, step)
            ids = slots.ids[slots.weights > 0]

            def mean(params, ids=ids):
                return jnp.mean((X[ids] @ params["w"] + params["b"] - Y[ids]) ** 2)

            loss, grads = jax.value_and_grad(mean)(state.params)
            state = state.apply_gradients(grads=grads)
            losses.append(float(loss))
    return losses, state


def mesh_of(axis_type, ranks=4):
    return jax.make_mesh(
        (ranks,), ("data",), axis_types=(axis_type,), devices=jax.devices()[:ranks]
    )


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_run_with_short_steps_equals_one_devices_run(engine, axis_type, microbatches):
    plan = EpochPlan(47, num_replicas=4, batch_size=4, seed=1)
    tx = optax.adam(0.05)
    mesh = mesh_of(axis_type)
    step = make_train_step(loss_fn, mesh, engine=engine, microbatches=microbatches)
    state, losses = new_state(tx), []
    for epoch in range(2):
        for batch in batches(plan, epoch, fetch, mesh):
            state, report = step(state, batch)
            losses.append(float(report.loss.value))
            assert not report.skipped
            assert report.weight == np.sum(np.asarray(batch.weights))
    expected, end = reference_losses(plan, 2, tx)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
        state.params,
        end.params,
    )


def test_the_run_comparison_can_fail():
    # the tail's copies counted, as tail="repeat" does, is another run
    mask = EpochPlan(47, num_replicas=4, batch_size=4, seed=1)
    repeat = EpochPlan(47, num_replicas=4, batch_size=4, seed=1, tail="repeat")
    a, _ = reference_losses(mask, 2, optax.adam(0.05))
    b, _ = reference_losses(repeat, 2, optax.adam(0.05))
    assert np.max(np.abs(np.array(a) / np.array(b) - 1)) > 1e-3


@pytest.mark.parametrize("engine", ENGINES)
def test_a_step_without_weight_changes_nothing(engine):
    mesh = data_mesh(4)
    step = make_train_step(loss_fn, mesh, engine=engine)
    batch = Batch.of(fetch(np.arange(8)))
    state, _ = step(new_state(optax.adamw(optax.linear_schedule(0.1, 0.0, 10))), batch)
    before = jax.device_get(state)
    empty = Batch.of(fetch(np.arange(8)), weights=np.zeros(8, np.int32))
    state, report = step(state, empty)
    assert report.skipped
    assert report.loss.value == 0.0
    assert report.weight == 0
    jax.tree.map(np.testing.assert_array_equal, before, jax.device_get(state))


def test_adamw_would_have_moved_on_the_zero_gradient_of_such_a_step():
    state = new_state(optax.adamw(0.1))
    state = state.apply_gradients(grads={"w": jnp.ones(3), "b": jnp.ones(())})
    moved = state.apply_gradients(grads={"w": jnp.zeros(3), "b": jnp.zeros(())})
    assert np.all(np.abs(np.asarray(moved.params["w"] - state.params["w"])) > 1e-2)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_run_compiles_once(engine, axis_type):
    traces = []

    def counted(params, batch):
        traces.append(1)
        return loss_fn(params, batch)

    plan = EpochPlan(47, num_replicas=4, batch_size=4)
    mesh = mesh_of(axis_type)
    step = make_train_step(counted, mesh, engine=engine)
    state, per_step = new_state(optax.adam(0.1)), []
    for epoch in range(2):
        for batch in batches(plan, epoch, fetch, mesh):
            state, _ = step(state, batch)
            per_step.append(len(traces))
    assert per_step == [per_step[0]] * len(per_step)


def test_terms_have_their_own_denominators():
    def terms(params, batch):
        x, y = batch.data
        losses = (x @ params["w"] + params["b"] - y) ** 2
        tokens = weighted_sum(losses, batch.weights)
        return {
            "square": tokens,
            "heavy": weighted_sum(losses, batch.weights * 3.0),
            "norm": tokens.once(jnp.sum(params["w"] ** 2)),
        }

    coefficients = {"square": 1.0, "heavy": 2.0, "norm": 0.5}
    weights = np.array([1, 1, 1, 0, 1, 0, 0, 0], np.int32)
    state = new_state(optax.sgd(0.1)).replace(params={"w": jnp.ones(3), "b": jnp.zeros(())})
    step = make_train_step(terms, data_mesh(4), coefficients=coefficients, microbatches=2)
    _, report = step(state, Batch.of(fetch(np.arange(8)), weights=weights))
    square = np.mean((X[:8] @ np.ones(3, np.float32) - Y[:8])[weights > 0] ** 2)
    assert report.means["square"] == pytest.approx(square, rel=1e-5)
    assert report.means["heavy"] == pytest.approx(square, rel=1e-5)
    assert report.means["norm"] == pytest.approx(3.0)
    assert report.loss.value == pytest.approx(3 * square + 1.5, rel=1e-5)


def test_each_rank_and_microbatch_has_its_own_rng():
    def noisy(params, batch, rng):
        drawn = jax.random.normal(rng, ())
        return weighted_sum(params["b"] + jnp.full(batch.weights.shape, drawn), batch.weights)

    step = make_train_step(noisy, data_mesh(4), microbatches=2)
    batch = Batch.of(fetch(np.arange(8)))
    values = []
    for rng in (jax.random.key(0), jax.random.key(0), jax.random.key(1)):
        _, report = step(new_state(optax.sgd(0.1)), batch, rng)
        values.append(float(report.loss.value))
    keys = [
        jax.random.fold_in(jax.random.fold_in(jax.random.key(0), rank), k)
        for rank in range(4)
        for k in range(2)
    ]
    mean = np.mean([float(jax.random.normal(key, ())) for key in keys])
    assert values[0] == values[1] == pytest.approx(mean, rel=1e-5)
    assert values[2] != values[0]


def test_the_users_own_parameters_survive_the_donation():
    state = new_state(optax.sgd(0.1))
    params = state.params
    step = make_train_step(loss_fn, data_mesh(1))
    step(state, Batch.of(fetch(np.arange(8))))
    np.testing.assert_array_equal(params["w"], np.zeros(3))


def test_bad_calls_are_refused():
    with pytest.raises(ValueError, match="engine must be one of shard_map, jit, pmap, got 'ddp'"):
        make_train_step(loss_fn, data_mesh(2), engine="ddp")
    with pytest.raises(ValueError, match="mesh must have the axis 'batch'"):
        make_train_step(loss_fn, data_mesh(2), axis_name="batch")
    step = make_train_step(loss_fn, data_mesh(2))
    with pytest.raises(TypeError, match="batch must be a Batch, got dict"):
        step(new_state(optax.sgd(0.1)), {"x": X})
    with pytest.raises(ValueError, match="rows that divide by 2 ranks, got 5"):
        step(new_state(optax.sgd(0.1)), Batch.of(fetch(np.arange(5))))
