"""Models whose own random stream, or whose parameters, decide what they keep."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import regimes

from jax_ddp_weighting import value_and_grad, weighted_sum

ENGINES = ["jit", "shard_map", "shard_map_unchecked", "pmap", "vmap"]
ROWS = np.arange(24, dtype=np.float32)


def draw(count):
    """One bit per microbatch, of a stream that has been drawn from so often."""
    return jax.random.bernoulli(jax.random.fold_in(jax.random.key(3), count))


def masked_loss(w, rows, *, state):
    """The stream leaves whole microbatches out; each loss is `w`, so that right is 1."""
    weights = jnp.broadcast_to(draw(state), rows.shape).astype(jnp.float32)
    return weighted_sum(w + 0 * rows, weights), state + 1


def in_regime(regime, ranks, microbatches, loss_fn=masked_loss, state=0):
    def make(axis_name):
        gradient = value_and_grad(
            loss_fn, axis_name=axis_name, microbatches=microbatches, has_state=True
        )
        return lambda w, rows: gradient(w, rows, state=jnp.int32(state))

    return regimes.run(regime, ranks, make, jnp.float32(1), ROWS)


BITS = [bool(draw(count)) for count in range(12)]
START = next(i for i in range(8) if BITS[i : i + 2] == [False, True])  # the first draw is 0


@pytest.mark.parametrize("regime", ENGINES)
@pytest.mark.parametrize("microbatches", [2, 3, 6])
def test_a_stream_that_decides_weights_decides_them_once(regime, microbatches):
    ranks = 2
    (loss, state), gradient = in_regime(regime, ranks, microbatches, state=START)
    kept = sum(BITS[START : START + microbatches]) * 24 / microbatches
    assert float(loss.terms["loss"].weight) == kept
    assert (float(loss.value), float(gradient)) == (1.0, 1.0)
    assert int(state) == START + microbatches


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("microbatches", [1, 2, 3])
def test_and_for_every_number_of_ranks(ranks, microbatches):
    start = START + 1  # a draw of 1
    (loss, _), gradient = in_regime("shard_map", ranks, microbatches, state=start)
    assert (float(loss.value), float(gradient)) == (1.0, 1.0)


def test_weights_of_the_first_state_alone_fail_the_same_check():
    def first_state(w, rows, *, state):
        sums, new = masked_loss(w, rows, state=state)
        weight = jnp.where(draw(START), 1.0, 0.0) * rows.shape[0]  # what each was given before
        return sums.__class__(sums.total, weight), new

    (loss, _), gradient = in_regime("jit", 1, 2, first_state, state=START)
    assert (float(loss.value), float(gradient)) == (0.0, 0.0)


def flops(microbatches, decides):
    """Of a model that keeps the mean of what it computes, which has a say in weights or not."""

    def loss_fn(w, x, *, state):
        hidden = jnp.tanh(x @ w)
        weights = jnp.ones(x.shape[0]) + (state if decides else 0.0)
        return weighted_sum(jnp.sum(hidden, axis=-1), weights), 0.9 * state + jnp.mean(hidden)

    gradient = value_and_grad(loss_fn, microbatches=microbatches, has_state=True)
    compiled = jax.jit(lambda w, x: gradient(w, x, state=jnp.float32(0))).lower(
        jnp.ones((64, 64)), jnp.ones((64, 64))
    )
    return compiled.compile().cost_analysis()["flops"]


def test_a_state_without_a_say_in_weights_costs_no_second_forward_pass():
    # the body of each loop counts once: with a forward pass of the weights it would be 3/2
    assert flops(4, False) * 4 / flops(1, False) == pytest.approx(1, abs=0.08)
    assert flops(4, True) * 4 / flops(1, True) > 1.3


# --- states made of parameters --------------------------------------------------------------------

WEIGHTS = np.float32([[3, 1], [0, 2]])


def spectral(axis_name):
    """A layer divided by its norm, whose power iteration is kept: as flax's SpectralNorm."""

    def loss_fn(w, rows, *, state):
        u = w @ (w.T @ state["u"])
        u = u / jnp.linalg.norm(u)
        sigma = jax.lax.stop_gradient(jnp.linalg.norm(w.T @ u))
        return weighted_sum(rows[:, None].repeat(2, 1) @ (w / sigma) @ jnp.ones(2)), {
            "u": u,
            "steps": state["steps"] + 1,
        }

    return loss_fn


@pytest.mark.parametrize("regime", ENGINES)
@pytest.mark.parametrize("microbatches", [1, 2, 3])
def test_a_state_computed_from_parameters_is_the_same_on_every_rank(regime, microbatches):
    def make(axis_name):
        gradient = value_and_grad(
            spectral(axis_name), axis_name=axis_name, microbatches=microbatches, has_state=True
        )
        state = {"u": jnp.float32([1, 0]), "steps": jnp.int32(0)}
        return lambda w, rows: gradient(w, rows, state=state)

    (_, state), gradient = regimes.run(regime, 4, make, WEIGHTS, ROWS)
    u = np.float32([1, 0])
    for _ in range(microbatches):
        u = WEIGHTS @ (WEIGHTS.T @ u)
        u = u / np.linalg.norm(u)
    np.testing.assert_allclose(state["u"], u, rtol=1e-5)
    assert int(state["steps"]) == microbatches
    assert gradient.shape == (2, 2)
    if microbatches == 1:
        sigma = np.linalg.norm(WEIGHTS.T @ u)
        np.testing.assert_allclose(gradient, np.full((2, 2), ROWS.mean() / sigma), rtol=1e-5)


@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_state_of_parameters_and_rows_is_still_refused(microbatches):
    def make(axis_name):
        def loss_fn(w, rows, *, state):
            return weighted_sum(w * rows), w * jnp.mean(rows)

        gradient = value_and_grad(
            loss_fn, axis_name=axis_name, microbatches=microbatches, has_state=True
        )
        return lambda w, rows: gradient(w, rows, state=jnp.float32(0))

    with pytest.raises(ValueError, match="may vary over 'data' at state"):
        regimes.run("shard_map", 4, make, jnp.float32(1), ROWS)


def test_a_state_without_has_state_is_refused():
    with pytest.raises(TypeError, match="value_and_grad: state must be left out unless has_state"):
        value_and_grad(lambda w, x: weighted_sum(w * x))(1.0, jnp.ones(2), state=jnp.ones(2))
