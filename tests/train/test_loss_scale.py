"""Float16 with a flax `DynamicScale` in the state: gradients that would vanish, and overflows."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.dynamic_scale import DynamicScale
from flax.training.train_state import TrainState

from jax_ddp_weighting import (
    Batch,
    data_mesh,
    make_train_step,
    value_and_grad,
    weighted_multi_steps,
    weighted_sum,
)

X = np.float32([[1, 2], [3, 1], [2, 2], [1, 0], [0.5, 1], [2, 3], [1, 1], [0, 2]])
WEIGHTS = np.float32([1, 1, 0, 1, 2, 0, 0, 1])  # ranks of unequal weight
TINY, LARGE = 1e-8, 1e3  # of which one vanishes in float16, and one overflows when it is scaled
MEAN = np.average(X, axis=0, weights=WEIGHTS)


class State(TrainState):
    dynamic_scale: Any = None
    stats: Any = None


def batch_of(gain, weights=WEIGHTS):
    return Batch.of({"x": X, "gain": np.full(8, gain, np.float32)}, weights=weights)


EMPTY = batch_of(TINY, np.zeros(8, np.float32))


def loss_fn(params, batch):
    """The gradient of each row is its gain times x, and goes through float16 on its way."""
    x, w = batch.data["x"].astype(jnp.float16), params["w"].astype(jnp.float16)
    out = jnp.sum(x * w[None], axis=1)
    return weighted_sum(out.astype(jnp.float32) * batch.data["gain"], batch.weights)


def state_of(scale=None, tx=None, dtype=jnp.float32, **more):
    params = {"w": jnp.zeros(2, dtype)}
    tx = optax.sgd(1e8) if tx is None else tx
    return State.create(apply_fn=None, params=params, tx=tx, dynamic_scale=scale, **more)


RUNS = [("shard_map", 1, 1), ("shard_map", 2, 2), ("jit", 2, 1), ("pmap", 2, 1), ("jit", 1, 2)]


@pytest.mark.parametrize(("engine", "ranks", "microbatches"), RUNS)
def test_scales_and_parameters_are_those_of_flax_on_one_device(engine, ranks, microbatches):
    step = make_train_step(
        loss_fn, data_mesh(ranks), engine=engine, microbatches=microbatches, grad_norm=True
    )
    flax_scale = DynamicScale(growth_interval=2)
    state, w = state_of(flax_scale), jnp.zeros(2)

    @jax.jit
    def flax_step(scale, w, gain):
        def mean(w):
            sums = loss_fn({"w": w}, batch_of(1.0))
            return sums.total * gain / sums.weight

        scale, finite, _, gradient = scale.value_and_grad(mean)(w)
        return scale, finite, jnp.where(finite, w - 1e8 * gradient, w), gradient

    for gain in (TINY, TINY, TINY, LARGE, TINY, LARGE, LARGE, TINY):
        before = int(state.step)
        state, report = step(state, batch_of(gain))
        flax_scale, finite, w, gradient = flax_step(flax_scale, w, gain)
        assert float(state.dynamic_scale.scale) == float(flax_scale.scale)
        assert int(state.dynamic_scale.fin_steps) == int(flax_scale.fin_steps)
        np.testing.assert_allclose(state.params["w"], w, rtol=2e-3)  # the precision of float16
        assert (bool(report.finite), bool(report.stepped)) == (bool(finite),) * 2
        assert not report.skipped
        assert int(state.step) == before + bool(finite)
        if finite:
            assert report.grad_norm == pytest.approx(np.linalg.norm(gradient), rel=2e-3)
            np.testing.assert_allclose(gradient, gain * MEAN, rtol=2e-3)
    (jitted,) = step.compiled._jitted.values()
    assert jitted._cache_size() == 1


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16])
def test_without_a_scale_the_same_gradient_vanishes(dtype):
    tx = optax.sgd(1e4)
    step = make_train_step(loss_fn, data_mesh(2), microbatches=2, grad_norm=True)
    state, report = step(state_of(None, tx, dtype), batch_of(TINY))
    assert (float(report.grad_norm), report.finite) == (0, None)
    assert not np.any(state.params["w"])
    # parameters in float16 are stepped by gradients in float32, which hold what float16 does not
    state, report = step(state_of(DynamicScale(), tx, dtype), batch_of(TINY))
    np.testing.assert_allclose(state.params["w"], -1e4 * TINY * MEAN, rtol=4e-3)
    assert report.grad_norm == pytest.approx(TINY * np.linalg.norm(MEAN), rel=2e-3)
    assert report.grad_norm.dtype == jnp.float32
    assert state.params["w"].dtype == dtype
    assert report.loss.value == 0  # that of the first parameters, not scaled


def with_stats(variables, batch):
    return loss_fn(variables["params"], batch), {"stats": variables["stats"] + 1}


def test_an_overflow_leaves_everything_as_it_was_and_an_empty_step_the_scale_too():
    step = make_train_step(with_stats, data_mesh(2), mutable="stats")
    state = state_of(DynamicScale(growth_interval=2), optax.adam(0.1), stats=jnp.float32(0))
    state, _ = step(state, batch_of(TINY))

    def parts(state):
        kept = state.params, state.opt_state, state.step, state.stats
        return [np.asarray(leaf) for leaf in jax.tree.leaves(kept)]

    def counters(state):
        return float(state.dynamic_scale.scale), int(state.dynamic_scale.fin_steps)

    assert counters(state) == (65536, 1)
    before = parts(state)
    state, report = step(state, EMPTY)
    assert counters(state) == (65536, 1)
    assert (report.skipped, report.stepped, report.finite) == (True, False, True)
    jax.tree.map(np.testing.assert_array_equal, parts(state), before)
    state, report = step(state, batch_of(LARGE))
    assert counters(state) == (32768, 0)
    assert (report.skipped, report.stepped, report.finite) == (False, False, False)
    jax.tree.map(np.testing.assert_array_equal, parts(state), before)
    state, report = step(state, batch_of(TINY))
    assert (counters(state), int(state.step), float(state.stats)) == ((32768, 1), 2, 2)


def test_a_step_of_bad_weights_says_nothing_about_the_scale():
    step = make_train_step(loss_fn, data_mesh(2))
    bad = Batch.of({"x": X, "gain": np.full(8, TINY, np.float32)})
    weights = jnp.asarray(WEIGHTS).at[0].set(jnp.nan)
    state, report = step(state_of(DynamicScale()), Batch(bad.data, bad.ids, weights))
    assert (report.skipped, report.finite, report.bad_weights) == (True, True, 1)
    scale = state.dynamic_scale
    assert (float(scale.scale), int(scale.fin_steps), int(state.step)) == (65536, 0, 0)


def test_a_window_leaves_an_overflow_out_and_is_closed_without_it_where_it_must():
    step = make_train_step(loss_fn, data_mesh(2))
    state = state_of(DynamicScale(), weighted_multi_steps(optax.sgd(1e8), 2))

    def take(gain, weights=WEIGHTS, *, flush=False):
        nonlocal state
        state, report = step(state, batch_of(gain, weights), flush=np.bool_(flush))
        return int(state.opt_state.mini_step), bool(report.stepped), bool(report.finite)

    assert take(TINY) == (1, False, True)
    assert take(LARGE) == (1, False, False)  # has no place in the window
    assert float(state.opt_state.weight) == WEIGHTS.sum()
    assert take(TINY, 3 * WEIGHTS) == (0, True, True)
    np.testing.assert_allclose(state.params["w"], -MEAN, rtol=2e-3)
    assert take(TINY) == (1, False, True)
    assert take(LARGE, flush=True) == (0, True, False)
    np.testing.assert_allclose(state.params["w"], -2 * MEAN, rtol=2e-3)
    assert take(TINY, 0 * WEIGHTS) == (1, False, True)  # an empty batch has its place, as ever


def test_a_window_that_an_overflow_closes_keeps_its_collections():
    step = make_train_step(with_stats, data_mesh(1), mutable="stats")
    tx = weighted_multi_steps(optax.sgd(1.0), 2)
    state = state_of(DynamicScale(), tx, stats=jnp.float32(0))
    for gain, stats in [(TINY, 1), (LARGE, 1), (TINY, 2)]:
        state, _ = step(state, batch_of(gain), flush=np.bool_(True))
        assert float(state.stats) == stats


def test_an_overflow_of_all_rows_is_none_of_a_microbatch():
    """Each microbatch's gradient fits into float16, and their sum only into float32."""
    params = {"w": jnp.zeros(2, jnp.float16)}
    state = State.create(
        apply_fn=None, params=params, tx=optax.sgd(1.0), dynamic_scale=DynamicScale(scale=2.0**16)
    )
    step = make_train_step(loss_fn, data_mesh(1), microbatches=4)
    state, report = step(state, batch_of(0.8, np.ones(8, np.float32)))
    assert report.finite
    np.testing.assert_allclose(state.params["w"], -0.8 * X.mean(axis=0), rtol=4e-3)


