"""Numerators and denominators: a table with a remark on each surprising row."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_ddp_weighting import WeightedSum, valid_labels, weighted_sum

NAN, INF = np.nan, np.inf


@pytest.mark.parametrize(
    ("losses", "weights", "mean"),
    [
        ([1.0, 2.0, 6.0], None, 3.0),
        ([2.0, 4.0], [0.25, 0.25], 3.0),  # a clamp of the weight to 1 gives 1.5
        ([1.0, 3.0], [1.0, 0.25], 1.4),  # weights turned to bools give 2.0
        ([5.0, NAN], [1, 0], 5.0),  # NaN * 0 is NaN: the row must be left out, not multiplied
        ([5.0, INF, -INF], [2, 0, 0], 5.0),
        ([5.0, 7.0], [0, 0], 0.0),  # no weight at all
        ([], [], 0.0),
        ([1.0, 0.0, 1.0], [True, False, True], 1.0),
    ],
)
def test_weighted_means(losses, weights, mean):
    weights = None if weights is None else np.array(weights)
    assert float(weighted_sum(np.array(losses, np.float32), weights).mean()) == pytest.approx(mean)


@pytest.mark.parametrize(
    ("losses", "weights", "total", "weight"),
    [
        ("float32", "float32", "float32", "float32"),
        ("bfloat16", "int32", "float32", "int32"),
        ("float16", "bfloat16", "float32", "float32"),
        ("float32", "uint8", "float32", "int32"),  # 300 rows of weight 1 would wrap in uint8
        ("int32", "int32", "float32", "int32"),
        ("bool", "bool", "int32", "int32"),  # hits are counted
        ("bool", "float32", "float32", "float32"),
    ],
)
def test_dtypes_of_sums(losses, weights, total, weight):
    found = weighted_sum(jnp.ones(4, losses), jnp.ones(4, weights))
    assert (found.total.dtype, found.weight.dtype) == (total, weight)


def test_float64_is_kept():
    with jax.enable_x64(True):
        found = weighted_sum(jnp.ones(4, jnp.float64), jnp.ones(4, jnp.float32))
        assert found.total.dtype == jnp.float64
        found = weighted_sum(jnp.ones(4, jnp.float32), jnp.ones(4, jnp.float64))
        assert (found.total.dtype, found.weight.dtype) == (jnp.float64, jnp.float64)


def test_counts_pass_the_places_where_floats_stop():
    # bfloat16 stops counting at 256; float32 at 2**24
    rows = weighted_sum(jnp.ones(1000, jnp.bfloat16), jnp.ones(1000, jnp.bfloat16))
    assert (rows.total, rows.weight) == (1000, 1000)
    assert jnp.bfloat16(256) + jnp.bfloat16(1) == 256
    big = weighted_sum(jnp.ones(2, bool), jnp.array([2**24, 1]))
    assert big.total == big.weight == 2**24 + 1


def test_sums_add_and_means_do_not():
    parts = [WeightedSum(1.0, 1), WeightedSum(9.0, 3)]
    assert sum(parts).mean() == 2.5
    assert np.mean([part.mean() for part in parts]) == 2.0


def test_a_sum_adds_to_sums_only():
    with pytest.raises(TypeError, match="unsupported operand"):
        WeightedSum(1.0, 1) + 2.0


def test_no_gradient_flows_into_weights():
    gradient = jax.grad(lambda w: weighted_sum(jnp.array([1.0, 3.0]), w).mean())(jnp.ones(2))
    np.testing.assert_array_equal(gradient, [0.0, 0.0])


def test_the_gradient_of_an_empty_mean_is_zero():
    gradient = jax.grad(lambda x: weighted_sum(x, jnp.zeros(2)).mean())(jnp.array([1.0, NAN]))
    np.testing.assert_array_equal(gradient, [0.0, 0.0])


@pytest.mark.parametrize("vocabulary", [8, 128])
def test_ignored_labels_leave_value_and_gradient_alone(vocabulary):
    # optax gives NaN for label -100 in a vocabulary of 8, and a finite wrong value in one of 128
    logits = jax.random.normal(jax.random.key(0), (4, vocabulary))
    labels = jnp.array([1, -100, 3, -100])

    def mean(logits):
        safe, weights = valid_labels(labels)
        return weighted_sum(
            optax.softmax_cross_entropy_with_integer_labels(logits, safe), weights
        ).mean()

    def by_hand(logits):
        kept = jnp.array([0, 2])
        return optax.softmax_cross_entropy_with_integer_labels(logits[kept], labels[kept]).mean()

    for ours, right in zip(
        jax.jit(jax.value_and_grad(mean))(logits),
        jax.jit(jax.value_and_grad(by_hand))(logits),
        strict=True,
    ):
        np.testing.assert_allclose(ours, right, rtol=1e-6, atol=1e-7)


def test_a_regulariser_is_counted_once_and_only_beside_data():
    data, empty = WeightedSum(6.0, 4), WeightedSum(0.0, 0)
    assert (data.once(0.25) + data.once(0.25) + empty.once(0.25)).mean() == 0.25
    assert empty.once(0.25) == WeightedSum(0.0, 0)


def test_weights_of_another_shape_are_refused():
    message = (
        r"weighted_sum: weights must have the shape of losses, got weights \(8,\) and losses "
        r"\(8, 128\). Reduce the losses to one per example, or spell the weights out per token."
    )
    with pytest.raises(ValueError, match=message):
        weighted_sum(jnp.ones((8, 128)), jnp.ones(8))


def test_labels_that_are_no_integers_are_refused():
    with pytest.raises(TypeError, match="valid_labels: labels must be integers, got float32"):
        valid_labels(jnp.ones(3))


@pytest.mark.parametrize(
    ("dtype", "ignore_index", "labels", "weights"),
    [
        (np.uint8, -100, [156, 156, 1], [1, 1, 1]),  # -100 wraps around to 156
        (np.uint16, -100, [65436, 3, 1], [1, 1, 1]),
        (np.int8, 255, [3, -1, 5], [1, 1, 1]),
        (np.uint8, 255, [3, 255, 5], [1, 0, 1]),
        (np.int8, -100, [3, -100, 5], [1, 0, 1]),
    ],
)
def test_an_ignored_label_that_the_dtype_cannot_hold_is_no_class(
    dtype, ignore_index, labels, weights
):
    found = valid_labels(np.array(labels, dtype), ignore_index)[1]
    assert found.tolist() == weights


def test_a_fractional_ignore_index_is_refused():
    with pytest.raises(
        TypeError, match=r"valid_labels: ignore_index must be an integer, got -1\.5"
    ):
        valid_labels(jnp.array([3, -1]), -1.5)
