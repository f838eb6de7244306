"""Sums of weights that cannot be wrong unsaid: nothing wraps round, nothing bad is counted.

JAX has no 64-bit integers unless x64 is on, and int32 passes its end at 2**31: the pixels of 700
images do that in one step. Floats do not wrap, but float32 stops counting at 2**24. So integers are
summed as two int32, a high and a low half, which is exact up to 2**47, adds a handful of scalar
operations to a step, and travels in the all-reduce that the weights need anyway. (A float32 pair
with compensated addition would be exact to 2**48, and has no all-reduce: `psum` adds each half by
itself. A sum that is only checked is cheaper still, and would refuse steps that are right.)
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from jax_ddp_weighting.distributed.mesh import AxisName
from jax_ddp_weighting.weighting.dtypes import widen

LARGEST = 2**31 - 1
DOES_NOT_FIT = -(2**31)
"""What an int32 weight is where its true value is unknown: bad, or more than int32 holds."""


class Count(NamedTuple):
    """An integer of up to 47 bits, `high * 2**16 + low`, both int32.

    Halves of 16 bits leave room: 2**15 of them add up before the lower one has to be carried.
    """

    high: Array
    low: Array

    def carried(self) -> "Count":
        """The same number, the lower half below 2**16 again."""
        return Count(self.high + (self.low >> 16), self.low & 0xFFFF)

    def fits(self) -> Array:
        """Whether int32 holds it; of a number that has been carried."""
        return (self.high >= -(2**15)) & (self.high < 2**15)

    def as_int32(self) -> Array:
        """The number, or what is left of it where it does not fit; of one that was carried."""
        return (self.high << 16) | self.low

    def as_float(self) -> Array:
        """The number in float32, rounded once; of a number that has been carried."""
        # The upper half times a power of two is exact up to 2**40, so only the addition rounds.
        return self.high.astype(jnp.float32) * 65536.0 + self.low.astype(jnp.float32)


Sum = Array | Count
"""A sum of weights: a float, an int64 under x64, or an integer in two halves."""


def is_count(value: Any) -> bool:
    """Whether it is an integer in two halves; for `is_leaf=` of `jax.tree`."""
    return isinstance(value, Count)


def as_wide(value: Any) -> Array:
    """An array of at least float32, or int32 for integers and bools, so that it can be added to.

    bfloat16 stops counting at 256, float16 ends at 65,504, and int8 is back at -128 after 127.

    Raises:
        OverflowError: integers on the host are too large for JAX, which would cut them.
    """
    check_width(value)
    value = jnp.asarray(value)
    if jnp.issubdtype(value.dtype, jnp.inexact):
        return value.astype(widen(jnp.float32, value.dtype))
    if not (jnp.issubdtype(value.dtype, jnp.integer) or value.dtype == jnp.bool_):
        return value  # keys: refused elsewhere, in words
    if largest_integer() > LARGEST:
        return value.astype(jnp.int64)
    # uint32 too: from 2**31 on it comes out negative, and a negative weight is a bad one
    return value.astype(jnp.int32)


def check_width(value: Any) -> None:
    """Raises `OverflowError` for integers on the host that are too large for JAX."""
    if is_too_wide(value):
        raise OverflowError(
            f"WeightedSum: integers must fit into {largest_integer().bit_length() + 1} bits, got "
            f"{np.max(np.abs(np.asarray(value, object)))}. Add up on the host what is larger, or "
            "switch jax_enable_x64 on."
        )


def largest_integer() -> int:
    """The largest integer that JAX has a dtype for as it is set up: one of 32 bits, or of 64."""
    x64 = jax.config.jax_enable_x64  # pyright: ignore[reportAttributeAccessIssue]
    return 2**63 - 1 if x64 else LARGEST


def is_too_wide(value: Any, end: int | None = None) -> bool:
    """Whether it holds integers on the host that JAX would cut, or that lie beyond `end`."""
    if not isinstance(value, int | np.integer | np.ndarray) or not np.size(value):
        return False
    array = np.asarray(value)  # of objects, where Python's integers pass 64 bits
    if array.dtype.kind not in "iuO":
        return False
    end = largest_integer() if end is None else end
    return bool(array.max() > end or array.min() < -end - 1)


@partial(jax.jit, inline=True)
def is_bad(weights: Array) -> Array:
    """Which weights cannot count: those negative, NaN or infinite."""
    bad = ~(weights >= 0)
    return bad | (weights == jnp.inf) if jnp.issubdtype(weights.dtype, jnp.inexact) else bad


def as_sum(value: Array) -> Sum:
    """A widened number or array of them, in halves where they are integers of 32 bits."""
    return Count(value >> 16, value & 0xFFFF) if value.dtype == jnp.int32 else value


@partial(jax.jit, static_argnames="axis", inline=True)
def sum_weights(weights: Array, axis: tuple[int, ...] | None = None) -> tuple[Sum, Array]:
    """The sum of all weights that can count, exact for integers, and how many cannot.

    Both come out of one reduction, because in the global view of `jit` each reduction over rows is
    an all-reduce.

    Args:
        weights: any shape.
        axis: the axes to sum over, each at least 0; all where None. The others stay.
    """
    axis = tuple(range(weights.ndim)) if axis is None else axis
    summed = math.prod(weights.shape[i] for i in axis)
    bits = _bits(weights.dtype)
    weights = as_wide(weights)
    bad = is_bad(weights)
    kept = jnp.where(bad, 0, weights)
    if weights.dtype == jnp.int32:
        # Digits so small that their sums over all rows fit, and one digit where the dtype was
        # narrow: bools need no more.
        width = min(16, max(1, 31 - max(summed - 1, 0).bit_length()))
        places = range(0, bits, width)
        digits = [_take_digit(kept, place, width, bits) for place in places]
        *sums, count = _sum_each([*digits, bad.astype(jnp.int32)], axis)
        return _from_digits(list(zip(sums, places, strict=True)), width), count
    total, count = _sum_each([kept, bad.astype(kept.dtype)], axis)
    return total, count.astype(jnp.int32)


def to_divisor(total: Sum) -> Array:
    """The sum as something to divide by: a float where it was in halves."""
    return total.as_float() if isinstance(total, Count) else total


@partial(jax.jit, inline=True)
def to_report(total: Sum) -> tuple[Array, Array | None]:
    """The sum as one number, and in float32 what that number leaves out.

    An integer stays one. Where int32 cannot hold it, it is the largest int32 there is, and the rest
    is beside it; nothing is ever left out of other sums, which have None beside them.
    """
    if not isinstance(total, Count):
        return total, None
    end = jnp.where(total.high < 0, DOES_NOT_FIT, LARGEST)
    fits = total.fits()
    rest = jnp.where(fits, 0, total.as_float() - end.astype(jnp.float32))
    return jnp.where(fits, total.as_int32(), end), rest


def to_weight(total: Sum, bad: Array, dtype: Any) -> Array:
    """The sum as one number of the dtype, negative or NaN if something was bad or does not fit."""
    value, fits = _to_number(total, dtype)
    unknown = jnp.nan if jnp.issubdtype(dtype, jnp.inexact) else int(jnp.iinfo(dtype).min)
    return jnp.where((bad > 0) | ~fits, jnp.asarray(unknown, dtype), value)


def add_checked(totals: tuple[Any, Any], weights: tuple[Any, Any]) -> tuple[Array, Array]:
    """Two totals and two weights added; the weight is bad if one was, or if a sum does not fit."""
    bad = is_bad(as_wide(weights[0])) | is_bad(as_wide(weights[1]))
    dtypes = [widened_dtype(*pair) for pair in (totals, weights)]
    sums = [_add(as_sum(as_wide(a)), as_sum(as_wide(b))) for a, b in (totals, weights)]
    return _checked(sums, bad, dtypes)


def psum_checked(total: Any, weight: Any, axis_name: AxisName) -> tuple[Array, Array]:
    """Both summed over the ranks; the weight is bad if one was, or if a sum does not fit."""
    dtypes = [widened_dtype(each) for each in (total, weight)]
    total, weight = as_sum(as_wide(total)), as_wide(weight)
    bad = is_bad(weight)
    weight = as_sum(jnp.where(bad, 0, weight))
    sums, bad = lax.psum(((total, weight), bad.astype(jnp.int32)), axis_name)
    return _checked([each.carried() if is_count(each) else each for each in sums], bad, dtypes)


def widened_dtype(*values: Any) -> Any:
    """The dtype of a sum of the values: at least float32, or int32."""
    dtypes = [jnp.result_type(value) for value in values]
    inexact = any(jnp.issubdtype(dtype, jnp.inexact) for dtype in dtypes)
    wide = widen(jnp.float32 if inexact else jnp.int32, *dtypes)
    return jax.dtypes.canonicalize_dtype(wide)


def _add(a: Sum, b: Sum) -> Sum:
    if isinstance(a, Count) and isinstance(b, Count):
        return Count(a.high + b.high, a.low + b.low).carried()
    return to_divisor(a) + to_divisor(b)


def _checked(sums: Sequence[Sum], bad: Array, dtypes: Sequence[Any]) -> tuple[Array, Array]:
    total, fits = _to_number(sums[0], dtypes[0])
    if fits.ndim > bad.ndim:  # one weight for a whole array: it is bad if any element does not fit
        fits = jnp.all(fits)
    return total, to_weight(sums[1], bad | ~fits, dtypes[1])


def _to_number(total: Sum, dtype: Any) -> tuple[Array, Array]:
    """The sum as one number of the dtype, and whether that can hold it."""
    if isinstance(total, Count):
        return total.as_int32(), total.fits()
    if jnp.issubdtype(dtype, jnp.inexact):
        return total.astype(dtype), jnp.asarray(True)
    limits = jnp.iinfo(dtype)
    return total.astype(dtype), (total >= int(limits.min)) & (total <= int(limits.max))


def _bits(dtype: Any) -> int:
    """How many bits a weight can have, beside its sign."""
    if dtype == jnp.bool_:
        return 1
    if not jnp.issubdtype(dtype, jnp.integer):
        return 0
    return min(31, int(jnp.iinfo(dtype).max).bit_length())


def _sum_each(arrays: list[Array], axis: tuple[int, ...]) -> list[Array]:
    sums = jnp.sum(jnp.stack(arrays), axis=tuple(i + 1 for i in axis))
    return [sums[i] for i in range(len(arrays))]


def _take_digit(value: Array, place: int, width: int, bits: int) -> Array:
    value = value >> place if place else value
    return value & (2**width - 1) if place + width < bits else value  # the last has no more bits


def _from_digits(digits: list[tuple[Array, int]], width: int) -> Count:
    """The number that sums of digits stand for, each with the place of its lowest bit."""
    if len(digits) == 1:
        only = digits[0][0]
        return Count(only >> 16, only & 0xFFFF)
    if width == 16:  # two digits, as nearly always: the halves themselves
        return Count(digits[1][0], digits[0][0]).carried()
    high, low = [], []
    for digit, place in digits:
        if place < 16:
            high.append(digit >> (16 - place))
            low.append((digit & (2 ** (16 - place) - 1)) << place)
        else:
            high.append(digit << (place - 16))
    return Count(sum(high[1:], start=high[0]), sum(low[1:], start=low[0])).carried()
