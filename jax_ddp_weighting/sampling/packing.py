"""Sequences packed into rows of one length: first fit, the longest first, window by window."""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int64

from jax_ddp_weighting._arguments import (
    check_below,
    check_epoch,
    check_integer,
    check_limit,
    check_num_replicas,
    check_seed,
    check_up_to,
)
from jax_ddp_weighting.sampling.audit import LISTED, EpochAudit, audit_ids
from jax_ddp_weighting.sampling.first_fit import fit_first
from jax_ddp_weighting.sampling.lengths import (
    check_lengths,
    check_ranks,
    derive_seed,
    digest_lengths,
)
from jax_ddp_weighting.sampling.order import keyed_order
from jax_ddp_weighting.sampling.packed_rows import NO_SEQUENCE
from jax_ddp_weighting.sampling.plan import EpochPlan
from jax_ddp_weighting.sampling.plan_options import check_epoch_of, check_shuffle
from jax_ddp_weighting.sampling.slots import Slots

_WINDOW = 2**14  # first fit looks at every row of a window for every sequence of it
_JITTER = 2**16  # parts of a length that its jitter is counted in


class Packing(NamedTuple):
    """An epoch's rows, before they are dealt to steps: ids row after row, and where each begins."""

    ids: Int64[np.ndarray, " sequences"]
    starts: Int64[np.ndarray, " rows_and_end"]


