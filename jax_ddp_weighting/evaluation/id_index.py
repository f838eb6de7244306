"""Where rows go when they are put in the order of their ids."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Int64, Integer, Shaped

from jax_ddp_weighting.sampling.audit import LISTED, CoverageError, audit_ids

_BLOCK = 1 << 16  # rows numbered at once: their temporaries stay in the cache


def common_id_dtype(found: Sequence[Mapping[str, Any]], *, caller: str) -> np.dtype:
    """A dtype that holds every id, whatever dtypes they came in: int32 where that is enough.

    Args:
        found: of each source the `span` of its ids, lowest and highest, or the `width` of strings.
        caller: who speaks in errors.

    Raises:
        TypeError: no dtype holds them all.
    """
    widths = [each["width"] for each in found if "width" in each]
    spans = [each["span"] for each in found if "span" in each]
    if widths and spans:
        raise TypeError(
            f"{caller}: ids must be of one kind, got integers and strings. "
            "Use the same ids everywhere."
        )
    if widths:
        return np.dtype(f"<U{max(widths)}")
    low, high = min((s[0] for s in spans), default=0), max((s[1] for s in spans), default=0)
    if low >= -(2**31) and high < 2**31:
        return np.dtype(np.int32)
    if high < 2**63:
        return np.dtype(np.int64)
    if low < 0:
        raise TypeError(
            f"{caller}: ids must fit into one 64-bit type, got {low} and {high}. "
            "Shift them to be at least 0."
        )
    return np.dtype(np.uint64)


@dataclass(frozen=True)
class IdIndex:
    """For each of many rows, the position of its id among the different ids.

    Attributes:
        ids: the different ids, ascending; int64 (uint64 where one needs it) or strings.
        positions: for each row, where its id stands in `ids`.
        counts: how many rows each id has; None where all have one, which costs no memory.
    """

    ids: Shaped[np.ndarray, " unique"]
    positions: Integer[np.ndarray, " rows"]
    counts: Int64[np.ndarray, " unique"] | None

    def duplicated(self) -> tuple[dict[Any, int], int]:
        """The first ids that have several rows, with their numbers, and how many there are."""
        if self.counts is None:
            return {}, 0
        several = np.flatnonzero(self.counts > 1)
        first = several[:LISTED]
        pairs = zip(self.ids[first].tolist(), self.counts[first].tolist(), strict=True)
        return dict(pairs), len(several)


def index_ids(
    ids: Shaped[np.ndarray, " rows"], num_examples: int | None, *, caller: str
) -> IdIndex:
    """Where each row goes when rows are put in the order of their ids.

    Args:
        ids: int32, int64 or uint64 ids, or strings; the memory of integers is reused.
        num_examples: how many different ids there must be; integers must be exactly
            ``[0, num_examples)``.
        caller: who speaks in errors.

    Raises:
        CoverageError: ids are missing or out of range.
    """
    if num_examples is None or ids.dtype.kind not in "iu":
        index = _index_run(ids) or _rank_ids(ids)
        if num_examples is not None and len(index.ids) != num_examples:
            raise CoverageError(
                f"{caller}: {len(index.ids)} different ids found, num_examples is {num_examples}. "
                "Only integer ids can be named when they are missing: number the examples."
            )
        return index
    if _is_permutation(ids, num_examples):
        return IdIndex(np.arange(num_examples), ids, None)  # an id is its own position
    audit = audit_ids(ids, num_examples)
    if audit.num_omitted or audit.num_out_of_range:
        try:
            audit.check_exactly_once()
        except CoverageError as error:
            raise CoverageError(f"{caller}: {error}") from None
    return IdIndex(np.arange(num_examples), ids, np.bincount(ids, minlength=num_examples))


def _is_permutation(ids: Integer[np.ndarray, " rows"], num_examples: int) -> bool:
    """Whether the ids are exactly ``[0, num_examples)``: cheaper than a whole audit."""
    if len(ids) != num_examples or not num_examples:
        return not len(ids) and not num_examples
    if ids.min() < 0 or ids.max() >= num_examples:
        return False
    met = np.zeros(num_examples, bool)
    met[ids] = True  # as many ids as positions: if each is met, then once
    return bool(met.all())


def _index_run(ids: Shaped[np.ndarray, " rows"]) -> IdIndex | None:
    """The index of integers that are one run without gaps or copies: nothing to sort."""
    if not len(ids) or ids.dtype.kind not in "iu":
        return None
    low, high = int(ids.min()), int(ids.max())
    if high - low != len(ids) - 1:
        return None
    ids -= ids.dtype.type(low)  # in place, as ids are the largest thing here; put back if in vain
    if not _is_permutation(ids, len(ids)):
        ids += ids.dtype.type(low)
        return None
    if ids.dtype == np.uint64:
        return IdIndex(np.arange(low, high + 1, dtype=np.uint64), ids.astype(np.int64), None)
    return IdIndex(np.arange(low, high + 1), ids, None)


def _rank_ids(ids: Shaped[np.ndarray, " rows"]) -> IdIndex:
    rows = len(ids)
    order, ascending = _sort_ids(ids.astype(np.int64) if ids.dtype == np.int32 else ids)
    first = np.ones(rows, bool)
    np.not_equal(ascending[1:], ascending[:-1], out=first[1:])
    positions = np.empty(rows, np.int32 if rows < 2**31 else np.int64)
    before = -1  # block by block, so that no int64 of all rows is ever there
    for start in range(0, rows, _BLOCK):
        block = slice(start, start + _BLOCK)
        numbers = before + np.cumsum(first[block])
        positions[order[block]] = numbers
        before = numbers[-1]
    if first.all():
        return IdIndex(ascending, positions, None)
    starts = np.flatnonzero(first)
    return IdIndex(ascending[starts], positions, np.diff(starts, append=rows))


def _sort_ids(ids: Shaped[np.ndarray, " rows"]) -> tuple[np.ndarray, np.ndarray]:
    """`argsort(ids)` and the ids in that order.

    Where id and row fit into one word, that word is sorted: nine times as fast as numpy's argsort,
    and in the memory of the ids.
    """
    bits = max(0, len(ids) - 1).bit_length()
    if len(ids) and ids.dtype.kind in "iu":
        low, high = int(ids.min()), int(ids.max())
        # [id - low | row] in one word: sorting it sorts by id, and by row among copies, and leaves
        # the order in the low bits. 63 bits, so that int64 words stay positive.
        if high - low < 2 ** (63 - bits):
            word = ids.dtype.type
            ids -= word(low)
            ids <<= word(bits)
            for start in range(0, len(ids), _BLOCK):
                block = ids[start : start + _BLOCK]
                block |= np.arange(start, start + len(block), dtype=ids.dtype)
            ids.sort()
            order = ids & word((1 << bits) - 1)
            ids >>= word(bits)
            ids += word(low)
            return order.astype(np.intp, copy=False), ids
    order = np.argsort(ids, kind="stable")
    return order, ids[order]
