"""Statistics of a step in training steps of linen and nnx, with collections, keys, optimizers."""

from typing import Any

import flax.linen as nn
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
    weighted_sum,
)

X = np.random.default_rng(0).normal(size=12).astype(np.float32)
WEIGHTS = np.float32([1, 0, 2, 1, 1, 0.5, 1, 1, 0, 3, 1, 1])
BATCH = Batch.of(X, weights=WEIGHTS)
MEAN = float(np.average(X, weights=WEIGHTS))
CENTRED = float(np.average((X - MEAN) ** 2, weights=WEIGHTS))  # the gradient of w times it
RUNS = [("shard_map", 1, 3), ("shard_map", 4, 1), ("jit", 2, 2), ("pmap", 2, 3)]


def sums(params, batch):
    return {"x": jnp.sum(batch.weights * batch.data), "weight": jnp.sum(batch.weights)}


def centred(params, batch, *, statistics):
    mean = statistics["x"] / statistics["weight"]
    return weighted_sum(params["w"] * (batch.data - mean) ** 2, batch.weights)


def state_of(tx=None, **more):
    tx = optax.sgd(1.0) if tx is None else tx
    return TrainState.create(apply_fn=None, params={"w": jnp.float32(1)}, tx=tx, **more)


@pytest.mark.parametrize(("engine", "ranks", "microbatches"), RUNS)
def test_a_step_is_the_same_for_every_split_and_compiles_once(engine, ranks, microbatches):
    options = {"engine": engine, "microbatches": microbatches, "statistics": sums}
    step = make_train_step(centred, data_mesh(ranks), **options)
    state = state_of()
    for taken in (1, 2):
        state, report = step(state, BATCH)
        assert state.params["w"] == pytest.approx(1 - taken * CENTRED, rel=1e-5)
    assert report.loss.statistics["weight"] == WEIGHTS.sum()
    (jitted,) = step.compiled._jitted.values()
    assert jitted._cache_size() == 1


def test_a_mean_of_each_microbatch_of_its_own_fails_that_check():
    def of_its_own(params, batch):
        return centred(params, batch, statistics=sums(params, batch))

    state, _ = make_train_step(of_its_own, data_mesh(4))(state_of(), BATCH)
    assert state.params["w"] != pytest.approx(1 - CENTRED, rel=1e-2)


class State(TrainState):
    batch_stats: Any = None


class Normed(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        return nn.Dense(1)(nn.BatchNorm(use_running_average=not train, axis_name=None)(x))


@pytest.mark.parametrize(("engine", "ranks", "microbatches"), [("pmap", 2, 1), ("shard_map", 2, 3)])
def test_with_collections_they_are_given_variables(engine, ranks, microbatches):
    model = Normed()
    variables = model.init(jax.random.key(0), X[:, None], train=False)

    def outputs(variables, batch):
        return jnp.sum(model.apply(variables, batch.data[:, None], train=False))

    def loss_fn(variables, batch, *, statistics):
        out = model.apply(variables, batch.data[:, None], train=False)[:, 0]
        stats = jax.tree.map(lambda leaf: leaf + statistics, variables["batch_stats"])
        return weighted_sum(out * statistics, batch.weights), {"batch_stats": stats}

    options = {"engine": engine, "microbatches": microbatches, "mutable": "batch_stats"}
    step = make_train_step(loss_fn, data_mesh(ranks), statistics=outputs, donate=False, **options)
    state = State.create(apply_fn=None, tx=optax.sgd(0.1), **variables)
    state, report = step(state, BATCH)
    right = float(np.sum(model.apply(variables, X[:, None], train=False)))
    assert report.loss.statistics == pytest.approx(right, rel=1e-5)
    mean = state.batch_stats["BatchNorm_0"]["mean"]
    assert mean == pytest.approx(microbatches * right, rel=1e-5)


class Model(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.float32(1))
        self.calls = nnx.BatchStat(jnp.float32(0))
        self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))


