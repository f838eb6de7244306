"""Divisors that are not a term's weight: one number in every regime, however rows are split."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import regimes
from jax import lax

from jax_ddp_weighting import Batch, WeightedSum, rank_share, value_and_grad, weighted_sum

ROWS = 24  # divides by 1, 2, 4 ranks of 1, 2, 3 microbatches
RNG = np.random.default_rng(0)
X = RNG.normal(size=(ROWS, 3))
WEIGHTS = RNG.choice([0.0, 0.25, 1.0, 2.5], size=ROWS)
POSITIVES = np.zeros(ROWS, np.int32)  # a step without any: the floor is what divides
W = np.array([0.5, -1.0, 2.0])
EMA = 7.0
COEFFICIENTS = {"box": 1.0, "length": 0.5, "mean": 2.0, "plain": 1.0, "hits": 0}
DIVISORS = {
    "box": lambda weight: jnp.maximum(weight, 1),  # a floor
    "length": 50.0,  # a constant
    "mean": lambda weight, *, replicated: 0.9 * replicated["ema"] + 0.1 * weight,
    "hits": lambda weight: 2 * weight,  # of a metric
}


def terms(w, batch, replicated):
    x, weights, positives = batch
    squares = (x @ w) ** 2
    found = weighted_sum(squares, positives)
    return {
        "box": WeightedSum(found.total + jnp.sum(x @ w), found.weight),  # all rows, over positives
        "length": weighted_sum(squares, weights),
        "mean": weighted_sum(jnp.sin(x @ w), weights),
        "plain": weighted_sum(x @ w, weights),
        "hits": weighted_sum(squares > 1, weights),
    }


def by_hand():
    """Loss and gradient in numpy, from the formulas."""
    along = X @ W
    divided_by = {
        "box": max(POSITIVES.sum(), 1),
        "length": 50.0,
        "mean": 0.9 * EMA + 0.1 * WEIGHTS.sum(),
        "plain": WEIGHTS.sum(),
        "hits": 2 * WEIGHTS.sum(),
    }
    rows = {
        "box": (along + POSITIVES * along**2, np.ones(ROWS) + POSITIVES * 2 * along),
        "length": (WEIGHTS * along**2, WEIGHTS * 2 * along),
        "mean": (WEIGHTS * np.sin(along), WEIGHTS * np.cos(along)),
        "plain": (WEIGHTS * along, WEIGHTS),
        "hits": (WEIGHTS * (along**2 > 1), np.zeros(ROWS)),
    }
    means = {name: rows[name][0].sum() / divided_by[name] for name in rows}
    value = sum(COEFFICIENTS[name] * means[name] for name in rows)
    gradient = sum(COEFFICIENTS[name] * (rows[name][1] @ X) / divided_by[name] for name in rows)
    return value, gradient, means, divided_by


def ours(microbatches, loss_fn=terms, divisors=DIVISORS):
    def make(axis_name):
        def fn(given, rows):
            gradient_of = value_and_grad(
                loss_fn,
                axis_name=axis_name,
                microbatches=microbatches,
                coefficients=COEFFICIENTS,
                divisors=divisors,
            )
            return gradient_of(given[0], rows, replicated=given[1])

        return fn

    return make


def run(regime, ranks, microbatches, **options):
    with jax.enable_x64(True):
        given = (W, {"ema": np.float64(EMA)})
        make = ours(microbatches, **options)
        loss, gradient = regimes.run(regime, ranks, make, given, (X, WEIGHTS, POSITIVES))
        return jax.device_get((loss, gradient, loss.means))


def assert_by_hand(loss, gradient, found):
    value, right, means, divided_by = by_hand()
    np.testing.assert_allclose(gradient, right, rtol=1e-12)
    np.testing.assert_allclose(loss.value, value, rtol=1e-12)
    assert found == pytest.approx(means, rel=1e-12)
    given = {name: divided_by[name] for name in DIVISORS}
    assert loss.divisors == pytest.approx(given, rel=1e-12)
    # the terms keep what they weigh
    assert loss.terms["box"].weight == 0
    assert loss.terms["length"].weight == pytest.approx(WEIGHTS.sum(), rel=1e-12)


EVERYWHERE = [  # every engine with two numbers of ranks and of microbatches, and each pair of these
    ("jit", 1, 1),
    ("jit", 4, 2),
    ("shard_map", 1, 3),
    ("shard_map", 2, 1),
    ("shard_map_unchecked", 2, 3),
    ("shard_map_unchecked", 4, 1),
    ("pmap", 2, 2),
    ("pmap", 4, 3),
    ("vmap", 1, 2),
]


@pytest.mark.parametrize(("regime", "ranks", "microbatches"), EVERYWHERE)
def test_every_kind_of_divisor_is_that_of_the_whole_step(regime, ranks, microbatches):
    assert_by_hand(*run(regime, ranks, microbatches))


def divided_inside(w, batch, replicated):
    """The natural spellings: the divisor as the weight of each rank's microbatch."""
    found = terms(w, batch, replicated)
    return found | {
        "box": WeightedSum(found["box"].total, jnp.maximum(found["box"].weight, 1)),
        "length": WeightedSum(found["length"].total, 50.0),
    }


