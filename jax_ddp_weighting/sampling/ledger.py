"""The exactly-once ledger: what training has consumed of an epoch, saved with a checkpoint."""

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int64

from jax_ddp_weighting._arguments import (
    check_epoch,
    check_length,
    check_limit,
    check_not_masked,
    check_seed,
    list_some,
)
from jax_ddp_weighting._files import open_whole
from jax_ddp_weighting.sampling.audit import LISTED, EpochAudit, audit_tally, check_entries
from jax_ddp_weighting.sampling.kinds import Plan, check_any_plan
from jax_ddp_weighting.sampling.names import STRINGS, IdNames, read_ids, read_names
from jax_ddp_weighting.sampling.order import keyed_order
from jax_ddp_weighting.sampling.plan import EpochPlan
from jax_ddp_weighting.sampling.tally import Tally

_LEDGER = b"jax_ddp_weighting ledger 1\n"
_CHECKSUM = 32  # bytes
_BLOCK = 1 << 16  # places of an order looked up at once


class Ledger:
    """What training really consumed of one epoch: added batch by batch, merged over processes.

    A byte per example, and more only for ids consumed again, and for strings as ids. It remembers
    ids and not weights: the `weight_range` of its audit counts every accepted slot as 1.

    Args:
        num_examples: how many ids there are.
        epoch: the epoch that is kept, named in errors and compared on merging.
        names: where ids are strings, all that there are, in the order of the data set: without
            them, ids that are due can be counted but not named.

    Raises:
        TypeError: an argument is no integer, or a name no string.
        ValueError: an argument is out of range, or names are not `num_examples` different ones.

    Example:
        >>> ledger = Ledger(6, epoch=0)
        >>> ledger.add([[0, 2], [1, 0]], weights=[[1, 1], [1, 0]])
        >>> ledger.accepted, ledger.due().tolist()
        (3, [3, 4, 5])
        >>> ledger.add([3, 4, 5])
        >>> ledger.check_exactly_once()
    """

    def __init__(
        self,
        num_examples: int,
        *,
        epoch: int | None = None,
        names: Iterable[str] | None = None,
    ) -> None:
        self.num_examples = check_length("Ledger: num_examples", num_examples)
        self.epoch = None if epoch is None else check_epoch("Ledger: epoch", epoch)
        self._tally = Tally(self.num_examples)
        self._names = None if names is None else read_names("Ledger", names, self.num_examples)

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
            ids: integer ids, or strings, of any shape. Of a global array of JAX, such as
                `batch.ids`, the rows that this process holds are entered, and of those that several
                processes hold the first copy, so that the merged ledgers of all processes hold each
                row once.
            weights: weights of that shape, at least 0; slots of weight 0 are not entered.

        Raises:
            TypeError: ids are neither integers nor strings, or not of the kind of those before.
            ValueError: ids are out of range, or more different strings than there are examples; or
                weights are of another shape, negative or not finite. Nothing was entered then.
        """
        one_rank = None if weights is None else [_take_held("weights", weights)]
        held = _take_held("ids", ids) if hasattr(ids, "shape") else read_ids("Ledger.add: ids", ids)
        ((flat, flat_weights),) = check_entries("Ledger.add", [held], one_rank)
        entered = flat if flat_weights is None else flat[flat_weights > 0]
        if not entered.size:  # padding alone, which says of no ids what they are
            return
        if entered.dtype.kind in STRINGS or self._names is not None:
            entered = self._number("Ledger.add", entered)
        strays = entered[(entered < 0) | (entered >= self.num_examples)]
        if strays.size:
            raise ValueError(
                f"Ledger.add: ids must be in [0, {self.num_examples}), got {list_some(strays)}."
                " The ledger is for another dataset, or the ids are positions."
            )
        self._tally.add(entered)

    def _number(self, function: str, ids: np.ndarray) -> np.ndarray:
        """The numbers of string ids, if this ledger can hold them."""
        names = self._names
        if ids.dtype.kind not in STRINGS or (names is None and self.accepted):
            before, now = ("strings", "integers") if names is not None else ("integers", "strings")
            raise TypeError(
                f"{function}: ids must be {before}, as before, got {now}. One kind names an"
                " example."
            )
        names = IdNames() if names is None else names
        new = names.find_new(ids)
        if len(names) + len(new) > self.num_examples:
            raise ValueError(
                f"{function}: ids must be {self.num_examples} different strings at most, or those"
                f" that were named, got {list_some(new)} beside {len(names)}. The ledger is for"
                " another dataset."
            )
        self._names = names
        return names.number(ids)

    def merge(self, other: "Ledger") -> None:
        """Enter all that another rank's ledger of this epoch holds.

        Raises:
            TypeError: the other is none.
            ValueError: the other is of another dataset or epoch.
        """
        if not isinstance(other, Ledger):
            raise TypeError(
                f"Ledger.merge: other must be a Ledger, got {type(other).__name__}. Ledger.load and"
                " Ledger.from_bytes read one."
            )
        for name in ("num_examples", "epoch"):
            if getattr(self, name) != getattr(other, name):
                raise ValueError(
                    f"Ledger.merge: {name} must be that of this ledger, {getattr(self, name)}, got"
                    f" {getattr(other, name)}. Ledgers of one epoch of one dataset can be merged."
                )
        theirs = other._tally
        if other.accepted and (self._names is not None or other._names is not None):
            # each ledger numbers strings as it meets them
            held = np.zeros(1, int) if other._names is None else np.array(other._names.list_all())
            theirs = theirs.renumbered(self._number("Ledger.merge", held))
        self._tally.merge(theirs)

    def due(
        self,
        plan: Plan | None = None,
        *,
        limit: int | None = None,
        reshuffle: int | None = None,
    ) -> np.ndarray:
        """The ids that no accepted slot has held yet: what is left to read of the epoch.

        With a plan they come in the epoch's own order, the one that training was reading, so that
        `EpochPlan.from_order` goes on with it; without one, ascending.

        Args:
            plan: the plan that was read, or the rest of it; of the ids, those that its order holds
                in this epoch, and that weigh more than 0 in it.
            limit: how many to give at most; all by default.
            reshuffle: a seed to shuffle them by; by default they are not shuffled.

        Returns:
            int64 ids, or strings, ``[ids]``, each once.

        Raises:
            TypeError: `plan` is no plan, or a number is none.
            ValueError: the plan is of another number of examples, or the epoch is not known; or ids
                are strings of which not all are known.

        Example:
            >>> plan = EpochPlan(6, num_replicas=1, batch_size=2)
            >>> plan.slots(0, rank=0).ids
            array([2, 3, 5, 1, 4, 0])
            >>> ledger = Ledger(6, epoch=0)
            >>> ledger.add(plan.batch(0, step=0).ids)
            >>> ledger.due(plan), ledger.due()
            (array([5, 1, 4, 0]), array([0, 1, 4, 5]))
        """
        most = self.num_examples if limit is None else check_limit("Ledger.due: limit", limit)
        if self._names is not None and len(self._names) < self.num_examples:
            raise ValueError(
                f"Ledger.due: names must be known to say which ids are due, got {len(self._names)}"
                f" of {self.num_examples}. Make the ledger with names=, all string ids; num_due"
                " counts without them."
            )
        wanted = most if reshuffle is None else self.num_examples
        due = self._tally.unmet(wanted) if plan is None else self._find_due(plan, wanted)
        if reshuffle is not None:
            seed = check_seed("Ledger.due: reshuffle", reshuffle)
            places = np.arange(len(due))
            due = due[keyed_order(places, len(due), seed=seed, epoch=self.epoch or 0)][:most]
        return due if self._names is None else np.array(self._names.list_all())[due]

    def _find_due(self, plan: Plan, wanted: int) -> Int64[np.ndarray, " ids"]:
        """The first ids of the plan's order that are due."""
        check_any_plan("Ledger.due: plan", plan)
        if plan.num_examples != self.num_examples:
            raise ValueError(
                f"Ledger.due: plan must be of {self.num_examples} examples, as the ledger, got"
                f" {plan.num_examples}. The ids of another data set are others."
            )
        if self.epoch is None:
            raise ValueError(
                "Ledger.due: epoch must be known for its order, got None. Make the ledger as"
                f" Ledger({self.num_examples}, epoch=...)."
            )
        if not isinstance(plan, EpochPlan):
            order = plan.epoch_plan().ids_in_order(self.epoch)
            due = order[~self._tally.have_met(order)]
            return due[np.sort(np.unique(due, return_index=True)[1])][:wanted]
        # one rank reads the whole order, whatever part of it the plan itself had left
        order = replace(plan, num_replicas=1, batch_size=1, tail="mask", start=0, only_epoch=None)
        due = [np.zeros(0, np.int64)]
        for start in range(0, order.epoch_length, _BLOCK):
            stop = min(start + _BLOCK, order.epoch_length)
            slots = order.slots(self.epoch, 0, start=start, stop=stop)
            ids = slots.ids[slots.weights > 0]  # what weighs 0 in the plan is never accepted
            due.append(ids[~self._tally.have_met(ids)])
            if sum(map(len, due)) >= wanted and isinstance(order.order, str):
                break
        found = np.concatenate(due)
        if not isinstance(order.order, str):  # where one's own order repeats an id, once is enough
            found = found[np.sort(np.unique(found, return_index=True)[1])]
        return found[:wanted]

    def audit(self, *, limit: int = LISTED) -> EpochAudit:
        """What has been consumed so far, as `audit_ids` would say it."""
        limit = check_limit("Ledger.audit: limit", limit)
        return audit_tally(
            self._tally,
            slots=self.accepted,
            per_rank=(self.accepted,),
            epoch=self.epoch,
            limit=limit,
            names=self._names,
            remedy="due() gives what is still to be read." if self.num_due else None,
        )

    def check_exactly_once(self) -> None:
        """Raise unless the epoch is complete and nothing was consumed again.

        Raises:
            CoverageError: ids are still due or were consumed again. It names them.
        """
        self.audit().check_exactly_once()

    def to_bytes(self) -> bytes:
        """The ledger as bytes, to go into a checkpoint; they carry a checksum.

        An eighth of a byte per example, 16 bytes for each id consumed again, and strings as they
        are.
        """
        content = self._to_content()
        return content + _sum_up(content)

    @classmethod
    def from_bytes(cls, data: bytes) -> "Ledger":
        """What `to_bytes` gave.

        Raises:
            ValueError: the bytes are no ledger, or were cut short or altered.

        Example:
            >>> ledger = Ledger(6, epoch=0)
            >>> ledger.add([0, 2])
            >>> Ledger.from_bytes(ledger.to_bytes())
            Ledger(num_examples=6, epoch=0, accepted=2, due=4)
        """
        return cls._read(bytes(data), "Ledger.from_bytes: data", f"{len(data)} bytes")

    @property
    def digest(self) -> str:
        """64 hexadecimal digits for what the ledger holds, whatever order it was added in.

        (Of strings that were not named beforehand, the order in which they first came counts.)
        """
        return _sum_up(self._to_content()).hex()

    def _to_content(self) -> bytes:
        header: dict[str, Any] = {"num_examples": self.num_examples, "epoch": self.epoch}
        if self._names is not None:
            header["names"] = (
                self._names.list_all()
            )  # on the header's one line: JSON escapes others
        return _LEDGER + json.dumps(header).encode() + b"\n" + self._tally.to_bytes()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the ledger to a file, whole or not at all: an older file stays until then.

        As many bytes as `to_bytes` has. Any number of threads and processes may save to one path:
        one of them is there, whole. In a run of several processes each holds its own; and a file
        beside a checkpoint may be newer or older than that. So `save_run` keeps all of them in the
        checkpoint itself.
        """
        content = self.to_bytes()
        with open_whole(path) as file:
            file.write(content)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Ledger":
        """The ledger that was saved to a file.

        Raises:
            OSError: the file cannot be read.
            ValueError: the file is no ledger, or was cut short or altered.
        """
        data = Path(path).read_bytes()
        return cls._read(data, "Ledger.load: path", f"{os.fspath(path)} of {len(data)} bytes")

    @classmethod
    def _read(cls, data: bytes, argument: str, got: str) -> "Ledger":
        content, checksum = data[:-_CHECKSUM], data[-_CHECKSUM:]
        if not data.startswith(_LEDGER):
            raise ValueError(
                f"{argument} must hold a ledger of this version, got {got.split(' of ')[0]},"
                f" which starts with {data[: len(_LEDGER)]!r}. Ledger.save writes one."
            )
        if _sum_up(content) != checksum:
            raise ValueError(
                f"{argument} must hold a whole ledger, got {got} whose checksum is wrong. It was"
                " cut short or altered; load another save."
            )
        line, tallied = content[len(_LEDGER) :].split(b"\n", 1)
        header = json.loads(line)
        names = header.pop("names", None)
        ledger = cls(**header)
        ledger._names = None if names is None else IdNames(names)
        ledger._tally = Tally.from_bytes(ledger.num_examples, tallied)
        return ledger

    def __repr__(self) -> str:
        return (
            f"Ledger(num_examples={self.num_examples}, epoch={self.epoch},"
            f" accepted={self.accepted}, due={self.num_due})"
        )


def _sum_up(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_CHECKSUM).digest()


def _take_held(name: str, values: Any) -> np.ndarray:
    """What this process holds of an array: all of it, unless it is global and JAX's."""
    if getattr(values, "is_fully_addressable", True):
        check_not_masked(f"Ledger.add: {name}", values)
        return np.asarray(values)
    shards = [each for each in values.addressable_shards if each.replica_id == 0]
    shards.sort(key=lambda each: [part.start or 0 for part in each.index])
    held = [np.ravel(each.data) for each in shards]
    return np.concatenate([np.zeros(0, values.dtype), *held])