def nnx_sums(model, batch):
    model.calls[...] += 1.0  # is dropped
    return sums(model, batch)


def nnx_centred(model, batch, *, statistics):
    return centred({"w": model.w[...]}, batch, statistics=statistics)


def new_pair():
    model = Model()
    return model, nnx.Optimizer(model, optax.sgd(1.0), wrt=nnx.Param)


@pytest.mark.parametrize(("engine", "ranks", "microbatches"), RUNS[:2])
def test_an_nnx_step_gives_them_the_model(engine, ranks, microbatches):
    model, optimizer = new_pair()
    options = {"engine": engine, "microbatches": microbatches, "statistics": nnx_sums}
    step = make_nnx_train_step(nnx_centred, data_mesh(ranks), **options)
    report = step(model, optimizer, BATCH)
    assert float(model.w[...]) == pytest.approx(1 - CENTRED, rel=1e-5)
    assert float(model.calls[...]) == 0
    assert report.loss.statistics["x"] == pytest.approx(MEAN * WEIGHTS.sum(), rel=1e-5)


def test_keys_of_rows_are_those_that_the_loss_is_given():
    def drawn(keys):
        return jax.vmap(jax.random.uniform)(keys)

    def statistics(params, batch, *, rng):
        return jnp.sum(drawn(rng))

    def loss_fn(params, batch, keys, *, statistics):
        return weighted_sum(params["w"] * drawn(keys) / statistics)

    found = []
    for ranks, microbatches in [(1, 1), (2, 3)]:
        options = {"microbatches": microbatches, "rng_per": "example", "statistics": statistics}
        step = make_train_step(loss_fn, data_mesh(ranks), **options)
        _, report = step(state_of(), BATCH, jax.random.key(0))
        assert report.loss.value == pytest.approx(1 / 12, rel=1e-6)
        found.append(float(report.loss.statistics))
    assert found[0] == pytest.approx(found[1], rel=1e-6)


def test_a_model_that_draws_for_its_statistics_where_keys_are_per_example_is_refused():
    def dropped(model, batch):
        return jnp.sum(model.dropout(batch.data))

    options = {"statistics": dropped, "rng_per": "example"}
    step = make_nnx_train_step(lambda *args, statistics: None, data_mesh(1), **options)
    with pytest.raises(ValueError, match="statistics must draw from its rng alone where rng_per="):
        step(*new_pair(), BATCH, jax.random.key(0))


def test_a_line_search_evaluates_the_loss_with_statistics_of_the_parameters_it_tries():
    def scaled(params, batch):
        return params["w"] * jnp.sum(batch.weights)

    def loss_fn(params, batch, *, statistics):
        return weighted_sum(params["w"] * batch.data**2 * statistics, batch.weights)

    def update(updates, state, params, *, value_fn, **_):
        twice = jax.tree.map(lambda p: 2 * p, params)
        return jax.tree.map(lambda g: value_fn(twice) + 0 * g, updates), state

    tx = optax.GradientTransformationExtraArgs(lambda params: (), update)
    step = make_train_step(loss_fn, data_mesh(2), statistics=scaled)
    state, report = step(state_of(tx), BATCH)
    assert state.params["w"] - 1 == pytest.approx(4 * float(report.loss.value), rel=1e-5)


@pytest.mark.parametrize("make", [make_train_step, make_nnx_train_step])
def test_bad_statistics_are_refused_in_words(make):
    with pytest.raises(
        TypeError, match=rf"{make.__name__}: statistics must be a function .* got i"
    ):
        make(centred, data_mesh(1), statistics=3)


def test_a_loss_that_takes_no_statistics_is_told_so():
    def plain(params, batch):
        return weighted_sum(params["w"] * batch.data, batch.weights)

    step = make_train_step(plain, data_mesh(1), statistics=sums)
    with pytest.raises(
        TypeError, match=r"take \(params, batch, \*, statistics\) when the step is g"
    ):
        step(state_of(), BATCH)
