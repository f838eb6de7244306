"""The functions that the gradient is made of, each by itself."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_ddp_weighting import Batch, WeightedSum, weighted_sum
from jax_ddp_weighting.weighting.counts import Count, as_sum
from jax_ddp_weighting.weighting.denominators import (
    Denominators,
    StepWeights,
    sum_over_ranks,
    sum_step_weights,
    to_denominators,
)
from jax_ddp_weighting.weighting.gradient import take_gradient
from jax_ddp_weighting.weighting.loss_terms import check_scalars, name_sums
from jax_ddp_weighting.weighting.microbatches import Rows, take_microbatch
from jax_ddp_weighting.weighting.rank_gradient import GradientOptions, call_loss, pull_back

BATCH = Batch.of(np.float32([1, 2, 3, 4]), weights=np.int32([1, 0, 2, 1]))


def loss_fn(w, batch):
    return {
        "loss": weighted_sum(w * batch.data, batch.weights),
        "hits": weighted_sum(batch.data > 2, batch.weights),
    }


OPTIONS = GradientOptions(loss_fn, coefficients={"loss": 1.0, "hits": 0}, has_accepted=True)


def test_a_microbatch_holds_every_kth_row_and_its_keys():
    keys = jax.random.split(jax.random.key(0), 4)
    found = take_microbatch(Rows(BATCH, None, keys), 1, 2)
    assert found.batch.data.tolist() == [2, 4]
    assert found.batch.weights.tolist() == [0, 1]
    np.testing.assert_array_equal(
        jax.random.key_data(found.keys), jax.random.key_data(keys)[jnp.array([1, 3])]
    )
    rng = jax.random.key(1)
    assert take_microbatch(Rows(BATCH, rng), 0, 1).rng is rng
    folded = take_microbatch(Rows(BATCH, rng), 1, 2).rng
    np.testing.assert_array_equal(
        jax.random.key_data(folded), jax.random.key_data(jax.random.fold_in(rng, 1))
    )


def test_a_call_parts_what_pulls_from_what_is_only_counted():
    two = jnp.float32(2)
    totals, sums = call_loss(OPTIONS, two, Rows(BATCH), None, shared=two)
    four = Count(0, 4)
    assert {name: float(total) for name, total in totals.items()} == {"loss": 22.0}
    assert sums.metrics == {"hits": Count(0, 3)}
    assert sums.weights == StepWeights(0, four, None, None, {"loss": four, "hits": four})
    assert (sums.state, sums.aux) == (None, [])


def test_one_microbatch_is_divided_by_the_weight_of_the_whole_step():
    two, eight = jnp.float32(2), {"loss": jnp.float32(8), "hits": jnp.float32(8)}
    whole = Denominators(jnp.int32(0), None, eight, eight, dict.fromkeys(eight))
    found = pull_back(OPTIONS, two, Rows(BATCH), None, whole, shared=two)
    assert float(found.gradients) == 11 / 8
    alone = pull_back(OPTIONS, two, Rows(BATCH), None, shared=two)
    assert float(alone.gradients) == 11 / 4  # its own weight, where it is the whole step


@pytest.mark.parametrize("microbatches", [1, 2, 4])
def test_keys_of_rows_reach_the_rows_they_belong_to(microbatches):
    def noisy(w, batch, keys):
        kept = jax.vmap(jax.random.bernoulli)(keys)
        return weighted_sum(w * kept * 2.0 ** batch.ids.astype(jnp.float32))

    keys = jax.random.split(jax.random.key(0), 4)
    found = take_gradient(
        GradientOptions(noisy, microbatches=microbatches), jnp.float32(1), BATCH, row_keys=keys
    )
    kept = np.asarray(jax.vmap(jax.random.bernoulli)(keys))
    assert float(found.gradients) == np.sum(kept * 2.0 ** np.arange(4)) / 4
    assert 0 < kept.sum() < 4  # or the check could not fail


def test_the_weight_of_the_rows_is_no_term():
    found = take_gradient(OPTIONS, jnp.float32(2), BATCH)
    assert set(found.loss.terms) == {"loss", "hits"}
    assert int(found.accepted) == 4
    unasked = take_gradient(replace(OPTIONS, has_accepted=False), jnp.float32(2), BATCH)
    assert unasked.accepted is None


@pytest.mark.parametrize("name", ["missing", "accepted", "\0missing", "\0accepted rows"])
def test_a_term_may_have_any_name(name):
    def named(w, batch):
        return {name: weighted_sum(w * batch.data, batch.weights)}

    options = GradientOptions(named, coefficients={name: 1.0}, has_accepted=True)
    batch = replace(BATCH, missing=np.int32([0, 0, 4, 0]))  # as much as is there: half of it
    found = take_gradient(options, jnp.float32(2), batch)
    assert float(found.gradients) == 11 / 8
    assert set(found.loss.terms) == {name}


def test_missing_ranks_stretch_what_pulls_and_no_metric():
    ten = WeightedSum(jnp.float32(1), jnp.int32(10))
    batch = replace(BATCH, missing=np.int32([0, 0, 2, 0]))
    weights = sum_step_weights(batch, {"loss": ten, "hits": ten}, accepted=False)
    found = to_denominators(weights, {"loss": 1.0, "hits": 0})
    assert found.accepted is None
    assert {name: float(weight) for name, weight in found.terms.items()} == {"loss": 15, "hits": 10}
    assert found.weights["loss"].dtype == jnp.float32
    assert (found.weights["hits"].dtype, int(found.weights["hits"])) == (jnp.int32, 10)


def test_weights_are_summed_over_ranks_by_one_all_reduce_per_dtype():
    def over(accepted, a, b, c):
        terms = {"a": as_sum(a), "b": b, "c": c}
        weights = StepWeights(jnp.int32(0), as_sum(accepted), None, None, terms)
        return to_denominators(sum_over_ranks(weights, "data"), dict.fromkeys(terms, 1.0))

    ones = [jnp.ones(2, dtype) for dtype in (jnp.int32, jnp.int32, jnp.float32, jnp.float32)]
    mapped = jax.vmap(over, axis_name="data")
    found = jax.tree.map(lambda x: float(x[0]), mapped(*ones))
    assert (found.bad, found.accepted) == (0, 2)
    assert found.terms == found.weights == {"a": 2, "b": 2, "c": 2}
    traced = jax.make_jaxpr(over, axis_env=[("data", 2)])(*[x[0] for x in ones])
    assert str(traced).count("psum") == 2


def test_sums_have_names_or_are_none():
    one = weighted_sum(jnp.ones(2))
    assert name_sums(one) == {"loss": one}
    assert name_sums({"a": one}) == {"a": one}
    assert name_sums({}) is name_sums(1.0) is name_sums({"a": one, "b": 2.0}) is None
    with pytest.raises(ValueError, match=r"f: g must return scalar sums, got total \(2,\) and"):
        check_scalars({"a": replace(one, total=jnp.ones(2))}, returned_by="f: g")