def test_a_line_search_sees_the_unscaled_loss_and_gradient():
    def update(updates, state, params, *, value, grad, value_fn, grad_fn, **_):
        found, again = jax.value_and_grad(value_fn)(params)
        assert again["w"].dtype == params["w"].dtype
        there = grad_fn(params, None)
        return {"w": there["w"] + grad["w"] + (found - value)}, state

    tx = optax.GradientTransformationExtraArgs(lambda params: (), update)
    step = make_train_step(loss_fn, data_mesh(2))
    state, _ = step(state_of(DynamicScale(), tx, jnp.float16), batch_of(1e-4))
    np.testing.assert_allclose(state.params["w"], 2e-4 * MEAN, rtol=4e-3)


def test_by_hand_a_traced_coefficient_scales_and_gradients_are_divided_in_float32():
    params = {"w": jnp.zeros(2, jnp.float16)}

    @jax.jit
    def step(scale):
        loss, gradients = value_and_grad(loss_fn, coefficients={"loss": scale}, microbatches=2)(
            params, batch_of(TINY)
        )
        return loss, jax.tree.map(lambda g: g.astype(jnp.float32) / scale, gradients)

    loss, gradients = step(65536.0)
    np.testing.assert_allclose(gradients["w"], TINY * MEAN, rtol=2e-3)
    assert float(loss.means["loss"]) == 0
    assert not np.any(step(1.0)[1]["w"])


