"""What was really read: slots counted by id."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jax_ddp_weighting.arguments import check_length, check_limit
from jax_ddp_weighting.coverage import LISTED as LISTED
from jax_ddp_weighting.coverage import CoverageError as CoverageError
from jax_ddp_weighting.coverage import EpochAudit as EpochAudit
from jax_ddp_weighting.coverage import audit_of
from jax_ddp_weighting.entries import Rank, checked
from jax_ddp_weighting.ledger import Ledger as Ledger
from jax_ddp_weighting.tally import Tally

_BLOCK = 1 << 16  # slots looked at at once


def audit_ids(
    ids: Any,
    num_examples: int,
    *,
    weights: Any = None,
    epoch: int | None = None,
    limit: int = LISTED,
) -> EpochAudit:
    """What some slots covered, counted by id.

    A slot is accepted where its weight is above 0. One pass, about one byte per example; a second
    pass where weights differ and ids come several times.

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
    n = check_length("audit_ids: num_examples", num_examples)
    limit = check_limit("audit_ids: limit", limit)
    rank_weights = None if weights is None else _by_rank("weights", weights)
    ranks = checked("audit_ids", _by_rank("ids", ids), rank_weights)
    tally, strays, per_rank = Tally(n), [], []
    for rank in ranks:
        accepted = 0
        for block, _ in _accepted_blocks(*rank):
            accepted += len(block)
            if block.size and (block.min() < 0 or block.max() >= n):
                inside = (block >= 0) & (block < n)
                strays.append(block[~inside])
                block = block[inside]
            tally.add(block)
        per_rank.append(accepted)
    return audit_of(
        tally,
        slots=sum(len(rank_ids) for rank_ids, _ in ranks),
        strays=strays,
        per_rank=tuple(per_rank),
        weight_range=_weight_range(ranks, tally),
        epoch=epoch,
        limit=limit,
    )


def _by_rank(name: str, values: Any) -> list[np.ndarray]:
    """One array for each rank."""
    if isinstance(values, Sequence) and not all(isinstance(value, int) for value in values):
        arrays = [np.asarray(value) for value in values]
        if all(array.ndim for array in arrays):
            return arrays
    array = np.asarray(values)
    if array.ndim > 2:
        raise ValueError(
            f"audit_ids: {name} must be [slots] or [ranks, slots], got shape {array.shape}."
            " Reshape them so that each rank has one row."
        )
    return list(array) if array.ndim == 2 else [array]


def _accepted_blocks(ids: np.ndarray, weights: np.ndarray | None) -> Iterator[Rank]:
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


def _weight_range(ranks: Sequence[Rank], tally: Tally) -> tuple[float, float] | None:
    """The smallest and the largest accepted weight that an id received over all its slots.

    None where weights only say whether a slot counts.
    """
    if not tally.meetings or all(weights is None or _plain(weights) for _, weights in ranks):
        return None
    repeated, _ = tally.repeated()
    sums = np.zeros(len(repeated))
    lightest, heaviest = np.inf, 0.0
    for rank in ranks:
        for ids, weights in _accepted_blocks(*rank):
            assert weights is not None  # one rank's weights are there where another's are
            several = np.zeros(len(ids), bool)
            if repeated.size:
                index = np.searchsorted(repeated, ids).clip(max=len(repeated) - 1)
                several = repeated[index] == ids
                np.add.at(sums, index[several], weights[several])
            inside = (ids >= 0) & (ids < tally.num_examples)
            single = weights[inside & ~several].astype(np.float64)
            lightest = min(lightest, single.min(initial=np.inf))
            heaviest = max(heaviest, single.max(initial=0))
    lightest, heaviest = min(lightest, sums.min(initial=np.inf)), max(heaviest, sums.max(initial=0))
    return 0 if tally.unique < tally.num_examples else _number(lightest), _number(heaviest)


def _plain(weights: np.ndarray) -> bool:
    """Whether weights only say whether a slot counts."""
    return weights.dtype.kind in "iub" and weights.max(initial=0) <= 1


def _number(value: float) -> float:
    """A Python number, whole where it is whole."""
    return int(value) if float(value).is_integer() else float(value)
