"""A whole step on its own model and batch, named by what its rows counted."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from reductions import KNOWN, rank_token_mean, right

from jax_ddp_weighting import Batch, data_mesh, diagnose_step, make_train_step, weighted_sum

ROWS = np.random.default_rng(5).normal(size=(12, 40)).astype(np.float32)

ROW_WEIGHTS = np.array([1, 1, 1, 1, 1, 0, 1, 1, 0, 0, 0, 0])

MODEL = {"w": np.linspace(-1, 1, 40, dtype=np.float32), "b": np.float32(0.3)}


def loss_of_example(params, x):
    return jnp.tanh((x @ params["w"]) / 8 + params["b"])


def sgd_step(reduction, *, ranks, microbatches=1, learning_rate=1.0):
    """Somebody's step: each rank's microbatches are runs of its rows."""

    def step(params, batch):
        def totals(params):
            losses = jax.vmap(loss_of_example, (None, 0))(params, batch.data)
            return (losses * batch.weights).reshape(ranks, microbatches, -1).sum(axis=-1)

        own = jax.jacrev(totals)(params)
        held = batch.weights.reshape(ranks, microbatches, -1).sum(axis=-1).tolist()
        gradient = jax.tree.map(lambda leaf: reduction(list(leaf), held), own)
        return jax.tree.map(lambda p, g: p - learning_rate * g, params, gradient)

    return step


def diagnosed(step, weights=ROW_WEIGHTS, **options):
    options = {"ranks": 2, "learning_rate": 1.0, "loss_of_example": loss_of_example} | options
    return diagnose_step(step, MODEL, Batch.of(ROWS, weights), **options)


@pytest.mark.parametrize("key", KNOWN)
def test_a_black_box_step_is_named_by_what_its_rows_counted(key):
    name, factor, reduction = KNOWN[key]
    weights = np.array([1, 1, 0, 0, 0.25, 0, 3, 1, 2, 0, 1, 0.5])
    found = diagnosed(sgd_step(reduction, ranks=2, microbatches=3), weights, microbatches=3)
    assert (found.convention, found.factor) == (name, pytest.approx(factor(2, 3)))


class Network(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(1)(nn.tanh(nn.Dense(6)(x)))[..., 0]


def test_our_own_step_is_right_as_a_black_box_in_a_train_state():
    network = Network()
    params = jax.jit(network.init)(jax.random.key(0), ROWS[:1, :8])

    def loss_fn(params, batch):
        return weighted_sum(network.apply(params, batch.data) ** 2, batch.weights)

    train_step = make_train_step(loss_fn, data_mesh(4))

    def step(params, batch):
        fresh = jax.tree.map(jnp.copy, params)  # the step takes its state's arrays away
        state = TrainState.create(apply_fn=None, params=fresh, tx=optax.sgd(1.0))
        return train_step(state, batch)[0].params

    found = diagnose_step(
        step,
        params,
        Batch.of(ROWS[:, :8], ROW_WEIGHTS),
        loss_of_example=lambda params, x: network.apply(params, x[None])[0] ** 2,
        ranks=4,
        learning_rate=1.0,
    )
    assert (found.convention, found.factor) == ("global_mean", 1.0)
    np.testing.assert_allclose(found.counted.reshape(-1), ROW_WEIGHTS / 7, atol=1e-4)


def test_a_gradient_hook_serves_as_well_as_sgd():
    def hook(params, batch):
        after = sgd_step(rank_token_mean, ranks=2)(params, batch)
        return jax.tree.map(lambda p, q: p - q, params, after)

    found = diagnosed(hook, learning_rate=None)
    assert found.convention == "mean_of_means"
    np.testing.assert_allclose(found.counted[0, 0, :5], 1 / 10, atol=1e-5)
    np.testing.assert_allclose(found.counted[1, 0, :2], 1 / 4, atol=1e-5)
    np.testing.assert_allclose(found.counted[1, 0, 2:], 0, atol=1e-5)


def test_rows_are_placed_as_told():
    interleaved = np.arange(12) % 2
    found = diagnosed(sgd_step(right, ranks=2), ranks=interleaved, microbatches=np.zeros(12, int))
    assert found.convention == "global_mean"
    np.testing.assert_array_equal(found.weights[1, 0], ROW_WEIGHTS[1::2])
    found = diagnosed(sgd_step(rank_token_mean, ranks=2), ranks=interleaved)
    assert found.convention == "unknown"  # its ranks are runs of rows


def test_an_even_batch_cannot_tell_and_says_so():
    found = diagnosed(sgd_step(right, ranks=2), np.ones(12, int))
    assert found.convention == "unknown"
    assert found.words == "what this batch is too even to tell"
    assert {"global_mean", "mean_of_means", "padding_counted"} <= set(found.alternatives)
    assert "unequal weights" in found.advice


def test_a_step_that_does_nothing_ignores_its_batch():
    found = diagnosed(lambda params, batch: params)
    assert (found.convention, found.words) == ("unknown", "a gradient of 0: it ignores its batch")


def test_a_step_of_another_optimizer_is_refused():
    def adam_like(params, batch):
        after = sgd_step(right, ranks=2)(params, batch)
        return jax.tree.map(lambda p, q: p - 0.1 * jnp.sign(p - q), params, after)

    with pytest.raises(ValueError, match="Something else is in it: a regulariser, momentum"):
        diagnosed(adam_like)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ranks": 5}, r"ranks must divide the rows \[12\] into equal runs, got 5"),
        ({"microbatches": 4}, r"microbatches must divide the rows \[6, 6\] into equal runs, got 4"),
        ({"ranks": [0, 1]}, r"ranks must be one integer of at least 0 per row, got \[0, 1\]"),
        ({"ranks": [-1] * 12}, "ranks must be one integer of at least 0 per row"),
    ],
)
def test_rows_that_cannot_be_placed_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        diagnosed(sgd_step(right, ranks=2), **options)


def test_a_step_on_bare_arrays_is_refused():
    with pytest.raises(TypeError, match="diagnose_step: batch must be a Batch, got ndarray"):
        diagnose_step(sgd_step(right, ranks=2), MODEL, ROWS, loss_of_example=None, ranks=2)


def test_a_step_may_return_a_tuple_that_begins_with_the_parameters():
    step = sgd_step(rank_token_mean, ranks=2)
    found = diagnosed(lambda params, batch: (step(params, batch), {"loss": 0.5}))
    assert found.convention == "mean_of_means"


@pytest.mark.parametrize("learning_rate", [None, 1.0])
def test_a_step_that_returns_something_else_is_refused(learning_rate):
    with pytest.raises(ValueError, match=r"diagnose_step: step must return .* in the structure of"):
        diagnosed(lambda params, batch: (1.0, params), learning_rate=learning_rate)


def test_a_step_that_donates_its_arrays_is_diagnosed():
    step = jax.jit(donating, donate_argnums=0)
    params = jax.tree.map(jnp.asarray, MODEL)
    batch = Batch.of(jnp.asarray(ROWS), jnp.asarray(ROW_WEIGHTS))
    found = diagnose_step(
        step, params, batch, loss_of_example=loss_of_example, ranks=2, learning_rate=1.0
    )
    assert found.right
    assert not params["w"].is_deleted()


def donating(params, batch):
    def loss(params):
        losses = jax.vmap(loss_of_example, (None, 0))(params, batch.data)
        return jnp.sum(losses * batch.weights) / jnp.sum(batch.weights)

    return jax.tree.map(lambda p, g: p - g, params, jax.grad(loss)(params))


def test_a_noisy_step_is_said_to_be_one():
    rng = np.random.default_rng(0)

    def noisy(size):
        def step(params, batch):
            after = sgd_step(right, ranks=2)(params, batch)
            return jax.tree.map(
                lambda leaf: leaf + np.float32(size * rng.normal(size=leaf.shape)), after
            )

        return step

    assert "another gradient each time" in diagnosed(noisy(0.1)).words
    assert diagnosed(noisy(1e-6), rtol=0.02).right


def test_a_right_step_in_bfloat16_is_right_at_its_tolerance():
    def step(params, batch):
        after = sgd_step(right, ranks=2)(params, batch)
        return jax.tree.map(lambda p, q: (p - q).astype(jnp.bfloat16), params, after)

    assert diagnosed(step, learning_rate=None, rtol=0.1).right


@pytest.mark.parametrize("rows", [0, 2])
def test_a_batch_that_weighs_nothing_is_refused(rows):
    batch = Batch.of(np.ones((rows, 3), np.float32), np.zeros(rows))
    with pytest.raises(ValueError, match=rf"diagnose_step: batch must have rows .* none of {rows}"):
        diagnose_step(
            lambda w, batch: w, np.ones(3), batch, loss_of_example=lambda w, x: x @ w, ranks=1
        )


def mean_of_two_ranks(params, batch):
    """Each rank's own mean by its own weight, which nothing guards where it is 0."""

    def mean(params, rows):
        losses = jax.vmap(loss_of_example, (None, 0))(params, batch.data[rows])
        return jnp.sum(losses * batch.weights[rows]) / batch.weights[rows].sum()

    own = [jax.grad(mean)(params, rows) for rows in (slice(0, 6), slice(6, 12))]
    return jax.tree.map(lambda a, b: (a + b) / 2, *own)


