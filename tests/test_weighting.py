"""The gradient of the global weighted mean, in every regime, beside the wrong ones."""

import json
from fractions import Fraction
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import regimes
from jax import lax

from jax_ddp_weighting import WeightedSum, rank_share, value_and_grad, weighted_sum

CASES = json.loads((Path(__file__).parent / "data" / "denominators.json").read_text())["cases"]


def linear_loss(w, batch):
    """Each row's loss is w times its value, so that its gradient is its value."""
    values, weights = batch
    values = jnp.where(weights > 0, values, 0.0)
    return weighted_sum(w * values, weights)


def ours(microbatches):
    return lambda axis_name: value_and_grad(
        linear_loss, axis_name=axis_name, microbatches=microbatches
    )


def mean_of_local_means(microbatches):
    """The usual bug, as a control: every rank and microbatch has one vote."""

    def make(axis_name):
        def fn(w, batch):
            split = jax.tree.map(lambda x: x.reshape(-1, microbatches), batch)

            def loss(w):
                means = [
                    linear_loss(w, jax.tree.map(lambda x, k=k: x[:, k], split)).mean()
                    for k in range(microbatches)
                ]
                local = sum(means) / microbatches
                return local if axis_name is None else lax.pmean(local, axis_name)

            value, gradient = jax.value_and_grad(loss)(w)
            if axis_name is not None:
                gradient = lax.pmean(gradient, axis_name)
            return WeightedSum(value, 1), gradient

        return fn

    return make


def case_in(regime, case, make):
    ranks = case["ranks"]
    with jax.enable_x64(True):
        values, weights = regimes.padded(ranks)
        return regimes.as_float(
            regimes.run(
                regime, len(ranks), make(len(ranks[0])), jnp.float64(1.0), (values, weights)
            )
        )


@pytest.mark.parametrize("regime", regimes.REGIMES)
@pytest.mark.parametrize("name", CASES)
def test_recorded_denominators_are_right_in_every_regime(name, regime):
    right = float(Fraction(CASES[name]["values"]["right"]))
    loss, gradient = case_in(regime, CASES[name], ours)
    assert gradient == pytest.approx(right, rel=1e-12, abs=1e-15)
    assert loss.value == pytest.approx(right, rel=1e-12, abs=1e-15)
    assert loss.terms["loss"].weight == float(Fraction(CASES[name]["values"]["N"]))


@pytest.mark.parametrize("regime", ["shard_map", "shard_map_unchecked", "pmap", "vmap"])
def test_the_mean_of_local_means_fails_the_same_check(regime):
    case = CASES["probe W=2 GA=3 (separates xW from xGA)"]
    _, gradient = case_in(regime, case, mean_of_local_means)
    assert gradient != pytest.approx(float(Fraction(case["values"]["right"])), rel=1e-2)


@pytest.mark.parametrize("regime", regimes.MAPPED)
def test_rank_share_under_the_users_own_pmean(regime):
    def make(axis_name):
        def fn(w, batch):
            share, gradient = jax.value_and_grad(
                lambda w: rank_share(linear_loss(w, batch), axis_name)
            )(w)
            return lax.pmean(share, axis_name), lax.pmean(gradient, axis_name)

        return fn

    case = CASES["2 ranks 1|3"]
    assert case_in(regime, case, lambda _: make) == pytest.approx((2.5, 2.5), rel=1e-12)


def test_the_textbook_share_is_twice_too_large_in_default_shard_map():
    def make(axis_name):
        def fn(w, batch):
            def share(w):
                local = linear_loss(w, batch)
                return local.total * 2 / lax.psum(local.weight, axis_name)

            return lax.pmean(jax.grad(share)(w), axis_name)

        return fn

    case = CASES["2 ranks 1|3"]
    assert case_in("shard_map", case, lambda _: make) == pytest.approx(5.0, rel=1e-12)
    assert case_in("pmap", case, lambda _: make) == pytest.approx(2.5, rel=1e-12)


def test_a_padded_row_of_nan_loss_leaves_value_and_gradient_alone():
    losses = jnp.array([2.0, jnp.nan, jnp.inf])

    def mean(losses):
        return weighted_sum(losses, jnp.array([1, 0, 0])).mean()

    value, gradient = jax.value_and_grad(mean)(losses)
    assert value == 2.0
    np.testing.assert_array_equal(gradient, [1.0, 0.0, 0.0])
