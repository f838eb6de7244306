"""A training step for parameters and an optax state alone: the same as for a flax TrainState."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fitting import X, Y, new_state
from flax.training.dynamic_scale import DynamicScale

from jax_ddp_weighting import (
    Batch,
    data_mesh,
    make_optax_step,
    make_train_step,
    weighted_multi_steps,
    weighted_sum,
)

WEIGHTS = np.float32([1, 2, 0, 0, 0, 0, 1, 1, 0.5, 1, 1, 3])
BATCH = Batch.of((X[:12], Y[:12]), WEIGHTS)
EMPTY = Batch.of((X[:12], Y[:12]), 0 * WEIGHTS)


def error_of(w, b, batch):
    x, y = batch.data
    return (x @ w + b - y) ** 2


def loss_fn(params, batch):
    return weighted_sum(error_of(params["w"], params["b"], batch), batch.weights)


def start(tx, params=None):
    params = {"w": jnp.zeros(3), "b": jnp.zeros(())} if params is None else params
    return params, tx.init(params)


def assert_equal(one, other):
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(a, b)


TERMS = {"coefficients": {"nll": 1.0, "size": optax.linear_schedule(0.0, 0.5, 4)}}


def two_terms(params, batch, rng, *, replicated, statistics):
    kept = jax.vmap(lambda key: jax.random.bernoulli(key, 0.7))(rng)
    error = error_of(params["w"], params["b"], batch) * kept / jnp.maximum(statistics["rows"], 1)
    return {
        "nll": weighted_sum(error, batch.weights),
        "size": weighted_sum(jnp.abs(batch.data[1] - params["b"]) * replicated, batch.weights),
    }


OPTIONS = {
    "three ranks": ({"mesh": 3}, loss_fn, {}),
    "the global view, microbatches": ({"mesh": 2, "microbatches": 2, "engine": "jit"}, loss_fn, {}),
    "everything": (
        {
            "mesh": 2,
            "microbatches": 3,
            "rng_per": "example",
            "grad_norm": True,
            "divisors": {"size": lambda weight: jnp.maximum(weight, 20.0)},
            "statistics": lambda params, batch: {"rows": jnp.sum(batch.weights > 0)},
            **TERMS,
        },
        two_terms,
        {"rng": jax.random.key(1), "replicated": 3.0},
    ),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_parameters_and_reports_are_those_of_a_train_state(name):
    options, loss, given = OPTIONS[name]
    options = options | {"mesh": data_mesh(options["mesh"])}
    tx = optax.adamw(0.1)
    state, (params, opt_state) = new_state(tx), start(tx)
    of_state = make_train_step(loss, **options)
    step = make_optax_step(loss, tx, **options)
    for i, batch in enumerate((BATCH, EMPTY, BATCH)):
        count = {"count": i} if "coefficients" in options else {}  # by its divisor none is skipped
        state, expected = of_state(state, batch, **given)
        params, opt_state, report = step(params, opt_state, batch, **given, **count)
        assert_equal((params, opt_state), (state.params, state.opt_state))
        assert_equal(report, expected)
    assert np.abs(params["w"]).min() > 0.01


class Affine(NamedTuple):
    w: Any
    b: Any


@jax.tree_util.register_pytree_node_class
class Module:
    """An object with parameters, some of them left out, as partitions of equinox modules have."""

    def __init__(self, w, b, activation=None):
        self.w, self.b, self.activation = w, b, activation

    def tree_flatten(self):
        return (self.w, self.b, self.activation), None

    @classmethod
    def tree_unflatten(cls, _, leaves):
        return cls(*leaves)


@pytest.mark.parametrize("kind", [Affine, Module])
def test_parameters_are_any_pytree(kind):
    def loss(params, batch):
        return weighted_sum(error_of(params.w, params.b, batch), batch.weights)

    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1))
    step = make_optax_step(loss, tx, data_mesh(2))
    params, opt_state = start(tx, kind(jnp.zeros(3), jnp.zeros(())))
    params, opt_state, report = step(params, opt_state, BATCH)
    assert isinstance(params, kind)
    assert bool(report.stepped)
    expected, *_ = make_optax_step(loss_fn, tx, data_mesh(2))(*start(tx), BATCH)
    np.testing.assert_array_equal(params.w, expected["w"])


def moving_mean(params, batch, *, state):
    total = weighted_sum(batch.data[1], batch.weights).psum("data")
    return loss_fn(params, batch), {"mean": 0.5 * state["mean"] + 0.5 * total.mean()}


def test_a_models_state_goes_through_the_microbatches_and_stays_where_nothing_has_weight():
    tx = optax.sgd(0.1)
    step = make_optax_step(moving_mean, tx, data_mesh(2), microbatches=2, has_state=True)
    state, expected = {"mean": jnp.float32(0)}, 0.0
    params, opt_state = start(tx)
    params, opt_state, state, report = step(params, opt_state, BATCH, state=state)
    for rows in (np.arange(12) % 2 == 0, np.arange(12) % 2 == 1):  # of the ranks' microbatches
        mean = np.average(Y[:12][rows], weights=WEIGHTS[rows])
        expected = 0.5 * expected + 0.5 * mean
    assert float(state["mean"]) == pytest.approx(expected, rel=1e-5)
    *_, kept, report = step(params, opt_state, EMPTY, state=state)
    assert float(kept["mean"]) == pytest.approx(expected, rel=1e-5)
    assert bool(report.skipped)


def test_windows_close_after_their_batches():
    tx = weighted_multi_steps(optax.sgd(0.1), 2)
    step = make_optax_step(loss_fn, tx, data_mesh(2))
    params, opt_state = start(tx)
    stepped = []
    for _ in range(3):
        params, opt_state, report = step(params, opt_state, BATCH)
        stepped.append(bool(report.stepped))
    params, opt_state, report = step(params, opt_state, BATCH, flush=True)
    assert [*stepped, bool(report.stepped)] == [False, True, False, True]


def test_what_was_given_is_given_away_unless_it_is_asked_back():
    tx = optax.adam(0.1)
    step = make_optax_step(loss_fn, tx, data_mesh(2))
    *given, _ = step(*start(tx), BATCH)  # which places them
    step(*given, BATCH)
    with pytest.raises(ValueError, match="state must be one that no step was given before"):
        step(*given, BATCH)
    given = start(tx)
    keeping = make_optax_step(loss_fn, tx, data_mesh(2), donate=False)
    first, *_ = keeping(*given, BATCH)
    again, *_ = keeping(*given, BATCH)
    assert_equal(first, again)
    count = jnp.int32(3)
    scheduled = make_optax_step(
        lambda params, batch: {"loss": loss_fn(params, batch)},
        tx,
        data_mesh(2),
        coefficients={"loss": optax.constant_schedule(1.0)},
    )
    scheduled(*start(tx), BATCH, count=count)
    assert int(count) == 3  # not given away with the rest


def test_it_lowers_for_shapes_and_compiles_once():
    tx = optax.adam(0.1)
    step = make_optax_step(loss_fn, tx, data_mesh(2))
    lowered = step.lower(*jax.eval_shape(lambda: start(tx)), BATCH)
    assert "all_reduce" in lowered.as_text()
    traced = []

    def counting(params, batch):
        traced.append(1)
        return loss_fn(params, batch)

    step = make_optax_step(counting, tx, data_mesh(2))
    params, opt_state = start(tx)
    params, opt_state, _ = step(params, opt_state, BATCH)
    once = len(traced)
    for batch in (EMPTY, BATCH):
        params, opt_state, _ = step(params, opt_state, batch)
    assert len(traced) == once


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda step, p, s: step(new_state(optax.sgd(1.0)), s, BATCH), "parameters alone, got Tr"),
        (lambda step, p, s: step({"w": p["w"], "b": 1}, s, BATCH), "floating arrays, got int at"),
        (
            lambda step, p, s: step({**p, "n": jnp.int32(1)}, s, BATCH),
            r"got int32 at params\['n'\]",
        ),
        (lambda step, p, s: step(p, s, BATCH, state=1), "state must be left out where the step"),
        (lambda step, p, s: step(p, s, BATCH, flush=True), "optimizer must take extra arguments"),
        (lambda step, p, s: step(p, (s, DynamicScale()), BATCH), "must hold no DynamicScale"),
    ],
)
def test_what_is_no_step_is_refused(call, message):
    tx = optax.GradientTransformation(*optax.sgd(0.1)[:2])
    with pytest.raises(TypeError, match=message):
        call(make_optax_step(loss_fn, tx, data_mesh(2)), *start(tx))


def test_what_the_maker_was_not_told_is_asked_for():
    tx = optax.sgd(0.1)
    with pytest.raises(TypeError, match=r"optimizer must be one of optax, got float"):
        make_optax_step(loss_fn, 0.1, data_mesh(2))
    with pytest.raises(ValueError, match="make_optax_step: engine must be one of"):
        make_optax_step(loss_fn, tx, data_mesh(2), engine="xla")
    with_state = make_optax_step(moving_mean, tx, data_mesh(2), has_state=True)
    with pytest.raises(TypeError, match="state must be given where the step was made with has_st"):
        with_state(*start(tx), BATCH)
    forgets = make_optax_step(
        lambda params, batch, state: loss_fn(params, batch), tx, data_mesh(2), has_state=True
    )
    with pytest.raises(TypeError, match=r"loss_fn must return \(sums, state\) where has_state"):
        forgets(*start(tx), BATCH, state={"mean": jnp.float32(0)})
    with_schedule = make_optax_step(two_terms, tx, data_mesh(2), **TERMS)
    with pytest.raises(TypeError, match=r"count must be given where coefficients\['size'\] is a"):
        with_schedule(*start(tx), BATCH)
    with pytest.raises(TypeError, match=r"for params and opt_state alone make_optax_step"):
        make_train_step(loss_fn, data_mesh(2))(start(tx), BATCH)


def test_rows_over_two_axes_are_those_of_one():
    mesh = jax.make_mesh((2, 2), ("replica", "fsdp"), devices=jax.devices()[:4])
    tx = optax.sgd(0.1)
    spec = jax.sharding.PartitionSpec(("replica", "fsdp"))
    over_both, _, report = make_optax_step(loss_fn, tx, mesh, batch_spec=spec)(*start(tx), BATCH)
    alone, _, right = make_optax_step(loss_fn, tx, data_mesh(1))(*start(tx), BATCH)
    for a, b in zip(jax.tree.leaves(over_both), jax.tree.leaves(alone), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
    assert float(report.weight) == float(right.weight) == WEIGHTS.sum()
    # the split matters: a mean of the ranks' means is another step
    means = [
        jax.grad(lambda p, r=rows: loss_fn(p, Batch.of((X[r], Y[r]), WEIGHTS[r])).mean())(
            start(tx)[0]
        )["b"]
        for rows in (np.arange(12).reshape(4, 3)[[0, 2, 3]])
    ]
    assert abs(-0.1 * float(np.mean(means)) / float(alone["b"]) - 1) > 1e-2
