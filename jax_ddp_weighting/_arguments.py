"""What a bad argument gets: one clear error that names it, the rule, the value and a way out."""

import operator
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

MAX_EXAMPLES = 2**62
"""The largest dataset: position arithmetic beyond it would leave int64."""

_SPELLED = 2**20  # bounds above it are spelled as powers of two where they are


def check_integer(
    argument: str, value: object, low: int, high: int, remedy: str = "", *, rule: str = ""
) -> int:
    """`value` as a Python int within `[low, high]`.

    Args:
        argument: who asks for what, as the error names it: ``"keyed_order: seed"``.
        value: what the caller was given.
        low: the smallest allowed value.
        high: the largest allowed value.
        remedy: a closing sentence for the error.
        rule: what the value must do; ``"be an integer in [low, high]"`` by default.

    Raises:
        TypeError: `value` is no integer. A bool counts as none.
        ValueError: `value` is out of range.
    """
    try:
        if isinstance(value, bool | np.bool_):  # Python counts with it; who passes one errs
            raise TypeError
        number = operator.index(value)  # type: ignore[arg-type]  # it is what we are asking
    except TypeError:
        got, error = f"{value!r} ({type(value).__name__})", TypeError
    else:
        if low <= number <= high:
            return number
        got, error = number, ValueError
    rule = rule or f"be an integer in {_show_range(low, high)}"
    raise error(f"{argument} must {rule}, got {got}. {remedy}".strip())


def _show_range(low: int, high: int) -> str:
    """The range as people write it: ``[0, 2**63)`` rather than nineteen digits."""
    first, last, past = map(_show_bound, (low, high, high + 1))
    return f"[{first}, {past})" if past.startswith("2**") else f"[{first}, {last}]"


def _show_bound(number: int) -> str:
    if abs(number) <= _SPELLED or number.bit_count() > 1:  # small, or no power of two
        return str(number)
    return f"{'-' if number < 0 else ''}2**{number.bit_length() - 1}"


def check_at_least(
    argument: str, value: object, low: int, remedy: str = "", *, kind: str = "an integer of "
) -> int:
    """`value` as a Python int of at least `low`, which an array can still count."""
    return check_integer(argument, value, low, 2**62, remedy, rule=f"be {kind}at least {low}")


def check_up_to(argument: str, value: object, last: int, remedy: str = "") -> int:
    """`value` as a Python int in `[0, last]`."""
    return check_integer(argument, value, 0, last, remedy, rule=f"be in [0, {last}]")


def check_below(argument: str, value: object, count: int, remedy: str = "") -> int:
    """`value` as a Python int in `[0, count)`: one of so many things that count from zero."""
    return check_integer(argument, value, 0, count - 1, remedy, rule=f"be in [0, {count})")


def check_weights(
    argument: str,
    weights: Any,
    remedy: str,
    *,
    first: int | None = None,
    where: str = "",
    show: str = "",
) -> None:
    """Raises unless every weight is one that a mean can be taken with.

    Args:
        argument: who asks for what: ``"Batch.of: weights"``.
        weights: numbers of any shape.
        remedy: a closing sentence for the error.
        first: the row of the first weight, where the error is to name the row.
        where: what the rows belong to, such as ``" of step 3"``.
        show: how the error writes the weight, as `format` has it.

    Raises:
        ValueError: a weight is negative, NaN or infinite. It names the first.
    """
    flat = np.ravel(weights)
    with np.errstate(invalid="ignore"):  # narrow dtypes warn of a NaN, which gets an error here
        # two reductions take no memory beside the weights, which may be very many; NaN fails both
        if not flat.size or (flat.min() >= 0 and np.isfinite(flat.max())):
            return
        bad = int(np.flatnonzero(~((flat >= 0) & np.isfinite(flat)))[0])
    row = "" if first is None else f" at row {first + bad}{where}"
    raise ValueError(
        f"{argument} must be finite and at least 0, got {flat[bad]:{show}}{row}. {remedy}"
    )


