"""Weights that cannot count, in programs that cannot raise: said, and nothing half-counted."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import regimes

from jax_ddp_weighting import Batch, WeightedSum, rank_share, value_and_grad, weighted_sum

ENGINES = ["jit", "shard_map", "shard_map_unchecked", "pmap", "vmap"]
VALUES = np.arange(1, 13, dtype=np.float32)
GOOD = np.ones(12, np.float32)


def with_bad(*pairs, dtype=np.float32):
    weights = GOOD.astype(dtype)
    for row, weight in pairs:
        weights[row] = weight
    return weights


def of_batch(w, batch):
    return weighted_sum(w * batch.data, batch.weights)


def of_pair(w, batch):
    return weighted_sum(w * batch[0], batch[1])


def by_hand(w, batch):
    return WeightedSum(jnp.sum(w * batch[0] * batch[1]), jnp.sum(batch[1]))


def found(regime, loss_fn, rows, ranks=4, microbatches=3):
    def make(axis_name):
        return value_and_grad(loss_fn, axis_name=axis_name, microbatches=microbatches)

    return regimes.run(regime, ranks, make, jnp.float32(2), rows)


def nothing_counts(loss, gradient):
    assert np.isnan(float(loss.value))
    assert float(gradient) == 0
    assert (float(loss.terms["loss"].weight), float(loss.terms["loss"].total)) == (0, 0)
    return True


BAD = {
    "one below 0": [(5, -3.0)],
    "NaN": [(0, np.nan)],
    "infinity": [(7, np.inf)],
    "three on one rank": [(0, -1.0), (1, -2.0), (2, np.nan)],
    "two that cancel": [(0, -1.0), (11, 3.0)],
    "so many below 0 that all is": [(row, -50.0) for row in range(6)],
}


@pytest.mark.parametrize("regime", ENGINES)
@pytest.mark.parametrize("case", BAD)
def test_bad_rows_of_a_batch_are_counted_and_nothing_else_is(regime, case):
    weights = with_bad(*BAD[case])
    loss, gradient = found(regime, of_batch, Batch(VALUES, np.arange(12), weights))
    bad = sum(not (0 <= weight < np.inf) for weight in weights)
    assert int(loss.bad_weights) == bad
    assert nothing_counts(loss, gradient)


@pytest.mark.parametrize("regime", ENGINES)
def test_good_rows_are_not(regime):
    loss, gradient = found(regime, of_batch, Batch(VALUES, np.arange(12), GOOD))
    assert (int(loss.bad_weights), float(gradient), float(loss.value)) == (0, 6.5, 13.0)


@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 1), (1, 3), (2, 2), (4, 1), (4, 3)])
def test_one_bad_row_without_a_batch_is_one_bad_term(ranks, microbatches):
    rows = (VALUES, with_bad((4, -1.0)))
    loss, gradient = found("shard_map", of_pair, rows, ranks, microbatches)
    assert int(loss.bad_weights) == 1
    assert nothing_counts(loss, gradient)


@pytest.mark.parametrize("weight", [np.nan, np.inf, -40.0])
def test_a_bad_sum_by_hand_is_one_too(weight):
    rows = (VALUES, with_bad((4, weight)))
    loss, gradient = found("shard_map", by_hand, rows)
    assert int(loss.bad_weights) == 1
    assert nothing_counts(loss, gradient)


def test_a_negative_weight_that_is_only_added_up_would_be_half_counted():
    rows = (VALUES, with_bad((4, -1.0)))
    assert float(by_hand(2.0, rows).mean()) == pytest.approx((2 * 78 - 2 * 10) / 10)


@pytest.mark.parametrize("dtype", [np.int32, np.int8])
def test_integers_below_0_are_bad(dtype):
    weights = with_bad((4, -1), dtype=dtype)
    loss, gradient = found("shard_map", of_batch, Batch(VALUES, np.arange(12), weights))
    assert int(loss.bad_weights) == 1
    assert nothing_counts(loss, gradient)


def test_a_bad_metric_makes_the_step_bad_too():
    def loss_fn(w, batch):
        return {"loss": weighted_sum(w * batch[0]), "m": weighted_sum(batch[0], batch[1])}

    gradient = value_and_grad(loss_fn, coefficients={"loss": 1.0, "m": 0})
    loss, slope = gradient(jnp.float32(1), (VALUES, with_bad((1, -1.0))))
    assert int(loss.bad_weights) == 1
    assert float(slope) == 0


def test_sums_by_hand_are_nan_where_a_weight_is_bad():
    bad = weighted_sum(VALUES, with_bad((1, -1.0)))
    assert np.isnan(float(bad.mean()))
    assert np.isnan(float((bad + weighted_sum(VALUES, GOOD)).mean()))
    integers = weighted_sum(VALUES, with_bad((1, -1), dtype=np.int32))
    assert int(integers.weight) < 0
    assert np.isnan(float((integers + weighted_sum(VALUES)).mean()))
    met = jax.vmap(lambda w: weighted_sum(VALUES, w).psum("data").mean(), axis_name="data")(
        jnp.stack([GOOD, with_bad((0, -1.0))])
    )
    assert np.isnan(met).all()
    shares = jax.vmap(lambda w: rank_share(weighted_sum(VALUES, w), "data"), axis_name="data")(
        jnp.stack([GOOD, with_bad((0, -1.0))])
    )
    assert np.isnan(shares).all()


@pytest.mark.parametrize("microbatches", [1, 2])
def test_weights_whose_sum_is_too_large_to_divide_by_are_said(microbatches):
    def loss_fn(w, batch):
        x, weights = batch
        return weighted_sum(w * x, weights)

    with jax.enable_x64(False):
        step = jax.jit(value_and_grad(loss_fn, microbatches=microbatches))
        for weight in (3e38, 4e37):  # the sum is infinite; and 1 over it is below the least normal
            loss, gradient = step(1.0, (jnp.ones(4), jnp.full(4, weight)))
            assert int(loss.bad_weights) > 0
            assert np.isnan(loss.value)
            assert float(gradient) == 0
        loss, gradient = step(1.0, (jnp.ones(4), jnp.full(4, 2e37)))
    assert int(loss.bad_weights) == 0
    np.testing.assert_allclose(gradient, 1, rtol=1e-6)
