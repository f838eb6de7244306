"""What a run of places of an epoch's order covers, dealt to ranks in turn: counted or walked."""

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from jax_ddp_weighting.sampling.audit import EpochAudit, audit_ids
from jax_ddp_weighting.sampling.epoch_order import EpochOrder
from jax_ddp_weighting.sampling.example_weights import ExampleWeights
from jax_ddp_weighting.sampling.order_functions import CalledOrder


class Run(NamedTuple):
    """Places of an order that ranks read in turn; past its end it begins again.

    Attributes:
        order: the order.
        start: the first place.
        accepted: how many places are read.
        num_replicas: how many ranks read them.
    """

    order: EpochOrder
    start: int
    accepted: int
    num_replicas: int


def count_run(run: Run, epoch: int, limit: int) -> EpochAudit:
    """What the run covers, in closed form; of an order that has every id once.

    A place is accepted `times` times, and the first `further` ones once more; only ids that are to
    be listed are looked up.
    """
    order, start, accepted, num_replicas = run
    length = order.length
    each, more = divmod(accepted, num_replicas)  # of the last round the first ranks
    times, further = divmod(accepted, length) if length else (0, 0)
    several = (length if times > 1 else further) if times else 0
    missing = length - min(accepted, length)
    copied = np.arange(min(several, limit))
    cut = np.arange(accepted, accepted + min(missing, limit))
    counts = times + (copied < further)
    copied, cut = ((start + places) % max(length, 1) for places in (copied, cut))
    duplicated = zip(order.look_up(epoch, copied).tolist(), counts.tolist(), strict=True)
    return EpochAudit(
        num_examples=order.num_examples,
        slots=accepted,
        accepted=accepted,
        unique=length - missing,
        duplicated=dict(sorted(duplicated)),
        omitted=tuple(np.sort(order.look_up(epoch, cut)).tolist()),
        num_duplicated=several,
        num_omitted=missing,
        per_rank=(each + 1,) * more + (each,) * (num_replicas - more),
        weight_range=(times, times + (further > 0)),
        epoch=epoch,
    )


def walk_run(run: Run, epoch: int, weights: ExampleWeights | None, limit: int) -> EpochAudit:
    """What the run covers, by looking at each of its ids; of any order, and with any weights."""
    order, start, accepted, num_replicas = run
    read = order.look_up(epoch, (start + np.arange(accepted)) % max(order.length, 1))
    own = None if weights is None else weights.values[read]
    found = audit_ids(read, order.num_examples, weights=own, epoch=epoch, limit=limit)
    counted = np.arange(accepted) if own is None else np.flatnonzero(own)
    per_rank = np.bincount(counted % num_replicas, minlength=num_replicas)
    mixture = order.order.sources if isinstance(order.order, CalledOrder) else None
    sources = () if mixture is None else mixture.audit_sources(epoch, read[counted])
    return replace(found, per_rank=tuple(per_rank.tolist()), sources=sources)
