"""A total and a weight of which one alone is the rank's own: off by the number of ranks."""

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


def take(loss_fn, engine, microbatches=1, given=None, **options):
    gradient = value_and_grad(
        loss_fn,
        axis_name=None if engine == "jit" else "data",
        microbatches=microbatches,
        **options,
    )

    def call(p, batch):
        return gradient(p, batch, **{name: jnp.float32(each) for name, each in given.items()})

    called = call if given else gradient
    loss, found = jax.jit(over_ranks(called, data_mesh(4), engine=engine))(1.0, BATCH)
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


def count(p, batch):
    return jnp.sum(batch.weights)  # 5, over all ranks


def of_the_step(p, batch, statistics):
    return WeightedSum(local(p, batch).total, statistics)


def one_at_least(p, batch, statistics):
    return WeightedSum(local(p, batch).total, jnp.maximum(statistics, 1))


def given_beside(p, batch, replicated):
    return WeightedSum(local(p, batch).total, replicated)


def as_rows_weigh(p, batch, statistics):
    return weighted_sum(p * batch.data, jnp.full(len(batch.data), statistics))


def as_many_as_there_are(p, batch, statistics):
    total = weighted_sum(p * batch.data).total
    return WeightedSum(total * statistics, len(batch.data) * statistics)


def with_rows_of_its_own(p, batch, statistics):
    found = local(p, batch)
    return WeightedSum(found.total * statistics, found.weight * statistics)


WHOLE = "got for 'loss' a weight that is one number of the whole step"
STATISTICS, GIVEN = {"statistics": count}, {"given": {"replicated": 5}}
REGIMES = [("jit", 2), ("shard_map", 2), *[(each, 1) for each in ENGINES if each != "jit"]]


@pytest.mark.parametrize(("engine", "microbatches"), REGIMES)
@pytest.mark.parametrize(
    ("loss_fn", "options"),
    [
        (of_the_step, STATISTICS),
        (jax.jit(of_the_step), STATISTICS),
        (one_at_least, STATISTICS),
        (given_beside, GIVEN),
    ],
)
def test_a_weight_of_the_whole_step_is_refused_where_it_is_added_up(
    loss_fn, options, engine, microbatches
):
    with pytest.raises(ValueError, match=rf"{REFUSED}, {WHOLE}"):
        take(loss_fn, engine, microbatches, **options)


def test_a_weight_of_the_state_is_refused_where_it_is_added_up():
    def of_before(p, batch, state):
        return WeightedSum(local(p, batch).total, state), 0.9 * state + 0.5

    gradient = value_and_grad(of_before, axis_name=None, microbatches=2, has_state=True)
    with pytest.raises(ValueError, match=rf"{REFUSED}, {WHOLE}"):
        jax.jit(gradient)(1.0, BATCH, state=jnp.float32(5))
    once = value_and_grad(of_before, axis_name=None, has_state=True)
    assert float(jax.jit(once)(1.0, BATCH, state=jnp.float32(5))[1]) == 2.0


@pytest.mark.parametrize("loss_fn", [of_the_step, one_at_least])
def test_it_is_right_where_all_rows_are_one_call(loss_fn):
    assert take(loss_fn, "jit", **STATISTICS)[0] == 2.0


@pytest.mark.parametrize(("engine", "microbatches"), REGIMES)
@pytest.mark.parametrize(
    ("loss_fn", "right"),
    [(as_rows_weigh, 3.5), (as_many_as_there_are, 3.5), (with_rows_of_its_own, 2.0)],
)
def test_rows_that_all_weigh_such_a_number_are_taken(loss_fn, right, engine, microbatches):
    assert take(loss_fn, engine, microbatches, **STATISTICS)[0] == pytest.approx(right, rel=1e-6)


@pytest.mark.parametrize(("engine", "microbatches"), REGIMES)
def test_it_is_said_as_a_divisor_instead(engine, microbatches):
    divisors = {"loss": lambda weight, replicated: replicated}
    given = {"given": {"replicated": 4}, "divisors": divisors}
    assert take(local, engine, microbatches, **given)[0] == 10 / 4
