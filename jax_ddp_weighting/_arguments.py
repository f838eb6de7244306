"""What a bad argument gets: one clear error that names it, the rule, the value and a way out."""

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

MAX_EXAMPLES = 2**62
"""The largest dataset: position arithmetic beyond it would leave int64."""


def check_integer(
    argument: str, value: object, low: int, high: int, rule: str, remedy: str = ""
) -> int:
    """`value` as a Python int within `[low, high]`.

    Args:
        argument: who asks for what, as the error names it: ``"keyed_order: seed"``.
        value: what the caller was given.
        low: the smallest allowed value.
        high: the largest allowed value.
        rule: what the value must do: ``"be an integer in [0, 2**62]"``.
        remedy: a closing sentence for the error.

    Raises:
        TypeError: `value` is no integer. A bool counts as none.
        ValueError: `value` is out of range.
    """
    try:
        if isinstance(value, bool | np.bool_):
            raise TypeError
        number = operator.index(value)  # type: ignore[arg-type]  # it is what we are asking
    except TypeError:
        kind = type(value).__name__
        raise TypeError(
            f"{argument} must {rule}, got {value!r} ({kind}). {remedy}".strip()
        ) from None
    if not low <= number <= high:
        raise ValueError(f"{argument} must {rule}, got {number}. {remedy}".strip())
    return number


def list_some(ids: Sequence[object] | np.ndarray, count: int | None = None) -> str:
    """At most ten ids for an error, and how many more there are of `count`."""
    count = len(ids) if count is None else count
    shown = ", ".join(str(i) for i in ids[:10])
    return f"{shown} and {count - 10} more" if count > 10 else shown


def check_seed(argument: str, seed: object) -> int:
    """`seed` as a Python int, if it is one that torch's generators take too."""
    return check_integer(
        argument,
        seed,
        -(2**63),
        2**64 - 1,
        "be an integer in [-2**63, 2**64)",
        "That is torch's own range.",
    )


def check_epoch(argument: str, epoch: object) -> int:
    """`epoch` as a Python int, if there is such an epoch."""
    return check_integer(
        argument, epoch, 0, 2**63 - 1, "be an integer in [0, 2**63)", "Epochs count from 0."
    )


def check_length(argument: str, length: object) -> int:
    """`length` as a Python int, if a dataset can have it."""
    return check_integer(argument, length, 0, MAX_EXAMPLES, "be an integer in [0, 2**62]")


def check_limit(argument: str, limit: object) -> int:
    """`limit` as a Python int, if so many ids can be listed."""
    return check_integer(
        argument, limit, 0, 2**62, "be an integer of at least 0", "What is beyond it is counted."
    )


def check_num_replicas(argument: str, num_replicas: object) -> int:
    """`num_replicas` as a Python int, if there can be so many ranks."""
    return check_integer(
        argument,
        num_replicas,
        1,
        2**31,
        "be an integer in [1, 2**31]",
        "It is the number of data-parallel ranks.",
    )


def check_microbatches(argument: str, microbatches: object) -> int:
    """`microbatches` as a Python int, if a rank can accumulate so many."""
    return check_integer(
        argument,
        microbatches,
        1,
        2**31,
        "be an integer in [1, 2**31]",
        "1 takes the batch whole.",
    )


def check_rtol(argument: str, rtol: Any) -> None:
    """Raises unless `rtol` is a relative tolerance that could tell right from wrong.

    Raises:
        TypeError: it is no number.
        ValueError: it is not in `[0, 1)`, or NaN.
    """
    try:
        allowed = 0 <= rtol < 1
    except TypeError:
        raise TypeError(
            f"{argument} must be a number in [0, 1), got {rtol!r} ({type(rtol).__name__})."
        ) from None
    if not allowed:
        raise ValueError(
            f"{argument} must be in [0, 1), got {rtol:g}. Leave it out for the default."
        )


def check_rank(argument: str, rank: object, num_replicas: int) -> int:
    """`rank` as a Python int, if it is one of so many."""
    return check_integer(
        argument,
        rank,
        0,
        num_replicas - 1,
        f"be in [0, {num_replicas})",
        f"Ranks count from zero; the last of {num_replicas} replicas is rank {num_replicas - 1}.",
    )
