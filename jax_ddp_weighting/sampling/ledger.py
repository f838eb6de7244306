"""The exactly-once ledger: what training has consumed of an epoch, saved with a checkpoint."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int64

from jax_ddp_weighting._arguments import check_epoch, check_length, check_limit, list_some
from jax_ddp_weighting._files import open_whole
from jax_ddp_weighting.sampling.audit import LISTED, EpochAudit, audit_tally, check_entries
from jax_ddp_weighting.sampling.tally import Tally

_LEDGER = b"jax_ddp_weighting ledger 1\n"
_CHECKSUM = 32  # bytes


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
            ids: integer ids of any shape. Of a global array of JAX, such as `batch.ids`, the rows
                that this process holds are entered, and of those that several processes hold the
                first copy, so that the merged ledgers of all processes hold each row once.
            weights: weights of that shape, at least 0; slots of weight 0 are not entered.

        Raises:
            TypeError: ids are no integers.
            ValueError: ids are out of range, or weights are of another shape, negative or not
                finite. Nothing was entered then.
        """
        one_rank = None if weights is None else [_take_held(weights)]
        ((flat, flat_weights),) = check_entries("Ledger.add", [_take_held(ids)], one_rank)
        entered = flat if flat_weights is None else flat[flat_weights > 0]
        strays = entered[(entered < 0) | (entered >= self.num_examples)]
        if strays.size:
            raise ValueError(
                f"Ledger.add: ids must be in [0, {self.num_examples}), got {list_some(strays)}."
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
        if limit is None:
            return self._tally.unmet(self.num_examples)
        return self._tally.unmet(check_limit("Ledger.due: limit", limit))

    def audit(self, *, limit: int = LISTED) -> EpochAudit:
        """What has been consumed so far, as `audit_ids` would say it."""
        limit = check_limit("Ledger.audit: limit", limit)
        return audit_tally(
            self._tally,
            slots=self.accepted,
            per_rank=(self.accepted,),
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
        with open_whole(path) as file:
            file.write(content)
            file.write(hashlib.blake2b(content, digest_size=_CHECKSUM).digest())

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


def _take_held(values: Any) -> np.ndarray:
    """What this process holds of an array: all of it, unless it is global and JAX's."""
    if getattr(values, "is_fully_addressable", True):
        return np.asarray(values)
    shards = [each for each in values.addressable_shards if each.replica_id == 0]
    shards.sort(key=lambda each: [part.start or 0 for part in each.index])
    held = [np.ravel(each.data) for each in shards]
    return np.concatenate([np.zeros(0, values.dtype), *held])
