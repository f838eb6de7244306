"""A plan in numbers: its tails side by side, its ranks, and what it costs to ask it."""

import time
from dataclasses import asdict, dataclass, replace
from typing import Any, get_args

from jax_ddp_weighting.sampling.audit import EpochAudit
from jax_ddp_weighting.sampling.plan import EpochPlan
from jax_ddp_weighting.sampling.plan_options import Tail

_RANKS = 8  # ranks described one by one; of more, the first ones and the last
_IDS = 4  # ids shown of a rank
_WHOLE_ORDER = 20_000_000  # examples up to which torch's order is made only to be looked at
ROWS_MADE = 10_000_000
"""Rows up to which a rank's batch is made only to be measured."""


@dataclass(frozen=True)
class TailSummary:
    """An epoch under one of the tails.

    Args:
        tail: which.
        steps: steps of every rank.
        slots: slots over all ranks, those that fill short batches included.
        accepted: slots that count.
        padding: slots of weight 0.
        copies: accepted slots beyond one for each id.
        left_out: ids in no accepted slot.
        last_step: accepted slots of the last step over all ranks.
    """

    tail: Tail
    steps: int
    slots: int
    accepted: int
    padding: int
    copies: int
    left_out: int
    last_step: int


@dataclass(frozen=True)
class RankSummary:
    """One rank's share of an epoch.

    Args:
        rank: which.
        accepted: slots that count.
        padding: slots of weight 0.
        first_ids: the ids that it reads first; None where it would cost too much to say.
    """

    rank: int
    accepted: int
    padding: int
    first_ids: list[int] | None


@dataclass(frozen=True)
class Cost:
    """What it cost, here and now, to make one rank's last batch.

    Args:
        rows: rows in it.
        milliseconds: the least of several tries.
        bytes: memory of its ids and weights.
        order_bytes: what the epoch's whole order would take, which only torch's order makes.
    """

    rows: int
    milliseconds: float
    bytes: int
    order_bytes: int


@dataclass(frozen=True)
class PlanSummary:
    """A plan in numbers.

    Args:
        plan: the plan.
        epoch: the epoch whose ids are shown.
        tails: the plan under each of the tails.
        ranks: the first ranks and the last.
        cost: None where there is no batch, or where it or a whole order is too large to make for
            this alone.
    """

    plan: EpochPlan
    epoch: int
    tails: list[TailSummary]
    ranks: list[RankSummary]
    cost: Cost | None


def summarise(plan: EpochPlan, epoch: int) -> PlanSummary:
    """The plan in numbers: in closed form, but for one batch that is made and measured.

    Args:
        plan: who reads what.
        epoch: the epoch whose ids are to be shown.

    Returns:
        A `PlanSummary`.

    Raises:
        ValueError: there is no such epoch.

    Example:
        >>> mask, repeat, drop = summarise(EpochPlan(47, 3, 8), epoch=0).tails
        >>> mask.padding, repeat.copies, drop.left_out
        (1, 1, 23)
    """
    last = plan.num_replicas - 1
    shown = [*range(min(_RANKS - 1, last)), last]
    whole = plan.order == "torch" and plan.shuffle and plan.num_examples > _WHOLE_ORDER
    with_ids = bool(plan.steps_per_epoch) and not whole
    cost = _cost(plan, epoch) if with_ids and plan.batch_size <= ROWS_MADE else None
    tails = [_tail(replace(plan, tail=tail)) for tail in get_args(Tail)]
    ranks = [_rank(plan, epoch, rank, with_ids) for rank in shown]
    return PlanSummary(plan, epoch, tails, ranks, cost)


def _tail(plan: EpochPlan) -> TailSummary:
    steps, accepted = plan.steps_per_epoch, plan.accepted_per_epoch
    slots = steps * plan.batch_size * plan.num_replicas
    return TailSummary(
        tail=plan.tail,
        steps=steps,
        slots=slots,
        accepted=accepted,
        padding=slots - accepted,
        copies=max(0, accepted - plan.epoch_length),
        left_out=max(0, plan.epoch_length - accepted),
        last_step=plan.accepted(steps - 1) if steps else 0,
    )


def _rank(plan: EpochPlan, epoch: int, rank: int, with_ids: bool) -> RankSummary:
    accepted, first = plan.accepted_by(rank), None
    if with_ids:
        first = plan.slots(epoch, rank, stop=min(_IDS, plan.num_samples)).ids.tolist()
    return RankSummary(rank, accepted, plan.steps_per_epoch * plan.batch_size - accepted, first)


def _cost(plan: EpochPlan, epoch: int) -> Cost:
    def make() -> tuple[float, int]:
        start = time.perf_counter()
        slots = plan.batch(epoch, plan.steps_per_epoch - 1, ranks=[plan.num_replicas - 1])
        return time.perf_counter() - start, slots.ids.nbytes + slots.weights.nbytes

    seconds, size = min(make() for _ in range(5))
    return Cost(plan.batch_size, seconds * 1000, size, 8 * plan.epoch_length)


def describe_plan(plan: EpochPlan) -> dict[str, Any]:
    """A plan as plain JSON-able values."""
    return {
        **plan.fingerprint,
        "num_replicas": plan.num_replicas,
        "batch_size": plan.batch_size,
        "steps_per_epoch": plan.steps_per_epoch,
        "num_samples": plan.num_samples,
    }


def audit_as_dict(audit: EpochAudit) -> dict[str, Any]:
    """An audit as plain JSON-able values; ids that are keys become text, as JSON wants them."""
    duplicated = {str(each): count for each, count in audit.duplicated.items()}
    values = asdict(audit) | {"exactly_once": audit.exactly_once, "duplicated": duplicated}
    del values["remedy"]  # what the error says; JSON holds what was found
    if not audit.sources:  # of a mixture alone
        del values["sources"]
    return values
