"""Counts that do not overflow, and narrow sums that do not wrap round, wherever they are added."""

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import regimes
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from jax_ddp_weighting import (
    Batch,
    WeightedSum,
    data_mesh,
    evaluate,
    rank_share,
    value_and_grad,
    weighted_sum,
)
from jax_ddp_weighting.weighting import counts

ENGINES = ["jit", "shard_map", "shard_map_unchecked", "pmap", "vmap"]
PIXELS = 2**27  # of one row


def pixels_of_rows(w, rows):
    """What `weighted_sum(losses)` of `[rows, PIXELS]` losses comes to, without holding them."""
    return WeightedSum(PIXELS * jnp.sum(w * rows), jnp.int32(rows.shape[0] * PIXELS))


def mean_gradient(regime, ranks, microbatches, rows, loss_fn=pixels_of_rows):
    def make(axis_name):
        return value_and_grad(loss_fn, axis_name=axis_name, microbatches=microbatches)

    return regimes.run(regime, ranks, make, jnp.float32(2), np.ones(rows, np.float32))


@pytest.mark.parametrize("regime", ENGINES)
@pytest.mark.parametrize("rows", [15, 16, 24, 32])  # 24 and 32 pass 2**31 and 2**32
def test_a_step_of_many_pixels_has_its_gradient(regime, rows):
    microbatches = 4 if rows % 6 else 6
    rows = rows + -rows % (4 * microbatches)
    loss, gradient = mean_gradient(regime, 4, microbatches, rows)
    assert (float(loss.value), float(gradient), int(loss.bad_weights)) == (2.0, 1.0, 0)
    term = loss.terms["loss"]
    assert (term.weight.dtype, int(term.weight)) == (jnp.int32, min(rows * PIXELS, 2**31 - 1))
    assert float(term.whole().weight) == rows * PIXELS
    assert float(term.mean()) == 2.0


def test_adding_int32_by_hand_fails_the_same_check():
    weights = np.full(24, PIXELS, np.int32)
    assert int(jnp.sum(jnp.asarray(weights))) == 24 * PIXELS - 2**32  # below 0


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("microbatches", [1, 2, 3])
def test_counts_that_fit_stay_exact_integers(ranks, microbatches):
    # 2**24 + 1 is where float32 stops to count
    def loss_fn(w, rows):
        return weighted_sum(w * rows[0], rows[1])

    weights = np.full(24, 2**20 + 1, np.int32)

    def make(axis_name):
        return value_and_grad(loss_fn, axis_name=axis_name, microbatches=microbatches)

    values = np.ones(24, np.float32)
    loss, gradient = regimes.run("shard_map", ranks, make, jnp.float32(2), (values, weights))
    weight = loss.terms["loss"].weight
    assert (weight.dtype, int(weight)) == (jnp.int32, 24 * (2**20 + 1))
    assert float(gradient) == pytest.approx(1, rel=1e-6)


def test_int64_counts_under_x64():
    with jax.enable_x64(True):
        loss, gradient = mean_gradient("shard_map", 4, 6, 24)
    weight = loss.terms["loss"].weight
    assert (weight.dtype, int(weight)) == (jnp.int64, 24 * PIXELS)
    assert (float(loss.value), float(gradient)) == (2.0, 1.0)


@pytest.mark.parametrize("microbatches", [1, 3])
def test_a_metric_in_integers_is_counted_so_too(microbatches):
    def loss_fn(w, rows):
        hits = WeightedSum(jnp.int32(2**30) * rows.shape[0], jnp.int32(2**30) * rows.shape[0])
        return {"loss": weighted_sum(w * rows), "hits": hits}

    def make(axis_name):
        return value_and_grad(
            loss_fn,
            axis_name=axis_name,
            microbatches=microbatches,
            coefficients={"loss": 1.0, "hits": 0},
        )

    rows = np.ones(4 * microbatches, np.float32)
    loss, _ = regimes.run("shard_map", 4, make, jnp.float32(2), rows)
    hits = loss.terms["hits"]
    assert float(hits.mean()) == 1.0
    assert float(hits.whole().total) == 4 * microbatches * 2**30


