"""Optimizers that look at more than the gradient are shown the whole step's."""

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
from jax_ddp_weighting.train.step_options import STEP_ENGINES

RNG = np.random.default_rng(0)
X = RNG.normal(size=(12, 3)).astype(np.float32)
Y = np.tanh(X @ np.float32([1.0, -2.0, 0.5])) + np.float32(0.3)
WEIGHTS = np.float32([1, 2, 0, 0, 0, 0, 1, 1, 0.5, 1, 1, 3])  # the ranks' weights differ
START = {"w": np.float32([0.1, 0.2, -0.1]), "b": np.float32(0.0)}


def predict(w, b, x):
    return jnp.tanh(x @ w) + b


def loss_fn(params, batch):
    x, y = batch.data
    return weighted_sum((predict(params["w"], params["b"], x) - y) ** 2, batch.weights)


def mean_loss(params, batch):
    return loss_fn(params, batch).mean()


class Model(nnx.Module):
    def __init__(self):
        self.w, self.b = nnx.Param(jnp.asarray(START["w"])), nnx.Param(jnp.asarray(START["b"]))


def batch_of(i):
    return Batch.of((np.roll(X, i, 0), np.roll(Y, i, 0)), np.roll(WEIGHTS, i))


def linen_run(tx, steps, **options):
    step = make_train_step(loss_fn, **options)
    params = jax.tree.map(jnp.asarray, START)
    state = TrainState.create(apply_fn=None, params=params, tx=tx)
    for i in range(steps):
        state, _ = step(state, batch_of(i))
    return jax.device_get(state.params)


def nnx_run(tx, steps, **options):
    def fn(model, batch):
        return loss_fn({"w": model.w[...], "b": model.b[...]}, batch)

    step = make_nnx_train_step(fn, **options)
    model = Model()
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    for i in range(steps):
        step(model, optimizer, batch_of(i))
    return {"w": np.asarray(model.w[...]), "b": np.asarray(model.b[...])}


def one_device_run(tx, steps, sam=None):
    """optax alone, on one device and the whole batch: the oracle."""
    tx = optax.with_extra_args_support(tx)
    params = jax.tree.map(jnp.asarray, START)
    state = tx.init(params)

    @jax.jit
    def step(params, state, batch):
        def value_fn(params, **_):
            return mean_loss(params, batch)

        value, grad = jax.value_and_grad(value_fn)(params)
        extra = {"value": value, "grad": grad, "value_fn": value_fn}
        if sam is not None:  # it refuses what it does not know
            extra = {"grad_fn": lambda params, _: jax.grad(value_fn)(params)} if sam else {}
        updates, state = tx.update(grad, state, params, **extra)
        return optax.apply_updates(params, updates), state

    for i in range(steps):
        params, state = step(params, state, batch_of(i))
    return jax.device_get(params)


LOOKING = {
    "reduce_on_plateau": optax.chain(
        optax.sgd(0.2), optax.contrib.reduce_on_plateau(factor=0.5, patience=1, cooldown=0)
    ),
    "polyak_sgd": optax.polyak_sgd(max_learning_rate=1.0, f_min=0.01),
    "momo": optax.contrib.momo(0.3),
    "backtracking": optax.chain(
        optax.sgd(30.0),  # far too much: it has to search
        optax.scale_by_backtracking_linesearch(max_backtracking_steps=10, store_grad=True),
    ),
    "lbfgs": optax.lbfgs(memory_size=3),
}


@pytest.mark.parametrize(
    ("name", "run"),
    [*((name, linen_run) for name in LOOKING), ("momo", nnx_run), ("backtracking", nnx_run)],
)
def test_value_gradient_and_function_are_the_whole_steps(name, run):
    tx, steps = LOOKING[name], 5
    right = one_device_run(tx, steps)
    found = run(tx, steps, mesh=data_mesh(2), microbatches=3)
    for leaf in right:
        np.testing.assert_allclose(found[leaf], right[leaf], rtol=1e-4, atol=1e-6)
        assert np.max(np.abs(right[leaf] - START[leaf])) > 1e-2


@pytest.mark.parametrize("engine", STEP_ENGINES)
def test_a_line_search_evaluates_the_whole_step_in_every_engine(engine):
    tx = LOOKING["backtracking"]
    right = one_device_run(tx, 3)
    found = linen_run(tx, 3, mesh=data_mesh(4), engine=engine)
    for leaf in right:
        np.testing.assert_allclose(found[leaf], right[leaf], rtol=1e-4, atol=1e-6)


