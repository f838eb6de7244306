"""Sums of arrays in which nothing is rounded: against rationals, element by element."""

import math
from fractions import Fraction

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_ddp_weighting.evaluation.exact_sums import ExactSum

INTEGERS = st.integers(-(2**63), 2**63 - 1) | st.sampled_from([0, 2**32, -(2**32), 2**53 + 1])
FLOATS = st.floats(-1e200, 1e200) | st.sampled_from([0.0, 0.1, 1e17, -1e17, 5e-324, 1e-300])


def exact_sum(arrays, shape):
    found = ExactSum(shape)
    for each in arrays:
        found.add(each)
    return found


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.lists(INTEGERS, min_size=2, max_size=2), min_size=1, max_size=12))
def test_drawn_integers(rows):
    found = exact_sum([np.array(row, np.int64) for row in rows], (2,)).rounded()
    assert found.tolist() == [sum(column) for column in zip(*rows, strict=True)]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.lists(FLOATS, min_size=2, max_size=2), min_size=1, max_size=20))
def test_drawn_floats(rows):
    summed = exact_sum(map(np.array, rows), (2,))
    right = [sum(map(Fraction, column)) for column in zip(*rows, strict=True)]
    assert summed.rounded().tolist() == [float(each) for each in right]
    weights = exact_sum([np.array([3, 2**53 + 1])], (2,))
    quotients = [float(right[0] / 3), float(right[1] / (2**53 + 1))]
    assert summed.divided_by(weights).tolist() == quotients


def test_many_floats_of_every_size_keep_few_parts():
    draw = np.random.default_rng(0)
    rows = draw.normal(size=(300, 5)) * 10.0 ** draw.integers(-20, 20, (300, 5))
    summed = exact_sum(rows, (5,))
    assert summed.rounded().tolist() == [float(sum(map(Fraction, column))) for column in rows.T]
    assert len(summed._parts) < 20
    # the check can fail: numpy's own sum is off in the last digits
    assert rows.sum(0).tolist() != summed.rounded().tolist()


def test_every_dtype_and_several_in_one_sum():
    summed = exact_sum(
        [
            np.array([True, False]),
            np.array([100, 100], np.int8),
            np.array([2**64 - 1, 0], np.uint64),
            np.array([-5, 7], np.int64),
        ],
        (2,),
    )
    assert summed.rounded().tolist() == [2**64 + 95, 107]
    summed.add(np.array([0.5, 0.25], jnp.bfloat16))
    assert summed.rounded().tolist() == [float(2**64 + 95), 107.25]
    weight = exact_sum([np.array([1, 3])], (2,))
    assert summed.divided_by(weight).tolist() == [float(2**64 + 95), 107.25 / 3]


def test_numbers_are_arrays_without_axes():
    summed = exact_sum([np.int32(3), np.int32(4)], ())
    assert (summed.rounded().item(), type(summed.rounded().item())) == (7, int)
    assert summed.divided_by(exact_sum([np.int32(2)], ())).item() == 3.5


def test_one_weight_divides_all_elements():
    total = exact_sum([np.array([[1.0, 2.0], [3.0, 0.1]])] * 3, (2, 2))
    weight = exact_sum([np.int32(2**30)] * 6, ())
    right = [[float(3 * Fraction(x) / (6 * 2**30)) for x in row] for row in ([1, 2], [3, 0.1])]
    assert total.divided_by(weight).tolist() == right


@pytest.mark.parametrize("weight", [0, 0.0, np.nan, np.inf])
def test_no_weight_has_no_mean(weight):
    total = exact_sum([np.array([1.0, 1.0])], (2,))
    found = total.divided_by(exact_sum([np.array([weight, 1])], (2,))).tolist()
    assert np.isnan(found[0])
    assert found[1] == 1.0


def test_what_is_no_number_stays_in_its_element():
    summed = exact_sum(
        [np.array([np.inf, np.nan, 1.0, np.inf]), np.array([-np.inf, 1, 1, 1])], (4,)
    )
    np.testing.assert_array_equal(summed.rounded(), [np.nan, np.nan, 2.0, np.inf])
    weight = exact_sum([np.int32(2)], ())
    np.testing.assert_array_equal(summed.divided_by(weight), [np.nan, np.nan, 1.0, np.inf])


def test_no_elements_and_nothing_but_zeros_are_nothing():
    assert not exact_sum([np.zeros(0)], (0,)).any()
    assert exact_sum([np.zeros(0, int)], (0,)).rounded().shape == (0,)
    assert not exact_sum([np.zeros(2), np.zeros(2, int)], (2,)).any()
    assert exact_sum([np.array([0.0, 5e-324])], (2,)).any()
    assert exact_sum([np.array([0, 1])], (2,)).any()


def test_a_sum_beyond_float64_is_said():
    summed = exact_sum([np.array([1.5e308])], (1,))
    with pytest.raises(FloatingPointError, match="overflow"):
        summed.add(np.array([1.5e308]))


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int32, np.int64, np.uint64])
def test_many_at_once_are_one_after_the_other(dtype):
    rng = np.random.default_rng(1)
    many = rng.normal(size=(40, 3)) * 10.0 ** rng.integers(-12, 9, size=(40, 1))
    many = abs(many).astype(dtype) if dtype == np.uint64 else many.astype(dtype)
    if np.issubdtype(dtype, np.floating):
        many[3, 0], many[5, 1], many[6, 1] = np.nan, np.inf, -np.inf
    one, all_of_them = ExactSum((3,)), ExactSum((3,))
    for array in many:
        one.add(array)
    all_of_them.add_all(many[:0])
    all_of_them.add_all(many[:7])
    all_of_them.add_all(many[7:])
    np.testing.assert_array_equal(all_of_them.rounded(), one.rounded())
    plain = many[:, 2].tolist()
    wanted = math.fsum(plain) if np.issubdtype(dtype, np.floating) else sum(plain)
    assert all_of_them.rounded()[2] == wanted
