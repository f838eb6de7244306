"""States that are given away, kept, or shared; steps that are lowered, or under way."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fitting import fetch, loss_fn, new_state, scalar_loss, scalar_state
from flax import nnx
from flax.training.train_state import TrainState

from jax_ddp_weighting import (
    Batch,
    data_mesh,
    make_nnx_train_step,
    make_train_step,
    weighted_sum,
)
from jax_ddp_weighting.distributed import under_way
from jax_ddp_weighting.train.step_options import STEP_ENGINES

BATCH = Batch.of(np.float32([1.0, 3.0, 5.0, 7.0]))


class Keyed(TrainState):
    key: Any


def keyed_state(key):
    return Keyed.create(apply_fn=None, params={"w": jnp.float32(0)}, tx=optax.sgd(0.1), key=key)


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("engine", STEP_ENGINES)
def test_a_state_that_was_given_away_is_refused_in_words(engine, ranks):
    step = make_train_step(scalar_loss, data_mesh(ranks), engine=engine)
    first, _ = step(scalar_state(), BATCH)
    second, _ = step(first, BATCH)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"given away\. Use the state that the step returned"):
            step(first, BATCH)
    with pytest.raises(ValueError, match="given away"):  # another batch, so not looked up
        step(first, Batch.of({"x": np.ones(4, np.float32)}))
    third, _ = step(second, BATCH)
    assert int(third.step) == 3


def test_a_part_that_was_given_away_is_refused_too():
    step = make_train_step(scalar_loss, data_mesh(2))
    first, _ = step(scalar_state(), BATCH)
    second, _ = step(first, BATCH)
    with pytest.raises(ValueError, match="given away"):
        step(second.replace(params=first.params), BATCH)


class Scalar(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.float32(0))


def nnx_loss(model, batch):
    return scalar_loss({"w": model.w[...]}, batch)


def test_an_nnx_model_whose_arrays_were_given_away_is_refused_in_words():
    model = Scalar()
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    step = make_nnx_train_step(nnx_loss, data_mesh(2))
    step(model, optimizer, BATCH)
    kept = nnx.clone(model)
    kept.w.set_value(model.w[...])
    step(model, optimizer, BATCH)
    with pytest.raises(ValueError, match="given away"):
        step(kept, optimizer, BATCH)


@pytest.mark.parametrize("engine", STEP_ENGINES)
def test_a_state_that_is_not_donated_may_come_again(engine):
    step = make_train_step(scalar_loss, data_mesh(2), engine=engine, donate=False)
    first, _ = step(scalar_state(), BATCH)
    ends = [float(step(first, BATCH)[0].params["w"]) for _ in range(3)]
    assert ends == [ends[0]] * 3
    assert float(first.params["w"]) == pytest.approx(0.8)
    donating = make_train_step(scalar_loss, data_mesh(2), engine=engine)
    state, _ = donating(donating(scalar_state(), BATCH)[0], BATCH)
    assert float(state.params["w"]) == ends[0]


def test_an_nnx_model_that_is_not_donated_stays_readable():
    model = Scalar()
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    step = make_nnx_train_step(nnx_loss, data_mesh(2), donate=False)
    step(model, optimizer, BATCH)
    before = model.w[...]
    step(model, optimizer, BATCH)
    assert float(before) == pytest.approx(0.8)
    assert float(model.w[...]) > 1


def noisy(params, batch, rng):
    noise = jax.random.normal(rng, ())
    return weighted_sum((params["w"] + noise - batch.data) ** 2, batch.weights)


def test_a_key_that_the_state_keeps_may_be_the_rng():
    def run(take):
        step = make_train_step(noisy, data_mesh(2))
        state = keyed_state(jax.random.key(3))
        for _ in range(3):
            state, report = step(state, BATCH, take(state.key))
        return float(state.params["w"]), float(report.loss.value)

    def copied(key):
        return jax.random.wrap_key_data(jnp.copy(jax.random.key_data(key)))

    assert run(lambda key: key) == run(copied)


@pytest.mark.parametrize(
    ("kept", "given"),
    [
        (jax.random.key, jax.random.key_data),  # its data share the key's buffer
        (jax.random.PRNGKey, lambda key: key),
        (jax.random.PRNGKey, jax.random.wrap_key_data),
    ],
)
def test_a_key_may_come_in_another_dress(kept, given):
    step = make_train_step(noisy, data_mesh(2))
    state, losses = keyed_state(kept(3)), []
    for _ in range(3):
        state, report = step(state, BATCH, given(state.key))
        losses.append(float(report.loss.value))
    assert not state.key.is_deleted()
    assert losses[0] > losses[-1]


@pytest.mark.parametrize("engine", STEP_ENGINES)
def test_a_value_that_the_state_keeps_may_be_in_the_batch(engine):
    class Teacher(TrainState):
        targets: Any

    state = Teacher.create(
        apply_fn=None,
        params={"w": jnp.float32(0)},
        tx=optax.sgd(0.1),
        targets=jnp.float32([1.0, 3.0, 5.0, 7.0]),
    )
    step = make_train_step(scalar_loss, data_mesh(2), engine=engine)
    for _ in range(3):
        state, _ = step(state, Batch.of(state.targets))
    plain, other = make_train_step(scalar_loss, data_mesh(2), engine=engine), scalar_state()
    for _ in range(3):
        other, _ = plain(other, BATCH)
    assert float(state.params["w"]) == float(other.params["w"])
    np.testing.assert_array_equal(state.targets, BATCH.data)


def test_the_state_of_an_optimizer_may_be_its_argument():
    step = make_train_step(scalar_loss, data_mesh(2))

    def scaled(updates, state, params=None, *, factor, **_):
        return updates, factor

    inner = optax.GradientTransformationExtraArgs(lambda params: jnp.float32(1), scaled)
    state = TrainState.create(
        apply_fn=None, params={"w": jnp.float32(0)}, tx=optax.chain(inner, optax.sgd(0.1))
    )
    for _ in range(3):
        state, _ = step(state, BATCH, factor=state.opt_state[0])
    assert int(state.step) == 3


@pytest.mark.parametrize("engine", STEP_ENGINES)
def test_a_step_can_be_lowered_for_arrays_and_for_shapes(engine):
    step = make_train_step(loss_fn, data_mesh(2), engine=engine)
    state, batch = new_state(optax.adam(0.1)), Batch.of(fetch(np.arange(8)))
    lowered = step.lower(state, batch)
    assert isinstance(lowered, jax.stages.Lowered)
    shapes = jax.eval_shape(lambda: (state, batch))
    assert step.lower(*shapes).as_text() == lowered.as_text()
    state, report = step(state, batch)  # nothing was given away
    assert int(state.step) == 1
    assert int(report.weight) == 8
    assert lowered.compile().cost_analysis()["flops"] > 0
    with pytest.raises(ValueError, match="rows that divide by 2 ranks, got 3"):
        step.lower(state, Batch.of(fetch(np.arange(3))))


def test_an_nnx_step_can_be_lowered():
    model = Scalar()
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    step = make_nnx_train_step(nnx_loss, data_mesh(2))
    assert "all_reduce" in step.lower(model, optimizer, BATCH).as_text()
    assert float(model.w[...]) == 0.0
    step(model, optimizer, BATCH)
    assert float(model.w[...]) == pytest.approx(0.8)


def test_few_steps_are_under_way_on_cpu_devices(monkeypatch):
    waited = []

    class Report:
        def __init__(self, number):
            self.number, self.deleted = number, number == 3

        def is_deleted(self):
            return self.deleted

        def is_ready(self):
            return True

        def block_until_ready(self):
            waited.append(self.number)

    monkeypatch.setattr(under_way, "_under_way", type(under_way._under_way)())
    for number in range(20):
        under_way.hold_back(Report(number))
    assert waited == [0, 1, 2, *range(4, 18)]  # the fourth is nobody's to wait for
    assert under_way.STEPS_UNDER_WAY == 2
    step, state = make_train_step(scalar_loss, data_mesh(2)), scalar_state()
    for _ in range(60):  # left unread, these would starve XLA's threads
        state, _ = step(state, BATCH)
    assert len(under_way._under_way) == 2
    assert int(state.step) == 60
