"""Epochs of a plan walked slot by slot: what was really read, and in what order."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from jax_ddp_weighting._arguments import check_integer
from jax_ddp_weighting.sampling.audit import EpochAudit
from jax_ddp_weighting.sampling.ledger import Ledger
from jax_ddp_weighting.sampling.plan import EpochPlan

_BLOCK = 1 << 16  # slots looked at at once
_WALKED = 2 * 10**9  # examples, and slots of all epochs, up to which a plan is walked
RANKS = 2_000_000
"""Ranks of all epochs up to which they are audited: each is visited, and has its own number."""
_EPOCHS = 10_000


@dataclass(frozen=True)
class AuditedEpoch:
    """One epoch of a plan, or of files, audited.

    Args:
        audit: what its slots covered.
        order: a digest of the ids in reading order; None where they were not walked.
        new_order: whether that differs from the epoch before; None where nothing is before.
    """

    audit: EpochAudit
    order: str | None = None
    new_order: bool | None = None


def audit_epochs(
    plan: EpochPlan,
    epochs: int,
    *,
    closed_form: bool = False,
    advance: Callable[[int], object] = lambda slots: None,
) -> list[AuditedEpoch]:
    """What the first epochs of a plan cover: walked slot by slot, no closed form trusted.

    Args:
        plan: who reads what.
        epochs: how many epochs to audit, from 0.
        closed_form: do not walk; for plans that are too large. Orders are not compared then.
        advance: is told of slots as they are walked, for a progress bar.

    Returns:
        One `AuditedEpoch` per epoch. Walking costs about one byte per example.

    Raises:
        ValueError: there are no such epochs, or too many, or the plan is too large to be walked.

    Example:
        >>> plan = EpochPlan(10, num_replicas=4, batch_size=2, tail="repeat")
        >>> first, second = audit_epochs(plan, 2)
        >>> first.audit.accepted, first.audit.num_duplicated, second.new_order
        (12, 2, True)
    """
    epochs = check_integer("audit: epochs", epochs, 1, _EPOCHS)
    if plan.num_replicas * epochs > RANKS:
        raise ValueError(
            f"audit: ranks of all epochs must be at most {RANKS:,}, got"
            f" {plan.num_replicas * epochs:,}. Take fewer ranks, or fewer epochs."
        )
    if closed_form:
        return [AuditedEpoch(plan.audit(epoch)) for epoch in range(epochs)]
    if plan.num_examples > _WALKED:
        raise ValueError(
            f"audit: --num-examples must be at most {_WALKED:,} to walk every slot, got"
            f" {plan.num_examples:,}. --closed-form says what an epoch covers without walking it."
        )
    slots = plan.num_samples * plan.num_replicas * epochs
    if slots > _WALKED:
        raise ValueError(
            f"audit: slots of all epochs must be at most {_WALKED:,} to walk every one, got"
            f" {slots:,}. Take fewer epochs, or --closed-form, which walks none."
        )
    audited: list[AuditedEpoch] = []
    for epoch in range(epochs):
        audit, order = _walk(plan, epoch, advance)
        new_order = order != audited[-1].order if audited else None
        audited.append(AuditedEpoch(audit, order, new_order))
    return audited


def _walk(plan: EpochPlan, epoch: int, advance: Callable[[int], object]) -> tuple[EpochAudit, str]:
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
    slots = plan.num_samples * plan.num_replicas
    # advice of a ledger is about a run, and not about a plan's tail
    audit = replace(ledger.audit(), slots=slots, per_rank=tuple(per_rank), remedy=None)
    return audit, digest.hexdigest()
