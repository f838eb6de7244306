"""What a model keeps beside its parameters: threaded in order, the same on every rank."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import regimes

from jax_ddp_weighting import value_and_grad, weighted_sum

VALUES = np.arange(8.0, dtype=np.float32)
WEIGHTS = np.int32([1, 1, 0, 1, 2, 1, 1, 0])


def make(microbatches=2, **changed):
    """A running average of what is seen, which the loss reads before it is updated."""

    def fn(axis_name):
        def loss_fn(w, batch, *, state):
            values, weights = batch
            here = weighted_sum(values, weights)
            mean = (here if axis_name is None else here.psum(axis_name)).mean()
            losses = w * values + state["mean"]
            return weighted_sum(losses, weights), {"mean": 0.5 * state["mean"] + 0.5 * mean}

        gradient = value_and_grad(
            changed.get("loss_fn", loss_fn),
            axis_name=axis_name,
            microbatches=microbatches,
            has_state=True,
        )
        return lambda w, batch: gradient(w, batch, state={"mean": jnp.float32(1.0)})

    return fn


@pytest.mark.parametrize("regime", ["jit", "shard_map", "shard_map_unchecked", "pmap", "vmap"])
def test_a_state_passes_through_the_microbatches_in_order(regime):
    (loss, state), gradient = regimes.run(regime, 2, make(), jnp.float32(2.0), (VALUES, WEIGHTS))
    mean, totals = 1.0, 0.0
    for k in range(2):  # microbatch k holds each rank's rows k, k + 2
        values, weights = VALUES[k::2], WEIGHTS[k::2]
        totals += np.sum(weights * (2 * values + mean))
        mean = 0.5 * mean + 0.5 * np.average(values, weights=weights)
    assert float(state["mean"]) == pytest.approx(mean, rel=1e-6)
    assert float(loss.value) == pytest.approx(totals / WEIGHTS.sum(), rel=1e-6)
    assert float(gradient) == pytest.approx(np.average(VALUES, weights=WEIGHTS), rel=1e-6)
    backwards = 0.25 + 0.5 * 0.5 * np.average(VALUES[1::2], weights=WEIGHTS[1::2])
    backwards += 0.5 * np.average(VALUES[::2], weights=WEIGHTS[::2])
    assert float(state["mean"]) != pytest.approx(backwards, rel=1e-3)


def test_auxiliary_output_comes_after_the_state():
    def loss_fn(w, batch, rng, *, state):
        return weighted_sum(w * batch), state + 1, batch[0]

    gradient = value_and_grad(loss_fn, microbatches=2, has_state=True, has_aux=True)
    (loss, state, aux), _ = gradient(2.0, jnp.arange(4.0), jax.random.key(0), state=jnp.int32(0))
    assert (float(loss.value), int(state)) == (3.0, 2)
    np.testing.assert_array_equal(aux, [0.0, 1.0])


@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_state_that_would_differ_from_rank_to_rank_is_refused(microbatches):
    def loss_fn(w, batch, *, state):
        return weighted_sum(w * batch[0], batch[1]), {"mean": jnp.mean(batch[0])}

    with pytest.raises(ValueError, match=r"may vary over 'data' at state\['mean'\]. Sum what it"):
        regimes.run(
            "shard_map", 2, make(microbatches, loss_fn=loss_fn), jnp.float32(2), (VALUES, WEIGHTS)
        )


@pytest.mark.parametrize(
    ("returned", "error", "message"),
    [
        (
            lambda s: weighted_sum(jnp.ones(2)),
            TypeError,
            r"\(sums, state\) when has_state=True",
        ),
        (
            lambda s: (weighted_sum(jnp.ones(2)), s, s),
            TypeError,
            r"has_state=True, got a tuple of WeightedSum, float32\[\], float32\[\]",
        ),
        (
            lambda s: (weighted_sum(jnp.ones(2)), (s, s)),
            ValueError,
            "a state of the structure it was given",
        ),
        (
            lambda s: (weighted_sum(jnp.ones(2)), s.astype(jnp.bfloat16)),
            ValueError,
            r"a state of the form it was given, got bfloat16\[\] for float32\[\] at state",
        ),
        (
            lambda s: (weighted_sum(jnp.ones(2)), jnp.stack([s, s])),
            ValueError,
            r"got float32\[2\] for float32\[\] at state",
        ),
    ],
)
def test_states_of_another_form_are_refused(returned, error, message):
    gradient = value_and_grad(lambda w, x, state: returned(state), has_state=True)
    with pytest.raises(error, match=f"value_and_grad: loss_fn must return .*{message}"):
        gradient(1.0, jnp.ones(2), state=jnp.float32(0))


def test_no_gradient_flows_into_the_state_of_the_next_step():
    def loss_fn(w, x, *, state):
        return weighted_sum(w * x + state), w

    (_, state), gradient = value_and_grad(loss_fn, microbatches=2, has_state=True)(
        3.0, jnp.ones(4), state=jnp.float32(0)
    )
    assert (float(state), float(gradient)) == (3.0, 1.0)
