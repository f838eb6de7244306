"""Sums of arrays: whatever holds of a number holds of each element, and shapes never broadcast."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import regimes
from jax import lax

from jax_ddp_weighting import WeightedSum, rank_share, value_and_grad, weighted_sum
from jax_ddp_weighting.weighting import counts

NAN = np.nan


def test_everything_is_elementwise():
    first = WeightedSum(np.array([1.0, 0.0, 4.0]), np.array([1, 0, 2]))
    second = WeightedSum(np.array([9.0, 0.0, 2.0]), np.array([3, 0, 1]))
    found = first + second
    assert found.mean().tolist() == [2.5, 0.0, 2.0]  # the absent element is 0, with weight 0
    assert found.weight.tolist() == [4, 0, 3]
    assert float(found.mean()[found.weight > 0].mean()) == 2.25  # of those that are there
    on_device = jax.tree.map(jnp.asarray, first) + second
    assert on_device.mean().tolist() == [2.5, 0.0, 2.0]
    assert sum([first, second]).mean().tolist() == [2.5, 0.0, 2.0]
    # and means do not add: the mean of the two means is another
    assert np.mean([first.mean(), second.mean()], axis=0).tolist() == [2.0, 0.0, 2.0]


def test_no_gradient_of_an_absent_element_is_nan():
    def loss(x):
        return WeightedSum(x, jnp.array([2, 0])).mean().sum()

    assert jax.grad(loss)(jnp.array([3.0, NAN])).tolist() == [0.5, 0.0]


def test_a_regulariser_beside_arrays():
    classes = WeightedSum(jnp.zeros(3), jnp.array([2, 0, 1]))
    twice = classes.once(0.25) + classes.once(0.25)
    assert (twice.mean().tolist(), twice.weight.tolist()) == ([0.25, 0, 0.25], [2, 0, 2])
    assert classes.once(jnp.arange(3.0)).mean().tolist() == [0, 0, 2]
    shared = WeightedSum(jnp.zeros(3), jnp.int32(2)).once(jnp.arange(3.0))
    assert (shared.mean().tolist(), shared.weight.shape) == ([0, 1, 2], ())
    with pytest.raises(ValueError, match=r"once: value must be a scalar or .* got \(2,\) and weig"):
        classes.once(jnp.zeros(2))


@pytest.mark.parametrize("regime", ["shard_map", "shard_map_unchecked", "pmap", "vmap"])
def test_ranks_add_each_element(regime):
    """One program a regime: narrow dtypes, counts that fit and do not, bad weights, one weight."""
    rows = np.arange(1, 5, dtype=np.float32)

    def make(axis_name):
        def summed(_, rows):
            ones = jnp.ones(2, jnp.int8)
            x = rows[0]
            sums = {
                "plain": WeightedSum(x * jnp.array([1.0, 2.0]), jnp.array([1, 0])),
                "narrow": WeightedSum(100 * ones, 100 * ones),
                "counts": WeightedSum(jnp.ones(2), jnp.array([2**29 - 1, 2**29])),
                "bad": WeightedSum(jnp.ones(3), jnp.where(x == 2, jnp.array([1.0, -1, NAN]), 1.0)),
                "one weight": WeightedSum(x * jnp.ones((2, 2)), x),
                "too large": WeightedSum(jnp.array([1, 2**30]), jnp.int32(1)),
            }
            sums = {name: each.psum(axis_name) for name, each in sums.items()}
            return {name: (each, each.mean()) for name, each in sums.items()}, None

        return summed

    found, _ = regimes.run(regime, 4, make, jnp.float32(0), rows)
    means = {name: np.asarray(mean) for name, (_, mean) in found.items()}
    weights = {name: np.asarray(each.weight) for name, (each, _) in found.items()}
    np.testing.assert_array_equal(means["plain"], [2.5, 0])
    np.testing.assert_array_equal(weights["narrow"], [400, 400])
    np.testing.assert_array_equal(found["narrow"][0].total, [400, 400])
    assert weights["counts"][0] == 2**31 - 4
    assert weights["counts"][1] < 0  # 2**31 is not there, and the element says so
    np.testing.assert_array_equal(np.isnan(means["counts"]), [False, True])
    np.testing.assert_array_equal(means["bad"], [1, NAN, NAN])
    np.testing.assert_array_equal(means["one weight"], np.ones((2, 2)))
    assert weights["one weight"] == 10
    # one weight for all: where one total does not fit, no mean can be believed
    assert weights["too large"] < 0
    assert np.isnan(means["too large"]).all()


def test_a_scan_adds_them():
    def add(carry, x):
        return carry + WeightedSum(x * jnp.ones(2), jnp.array([1, 0])), None

    zero = WeightedSum(jnp.zeros(2), jnp.zeros(2, jnp.int32))
    found, _ = lax.scan(add, zero, jnp.arange(4.0))
    assert found.mean().tolist() == [1.5, 0.0]


# --- weighted_sum(axis=) --------------------------------------------------------------------------


def test_rows_alone_are_summed():
    draw = np.random.default_rng(0)
    losses = draw.integers(0, 9, (6, 3)).astype(np.float32)
    weights = draw.integers(0, 3, (6, 3)) / 4
    weights[:, 1] = 0  # absent
    losses[weights == 0] = NAN
    found = weighted_sum(losses, weights, axis=0)
    kept = np.where(weights > 0, losses, 0)
    np.testing.assert_array_equal(found.total, (kept * weights).sum(0))
    np.testing.assert_array_equal(found.weight, weights.sum(0))
    for axis in (-2, (0,), (-2,)):
        np.testing.assert_array_equal(weighted_sum(losses, weights, axis=axis).total, found.total)
    both = weighted_sum(losses, weights, axis=(1, 0))
    assert both.mean() == weighted_sum(losses, weights).mean()
    assert both.mean() != found.mean().mean()  # the mean of means is another


@pytest.mark.parametrize(
    ("dtype", "weight", "rows"),
    [("bool", 1, 300), ("uint8", 255, 300), ("int32", 2**24 + 1, 3), ("float16", 2048, 3)],
)
def test_counts_of_each_element_are_exact(dtype, weight, rows):
    weights = jnp.asarray(np.array([[weight, 0]] * rows), dtype)
    found = weighted_sum(jnp.ones((rows, 2), bool), weights, axis=0)
    assert found.weight.tolist() == found.total.tolist() == [rows * weight, 0]
    unweighted = weighted_sum(jnp.ones((rows, 2), bool), axis=0)
    assert (unweighted.total.tolist(), unweighted.weight.tolist()) == ([rows] * 2, [rows] * 2)


def test_one_bad_weight_spoils_its_element_alone():
    weights = jnp.array([[1, 2**30, 1], [1, 2**30, -1]])
    found = weighted_sum(jnp.ones((2, 3)), weights, axis=0)
    assert (found.weight[1] < 0, found.weight[2] < 0) == (True, True)
    np.testing.assert_array_equal(found.mean(), [1, NAN, NAN])
    floats = jnp.array([[1.0, NAN, 1], [1, 1, -1]])
    np.testing.assert_array_equal(
        weighted_sum(jnp.ones((2, 3)), floats, axis=0).mean(), found.mean()
    )


@pytest.mark.parametrize("dtype", ["bool", "int32", "float32"])
def test_weights_of_each_element_are_one_reduction(dtype):
    text = str(jax.make_jaxpr(lambda w: counts.sum_weights(w, (0,)))(jnp.ones((40, 3), dtype)))
    assert text.count("reduce_sum") == 1


def test_counts_known_from_the_shape():
    losses = jax.ShapeDtypeStruct((2**31, 2), bool)
    found = jax.eval_shape(lambda x: weighted_sum(x, axis=0), losses)
    assert (found.weight.dtype, found.total.dtype) == (jnp.float32, jnp.float32)


@pytest.mark.parametrize(
    ("axis", "error", "message"),
    [
        (2, ValueError, r"axis must be an axis of losses \(4, 3\), or a tuple of them, got 2"),
        (0.0, TypeError, r"axis must be an axis of losses \(4, 3\), .*got 0\.0 \(float\)"),
        (True, TypeError, r"axis must be .* got True \(bool\)"),
        ((0, -2), ValueError, r"axis must name each axis once, got \(0, -2\)"),
    ],
)
def test_axes_that_are_none_are_refused(axis, error, message):
    with pytest.raises(error, match="weighted_sum: " + message):
        weighted_sum(jnp.ones((4, 3)), axis=axis)


# --- what is refused ------------------------------------------------------------------------------

MISFITS = [
    ((), (2,)),  # one total has one weight
    ((2, 2), (2,)),  # rows or columns? broadcasting would take columns
    ((2, 1), (1, 2)),
    ((3,), (1,)),
]


@pytest.mark.parametrize(("total", "weight"), MISFITS)
def test_a_weight_of_another_shape_is_refused(total, weight):
    misfit = WeightedSum(np.zeros(total), np.ones(weight))
    message = r"weight must have the shape of total, or be a scalar, got weight .* and total"
    for act in (misfit.mean, lambda: misfit + misfit, lambda: misfit.psum("data")):
        with pytest.raises(ValueError, match=rf"WeightedSum\.(mean|__add__|psum): {message}"):
            act()


def test_sums_of_other_shapes_do_not_add():
    three = WeightedSum(np.zeros(3), np.ones(3))
    for other in (
        WeightedSum(0.0, 1),
        WeightedSum(np.zeros(1), np.ones(1)),
        WeightedSum(np.zeros(3), 1),
    ):
        for one, two in ((three, other), (other, three)):
            with pytest.raises(ValueError, match=r"__add__: (totals|weights) must have one shape"):
                one + two


@pytest.mark.parametrize("coefficients", [None, {"loss": 1.0, "classes": 0.0}])
def test_a_term_of_a_loss_is_a_scalar(coefficients):
    def loss_fn(w, x):
        classes = WeightedSum(w * x, jnp.ones(3))
        if coefficients is None:
            return classes
        return {"loss": weighted_sum(w * x), "classes": classes}

    step = value_and_grad(loss_fn, coefficients=coefficients)
    with pytest.raises(
        ValueError,
        match=r"loss_fn must return scalar sums, got total \(3,\) and weight \(3,\) for term "
        r"'(loss|classes)'.*Sums of arrays, such as a confusion matrix, are for evaluate\.",
    ):
        step(1.0, jnp.ones(3))


def test_a_ranks_share_is_of_a_scalar():
    sums = WeightedSum(jnp.ones((2, 3)), jnp.ones((2, 3)))
    with pytest.raises(ValueError, match="rank_share: local must return scalar sums"):
        jax.vmap(lambda each: rank_share(each, "data"), axis_name="data")(sums)


# --- on the host ----------------------------------------------------------------------------------


def test_what_evaluate_counted_adds_without_end():
    large = WeightedSum(np.array([2**62, 3]), np.array([2**62, 4]))
    found = large + large
    assert (found.total.tolist(), found.weight.tolist()) == ([2**63, 6], [2**63, 8])
    assert found.mean().tolist() == [1.0, 0.75]
    assert (found + found).weight.tolist() == [2**64, 16]
    unsigned = WeightedSum(np.ones(1), np.array([2**63 + 1], np.uint64))
    assert (unsigned + unsigned).weight.tolist() == [2**64 + 2]
    small = WeightedSum(np.ones(1), np.array([1], np.uint64))
    assert (small + small).weight.dtype == np.int64
    assert (small + jax.tree.map(jnp.asarray, small)).mean().tolist() == [1.0]
    wrapped = large.weight + large.weight  # what numpy makes of it, without a word
    assert wrapped[0] < 0


def test_counts_beyond_int32_have_a_mean():
    pixels = WeightedSum(np.array([2**32, 2**33]), np.array([2**33, 2**33]))
    assert pixels.mean().tolist() == [0.5, 1.0]  # as int32 they are 0
    assert float(WeightedSum(2**32, np.int64(2**33)).mean()) == 0.5
    with pytest.raises(OverflowError, match="integers must fit into 32 bits, got 8589934592"):
        pixels + WeightedSum(jnp.ones(2), jnp.ones(2))


def test_lists_are_arrays():
    one = WeightedSum([1.0, 2.0], [1, 2])
    assert (one + one).total.tolist() == [2.0, 4.0]  # not a list of four
    assert one.mean().tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("bad", "good"),
    [(-1, 3), (NAN, 3.0), (-0.5, 1.0), (np.array([-1, 1]), np.array([3, 1])), (np.int64(-1), 3)],
)
def test_a_bad_weight_stays_bad_on_the_host(bad, good):
    for weights in ((bad, good), (good, bad)):
        found = WeightedSum(np.ones(np.shape(bad)), weights[0]) + WeightedSum(
            np.ones(np.shape(bad)), weights[1]
        )
        again = found + WeightedSum(np.ones(np.shape(bad)), good)
        for each in (found, again):
            assert np.isnan(np.ravel(each.mean())).tolist() == [True, False][: np.size(bad)]
