"""What a step counts does not depend on how its rows are split; each term has its own divisor."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fitting import X, Y, fetch, loss_fn, new_state, scalar_loss, scalar_state

from jax_ddp_weighting import (
    Batch,
    data_mesh,
    make_train_step,
    weighted_sum,
)
from jax_ddp_weighting.train.step_options import STEP_ENGINES


@pytest.mark.parametrize("engine", STEP_ENGINES)
def test_loss_and_step_do_not_depend_on_the_number_of_microbatches(engine):
    # transformers 45305, axolotl 2262: both grew with the number of microbatches
    batch = Batch.of(fetch(np.arange(16)), weights=np.arange(16) % 3)
    found = []
    for microbatches in (1, 2, 4):
        step = make_train_step(loss_fn, data_mesh(2), engine=engine, microbatches=microbatches)
        state, report = step(new_state(optax.sgd(1.0)), batch)
        found.append((np.asarray(report.loss.value), np.asarray(state.params["w"])))
    for value, w in found[1:]:
        np.testing.assert_allclose(value, found[0][0], rtol=1e-6)
        np.testing.assert_allclose(w, found[0][1], rtol=1e-5)


def test_summing_the_microbatches_means_grows_with_their_number():
    losses, weights = Y[:16] ** 2, np.arange(16) % 3
    summed = [
        sum(np.average(losses[k::n], weights=weights[k::n]) for k in range(n)) for n in (1, 2, 4)
    ]
    assert summed[1] / summed[0] > 1.5
    assert summed[2] / summed[0] > 3


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


def test_a_term_may_have_any_name():
    def loss_fn(params, batch):
        return {"accepted rows": scalar_loss(params, batch)}

    step = make_train_step(loss_fn, data_mesh(1), coefficients={"accepted rows": 1.0})
    state, report = step(scalar_state(), Batch.of(np.ones(3, np.float32)))
    assert list(report.means) == ["accepted rows"]
    np.testing.assert_allclose(float(state.params["w"]), 0.2)


@pytest.mark.parametrize(("dtype", "rows"), [(jnp.bfloat16, 1028), (jnp.float16, 70000)])
def test_accepted_weight_is_counted_in_float32_at_least(dtype, rows):
    batch = Batch.of(np.zeros(rows, np.float32), weights=jnp.ones(rows, dtype))
    _, report = make_train_step(scalar_loss, data_mesh(1))(scalar_state(), batch)
    assert float(report.weight) == rows
