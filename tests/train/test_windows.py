"""Steps of an optimizer that accumulates over calls."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

from jax_ddp_weighting import (
    Batch,
    data_mesh,
    make_train_step,
    weighted_multi_steps,
    weighted_sum,
)
from jax_ddp_weighting.train.step_options import STEP_ENGINES


def mean_loss(params, batch):
    return weighted_sum(params["w"] * batch.data, batch.weights)


@pytest.mark.parametrize("engine", STEP_ENGINES)
def test_windows_of_steps_count_each_step_as_its_weight(engine):
    tx = weighted_multi_steps(optax.adam(0.1), 2)
    step = make_train_step(mean_loss, data_mesh(2), engine=engine)
    state = TrainState.create(apply_fn=None, params={"w": jnp.float32(0)}, tx=tx)

    def batch(value, rows):
        return Batch.of(np.full(4, value, np.float32), weights=(np.arange(4) < rows).astype("i4"))

    moments = []
    # a mean of one row and a mean of three; a window cut short by a step without any weight
    for value, rows, flush in [(1, 1, False), (3, 3, False), (5, 2, False), (0, 0, True)]:
        state, report = step(state, batch(value, rows), flush=flush)
        moments.append(float(state.opt_state.inner_opt_state[0].mu["w"]))
    second = 0.1 * 2.5
    assert moments == pytest.approx([0, second, second, 0.9 * second + 0.1 * 5], rel=1e-5)
    assert report.skipped
    assert int(state.opt_state.gradient_step) == 2


def test_windows_of_several_terms_are_refused():
    def terms(params, batch):
        return {"a": mean_loss(params, batch), "b": mean_loss(params, batch)}

    step = make_train_step(terms, data_mesh(1), coefficients={"a": 1.0, "b": 1.0})
    state = TrainState.create(
        apply_fn=None,
        params={"w": jnp.float32(0)},
        tx=weighted_multi_steps(optax.sgd(1.0), 2),
    )
    with pytest.raises(ValueError, match=r"one term under weighted_multi_steps, got terms \['a'"):
        step(state, Batch.of(np.ones(4, np.float32)))
