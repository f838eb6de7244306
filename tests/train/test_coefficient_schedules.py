"""Coefficients that are functions of the step: the same everywhere, compiled once, or refused."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx, struct
from flax.training.dynamic_scale import DynamicScale
from flax.training.train_state import TrainState

from jax_ddp_weighting import (
    Batch,
    check_gradients,
    data_mesh,
    make_nnx_train_step,
    make_train_step,
    value_and_grad,
    weighted_multi_steps,
    weighted_sum,
)

X = np.float32([1, 2, 3, 4, 5, 6, 7, 8])
WEIGHTS = np.float32([1, 1, 0, 1, 2, 0, 0, 1])
BATCH = Batch.of(X, weights=WEIGHTS)
EMPTY = Batch.of(X, weights=np.zeros(8, np.float32))
SLOPES = float(np.average(X, weights=WEIGHTS)), float(np.average(X[::-1], weights=WEIGHTS))
GROWING = optax.linear_schedule(0.0, 2.0, 2)  # 0, 1, 2, 2, ...


def loss_fn(params, batch):
    return {
        "a": weighted_sum(params["w"] * batch.data, batch.weights),
        "b": weighted_sum(params["w"] * (9 - batch.data), batch.weights),
    }


def state_of(tx=None):
    tx = optax.sgd(1.0) if tx is None else tx
    return TrainState.create(apply_fn=None, params={"w": jnp.float32(1)}, tx=tx)


RUNS = [("shard_map", 1, 2), ("shard_map", 2, 1), ("jit", 2, 2), ("pmap", 2, 1)]


@pytest.mark.parametrize(("engine", "ranks", "microbatches"), RUNS)
def test_the_count_is_that_of_steps_taken(engine, ranks, microbatches):
    options = {"engine": engine, "microbatches": microbatches}
    coefficients = {"a": 1.0, "b": GROWING}
    step = make_train_step(loss_fn, data_mesh(ranks), coefficients=coefficients, **options)
    state, w = state_of(), 1.0
    for batch, factor in [(BATCH, 0), (BATCH, 1), (EMPTY, None), (BATCH, 2), (BATCH, 2)]:
        state, report = step(state, batch)
        assert report.skipped == (factor is None)
        if factor is not None:
            slope = SLOPES[0] + factor * SLOPES[1]
            assert report.loss.value == pytest.approx(w * slope, rel=1e-5)
            w -= slope
        assert state.params["w"] == pytest.approx(w, rel=1e-5)
    (jitted,) = step.compiled._jitted.values()
    assert jitted._cache_size() == 1


def test_a_coefficient_fixed_at_the_first_step_fails_that_check():
    coefficients = {"a": 1.0, "b": float(GROWING(0))}
    step = make_train_step(loss_fn, data_mesh(1), coefficients=coefficients)
    state, _ = step(state_of(), BATCH)
    _, report = step(state, BATCH)
    assert report.loss.value != pytest.approx((1 - SLOPES[0]) * sum(SLOPES), rel=1e-2)


class Model(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.float32(1))


def nnx_loss(model, batch):
    return loss_fn({"w": model.w[...]}, batch)


def test_nnx_steps_count_by_their_optimizer():
    model = Model()
    optimizer = nnx.Optimizer(model, optax.sgd(1.0), wrt=nnx.Param)
    step = make_nnx_train_step(nnx_loss, data_mesh(2), coefficients={"a": 1.0, "b": GROWING})
    w = 1.0
    for factor in (0, 1, 2):
        step(model, optimizer, BATCH)
        w -= SLOPES[0] + factor * SLOPES[1]
        assert float(model.w[...]) == pytest.approx(w, rel=1e-5)


def test_in_a_window_the_one_term_may_have_one_and_pulls_where_it_is_0():
    def one_term(params, batch):
        return weighted_sum(params["w"] * batch.data, batch.weights)

    tx = weighted_multi_steps(optax.sgd(1.0), 2)
    step = make_train_step(one_term, data_mesh(2), coefficients={"loss": GROWING})
    state = state_of(tx)
    for stepped in (False, True):  # factors 0 and 1
        state, report = step(state, BATCH)
        assert report.stepped == stepped
    assert state.params["w"] == pytest.approx(1 - SLOPES[0] / 2, rel=1e-5)


@pytest.mark.parametrize(
    ("schedule", "error", "message"),
    [
        (lambda count: "1", TypeError, r"coefficients\['b'\] must return a real number .* got str"),
        (lambda count: jnp.ones(2), ValueError, r"must return one number .* got shape \(2,\)"),
        (lambda count: 1j, TypeError, "must return a real number for a step, got complex"),
    ],
)
def test_what_is_no_number_is_refused_in_words(schedule, error, message):
    step = make_train_step(loss_fn, data_mesh(1), coefficients={"a": 1.0, "b": schedule})
    with pytest.raises(error, match=f"make_train_step: .*{message}"):
        step(state_of(), BATCH)


class Uncounted(struct.PyTreeNode):
    params: Any
    opt_state: Any
    tx: Any = struct.field(pytree_node=False)

    def apply_gradients(self, *, grads):
        updates, opt_state = self.tx.update(grads, self.opt_state, self.params)
        return self.replace(params=optax.apply_updates(self.params, updates), opt_state=opt_state)


def test_a_state_that_does_not_count_takes_numbers_alone():
    tx, params = optax.sgd(1.0), {"w": jnp.float32(1)}
    state = Uncounted(params, tx.init(params), tx)
    step = make_train_step(loss_fn, data_mesh(1), coefficients={"a": 1.0, "b": 0.0})
    assert float(step(state, BATCH)[0].params["w"]) == pytest.approx(1 - SLOPES[0], rel=1e-5)
    step = make_train_step(loss_fn, data_mesh(1), coefficients={"a": 1.0, "b": GROWING})
    with pytest.raises(TypeError, match="must be numbers where the state has no step, got a func"):
        step(state, BATCH)


def test_numbers_of_python_and_integers_are_taken():
    for schedule in (optax.constant_schedule(0.5), lambda count: count + 1):
        step = make_train_step(loss_fn, data_mesh(1), coefficients={"a": 1.0, "b": schedule})
        _, report = step(state_of(), BATCH)
        right = SLOPES[0] + float(schedule(0)) * SLOPES[1]
        assert report.loss.value == pytest.approx(right, rel=1e-5)


def test_where_nobody_counts_steps_a_function_is_refused_and_a_traced_number_taken():
    coefficients = {"a": 1.0, "b": GROWING}
    with pytest.raises(TypeError, match="value_and_grad: coefficients must be numbers, got a func"):
        value_and_grad(loss_fn, coefficients=coefficients)
    with pytest.raises(TypeError, match="check_gradients: coefficients must be numbers, got a fun"):
        check_gradients(loss_fn, {"w": X[0]}, BATCH, [(4, 4)], coefficients=coefficients)

    @jax.jit
    def gradient(count):
        traced = {"a": 1.0, "b": GROWING(count)}
        return value_and_grad(loss_fn, coefficients=traced)({"w": jnp.float32(1)}, BATCH)[1]["w"]

    assert [float(gradient(k)) for k in (0, 1)] == pytest.approx([SLOPES[0], sum(SLOPES)])
    assert gradient._cache_size() == 1


class Scaled(Model):
    def __init__(self, scale):
        super().__init__()
        self.scale = scale


@pytest.mark.parametrize("wrap", [lambda s: s, nnx.data, nnx.Variable])
def test_a_scale_that_an_nnx_step_would_pass_over_is_refused(wrap):
    model = Scaled(wrap(DynamicScale()))
    optimizer = nnx.Optimizer(model, optax.sgd(1.0), wrt=nnx.Param)
    step = make_nnx_train_step(nnx_loss, data_mesh(1), coefficients={"a": 1.0, "b": 1.0})
    with pytest.raises(TypeError, match="must hold no DynamicScale, got one at scale"):
        step(model, optimizer, BATCH)
