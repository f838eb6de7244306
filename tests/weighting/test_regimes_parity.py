"""One gradient in every regime: drawn splits, weights, terms and microbatches against numpy."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import regimes
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from jax_ddp_weighting import GlobalLoss, WeightedSum, rank_share, value_and_grad, weighted_sum

RANKS, ROWS, FEATURES = 4, 6, 3  # rows of one rank: two to each of three microbatches
RNG = np.random.default_rng(3)
X = RNG.normal(size=(RANKS * ROWS, FEATURES))
Y = RNG.normal(size=RANKS * ROWS)
PARAMS = {"a": RNG.normal(size=FEATURES), "b": RNG.normal()}


def losses_of(params, batch):
    fit = (batch["x"] @ params["a"] + params["b"] - batch["y"]) ** 2 + batch["noise"]
    size = jnp.sin(batch["x"] @ params["a"]) + batch["noise"]
    return fit, size


def terms_of(params, batch):
    fit, size = losses_of(params, batch)
    fit = weighted_sum(fit, batch["weights"])
    return {
        "fit": fit,
        "size": weighted_sum(size, batch["counts"]),
        "norm": fit.once(jnp.sum(params["a"] ** 2)),
    }


def on_one_device(weights, counts, coefficients):
    """Loss, gradient and the sizes that rounding is measured by, in numpy, from the formulas."""
    error, along = X @ PARAMS["a"] + PARAMS["b"] - Y, X @ PARAMS["a"]
    share = weights / (weights.sum() or 1)
    part = counts / (counts.sum() or 1)
    any_weight = float(weights.sum() > 0)
    value, gradient, scale = 0.0, np.zeros(FEATURES + 1), 0.0
    columns = np.column_stack([X, np.ones(len(X))])
    for factor, row_values, row_gradients, row_shares in (
        (coefficients["fit"], error**2, 2 * error[:, None] * columns, share),
        (
            coefficients["size"],
            np.sin(along),
            np.cos(along)[:, None] * columns * [1, 1, 1, 0],
            part,
        ),
    ):
        value += factor * np.sum(row_shares * row_values)
        gradient += factor * (row_shares @ row_gradients)
        scale += abs(factor) * np.sum(row_shares * np.abs(row_gradients).max(axis=1))
    norm = coefficients["norm"] * any_weight
    value += norm * np.sum(PARAMS["a"] ** 2)
    gradient[:FEATURES] += norm * 2 * PARAMS["a"]
    return value, gradient, scale + abs(norm) * 10


def ours(microbatches):
    def make(axis_name):
        def fn(params, rows):
            coefficients = params["coefficients"]
            gradient_of = value_and_grad(
                terms_of,
                axis_name=axis_name,
                microbatches=microbatches,
                coefficients=coefficients,
            )
            return gradient_of(params["model"], rows)

        return fn

    return make


def mean_of_local_means(microbatches):
    """The usual bug, as a control: every rank and microbatch has one vote."""

    def make(axis_name):
        def fn(params, rows):
            local = params["model"]
            if axis_name is not None:
                local = jax.tree.map(lambda p: p + 0 * lax.axis_index(axis_name), local)
            split = jax.tree.map(lambda x: x.reshape(-1, microbatches, *x.shape[1:]), rows)

            def loss(model):
                means = [
                    sum(
                        params["coefficients"][name] * term.mean()
                        for name, term in terms_of(
                            model, jax.tree.map(lambda x, k=k: x[:, k], split)
                        ).items()
                    )
                    for k in range(microbatches)
                ]
                return sum(means) / microbatches

            value, gradient = jax.value_and_grad(loss)(local)
            if axis_name is not None:
                value, gradient = lax.pmean((value, gradient), axis_name)
            return GlobalLoss(value, {}), gradient

        return fn

    return make


@cache
def compiled(regime, microbatches, make=ours):
    return regimes.prepared(regime, RANKS, make(microbatches))


def assert_one_devices_gradient(run, weights, counts, coefficients):
    weights, counts = np.asarray(weights, float), np.asarray(counts, np.int32)
    noise = np.where((weights == 0) | (counts == 0), np.nan, 0.0)
    noise[(weights != 0) | (counts != 0)] = 0.0  # NaN where neither term counts the row
    with jax.enable_x64(True):
        rows = {"x": X, "y": Y, "noise": noise, "weights": weights, "counts": counts}
        rows = jax.tree.map(jnp.asarray, rows)
        params = jax.tree.map(jnp.float64, {"model": PARAMS, "coefficients": coefficients})
        params["model"]["a"] = jnp.asarray(PARAMS["a"])
        loss, gradient = jax.device_get(run(params, rows))
    value, right, scale = on_one_device(weights, counts, coefficients)
    found = np.append(gradient["a"], gradient["b"])
    np.testing.assert_allclose(found, right, rtol=1e-12, atol=1e-12 * scale)
    np.testing.assert_allclose(loss.value, value, rtol=1e-12, atol=1e-12 * scale)


def rows_of(weight):
    """One weight per row, of ranks that hold no accepted row, a few, or all."""
    rank = st.one_of(
        st.just([0] * ROWS),
        st.lists(st.one_of(st.just(0), weight), min_size=ROWS, max_size=ROWS),
        st.lists(weight, min_size=ROWS, max_size=ROWS),
    )
    return st.lists(rank, min_size=RANKS, max_size=RANKS).map(np.concatenate)


WEIGHTS = rows_of(st.sampled_from([1.0, 0.25, 1 / 3, 1e-3]) | st.floats(0.01, 1e6))
COUNTS = rows_of(st.integers(1, 2**20))
COEFFICIENTS = st.fixed_dictionaries(
    {
        # no coefficient whose products are subnormal: XLA flushes those to 0
        name: st.sampled_from([0.0, 1.0, -1.0]) | st.floats(1e-3, 10) | st.floats(-10, -1e-3)
        for name in ("fit", "size", "norm")
    }
)
EVERYWHERE = [(regime, 3) for regime in (*regimes.REGIMES, *regimes.SEVERAL_AXES)]
WHOLE = [(regime, 1) for regime in ("jit", "shard_map", "shard_map_unchecked", "pmap")]


@pytest.mark.parametrize(("regime", "microbatches"), EVERYWHERE + WHOLE)
def test_drawn_batches_have_one_devices_gradient(regime, microbatches):
    run = compiled(regime, microbatches)

    # fake_pmap traces anew at every call
    @settings(max_examples=3 if regime == "fake_pmap" else 20, deadline=None, derandomize=True)
    @given(WEIGHTS, COUNTS, COEFFICIENTS)
    def check(weights, counts, coefficients):
        assert_one_devices_gradient(run, weights, counts, coefficients)

    check()


# ranks with 2, 1, 1 and no accepted rows
UNKIND = np.eye(ROWS)[[0, 3, 5, 5]] + np.eye(ROWS)[[4, 3, 5, 5]]
UNKIND[3] = 0


@pytest.mark.parametrize(
    ("regime", "microbatches"),
    [("shard_map", 1), ("shard_map_unchecked", 3), ("pmap", 3), ("vmap_two_axes", 3), ("jit", 3)],
)
def test_the_mean_of_local_means_fails_the_same_check(regime, microbatches):
    case = (UNKIND.reshape(-1), UNKIND.reshape(-1), {"fit": 1.0, "size": 0.5, "norm": 0.1})
    assert_one_devices_gradient(compiled(regime, 3), *case)
    with pytest.raises(AssertionError, match="Not equal to tolerance rtol=1e-12"):
        assert_one_devices_gradient(compiled(regime, microbatches, mean_of_local_means), *case)


def test_a_step_without_any_weight_has_value_and_gradient_zero():
    zeros = np.zeros(RANKS * ROWS)
    run = compiled("shard_map", 3)
    assert_one_devices_gradient(run, zeros, zeros, {"fit": 1.0, "size": 1.0, "norm": 1.0})
    assert on_one_device(zeros, zeros, {"fit": 1.0, "size": 1.0, "norm": 1.0})[0] == 0


MAPPED = [r for r in (*regimes.MAPPED, *regimes.SEVERAL_AXES) if not r.startswith("jit")]


@pytest.mark.parametrize(
    ("regime", "reduced"),
    [(regime, False) for regime in MAPPED]
    + [(regime, True) for regime in ("shard_map", "shard_map_unchecked", "pmap", "vmap_two_axes")],
)
def test_a_users_own_pmean_around_rank_share(regime, reduced):
    """Also of a sum that has been summed over the ranks already, and under another pmean."""

    def make(axis_name):
        def fn(params, rows):
            def share(model):
                local = weighted_sum(losses_of(model, rows)[0], rows["weights"])
                return rank_share(local.psum(axis_name) if reduced else local, axis_name)

            value, gradient = lax.pmean(jax.value_and_grad(share)(params["model"]), axis_name)
            return GlobalLoss(lax.pmean(value, axis_name), {}), lax.pmean(gradient, axis_name)

        return fn

    ranks = 4
    assert_one_devices_gradient(
        regimes.prepared(regime, ranks, make),
        UNKIND.reshape(-1) * 0.25,
        np.zeros(RANKS * ROWS),
        {"fit": 1.0, "size": 0.0, "norm": 0.0},
    )


@pytest.mark.parametrize("regime", ["shard_map", "shard_map_unchecked", "pmap", "vmap"])
def test_a_loss_that_has_summed_over_the_ranks_itself_is_right_too(regime):
    def make(axis_name):
        def summed(model, rows):
            terms = terms_of(model, rows)
            return {name: terms[name].psum(axis_name) for name in ("fit", "size")}

        def fn(params, rows):
            coefficients = {name: params["coefficients"][name] for name in ("fit", "size")}
            gradient_of = value_and_grad(summed, axis_name=axis_name, coefficients=coefficients)
            return gradient_of(params["model"], rows)

        return fn

    assert_one_devices_gradient(
        regimes.prepared(regime, RANKS, make),
        UNKIND.reshape(-1),
        UNKIND.reshape(-1),
        {"fit": 1.0, "size": 2.0, "norm": 0.0},
    )


def test_hits_are_a_metric_beside_the_loss():
    def loss_fn(w, x):
        hits = weighted_sum(x > 2, jnp.ones(x.shape, jnp.int32))
        broken = WeightedSum(jnp.sum(jnp.sqrt(w - w)) / 0.0, jnp.int32(1))
        return {"loss": weighted_sum(w * x), "hits": hits, "broken": broken}

    coefficients = {"loss": 1.0, "hits": 0.0, "broken": 0}
    loss, gradient = value_and_grad(loss_fn, coefficients=coefficients, microbatches=2)(
        2.0, jnp.arange(1, 5.0)
    )
    assert (loss.value, gradient) == (5.0, 2.5)
    assert loss.terms["hits"].total == 2
    assert loss.terms["hits"].total.dtype == jnp.int32
    assert jnp.isnan(loss.terms["broken"].mean())
