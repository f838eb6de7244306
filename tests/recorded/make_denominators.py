"""Writes denominators.json: uneven batches, and what right and wrong conventions make of them.

In exact fractions, each convention spelled out anew from its words: the library has no part in it.

    python tests/recorded/make_denominators.py
"""

from fractions import Fraction
from pathlib import Path
from typing import Any

import layout

ABOUT = (
    "ranks: rank -> microbatch -> [[loss gradient, weight], ...]. values: exact fractions; 'right' "
    "and what ten other conventions give. sums and counts: totals and weights per rank and "
    "microbatch."
)


def rows(value: float, count: int, weight: float = 1) -> list[list[float]]:
    return [[value, weight]] * count


CASES = {
    "ms-swift#10076 1x(1|3)": [[rows(1, 1), rows(3, 3)]],
    "2 ranks 1|3": [[rows(1, 1)], [rows(3, 3)]],
    "prime-rl#1957 5|1": [[rows(1, 5)], [rows(7, 1)]],
    "torchtune#1917 counts 2 ranks x 2 micro (5,10 | 20,3)": [
        [rows(1, 5), rows(2, 10)],
        [rows(3, 20), rows(4, 3)],
    ],
    "zero-target rank 0|4": [[[]], [rows(3, 4)]],
    "zero-target micro on each rank (0,4|2,0)": [[[], rows(3, 4)], [rows(6, 2), []]],
    "all zero": [[[]], [[]]],
    "short final window, configured GA 4 actual 2, 1 rank": [[rows(1, 2), rows(2, 6)]],
    "HF#608 13 rows = 7+6": [[rows(1, 7)], [rows(2, 6)]],
    "fractional weights .25,.25": [[rows(2, 1, 0.25)], [rows(4, 1, 0.25)]],
    "all-masked sample in normaliser: miles#2796 4 valid (values 1)": [[rows(1, 4), []]],
    "probe W=2 GA=3 (separates xW from xGA)": [
        [rows(1, 1), rows(2, 8), []],
        [rows(5, 2), rows(-4, 3), rows(2, 5)],
    ],
    "duplicated tail: true rows 0,0,3; sampler adds a copy of row 0 with weight 0": [
        [rows(0, 1), rows(0, 1)],
        [rows(3, 1), rows(0, 1, 0)],
    ],
    "sign flip 1|3": [[rows(0.1, 1), rows(-0.05, 3)]],
}


def over(total: Fraction, weight: Fraction) -> Fraction:
    return total / weight if weight else Fraction(0)


def mean(values: Any) -> Fraction:
    values = list(values)
    return over(sum(values, start=Fraction(0)), Fraction(len(values)))


def values_of(ranks: Any) -> dict[str, Any]:
    """Every convention's value of one case, as text."""

    def summed(parts: Any) -> tuple[Fraction, Fraction]:
        pairs = [(Fraction(str(g)), Fraction(str(w))) for part in parts for g, w in part]
        return (
            sum((g * w for g, w in pairs), start=Fraction(0)),
            sum((w for _, w in pairs), start=Fraction(0)),
        )

    all_parts = [part for rank in ranks for part in rank]
    microbatches = list(zip(*ranks, strict=True))
    total, weight = summed(all_parts)
    right = over(total, weight)
    by_part = [summed([part]) for part in all_parts]
    values = {
        "right": right,
        "mean_of_all_local_means": mean(over(*part) for part in by_part),
        "rank_token_mean_then_rank_mean": mean(over(*summed(rank)) for rank in ranks),
        "global_mean_per_microstep_then_mean": mean(over(*summed(k)) for k in microbatches),
        "sum_then_rank_mean(no count)": total / len(ranks),
        "sum/local_count_clamped1 (skip empty: mean over nonempty only)": mean(
            over(*part) for part in by_part if part[1]
        ),
        "forgot_W (local_sum/N then rank mean)": right / len(ranks),
        "double_W (x W twice)": right * len(ranks),
        "xGA": right * len(microbatches),
        "divGA": right / len(microbatches),
        "clamp1 before reduce": over(total, sum(max(w, Fraction(1)) for _, w in by_part)),
    }
    return {name: str(value) for name, value in values.items()} | {
        "counts": [[str(summed([part])[1]) for part in rank] for rank in ranks],
        "sums": [[str(summed([part])[0]) for part in rank] for rank in ranks],
        "N": str(weight),
        "S": str(total),
    }


def make() -> dict[str, Any]:
    cases = {name: {"ranks": ranks, "values": values_of(ranks)} for name, ranks in CASES.items()}
    return {"about": ABOUT, "cases": cases}


if __name__ == "__main__":
    layout.write(make, Path(__file__).parent / "denominators.json")
