"""What the report of a step says is what happened to the parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fitting import fetch, loss_fn, new_state
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


def square(w, batch):
    return weighted_sum((w - batch.data) ** 2, batch.weights)


class Scalar(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.float32(0))


class Linen:
    """A step for one number, held by a TrainState."""

    def __init__(self, tx, loss=square, **options):
        self.step = make_train_step(lambda params, batch: loss(params["w"], batch), **options)
        self.state = TrainState.create(apply_fn=None, params={"w": jnp.float32(0)}, tx=tx)

    def __call__(self, batch, **extra):
        self.state, report = self.step(self.state, batch, **extra)
        return report

    @property
    def w(self):
        return float(self.state.params["w"])

    @property
    def opt_state(self):
        return self.state.opt_state


class Nnx:
    """The same, held by an nnx.Module and its optimizer."""

    def __init__(self, tx, loss=square, **options):
        self.step = make_nnx_train_step(lambda model, batch: loss(model.w[...], batch), **options)
        self.model = Scalar()
        self.optimizer = nnx.Optimizer(self.model, tx, wrt=nnx.Param)

    def __call__(self, batch, **extra):
        return self.step(self.model, self.optimizer, batch, **extra)

    @property
    def w(self):
        return float(self.model.w[...])

    @property
    def opt_state(self):
        return nnx.as_pure(self.optimizer.opt_state)


def rows(*values, weights=None):
    return Batch.of(np.float32(values), None if weights is None else np.float32(weights))


TWOS, EMPTY = rows(2.0, 2.0), rows(7.0, 7.0, weights=[0, 0])


def verdicts(report):
    return bool(report.stepped), bool(report.skipped)


EVERYWHERE = [*((Linen, engine) for engine in STEP_ENGINES), (Nnx, "jit")]


@pytest.mark.parametrize(("make", "engine"), EVERYWHERE)
def test_a_window_that_closes_on_an_empty_batch_has_stepped(make, engine):
    run = make(weighted_multi_steps(optax.sgd(0.5), 2), mesh=data_mesh(2), engine=engine)
    assert verdicts(run(TWOS)) == (False, False)  # has weight, and waits
    assert run.w == 0.0
    assert verdicts(run(EMPTY)) == (True, True)
    assert run.w == 2.0
    assert verdicts(run(EMPTY)) == (False, True)
    assert verdicts(run(EMPTY)) == (False, True)  # a window without weight closes on nothing
    assert run.w == 2.0
    assert verdicts(run(rows(4.0, 0.0), flush=True)) == (True, False)
    assert run.w == pytest.approx(2.0)


@pytest.mark.parametrize("make", [Linen, Nnx])
def test_without_windows_a_step_steps_where_it_is_not_skipped(make):
    run = make(optax.adamw(0.5), mesh=data_mesh(2), microbatches=2)
    batch = rows(2.0, 2.0, 2.0, 2.0)
    assert verdicts(run(batch)) == (True, False)
    before = run.w
    assert verdicts(run(rows(2.0, 2.0, 2.0, 2.0, weights=[0] * 4))) == (False, True)
    assert run.w == before != 0.0


@pytest.mark.parametrize("make", [Linen, Nnx])
def test_windows_within_windows_step_when_the_inner_one_does(make):
    inner = weighted_multi_steps(optax.sgd(0.5), 2)
    run = make(weighted_multi_steps(inner, 2), mesh=data_mesh(2))
    found = [(*verdicts(run(batch)), run.w) for batch in [TWOS, EMPTY] * 4]
    assert [stepped for stepped, _, _ in found] == [False] * 3 + [True] + [False] * 3 + [True]
    assert [w for *_, w in found] == [0.0] * 3 + [2.0] * 5


@pytest.mark.parametrize("make", [Linen, Nnx])
def test_an_update_that_optax_leaves_out_has_not_stepped(make):
    run = make(optax.apply_if_finite(optax.sgd(0.5), 1), mesh=data_mesh(1))
    assert verdicts(run(TWOS)) == (True, False)
    assert verdicts(run(rows(np.inf))) == (False, False)
    assert run.w == 2.0
    assert verdicts(run(rows(np.inf))) == (True, False)  # apply_if_finite has had enough
    assert not np.isfinite(run.w)


@pytest.mark.parametrize("make", [Linen, Nnx])
def test_a_microbatch_that_is_left_out_has_not_stepped(make):
    tx = weighted_multi_steps(optax.sgd(0.5), 1, should_skip_update_fn=optax.skip_not_finite)
    run = make(tx, mesh=data_mesh(1))
    assert verdicts(run(rows(np.nan))) == (False, False)
    assert run.w == 0.0
    assert verdicts(run(TWOS)) == (True, False)
    assert run.w == 2.0


@pytest.mark.parametrize(("make", "engine"), EVERYWHERE)
def test_the_norm_is_that_of_the_global_gradient(make, engine):
    # before the optimizer: clipping does not show in it
    tx = optax.chain(optax.clip_by_global_norm(1e-3), optax.sgd(1.0))
    run = make(tx, mesh=data_mesh(4), engine=engine, grad_norm=True)
    report = run(rows(3.0, 0.0, 5.0, 9.0, weights=[1, 0.5, 0, 0]))
    assert float(report.grad_norm) == pytest.approx(2 * 3.0 / 1.5)
    assert abs(run.w) == pytest.approx(1e-3)
    assert float(run(rows(3.0, 3.0, 3.0, 3.0, weights=[0] * 4)).grad_norm) == 0.0
    assert make(tx, mesh=data_mesh(1))(TWOS).grad_norm is None


def test_the_norm_is_taken_over_all_parameters_in_float32_at_least():
    state = new_state(optax.sgd(0.1))
    state = state.replace(params=jax.tree.map(lambda p: p.astype(jnp.bfloat16), state.params))
    batch = Batch.of(fetch(np.arange(8)))
    step = make_train_step(loss_fn, data_mesh(2), grad_norm=True, donate=False)
    _, report = step(state, batch)
    gradients = jax.grad(lambda params: loss_fn(params, batch).mean())(state.params)
    leaves = [np.asarray(leaf, np.float64).ravel() for leaf in jax.tree.leaves(gradients)]
    assert float(report.grad_norm) == pytest.approx(
        np.linalg.norm(np.concatenate(leaves)), rel=1e-2
    )
    assert report.grad_norm.dtype == jnp.float32


# --- windows beside other parts of an optimizer ---------------------------------------------------

K2 = weighted_multi_steps(optax.sgd(0.5), 2)
BESIDE = {
    "decay after": optax.chain(K2, optax.add_decayed_weights(-0.1)),
    "momentum after": optax.chain(K2, optax.trace(0.9)),
    "momentum before": optax.chain(optax.trace(0.9), K2),
    "adam before": optax.chain(optax.scale_by_adam(), K2, optax.add_decayed_weights(-0.1)),
    "named": optax.named_chain(
        ("trace", optax.trace(0.9)), ("window", K2), ("decay", optax.add_decayed_weights(-0.1))
    ),
    "in a wrapper": optax.apply_if_finite(optax.chain(optax.trace(0.9), K2), 3),
    "masked": optax.masked(optax.chain(optax.trace(0.9), K2), True),
}


def others(opt_state):
    """All of an optimizer's state but the windows' own."""
    found = jax.tree.map(
        lambda node: None if hasattr(node, "mini_step") else np.asarray(node),
        opt_state,
        is_leaf=lambda node: hasattr(node, "mini_step"),
    )
    return jax.tree.leaves(found)


@pytest.mark.parametrize(
    ("make", "name"), [*((Linen, name) for name in BESIDE), (Nnx, "adam before")]
)
def test_an_empty_step_moves_nothing_beside_a_window(name, make):
    run = make(BESIDE[name], mesh=data_mesh(2))
    run(TWOS)
    run(rows(4.0, 4.0))
    before = run.w, others(run.opt_state)
    assert before[0] != 0.0
    for _ in range(3):  # a window without weight opens, closes and opens
        assert verdicts(run(EMPTY)) == (False, True)
        assert run.w == before[0]
        jax.tree.map(np.testing.assert_array_equal, others(run.opt_state), before[1])
    # the window that the third empty batch has opened closes with the last one
    assert verdicts(run(TWOS)) == (True, False)


@pytest.mark.parametrize("make", [Linen, Nnx])
def test_what_follows_a_window_goes_on_when_it_closes_on_an_empty_batch(make):
    tx = optax.chain(optax.trace(0.9), weighted_multi_steps(optax.identity(), 2), optax.trace(0.5))
    run = make(tx, mesh=data_mesh(1))
    run(TWOS)  # gradient -4
    before = jax.device_get(run.opt_state)
    report = run(EMPTY)
    assert verdicts(report) == (True, True)
    first, _, last = run.opt_state
    jax.tree.map(np.testing.assert_array_equal, first, before[0])  # it has seen no batch
    assert [float(leaf) for leaf in jax.tree.leaves(last)] == [-4.0]
    assert run.w == -4.0


def test_a_group_without_windows_waits_for_batches_of_weight():
    tx = optax.partition(
        {"a": weighted_multi_steps(optax.sgd(0.5), 2), "b": optax.adamw(0.1)},
        {"a": "a", "b": "b"},
    )

    def loss(params, batch):
        return weighted_sum((params["a"] + params["b"] - batch.data) ** 2, batch.weights)

    step = make_train_step(loss, data_mesh(2))
    params = {"a": jnp.float32(0), "b": jnp.float32(1)}
    state = TrainState.create(apply_fn=None, params=params, tx=tx)
    state, report = step(state, TWOS)
    assert verdicts(report) == (True, False)  # b has stepped
    a, b = float(state.params["a"]), float(state.params["b"])
    assert (a, b != 1.0) == (0.0, True)
    adam = jax.device_get(state.opt_state.inner_states["b"])
    for stepped in (True, False, False):
        state, report = step(state, EMPTY)
        assert verdicts(report) == (stepped, True)
        assert float(state.params["b"]) == b
        jax.tree.map(np.testing.assert_array_equal, state.opt_state.inner_states["b"], adam)
    assert float(state.params["a"]) == pytest.approx(1.0)  # half of the gradient, 2 * (2 - 1)


def test_beside_a_window_batches_of_weight_are_seen_as_optax_shows_them():
    # the check above is of batches without weight alone
    tx = BESIDE["momentum before"]
    run = Linen(tx, mesh=data_mesh(1))
    params = jnp.float32(0)
    state = tx.init(params)
    for value in (2.0, 3.0, 4.0, 5.0):
        run(rows(value))
        updates, state = tx.update(2 * (params - value), state, params, weight=1)
        params = optax.apply_updates(params, updates)
        assert run.w == pytest.approx(float(params), rel=1e-6)


@pytest.mark.parametrize("make", [Linen, Nnx])
@pytest.mark.parametrize(
    ("tx", "name"),
    [
        (optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation(), "MultiSteps"),
        (optax.chain(optax.clip(1.0), optax.MultiSteps(optax.sgd(1.0), 2)), "MultiSteps"),
        (optax.partition({"x": optax.MultiSteps(optax.sgd(1.0), 2)}, "x"), "MultiSteps"),
        (optax.chain(optax.sgd(1.0), optax.apply_every(2)), "apply_every"),
    ],
)
def test_what_gives_each_microbatch_one_vote_is_refused(make, tx, name):
    run = make(tx, mesh=data_mesh(1))
    with pytest.raises(TypeError, match=rf"as their weight, got optax\.{name}.*weighted_multi_ste"):
        run(TWOS)
