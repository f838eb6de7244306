"""A total and a weight of which one alone was summed over the ranks: off by their number."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jax_ddp_weighting import Batch, WeightedSum, data_mesh, value_and_grad, weighted_sum
from jax_ddp_weighting.distributed.mesh import ENGINES, over_ranks

WEIGHTS = np.array([1, 1, 1, 1, 1, 0, 0, 0])
BATCH = Batch.of(np.arange(8, dtype=np.float32), weights=WEIGHTS)
REFUSED = "loss_fn must return both halves of a term of the rank's own rows"


def local(p, batch):
    return weighted_sum(p * batch.data, batch.weights)


def summed_weight(p, batch):
    return WeightedSum(local(p, batch).total, lax.psum(jnp.sum(batch.weights), "data"))


def weight_summed_later(p, batch):
    found = local(p, batch)
    return WeightedSum(found.total, lax.psum(found.weight, "data"))


def summed_total(p, batch):
    found = local(p, batch)
    return WeightedSum(lax.psum(found.total, "data"), found.weight)


def summed_in_a_loop(p, batch):
    def add(carry, row):
        return carry + lax.psum(row, "data"), None

    first = batch.weights[0]
    weight = lax.scan(add, lax.psum(first * 0, "data"), batch.weights)[0]
    return WeightedSum(local(p, batch).total, weight)


WRONG = [summed_weight, weight_summed_later, summed_total, jax.jit(summed_weight), summed_in_a_loop]


def take(loss_fn, engine, microbatches=1, **options):
    gradient = value_and_grad(
        loss_fn,
        axis_name=None if engine == "jit" else "data",
        microbatches=microbatches,
        **options,
    )
    loss, found = jax.jit(over_ranks(gradient, data_mesh(4), engine=engine))(1.0, BATCH)
    return float(found), loss


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("engine", [each for each in ENGINES if each != "jit"])
@pytest.mark.parametrize("loss_fn", WRONG)
def test_one_half_that_was_summed_is_refused(loss_fn, engine, microbatches):
    noun = "total" if loss_fn is summed_total else "weight"
    with pytest.raises(ValueError, match=rf"{REFUSED}, got for 'loss' a {noun} .* of \('data',\)"):
        take(loss_fn, engine, microbatches)


def without_weights(p, batch):
    return weighted_sum(p * batch.data)


def both_summed(p, batch):
    return local(p, batch).psum("data")


def of_what_others_have(p, batch):
    shift = lax.psum(jnp.sum(batch.data), "data") / 28  # 1, of all ranks' rows
    return weighted_sum(p * batch.data * shift, batch.weights)


@pytest.mark.parametrize("engine", [each for each in ENGINES if each != "jit"])
@pytest.mark.parametrize(
    ("loss_fn", "right"),
    [
        (local, 2.0),
        (without_weights, 3.5),
        (jax.jit(without_weights), 3.5),  # a weight of no rows, in a program of its own
        (both_summed, 2.0),
        (of_what_others_have, 2.0),
    ],
)
def test_halves_that_mean_what_they_say_are_taken(loss_fn, right, engine):
    assert take(loss_fn, engine)[0] == right


@pytest.mark.parametrize("engine", ["shard_map", "vmap"])
def test_a_regulariser_beside_it_is_taken(engine):
    def penalised(p, batch):
        nll = local(p, batch)
        return {"nll": nll, "l2": nll.once(p**2), "constant": WeightedSum(p * 0.5, jnp.int32(1))}

    factors = {"nll": 1.0, "l2": 0.25, "constant": 1.0}
    assert take(penalised, engine, coefficients=factors)[0] == 2.0 + 0.5 + 0.5
