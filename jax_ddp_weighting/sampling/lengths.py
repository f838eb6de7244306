"""Lengths of examples, and what plans over them have in common."""

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Int64, Integer

from jax_ddp_weighting._arguments import check_rank, list_some


def check_lengths(
    caller: str, lengths: Integer[np.ndarray, "..."] | Sequence[int] | Any, most: int, limit: str
) -> Int64[np.ndarray, " examples"]:
    """Lengths as int64, that cannot be written, if they are whole numbers in ``[1, most]``.

    Args:
        caller: who speaks in errors.
        lengths: whatever was given.
        most: the largest allowed.
        limit: what that is called.

    Raises:
        TypeError: lengths are no integers.
        ValueError: a length is below 1 or above `most`, or there is more than one axis.
    """
    found = np.asarray(lengths)
    if found.dtype == object and not found.ndim:
        raise TypeError(
            f"{caller}: lengths must be an array or a sequence, got a {type(lengths).__name__}."
            " Make a list of it."
        )
    if found.ndim != 1:
        raise ValueError(
            f"{caller}: lengths must have one axis, got shape {found.shape}. Each example has one."
        )
    if found.size and found.dtype.kind not in "iu":
        raise TypeError(
            f"{caller}: lengths must be integers, got {found.dtype}. They count tokens; round costs"
            " that are none up."
        )
    for bad, rule, remedy in (
        (found < 1, "at least 1", "Leave out examples that have nothing."),
        (found > most, f"at most the {limit}, {most}", f"Give a larger {limit}, or cut them."),
    ):
        if bad.any():
            where = np.flatnonzero(bad)
            raise ValueError(
                f"{caller}: lengths must be {rule}, got {list_some(found[where])} of examples"
                f" {list_some(where)}. {remedy}"
            )
    found = found.astype(np.int64)  # a copy: the caller's array may change
    found.flags.writeable = False
    return found


def digest_lengths(lengths: Int64[np.ndarray, " examples"]) -> str:
    """Sixteen letters that tell these lengths from others, the same on every machine."""
    return hashlib.blake2b(lengths.astype("<i8").tobytes(), digest_size=8).hexdigest()


def check_ranks(
    argument: str, ranks: Sequence[int] | None, num_replicas: int
) -> Int64[np.ndarray, " ranks"]:
    """The ranks that are asked for, all where that is None."""
    if ranks is None:
        return np.arange(num_replicas)
    if np.ndim(ranks) == 0:
        raise TypeError(
            f"{argument} must be a sequence of ranks, got {ranks}. Write [{ranks}] for one."
        )
    return np.array([check_rank(argument, rank, num_replicas) for rank in ranks], np.int64)


def derive_seed(seed: int, what: str) -> int:
    """A seed of its own for each choice, so that groups of one size are not shuffled alike."""
    return int.from_bytes(hashlib.blake2b(f"{seed} {what}".encode(), digest_size=8).digest())
