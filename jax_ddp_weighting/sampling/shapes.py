"""Which few shapes an epoch's steps have: the lengths to pad to that leave the least padding."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float64, Int64, Integer

# Places at which a group may begin, if there are more: the best ones leave no more to be gained
# than these, since padding is flat around its least. The search costs their square.
_CANDIDATES = 512

_SHUFFLED = 8  # examples of a group that are worth two steps, so that others go together each time


@dataclass(frozen=True)
class Group:
    """Steps of one shape, and the examples in them: a run of all in descending order of length.

    Attributes:
        rows: rows per rank and step.
        length: what its rows are padded to, the longest of them.
        steps: how many steps there are.
        start: the first place of the descending order.
        count: how many examples there are; slots beyond them are padding.
    """

    rows: int
    length: int
    steps: int
    start: int
    count: int


def choose_groups(
    descending: Integer[np.ndarray, " examples"],
    num_replicas: int,
    budget: int,
    shapes: int,
    *,
    cut: bool,
    row_multiple: int = 1,
    length_multiple: int = 1,
) -> tuple[Group, ...]:
    """The groups whose steps leave the least padding, at most `shapes` of them, longest first.

    The rule: examples lie in descending order of length, cut into groups at multiples of the number
    of ranks, and a group's steps are full: where they hold more than the group, the longest of the
    next one move up. So only the last step of the shortest shape has slots to spare. A group of
    eight examples or more has two steps at least, as far as it has rows for them: of one alone the
    same examples would go together in every epoch.

    Args:
        descending: lengths, the longest first, at most `budget` each.
        num_replicas: number of ranks.
        budget: rows times length of a rank's step, at most.
        shapes: how many groups, at most.
        cut: whether examples that fill no step are left out.
        row_multiple: what rows are a multiple of.
        length_multiple: what lengths are a multiple of.
    """
    width = num_replicas * row_multiple  # rows come in rounds of so many
    rounds = len(descending) // width if cut else -(-len(descending) // width)
    longest = descending[::width][:rounds].astype(np.int64)
    longest = -(-longest // length_multiple) * length_multiple
    groups, start = [], 0
    budget //= row_multiple
    ends = _cut_best(longest, shapes, budget, width)
    for end in ends:
        if start >= end:
            continue  # the group before has moved them all up
        length, left = int(longest[start]), end - start
        least_steps = 2 if len(ends) > 1 and left * width >= _SHUFFLED else 1
        rows, steps = (int(each) for each in fit_rows(left, budget // length, least_steps))
        if cut and start + rows * steps > rounds:
            rows = left // -(-left // rows)
            steps = left // rows
        first = start * width
        start += rows * steps
        count = min(start * width, len(descending)) - first
        groups.append(Group(rows * row_multiple, length, steps, first, count))
    return tuple(groups)


def fit_rows(left: Any, most: Any, least_steps: Any = 1) -> tuple[Any, Any]:
    """Rows and steps that hold `left` rows of a rank, at most `most` a step, with few to spare.

    As few steps as can be, or one more where that spares rows. Numbers, or arrays of them.
    """
    fewest = np.maximum(-(-left // most), np.minimum(least_steps, left))
    rows = -(-left // fewest)
    fewer_rows = -(-left // (fewest + 1))
    steps, more_steps = -(-left // rows), -(-left // fewer_rows)
    better = fewer_rows * more_steps < rows * steps
    return np.where(better, fewer_rows, rows), np.where(better, more_steps, steps)


def find_least_padding(
    descending: Integer[np.ndarray, " examples"], shapes: int, num_replicas: int = 1
) -> float:
    """The share of padding that the best lengths leave, whatever steps do to it.

    On several ranks no plan of equal shapes leaves less: of each length there are as many rows as
    ranks, or a multiple of it.
    """
    if not len(descending):
        return 0.0
    longest = descending[::num_replicas].astype(np.int64)
    ends = np.array(_cut_best(longest, shapes, None))
    starts = np.concatenate([[0], ends[:-1]])
    paid = (longest[starts] * (ends - starts)).sum() * num_replicas
    return 1 - float(descending.sum() / paid)


def _cut_best(
    longest: Int64[np.ndarray, " rounds"], shapes: int, budget: int | None, width: int = 1
) -> list[int]:
    """Where the groups of least cost end, by dynamic programming over where they may."""
    if not len(longest):
        return []
    places = _find_candidates(longest)
    cost = _cost_groups(longest, places, budget, width)
    # least[k][j]: the least cost of what lies before candidate j, in k + 1 groups; begins[k][j]:
    # the candidate at which the last of these groups begins
    least, begins = [cost[0]], [np.zeros(len(places), np.int64)]
    for _ in range(min(shapes, len(places) - 1) - 1):
        total = least[-1][:-1, None] + cost
        begins.append(total.argmin(axis=0))
        least.append(np.take_along_axis(total, begins[-1][None], axis=0)[0])
    groups = int(np.argmin([each[-1] for each in least]))  # the fewest: no shape is for nothing
    ends, at = [], len(places) - 1
    for begin in reversed(begins[: groups + 1]):
        ends.append(int(places[at]))
        at = begin[at]
    return ends[::-1]


def _find_candidates(longest: Int64[np.ndarray, " rounds"]) -> Int64[np.ndarray, " places"]:
    """Where a group may begin or end: everywhere, or at steps of equal number and equal length."""
    rounds = len(longest)
    if rounds <= _CANDIDATES:
        return np.arange(rounds + 1)
    parts = _CANDIDATES // 2
    part = np.arange(parts + 1)  # in integers: floats may differ between machines
    lengths = longest[0] - part * (longest[0] - longest[-1]) // parts
    by_length = np.searchsorted(-longest, -lengths)
    return np.unique(np.concatenate([part * rounds // parts, by_length]))


def _cost_groups(
    longest: Int64[np.ndarray, " rounds"],
    places: Int64[np.ndarray, " places"],
    budget: int | None,
    width: int,
) -> Float64[np.ndarray, "starts places"]:
    """Tokens that a group from one place to another pays for, infinite where it is empty."""
    lengths = longest[places[:-1], None]
    left = places[None] - places[:-1, None]
    empty = left <= 0
    left = np.where(empty, 1, left)
    if budget is None:
        held = left
    else:
        least_steps = np.where(left * width >= _SHUFFLED, 2, 1)
        least_steps[0, -1] = 1  # all in one shape: of a single step nothing is to be shuffled
        rows, steps = fit_rows(left, budget // lengths, least_steps)
        held = rows * steps
    return np.where(empty, np.inf, lengths * held.astype(np.float64))
