"""The gradient of the global weighted mean, in every regime, beside the wrong ones."""

import json
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import regimes
from jax import lax

from jax_ddp_weighting import WeightedSum, rank_share, value_and_grad, weighted_sum

RECORDED = Path(__file__).parents[1] / "recorded"
CASES = json.loads((RECORDED / "denominators.json").read_text())["cases"]


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


LARGEST = (2, 20, 3)  # ranks, rows, microbatches of the recorded cases


@cache
def ours_in(regime):
    """One compilation for all recorded cases: smaller ones get empty ranks and microbatches."""
    return regimes.prepared(regime, LARGEST[0], ours(LARGEST[2]))


@pytest.mark.parametrize("regime", regimes.REGIMES)
@pytest.mark.parametrize("name", CASES)
def test_recorded_denominators_are_right_in_every_regime(name, regime):
    right = float(Fraction(CASES[name]["values"]["right"]))
    with jax.enable_x64(True):
        batch = regimes.padded(CASES[name]["ranks"], shape=LARGEST)
        loss, gradient = regimes.as_float(ours_in(regime)(jnp.float64(1.0), batch))
    assert gradient == pytest.approx(right, rel=1e-12, abs=1e-15)
    assert loss.value == pytest.approx(right, rel=1e-12, abs=1e-15)
    assert loss.terms["loss"].weight == float(Fraction(CASES[name]["values"]["N"]))


@pytest.mark.parametrize("name", CASES)
def test_recorded_denominators_are_right_without_empty_ranks_too(name):
    right = float(Fraction(CASES[name]["values"]["right"]))
    _, gradient = case_in("shard_map", CASES[name], ours)
    assert gradient == pytest.approx(right, rel=1e-12, abs=1e-15)


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


def test_ten_other_conventions_differ_from_the_right_one_on_the_probe():
    values = CASES["probe W=2 GA=3 (separates xW from xGA)"]["values"]
    right = values["right"]
    others = {
        name: v for name, v in values.items() if isinstance(v, str) and name not in ("N", "S")
    }
    assert sum(value != right for value in others.values()) == len(others) - 1


def test_gradients_keep_the_dtypes_of_parameters():
    def loss_fn(params, x):
        return weighted_sum((x * params["a"]).astype(jnp.float32) * params["b"])

    params = {"a": jnp.bfloat16(2), "b": jnp.float32(3)}
    _, gradients = value_and_grad(loss_fn, microbatches=4)(params, jnp.ones(8))
    assert jax.tree.map(lambda g: g.dtype, gradients) == {"a": jnp.bfloat16, "b": jnp.float32}


def test_small_gradients_add_up_in_bfloat16_parameters():
    # 512 microbatches of 1/512 each: a bfloat16 accumulator stops at a quarter of them
    _, gradient = value_and_grad(lambda w, x: weighted_sum(x * w), microbatches=512)(
        jnp.bfloat16(1), jnp.ones(512, jnp.bfloat16)
    )
    assert float(gradient) == 1.0
    naive = jnp.bfloat16(0)
    for _ in range(512):
        naive = naive + jnp.bfloat16(1 / 512)
    assert float(naive) < 0.6


def test_aux_comes_back_whole_or_stacked_over_microbatches():
    def loss_fn(w, x):
        return weighted_sum(x * w), {"first": x[0]}

    (loss, aux), _ = value_and_grad(loss_fn, has_aux=True)(2.0, jnp.arange(4.0))
    assert (loss.value, aux["first"]) == (3.0, 0.0)
    (loss, aux), _ = value_and_grad(loss_fn, has_aux=True, microbatches=2)(2.0, jnp.arange(4.0))
    assert loss.value == 3.0
    np.testing.assert_array_equal(aux["first"], [0.0, 1.0])


