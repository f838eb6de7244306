"""A training step for a flax TrainState: one device's run, whatever the engine."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fitting import X, Y, fetch, loss_fn, new_state
from jax.sharding import AxisType

from jax_ddp_weighting import (
    EpochPlan,
    batches,
    make_train_step,
)
from jax_ddp_weighting.train.step_options import STEP_ENGINES


def reference_losses(plan, epochs, tx):
    """The same run on one device, written with plain JAX and without padding rows."""
    state, losses = new_state(tx), []

    @jax.jit
    def take_step(state, x, y):
        def mean(params):
            return jnp.mean((x @ params["w"] + params["b"] - y) ** 2)

        loss, grads = jax.value_and_grad(mean)(state.params)
        return state.apply_gradients(grads=grads), loss

    for epoch in range(epochs):
        for step in range(plan.steps_per_epoch):
            slots = plan.batch(epoch, step)
            ids = slots.ids[slots.weights > 0]
            state, loss = take_step(state, X[ids], Y[ids])
            losses.append(float(loss))
    return losses, state


def mesh_of(axis_type, ranks=4):
    return jax.make_mesh(
        (ranks,), ("data",), axis_types=(axis_type,), devices=jax.devices()[:ranks]
    )


@pytest.mark.parametrize(
    ("axis_type", "microbatches"), [(AxisType.Auto, 1), (AxisType.Explicit, 4)]
)
@pytest.mark.parametrize("engine", STEP_ENGINES)
def test_a_run_with_short_steps_is_one_devices_run_and_compiles_once(
    engine, axis_type, microbatches, caplog
):
    traces = []

    def counted(params, batch):
        traces.append(1)
        return loss_fn(params, batch)

    plan = EpochPlan(47, num_replicas=4, batch_size=4, seed=1)
    tx = optax.adam(0.05)
    mesh = mesh_of(axis_type)
    step = make_train_step(counted, mesh, engine=engine, microbatches=microbatches)
    state, losses, per_step = new_state(tx), [], []
    with jax.log_compiles():
        for epoch in range(2):
            for batch in batches(plan, epoch, fetch, mesh):
                state, report = step(state, batch)
                losses.append(float(report.loss.value))
                per_step.append(len(traces))
                assert not report.skipped
                assert report.weight == np.sum(np.asarray(batch.weights))
    expected, end = reference_losses(plan, 2, tx)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
        state.params,
        end.params,
    )
    assert per_step == [per_step[0]] * len(per_step)
    messages = [record.getMessage() for record in caplog.records]
    assert sum("XLA compilation of jit(step)" in message for message in messages) == 1


def test_the_run_comparison_can_fail():
    # the tail's copies counted, as tail="repeat" does, is another run
    mask = EpochPlan(47, num_replicas=4, batch_size=4, seed=1)
    repeat = EpochPlan(47, num_replicas=4, batch_size=4, seed=1, tail="repeat")
    a, _ = reference_losses(mask, 2, optax.adam(0.05))
    b, _ = reference_losses(repeat, 2, optax.adam(0.05))
    assert np.max(np.abs(np.array(a) / np.array(b) - 1)) > 1e-3