# --- sums made by hand ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "weight"),
    [("int8", 100), ("uint8", 200), ("int16", 30_000), ("uint16", 60_000), ("float16", 20_000)],
)
@pytest.mark.parametrize("regime", ENGINES)
def test_narrow_weights_are_widened_at_the_door(regime, dtype, weight):
    def loss_fn(w, rows):
        return WeightedSum(jnp.sum(w * rows) * weight, jnp.asarray(weight, dtype))

    # microbatches of one row per rank; under jit there is one rank
    ranks = 1 if regime == "jit" else 4
    rows = ranks * 2

    def make(axis_name):
        return value_and_grad(loss_fn, axis_name=axis_name, microbatches=2)

    loss, gradient = regimes.run(regime, ranks, make, jnp.float32(3), np.ones(rows, np.float32))
    assert (float(loss.value), float(gradient)) == (3.0, 1.0)
    assert float(loss.terms["loss"].weight) == rows * weight


def test_narrow_totals_are_widened_at_the_door():
    def loss_fn(w, rows):
        return WeightedSum(jnp.sum(w * rows).astype(jnp.bfloat16), jnp.bfloat16(1))

    loss, gradient = value_and_grad(loss_fn, microbatches=512)(jnp.float32(1), jnp.ones(512))
    assert (float(loss.value), float(gradient)) == (1.0, 1.0)
    assert float(loss.terms["loss"].weight) == 512  # bfloat16 stops at 256
    assert float(jnp.bfloat16(256) + jnp.bfloat16(1)) == 256


@pytest.mark.parametrize("dtype", ["int8", "float16", "bfloat16"])
def test_narrow_sums_add_and_meet_without_loss(dtype):
    weight = {"int8": 100, "float16": 60_000, "bfloat16": 256}[dtype]
    one = WeightedSum(jnp.asarray(weight, dtype), jnp.asarray(weight, dtype))
    whole = one + one + one + one
    assert (float(whole.total), float(whole.weight)) == (4 * weight, 4 * weight)
    assert float(sum([one] * 4).mean()) == 1.0
    ranks = jax.tree.map(lambda x: jnp.stack([x] * 4), one)
    met = jax.vmap(lambda each: each.psum("data"), axis_name="data")(ranks)
    assert (float(met.total[0]), float(met.weight[0])) == (4 * weight, 4 * weight)
    shares = jax.vmap(lambda each: rank_share(each, "data"), axis_name="data")(ranks)
    assert float(jnp.mean(shares)) == 1.0


def test_narrow_metrics_are_summed_wide_by_evaluate():
    def metric_fn(batch):
        return WeightedSum(jnp.asarray(100, jnp.int8), jnp.asarray(100, jnp.int8))

    found = evaluate(metric_fn, [Batch.of(np.ones(1))] * 4, data_mesh(1))
    assert (found["loss"], found.sums["loss"].weight) == (1.0, 400)


def test_sums_on_the_host_keep_all_their_digits():
    found = WeightedSum(np.float64(2**53 - 1), np.int64(2**53 - 1)) + WeightedSum(0.0, 1)
    assert (found.total, found.weight) == (2.0**53 - 1, 2**53)
    narrow = WeightedSum(np.int8(100), np.int8(100)) + WeightedSum(np.int8(100), np.int8(100))
    assert (narrow.total, narrow.weight) == (200, 200)


@pytest.mark.parametrize(
    "add",
    [
        lambda one: one + one,
        lambda one: jax.tree.map(
            lambda x: x[0],
            jax.vmap(lambda each: each.psum("data"), axis_name="data")(
                jax.tree.map(lambda x: jnp.stack([x, x]), one)
            ),
        ),
    ],
)
def test_a_sum_by_hand_that_does_not_fit_says_so(add):
    fits = add(WeightedSum(jnp.float32(2), jnp.int32(2**30 - 1)))
    assert int(fits.weight) == 2**31 - 2
    found = add(WeightedSum(jnp.float32(2), jnp.int32(2**30)))
    assert int(found.weight) < 0
    assert np.isnan(float(found.mean()))
    assert int(add(found).weight) < 0  # and stays so


