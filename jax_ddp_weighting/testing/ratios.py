"""What a proof that failed says: what the ratios of a wrong gradient to the right one mean."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from jax_ddp_weighting.testing.comparison import LeafDifference, ParityReport, describe
from jax_ddp_weighting.testing.conventions import round_up

LOSS = "loss"
"""The loss among the leaves; all others are gradients."""


def write_message(report: ParityReport, microbatches: int) -> str:
    """What is wrong, by how much, and what that means."""
    wrong, worst = report.wrong, report.worst
    ranks = len(worst.split)
    ratio = "no constant ratio" if worst.ratio is None else f"ratio {worst.ratio:.3f}"
    where = f"{ranks} ranks" + (f" of {microbatches} microbatches" if microbatches > 1 else "")
    return (
        f"{len(wrong)} of {len(report.differences)} gradient leaves differ at rtol="
        f"{worst.rtol:g}; worst {worst.leaf} {worst.shape}: {ratio} on {where}. "
        f"{_explain(report, microbatches)}\n{describe(wrong)}"
    )


def _explain(report: ParityReport, microbatches: int) -> str:
    wrong, worst = report.wrong, report.worst
    if worst.rounded_by:
        allowed = "1e-5" if worst.rounded_by == "float32" else f"{round_up(worst.difference):g}"
        return (
            f"A difference this small is {worst.rounded_by}'s rounding: something in loss_fn "
            f"computes in {worst.rounded_by}. Allow rtol={allowed}, or let it keep the dtype of "
            "its input."
        )
    if any(each.ratio is None for each in wrong):
        return _OTHER_WEIGHTS
    for by_ranks, by_microbatches, meaning in _FACTORS:
        # of a cause all splits show its own factor: one that fits the worst alone is by chance
        if all(_fits(each, by_ranks, by_microbatches, microbatches) for each in wrong):
            return f"A ratio {meaning}."
    # The loss is reduced by other code than the gradients, and may be off by another factor.
    gradients = [each for each in wrong if each.leaf != LOSS]
    judged = gradients or wrong
    runs: dict[Any, list[LeafDifference]] = {}
    for each in judged:
        runs.setdefault((each.split, each.engine), []).append(each)
    apart = [run for run in runs.values() if not _are_one(run)]
    if any(not _is_array(each) for run in apart for each in run):
        return _OTHER_WEIGHTS  # a single number has a ratio whatever its rows counted
    if apart:
        return (
            "A constant ratio for each leaf, but not one for all, means that the rows' weights are "
            "right and that leaves are reduced in different ways: look at what is sharded."
        )
    if not _are_one([run[0] for run in runs.values()]):
        return (
            "A ratio that changes with the split means that a mean was taken before the sums met, "
            "as of each rank's rows inside loss_fn; check_additive tells."
        )
    if not any(_is_array(each) for each in judged) and len(runs) == len(judged):
        return (
            f"A single number always has a ratio: {judged[0].leaf} does not tell a wrong "
            "denominator from rows that count by other weights. Give parameters of several "
            "entries, or ask diagnose for its name."
        )
    if gradients and {each.leaf for each in gradients} != _find_parameters(report):
        return (
            "A constant ratio of some leaves, where others are right, means that the denominator "
            "and the rows' weights are right: look at what is done to these leaves alone."
        )
    return "A constant ratio means that the denominator is wrong and the rows' weights are right."


_OTHER_WEIGHTS = (
    "Rows count by other weights than their own: look for a mean taken on one rank or microbatch "
    "before the sums met, or ask diagnose for its name."
)

# The power of the number of ranks in a ratio, that of microbatches, and what such a ratio means.
_FACTORS = (
    (1, 0, "equal to the number of ranks means the gradient was summed twice"),
    (-1, 0, "of one over the number of ranks means it was averaged after being divided"),
    (
        *(0, 1),
        "equal to the number of microbatches means that they were added where the loss had been "
        "scaled for a mean",
    ),
    (
        *(0, -1),
        "of one over the number of microbatches means that they were averaged after being divided",
    ),
    (1, 1, "equal to ranks times microbatches means that nothing was averaged"),
    (-1, -1, "of one over ranks times microbatches means two averages"),
)


def _fits(each: LeafDifference, by_ranks: int, by_microbatches: int, microbatches: int) -> bool:
    factor = float(len(each.split)) ** by_ranks * float(microbatches) ** by_microbatches
    if factor == 1 or each.ratio is None:
        return False
    return bool(np.isclose(each.ratio, factor, max(1e-3, each.rtol)))


def _are_one(differences: Sequence[LeafDifference]) -> bool:
    return len({round(each.ratio, 2) for each in differences if each.ratio is not None}) <= 1


def _is_array(each: LeafDifference) -> bool:
    return math.prod(each.shape) > 1


def _find_parameters(report: ParityReport) -> set[str]:
    return {each.leaf for each in report.differences if each.leaf != LOSS}
