"""Strings as ids: numbered as they are met, so that what counts by number counts them too."""

from collections.abc import Iterable
from typing import Any

import numpy as np
from jaxtyping import Int64

from jax_ddp_weighting._arguments import check_not_masked

STRINGS = "UT"  # dtype kinds: of fixed width, of any


class IdNames:
    """String ids and their numbers, from 0 in the order in which they came.

    Args:
        names: the first of them, all different.
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._numbers = {name: number for number, name in enumerate(names)}

    def __len__(self) -> int:
        return len(self._numbers)

    def number(self, ids: np.ndarray) -> Int64[np.ndarray, "*shape"]:
        """The numbers of some ids, those met for the first time among them."""
        # once for each different id: a dict is asked in Python
        unique, inverse = np.unique(ids, return_inverse=True)
        known = self._numbers
        numbers = [known.setdefault(name, len(known)) for name in unique.tolist()]
        return np.array(numbers, np.int64)[inverse].reshape(ids.shape)

    def find_new(self, ids: np.ndarray) -> list[str]:
        """Those of some ids that have no number yet."""
        return [name for name in np.unique(ids).tolist() if name not in self._numbers]

    def list_all(self) -> list[str]:
        """All ids, by number."""
        return list(self._numbers)


def read_ids(argument: str, values: Any) -> np.ndarray:
    """An array of ids, as numpy makes it, but not strings of numbers that lie beside strings.

    Raises:
        TypeError: some are strings and some numbers, of which numpy would make strings; or masked.
        ValueError: numpy's, of rows of unequal length.
    """
    check_not_masked(argument, values)
    found = np.asarray(values)
    spelled = found.dtype.kind in STRINGS and found.ndim and isinstance(values, list | tuple)
    if spelled and any(isinstance(each, int | float | np.number) for each in values):
        raise TypeError(
            f"{argument} must be all integers or all strings, got some of each. One kind names an"
            " example."
        )
    return found


def as_fixed_width(strings: np.ndarray) -> np.ndarray:
    """Python's strings, or numpy's of any width, as those of the width of the widest."""
    # numpy casts strings of any width to a width that is given alone
    return np.array(strings.tolist(), np.str_).reshape(strings.shape)


def read_names(function: str, names: Iterable[str], num_examples: int) -> IdNames:
    """The names of all examples, checked.

    Raises:
        TypeError: a name is no string.
        ValueError: there are more or fewer than examples, or one comes twice.
    """
    names = np.asarray(list(names)) if not isinstance(names, np.ndarray) else names
    if names.size and names.dtype.kind not in STRINGS:
        raise TypeError(
            f"{function}: names must be strings, got {names.dtype}. Leave integers out."
        )
    known = IdNames(names.tolist())
    if names.shape != (num_examples,) or len(known) != num_examples:
        raise ValueError(
            f"{function}: names must be {num_examples} different strings, one for each example, got"
            f" {len(known)} different of {names.size}. Leave names out where not all are known."
        )
    return known