def test_a_line_search_on_one_ranks_rows_would_go_elsewhere():
    tx = LOOKING["backtracking"]
    whole = one_device_run(tx, 3)
    params = jax.tree.map(jnp.asarray, START)
    state = tx.init(params)

    @jax.jit
    def take_step(params, state, batch):
        first = jax.tree.map(lambda leaf: leaf[:6], batch)
        value, grad = jax.value_and_grad(mean_loss)(params, batch)
        extra = {"value": value, "grad": grad, "value_fn": lambda params: mean_loss(params, first)}
        updates, state = tx.update(grad, state, params, **extra)
        return optax.apply_updates(params, updates), state

    for i in range(3):
        params, state = take_step(params, state, batch_of(i))
    assert np.max(np.abs(whole["w"] - params["w"])) > 1e-2


@pytest.mark.parametrize("opaque_mode", [False, True])
@pytest.mark.parametrize("run", [linen_run, nnx_run])
@pytest.mark.parametrize("nested", [False, True])
def test_sharpness_aware_steps(run, opaque_mode, nested):
    adversary = optax.chain(optax.contrib.normalize(), optax.sgd(0.05))
    tx = optax.contrib.sam(optax.sgd(0.1), adversary, sync_period=2, opaque_mode=opaque_mode)
    right = one_device_run(tx, 4, sam=opaque_mode)
    found = run(optax.chain(tx) if nested else tx, 4, mesh=data_mesh(2))
    for leaf in right:
        np.testing.assert_allclose(found[leaf], right[leaf], rtol=1e-4, atol=1e-6)


def test_what_a_step_is_given_comes_before_what_it_offers():
    seen = []

    def look(updates, state, params=None, *, value, own, **_):
        jax.debug.callback(lambda *each: seen.append([float(x) for x in each]), value, own)
        return updates, state

    looking = optax.GradientTransformationExtraArgs(lambda _: (), look)
    step = make_train_step(loss_fn, data_mesh(2))
    params = jax.tree.map(jnp.asarray, START)
    state = TrainState.create(apply_fn=None, params=params, tx=optax.chain(looking, optax.sgd(0.1)))
    step(state, batch_of(0), value=7.0, own=jnp.float32(3))
    jax.effects_barrier()
    assert seen == [[7.0, 3.0]]


def test_an_optimizer_that_names_its_arguments_is_given_no_others():
    def look(updates, state, params=None, *, value):
        return jax.tree.map(lambda g: g * value, updates), state

    looking = optax.GradientTransformationExtraArgs(lambda _: (), look)
    step = make_train_step(loss_fn, data_mesh(2), donate=False)
    params = jax.tree.map(jnp.asarray, START)
    state = TrainState.create(apply_fn=None, params=params, tx=looking)
    after, report = step(state, batch_of(0))
    gradient = jax.grad(mean_loss)(params, batch_of(0))["b"]
    np.testing.assert_allclose(after.params["b"], gradient * report.loss.value, rtol=1e-5)


def test_a_windows_plateau_is_of_the_windows_mean_loss():
    tx = weighted_multi_steps(
        optax.chain(optax.sgd(0.0), optax.contrib.reduce_on_plateau(factor=0.5, patience=9)), 2
    )
    step = make_train_step(loss_fn, data_mesh(2))
    params = jax.tree.map(jnp.asarray, START)
    state = TrainState.create(apply_fn=None, params=params, tx=tx)
    halves = [jax.tree.map(lambda leaf, i=i: leaf[i::2], batch_of(0)) for i in range(2)]
    for half in halves:
        state, _ = step(state, half)
    best = float(state.opt_state.inner_opt_state[1].best_value)
    assert best == pytest.approx(float(mean_loss(params, batch_of(0))), rel=1e-5)
    assert best != pytest.approx(float(mean_loss(params, halves[1])), rel=1e-2)


def test_a_window_refuses_a_line_search():
    step = make_train_step(loss_fn, data_mesh(2))
    state = TrainState.create(
        apply_fn=None,
        params=jax.tree.map(jnp.asarray, START),
        tx=weighted_multi_steps(optax.lbfgs(), 2),
    )
    with pytest.raises(TypeError, match="optimizer must not call value_fn, got one that does"):
        step(state, batch_of(0))