def test_a_dict_of_terms_takes_its_coefficients():
    def loss_fn(w, x):
        return {"a": weighted_sum(w * x), "b": weighted_sum(w * x[:1] * 10)}

    loss, gradient = value_and_grad(loss_fn, coefficients={"a": 1.0, "b": 0.5})(
        2.0, jnp.arange(1, 4.0)
    )
    assert loss.value == 2 * 2 + 0.5 * 20
    assert gradient == 2 + 0.5 * 10
    assert {name: float(term.weight) for name, term in loss.terms.items()} == {"a": 3, "b": 1}


@pytest.mark.parametrize(
    ("loss_fn", "options", "error", "message"),
    [
        (
            lambda w, x: jnp.mean(w * x),
            {},
            TypeError,
            r"must return a WeightedSum or a dict of them, got float32\[\]. Return weighted_sum\(",
        ),
        (lambda w, x: {"a": jnp.mean(x)}, {}, TypeError, r"got a dict of float32\[\]"),
        (
            lambda w, x: {"a": weighted_sum(w * x)},
            {},
            ValueError,
            r"coefficients must name every term of loss_fn, got none for terms \['a'\]. Give each "
            r"term its factor: coefficients=\{'a': 1.0\}.",
        ),
        (
            lambda w, x: {"a": weighted_sum(w * x)},
            {"coefficients": {"a": 1.0, "b": 1.0}},
            ValueError,
            r"got \['a', 'b'\] for terms \['a'\]",
        ),
        (
            lambda w, x: weighted_sum(w * x),
            {"coefficients": {"a": 1.0}},
            ValueError,
            r"got \['a'\] for one unnamed WeightedSum",
        ),
        (
            lambda w, x: WeightedSum(w * x, x),
            {},
            ValueError,
            r"must return scalar sums, got total \(4,\) and weight \(4,\) for term 'loss'",
        ),
        (
            lambda w, x: weighted_sum(w * x),
            {"has_aux": True},
            TypeError,
            r"must return \(sums, aux\) when has_aux=True, got WeightedSum",
        ),
        (
            lambda w, x: weighted_sum(w * x),
            {"microbatches": 3},
            ValueError,
            r"microbatches must divide the rows of every leaf of batch, got 3 microbatches and "
            r"shape \(4,\) at batch",
        ),
        (
            lambda w, x: weighted_sum(w * x),
            {"axis_name": "data"},
            ValueError,
            r"value_and_grad: axis_name must be an axis mapped here, got 'data'",
        ),
    ],
)
def test_loss_functions_that_cannot_be_weighed_are_named(loss_fn, options, error, message):
    with pytest.raises(error, match=message):
        jax.jit(value_and_grad(loss_fn, **options))(1.0, jnp.ones(4))


def test_microbatches_below_one_are_refused_at_once():
    with pytest.raises(
        ValueError, match=r"value_and_grad: microbatches must be an integer in .* got 0"
    ):
        value_and_grad(linear_loss, microbatches=0)


def test_integer_parameters_are_refused():
    with pytest.raises(TypeError, match=r"floating point, got int32 at params\['steps'\]"):
        value_and_grad(linear_loss)({"steps": jnp.int32(1)}, (jnp.ones(2), jnp.ones(2)))


def test_an_unmapped_axis_is_named_by_rank_share():
    with pytest.raises(ValueError, match="rank_share: axis_name must be an axis mapped here"):
        rank_share(WeightedSum(1.0, 1), "data")


def test_a_field_called_missing_is_its_owners_affair():
    class Rows(NamedTuple):
        x: Any
        missing: Any

    def loss_fn(w, batch):
        return weighted_sum(w * batch.x * (1 - batch.missing))

    loss, gradient = value_and_grad(loss_fn)(1.0, Rows(jnp.ones(4), jnp.array([0, 0, 1.0, 1])))
    assert (float(loss.value), float(gradient), int(loss.terms["loss"].weight)) == (0.5, 0.5, 4)


@pytest.mark.parametrize("microbatches", [2.0, "2", True])
def test_microbatches_that_are_no_number_of_them_are_refused(microbatches):
    with pytest.raises(TypeError, match="value_and_grad: microbatches must be an integer"):
        value_and_grad(linear_loss, microbatches=microbatches)
