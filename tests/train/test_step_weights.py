"""Weights as training steps meet them: too many for 32 bits, and bad ones."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fitting import new_state
from flax import nnx

from jax_ddp_weighting import (
    Batch,
    WeightedSum,
    data_mesh,
    make_nnx_train_step,
    make_train_step,
    weighted_multi_steps,
    weighted_sum,
)

PIXELS = 2**27  # of one row


@pytest.mark.parametrize("engine", ["shard_map", "jit", "pmap"])
def test_a_training_step_counts_rows_that_weigh_a_lot(engine):
    def loss_fn(params, batch):
        return weighted_sum(params["b"] * batch.data, batch.weights)

    batch = Batch.of(np.ones(24, np.float32), weights=np.full(24, PIXELS, np.int32))
    step = make_train_step(loss_fn, data_mesh(4), microbatches=6, engine=engine)
    state = new_state(optax.sgd(1.0))
    start = float(state.params["b"])
    state, report = step(state, batch)
    assert not report.skipped
    assert int(report.weight) == 2**31 - 1
    assert float(report.loss.terms["loss"].whole().weight) == 24 * PIXELS
    assert float(state.params["b"]) == start - 1


def test_a_window_weighs_what_its_steps_weigh():
    # the second microbatch of the window weighs three times the first, both beyond int32
    def loss_fn(params, batch):
        return weighted_sum(params["b"] * batch.data, batch.weights)

    tx = weighted_multi_steps(optax.sgd(1.0), 2)
    step = make_train_step(loss_fn, data_mesh(4), microbatches=2)
    state = new_state(tx)
    start = float(state.params["b"])
    for value, weight in ((1.0, 2**29), (5.0, 3 * 2**29)):
        rows, weights = np.full(8, value, np.float32), np.full(8, weight, np.int32)
        state, _ = step(state, Batch.of(rows, weights=weights))
    assert float(state.params["b"]) == pytest.approx(start - (1 + 3 * 5) / 4)


def mean_loss(params, batch):
    return weighted_sum(params["b"] * batch.data, batch.weights)


def run_once(weights, tx=None, loss_fn=mean_loss, ranks=4, microbatches=2, engine="shard_map"):
    step = make_train_step(loss_fn, data_mesh(ranks), microbatches=microbatches, engine=engine)
    before = new_state(tx or optax.adamw(0.1))
    batch = Batch(np.ones(8, np.float32), np.arange(8), np.asarray(weights))
    state, report = step(before, batch)
    return jax.device_get(new_state(tx or optax.adamw(0.1))), jax.device_get(state), report


@pytest.mark.parametrize("engine", ["shard_map", "jit", "pmap"])
@pytest.mark.parametrize(
    ("weights", "bad"),
    [
        (np.float32([1, -1, 1, 1, 1, 1, 1, 1]), 1),
        (np.float32([np.nan, 1, 1, 1, 1, np.inf, 1, -2]), 3),
        (np.int32([1, 1, 1, 1, 1, 1, 1, -9]), 1),
    ],
)
def test_a_step_of_bad_weights_changes_nothing_and_says_how_many(engine, weights, bad):
    before, after, report = run_once(weights, engine=engine)
    assert (int(report.bad_weights), bool(report.skipped), float(report.weight)) == (bad, True, 0)
    jax.tree.map(np.testing.assert_array_equal, after.params, before.params)
    jax.tree.map(np.testing.assert_array_equal, after.opt_state, before.opt_state)
    assert int(after.step) == 0


def test_a_step_of_good_weights_does_change_it():
    before, after, report = run_once(np.ones(8, np.float32))
    assert (int(report.bad_weights), bool(report.skipped)) == (0, False)
    assert float(after.params["b"]) != float(before.params["b"])


@pytest.mark.parametrize("bad", [-3.0, np.nan])
def test_a_window_goes_on_without_a_microbatch_of_bad_weights(bad):
    def loss_fn(params, batch):  # by hand: the bad weight is in the total too
        weights = batch.weights
        return WeightedSum(jnp.sum(params["b"] * batch.data * weights), jnp.sum(weights))

    tx = weighted_multi_steps(optax.sgd(1.0), 3)
    step = make_train_step(loss_fn, data_mesh(2))
    state = new_state(tx)
    start = float(state.params["b"])
    reports = []
    for value, weight in ((1.0, 1.0), (100.0, bad), (4.0, 2.0)):
        weights = np.float32([weight, 1])
        batch = Batch(np.full(2, value, np.float32), np.arange(2), weights)
        state, report = step(state, batch)
        reports.append(int(report.bad_weights))
    assert reports == [0, 1, 0]
    assert float(state.params["b"]) == pytest.approx(start - (2 * 1 + 3 * 4) / 5)


@pytest.mark.parametrize("engine", ["shard_map", "jit", "pmap"])
@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 1), (2, 2), (4, 1), (4, 2)])
def test_what_is_no_row_reaches_every_rank_and_microbatch_whole(engine, ranks, microbatches):
    def loss_fn(params, batch, *, replicated):
        return weighted_sum(params["b"] * batch.data, replicated["classes"][batch.ids % 3])

    classes = np.float32([1, 2, 5])
    step = make_train_step(loss_fn, data_mesh(ranks), microbatches=microbatches, engine=engine)
    state, values = new_state(optax.sgd(1.0)), np.arange(8, dtype=np.float32)
    start = float(state.params["b"])
    for _ in range(2):  # a second one compiles nothing and gives away nothing
        state, _ = step(state, Batch.of(values), replicated={"classes": classes})
    right = np.average(values, weights=classes[np.arange(8) % 3])
    assert float(state.params["b"]) == pytest.approx(start - 2 * right, rel=1e-5)


def test_an_nnx_step_takes_a_teacher():
    def loss_fn(model, batch, *, replicated):
        return weighted_sum((model(batch.data)[:, 0] - replicated(batch.data)[:, 0]) ** 2)

    model, teacher = nnx.Linear(2, 1, rngs=nnx.Rngs(0)), nnx.Linear(2, 1, rngs=nnx.Rngs(1))
    optimizer = nnx.Optimizer(model, optax.adamw(0.1), wrt=nnx.Param)
    step = make_nnx_train_step(loss_fn, data_mesh(4), microbatches=2)
    batch = Batch.of(np.random.default_rng(0).normal(size=(8, 2)).astype(np.float32))
    losses = [
        float(step(model, optimizer, batch, replicated=teacher).loss.value) for _ in range(30)
    ]
    assert losses[-1] < 0.1 * losses[0]


def test_leaves_that_are_no_rows_are_refused_before_they_are_split():
    batch = Batch({"x": np.ones(8), "classes": np.ones(4)}, np.arange(8), np.ones(8))
    step = make_train_step(lambda p, b: weighted_sum(p["b"] * b.data["x"]), data_mesh(4))
    message = r"train step: batch must have one leading axis .*batch.data\['x'\].*replicated="
    with pytest.raises(ValueError, match=message):
        step(new_state(optax.sgd(1.0)), batch)


def test_replicated_is_only_for_loss_functions_that_take_it():
    step = make_train_step(mean_loss, data_mesh(2))
    message = r"loss_fn must take \(params, batch, \*, replicated\) when the step is given"
    with pytest.raises(TypeError, match=message):
        step(new_state(optax.sgd(1.0)), Batch.of(np.ones(4)), replicated=np.ones(3))
