"""What each token counted, given a name, a table and a remedy."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from jax_ddp_weighting._arguments import check_rtol, read_numbers
from jax_ddp_weighting.testing.conventions import (
    EMPTY_STEP,
    RIGHT,
    Match,
    Seen,
    deviation,
    find_reasons,
    find_synonyms,
    matches,
    measure_candidates,
    probes,
    round_up,
    turn_into_masks,
)
from jax_ddp_weighting.testing.remedies import BY_NAME, advise

# Half of what lies between two conventions on the probes: what is nearer is one of them, roughly.
NEAR = 0.025

# They part from the names before them only where something is empty, or weighs less than 1.
_FINER = {"mean_of_nonempty_means", "clamped_weight"}


@dataclass(frozen=True, eq=False)
class Diagnosis:
    """How a step counted its tokens: by name, in numbers, and what mends it.

    Attributes:
        convention: one of `conventions.CONVENTIONS`.
        factor: the gradient as a multiple. Of the global mean for `global_mean`, `times_ranks` and
            their like; of what the convention says for the others: `mean_of_means` summed over `W`
            ranks has factor `W`. None where no constant fits.
        advice: what mends it, in one sentence.
        words: what the step takes, in words.
        alternatives: other names that say the same of all that was seen. The advice mends them too.
        notes: what else was seen.
        shown: what is particular about the weights in the table.
        weights: `[ranks, microbatches, tokens]`, those weights.
        counted: the same layout: what each token counted under them.

    Example:
        >>> found = diagnose_weights(np.full((1, 2, 3), 1 / 3), np.array([[[1, 1, 1], [1, 1, 0]]]))
        >>> found.convention, found.factor, found.right
        ('padding_counted', 2.0, False)
        >>> found.advice
        'Multiply the losses by the weights and divide by the sum of the weights over all ...'
    """

    convention: str
    factor: float | None
    advice: str
    words: str = ""
    alternatives: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    shown: str = ""
    weights: np.ndarray = field(default_factory=lambda: np.zeros((1, 1, 0)), repr=False)
    counted: np.ndarray = field(default_factory=lambda: np.zeros((1, 1, 0)), repr=False)

    @property
    def right(self) -> bool:
        """Whether every token counts as its weight, once."""
        return self.convention == "global_mean"

    def as_dict(self) -> dict[str, Any]:
        """Everything, in types that JSON knows."""
        plain = {name: getattr(self, name) for name in ("convention", "factor", "right", "advice")}
        plain |= {"words": self.words, "shown": self.shown}
        plain |= {"alternatives": list(self.alternatives), "notes": list(self.notes)}
        arrays = {"weights": self.weights, "counted": self.counted}
        return plain | {name: array.tolist() for name, array in arrays.items()}

    def __str__(self) -> str:
        factor = "" if self.factor is None else f", factor {self.factor:.4g}"
        lines = [f"{self.convention}{factor}: the step takes {self.words}."]
        if self.weights.any() and np.isfinite(self.counted).all():
            lines.append(f"Each token counts this many times its right share, where {self.shown}:")
            lines += _format_table(self.weights, self.counted)
        lines.append(f"{'Right' if self.right else 'Fix'}: {self.advice}")
        if self.alternatives:
            lines.append(f"Cannot be told apart here from: {', '.join(self.alternatives)}.")
        return "\n".join([*lines, *(f"Note: {note}" for note in self.notes)])


def diagnose_counts(seen: Mapping[str, Seen], *, rtol: float) -> Diagnosis:
    """The diagnosis of everything seen, by what is particular about the weights it was seen under.

    Args:
        seen: for each kind of weights, the weights and what each token counted, both
            `[ranks, microbatches, tokens]`.
        rtol: the difference allowed, relative to the largest count.
    """
    finite = {label: pair for label, pair in seen.items() if np.isfinite(pair[1]).all()}
    broken = [label for label in seen if label not in finite]
    if len(broken) > 1 and EMPTY_STEP in broken:  # where a part breaks it, the whole says no more
        broken.remove(EMPTY_STEP)
    notes = tuple(f"the gradient is not finite where {label}." for label in broken)
    if not any(label != EMPTY_STEP for label in finite):
        return unknown("a gradient that is not finite", notes=notes)
    shown = next(
        (
            label
            for label, (weights, counted) in finite.items()
            if deviation(counted, RIGHT.counted(weights)) > rtol
        ),
        next(iter(finite)),
    )
    table = {"shown": shown, "weights": finite[shown][0], "counted": finite[shown][1]}
    if not any(counted.any() for _, counted in finite.values()):
        return unknown("a gradient of 0: it ignores its batch", notes=notes, **table)
    found = matches(list(finite.values()), rtol=rtol)
    if not found or found[0].convention == "unknown":
        cast = _describe_cast(finite, rtol, notes, table)
        if cast is not None:
            return cast
    if not found:
        return _describe_unmatched(finite, rtol, notes, table)
    first = found[0]
    others = _find_other_names(finite, found)
    # Those that say exactly the same are alternatives; those that only come close are a doubt.
    exact = [(each, first.counted(each)) for each, _ in finite.values()]
    if not {each.convention for each in matches(exact, rtol=1e-9)} >= set(others):
        return unknown(
            f"what a tolerance of {rtol:g} is too wide to tell",
            advice="Give a smaller rtol=.",
            alternatives=(first.convention, *others),
            notes=notes,
            **table,
        )
    if first.convention == "global_mean" and broken:
        return unknown(
            f"the mean over all weight, but a gradient that is not finite where "
            f"{' and where '.join(broken)}",
            advice="Guard each division against a weight of exactly 0, as WeightedSum.mean does, "
            "before the gradient is taken; and skip the step that is empty as a whole.",
            notes=notes,
            **table,
        )
    reasons = _find_reasons(finite, found)
    return Diagnosis(
        first.convention,
        first.factor,
        advise(first, others, reasons=reasons),
        put_in_words(first, reasons),
        others,
        notes,
        **table,
    )


def _find_reasons(finite: Mapping[str, Seen], found: Sequence[Match]) -> list[Match]:
    ranks, microbatches, _ = next(iter(finite.values()))[0].shape
    return find_reasons(found, ranks, microbatches)


def _find_other_names(finite: Mapping[str, Seen], found: Sequence[Match]) -> tuple[str, ...]:
    """The names beside the first, but for those that more ranks could not tell from it either.

    (The first a multiple of the right mean: of wrong ones all names are listed that fit.)
    """
    first, *rest = found
    names = dict.fromkeys(each.convention for each in rest)
    others = tuple(name for name in names if name not in (first.convention, "unknown"))
    if first.scheme is not RIGHT:
        return others
    seen = [weights for weights, _ in finite.values()]
    ranks, microbatches, _ = seen[0].shape
    binary = all(np.isin(weights, (0, 1)).all() for weights in seen)
    # More ranks may show another name. But one microbatch is all that some code has, and what
    # weights of 0 and 1 cannot show there is no mistake in code that is given masks.
    laid_out = probes(ranks + 1, microbatches, "binary" if binary else "any").values()

    def could_differ(each: Match) -> bool:
        apart = (deviation(each.counted(w), first.counted(w)) > NEAR for w in laid_out)
        # of other schemes as they are: a factor of one rank is none
        return (each.scheme is RIGHT or each.powers == (0, 0)) and any(apart)

    return tuple(
        name
        for name in others
        if any(could_differ(each) for each in rest if each.convention == name)
    )


def diagnose_weights(counted: Any, weights: Any, *, rtol: float = 1e-3) -> Diagnosis:
    """The convention under which tokens of these weights counted so, in one batch.

    The rule: as for `diagnose`, but with one batch to go by: where its weights are too even to tell
    a right step from a wrong one, the answer is `unknown`, and says so.

    Args:
        counted: `[ranks, microbatches, tokens]`, what each token counted, such as
            `effective_weights` finds.
        weights: the same shape; each at least 0, and 0 in slots that hold no token.
        rtol: the difference allowed, relative to the largest count.

    Returns:
        A `Diagnosis`.

    Raises:
        ValueError: the shapes differ, no weight is above 0, or `rtol` is not in `[0, 1)`.
        TypeError: they are no arrays of numbers.

    Example:
        >>> weights = np.array([[[1, 1, 1]], [[1, 0, 0]]])
        >>> counted = np.array([[[1 / 6, 1 / 6, 1 / 6]], [[1 / 2, 0, 0]]])
        >>> diagnose_weights(counted, weights).convention
        'mean_of_means'
    """
    check_rtol("diagnose_weights: rtol", rtol)
    remedy = "Both are laid out as [ranks, microbatches, tokens]."
    counted = read_numbers("diagnose_weights: counted", counted, remedy).astype(float)
    weights = read_numbers("diagnose_weights: weights", weights, remedy).astype(float)
    if weights.ndim != 3 or counted.shape != weights.shape:
        raise ValueError(
            "diagnose_weights: counted and weights must have one shape [ranks, microbatches, "
            f"tokens], got {counted.shape} and {weights.shape}. Fill short microbatches up with "
            "tokens of weight 0."
        )
    if not (np.isfinite(weights).all() and (weights >= 0).all() and weights.any()):
        raise ValueError(
            "diagnose_weights: weights must be finite, at least 0, and not all 0, got "
            f"{weights.tolist()}. A batch without weight shows nothing."
        )
    found = diagnose_counts({"the batch is as given": (weights, counted)}, rtol=rtol)
    if found.convention == "unknown":
        return found
    ranks, microbatches, _ = weights.shape
    first, *others = matches([(weights, counted)], rtol=rtol)
    same = {first.convention, "unknown", *find_synonyms(ranks, microbatches, first)} | _FINER
    if all(each.convention in same or not each.plain for each in others):
        return found
    return replace(
        found,
        convention="unknown",
        factor=None,
        advice="Give ranks and microbatches unequal weights, and some padding, and look again.",
        words="what this batch is too even to tell",
        alternatives=(found.convention, *found.alternatives),
    )


def unknown(words: str, *, advice: str = BY_NAME["unknown"], **other: Any) -> Diagnosis:
    """A diagnosis without a name, but with a reason."""
    return Diagnosis("unknown", None, advice, words, **other)


def _describe_unmatched(
    finite: Mapping[str, Seen], rtol: float, notes: tuple[str, ...], table: dict[str, Any]
) -> Diagnosis:
    """What can be said of counts that no candidate explains."""
    counts = [counted for _, counted in finite.values()]
    if len(counts) > 1 and all(deviation(each, counts[0]) <= rtol for each in counts[1:]):
        words = "the same gradient whatever the weights: it ignores its batch"
        return unknown(words, notes=notes, **table)
    divided = _describe_divisor(finite, rtol, notes, table)
    if divided is not None:
        return divided
    factor = _find_factor(finite, rtol)
    if factor is not None:
        found = unknown(
            f"{factor:.4g} times the mean over all weight, a factor that neither the number of "
            "ranks nor that of microbatches explains",
            advice=f"Look for a constant of {factor:.4g} in the loss: tokens count in the right "
            "proportion.",
            notes=notes,
            **table,
        )
        return replace(found, factor=factor)
    each = {label: matches([pair], rtol=rtol) for label, pair in finite.items()}
    if len(finite) > 1 and any(each.values()):
        notes += tuple(
            f"where {label}, it is {found[0].convention if found else 'none of the known'}."
            for label, found in each.items()
        )
    off, nearest = _find_nearest(finite)
    notes += (f"the nearest is {nearest.convention}, off by {off:.2g} of the largest count.",)
    advice = BY_NAME["unknown"]
    if off < NEAR:
        advice = (
            f"Allow it rtol={round_up(off)} if it computes in bfloat16, float16 or with other "
            "noise. If not, look for what changes the counts by so little."
        )
    words = "none of the known conventions, or a mixture"
    return unknown(words, advice=advice, notes=notes, **table)


# How code that wants masks or counts takes weights that are none.
_CASTS: tuple[tuple[str, Callable[[np.ndarray], np.ndarray]], ...] = (
    ("turned into 0 and 1", turn_into_masks),
    ("cut to whole numbers", np.floor),
)


def _describe_cast(
    finite: Mapping[str, Seen], rtol: float, notes: tuple[str, ...], table: dict[str, Any]
) -> Diagnosis | None:
    """A wrong convention, by code that casts the weights before it counts them so, if it is one."""
    for words, transform in _CASTS:
        found = matches([(transform(w), counted) for w, counted in finite.values()], rtol=rtol)
        if found and found[0].convention not in ("global_mean", "unknown"):
            first, reasons = found[0], _find_reasons(finite, found)
            words = f"{put_in_words(first, reasons)}, of weights {words}"
            advice = advise(first, reasons=reasons)
            return Diagnosis(first.convention, first.factor, advice, words, (), notes, **table)
    return None


def _describe_divisor(
    finite: Mapping[str, Seen], rtol: float, notes: tuple[str, ...], table: dict[str, Any]
) -> Diagnosis | None:
    """A step that divides the weighted losses by something else than their weight, if it does."""
    divisors, totals = [], []
    for weights, counted in finite.values():
        if not weights.any():
            continue
        part = float(np.vdot(weights, counted) / np.vdot(weights, weights))
        if part <= 0 or deviation(counted, part * weights) > rtol:
            return None
        divisors.append(1 / part)
        totals.append(float(weights.sum()))
    divisor, total = np.array(divisors), np.array(totals)
    if len(divisor) < 2 or np.ptp(total) == 0:
        return None
    allowed = 2 * rtol * divisor
    if np.ptp(divisor) <= allowed.min():
        number = float(divisor.mean())
        words = f"the sum of the weighted losses over {number:.4g}, whatever they weigh"
        return Diagnosis("sum", 1 / number, BY_NAME["sum"], words, (), notes, **table)
    floor = float(divisor.min())
    if (np.abs(divisor - np.maximum(total, floor)) <= allowed).all() and floor > total.min():
        words = (
            f"the mean over all weight, where a step that holds less than {floor:.4g} divides as "
            "that"
        )
        advice = BY_NAME["clamped_weight"]
        return Diagnosis("clamped_weight", 1.0, advice, words, (), notes, **table)
    added = float(np.mean(divisor - total))
    if added > 0 and (np.abs(divisor - total - added) <= allowed).all():
        return unknown(
            f"the weighted losses over their weight and {added:.4g} more",
            advice="Divide by the weight as it is, and guard only against exactly 0: now "
            f"{added:.4g} is added to it.",
            notes=notes,
            **table,
        )
    return None


def _find_factor(finite: Mapping[str, Seen], rtol: float) -> float | None:
    weights, counted = next(iter(finite.values()))
    factor = float(np.vdot(counted, weights) / np.vdot(weights, weights) * weights.sum())
    if factor and all(
        deviation(counted, factor * RIGHT.counted(weights)) <= rtol
        for weights, counted in finite.values()
    ):
        return factor
    return None


def _find_nearest(finite: Mapping[str, Seen]) -> tuple[float, Match]:
    measured = measure_candidates(list(finite.values()))
    scored = [(off, each) for each, off in measured if each.convention != "unknown"]
    return min(scored, key=lambda pair: pair[0])


def put_in_words(match: Match, reasons: Sequence[Match] = ()) -> str:
    """What a step of this convention takes, by all reasons that its factor may have."""
    if match.powers == (0, 0):
        return match.scheme.words
    words = ", or ".join(each.reason for each in reasons or [match])
    return f"{words}{',' if len(reasons) > 1 else ''} times {match.scheme.words}"


def _format_table(weights: np.ndarray, counted: np.ndarray) -> list[str]:
    ranks, microbatches, _ = weights.shape
    rows, columns = min(ranks, 8), min(microbatches, 6)
    right = RIGHT.counted(weights)
    lines = [["", *(f"microbatch {k}" for k in range(columns))]]
    for r in range(rows):
        cells = [_format_cell(weights[r, k], counted[r, k], right[r, k]) for k in range(columns)]
        lines.append([f"rank {r}", *cells])
    if microbatches > columns:
        lines[0].append(f"and {microbatches - columns} more")
    width = max(len(cell) for line in lines for cell in line[1:]) + 2
    shown = [f"{line[0]:8}" + "".join(f"{cell:>{width}}" for cell in line[1:]) for line in lines]
    return shown + ([f"and {ranks - rows} more ranks"] if ranks > rows else [])


def _format_cell(weights: np.ndarray, counted: np.ndarray, right: np.ndarray) -> str:
    held = weights > 0
    padding = bool(np.abs(counted[~held]).max(initial=0.0) > 1e-6 * np.abs(counted).max())
    if not held.any():
        return "padding counts" if padding else "empty"
    ratios = counted[held] / right[held]
    low, high = ratios.min(), ratios.max()
    same = high - low <= 1e-4 * max(abs(low), abs(high))
    shown = f"{low:.3f}" if same else f"{low:.3f} to {high:.3f}"
    return f"{shown} (weight {weights.sum():.4g}{', padding' if padding else ''})"
