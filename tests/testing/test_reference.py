"""Parity of losses that need all rows: divisors, statistics, and a reference of the user's own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jax_ddp_weighting import Batch, ParityError, WeightedSum, check_gradients, weighted_sum
from jax_ddp_weighting.distributed.mesh import ENGINES

RNG = np.random.default_rng(0)
X = RNG.normal(size=(6, 3)).astype(np.float32)
Y = RNG.normal(size=(6, 3)).astype(np.float32)
WEIGHTS = np.float32([1, 0.5, 2, 0, 1, 1])
BATCH = Batch.of((X, Y), weights=WEIGHTS)
W = RNG.normal(size=(3, 3)).astype(np.float32)
SPLITS = [(4, 2), (3, 1, 1, 1)]


def total(w, batch):
    x, y = batch.data
    return weighted_sum(jnp.sum((x @ w - y) ** 2, axis=1), batch.weights)


def contrastive(w, batch, *rest, everywhere=lambda leaf: lax.all_gather(leaf, "data", tiled=True)):
    """Each row's negatives are the rows of all ranks."""
    x, y = batch.data
    others, weights = everywhere(y @ w), everywhere(batch.weights)
    logits = jnp.where(weights[None] > 0, x @ others.T, -jnp.inf)
    own = jnp.sum(x * (y @ w), axis=1)
    # what fills a rank up has the first row's data, and is no negative of anybody's
    return weighted_sum(jax.nn.logsumexp(logits, axis=1) - own, batch.weights)


def of_all_rows(w, batch, *rest):
    return contrastive(w, batch, everywhere=lambda leaf: leaf).mean()


@pytest.mark.parametrize("microbatches", [1, 2])
def test_divisors_and_statistics_are_compared(microbatches):
    def loss_fn(w, batch, *, statistics):
        return WeightedSum(total(w, batch).total * statistics, jnp.int32(0))

    def rows(w, batch):
        return jnp.sum(batch.weights * batch.data[0][:, 0])

    report = check_gradients(
        loss_fn,
        W,
        BATCH,
        SPLITS,
        microbatches=microbatches,
        engines=["shard_map", "vmap"],
        divisors={"loss": lambda weight: jnp.maximum(weight, 3)},
        statistics=rows,
        float64=True,
    )
    assert {each.rtol for each in report.differences} == {1e-12}


def test_what_is_divided_inside_fails_that_check():
    def loss_fn(w, batch):
        return WeightedSum(total(w, batch).total, 50.0)

    with pytest.raises(ParityError, match=r"ratio 0\.500 on 2 ranks"):
        check_gradients(loss_fn, W, BATCH, [(4, 2)], engines=["vmap"])


def test_statistics_are_given_the_key_that_the_loss_is_given():
    def drawn(batch, rng):
        keys = jax.vmap(jax.random.fold_in, (None, 0))(rng, batch.ids)
        return jax.vmap(jax.random.uniform)(keys) * batch.weights

    def loss_fn(w, batch, rng, *, statistics):
        return weighted_sum(total(w, batch).total * drawn(batch, rng) / statistics, batch.weights)

    def linear(w, batch, rng, *, statistics):
        return weighted_sum(batch.data[0] @ w[0] * drawn(batch, rng) / statistics, batch.weights)

    options = {"statistics": lambda w, batch, *, rng: jnp.sum(drawn(batch, rng))}
    options |= {"rng": jax.random.key(1), "engines": ["vmap"], "microbatches": 2}
    check_gradients(linear, W, BATCH, [(4, 2)], **options)
    with pytest.raises(ParityError, match="no constant ratio"):  # a microbatch's total in a row
        check_gradients(loss_fn, W, BATCH, [(4, 2)], **options)


def test_a_loss_that_gathers_is_compared_with_a_reference():
    report = check_gradients(contrastive, W, BATCH, [(3, 1, 1, 1)], reference=of_all_rows)
    assert {each.engine for each in report.differences} == {*ENGINES} - {"jit"}
    check_gradients(contrastive, W, BATCH, [(4, 2)], reference=of_all_rows, engines=["fake_pmap"])


def test_negatives_of_the_own_rank_fail_that_check():
    def of_own_rank(w, batch):
        return contrastive(w, batch, everywhere=lambda leaf: leaf)

    options = {"engines": ["shard_map"], "reference": of_all_rows}
    with pytest.raises(ParityError, match="gradient leaves differ"):
        check_gradients(of_own_rank, W, BATCH, [(4, 2)], **options)
    with pytest.raises(ParityError, match="gradient leaves differ"):  # a microbatch gathers its own
        check_gradients(contrastive, W, BATCH, [(4, 2)], microbatches=2, **options)


def test_a_reference_is_given_state_and_key_and_may_return_what_the_loss_does():
    def loss_fn(w, batch, rng, *, state):
        noise = jax.vmap(jax.random.fold_in, (None, 0))(rng, batch.ids)
        noise = jax.vmap(lambda key: jax.random.normal(key, (3,)))(noise)
        mean = lax.psum(jnp.sum(batch.weights), "data")
        fit = weighted_sum((batch.data[0] + noise) @ w[0] * mean * state, batch.weights)
        return {"fit": fit, "rows": weighted_sum(batch.weights > 0)}, state + 1

    def reference(w, batch, rng, *, state):
        noise = jax.vmap(jax.random.fold_in, (None, 0))(rng, batch.ids)
        noise = jax.vmap(lambda key: jax.random.normal(key, (3,)))(noise)
        fit = weighted_sum((batch.data[0] + noise) @ w[0] * state, batch.weights)
        return {"fit": WeightedSum(fit.total * fit.weight, fit.weight), "rows": fit}, state + 1

    options = {"coefficients": {"fit": 0.5, "rows": 0}, "divisors": {"fit": 7.0}}
    options |= {"rng": jax.random.key(0), "state": np.float32(2), "engines": ["shard_map", "pmap"]}
    check_gradients(loss_fn, W, BATCH, SPLITS, reference=reference, float64=True, **options)
    plain = options | {"divisors": None}
    with pytest.raises(ParityError, match="gradient leaves differ"):
        check_gradients(
            loss_fn,
            W,
            BATCH,
            [(4, 2)],
            reference=lambda *args, state: 0.5 * reference(*args, state=state)[0]["fit"].total / 7,
            **plain,
        )


@pytest.mark.parametrize("options", [{}, {"reference": of_all_rows, "engines": ["jit"]}])
def test_a_loss_that_uses_the_axis_where_there_is_none_is_told_what_to_do(options):
    with pytest.raises(
        ValueError, match=r"unbound axis name: data.* reference=, the same of the w"
    ):
        check_gradients(contrastive, W, BATCH, [(4, 2)], **options)


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        (lambda w, batch: w[0], r"reference must return a scalar, or sums .* got float32\[3\]"),
        (lambda w, batch: "many", "reference must return a scalar, or sums .* got str"),
    ],
)
def test_references_that_return_no_loss_are_refused(reference, message):
    with pytest.raises(TypeError, match=f"check_gradients: {message}"):
        check_gradients(total, W, BATCH, [(4, 2)], reference=reference)


def test_bad_divisors_and_statistics_are_refused_at_once():
    for options, message in [
        ({"divisors": {"box": 1.0}}, "divisors must each be for a term"),
        ({"statistics": 1.0}, "statistics must be a function"),
    ]:
        with pytest.raises((TypeError, ValueError), match=f"check_gradients: {message}"):
            check_gradients(total, W, BATCH, [(4, 2)], **options)
