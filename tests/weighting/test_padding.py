"""Padding by request, and what a row of weight 0 can and cannot spoil."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import regimes

from jax_ddp_weighting import Batch, WeightedSum, rank_share, value_and_grad, weighted_sum

VALUES = np.arange(1, 21.0)  # five rows on each of four ranks; three microbatches do not divide
WEIGHTS = np.arange(20) % 4 * 0.5


def loss_fn(w, batch):
    return weighted_sum(w * batch.data, batch.weights)


def in_regime(regime, prepare):
    def make(axis_name):
        def fn(w, rows):
            gradient_of = value_and_grad(loss_fn, axis_name=axis_name, microbatches=3)
            return gradient_of(w, prepare(rows))[1]

        return fn

    with jax.enable_x64(True):
        batch = jax.tree.map(jnp.asarray, Batch.of(VALUES, weights=WEIGHTS))
        return float(regimes.run(regime, 4, make, jnp.float64(1), batch))


@pytest.mark.parametrize("regime", ["jit", "shard_map", "shard_map_unchecked", "pmap", "vmap"])
def test_rows_that_do_not_divide_are_padded_on_request(regime):
    right = np.average(VALUES, weights=WEIGHTS)
    assert in_regime(regime, lambda rows: rows.padded(3)) == pytest.approx(right, rel=1e-12)


def test_padding_that_counted_would_be_seen():
    def counting(rows):
        filled = rows.padded(3)
        return Batch.of(filled.data, weights=jnp.where(filled.weights == 0, 1.0, filled.weights))

    right = np.average(VALUES, weights=WEIGHTS)
    assert in_regime("shard_map", counting) != pytest.approx(right, rel=1e-2)


@pytest.mark.parametrize("xp", [np, jnp])
def test_padding_repeats_the_first_row_at_weight_0(xp):
    batch = Batch.of({"x": xp.arange(6.0).reshape(3, 2)}, weights=xp.array([2, 1, 1]))
    filled = batch.padded(4)
    assert filled.data["x"][-1].tolist() == [0.0, 1.0]
    assert (filled.ids.tolist(), filled.weights.tolist()) == ([0, 1, 2, 0], [2, 1, 1, 0])
    assert filled.weights.dtype == batch.weights.dtype
    assert isinstance(filled.weights, type(batch.weights))
    assert batch.padded(3) is batch


def test_a_multiple_below_one_is_refused():
    with pytest.raises(ValueError, match=r"Batch.padded: multiple must be at least 1, got 0"):
        Batch.of(VALUES).padded(0)


def test_weights_made_of_parameters_get_no_gradient():
    x = jnp.array([1.0, 3.0])

    def learned(w, batch):  # by hand, so that nothing but the library's division stops them
        return WeightedSum(jnp.sum(w["a"] * batch), 2.0 * w["b"])

    params = {"a": jnp.float32(1), "b": jnp.float32(1)}
    _, gradient = value_and_grad(learned)(params, x)
    assert gradient == {"a": 2.0, "b": 0.0}
    assert jax.grad(lambda w: learned(w, x).mean())(params) == {"a": 2.0, "b": 0.0}
    shares = jax.vmap(
        jax.grad(lambda w, x: rank_share(learned(w, x), "data")), (None, 0), axis_name="data"
    )(params, x[:, None])
    assert (float(shares["a"].mean()), shares["b"].tolist()) == (1.0, [0.0, 0.0])
    undivided = jax.grad(lambda w: learned(w, x).total / learned(w, x).weight)(params)
    assert undivided["b"] == -2.0  # what is stopped


ROWS = (jnp.array([2.0, jnp.nan]), jnp.array([1, 0]))


def test_nan_data_under_weight_0_spoil_the_gradient_and_not_the_value():
    def squares(w, batch):
        x, weights = batch
        return weighted_sum((w * x) ** 2, weights)

    loss, gradient = value_and_grad(squares)(1.0, ROWS)
    assert loss.value == 4.0
    assert jnp.isnan(gradient)  # the limit: 0 times NaN, upstream of the sum


def test_the_documented_remedy_keeps_the_gradient_too():
    def squares(w, batch):
        x, weights = batch
        x = jnp.where(weights > 0, x, 0)
        return weighted_sum((w * x) ** 2, weights)

    loss, gradient = value_and_grad(squares)(1.0, ROWS)
    assert (loss.value, gradient) == (4.0, 8.0)
