"""What was really read: unique, duplicated and omitted ids, and proof that each came once."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jax_ddp_weighting.order import MAX_EXAMPLES, check_integer
from jax_ddp_weighting.tally import Tally

_LISTED = 10_000  # ids that an audit lists; the rest it counts
_SHOWN = 10  # ids that an error shows
_BLOCK = 1 << 16


class CoverageError(Exception):
    """An epoch that did not count every id exactly once; the message names ids."""


@dataclass(frozen=True)
class EpochAudit:
    """What the slots of an epoch covered.

    Args:
        num_examples: how many ids there are.
        slots: slots looked at, padding included.
        accepted: slots of weight above 0.
        unique: different ids in accepted slots, of those in range.
        duplicated: id -> accepted slots, where there is more than one; in ascending order, up to
            the audit's limit.
        omitted: ids in no accepted slot, ascending, up to the audit's limit.
        out_of_range: different ids outside ``[0, num_examples)``, ascending, up to the limit.
        num_duplicated: how many ids are duplicated, listed or not.
        num_omitted: how many ids are omitted, listed or not.
        num_out_of_range: how many accepted slots hold an id out of range.
        per_rank: accepted slots of each rank.
        weight_range: smallest and largest accepted weight that an id received over all its slots;
            an omitted id received 0.
        epoch: the epoch, where it is known.
    """

    num_examples: int
    slots: int
    accepted: int
    unique: int
    duplicated: Mapping[int, int]
    omitted: tuple[int, ...]
    out_of_range: tuple[int, ...] = ()
    num_duplicated: int = 0
    num_omitted: int = 0
    num_out_of_range: int = 0
    per_rank: tuple[int, ...] = ()
    weight_range: tuple[float, float] = field(default=(0, 0))
    epoch: int | None = None

    @property
    def exactly_once(self) -> bool:
        """Whether every id sits in one accepted slot, and nothing else does."""
        return not (self.num_duplicated or self.num_omitted or self.num_out_of_range)

    def check_exactly_once(self) -> None:
        """Raise unless every id was accepted exactly once.

        Raises:
            CoverageError: ids were omitted, duplicated or out of range. It names them.
        """
        if self.exactly_once:
            return
        where = "" if self.epoch is None else f"epoch {self.epoch}: "
        parts = [
            f"{self.num_omitted} of {self.num_examples} ids omitted"
            + _listed(self.omitted, self.num_omitted),
            f"{self.num_duplicated} duplicated"
            + _listed(tuple(self.duplicated), self.num_duplicated),
        ]
        if self.num_out_of_range:
            parts.append(
                f"{self.num_out_of_range} slots out of range"
                + _listed(self.out_of_range, len(self.out_of_range))
            )
        remedy = 'tail="drop" cuts the tail; tail="mask" keeps every id once.'
        if self.num_duplicated and not self.num_omitted:
            remedy = 'tail="repeat" repeats ids; tail="mask" keeps every id once.'
        if self.num_out_of_range:
            remedy = "Ids count from zero, below num_examples."
        raise CoverageError(f"{where}{', '.join(parts)}. {remedy}")


def audit_ids(
    ids: Any,
    num_examples: int,
    *,
    weights: Any = None,
    epoch: int | None = None,
    limit: int = _LISTED,
) -> EpochAudit:
    """What some slots covered, counted by id.

    A slot is accepted where its weight is above 0. Takes one pass and about one byte per example.

    Args:
        ids: integer ids: one array; an array ``[ranks, slots]``; or a sequence of arrays, one for
            each rank, of any lengths.
        num_examples: how many ids there are.
        weights: weights of the same form and shape, at least 0; all 1 by default.
        epoch: the epoch to name in errors.
        limit: how many ids of a kind to list; the rest are counted.

    Returns:
        An `EpochAudit`.

    Raises:
        TypeError: ids are no integers.
        ValueError: weights are negative, NaN, infinite, or of another shape.

    Example:
        >>> audit = audit_ids([[0, 2, 4], [1, 3, 0]], 6)
        >>> audit.slots, audit.unique, audit.duplicated, audit.omitted
        (6, 5, {0: 2}, (5,))
        >>> audit_ids([[0, 2, 4], [1, 3, 0]], 5, weights=[[1, 1, 1], [1, 1, 0]]).exactly_once
        True
    """
    n = check_integer(
        "audit_ids: num_examples", num_examples, 0, MAX_EXAMPLES, "be an integer in [0, 2**62]"
    )
    limit = check_integer("audit_ids: limit", limit, 0, 2**62, "be an integer of at least 0")
    ranks = [_checked_ids(rank_ids) for rank_ids in _by_rank(ids)]
    if weights is None:
        rank_weights = [None] * len(ranks)
    else:
        rank_weights = [_checked_weights(w) for w in _by_rank(weights)]
        shapes = [w.shape for w in rank_weights]
        if shapes != [r.shape for r in ranks]:
            raise ValueError(
                "audit_ids: weights must have the shape of ids, got weights"
                f" {_shape(shapes)} and ids {_shape([r.shape for r in ranks])}."
                " Every slot has one weight."
            )
    tally, strays, per_rank = Tally(n), [], []
    lightest, heaviest = np.inf, 0.0
    for rank_ids, weight in zip(ranks, rank_weights, strict=True):
        accepted = 0
        for block, block_weights in _accepted_blocks(rank_ids, weight):
            accepted += len(block)
            inside = (block >= 0) & (block < n)
            if not inside.all():
                strays.append(block[~inside])
                block = block[inside]
                block_weights = None if block_weights is None else block_weights[inside]
            tally.add(block)
            if block_weights is not None and block_weights.size:
                lightest = min(lightest, block_weights.min())
                heaviest = max(heaviest, block_weights.max())
        per_rank.append(accepted)
    if weights is None and tally.meetings:
        lightest = heaviest = 1
    repeated, counts = tally.repeated()
    if len(repeated):
        lightest, heaviest = _summed_range(
            ranks, rank_weights, tally, lightest, heaviest, repeated, counts
        )
    unique = tally.unique
    stray = np.unique(np.concatenate(strays)) if strays else np.zeros(0, np.int64)
    return EpochAudit(
        num_examples=n,
        slots=sum(map(len, ranks)),
        accepted=sum(per_rank),
        unique=unique,
        duplicated=dict(zip(repeated[:limit].tolist(), counts[:limit].tolist(), strict=True)),
        omitted=tuple(tally.unmet(limit).tolist()),
        out_of_range=tuple(stray[:limit].tolist()),
        num_duplicated=len(repeated),
        num_omitted=n - unique,
        num_out_of_range=sum(map(len, strays)),
        per_rank=tuple(per_rank),
        weight_range=(_number(lightest) if unique == n and n else 0, _number(heaviest)),
        epoch=epoch,
    )


def _by_rank(values: Any) -> list[np.ndarray]:
    """One flat array for each rank."""
    if isinstance(values, Sequence) and any(np.ndim(value) for value in values):
        arrays = [np.asarray(value) for value in values]
    else:
        array = np.asarray(values)
        if array.ndim > 2:
            raise ValueError(
                f"audit_ids: ids must be [slots] or [ranks, slots], got shape {array.shape}."
                " Reshape them so that each rank has one row."
            )
        arrays = list(array) if array.ndim == 2 else [array.reshape(-1)]
    return [array.reshape(-1) for array in arrays]


def _checked_ids(ids: np.ndarray) -> np.ndarray:
    if ids.size == 0:
        return ids.astype(np.int64)
    if ids.dtype.kind not in "iu":
        raise TypeError(f"audit_ids: ids must be integers, got {ids.dtype}.")
    return ids


def _checked_weights(weights: np.ndarray) -> np.ndarray:
    if weights.dtype.kind not in "iufb":
        raise TypeError(f"audit_ids: weights must be numbers, got {weights.dtype}.")
    if weights.size:
        worst = weights.min()  # NaN where there is one
        if not worst >= 0:
            raise ValueError(
                f"audit_ids: weights must be at least 0, got {worst}. Padding has weight 0."
            )
        if not np.isfinite(weights.max()):
            raise ValueError("audit_ids: weights must be finite, got inf.")
    return weights


def _shape(shapes: list[tuple[int, ...]]) -> str:
    if len(set(shapes)) == 1:
        return str((len(shapes), *shapes[0]) if len(shapes) > 1 else shapes[0])
    return "by rank " + str([shape[0] for shape in shapes])


def _accepted_blocks(ids: np.ndarray, weights: np.ndarray | None):
    """The ids and weights of accepted slots, block by block."""
    for start in range(0, len(ids), _BLOCK):
        block = slice(start, start + _BLOCK)
        if weights is None:
            yield ids[block], None
            continue
        accepted = weights[block] > 0
        if accepted.all():
            yield ids[block], weights[block]
        else:
            yield ids[block][accepted], weights[block][accepted]


def _summed_range(ranks, rank_weights, tally, lightest, heaviest, repeated, counts):
    """The range of weights per id where some ids sit in several slots."""
    if lightest == heaviest:  # every accepted slot weighs the same
        once = len(repeated) < tally.unique
        return lightest * (1 if once else counts.min()), lightest * counts.max()
    sums = np.zeros(len(repeated))
    lightest, heaviest = np.inf, 0.0
    for ids, weights in zip(ranks, rank_weights, strict=True):
        for block, block_weights in _accepted_blocks(ids, weights):
            assert block_weights is not None  # without weights, all slots weigh the same
            index = np.searchsorted(repeated, block).clip(max=len(repeated) - 1)
            several = repeated[index] == block
            np.add.at(sums, index[several], block_weights[several])
            once = block_weights[~several & (block >= 0) & (block < tally.num_examples)]
            if once.size:
                lightest, heaviest = min(lightest, once.min()), max(heaviest, once.max())
    return min(lightest, sums.min()), max(heaviest, sums.max())


def _number(value: Any) -> int | float:
    """A Python number, whole where it is whole."""
    value = float(value)
    return int(value) if value.is_integer() else value


def _listed(ids: tuple[int, ...], count: int) -> str:
    """At most ten ids in brackets, and how many more."""
    if not ids:
        return ""
    shown = ", ".join(map(str, ids[:_SHOWN]))
    return f" ({shown} and {count - _SHOWN} more)" if count > _SHOWN else f" ({shown})"