def holding_its_optimizer(tx):
    def step(state, batch):
        updates, opt_state = tx.update(mean_of_two_ranks(state.params, batch), state.opt_state)
        return state.replace(params=optax.apply_updates(state.params, updates), opt_state=opt_state)

    return step


def applied(state, batch):
    return state.apply_gradients(grads=mean_of_two_ranks(state.params, batch))


ADAM = optax.adam(0.1)
STATE = TrainState.create(apply_fn=None, params=MODEL, tx=ADAM)
BROKEN = {
    "gradient": (mean_of_two_ranks, MODEL, {}),
    "sgd": (
        lambda p, b: jax.tree.map(lambda x, g: x - g, p, mean_of_two_ranks(p, b)),
        MODEL,
        {"learning_rate": 1.0},
    ),
    "train state": (applied, STATE, {}),
    "optimizer undone": (holding_its_optimizer(ADAM), STATE, {}),
    "window": (
        applied,
        TrainState.create(apply_fn=None, params=MODEL, tx=optax.MultiSteps(ADAM, 1)),
        {},
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_rank_of_padding_alone_that_divides_by_0_is_not_noise(case):
    step, state, options = BROKEN[case]
    weights = np.array([1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0], np.float32)
    batch = Batch.of(ROWS, weights)
    found = diagnose_step(step, state, batch, loss_of_example=loss_of_example, ranks=2, **options)
    assert (found.convention, found.words) == ("unknown", "a gradient that is not finite")
    assert "a mean over no examples" in found.advice
    assert found.notes == ("rank 1 holds no weight.",)


def test_where_a_gradient_is_not_finite_is_said():
    def found(rows, weights=ROW_WEIGHTS, step=mean_of_two_ranks, **options):
        given = {"loss_of_example": loss_of_example, "ranks": 2} | options
        return diagnose_step(step, MODEL, Batch.of(rows, np.float32(weights)), **given)

    rows = ROWS.copy()
    rows[8] = np.nan
    assert found(rows).notes == (
        "row 8, of weight 0, has a gradient of NaN or infinity: 0 times NaN is NaN.",
    )
    rows[[1, 2]] = np.inf
    notes = found(rows).notes
    assert notes[0] == "rows 1, 2, of weight above 0, have a gradient of NaN or infinity."
    empty = [1, 1, 0, 0, 1, 1, 1, 1, 1, 0, 0, 0]

    def by_microbatch(params, batch):
        def loss(params):
            losses = jax.vmap(loss_of_example, (None, 0))(params, batch.data) * batch.weights
            sums, held = (each.reshape(6, 2).sum(axis=1) for each in (losses, batch.weights))
            return jnp.mean(sums / held)

        return jax.grad(loss)(params)

    notes = found(ROWS, empty, by_microbatch, microbatches=3).notes
    assert notes == ("microbatch 1 of rank 0, microbatch 2 of rank 1 hold no weight.",)


def test_a_step_that_is_finite_once_and_then_not_keeps_a_state():
    calls = []

    def step(params, batch):
        calls.append(1)
        noise = 0.1 if len(calls) == 1 else np.nan
        return jax.tree.map(lambda leaf: leaf + noise, sgd_step(right, ranks=2)(params, batch))

    assert "another gradient each time" in diagnosed(step).words
