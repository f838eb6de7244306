"""What is carried among parameters and is none, and optimizers that want something else."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.training.train_state import TrainState

from jax_ddp_weighting import (
    Batch,
    data_mesh,
    make_nnx_train_step,
    make_optax_step,
    make_train_step,
    value_and_grad,
    weighted_multi_steps,
    weighted_sum,
)

BATCH = Batch.of(np.float32([1, 2, 3, 4]), weights=np.array([1, 1, 1, 0]))
PARAMS = {"w": jnp.float32(0)}


def loss_fn(params, batch):
    return weighted_sum((params["w"] - batch.data) ** 2, batch.weights)


def take_step(params, tx, loss_fn=loss_fn, batch=BATCH, **options):
    state = TrainState.create(apply_fn=None, params=PARAMS, tx=tx)
    state = state.replace(params=params, opt_state=tx.init(params))
    return make_train_step(loss_fn, data_mesh(2), **options)(state, batch)


class Fp8(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(1, dot_general_cls=nn.Fp8DirectDotGeneralOp)(x)[:, 0]


def test_fp8_scales_are_no_gradients_to_add_up():
    rows = np.float32(np.random.default_rng(0).normal(size=(8, 16)))
    batch, variables = Batch.of(rows), jax.jit(Fp8().init)(jax.random.key(0), rows)

    def loss_fn(params, batch):
        return weighted_sum((Fp8().apply(params, batch.data) - 1) ** 2, batch.weights)

    alone = jax.jit(jax.grad(lambda params: loss_fn(params, batch).mean()))(variables)
    carried = jax.tree.leaves(alone["_overwrite_with_gradient"])
    state, _ = take_step(variables, optax.sgd(0.1), loss_fn, batch, engine="jit", donate=False)
    found = jax.tree.leaves(state.params["_overwrite_with_gradient"])
    for one, other in zip(carried, found, strict=True):
        np.testing.assert_array_equal(one, other)
    for options in ({}, {"engine": "jit", "microbatches": 2}, {"engine": "jit", "grad_norm": True}):
        with pytest.raises(ValueError, match=r"no values that are handed on as gradients, .*fp8"):
            take_step(variables, optax.sgd(0.1), loss_fn, batch, **options)
    mapped = jax.vmap(
        value_and_grad(lambda p, x: loss_fn(p, Batch.of(x)), axis_name="data"),
        in_axes=(None, 0),
        axis_name="data",
    )
    with pytest.raises(ValueError, match=r"must hold no values .* got params\['_overwrite_with"):
        mapped(variables, jnp.asarray(rows.reshape(2, 4, 16)))


def test_two_sets_of_parameters_are_refused():
    tx, params = optax.lookahead(optax.sgd(0.1), 2, 0.5), optax.LookaheadParams.init_synced(PARAMS)
    refused = r"params must be one set of parameters, got optax.LookaheadParams"
    with pytest.raises(TypeError, match=refused):
        take_step(params, tx, lambda p, batch: loss_fn(p.fast, batch))
    step = make_optax_step(lambda p, batch: loss_fn(p.fast, batch), tx, data_mesh(2))
    with pytest.raises(TypeError, match=refused):
        step(params, tx.init(params), BATCH)


def test_a_parameter_that_is_no_array_is_named():
    with pytest.raises(TypeError, match=r"params must be arrays, got \w+ at params\['f'\]"):
        take_step(PARAMS | {"f": jnp.tanh}, optax.set_to_zero())
    with pytest.raises(TypeError, match=r"value_and_grad: params must be arrays, got str at .*'f'"):
        value_and_grad(loss_fn)(PARAMS | {"f": "tanh"}, BATCH)


def test_an_optimizer_that_wants_each_examples_gradient_is_refused():
    private = optax.contrib.differentially_private_aggregate(1.0, 0.0, key=jax.random.key(0))
    tx = optax.chain(private, optax.sgd(0.1))
    params = {"w": jnp.zeros(4)}
    step = make_optax_step(lambda p, b: loss_fn({"w": p["w"].sum()}, b), tx, data_mesh(2))
    with pytest.raises(
        TypeError, match=r"must take the gradient of the whole batch, got .*private"
    ):
        step(params, tx.init(params), BATCH)


@pytest.mark.parametrize("factor", [float("nan"), np.float32(np.inf), -float("inf")])
def test_a_coefficient_that_is_not_finite_is_refused(factor):
    with pytest.raises(
        ValueError, match=r"make_train_step: coefficients must be finite, got .*for 'a'"
    ):
        make_train_step(loss_fn, data_mesh(2), coefficients={"a": factor})


def test_an_optimizer_that_names_its_arguments_may_stand_in_a_window():
    def update(updates, state, params=None, *, value):
        return jax.tree.map(lambda g: -value * g, updates), state

    named = optax.GradientTransformationExtraArgs(lambda _: (), update)
    alone, _ = take_step(PARAMS, named)
    in_window, report = take_step(PARAMS, weighted_multi_steps(named, 1))
    assert bool(report.stepped)
    assert float(alone.params["w"]) == float(in_window.params["w"]) != 0


def test_a_loop_that_begins_with_a_constant_is_told_what_takes_it():
    def loss_fn(model, batch):
        return weighted_sum(model(batch.data)[:, -1].sum(-1), batch.weights)

    def step(engine):
        model = nnx.RNN(nnx.SimpleCell(2, 3, rngs=nnx.Rngs(0)))
        optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
        batch = Batch.of(np.ones((4, 3, 2), np.float32))
        return make_nnx_train_step(loss_fn, data_mesh(2), engine=engine)(model, optimizer, batch)

    with pytest.raises(TypeError, match=r'make_nnx_train_step: a loop .* engine="jit" or "pmap"'):
        step("shard_map")
    assert np.isfinite(step("jit").loss.value)


def test_no_step_leaks_a_tracer():
    state = TrainState.create(apply_fn=None, params=PARAMS, tx=optax.sgd(0.5))
    step = make_train_step(loss_fn, data_mesh(2))
    with jax.checking_leaks():
        state, _ = step(state, BATCH)
    assert float(state.params["w"]) == 2.0
