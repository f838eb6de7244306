"""What was really read: slots counted by id, and the ledger of what training has consumed."""

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int64

from jax_ddp_weighting.arguments import check_epoch, check_integer, check_length, listed
from jax_ddp_weighting.coverage import LISTED as LISTED
from jax_ddp_weighting.coverage import CoverageError as CoverageError
from jax_ddp_weighting.coverage import EpochAudit as EpochAudit
from jax_ddp_weighting.tally import Tally

_BLOCK = 1 << 16  # slots looked at at once
_LEDGER = b"jax_ddp_weighting ledger 1\n"
_CHECKSUM = 32  # bytes


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
    limit = check_integer("audit_ids: limit", limit, 0, 2**62, "be an integer of at least 0")
    rank_weights = None if weights is None else _by_rank("weights", weights)
    ranks = _checked("audit_ids", _by_rank("ids", ids), rank_weights)
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
    return _said_by(
        tally,
        slots=sum(len(rank_ids) for rank_ids, _ in ranks),
        strays=np.concatenate(strays) if strays else None,
        per_rank=tuple(per_rank),
        weight_range=_weight_range(ranks, tally),
        epoch=epoch,
        limit=limit,
    )


class Ledger:
    """What training really consumed of one epoch: added batch by batch, merged over processes.

    A byte per example, and more only for ids consumed again. It remembers ids and not weights: the
    `weight_range` of its audit counts every accepted slot as 1.

    Args:
        num_examples: how many ids there are.
        epoch: the epoch that is kept, named in errors and compared on merging.

    Raises:
        TypeError: an argument is no integer.
        ValueError: an argument is out of range.

    Example:
        >>> ledger = Ledger(6, epoch=0)
        >>> ledger.add([[0, 2], [1, 0]], weights=[[1, 1], [1, 0]])
        >>> ledger.accepted, ledger.due().tolist()
        (3, [3, 4, 5])
        >>> ledger.add([3, 4, 5])
        >>> ledger.check_exactly_once()
    """

    def __init__(self, num_examples: int, *, epoch: int | None = None) -> None:
        self.num_examples = check_length("Ledger: num_examples", num_examples)
        self.epoch = None if epoch is None else check_epoch("Ledger: epoch", epoch)
        self._tally = Tally(self.num_examples)

    @property
    def accepted(self) -> int:
        """Slots of weight above 0 that were added."""
        return self._tally.meetings

    @property
    def num_due(self) -> int:
        """How many ids no accepted slot has held yet."""
        return self.num_examples - self._tally.unique

    def add(self, ids: Any, weights: Any = None) -> None:
        """Enter some slots: a batch, or any part of one.

        Args:
            ids: integer ids of any shape.
            weights: weights of that shape, at least 0; slots of weight 0 are not entered.

        Raises:
            TypeError: ids are no integers.
            ValueError: ids are out of range, or weights are of another shape, negative or not
                finite. Nothing was entered then.
        """
        one_rank = None if weights is None else [np.asarray(weights)]
        ((flat, flat_weights),) = _checked("Ledger.add", [np.asarray(ids)], one_rank)
        entered = flat if flat_weights is None else flat[flat_weights > 0]
        strays = entered[(entered < 0) | (entered >= self.num_examples)]
        if strays.size:
            raise ValueError(
                f"Ledger.add: ids must be in [0, {self.num_examples}), got {listed(strays)}."
                " The ledger is for another dataset, or the ids are positions."
            )
        self._tally.add(entered)

    def merge(self, other: "Ledger") -> None:
        """Enter all that another rank's ledger of this epoch holds.

        Raises:
            ValueError: the other is of another dataset or epoch.
        """
        for name in ("num_examples", "epoch"):
            if getattr(self, name) != getattr(other, name):
                raise ValueError(
                    f"Ledger.merge: {name} must be that of this ledger, {getattr(self, name)}, got"
                    f" {getattr(other, name)}. Ledgers of one epoch of one dataset can be merged."
                )
        self._tally.merge(other._tally)

    def due(self, *, limit: int | None = None) -> Int64[np.ndarray, " ids"]:
        """The ids that no accepted slot has held yet, ascending: all, or the first `limit`."""
        return self._tally.unmet(self.num_examples if limit is None else limit)

    def audit(self, *, limit: int = LISTED) -> EpochAudit:
        """What has been consumed so far, as `audit_ids` would say it."""
        return _said_by(
            self._tally,
            slots=self.accepted,
            per_rank=(self.accepted,),
            weight_range=_weight_range([(np.zeros(0, np.int64), None)], self._tally),
            epoch=self.epoch,
            limit=limit,
        )

    def check_exactly_once(self) -> None:
        """Raise unless the epoch is complete and nothing was consumed again.

        Raises:
            CoverageError: ids are still due or were consumed again. It names them.
        """
        self.audit().check_exactly_once()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the ledger to a file, whole or not at all: an older file stays until then.

        An eighth of a byte per example, and 16 bytes for each id consumed again.
        """
        header = json.dumps({"num_examples": self.num_examples, "epoch": self.epoch})
        content = _LEDGER + header.encode() + b"\n" + self._tally.to_bytes()
        target = Path(path)
        partial = target.with_name(f"{target.name}.{os.getpid()}.partial")
        try:
            with partial.open("wb") as file:
                file.write(content)
                file.write(hashlib.blake2b(content, digest_size=_CHECKSUM).digest())
                file.flush()
                os.fsync(file.fileno())
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Ledger":
        """The ledger that was saved to a file.

        Raises:
            OSError: the file cannot be read.
            ValueError: the file is no ledger, or was cut short or altered.
        """
        data = Path(path).read_bytes()
        content, checksum = data[:-_CHECKSUM], data[-_CHECKSUM:]
        if not data.startswith(_LEDGER):
            raise ValueError(
                f"Ledger.load: path must hold a ledger of this version, got {os.fspath(path)},"
                f" which starts with {data[: len(_LEDGER)]!r}. Ledger.save writes one."
            )
        if hashlib.blake2b(content, digest_size=_CHECKSUM).digest() != checksum:
            raise ValueError(
                f"Ledger.load: path must hold a whole ledger, got {os.fspath(path)} of {len(data)}"
                " bytes whose checksum is wrong. It was cut short or altered; load another save."
            )
        header, tallied = content[len(_LEDGER) :].split(b"\n", 1)
        ledger = cls(**json.loads(header))
        ledger._tally = Tally.from_bytes(ledger.num_examples, tallied)
        return ledger

    def __repr__(self) -> str:
        return (
            f"Ledger(num_examples={self.num_examples}, epoch={self.epoch},"
            f" accepted={self.accepted}, due={self.num_due})"
        )


_Rank = tuple[np.ndarray, np.ndarray | None]  # one rank's ids, and its weights if there are any


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


def _checked(function: str, ids: list[np.ndarray], weights: list[np.ndarray] | None) -> list[_Rank]:
    """Every rank's ids and weights, flat, of one length, and such as they must be."""
    for rank_ids in ids:
        if rank_ids.size and rank_ids.dtype.kind not in "iu":
            raise TypeError(f"{function}: ids must be integers, got {rank_ids.dtype}.")
    flat = [np.ravel(r) if r.size else np.zeros(0, np.int64) for r in ids]
    if weights is None:
        return [(rank_ids, None) for rank_ids in flat]
    shapes, wanted = [[array.shape for array in part] for part in (weights, ids)]
    if shapes != wanted:
        raise ValueError(
            f"{function}: weights must have the shape of ids, got {_shape(shapes)} and"
            f" {_shape(wanted)}. Every slot has one weight."
        )
    for values in weights:
        if values.dtype.kind not in "iufb":
            raise TypeError(f"{function}: weights must be numbers, got {values.dtype}.")
        if values.size and not (values.min() >= 0 and values.max() < np.inf):  # NaN is neither
            wrong = values[~((values >= 0) & np.isfinite(values))]
            raise ValueError(
                f"{function}: weights must be finite and at least 0, got {wrong[0]}."
                " Padding has weight 0."
            )
    return list(zip(flat, map(np.ravel, weights), strict=True))


