"""Corners of a step in which one line of it shows: each fails when that line is taken out."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fitting import scalar_state
from flax.training.train_state import TrainState

from jax_ddp_weighting import (
    Batch,
    data_mesh,
    evaluate,
    make_train_step,
    value_and_grad,
    weighted_multi_steps,
    weighted_sum,
)

X = np.array([1.0, 3.0, 5.0, 7.0], np.float32)


def two_terms(params, batch):
    x, mine = batch.data
    losses = (params["w"] - x) ** 2
    return {
        "a": weighted_sum(losses, batch.weights * mine),
        "b": weighted_sum(3 * losses, batch.weights * (1 - mine)),
    }


@pytest.mark.parametrize("engine", ["shard_map", "jit"])
def test_a_step_in_which_one_term_of_two_has_weight_is_taken(engine):
    step = make_train_step(
        two_terms, data_mesh(2), engine=engine, coefficients={"a": 1.0, "b": 1.0}
    )
    batch = Batch.of((X, np.ones(4, np.int32)))  # no row of b
    state, report = step(scalar_state(), batch)
    assert not report.skipped
    assert float(state.params["w"]) == pytest.approx(0.1 * 2 * X.mean())


def weighed_by_tokens(params, batch):
    """A loss that weighs its rows by their own tokens, and forgets the batch's weights."""
    x, tokens = batch.data
    return weighted_sum((params["w"] - x) ** 2, tokens)


def test_a_step_whose_rows_weigh_nothing_is_skipped_whatever_its_terms_weigh():
    step = make_train_step(weighed_by_tokens, data_mesh(2))
    batch = Batch.of((X, np.int32([1, 2, 3, 4])), weights=np.zeros(4, np.int32))
    state, report = step(scalar_state(), batch)
    assert report.skipped
    assert float(state.params["w"]) == 0.0


def test_a_window_weighs_what_its_term_weighs_and_not_its_rows():
    def loss_fn(params, batch):
        x, tokens = batch.data
        return weighted_sum(params["w"] * x, tokens * batch.weights)

    state = TrainState.create(
        apply_fn=None,
        params={"w": jnp.float32(0)},
        tx=weighted_multi_steps(optax.sgd(1.0), 2),
    )
    step = make_train_step(loss_fn, data_mesh(2))
    state, _ = step(state, Batch.of((X[:2], np.int32([1, 1]))))
    state, report = step(state, Batch.of((X[2:], np.int32([3, 5]))))
    assert report.weight == 2  # two rows, eight tokens
    right = (1 * 1 + 3 * 1 + 5 * 3 + 7 * 5) / 10
    assert float(state.params["w"]) == pytest.approx(-right)


def test_a_window_without_weight_leaves_the_optimizer_alone():
    tx = weighted_multi_steps(optax.adam(0.1), 2)
    params = jnp.float32(1.0)
    state = tx.init(params)
    for _ in range(2):
        updates, state = tx.update(jnp.float32(jnp.nan), state, params, weight=0.0)
        assert float(updates) == 0.0
    assert int(state.gradient_step) == 0
    assert int(state.mini_step) == 0
    assert float(state.inner_opt_state[0].mu) == 0.0
    # and a window of which one half is empty has the other's mean
    _, state = tx.update(jnp.float32(4.0), state, params, weight=2.0)
    updates, state = tx.update(jnp.float32(jnp.nan), state, params, weight=0.0)
    assert float(updates) == pytest.approx(-0.1, rel=1e-3)
    assert int(state.gradient_step) == 1


def test_a_window_in_bfloat16_adds_up_in_float32():
    tx = weighted_multi_steps(optax.sgd(1.0), 512)
    params = jnp.bfloat16(1.0)

    def body(state, _):
        updates, state = tx.update(jnp.bfloat16(1.0), state, params, weight=1.0)
        return state, updates

    _, updates = jax.lax.scan(body, tx.init(params), None, 512)
    assert float(updates[-1]) == -1.0


def test_a_step_whose_terms_weigh_nothing_is_skipped_whatever_its_rows_weigh():
    step = make_train_step(weighed_by_tokens, data_mesh(2))
    state, report = step(scalar_state(), Batch.of((X, np.zeros(4, np.int32))))
    assert report.skipped
    assert report.weight == 4
    assert int(state.step) == 0


class Counted(TrainState):
    counts: dict


@pytest.mark.parametrize("in_windows", [False, True])
def test_a_step_without_weight_leaves_what_the_model_keeps(in_windows):
    def loss_fn(variables, batch):
        counts = {"steps": variables["counts"]["steps"] + 1}
        losses = (variables["params"]["w"] - batch.data) ** 2
        return weighted_sum(losses, batch.weights), {"counts": counts}

    state = Counted.create(
        apply_fn=None,
        params={"w": jnp.float32(0)},
        tx=weighted_multi_steps(optax.sgd(0.1), 2) if in_windows else optax.sgd(0.1),
        counts={"steps": jnp.int32(0)},
    )
    step = make_train_step(loss_fn, data_mesh(2), mutable="counts")
    state, _ = step(state, Batch.of(X))
    state, report = step(state, Batch.of(X, weights=np.zeros(4, np.int32)))
    assert report.skipped
    assert int(state.counts["steps"]) == 1


def test_a_batch_without_weights_and_an_axis_that_is_no_name_are_named():
    def loss_fn(params, batch):
        return weighted_sum(params["w"] * batch.data, batch.weights)

    step = make_train_step(loss_fn, data_mesh(1))
    with pytest.raises(TypeError, match="train step: batch must have weights, got None"):
        step(scalar_state(), Batch(X, np.arange(4), None))
    with pytest.raises(TypeError, match=r"make_train_step: axis_name must be the name .* got 0"):
        make_train_step(loss_fn, data_mesh(1), axis_name=0)


WIDE = np.array(2**40)  # which JAX would make 0 while x64 is off, without a word


def test_numbers_beside_the_batch_that_jax_would_cut_are_refused():
    def loss_fn(params, batch, replicated=0.0):
        return weighted_sum(params["w"] * batch.data + replicated, batch.weights)

    with jax.enable_x64(False):
        step, batch = make_train_step(loss_fn, data_mesh(1)), Batch.of(X)
        match = r"train step: replicated\['k'\] must be of at most 32 bits"
        with pytest.raises(ValueError, match=match):
            step(scalar_state(), batch, replicated={"k": WIDE})
        state = scalar_state().replace(step=2**40)
        with pytest.raises(ValueError, match=r"train step: state.*step must be of at most 32 bits"):
            step(state, batch)
        gradient = value_and_grad(lambda w, batch, replicated: loss_fn({"w": w}, batch, replicated))
        with pytest.raises(ValueError, match=r"value_and_grad: replicated must be of at most 32"):
            gradient(1.0, batch, replicated=WIDE)
        with pytest.raises(ValueError, match=r"evaluate: params must be of at most 32 bits"):
            evaluate(lambda k, batch: loss_fn({"w": k}, batch), [batch], data_mesh(1), params=WIDE)