@pytest.mark.parametrize("rows", [2, 24, 2**17])
def test_weights_of_rows_that_pass_int32_are_said_to(rows):
    # 2**17 rows of 2**29 are 2**46, which is 0 in 32 bits
    weights = jnp.full(rows, 2**31 - 1 if rows == 2 else 2**29 if rows == 2**17 else PIXELS)
    found = weighted_sum(jnp.ones(rows), weights)
    assert int(found.weight) < 0
    loss, gradient = value_and_grad(lambda w, x: weighted_sum(w * x, weights))(
        jnp.float32(1), jnp.ones(rows)
    )
    assert (int(loss.bad_weights), float(gradient)) == (1, 0.0)


def test_pixels_beyond_int32_are_counted_from_the_shape():
    losses = jax.ShapeDtypeStruct((24, PIXELS), jnp.float32)
    found = jax.eval_shape(weighted_sum, losses)  # nothing is allocated
    assert (found.weight.dtype, found.weight.shape) == (jnp.float32, ())
    assert jax.eval_shape(weighted_sum, jax.ShapeDtypeStruct((9,), jnp.float32)).weight.dtype == (
        jnp.int32
    )


# --- the halves -----------------------------------------------------------------------------------

WHOLE = st.integers(0, 2**31 - 1) | st.sampled_from([0, 1, 2**16 - 1, 2**16, 2**30, 2**31 - 1])


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(WHOLE, min_size=1, max_size=40))
def test_drawn_weights_are_summed_exactly(weights):
    total, bad = counts.sum_weights(jnp.asarray(np.array(weights, np.int32)))
    assert int(bad) == 0
    assert int(total.high) * 2**16 + int(total.low) == sum(weights)
    assert 0 <= int(total.low) < 2**16
    assert bool(total.fits()) == (sum(weights) < 2**31)
    assert Fraction(float(total.as_float())) == Fraction(float(np.float32(sum(weights))))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=8))
def test_drawn_integers_add_exactly_in_halves(values):
    halves = [counts.as_sum(jnp.int32(value)) for value in values]
    total = jax.tree.map(lambda *leaves: sum(leaves), *halves).carried()
    assert int(total.high) * 2**16 + int(total.low) == sum(values)
    reported, rest = counts.to_report(total)
    if -(2**31) <= sum(values) < 2**31:
        assert (int(reported), float(rest)) == (sum(values), 0)
    else:
        assert float(reported) + float(rest) == pytest.approx(sum(values), rel=1e-6)


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int8", "int16", "int32", "float32"])
def test_what_the_rows_weigh_is_one_reduction(dtype):
    weights = jnp.ones(40, dtype)
    text = str(jax.make_jaxpr(counts.sum_weights)(weights))
    assert text.count("reduce_sum") == 1
    total, _ = counts.sum_weights(weights)
    assert float(counts.to_divisor(total)) == 40


def all_reduces(weights_dtype):
    def loss_fn(w, batch):
        return weighted_sum(w * batch.data, batch.weights)

    def fn(w, batch):
        return value_and_grad(loss_fn, axis_name="data", microbatches=2)(w, batch)

    batch = Batch.of(np.ones(2, np.float32), weights=np.ones(2, weights_dtype))
    text = str(jax.make_jaxpr(fn, axis_env=[("data", 2)])(jnp.float32(1), batch))
    return text.count(" psum")


@pytest.mark.parametrize("dtype", ["int32", "float32"])
def test_counts_and_bad_weights_take_no_all_reduce_of_their_own(dtype):
    # one for the weights, one for the totals, one for the gradient
    assert all_reduces(dtype) == 3


def test_that_check_can_fail():
    def fn(x):
        return lax.psum(x, "data") + lax.psum(2 * x, "data")

    assert str(jax.make_jaxpr(fn, axis_env=[("data", 2)])(1.0)).count(" psum") == 2
