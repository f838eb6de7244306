"""Corners of the gradient in which one line of it shows: each fails when that line is taken out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import regimes
from jax import lax

from jax_ddp_weighting import (
    Batch,
    WeightedSum,
    data_mesh,
    make_train_step,
    rank_share,
    valid_labels,
    value_and_grad,
    weighted_sum,
)
from jax_ddp_weighting.weighting.sums import divide

VALUES = np.array([1.0, 3.0, 3.0, 3.0])
WEIGHTS = np.array([1, 1, 1, 0])  # right: 7 / 3


def test_a_division_by_no_weight_has_gradient_0_and_not_nan():
    assert jax.value_and_grad(lambda w: divide(w * 3.0, 0))(2.0) == (0.0, 0.0)
    assert jax.grad(lambda w: divide(w * 3.0, 0.0 * w))(2.0) == 0.0
    assert jax.grad(lambda w: WeightedSum(jnp.log(w), jnp.int32(0)).mean())(1.0) == 0.0


def test_no_gradient_flows_into_a_weight_made_by_hand():
    def mean(w):
        return WeightedSum(3.0 * w, 2.0 * w).mean()  # 3 / 2 whatever w is, were it to flow

    assert jax.grad(mean)(2.0) == pytest.approx(3 / 4)

    def loss_fn(w, batch):
        return WeightedSum(jnp.sum(w * batch), jnp.sum(w * jnp.ones(2)))

    _, gradient = value_and_grad(loss_fn)(2.0, jnp.array([1.0, 5.0]))
    assert float(gradient) == pytest.approx(6 / 4)


def test_no_gradient_flows_into_the_weights_of_a_sum():
    def mean(w):
        return weighted_sum(jnp.array([1.0, 5.0]), jnp.stack([w, 2 * w])).total

    assert jax.grad(mean)(2.0) == 0.0


@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_metric_that_is_nan_stays_out_of_the_value_and_the_gradient(microbatches):
    def loss_fn(w, batch):
        values, weights = batch
        return {
            "loss": weighted_sum(w * values, weights),
            "log": weighted_sum(jnp.log(-jnp.abs(w * values)), weights),
        }

    fn = value_and_grad(loss_fn, microbatches=microbatches, coefficients={"loss": 1.0, "log": 0.0})
    loss, gradient = fn(jnp.float32(2.0), (VALUES, WEIGHTS))
    assert float(loss.value) == pytest.approx(14 / 3)
    assert float(gradient) == pytest.approx(7 / 3)
    assert np.isnan(loss.terms["log"].total)


def test_bfloat16_gradients_of_many_microbatches_add_up():
    def loss_fn(w, batch):
        return weighted_sum(w * batch, None)

    rows = jnp.ones(512, jnp.float32)
    _, gradient = value_and_grad(loss_fn, microbatches=512)(jnp.bfloat16(1.0), rows)
    assert gradient.dtype == jnp.bfloat16
    assert float(gradient) == pytest.approx(1.0, rel=0.01)  # in bfloat16 it stops at a half


def test_each_microbatch_draws_noise_of_its_own():
    def loss_fn(w, batch, rng):
        return weighted_sum(w * batch + jax.random.normal(rng, ()), None), rng

    fn = value_and_grad(loss_fn, microbatches=2, has_aux=True)
    (_, aux), _ = fn(jnp.float32(1.0), jnp.ones(4), jax.random.key(0))
    drawn = jax.random.key_data(aux)
    assert not np.array_equal(drawn[0], drawn[1])


def summed_everywhere(axis_name):
    """A loss whose sum is the same on every rank before anything is reduced."""

    def loss_fn(w, batch):
        values, weights = batch
        local = weighted_sum(w * values, weights)
        return local if axis_name is None else local.psum(axis_name)

    return loss_fn


@pytest.mark.parametrize("regime", regimes.REGIMES)
@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_sum_that_is_the_same_on_every_rank_is_pulled_back_from_every_rank(regime, microbatches):
    def make(axis_name):
        return value_and_grad(
            summed_everywhere(axis_name), axis_name=axis_name, microbatches=microbatches
        )

    loss, gradient = regimes.run(regime, 2, make, jnp.float32(2.0), (VALUES, WEIGHTS))
    assert float(loss.value) == pytest.approx(14 / 3)
    assert float(gradient) == pytest.approx(7 / 3)


@pytest.mark.parametrize("regime", regimes.MAPPED)
def test_the_share_of_such_a_sum_is_right_under_ones_own_pmean(regime):
    def make(axis_name):
        def fn(w, batch):
            def share(w):
                return rank_share(summed_everywhere(axis_name)(w, batch), axis_name)

            value, gradient = jax.value_and_grad(share)(w)
            return lax.pmean(value, axis_name), lax.pmean(gradient, axis_name)

        return fn

    found = regimes.run(regime, 2, make, jnp.float32(2.0), (VALUES, WEIGHTS))
    assert [float(each) for each in found] == pytest.approx([14 / 3, 7 / 3])


def test_a_coefficient_scales_the_value_and_the_gradient():
    def loss_fn(w, batch):
        values, weights = batch
        return {"a": weighted_sum(w * values, weights), "b": weighted_sum(w + values, weights)}

    fn = value_and_grad(loss_fn, coefficients={"a": 3.0, "b": 0.5})
    loss, gradient = fn(jnp.float32(2.0), (VALUES, WEIGHTS))
    assert float(loss.value) == pytest.approx(3 * 14 / 3 + 0.5 * (2 + 7 / 3))
    assert float(gradient) == pytest.approx(3 * 7 / 3 + 0.5)


WIDE = np.array([1, 2**32 + 1])
"""More than 32 bits: JAX would take 1 for the second while x64 is off, without a word."""


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: weighted_sum(np.ones(2), WIDE), r"^weighted_sum: weights must be of at most 32"),
        (lambda: weighted_sum(WIDE, np.ones(2)), r"^weighted_sum: losses must be of at most 32"),
        (lambda: weighted_sum(WIDE), r"^weighted_sum: losses must be of at most 32"),
        (lambda: valid_labels(WIDE), r"^valid_labels: labels must be of at most 32"),
        (
            lambda: weighted_sum(np.ones(2), np.array([1e-60, 1])),
            r"^weighted_sum: weights must be above float32's least .* got 1e-60",
        ),
        (
            lambda: weighted_sum(jnp.ones(2), [1e-60, 1.0]),
            r"^weighted_sum: weights must be above float32's least .* got 1e-60",
        ),
        (lambda: weighted_sum([1e300, 1.0]), r"^weighted_sum: losses must be within float32"),
        (lambda: valid_labels([2**40, 1]), r"^valid_labels: labels must be of at most 32"),
        (
            lambda: value_and_grad(of_pair)(1.0, {"x": np.ones(2), "w": WIDE}),
            r"^value_and_grad: batch\['w'\] must be of at most 32",
        ),
        (
            lambda: value_and_grad(of_batch)(1.0, Batch(np.ones(2), np.arange(2), WIDE)),
            r"^value_and_grad: weights must be of at most 32",
        ),
    ],
)
def test_numbers_on_the_host_that_jax_would_cut_are_refused(call, match):
    with jax.enable_x64(False), pytest.raises(ValueError, match=match):
        call()


def of_pair(w, batch):
    return weighted_sum(w * batch["x"], batch["w"])


def of_batch(w, batch):
    return weighted_sum(w * batch.data, batch.weights)


@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.int4, jnp.uint4])
def test_the_narrowest_dtypes_are_widened(dtype):
    found = weighted_sum(jnp.full(300, 2, dtype), jnp.full(300, 3, dtype))
    assert (float(found.total), float(found.weight), float(found.mean())) == (1800, 900, 2)
    added = WeightedSum(jnp.ones((), dtype), jnp.ones((), dtype)) + found
    assert (float(added.total), float(added.weight)) == (1801, 901)


@pytest.mark.parametrize(
    ("coefficients", "match"),
    [
        (["a"], "coefficients must be a dict of a number for each term, got list"),
        ({"a": "1"}, "coefficients must be one number for each term, got '1' for 'a'"),
        ({"a": None}, "coefficients must be one number for each term, got None for 'a'"),
        ({"a": 1j}, "coefficients must be one number for each term, got 1j for 'a'"),
        ({"a": np.ones(2)}, "coefficients must be one number for each term, got array"),
    ],
)
def test_coefficients_that_are_none_are_named(coefficients, match):
    makers = {
        "value_and_grad": lambda: value_and_grad(of_pair, coefficients=coefficients),
        "make_train_step": lambda: make_train_step(
            of_pair, data_mesh(1), coefficients=coefficients
        ),
    }
    for name, make in makers.items():
        with pytest.raises(TypeError, match=f"^{name}: {match}"):
            make()


def test_complex_weights_are_refused():
    with pytest.raises(TypeError, match=r"weighted_sum: weights must be real numbers, got complex"):
        weighted_sum(jnp.ones(2), jnp.array([1j, 1]))
