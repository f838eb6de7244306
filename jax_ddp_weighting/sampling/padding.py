"""How much of a plan's steps is padding, beside other ways to batch the same lengths."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int64

from jax_ddp_weighting.sampling.shapes import find_least_padding
from jax_ddp_weighting.sampling.slots import Slots


@dataclass(frozen=True)
class StepPadding:
    """What the steps of an epoch hold beside tokens.

    Attributes:
        padding: the share of all tokens of all steps and ranks that is padding, in ``[0, 1)``.
        steps: how many steps there are.
        shapes: how many different shapes they have: compilations.
        balance: tokens of the mean rank over those of the fullest, on average over steps; 1 where
            ranks have equally many.
    """

    padding: float
    steps: int
    shapes: int
    balance: float


@dataclass(frozen=True)
class PaddingReport:
    """An epoch of a `BudgetPlan`, beside other ways to batch the same lengths under its budget.

    The other two have the same number of rows in every step, as many of the longest example as the
    budget takes, and pad each step to its own longest row on any rank.

    Attributes:
        plan: the plan's own steps.
        plain: rows in a shuffled order.
        grouped: rows in order of length.
        bound: the least share of padding that as many lengths as the plan may have can leave, if
            steps and ranks cost nothing.
    """

    plan: StepPadding
    plain: StepPadding
    grouped: StepPadding
    bound: float


def measure_padding(
    lengths: Int64[np.ndarray, " examples"],
    order: Int64[np.ndarray, " examples"],
    steps: Iterable[Slots],
    num_replicas: int,
    budget: int,
    shapes: int,
) -> PaddingReport:
    """The report on some steps, whose slots say the length that they are padded to.

    Args:
        lengths: of all examples.
        order: a shuffled order of them.
        steps: the steps, with the slots of all ranks.
        num_replicas: number of ranks.
        budget: tokens of a rank's step, at most.
        shapes: shapes that the steps have at most.
    """
    tokens, held = [], []
    for slots in steps:
        tokens.append((lengths[slots.ids] * slots.weights).sum(axis=1))
        held.append((slots.ids.shape[1], slots.length or 0))
    descending = np.sort(lengths)[::-1]
    rows = budget // max(int(descending[0]), 1) if len(lengths) else 1
    return PaddingReport(
        plan=_measure(np.array(tokens, np.int64).reshape(-1, num_replicas), held),
        plain=_measure_rows(lengths[order], num_replicas, rows),
        grouped=_measure_rows(descending, num_replicas, rows),
        bound=find_least_padding(descending, shapes),
    )


def _measure_rows(
    lengths: Int64[np.ndarray, " examples"], num_replicas: int, rows: int
) -> StepPadding:
    """Steps of so many rows, each padded to its longest."""
    steps = -(-len(lengths) // (num_replicas * rows))
    full = np.zeros(steps * rows * num_replicas, np.int64)
    full[: len(lengths)] = lengths
    by_step = full.reshape(steps, rows, num_replicas)
    longest = by_step.max(axis=(1, 2)).tolist() if steps else []
    return _measure(by_step.sum(axis=1), [(rows, length) for length in longest])


def _measure(tokens: Int64[np.ndarray, "steps ranks"], held: list[tuple[int, int]]) -> StepPadding:
    """Of each rank's tokens in every step, and each step's shape."""
    steps, ranks = tokens.shape
    if not steps:
        return StepPadding(0.0, 0, 0, 1.0)
    slots = sum(rows * length for rows, length in held) * ranks
    balance = tokens.mean(axis=1) / tokens.max(axis=1)
    return StepPadding(
        1 - float(tokens.sum()) / slots, steps, len(set(held)), float(balance.mean())
    )