@pytest.mark.parametrize(("regime", "ranks", "microbatches"), [("shard_map", 2, 1), ("vmap", 1, 2)])
def test_a_divisor_given_as_the_weight_fails_that_check(regime, ranks, microbatches):
    others = {name: DIVISORS[name] for name in ("mean", "hits")}
    loss, gradient, _ = run(regime, ranks, microbatches, loss_fn=divided_inside, divisors=others)
    with pytest.raises(AssertionError, match="Not equal to tolerance rtol=1e-12"):
        np.testing.assert_allclose(gradient, by_hand()[1], rtol=1e-12)
    assert loss.terms["length"].weight == 100


def scaled(w, x):
    return WeightedSum(jnp.sum(w * x), jnp.int32(0))


@pytest.mark.parametrize(
    ("divisor", "right"), [(50.0, 0.42), (lambda weight: jnp.maximum(weight, 1), 21.0)]
)
def test_totals_of_two_ranks_over_a_constant_and_over_a_floor(divisor, right):
    x = np.arange(1, 7.0)
    for regime, ranks, microbatches in [("shard_map", 2, 3), ("vmap", 2, 1), ("jit", 1, 2)]:

        def make(axis_name, microbatches=microbatches):
            options = {"axis_name": axis_name, "microbatches": microbatches}
            return value_and_grad(scaled, divisors={"loss": divisor}, **options)

        loss, gradient = regimes.run(regime, ranks, make, np.float32(1), x)
        assert (loss.value, gradient) == pytest.approx((right, right), rel=1e-6)


def test_a_constant_is_given_to_rank_share_as_each_ranks_part_of_it():
    def share(w, x):
        return rank_share(WeightedSum(jnp.sum(w * x), 50.0 / lax.axis_size("data")), "data")

    def fn(w, x):
        return lax.pmean(jax.value_and_grad(share)(w, x), "data")

    for regime in ("shard_map", "shard_map_unchecked"):
        value, gradient = regimes.run(regime, 2, lambda _: fn, np.float32(1), np.arange(1, 7.0))
        assert (value, gradient) == pytest.approx((0.42, 0.42), rel=1e-6)


# --- what a function is given, and when -----------------------------------------------------------


def line(w, batch):
    return weighted_sum(w * batch.data, batch.weights)


def take(divisor, batch, loss_fn=line, **options):
    return value_and_grad(loss_fn, divisors={"loss": divisor}, **options)(jnp.float32(1), batch)


def test_a_function_is_called_once_a_step_with_a_float():
    seen = []

    def divisor(weight):
        seen.append(weight.dtype)
        return weight

    batch = Batch.of(np.ones(6, np.float32), weights=np.int32([1, 1, 0, 2, 1, 1]))
    loss, _ = jax.jit(lambda batch: take(divisor, batch, microbatches=3))(batch)
    assert seen == [jnp.float32]
    assert (loss.terms["loss"].weight.dtype, loss.divisors["loss"]) == (jnp.int32, 6)
    with jax.enable_x64(True):
        take(divisor, Batch.of(np.ones(2), weights=np.array([1, 1])))
    assert seen[1:] == [jnp.float64]


def test_a_weight_beyond_an_int32_comes_whole():
    def loss_fn(w, batch):
        found = line(w, batch)
        return WeightedSum(found.total, jnp.sum(batch.weights) * 2**30)

    batch = Batch.of(np.ones(8, np.float32))
    loss, _ = take(lambda weight: weight / 2**30, batch, loss_fn=loss_fn, microbatches=8)
    assert (loss.divisors["loss"], loss.value) == (8, 1)


def test_ranks_that_are_missing_stretch_what_a_function_is_given_and_no_constant():
    batch = Batch(np.float32([1, 3]), np.int32([0, 1]), np.int32([1, 1]), np.int32([0, 2]))
    assert take(lambda weight: 10 * weight, batch)[0].divisors["loss"] == 40
    assert take(50.0, batch)[0].divisors["loss"] == 50


def test_no_gradient_flows_into_a_divisor():
    def value(scale):
        loss, _ = take(lambda weight: weight * scale, Batch.of(np.float32([1, 3])))
        return loss.value

    assert jax.grad(value)(2.0) == 0


def test_a_divisor_may_be_traced():
    batch = Batch.of(np.float32([1, 3]))
    value = jax.jit(lambda constant: take(constant, batch)[0].value)
    assert (value(4.0), value(2)) == (1, 2)