# --- a term that is absent from a step ------------------------------------------------------------


def two_terms(params, batch):
    return {
        name: weighted_sum((params[name] - batch.data["x"]) ** 2, batch.data[name])
        for name in ("a", "b")
    }


def only_with(name, tx):
    def is_present(count, *, terms, **_):
        return terms[name].weight > 0

    return optax.conditionally_mask(tx, is_present, forward_extra_args=True)


def two_term_run(tx, presence):
    step = make_train_step(two_terms, data_mesh(2), coefficients={"a": 1.0, "b": 1.0})
    params = {"a": jnp.float32(1), "b": jnp.float32(1)}
    state, found = TrainState.create(apply_fn=None, params=params, tx=tx), []
    for has_b in presence:
        counts = {"a": np.ones(4, np.int32), "b": np.full(4, has_b, np.int32)}
        state, report = step(state, Batch.of({"x": np.full(4, 3, np.float32), **counts}))
        assert report.stepped
        found.append(float(state.params["b"]))
    return found, state


def test_a_parameter_whose_term_is_absent_stays_where_the_optimizer_asks_for_the_term():
    presence = [1, 0, 0, 1]
    adamw = optax.adamw(0.1, weight_decay=0.5)
    moved, _ = two_term_run(adamw, presence)
    assert moved[1] != moved[0]  # the rule of optax, and a plain step's
    assert moved[2] != moved[1]
    labels = {"a": "a", "b": "b"}
    cured = optax.partition({name: only_with(name, adamw) for name in labels}, labels)
    stayed, state = two_term_run(cured, presence)
    assert stayed[0] == stayed[1] == stayed[2] != stayed[3]
    # what b has seen is two steps, as if the others had not been
    assert stayed[::3] == pytest.approx(two_term_run(adamw, [1, 1])[0], rel=1e-6)
    assert int(state.opt_state.inner_states["b"].inner_state.inner_state[0].count) == 2


# --- gradients through a step, strict promotion, x64 ----------------------------------------------


@pytest.mark.parametrize("engine", STEP_ENGINES)
def test_gradients_flow_through_a_step(engine):
    # how the loss after a step depends on the parameters before it, the batch's weights and data
    step = make_train_step(loss_fn, data_mesh(2), engine=engine)
    tx = optax.sgd(0.1, momentum=0.9)

    def after(params, weights):
        state = TrainState.create(apply_fn=None, params=params, tx=tx)
        state, _ = step(state, Batch(batch_of(0).data, batch_of(0).ids, weights))
        return mean_loss(state.params, batch_of(1))

    def naive(params, weights):
        own = Batch(batch_of(0).data, batch_of(0).ids, weights)
        grads = jax.grad(mean_loss)(params, own)
        return mean_loss(jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), batch_of(1))

    params = jax.tree.map(jnp.asarray, START)
    found = jax.grad(after)(params, jnp.asarray(WEIGHTS))
    right = jax.grad(naive)(params, jnp.asarray(WEIGHTS))
    for leaf in right:
        np.testing.assert_allclose(found[leaf], right[leaf], rtol=1e-4, atol=1e-6)


def promote(updates, state, params=None):
    return updates, jax.tree.map(lambda leaf: leaf.astype(jnp.float32), state)


@pytest.mark.parametrize(
    ("tx", "opt_state", "found"),
    [
        (optax.adam(0.1), {"w": np.zeros(1), "b": np.zeros(())}, r"float32\[3\] for float32\[1\]"),
        (
            optax.GradientTransformation(lambda p: jax.tree.map(jnp.float16, p), promote),
            START,
            r"float32\[\] for float16\[\] at .*'b'",
        ),
        (
            optax.GradientTransformation(lambda p: [], lambda updates, state, _: (updates, [0.0])),
            START,
            "5 arrays for 4",
        ),
    ],
)
def test_what_an_optimizer_makes_of_its_state_must_be_as_it_was(tx, opt_state, found):
    state = TrainState.create(apply_fn=None, params=jax.tree.map(jnp.asarray, START), tx=tx)
    state = state.replace(opt_state=tx.init(jax.tree.map(np.float32, opt_state)))
    step = make_train_step(loss_fn, mesh=data_mesh(1))
    refused = "optimizer must leave parameters and its state in their shapes and dtypes, got "
    with pytest.raises(TypeError, match=refused + found):
        step(state, batch_of(0))
