"""The ways in which steps weigh their tokens, each as a function of the weights alone.

Weights are laid out as `[ranks, microbatches, tokens]` throughout. What a token counted is the
factor of its own gradient in the gradient that was applied; the same layout.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

CONVENTIONS = (
    "global_mean",
    "mean_of_means",
    "mean_of_nonempty_means",
    "rank_token_mean",
    "step_token_mean",
    "sum",
    "divided_by_ranks",
    "times_ranks",
    "times_microbatches",
    "divided_by_microbatches",
    "padding_counted",
    "clamped_weight",
    "unknown",
)
"""Every name that a diagnosis can give."""


# --- schemes: weights -> counts -------------------------------------------------------------------


@dataclass(frozen=True)
class Scheme:
    """A way of turning weights into what each token counts.

    Attributes:
        convention: its name, one of `CONVENTIONS`; `unknown` where there is none, only words.
        words: what it does, to complete "the step takes ...".
        counted: the function itself.
    """

    convention: str
    words: str
    counted: Callable[[np.ndarray], np.ndarray]


_TOKENS, _RANK, _STEP, _WHOLE = (2,), (1, 2), (0, 2), (0, 1, 2)
_RANKS, _MICROBATCHES, _PARTS = (0,), (1,), (0, 1)


def _mean_of_parts(
    within: tuple[int, ...],
    *,
    clamped: bool = False,
    averaged: tuple[int, ...] = (),
    nonempty: bool = False,
) -> Callable[[np.ndarray], np.ndarray]:
    """Each part divides by its own weight, and the parts are averaged."""

    def counted(weights: np.ndarray) -> np.ndarray:
        sums = weights.sum(axis=within, keepdims=True)
        parts = np.count_nonzero(sums) if nonempty else sums.size
        floor = _floor(weights, averaged) if clamped or averaged else None
        return weights / _divisors(sums, floor) / max(parts, 1)

    return counted


def _nonempty_within(axis: int) -> Callable[[np.ndarray], np.ndarray]:
    """The means of nonempty microbatches, averaged along one axis and then along the other."""

    def counted(weights: np.ndarray) -> np.ndarray:
        sums = weights.sum(axis=2, keepdims=True)
        parts = np.count_nonzero(sums, axis=axis, keepdims=True)
        return weights / _divisors(sums, None) / np.maximum(parts, 1) / parts.size

    return counted


def _over_clamped(
    within: tuple[int, ...], averaged: tuple[int, ...] = ()
) -> Callable[[np.ndarray], np.ndarray]:
    """Summed weights, each of them raised to a floor at least before they were summed."""

    def counted(weights: np.ndarray) -> np.ndarray:
        return weights / np.maximum(weights.sum(axis=within), _floor(weights, averaged)).sum()

    return counted


def _floor(weights: np.ndarray, averaged: tuple[int, ...]) -> float:
    """1; or of weights that were averaged over some axes first, and then raised to 1."""
    return float(np.prod([weights.shape[axis] for axis in averaged]))


def _divisors(sums: np.ndarray, floor: float | None) -> np.ndarray:
    return np.where(sums > 0, sums, 1.0) if floor is None else np.maximum(sums, floor)


def _right(weights: np.ndarray) -> np.ndarray:
    return _mean_of_parts(_WHOLE)(weights)


def turn_into_masks(weights: np.ndarray) -> np.ndarray:
    """1 for every weight above 0, as code that knows padding alone takes weights."""
    return (weights > 0).astype(float)


RIGHT = Scheme("global_mean", "the mean over all weight", _right)

# In order of plainness: of those that agree with what was seen, the first is named. So a step that
# is right on all probes is called right, though with one rank several of these are one function.
SCHEMES = (
    RIGHT,
    Scheme(
        "mean_of_means",
        "the mean of the means of all microbatches of all ranks",
        _mean_of_parts(_TOKENS),
    ),
    Scheme(
        "mean_of_nonempty_means",
        "the mean of the means of those microbatches that hold any weight",
        _mean_of_parts(_TOKENS, nonempty=True),
    ),
    Scheme("rank_token_mean", "the mean of the ranks' own means", _mean_of_parts(_RANK)),
    Scheme(
        "step_token_mean", "the mean of the microbatches' own global means", _mean_of_parts(_STEP)
    ),
    Scheme("sum", "the sum of the weighted losses, divided by no weight", lambda w: w),
    Scheme(
        "padding_counted",
        "the weighted losses over the number of slots, padding included",
        lambda w: w / w.size,
    ),
    Scheme(
        "padding_counted",
        "the mean over all slots, padding included, whatever they weigh",
        lambda w: np.full_like(w, 1 / w.size),
    ),
    *(
        Scheme(
            "clamped_weight",
            f"the mean over all weight, where {part} that holds less than 1 divides as 1",
            _over_clamped(within),
        )
        for part, within in (
            ("a microbatch", _TOKENS),
            ("a rank", _RANK),
            ("a microbatch over all ranks", _STEP),
            ("a step", _WHOLE),
        )
    ),
    # A weight that is averaged before it is raised to 1, as detectors do with their boxes.
    *(
        Scheme(
            "clamped_weight",
            f"the mean over all weight, where {part} that holds less than 1 for each {each} "
            "divides as that",
            _over_clamped(within, averaged),
        )
        for part, within, each, averaged in (
            ("a step", _WHOLE, "rank", _RANKS),
            ("a step", _WHOLE, "microbatch", _MICROBATCHES),
            ("a step", _WHOLE, "microbatch of each rank", _PARTS),
            ("a microbatch over all ranks", _STEP, "rank", _RANKS),
            ("a rank", _RANK, "microbatch", _MICROBATCHES),
        )
    ),
    *(
        Scheme(name, f"the mean of {whose} means, each divided by 1 at least", count)
        for name, whose, count in (
            ("mean_of_means", "all microbatches'", _mean_of_parts(_TOKENS, clamped=True)),
            (
                "mean_of_nonempty_means",
                "nonempty microbatches'",
                _mean_of_parts(_TOKENS, clamped=True, nonempty=True),
            ),
            ("rank_token_mean", "the ranks'", _mean_of_parts(_RANK, clamped=True)),
            ("step_token_mean", "the microbatches' global", _mean_of_parts(_STEP, clamped=True)),
        )
    ),
    *(
        Scheme(
            name, f"the mean of {whose} means, each divided by 1 for each {each} at least", count
        )
        for name, whose, each, count in (
            (
                "step_token_mean",
                "the microbatches' global",
                "rank",
                _mean_of_parts(_STEP, averaged=_RANKS),
            ),
            (
                "rank_token_mean",
                "the ranks'",
                "microbatch",
                _mean_of_parts(_RANK, averaged=_MICROBATCHES),
            ),
        )
    ),
    Scheme(
        "mean_of_nonempty_means",
        "each rank's mean over its nonempty microbatches' means, and the mean of the ranks",
        _nonempty_within(1),
    ),
    Scheme(
        "mean_of_nonempty_means",
        "each microbatch's mean over the nonempty ranks' means, and the mean of the microbatches",
        _nonempty_within(0),
    ),
    Scheme(
        "rank_token_mean",
        "the mean of the own means of those ranks that hold any weight",
        _mean_of_parts(_RANK, nonempty=True),
    ),
    Scheme(
        "step_token_mean",
        "the mean of the own global means of those microbatches that hold any weight",
        _mean_of_parts(_STEP, nonempty=True),
    ),
    Scheme("unknown", "every weight above 0 for 1", lambda w: _right(turn_into_masks(w))),
    Scheme("unknown", "weights cut to whole numbers", lambda w: _right(np.floor(w))),
    Scheme(
        "unknown",
        "the weighted losses over the number of tokens that weigh anything",
        lambda w: w / max(np.count_nonzero(w), 1),
    ),
    Scheme("unknown", "the sum over all slots, whatever they weigh", np.ones_like),
)


# --- candidates: schemes times factors ------------------------------------------------------------


@dataclass(frozen=True)
class Match:
    """A scheme times a factor that has a reason: a product of powers of ranks and microbatches.

    Attributes:
        convention: the name of the whole, which for a multiple of the global mean is the factor's.
        factor: the number itself.
        scheme: what is multiplied.
        reason: the factor in words.
        plain: whether it is a mistake seen in practice, and not one that could only be thought of.
        powers: the power of the number of ranks in the factor, and that of microbatches.
    """

    convention: str
    factor: float
    scheme: Scheme
    reason: str
    plain: bool
    powers: tuple[int, int]

    def counted(self, weights: np.ndarray) -> np.ndarray:
        """What each token counts, for any numbers of ranks and microbatches."""
        ranks, microbatches, _ = weights.shape
        return find_factor(self.powers, ranks, microbatches) * self.scheme.counted(weights)


# (power of ranks, power of microbatches) -> the name of that many times the global mean
_GLOBAL = {
    (0, 0): "global_mean",
    (1, 0): "times_ranks",
    (-1, 0): "divided_by_ranks",
    (0, 1): "times_microbatches",
    (0, -1): "divided_by_microbatches",
}
_POWERS = (*_GLOBAL, (1, 1), (-1, -1), (1, -1), (-1, 1))


@lru_cache
def candidates(ranks: int, microbatches: int) -> tuple[Match, ...]:
    """Every scheme times every factor that has a reason, the plainest first.

    Schemes as they are, and the named multiples of the global mean, come before other factors.
    """
    found = []
    for scheme in SCHEMES:
        for powers in _POWERS:
            factor = find_factor(powers, ranks, microbatches)
            name = _GLOBAL.get(powers, "unknown") if scheme is RIGHT else scheme.convention
            plain = factor == 1 or (scheme is RIGHT and powers in _GLOBAL)
            plain |= scheme.convention == "sum" and powers == (-1, 0)  # summed, then averaged
            found.append(Match(name, factor, scheme, _explain_factor(powers), plain, powers))
    return tuple(sorted(found, key=lambda each: not each.plain))


def find_factor(powers: tuple[int, int], ranks: int, microbatches: int) -> float:
    """The product of these powers of the two numbers."""
    return float(ranks ** powers[0] * microbatches ** powers[1])


def _explain_factor(powers: tuple[int, int]) -> str:
    parts = ("the number of ranks", "the number of microbatches")
    times = [part for part, power in zip(parts, powers, strict=True) if power > 0]
    over = [part for part, power in zip(parts, powers, strict=True) if power < 0]
    words = " times ".join(times)
    if over:
        words = f"{words or '1'} over {' times '.join(over)}"
    return words


# --- probes: weights that tell candidates apart ---------------------------------------------------


EMPTY_STEP = "the whole step is empty"
WEIGHTS = ("any", "binary")


def probes(ranks: int, microbatches: int, weights: str = "any") -> dict[str, np.ndarray]:
    """Weights on which the conventions differ, by what is particular about them.

    All are dyadic fractions, exact in float32. The number of tokens is a prime that divides neither
    ranks nor microbatches, so that counting slots looks like no other factor.

    Args:
        ranks: how many ranks they are laid out for.
        microbatches: how many microbatches each rank has.
        weights: one of `WEIGHTS`; `"binary"` is of 0 and 1 alone, as masks are.
    """
    parts = ranks * microbatches
    tokens = next(prime for prime in (7, 11, 13, 17, 19, 23, 29, 31, 37) if parts % prime)
    part = np.arange(parts).reshape(ranks, microbatches, 1)
    place = (np.arange(tokens) + part) % tokens
    # Steps of 3 modulo a prime: microbatches hold different weights, and so do ranks.
    full = (place < 1 + (3 * part + 2) % tokens).astype(float)

    rank, step = np.indices((ranks, microbatches))
    # A chessboard empties some microbatches but no rank and no microbatch over all ranks; the last
    # row and column empty whole ones. Conventions that skip the empty part company on these two.
    scattered = full * ((rank + step) % 2 == 0)[..., None]
    busy = (rank < max(ranks - 1, 1)) & (step < max(microbatches - 1, 1))
    idle = full * busy[..., None]

    found: dict[str, np.ndarray] = {"every microbatch holds some weight": full}
    if ranks > 1 and microbatches > 1:
        found["some microbatches are empty"] = scattered
    if parts > 1:
        found["a whole rank or microbatch is empty"] = idle
    if weights == "binary":
        # less than 1 for each rank and microbatch, which is as little as a mask can hold
        found["the step holds a single token"] = full * (place == 0) * (part == 0)
        found[EMPTY_STEP] = np.zeros_like(full)
        return found

    # Fractions above and below 1, and microbatches of less than 1 altogether, for clamps and casts.
    heavy = full * np.array([0.5, 1.5, 3.0])[(place + part) % 3]
    light = (place == 0) * (0.25 * (1 + part // 2 % 3))  # less than 1 in the whole microbatch
    fractional = np.where(part % 2 == 1, light, heavy)
    # The same, scaled by a power of 2, which rounds nothing, to less than 1 in the whole step.
    little = fractional / 2.0 ** np.ceil(np.log2(fractional.sum()) + 1)

    found["weights are fractions"] = fractional
    found["the step holds less weight than 1"] = little
    found[EMPTY_STEP] = np.zeros_like(full)
    return found


# --- comparing what was seen ----------------------------------------------------------------------

Seen = tuple[np.ndarray, np.ndarray]
"""Weights, and what each token counted under them."""


def matches(seen: Sequence[Seen], *, rtol: float) -> list[Match]:
    """The candidates that agree with everything seen, the plainest first."""
    return [each for each, off in measure_candidates(seen) if off <= rtol]


def find_reasons(found: Sequence[Match], ranks: int, microbatches: int) -> list[Match]:
    """Of candidates that agree, those that give the first one's factor other reasons, it first.

    A scheme as it is needs no reason, though others give 1 as well; and a number that is 1 is none.
    """
    first = found[0]
    if first.powers == (0, 0):
        return [first]
    kept: dict[tuple[int, int], Match] = {}
    for each in found:
        if each.scheme is first.scheme:
            by_ranks, by_microbatches = each.powers
            shown = (by_ranks * (ranks > 1), by_microbatches * (microbatches > 1))
            kept.setdefault(shown, each)
    return list(kept.values())


def measure_candidates(seen: Sequence[Seen]) -> list[tuple[Match, float]]:
    """Each candidate and its largest deviation from anything seen, the plainest first."""
    ranks, microbatches, _ = seen[0][0].shape
    found = candidates(ranks, microbatches)
    rows = [_ROWS[id(each.scheme)] for each in found]
    factors = np.array([each.factor for each in found])
    largest = np.zeros(len(found))
    for weights, counted in seen:
        by_scheme, flat = _count_by_schemes(weights), counted.reshape(-1)
        gaps = np.zeros(len(found))
        for start in range(0, flat.size, _BLOCK):  # a real batch may be large, and candidates many
            here = slice(start, start + _BLOCK)
            expected = factors[:, None] * by_scheme[rows, here]
            gaps = np.maximum(gaps, np.abs(flat[here] - expected).max(axis=1))
        sizes = factors * np.abs(by_scheme).max(axis=1)[rows]
        nothing = np.where(gaps == 0, 0.0, np.inf)
        off = np.divide(gaps, sizes, out=nothing, where=sizes > 0)
        largest = np.maximum(largest, off)
    return list(zip(found, largest.tolist(), strict=True))


_ROWS = {id(scheme): row for row, scheme in enumerate(SCHEMES)}
_BLOCK = 4096  # tokens; and no probe of few ranks has more


def _count_by_schemes(weights: np.ndarray) -> np.ndarray:
    """What each scheme counts under these weights, `[schemes, tokens of all ranks]`."""
    if weights.size > _BLOCK:
        return np.stack([scheme.counted(weights).reshape(-1) for scheme in SCHEMES])
    return _count_probe(weights.shape, weights.astype(float).tobytes())


@lru_cache(maxsize=256)  # the same few probes are asked of everything
def _count_probe(shape: tuple[int, ...], weights: bytes) -> np.ndarray:
    laid_out = np.frombuffer(weights).reshape(shape)
    return np.stack([scheme.counted(laid_out).reshape(-1) for scheme in SCHEMES])


def deviation(counted: np.ndarray, expected: np.ndarray) -> float:
    """The largest difference, relative to the largest expected count."""
    gap, size = np.max(np.abs(counted - expected)), np.max(np.abs(expected))
    return float(gap / size) if size else float(np.inf if gap else 0.0)


def round_up(number: float) -> float:
    """The next number of one digit, a tenth above at least."""
    above = 1.1 * number
    digit = 10.0 ** np.floor(np.log10(above))
    return float(f"{np.ceil(above / digit) * digit:.1g}")


def find_synonyms(ranks: int, microbatches: int, match: Match) -> list[str]:
    """The other names that say the same as this match, whatever the weights are.

    With one rank, for instance, nothing that depends on the number of ranks can show.
    """
    seen = [(each, match.counted(each)) for each in probes(ranks, microbatches).values()]
    names = [each.convention for each in matches(seen, rtol=1e-9)]
    return [name for name in dict.fromkeys(names) if name not in (match.convention, "unknown")]
