"""Statistics of a step: one sum over all rows, however they are split, before any loss is taken."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import regimes
from jax import lax

from jax_ddp_weighting import Batch, WeightedSum, value_and_grad, weighted_sum

ROWS = 24  # divides by 1, 2, 4 ranks of 1, 2, 3 microbatches
RNG = np.random.default_rng(0)
X = RNG.normal(size=(ROWS, 3)) + 0.5
WEIGHTS = RNG.choice([0.0, 0.25, 1.0, 2.5], size=ROWS)
LABELS = RNG.integers(0, 3, size=ROWS).astype(np.int32)
W = np.array([0.5, -1.0, 2.0])
COEFFICIENTS = {"balance": 1.0, "classes": 0.5}


def gate(w, x):
    return jax.nn.sigmoid(x @ w)


def tokens_and_sizes(w, batch):
    """Each expert's tokens, by weight, and each class's rows, by number."""
    x, weights, labels = batch
    first = gate(w, x) > 0.5
    tokens = jnp.stack([jnp.sum(weights * first), jnp.sum(weights * ~first)])
    sizes = jnp.zeros(3, jnp.int32).at[labels].add((weights > 0).astype(jnp.int32))
    return {"tokens": tokens, "sizes": sizes}


def terms(w, batch, statistics):
    x, weights, labels = batch
    share = statistics["tokens"] / jnp.sum(statistics["tokens"])
    gates = gate(w, x)
    balance = 2 * (share[0] * gates + share[1] * (1 - gates))
    # weights that depend on statistics: each class counts as much as any other
    rare = jnp.where(weights > 0, 1 / jnp.maximum(statistics["sizes"][labels], 1), 0)
    return {"balance": weighted_sum(balance, weights), "classes": weighted_sum((x @ w) ** 2, rare)}


def by_hand():
    """Loss and gradient in numpy, from the formulas."""
    along = X @ W
    gates = 1 / (1 + np.exp(-along))
    tokens = np.array([WEIGHTS[gates > 0.5].sum(), WEIGHTS[gates <= 0.5].sum()])
    share = tokens / tokens.sum()
    part = WEIGHTS / WEIGHTS.sum()
    sizes = np.bincount(LABELS[WEIGHTS > 0], minlength=3)
    rare = np.where(WEIGHTS > 0, 1 / np.maximum(sizes[LABELS], 1), 0)
    value = 2 * part @ (share[0] * gates + share[1] * (1 - gates))
    gradient = 2 * (share[0] - share[1]) * ((part * gates * (1 - gates)) @ X)
    value += 0.5 * rare @ along**2 / rare.sum()
    gradient += 0.5 * ((rare * 2 * along) @ X) / rare.sum()
    return value, gradient, {"tokens": tokens, "sizes": sizes}


def ours(microbatches, loss_fn=terms, **options):
    options = {"coefficients": COEFFICIENTS, "statistics": tokens_and_sizes} | options

    def make(axis_name):
        return value_and_grad(loss_fn, axis_name=axis_name, microbatches=microbatches, **options)

    return make


def run(regime, ranks, microbatches, **options):
    with jax.enable_x64(True):
        make = ours(microbatches, **options)
        return jax.device_get(regimes.run(regime, ranks, make, W, (X, WEIGHTS, LABELS)))


EVERYWHERE = [
    ("jit", 1, 1),
    ("jit", 4, 2),
    ("shard_map", 1, 3),
    ("shard_map", 4, 2),
    ("shard_map_unchecked", 2, 3),
    ("pmap", 2, 2),
    ("pmap", 4, 1),
    ("vmap", 1, 2),
    ("vmap", 2, 1),
]


@pytest.mark.parametrize(("regime", "ranks", "microbatches"), EVERYWHERE)
def test_statistics_are_those_of_the_whole_step(regime, ranks, microbatches):
    loss, gradient = run(regime, ranks, microbatches)
    value, right, statistics = by_hand()
    np.testing.assert_allclose(gradient, right, rtol=1e-12)
    np.testing.assert_allclose(loss.value, value, rtol=1e-12)
    for name, found in loss.statistics.items():
        np.testing.assert_allclose(found, statistics[name], rtol=1e-12)
        assert found.dtype == np.float64


def with_its_own(w, batch):
    """The natural spelling: each microbatch takes the statistics of its own rows."""
    return terms(w, batch, tokens_and_sizes(w, batch))


def with_its_ranks(w, batch):
    return terms(w, batch, lax.psum(tokens_and_sizes(w, batch), "data"))


@pytest.mark.parametrize(
    ("regime", "ranks", "microbatches", "loss_fn"),
    [("shard_map", 2, 1, with_its_own), ("vmap", 2, 2, with_its_ranks)],
)
def test_statistics_of_a_part_fail_that_check(regime, ranks, microbatches, loss_fn):
    _, gradient = run(regime, ranks, microbatches, loss_fn=loss_fn, statistics=None)
    with pytest.raises(AssertionError, match="Not equal to tolerance rtol=1e-12"):
        np.testing.assert_allclose(gradient, by_hand()[1], rtol=1e-12)


def test_the_balance_of_two_experts():
    def loss_fn(w, x, statistics):
        share, gates = statistics / jnp.sum(statistics), jax.nn.sigmoid(w * x)
        return weighted_sum(2 * (share[0] * gates + share[1] * (1 - gates)))

    def tokens(w, x):
        return jnp.stack([jnp.sum(w * x > 0), jnp.sum(w * x <= 0)])

    x = np.float32([2, 1, 3, -3])
    for regime, ranks, microbatches in [("shard_map", 2, 2), ("vmap", 4, 1), ("jit", 1, 4)]:
        make = ours(microbatches, loss_fn, statistics=tokens, coefficients=None)
        _, gradient = regimes.run(regime, ranks, make, np.float32(1), x)
        assert gradient == pytest.approx(0.10165, abs=5e-6)


# --- what they are given, and what comes of it ----------------------------------------------------


def line(w, batch, *rest, statistics=None, **given):
    return weighted_sum(w * batch.data, batch.weights)


def take(statistics, batch, *args, loss_fn=line, options=None, **given):
    fn = value_and_grad(loss_fn, statistics=statistics, **(options or {}))
    return fn(jnp.float32(1), batch, *args, **given)


@pytest.mark.parametrize("microbatches", [1, 2])
def test_they_are_given_what_they_name_and_nothing_else(microbatches):
    def loss_fn(w, batch, rng, *, state, statistics):
        drawn = jnp.sum(jax.random.uniform(rng, batch.data.shape))
        return {"loss": line(w, batch), "drawn": WeightedSum(drawn, 1)}, state + 1

    def statistics(w, batch, *, rng, state, replicated):
        drawn = jnp.sum(jax.random.uniform(rng, batch.data.shape))
        return {
            "drawn": drawn,
            "state": jnp.sum(batch.weights) * state,
            "whole": replicated * jnp.sum(batch.weights),
        }

    options = {"has_state": True, "coefficients": {"loss": 1.0, "drawn": 0}}
    options["microbatches"] = microbatches
    given = {"state": jnp.float32(3), "replicated": jnp.float32(5)}
    batch = Batch.of(np.arange(4.0, dtype=np.float32))
    (loss, state), _ = take(
        statistics, batch, jax.random.key(0), loss_fn=loss_fn, options=options, **given
    )
    # the loss draws the same, and the state is that before the step
    assert loss.statistics["drawn"] == pytest.approx(float(loss.terms["drawn"].total), rel=1e-6)
    assert (loss.statistics["state"], state) == (12, 3 + microbatches)
    assert loss.statistics["whole"] == 5 * 4


def test_no_gradient_flows_through_them():
    def loss_fn(w, batch, statistics):
        return weighted_sum(w * batch.data * statistics, batch.weights)

    def statistics(w, batch):
        return w * jnp.sum(batch.data)

    batch = Batch.of(np.float32([1, 3]))
    _, gradient = take(statistics, batch, loss_fn=loss_fn)
    assert gradient == 2 * 4  # and not twice as much
    fn = value_and_grad(loss_fn, statistics=statistics)
    assert jax.grad(lambda w: fn(w, batch)[0].value)(1.0) == 8


def test_integers_do_not_overflow_and_narrow_numbers_do_not_stop_counting():
    def statistics(w, batch):
        rows = jnp.sum(batch.weights)
        return [rows * 2**28, jnp.uint32(rows * 0) + jnp.uint32(2**31 + 2**20), jnp.bfloat16(rows)]

    batch = Batch.of(np.ones(64, np.float32))

    def found(microbatches):
        loss, _ = jax.jit(
            lambda batch: take(statistics, batch, options={"microbatches": microbatches})
        )(batch)
        assert {str(each.dtype) for each in loss.statistics} == {"float32"}
        return [float(each) for each in loss.statistics]

    assert found(64) == [64 * 2.0**28, 64 * (2.0**31 + 2**20), 64]
    large = Batch.of(np.ones(1024, np.float32))
    loss, _ = take(lambda w, b: jnp.bfloat16(b.weights.sum()), large, options={"microbatches": 512})
    assert loss.statistics == 1024  # bfloat16 stops at 256


def test_a_weighted_sum_is_a_statistic():
    def centred(w, batch, statistics):
        return weighted_sum(w * (batch.data - statistics.mean()) ** 2, batch.weights)

    batch = Batch.of(np.float32([0, 2, 4, 6]), weights=np.float32([1, 1, 0.5, 0]))
    for microbatches in (1, 2):
        options = {"microbatches": microbatches}
        _, gradient = take(line, batch, loss_fn=centred, options=options)
        mean = np.average([0, 2, 4, 6], weights=[1, 1, 0.5, 0])
        right = np.average((np.array([0, 2, 4, 6]) - mean) ** 2, weights=[1, 1, 0.5, 0])
        assert gradient == pytest.approx(right, rel=1e-6)


def psums(fn, *args):
    return str(jax.make_jaxpr(fn, axis_env=[("data", 2)])(*args)).count(" psum")


def test_they_cost_one_all_reduce_for_each_dtype_whatever_their_shapes():
    batch = Batch.of(np.ones(4, np.float32))

    def many(w, batch):
        x = batch.data
        return {"a": jnp.sum(x), "b": jnp.ones((2, 3)) * jnp.sum(x), "c": jnp.sum(x) * jnp.ones(5)}

    def two(w, batch):
        return many(w, batch) | {"n": jnp.sum(batch.weights), "k": jnp.sum(batch.ids)}

    for statistics, more in [(None, 0), (many, 1), (two, 2)]:
        options = {"microbatches": 2, "axis_name": "data", "statistics": statistics}
        # the weights, the totals, the gradient
        assert psums(value_and_grad(line, **options), jnp.float32(1), batch) == 3 + more


def test_without_statistics_the_program_is_the_same():
    batch = Batch.of(np.float32([1, 3]))

    def text(**options):
        return str(jax.make_jaxpr(value_and_grad(line, **options))(jnp.float32(1), batch))

    assert text() == text(statistics=None)
    assert text() != text(statistics=lambda w, batch: jnp.sum(batch.data))


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("statistics", "error", "message"),
    [
        (lambda w, b: b.data, ValueError, r"does not depend on .* got \(4,\), and \(8,\) of"),
        (lambda w, b: {"a": [1, b.data[None]]}, ValueError, r"at statistics\['a'\]\[1\], and"),
        (lambda w, b: None, TypeError, "a pytree of arrays of numbers, got NoneType"),
        (lambda w, b: {"a": None}, TypeError, r"got NoneType at statistics\['a'\]"),
        (lambda w, b: {"a": "many"}, TypeError, r"got str at statistics\['a'\]"),
        (lambda w, b: jax.random.key(0), TypeError, r"numbers, got key<fry>\[\]"),
        (lambda w, b: jnp.any(b.data > 0), TypeError, r"numbers, got bool\[\]"),
        (lambda w, b: {}, TypeError, "at least one array, got a dict"),
        (lambda w: w, TypeError, r"\(params, batch\), got \(w\)"),
        (lambda w, b, *, rng: w, TypeError, r"\(params, batch\), got \(w, b, \*, rng\)"),
    ],
)
def test_what_is_no_sum_over_rows_is_refused(statistics, error, message):
    with pytest.raises(error, match=f"value_and_grad: statistics must .*{message}"):
        take(statistics, Batch.of(np.ones(8, np.float32)), options={"microbatches": 2})


def test_statistics_that_cannot_be_called_are_refused_at_once():
    with pytest.raises(TypeError, match=r"statistics must be a function .* got a dict of"):
        value_and_grad(line, statistics={"a": 1.0})


def test_what_has_been_summed_over_the_ranks_already_is_refused():
    def summed(w, batch):
        return {"fit": lax.psum(jnp.sum(batch.data), "data")}

    def make(axis_name):
        return value_and_grad(line, axis_name=axis_name, statistics=summed)

    with pytest.raises(ValueError, match="got what is the same on every rank of 'data' at stat"):
        regimes.run("shard_map", 2, make, np.float32(1), Batch.of(np.ones(4, np.float32)))


@pytest.mark.parametrize(("regime", "ranks"), [("jit", 1), ("shard_map", 2)])
def test_the_number_of_rows_is_a_sum_over_them_and_the_norm_of_parameters_is_none(regime, ranks):
    def rows(w, batch):
        return jnp.float32(batch.data.shape[0]), batch.data.shape[0], weighted_sum(batch.data)

    batch = Batch.of(np.ones(4, np.float32))

    def take(statistics):
        def make(axis_name):
            options = {"axis_name": axis_name, "microbatches": 2}
            return value_and_grad(line, statistics=statistics, **options)

        return regimes.run(regime, ranks, make, np.float32(1), batch)

    loss, _ = take(rows)
    assert jax.tree.leaves(loss.statistics) == [4, 4, 4, 4]
    with pytest.raises(ValueError, match=r"what is made of none of them at statistics\[1\], and"):
        take(lambda w, batch: (jnp.sum(batch.data), w**2))


def test_a_function_made_for_one_number_of_rows_is_taken_as_it_is():
    def statistics(w, batch):
        return jnp.sum(batch.data.reshape(2, 2), axis=0)

    loss, _ = take(statistics, Batch.of(np.arange(4.0, dtype=np.float32)))
    assert loss.statistics.tolist() == [2, 4]


def test_keys_among_the_rows_are_no_hindrance():
    def statistics(w, batch):
        return jnp.sum(jax.vmap(jax.random.uniform)(batch.data["key"]))

    def loss_fn(w, batch, statistics):
        return weighted_sum(w * batch.data["x"] * statistics)

    keys = jax.random.split(jax.random.key(0), 4)
    batch = Batch.of({"x": jnp.ones(4), "key": keys})

    def make(axis_name):
        return value_and_grad(loss_fn, axis_name=axis_name, statistics=statistics)

    right = float(np.sum(jax.vmap(jax.random.uniform)(keys)))
    for regime in ("shard_map", "jit"):
        _, gradient = regimes.run(regime, 2, make, np.float32(1), batch)
        assert gradient == pytest.approx(right, rel=1e-6)
