"""Sums of many arrays, and their quotients, in which nothing is rounded before the end."""

import math
from fractions import Fraction
from typing import Any

import jax.numpy as jnp
import numpy as np

_HALF = 32  # bits
_LOW = 2**_HALF - 1
_MANY_PARTS = 6  # more than float64's digits need where elements are of like size


class ExactSum:
    """The sum of arrays of one shape, exact: integers as such, floats as unevaluated sums.

    Integers of up to 64 bits are summed in two halves, which do not overflow within 2**31 arrays.
    Floats are kept as several float64 arrays that are added at the end alone: whatever an addition
    rounds off is the next one (Shewchuk's expansions, as in `math.fsum`). Both cost a few numpy
    operations per array, where a rational per element would cost microseconds each.

    Args:
        shape: that of the arrays; `()` for numbers.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape
        self._high = np.zeros(math.prod(shape), np.int64)
        self._low = np.zeros_like(self._high)
        self._parts: list[np.ndarray] = []  # from the smallest up
        self._no_numbers: np.ndarray | None = None  # NaN and infinities, 0 elsewhere
        self._has_integers = self._has_floats = False

    def add(self, array: Any) -> None:
        """Adds one array, of any real dtype."""
        array = np.asarray(array).ravel()
        if jnp.issubdtype(array.dtype, jnp.floating):
            self._has_floats = True
            self._add_floats(array.astype(np.float64))
            return
        self._has_integers = True
        array = array if array.dtype == np.uint64 else array.astype(np.int64)
        self._low += (array & _LOW).astype(np.int64)
        self._high += (array >> _HALF).astype(np.int64) + (self._low >> _HALF)
        self._low &= _LOW

    def _add_floats(self, array: np.ndarray) -> None:
        finite = np.isfinite(array)
        if not finite.all():
            before = 0 if self._no_numbers is None else self._no_numbers
            with np.errstate(invalid="ignore"):  # infinity less infinity is NaN, as it should be
                self._no_numbers = np.where(finite, 0, array) + before
            array = np.where(finite, array, 0)
        parts = []
        with np.errstate(over="raise"):
            for part in self._parts:
                both = array + part
                added = both - array
                rest = (array - (both - added)) + (part - added)  # what the addition rounded off
                if rest.any():
                    parts.append(rest)
                array = both
        self._parts = [*parts, array]
        if len(self._parts) > _MANY_PARTS:
            self._parts = _drop_zeros(self._parts)

    def add_all(self, arrays: Any) -> None:
        """Adds many arrays of one dtype, stacked: the same, in a few passes over all of them."""
        arrays = np.asarray(arrays)
        arrays = arrays.reshape(len(arrays), math.prod(self.shape))
        if not len(arrays):
            return
        if jnp.issubdtype(arrays.dtype, jnp.floating):
            self._has_floats = True
            for part in _add_up(arrays.astype(np.float64)):
                self._add_floats(part)
            return
        self._has_integers = True
        arrays = arrays if arrays.dtype == np.uint64 else arrays.astype(np.int64)
        self._low += (arrays & _LOW).astype(np.int64).sum(axis=0)
        self._high += (arrays >> _HALF).astype(np.int64).sum(axis=0) + (self._low >> _HALF)
        self._low &= _LOW

    def any(self) -> bool:
        """Whether an element is not 0; of elements that are at least 0."""
        numbers = [self._high, self._low, *self._parts]
        if self._no_numbers is not None:
            numbers.append(self._no_numbers)
        return any(bool(each.any()) for each in numbers)

    def rounded(self) -> np.ndarray:
        """The sum in float64, each element rounded once; of integers alone in integers.

        Those are int64, or Python's own in an array of objects where one does not fit.
        """
        if not self._has_floats:
            if (abs(self._high) < 2 ** (63 - _HALF)).all():
                found = (self._high << _HALF) + self._low
            else:
                found = np.array([self._element(i) for i in range(self._high.size)], object)
        else:
            found, exact = self._as_floats()
            for i in np.flatnonzero(~exact):
                found[i] = float(self._element(i))
        return found.reshape(self.shape)

    def divided_by(self, weight: "ExactSum") -> np.ndarray:
        """The quotients, float64, each rounded once; NaN where the weight is 0 or no number.

        Args:
            weight: of the same shape, or of one element.
        """
        (total, exact), (below, below_exact) = self._as_floats(), weight._as_floats()
        below, exact = np.broadcast_to(below, total.shape), exact & below_exact
        found = np.full(total.shape, np.nan)
        # Two floats are divided as exactly as two rationals are.
        with np.errstate(over="ignore", under="ignore"):
            np.divide(total, below, out=found, where=np.isfinite(below) & (below != 0))
        for i in np.flatnonzero(~exact):
            divisor = weight._element(i if weight.shape else 0)
            usable = divisor != 0 and math.isfinite(divisor)
            found[i] = float(self._element(i) / divisor) if usable else np.nan
        return found.reshape(self.shape)

    def _as_floats(self) -> tuple[np.ndarray, np.ndarray]:
        """The elements in float64, and which of them that holds exactly."""
        if not self._has_floats:
            # up to 2**53, where float64 stops counting
            exact = abs(self._high) < 2 ** (53 - _HALF)
            return self._high * 2.0**_HALF + self._low, exact
        parts = np.stack(self._parts)
        floats, several = parts.sum(axis=0), np.count_nonzero(parts, axis=0)
        exact = (several <= 1) & (not self._has_integers)
        if self._no_numbers is not None:
            floats, exact = floats + self._no_numbers, exact | (self._no_numbers != 0)
        return floats, exact

    def _element(self, i: Any) -> Any:
        """Python's integer, a rational, or the float that is no number."""
        if self._no_numbers is not None and self._no_numbers[i] != 0:  # as NaN is not
            return float(self._no_numbers[i])
        whole = (int(self._high[i]) << _HALF) + int(self._low[i])
        return sum((Fraction(float(part[i])) for part in self._parts), start=whole)


def _add_up(arrays: np.ndarray) -> list[np.ndarray]:
    """Arrays that have the sum of those, exactly, and are few.

    What every addition of a running sum rounds off is known exactly, and is summed up next: the
    passes are as many as float64 needs digits, two or three for values of like size.
    """
    found = [row for row in arrays if not np.isfinite(row).all()]
    if found:  # which have no digits to keep
        arrays = arrays[np.isfinite(arrays).all(axis=1)]
    while len(arrays) and arrays.any():
        with np.errstate(over="raise"):
            sums = np.cumsum(arrays, axis=0)  # from the first on, one after the other
        before, after, more = sums[:-1], sums[1:], arrays[1:]
        found.append(sums[-1])
        added = after - before
        arrays = (before - (after - added)) + (more - added)
    return found or [arrays.sum(axis=0)]


def _drop_zeros(parts: list[np.ndarray]) -> list[np.ndarray]:
    """The same sums, each element's parts that are not 0 moved down, in their order."""
    stacked = np.stack(parts)
    order = np.argsort(stacked == 0, axis=0, kind="stable")
    stacked = np.take_along_axis(stacked, order, axis=0)
    return [part for part in stacked if part.any()] or [stacked[0]]
