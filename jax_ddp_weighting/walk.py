"""Epochs of a plan walked slot by slot: what was really read, and how often over all of them."""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from jax_ddp_weighting.arguments import check_epoch, check_integer
from jax_ddp_weighting.audit import EpochAudit, Ledger
from jax_ddp_weighting.plan import EpochPlan

_BLOCK = 1 << 16  # slots looked at at once


@dataclass(frozen=True)
class WalkedEpoch:
    """One epoch as it was walked.

    Args:
        audit: what its slots covered, counted.
        order: a digest of the ids in reading order: equal where two epochs read the same.
    """

    audit: EpochAudit
    order: str


def walk(
    plan: EpochPlan,
    epochs: int,
    *,
    first_epoch: int = 0,
    advance: Callable[[int], object] = lambda slots: None,
) -> Iterator[WalkedEpoch]:
    """Every slot of some epochs, counted: no closed form is trusted.

    Args:
        plan: who reads what.
        epochs: how many epochs to walk.
        first_epoch: the epoch to begin with.
        advance: is told of slots as they are walked, for a progress bar.

    Returns:
        An iterator of one `WalkedEpoch` per epoch. It costs about one byte per example.

    Raises:
        ValueError: there are no such epochs.

    Example:
        >>> plan = EpochPlan(10, num_replicas=4, batch_size=2, tail="repeat")
        >>> first, second = walk(plan, 2)
        >>> first.audit.accepted, first.audit.num_duplicated, first.order == second.order
        (12, 2, False)
    """
    first = check_epoch("walk: first_epoch", first_epoch)
    count = check_integer("walk: epochs", epochs, 1, 2**31, "be an integer of at least 1")
    return (_walked(plan, epoch, advance) for epoch in range(first, first + count))


def _walked(plan: EpochPlan, epoch: int, advance: Callable[[int], object]) -> WalkedEpoch:
    ledger = Ledger(plan.num_examples, epoch=epoch)
    digest = hashlib.blake2b(digest_size=16)
    per_rank = []
    for rank in range(plan.num_replicas):
        accepted = 0
        for start in range(0, plan.num_samples, _BLOCK):
            stop = min(start + _BLOCK, plan.num_samples)
            slots = plan.slots(epoch, rank, start=start, stop=stop)
            ledger.add(slots.ids, slots.weights)
            digest.update(slots.ids.tobytes())
            accepted += int(np.count_nonzero(slots.weights))
            advance(len(slots.ids))
        per_rank.append(accepted)
    audit = replace(
        ledger.audit(), slots=plan.num_samples * plan.num_replicas, per_rank=tuple(per_rank)
    )
    return WalkedEpoch(audit, digest.hexdigest())