def check_callable(argument: str, value: object, remedy: str) -> None:
    """Raises `TypeError` for what is no function."""
    if not callable(value):
        raise TypeError(f"{argument} must be a function, got {type(value).__name__}. {remedy}")


def read_numbers(
    argument: str, values: Any, remedy: str = "Give one for each example."
) -> np.ndarray:
    """An array of real numbers; those of a dtype that numpy does not know, as bfloat16, in float32.

    Raises:
        TypeError: they are no such numbers, or masked, or no array can be made of them.
    """
    check_not_masked(argument, values)
    try:
        found = np.asarray(values)
    except (TypeError, ValueError) as error:  # rows of unequal length; torch's bfloat16
        raise TypeError(f"{argument} must be an array of numbers, but {error}. {remedy}") from None
    if found.dtype.kind == "O" and not found.ndim:  # numpy wraps whatever it cannot read
        raise TypeError(
            f"{argument} must be an array of numbers, got a {type(values).__name__}. {remedy}"
        )
    if found.dtype.kind == "V" and found.dtype.names is None and found.dtype.type is not np.void:
        found = found.astype(np.float32)
    if found.size and found.dtype.kind not in "iufb":
        raise TypeError(f"{argument} must be numbers, got {found.dtype}. {remedy}")
    return found


def check_not_masked(argument: str, values: Any) -> None:
    """Raises where values of a numpy array are masked: whoever reads them would not see it.

    Raises:
        TypeError: some are; a masked array of which none is, as readers give them, is its values.
    """
    # whoever has a masked array has imported it, and else it would take its time here
    ma: Any = sys.modules.get("numpy.ma")
    if ma is not None and isinstance(values, ma.MaskedArray) and ma.is_masked(values):
        raise TypeError(
            f"{argument} must not be masked, got {ma.count_masked(values)} of {values.size}"
            " values so. Masks are lost on the way: fill them, as values.filled(0) does, and let"
            " rows that are not to count weigh 0."
        )


def as_native(values: np.ndarray) -> np.ndarray:
    """The same values in this machine's byte order, as JAX has them; files may hold the other."""
    dtype = values.dtype
    return values if dtype.isnative else values.astype(dtype.newbyteorder("="))


def list_some(ids: Sequence[object] | np.ndarray, count: int | None = None) -> str:
    """At most ten ids for an error, and how many more there are of `count`."""
    count = len(ids) if count is None else count
    shown = ", ".join(str(i) for i in ids[:10])
    return f"{shown} and {count - 10} more" if count > 10 else shown


def check_seed(argument: str, seed: object) -> int:
    """`seed` as a Python int, if it is one that torch's generators take too."""
    return check_integer(argument, seed, -(2**63), 2**64 - 1, "That is torch's own range.")


def check_epoch(argument: str, epoch: object) -> int:
    """`epoch` as a Python int, if there is such an epoch."""
    return check_integer(argument, epoch, 0, 2**63 - 1, "Epochs count from 0.")


def check_length(argument: str, length: object) -> int:
    """`length` as a Python int, if a dataset can have it."""
    return check_integer(argument, length, 0, MAX_EXAMPLES)


def check_limit(argument: str, limit: object) -> int:
    """`limit` as a Python int, if so many ids can be listed."""
    return check_at_least(argument, limit, 0, "What is beyond it is counted.")


def check_num_replicas(argument: str, num_replicas: object) -> int:
    """`num_replicas` as a Python int, if there can be so many ranks."""
    remedy = "It is the number of data-parallel ranks."
    return check_integer(argument, num_replicas, 1, 2**31, remedy)


def check_microbatches(argument: str, microbatches: object) -> int:
    """`microbatches` as a Python int, if a rank can accumulate so many."""
    return check_integer(argument, microbatches, 1, 2**31, "1 takes the batch whole.")


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
    last = f"the last of {num_replicas} replicas is rank {num_replicas - 1}"
    return check_below(argument, rank, num_replicas, f"Ranks count from zero; {last}.")