@dataclass(frozen=True, eq=False, repr=False)
class PackedPlan:
    """Sequences packed into rows of one length, over ranks: who reads what, in every epoch.

    The rule: an epoch's order is cut into windows of about `window` sequences; of each window the
    longest sequence is taken first (give or take an eighth), and goes into the first row that has
    room. So every sequence is in one row, whole; rows are then shuffled, and dealt out as an
    `EpochPlan` deals out ids, rank by rank. Order and rows are functions of (seed, epoch) alone,
    the same on every machine and for every number of ranks. Rows that fill a short last step hold
    nothing.

    How many rows there are, and so steps, may differ from epoch to epoch by a few: ask
    `steps_per_epoch(epoch)`.

    Args:
        lengths: integers ``[sequences]``, each in ``[1, length]``.
        num_replicas: number of data-parallel ranks.
        batch_size: rows per rank and step.
        length: tokens of a row.
        window: sequences that are packed together, in ``[1, 2**14]``. Larger ones leave less
            padding, and take longer: about half a row of each window stays empty.
        most: how many sequences a row may hold: the last axis of a step's ids. By default four
            times what fits of mean length.
        seed: chooses the orders; an integer in ``[-2**63, 2**64)``.
        shuffle: whether an epoch has an order of its own.
        start: rows of the epoch that were read before, see `resumed`.
        only_epoch: the one epoch that `start` belongs to; any epoch where it is None.

    Raises:
        TypeError: an argument is of another type.
        ValueError: an argument is out of range, or a sequence longer than a row.

    Example:
        >>> plan = PackedPlan([3, 5, 2, 9, 4, 2], 1, 2, length=10, most=3, shuffle=False)
        >>> plan.batch(epoch=0, step=0).ids.tolist()
        [[[3, -1, -1], [1, 4, -1]]]
        >>> plan.steps_per_epoch(0), round(plan.padding(0), 3)
        (2, 0.167)
    """

    lengths: Any  # whatever is given; int64[sequences] once it is checked
    num_replicas: int
    batch_size: int
    length: int
    _: KW_ONLY
    window: int = 1024
    most: Any = None  # an int once it is checked
    seed: int = 0
    shuffle: bool = True
    start: int = 0
    only_epoch: int | None = None

    def __post_init__(self) -> None:
        length = check_integer(
            "PackedPlan: length", self.length, 1, 2**31, "It is the number of tokens of a row."
        )
        lengths = check_lengths("PackedPlan", self.lengths, length, "length")
        per_row = "It is the number of rows per rank and step."
        most = self.most
        if most is None:
            most = min(4 * -(-length * len(lengths) // max(int(lengths.sum()), 1)) or 1, length)
        checked = {
            "length": length,
            "lengths": lengths,
            "num_replicas": check_num_replicas("PackedPlan: num_replicas", self.num_replicas),
            "batch_size": check_integer(
                "PackedPlan: batch_size", self.batch_size, 1, 2**31, per_row
            ),
            "window": check_integer(
                "PackedPlan: window", self.window, 1, _WINDOW, "1024 leaves little padding."
            ),
            "most": check_integer(
                "PackedPlan: most", most, 1, 2**31, "It is how many sequences a row may hold."
            ),
            "seed": check_seed("PackedPlan: seed", self.seed),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        check_shuffle("PackedPlan", self.shuffle)
        if self.only_epoch is None:
            if self.start != 0:
                raise ValueError(
                    f"PackedPlan: only_epoch must be given with a start, got start={self.start}"
                    " alone. Write plan.resumed(epoch, position)."
                )
            return
        object.__setattr__(
            self, "only_epoch", check_epoch("PackedPlan: only_epoch", self.only_epoch)
        )
        rows = self._count_rows(self.only_epoch)
        remedy = f"Epoch {self.only_epoch} has {rows} rows."
        object.__setattr__(
            self, "start", check_up_to("PackedPlan: start", self.start, rows, remedy)
        )

    def steps_per_epoch(self, epoch: int) -> int:
        """Steps of every rank in an epoch: the same number on all of them.

        Raises:
            ValueError: the plan has no such epoch.
        """
        return self.dealt_rows(
            self.check_epoch("PackedPlan.steps_per_epoch", epoch)
        ).steps_per_epoch

    def batch(self, epoch: int, step: int, ranks: Sequence[int] | None = None) -> Slots:
        """The rows of one step, always as many.

        Args:
            epoch: the epoch, at least 0.
            step: a step in ``[0, steps_per_epoch(epoch))``.
            ranks: the ranks whose rows are wanted; all by default.

        Returns:
            Slots of shape ``[len(ranks), batch_size, most]`` with the `length` of rows: the ids of
            each row, in the order in which `pack_rows` lays them out, at weight 1; then -1, at
            weight 0.

        Raises:
            ValueError: the plan has no such epoch, step or rank.
        """
        epoch = self.check_epoch("PackedPlan.batch", epoch)
        dealt = self.dealt_rows(epoch)
        steps = dealt.steps_per_epoch
        remedy = f"Epoch {epoch} of this plan has {steps} steps."
        step = check_below("PackedPlan.batch: step", step, steps, remedy)
        wanted = check_ranks("PackedPlan.batch: ranks", ranks, self.num_replicas)
        rows = dealt.batch(epoch, step, wanted.tolist())
        packing = _pack_epoch(self._all, epoch)
        if not len(packing.ids):
            ids = np.full((*rows.ids.shape, self.most), NO_SEQUENCE)
            return Slots(ids, np.zeros(ids.shape, np.int32), self.length)
        first, last = packing.starts[rows.ids], packing.starts[rows.ids + 1]
        places = first[..., None] + np.arange(self.most)
        held = (places < last[..., None]) & (rows.weights[..., None] > 0)
        ids = np.where(held, packing.ids[np.minimum(places, len(packing.ids) - 1)], NO_SEQUENCE)
        return Slots(ids, held.astype(np.int32), self.length)

    def resumed(
        self,
        epoch: int,
        position: int,
        *,
        num_replicas: int | None = None,
        batch_size: int | None = None,
    ) -> "PackedPlan":
        """The plan for the rest of an epoch, on any number of ranks and in steps of any size.

        The rows are those of the whole epoch, in its order.

        Args:
            epoch: the epoch that was stopped; the plan knows no other.
            position: how many rows of the epoch have been read, from `position`.
            num_replicas: number of ranks from now on; as before by default.
            batch_size: rows per rank and step from now on; as before by default.

        Raises:
            TypeError: a number is none.
            ValueError: the epoch has not so many rows, or a number is out of range.
        """
        epoch = self.check_epoch("PackedPlan.resumed", epoch)
        rows = self._count_rows(epoch)
        # a last step is full, so that its end may lie past the last row
        last = rows + -(rows - self.start) % (self.num_replicas * self.batch_size)
        remedy = f"The epoch has {rows} rows: position(step, epoch=...) ends with the last."
        place = check_up_to("PackedPlan.resumed: position", position, last, remedy)
        return replace(
            self,
            start=min(place, rows),
            only_epoch=epoch,
            num_replicas=self.num_replicas if num_replicas is None else num_replicas,
            batch_size=self.batch_size if batch_size is None else batch_size,
        )

    def position(self, step: int, *, epoch: int | None = None) -> int:
        """Rows of an epoch that have been read before a step: what to resume from.

        Args:
            step: the next step to read, in ``[0, steps_per_epoch(epoch)]``.
            epoch: the epoch that is read, whose last step may be longer than what is left of it:
                for the end of an epoch on other ranks or rows. A rest knows its own.

        Raises:
            TypeError: a number is none.
            ValueError: the epoch has no such step, or the plan no such epoch.
        """
        rows = self.num_replicas * self.batch_size
        epoch = self.only_epoch if epoch is None else self.check_epoch("PackedPlan.position", epoch)
        if epoch is None:
            return self.start + check_limit("PackedPlan.position: step", step) * rows
        steps = self.steps_per_epoch(epoch)
        remedy = f"Epoch {epoch} of this plan has {steps} steps."
        step = check_up_to("PackedPlan.position: step", step, steps, remedy)
        return min(self.start + step * rows, self._count_rows(epoch))

    @property
    def num_examples(self) -> int:
        """How many sequences there are."""
        return len(self.lengths)

    @property
    def accepted_per_epoch(self) -> int:
        """Sequences in an epoch, or in its rest, over all ranks."""
        if self.only_epoch is None:
            return self.num_examples
        return len(self.ids_in_order(self.only_epoch))

    @property
    def step_shapes(self) -> tuple[tuple[int, int], ...]:
        """The one shape ``(rows, length)`` of all steps."""
        return ((self.batch_size, self.length),)

    @property
    def tail(self) -> str:
        """Always "mask": every sequence once."""
        return "mask"

    @property
    def fingerprint(self) -> dict[str, Any]:
        """What decides the order and the rows, as plain JSON-able values: not who reads it."""
        return {
            "num_examples": self.num_examples,
            "shuffle": self.shuffle,
            "seed": self.seed,
            "order": f"packed into rows of {self.length}, {self.most} at most, by windows of"
            f" {self.window}, lengths {self._digest}",
            "tail": self.tail,
        }

    def fingerprint_of(self, epoch: int) -> dict[str, Any]:
        """The same for one epoch: of this plan all epochs have one."""
        return self.fingerprint

    @cached_property
    def _digest(self) -> str:
        return digest_lengths(self.lengths)

    def ids_in_order(self, epoch: int) -> Int64[np.ndarray, " ids"]:
        """The sequences of an epoch, or of its rest, in the order of their rows.

        Raises:
            ValueError: the plan has no such epoch.
        """
        epoch = self.check_epoch("PackedPlan.ids_in_order", epoch)
        packing = _pack_epoch(self._all, epoch)
        return packing.ids[packing.starts[self.start] :]

    def audit(self, epoch: int, *, limit: int = LISTED) -> EpochAudit:
        """What the rows of an epoch cover, by `audit_ids` of all ranks' rows.

        Args:
            epoch: the epoch, at least 0.
            limit: how many ids of a kind to list; the rest are counted.

        Raises:
            ValueError: there is no such epoch.
        """
        steps = [self.batch(epoch, step) for step in range(self.steps_per_epoch(epoch))]
        none: Any = [np.zeros(0, np.int64)]
        ranks = range(self.num_replicas)
        return audit_ids(
            [
                np.concatenate([*none, *(each.ids[rank].ravel() for each in steps)])
                for rank in ranks
            ],
            self.num_examples,
            weights=[
                np.concatenate([*none, *(each.weights[rank].ravel() for each in steps)])
                for rank in ranks
            ],
            epoch=epoch,
            limit=limit,
        )

    def padding(self, epoch: int = 0) -> float:
        """The share of an epoch's rows that is padding; without rows that only fill a last step.

        Raises:
            ValueError: the plan has no such epoch.
        """
        epoch = self.check_epoch("PackedPlan.padding", epoch)
        rows = self._count_rows(epoch) - self.start
        tokens = int(self.lengths[self.ids_in_order(epoch)].sum())
        return 1 - tokens / (rows * self.length) if rows else 0.0

    def epoch_plan(self) -> "PackedPlan":
        """The plan of whole epochs that this one is the rest of; itself where it is whole."""
        return replace(self, start=0, only_epoch=None)

    @cached_property
    def _all(self) -> "PackedPlan":
        """The plan of whole epochs on one rank: rows depend on neither ranks nor where one is."""
        return replace(self, num_replicas=1, batch_size=1, start=0, only_epoch=None)

    def _count_rows(self, epoch: int) -> int:
        return len(_pack_epoch(self._all, epoch).starts) - 1

    def dealt_rows(self, epoch: int) -> EpochPlan:
        """The rows of an epoch as the ids of a plan."""
        return EpochPlan(
            self._count_rows(epoch),
            self.num_replicas,
            self.batch_size,
            shuffle=False,
            start=self.start,
            only_epoch=self.only_epoch,
        )

    def check_epoch(self, function: str, epoch: int) -> int:
        """`epoch` as a Python int, if this plan has it; `function` is who asks."""
        return check_epoch_of(self.only_epoch, function, epoch)

    def _compare(self) -> tuple[Any, ...]:
        return (
            *self.fingerprint.values(),
            *(self.num_replicas, self.batch_size, self.start, self.only_epoch),
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PackedPlan) and self._compare() == other._compare()

    def __hash__(self) -> int:
        return hash(self._compare())

    def __repr__(self) -> str:
        rest = f", start={self.start}, only_epoch={self.only_epoch}" if self.start else ""
        return (
            f"PackedPlan({self.num_examples} lengths, num_replicas={self.num_replicas},"
            f" batch_size={self.batch_size}, length={self.length}, window={self.window},"
            f" most={self.most}, seed={self.seed}, shuffle={self.shuffle}{rest})"
        )


@lru_cache(maxsize=4)  # this epoch and the next, of training and of evaluation
def _pack_epoch(plan: PackedPlan, epoch: int) -> Packing:
    n = plan.num_examples
    if not n:
        return Packing(np.zeros(0, np.int64), np.zeros(1, np.int64))
    order = np.arange(n)
    if plan.shuffle:
        order = keyed_order(order, n, seed=plan.seed, epoch=epoch)
    windows = -(-n // plan.window)
    size = -(-n // windows)  # of equal size: a short last one would pack badly
    ids = np.full(windows * size, NO_SEQUENCE)
    ids[:n] = order
    by_window = ids.reshape(windows, size)
    lengths = np.where(by_window < 0, 0, plan.lengths[by_window])
    keys = lengths
    if plan.shuffle:
        # The longest first, but for an eighth: else a data set of one window would have the same
        # rows in every epoch, and first fit takes little harm. In integers, alike everywhere.
        jitter = keyed_order(np.arange(n), n, seed=derive_seed(plan.seed, "jitter"), epoch=epoch)
        keys = lengths * (_JITTER - jitter[np.maximum(by_window, 0)] * (_JITTER // 8) // n)
    largest_first = np.argsort(-keys, axis=1, kind="stable")
    by_window = np.take_along_axis(by_window, largest_first, axis=1)
    lengths = np.take_along_axis(lengths, largest_first, axis=1)
    rows = fit_first(lengths, plan.length, plan.most)
    held = by_window >= 0
    opened = np.where(held, rows + 1, 0).max(axis=1)
    rows += (np.cumsum(opened) - opened)[:, None]
    total = int(opened.sum())
    rows, ids = rows[held], by_window[held]
    if plan.shuffle:  # first fit puts the longest into a window's first rows
        rows = keyed_order(rows, total, seed=derive_seed(plan.seed, "rows"), epoch=epoch)
    by_row = np.argsort(rows, kind="stable")
    starts = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=total))])
    return Packing(ids[by_row], starts)