def test_a_gradient_in_float32_that_widens_an_optimizers_state_is_refused_in_words():
    step = make_train_step(loss_fn, data_mesh(1))
    state = state_of(DynamicScale(), optax.adam(0.1), jnp.float16)
    with pytest.raises(
        TypeError, match=r"keep its state in float32 .* got float16 at opt_state.*mu"
    ):
        step(state, batch_of(TINY))
    wide = state.tx.init({"w": jnp.zeros(2)})
    state, report = step(state.replace(opt_state=wide), batch_of(TINY))
    assert report.stepped
    assert np.all(np.asarray(state.params["w"]) < 0)


def test_one_scale_of_float32_is_taken_in_a_field_of_the_state():
    step = make_train_step(loss_fn, data_mesh(1))
    two = state_of(DynamicScale(), stats=DynamicScale())
    for state in (two, state_of(stats=[DynamicScale()])):
        with pytest.raises(ValueError, match=r"state must hold one DynamicScale, in a field"):
            step(state, batch_of(TINY))
    for scale in (1024, np.float16(1024)):
        with pytest.raises(TypeError, match=r"state.dynamic_scale must hold its scale in float32"):
            step(state_of(DynamicScale(scale=scale)), batch_of(TINY))
    state, _ = step(state_of(stats=DynamicScale()), batch_of(TINY))  # whatever the field's name
    assert int(state.stats.fin_steps) == 1


def test_a_scale_costs_no_reduction_and_a_step_without_one_asks_for_nothing():
    step = make_train_step(loss_fn, data_mesh(2), microbatches=2)
    texts = [
        step.lower(state_of(scale), batch_of(TINY)).compile().as_text()
        for scale in (None, DynamicScale())
    ]
    assert ["is-finite" in text for text in texts] == [False, True]
    shapes = jax.eval_shape(lambda: state_of(DynamicScale()))
    assert "is_finite" in step.lower(shapes, batch_of(TINY)).as_text()
    counts = [text.count(" all-reduce(") + text.count(" all-reduce-start(") for text in texts]
    assert counts[0] == counts[1] > 0
