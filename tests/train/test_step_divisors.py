"""Steps whose terms are divided by something else than their weight: what they skip and report."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

from jax_ddp_weighting import (
    Batch,
    data_mesh,
    make_nnx_train_step,
    make_train_step,
    weighted_multi_steps,
    weighted_sum,
)

ROWS = 12


def loss_fn(params, batch):
    return weighted_sum(params["w"] * batch.data, batch.weights)


def state_of(tx=None):
    tx = optax.sgd(1.0) if tx is None else tx
    return TrainState.create(apply_fn=None, params={"w": jnp.float32(1)}, tx=tx)


def batch_of(weight, value=1.0):
    """Twelve rows of one value, the first of which has all the weight."""
    weights = np.zeros(ROWS, np.float32)
    weights[0] = weight
    return Batch.of(np.full(ROWS, value, np.float32), weights=weights)


def moving_average(weight, *, replicated):
    return 0.9 * replicated["ema"] + 0.1 * weight


EMA_RUNS = [
    ("shard_map", 1, 3),
    ("shard_map", 2, 1),
    ("shard_map", 4, 3),
    ("jit", 2, 2),
    ("pmap", 2, 2),
]


@pytest.mark.parametrize(("engine", "ranks", "microbatches"), EMA_RUNS)
def test_a_moving_average_of_the_weight_divides_by_the_same_everywhere(engine, ranks, microbatches):
    step = make_train_step(
        loss_fn,
        data_mesh(ranks),
        engine=engine,
        microbatches=microbatches,
        divisors={"loss": moving_average},
    )
    state, replicated = state_of(), {"ema": np.float32(2)}
    ema, w = 2.0, 1.0
    for weight, value in [(4, 1.0), (0, 5.0), (6, 3.0)]:
        state, report = step(state, batch_of(weight, value), replicated=replicated)
        replicated = {"ema": report.loss.divisors["loss"]}
        ema = 0.9 * ema + 0.1 * weight
        assert replicated["ema"] == pytest.approx(ema, rel=1e-6)
        assert report.means["loss"] == pytest.approx(w * weight * value / ema, rel=1e-5)
        w -= weight * value / ema
        assert state.params["w"] == pytest.approx(w, rel=1e-5)
        assert not report.skipped
    (jitted,) = step.compiled._jitted.values()
    assert jitted._cache_size() == 1


EMPTY = batch_of(0)
SKIPPED = {  # divisors, skip_empty: whether a step without any weight is skipped
    "by weight": (None, True, True),
    "a constant": ({"loss": 50.0}, True, False),
    "a constant 0": ({"loss": 0}, True, True),
    "a floor": ({"loss": lambda weight: jnp.maximum(weight, 1)}, True, False),
    "a multiple": ({"loss": lambda weight: 2 * weight}, True, True),
    "by weight, never": (None, False, False),
    "a multiple, never": ({"loss": lambda weight: 2 * weight}, False, False),
}


@pytest.mark.parametrize("name", SKIPPED)
def test_a_step_is_skipped_where_all_that_pulls_is_divided_by_0(name):
    divisors, skip_empty, skipped = SKIPPED[name]
    step = make_train_step(loss_fn, data_mesh(2), divisors=divisors, skip_empty=skip_empty)
    state, _ = step(state_of(optax.adam(0.1)), batch_of(1))
    before = float(state.params["w"])
    state, report = step(state, EMPTY)
    assert (report.skipped, report.stepped) == (skipped, not skipped)
    assert (report.weight, report.loss.value, report.bad_weights) == (0, 0, 0)
    # adam moves on a gradient of 0: that is what a step that is not skipped is for
    first = "a constant 0" not in name
    assert int(state.step) == first + (not skipped)
    assert (float(state.params["w"]) == before) == skipped


@pytest.mark.parametrize("divisors", [None, {"loss": 50.0}, {"loss": lambda weight: -weight}])
def test_a_step_of_bad_weights_applies_nothing_whatever_is_skipped(divisors):
    step = make_train_step(loss_fn, data_mesh(2), divisors=divisors, skip_empty=False)
    bad = 1.0 if divisors and callable(divisors["loss"]) else np.nan
    batch = Batch(jnp.ones(ROWS), jnp.arange(ROWS), jnp.full(ROWS, bad))
    state, report = step(state_of(optax.adam(0.1)), batch)
    assert report.skipped
    assert not report.stepped
    assert report.bad_weights > 0
    assert (int(state.step), float(state.params["w"])) == (0, 1.0)


def test_of_several_terms_one_with_a_divisor_above_0_is_enough():
    def terms(params, batch):
        return {"a": loss_fn(params, batch), "b": loss_fn(params, batch)}

    def skips(divisors):
        options = {"coefficients": {"a": 1.0, "b": 0.0}, "divisors": divisors}
        _, report = make_train_step(terms, data_mesh(1), **options)(state_of(), EMPTY)
        return bool(report.skipped)

    assert not skips({"a": 50.0})
    assert skips({"b": 50.0})  # a metric pulls on nothing


class Model(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.float32(1))
        self.calls = nnx.BatchStat(jnp.float32(0))


def nnx_loss(model, batch):
    model.calls[...] += 1.0
    return weighted_sum(model.w[...] * batch.data, batch.weights)


def nnx_step(**options):
    model = Model()
    optimizer = nnx.Optimizer(model, optax.sgd(1.0), wrt=nnx.Param)
    step = make_nnx_train_step(nnx_loss, data_mesh(2), **options)
    return model, lambda batch, **given: step(model, optimizer, batch, **given)


def test_nnx_steps_take_divisors_too():
    model, step = nnx_step(divisors={"loss": moving_average}, microbatches=2)
    report = step(batch_of(4), replicated={"ema": np.float32(2)})
    assert float(model.w[...]) == pytest.approx(1 - 4 / 2.2)
    assert report.loss.divisors["loss"] == pytest.approx(2.2)


def test_a_model_moves_on_in_an_empty_step_that_is_not_skipped():
    for options, calls in [({}, 0), ({"skip_empty": False}, 1), ({"divisors": {"loss": 9}}, 1)]:
        model, step = nnx_step(**options)
        step(EMPTY)
        assert (float(model.calls[...]), float(model.w[...])) == (calls, 1)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"divisors": {"box": 1}}, ValueError, "divisors must each be for a term .* for 'box'"),
        ({"divisors": {"loss": -1}}, ValueError, "must be finite and at least 0, got -1"),
        ({"divisors": [1]}, TypeError, "divisors must be a dict .* got list"),
        ({"skip_empty": None}, TypeError, "skip_empty must be True or False, got None"),
    ],
)
def test_bad_options_are_refused_at_once(options, error, message):
    for make in (make_train_step, make_nnx_train_step):
        with pytest.raises(error, match=f"{make.__name__}: .*{message}"):
            make(loss_fn, data_mesh(1), **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"divisors": {"loss": 50.0}}, "divisors must be left out under weighted_multi_steps, got"),
        ({"skip_empty": False}, "skip_empty must be True under weighted_multi_steps, got False"),
    ],
)
def test_windows_which_are_divided_by_weights_take_none(options, message):
    step = make_train_step(loss_fn, data_mesh(1), **options)
    with pytest.raises(ValueError, match=f"train step: {message}"):
        step(state_of(weighted_multi_steps(optax.sgd(1.0), 2)), batch_of(1))


def test_optimizers_that_evaluate_the_loss_elsewhere_are_given_the_divided_one():
    seen = []

    def update(updates, state, params, *, value, value_fn, **_):
        seen.append(None)
        return jax.tree.map(lambda g: value_fn(params) - value + 0 * g, updates), state

    tx = optax.GradientTransformationExtraArgs(lambda params: (), update)
    step = make_train_step(loss_fn, data_mesh(2), divisors={"loss": 50.0})
    state, report = step(state_of(tx), batch_of(5))
    assert report.loss.value == pytest.approx(0.1)
    assert (float(state.params["w"]), len(seen)) == (1.0, 1)