def test_a_term_over_0_counts_for_nothing():
    for divisor in (0, lambda weight: 0 * weight):
        loss, gradient = take(divisor, Batch.of(np.float32([1, 3])))
        assert (loss.value, gradient, loss.means["loss"], loss.bad_weights) == (0, 0, 0, 0)


@pytest.mark.parametrize("bad", [-1.0, np.nan, np.inf])
def test_what_turns_out_bad_on_a_device_is_counted_and_nothing_else(bad):
    batch = Batch.of(np.float32([1, 3]))
    for microbatches in (1, 2):
        found = take(lambda weight: weight * bad, batch, microbatches=microbatches)
        loss, gradient = found
        assert np.isnan(loss.value)
        assert (gradient, loss.bad_weights, loss.terms["loss"].weight) == (0, 1, 0)
        assert (loss.terms["loss"].total, loss.divisors["loss"]) == (0, 0)
    # a bad weight is one bad weight, whatever a function makes of it
    loss, _ = take(lambda weight: 1 / weight, Batch(batch.data, batch.ids, jnp.float32([1, -1])))
    assert loss.bad_weights == 1


def test_without_divisors_the_program_is_the_same():
    batch = Batch.of(np.float32([1, 3]))

    def text(**options):
        fn = jax.jit(lambda w, batch: value_and_grad(line, microbatches=2, **options)(w, batch))
        return fn.lower(jnp.float32(1), batch).as_text()

    assert text() == text(divisors=None) == text(divisors={})
    assert text() != text(divisors={"loss": 2.0})


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("divisors", "error", "message"),
    [
        ({"box": 1.0}, ValueError, r"be for a term of the loss, got one for 'box' beside terms \["),
        ({"loss": -1.0}, ValueError, r"\['loss'\] must be finite and at least 0, got -1.0"),
        ({"loss": np.nan}, ValueError, "must be finite and at least 0, got nan"),
        ({"loss": np.float32(np.inf)}, ValueError, "must be finite and at least 0, got inf"),
        ({"loss": jnp.float32(-2)}, ValueError, "must be finite and at least 0, got -2.0"),
        ({"loss": np.ones(2)}, ValueError, r"one number for the whole term, got shape \(2,\)"),
        ({"loss": "50"}, TypeError, "must be a real number, or a function .* got str"),
        ({"loss": None}, TypeError, "must be a real number, or a function .* got NoneType"),
        ({"loss": True}, TypeError, "must be a real number, or a function .* got bool"),
        ({"loss": 1j}, TypeError, "must be a real number, or a function .* got complex"),
        (50.0, TypeError, "divisors must be a dict of a number or a function .* got float"),
    ],
)
def test_divisors_that_are_none_are_refused_at_once(divisors, error, message):
    with pytest.raises(error, match=f"value_and_grad: .*{message}"):
        value_and_grad(line, divisors=divisors)


@pytest.mark.parametrize(
    ("divisor", "error", "message"),
    [
        (lambda weight: weight * jnp.ones(2), ValueError, r"be one number .* got shape \(2,\)"),
        (lambda weight: "many", TypeError, "be a real number, .* got str"),
        (lambda weight: None, TypeError, "be a real number, .* got NoneType"),
        (lambda weight: weight > 1, TypeError, r"be a real number, .* got bool\[\]"),
        (lambda weight: weight * 1j, TypeError, r"be a real number, .* got complex64\[\]"),
        (lambda weight: -1.0, ValueError, "be finite and at least 0, got -1.0"),
        (lambda: 1.0, TypeError, r"take \(weight\), got \(\)"),
        (lambda weight, *, replicated: weight, TypeError, r"take \(weight\), got \(weight, "),
    ],
)
def test_functions_that_return_no_divisor_are_refused(divisor, error, message):
    with pytest.raises(error, match=rf"value_and_grad: divisors\['loss'\] must {message}"):
        take(divisor, Batch.of(np.float32([1, 3])))


def test_a_divisor_that_differs_from_rank_to_rank_is_refused():
    def make(axis_name):
        def divisor(weight):
            return weight + lax.axis_index(axis_name)

        return value_and_grad(line, axis_name=axis_name, divisors={"loss": divisor})

    batch = Batch.of(np.arange(4.0))
    with pytest.raises(ValueError, match=r"the same on every rank, got one that may vary over 'da"):
        regimes.run("shard_map", 2, make, np.float32(1), batch)


def test_a_term_that_is_counted_once_takes_no_divisor():
    def loss_fn(w, batch):
        fit = line(w, batch)
        return {"fit": fit, "decay": fit.once(w**2)}

    options = {"coefficients": {"fit": 1.0, "decay": 0.1}, "divisors": {"decay": 4.0}}
    with pytest.raises(ValueError, match="sums over rows, got one for 'decay', which is counted o"):
        value_and_grad(loss_fn, **options)(1.0, Batch.of(np.float32([1, 3])))
