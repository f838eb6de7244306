"""The texts of the checks that every room makes."""

import re

import ml_dtypes
import numpy as np
import pytest

from jax_ddp_weighting._arguments import (
    check_at_least,
    check_below,
    check_integer,
    check_up_to,
    check_weights,
)


@pytest.mark.parametrize(
    ("low", "high", "shown"),
    [
        (1, 31, "[1, 31]"),
        (1, 2**10, "[1, 1024]"),  # small numbers are read faster than powers
        (0, 2**62, "[0, 2**62]"),
        (0, 2**63 - 1, "[0, 2**63)"),  # not nineteen digits
        (-(2**63), 2**64 - 1, "[-2**63, 2**64)"),
        (-(2**63), 10**12, "[-2**63, 1000000000000]"),
    ],
)
def test_a_range_is_shown_as_people_write_it(low, high, shown):
    for value in (low, high):
        assert check_integer("f: n", value, low, high) == value
    for value in (low - 1, high + 1):
        with pytest.raises(ValueError, match=re.escape(f"f: n must be an integer in {shown}, got")):
            check_integer("f: n", value, low, high)


@pytest.mark.parametrize(
    ("check", "text"),
    [
        (lambda: check_at_least("f: n", 0, 1, "Yes."), "f: n must be an integer of at least 1, "),
        (lambda: check_at_least("f: n", 0, 1, "Yes.", kind=""), "f: n must be at least 1, "),
        (lambda: check_up_to("f: n", 4, 3, "Yes."), "f: n must be in [0, 3], "),
        (lambda: check_below("f: n", 3, 3, "Yes."), "f: n must be in [0, 3), "),
    ],
)
def test_every_rule_names_the_value_and_ends_with_the_remedy(check, text):
    with pytest.raises(ValueError, match=re.escape(text) + r"got \d\. Yes\.$"):
        check()


@pytest.mark.parametrize("value", [True, np.True_, 1.0, "1", None, np.array([1, 2])])
def test_what_is_no_integer_is_a_type_error(value):
    with pytest.raises(TypeError, match=r"f: n must be in \[0, 3\], got .* \(\w+\)\."):
        check_up_to("f: n", value, 3)


@pytest.mark.parametrize("value", [np.int8(3), np.uint64(3), np.array(3)])
def test_numpys_integers_are_integers(value):
    number = check_up_to("f: n", value, 3)
    assert (number, type(number)) == (3, int)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16, np.int8, bool])
def test_weights_that_a_mean_can_be_taken_with_pass(dtype):
    for shape in ((), (3,), (2, 2), (0,)):
        check_weights("f: weights", np.ones(shape, dtype), "Zero is allowed.")


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("bad", [-0.5, float("nan"), float("inf"), float("-inf")])
def test_the_first_bad_weight_is_named_with_its_row(dtype, bad):
    weights = np.array([1, 0, bad, 1, -1], dtype)
    text = f"f: weights must be finite and at least 0, got {bad}"
    with pytest.raises(ValueError, match=re.escape(text + ". Yes.")):
        check_weights("f: weights", weights, "Yes.")
    with pytest.raises(ValueError, match=re.escape(text + " at row 12 of step 3. Yes.")):
        check_weights("f: weights", weights, "Yes.", first=10, where=" of step 3")
