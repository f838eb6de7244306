"""What pulls and what is only reported, and what cannot pull."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import regimes

from jax_ddp_weighting import WeightedSum, evaluate, rank_share, value_and_grad, weighted_sum
from jax_ddp_weighting.data.batch import Batch
from jax_ddp_weighting.distributed.mesh import data_mesh
from jax_ddp_weighting.weighting.loss_terms import has_gradient

ZEROS = {
    "int": 0,
    "float": 0.0,
    "-0.0": -0.0,
    "bool": False,
    "np.float32": np.float32(0),
    "np.int8": np.int8(0),
    "np.bool": np.bool_(False),
    "np.array": np.zeros(()),
    "jnp": jnp.float32(0),
    "jnp.bfloat16": jnp.bfloat16(0),
}
ROWS = np.arange(1, 13, dtype=np.float32)


def beside_nan(w, rows):
    return {"loss": weighted_sum(w * rows), "broken": WeightedSum(jnp.sum(w * jnp.nan), 1)}


@pytest.mark.parametrize("regime", ["jit", "shard_map", "shard_map_unchecked", "pmap", "vmap"])
@pytest.mark.parametrize("zero", ["bool", "np.float32", "np.array", "jnp"])
def test_a_coefficient_of_0_makes_a_metric_however_it_is_spelled(regime, zero):
    def make(axis_name):
        return value_and_grad(
            beside_nan,
            axis_name=axis_name,
            microbatches=3,
            coefficients={"loss": 1.0, "broken": ZEROS[zero]},
        )

    loss, gradient = regimes.run(regime, 4, make, jnp.float32(2), ROWS)
    assert (float(loss.value), float(gradient)) == (13.0, 6.5)
    assert np.isnan(float(loss.terms["broken"].mean()))


@pytest.mark.parametrize("zero", ZEROS)
def test_every_0_is_one(zero):
    assert not has_gradient(ZEROS[zero])


@pytest.mark.parametrize("factor", [1, -1.0, True, np.float32(1e-9), np.nan, jnp.float32(0.5)])
def test_what_is_not_0_pulls(factor):
    assert has_gradient(factor)


def test_of_a_traced_coefficient_nothing_is_known():
    def value(factor):
        assert has_gradient(factor)
        return value_and_grad(beside_nan, coefficients={"loss": 1.0, "broken": factor})(2.0, ROWS)

    loss, gradient = jax.jit(value)(0.0)
    assert np.isnan([float(loss.value), float(gradient)]).all()  # as documented


@pytest.mark.parametrize(
    ("total", "dtype"),
    [
        (lambda w, x: jnp.sum(x > 2), "int32"),
        (lambda w, x: jnp.any(x > 2), "int32"),
        (lambda w, x: jnp.sum(w * x).astype(jnp.int16), "int32"),
        (lambda w, x: jnp.sum(w * x) * (1 + 1j), "complex64"),
    ],
)
@pytest.mark.parametrize("microbatches", [1, 2])
def test_totals_that_have_no_gradient_are_refused(total, dtype, microbatches):
    gradient = value_and_grad(
        lambda w, x: WeightedSum(total(w, x), x.shape[0]), microbatches=microbatches
    )
    message = rf"must return a total of floats for a term that pulls, got {dtype} for term 'loss'"
    with pytest.raises(TypeError, match=message):
        gradient(jnp.float32(1), jnp.ones(4))


def test_jax_refuses_the_same():
    with pytest.raises(TypeError, match=r"real- or complex-valued|real-valued"):
        jax.grad(lambda w: jnp.sum(w > 2))(1.0)
    with pytest.raises(TypeError, match="real-valued"):
        jax.grad(lambda w: w * (1 + 1j))(1.0)


def test_hits_are_fine_as_a_metric():
    def loss_fn(w, x):
        return {"loss": weighted_sum(w * x), "hits": weighted_sum(x > 2)}

    with pytest.raises(TypeError, match="got int32 for term 'hits'"):
        value_and_grad(loss_fn, coefficients={"loss": 1.0, "hits": 1.0})(1.0, ROWS)
    loss, _ = value_and_grad(loss_fn, coefficients={"loss": 1.0, "hits": 0})(1.0, ROWS)
    assert (int(loss.terms["hits"].total), loss.terms["hits"].total.dtype) == (10, jnp.int32)


NO_SUMS = {
    "None": (WeightedSum(None, 1), "total NoneType and weight int"),
    "no weight": (WeightedSum(1.0, None), "total float and weight NoneType"),
    "a string": (WeightedSum(1.0, "1"), "total float and weight str"),
    "a complex weight": (WeightedSum(1.0, 1j), "total float and weight complex"),
    "keys": (WeightedSum(jax.random.key(0), 1), r"total key<fry>\[\] and weight int"),
}


@pytest.mark.parametrize("case", NO_SUMS)
def test_sums_of_what_is_no_number_are_refused(case):
    returned, message = NO_SUMS[case]
    with pytest.raises(TypeError, match=f"value_and_grad: loss_fn must .* got {message}"):
        value_and_grad(lambda w, x: returned)(1.0, jnp.ones(2))


def test_they_are_refused_by_the_others_that_take_sums():
    with pytest.raises(TypeError, match=r"rank_share: local must .* got total NoneType"):
        jax.vmap(lambda x: rank_share(WeightedSum(None, 1), "data"), axis_name="data")(jnp.ones(2))
    with pytest.raises(TypeError, match=r"evaluate: metric_fn must .* got total NoneType"):
        evaluate(lambda batch: WeightedSum(None, 1), [Batch.of(np.ones(1))], data_mesh(1))
