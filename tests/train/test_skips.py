"""A step in which nothing has weight changes nothing; a rank without rows has no say."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fitting import X, Y, fetch, loss_fn, new_state

from jax_ddp_weighting import (
    Batch,
    data_mesh,
    make_train_step,
    weighted_sum,
)
from jax_ddp_weighting.train.step_options import STEP_ENGINES


def token_loss(params, batch):
    """A regulariser and an accuracy beside the loss of whichever rows have a label."""
    x, y = batch.data
    labelled = batch.weights * (y > -100)  # where the label is ignored a row has no weight
    losses = weighted_sum((x @ params["w"] + params["b"] - y) ** 2, labelled)
    return {
        "loss": losses,
        "norm": losses.once(jnp.sum(params["w"] ** 2) + 1.0),
        "rows": weighted_sum(y > 0, batch.weights),
    }


TOKEN_COEFFICIENTS = {"loss": 1.0, "norm": 0.5, "rows": 0.0}


@pytest.mark.parametrize("engine", STEP_ENGINES)
def test_a_step_without_weight_changes_nothing(engine):
    # Relax 285: the optimizer moved in a step without valid tokens
    mesh = data_mesh(4)
    step = make_train_step(token_loss, mesh, engine=engine, coefficients=TOKEN_COEFFICIENTS)
    rows = fetch(np.arange(8))
    state, report = step(
        new_state(optax.adamw(optax.linear_schedule(0.1, 0.0, 10))), Batch.of(rows)
    )
    assert not report.skipped
    before = jax.device_get(state)
    ignored = X[:8], np.full(8, -100, np.float32)
    for batch in (Batch.of(rows, weights=np.zeros(8, np.int32)), Batch.of(ignored)):
        state, report = step(state, batch)
        assert report.skipped
        assert report.loss.value == 0.0
        assert report.weight == np.sum(batch.weights)
        assert report.means["norm"] == 0.0
        jax.tree.map(np.testing.assert_array_equal, before, jax.device_get(state))
    assert int(state.step) == 1
    assert report.means["rows"] == 0.0


def test_adamw_would_have_moved_on_the_zero_gradient_of_such_a_step():
    state = new_state(optax.adamw(0.1))
    state = state.apply_gradients(grads={"w": jnp.ones(3), "b": jnp.ones(())})
    moved = state.apply_gradients(grads={"w": jnp.zeros(3), "b": jnp.zeros(())})
    assert np.all(np.abs(np.asarray(moved.params["w"] - state.params["w"])) > 1e-2)


@pytest.mark.parametrize("engine", STEP_ENGINES)
def test_a_rank_without_rows_leaves_the_others_mean(engine):
    # Megatron 1764, Automodel 3796: NaN from the rank's own 0 / 0
    weights = np.array([1, 1, 0, 0, 1, 1, 1, 0], np.int32)
    step = make_train_step(loss_fn, data_mesh(4), engine=engine)
    batch = Batch.of(fetch(np.arange(8)), weights=weights)
    state, report = step(new_state(optax.sgd(1.0)), batch)
    kept = weights > 0
    right = np.mean(2 * Y[:8][kept, None] * X[:8][kept], axis=0)
    np.testing.assert_allclose(state.params["w"], right, rtol=1e-5)
    assert report.loss.value == pytest.approx(np.mean(Y[:8][kept] ** 2), rel=1e-5)
    totals = np.where(kept, Y[:8] ** 2, 0).reshape(4, 2).sum(1)
    with np.errstate(invalid="ignore"):  # one vote per rank
        local = totals / weights.reshape(4, 2).sum(1)
    assert np.isnan(np.mean(local))


def test_steps_of_infinite_gradients_are_left_out_by_optax():
    step = make_train_step(loss_fn, data_mesh(2))
    state = new_state(optax.apply_if_finite(optax.sgd(0.1), 3))
    good = Batch.of(fetch(np.arange(4)))
    bad = Batch.of((X[:4] * np.float32(1e30), Y[:4] * np.float32(1e30)))
    state, _ = step(state, good)
    before = jax.device_get(state.params)
    state, report = step(state, bad)
    assert not report.skipped
    jax.tree.map(np.testing.assert_array_equal, before, jax.device_get(state.params))
    assert int(state.opt_state.total_notfinite) == 1
