"""What an audit says: unique, duplicated and omitted ids, and the error that names them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Integer

from jax_ddp_weighting.arguments import listed
from jax_ddp_weighting.tally import Tally

LISTED = 10_000
"""How many ids of a kind an audit lists, unless told otherwise; the rest it counts."""


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

    Example:
        >>> from jax_ddp_weighting import audit_ids
        >>> audit = audit_ids([0, 2, 2], 4, epoch=3)
        >>> audit.check_exactly_once()
        Traceback (most recent call last):
        ...
        jax_ddp_weighting.coverage.CoverageError: epoch 3: 2 of 4 ids omitted (1, 3), 1 duplicated \
(2). tail="drop" cuts the tail; tail="mask" keeps every id once.
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
    weight_range: tuple[float, float] = (0, 0)
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
            + _in_brackets(self.omitted, self.num_omitted),
            f"{self.num_duplicated} duplicated"
            + _in_brackets(tuple(self.duplicated), self.num_duplicated),
        ]
        if self.num_out_of_range:
            parts.append(
                f"{self.num_out_of_range} slots out of range" + _in_brackets(self.out_of_range)
            )
            remedy = "Ids count from zero, below num_examples."
        elif self.num_omitted:
            remedy = 'tail="drop" cuts the tail; tail="mask" keeps every id once.'
        else:
            remedy = 'tail="repeat" repeats ids; tail="mask" keeps every id once.'
        raise CoverageError(f"{where}{', '.join(parts)}. {remedy}")


def audit_of(
    tally: Tally,
    *,
    slots: int,
    per_rank: tuple[int, ...],
    epoch: int | None,
    limit: int,
    weight_range: tuple[float, float] | None = None,
    strays: Sequence[Integer[np.ndarray, " slots"]] = (),
) -> EpochAudit:
    """What a tally has met, and ids that it could not meet; each meeting weighs 1 by default."""
    repeated, counts = tally.repeated()
    # as Python's integers: numpy makes floats of int64 beside uint64
    beyond = {stray for block in strays for stray in np.unique(block)[:limit].tolist()}
    return EpochAudit(
        num_examples=tally.num_examples,
        slots=slots,
        accepted=sum(per_rank),
        unique=tally.unique,
        duplicated=dict(zip(repeated[:limit].tolist(), counts[:limit].tolist(), strict=True)),
        omitted=tuple(tally.unmet(limit).tolist()),
        out_of_range=tuple(sorted(beyond)[:limit]),
        num_duplicated=len(repeated),
        num_omitted=tally.num_examples - tally.unique,
        num_out_of_range=sum(map(len, strays)),
        per_rank=per_rank,
        weight_range=_meetings_range(tally) if weight_range is None else weight_range,
        epoch=epoch,
    )


def _meetings_range(tally: Tally) -> tuple[int, int]:
    """How often the ids were met that were met the least and the most."""
    if not tally.meetings:
        return 0, 0
    repeated, counts = tally.repeated()
    omitted, once = tally.unique < tally.num_examples, len(repeated) < tally.unique
    return 0 if omitted else 1 if once else int(counts.min()), int(counts.max(initial=1))


def _in_brackets(ids: Sequence[int], count: int | None = None) -> str:
    return f" ({listed(ids, count)})" if ids else ""