def _shape(shapes: list[tuple[int, ...]]) -> str:
    return str(shapes[0]) if len(shapes) == 1 else f"by rank {listed(shapes)}"


def _accepted_blocks(ids: np.ndarray, weights: np.ndarray | None) -> Iterator[_Rank]:
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


def _weight_range(ranks: Sequence[_Rank], tally: Tally) -> tuple[float, float]:
    """The smallest and the largest accepted weight that an id received over all its slots."""
    if not tally.meetings:
        return 0, 0
    repeated, counts = tally.repeated()
    omitted, once = tally.unique < tally.num_examples, len(repeated) < tally.unique
    if all(weights is None or _plain(weights) for _, weights in ranks):
        least = 0 if omitted else 1 if once else int(counts.min())
        return least, int(counts.max(initial=1))
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
    return 0 if omitted else _number(lightest), _number(heaviest)


def _plain(weights: np.ndarray) -> bool:
    """Whether weights only say whether a slot counts."""
    return weights.dtype.kind in "iub" and weights.max(initial=0) <= 1


def _number(value: float) -> float:
    """A Python number, whole where it is whole."""
    return int(value) if float(value).is_integer() else float(value)


def _said_by(
    tally: Tally,
    *,
    slots: int,
    per_rank: tuple[int, ...],
    weight_range: tuple[float, float],
    epoch: int | None,
    limit: int,
    strays: Int64[np.ndarray, " slots"] | None = None,
) -> EpochAudit:
    """An audit of all that a tally has met, and of ids that it could not meet."""
    repeated, counts = tally.repeated()
    strays = np.zeros(0, np.int64) if strays is None else strays
    return EpochAudit(
        num_examples=tally.num_examples,
        slots=slots,
        accepted=sum(per_rank),
        unique=tally.unique,
        duplicated=dict(zip(repeated[:limit].tolist(), counts[:limit].tolist(), strict=True)),
        omitted=tuple(tally.unmet(limit).tolist()),
        out_of_range=tuple(np.unique(strays)[:limit].tolist()),
        num_duplicated=len(repeated),
        num_omitted=tally.num_examples - tally.unique,
        num_out_of_range=len(strays),
        per_rank=per_rank,
        weight_range=weight_range,
        epoch=epoch,
    )
