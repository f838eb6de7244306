"""A gradient that was written down, diagnosed: what each example counted, by the examples' own."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from jax_ddp_weighting._arguments import (
    check_microbatches,
    check_num_replicas,
    list_some,
)
from jax_ddp_weighting.testing.conventions import RIGHT
from jax_ddp_weighting.testing.diagnosis import Diagnosis, diagnose_weights
from jax_ddp_weighting.testing.per_example import effective_weights
from jax_ddp_weighting.testing.recording import (
    GRADIENT,
    MICROBATCH,
    PER_EXAMPLE,
    RANK,
    WEIGHTS,
)
from jax_ddp_weighting.testing.row_table import RowTable

Named = Mapping[str, np.ndarray]


@dataclass(frozen=True, eq=False)
class RecordedStep:
    """One step: its gradient, and whose it is.

    Attributes:
        gradient: by parameter.
        per_example: the same names, `[examples, ...]`.
        weights: `[examples]`.
        rank: `[examples]`, which rank held each.
        microbatch: `[examples]`, in which of its rank's microbatches.
    """

    gradient: Named
    per_example: Named
    weights: np.ndarray
    rank: np.ndarray
    microbatch: np.ndarray


def is_recording(arrays: Named) -> bool:
    """Whether the arrays are those of a file that `record` wrote."""
    return any(name.startswith(GRADIENT) for name in arrays) and WEIGHTS in arrays


def gradient_of(arrays: Named) -> dict[str, np.ndarray]:
    """The gradient in a file: a recording's, or all that it holds."""
    if not is_recording(arrays):
        return dict(arrays)
    return {n.removeprefix(GRADIENT): x for n, x in arrays.items() if n.startswith(GRADIENT)}


def read_recording(arrays: Named) -> RecordedStep:
    """The step in a file that `record` wrote."""
    missing = [name for name in (WEIGHTS, RANK, MICROBATCH) if name not in arrays]
    if missing:
        raise ValueError(
            f"diagnose: a recorded step must hold weights, rank and microbatch, got none of "
            f"{list_some(missing)}. Write it by record(path, model, loss_of_example)."
        )
    own = {n.removeprefix(PER_EXAMPLE): x for n, x in arrays.items() if n.startswith(PER_EXAMPLE)}
    return RecordedStep(
        gradient_of(arrays), own, *(np.asarray(arrays[n]) for n in (WEIGHTS, RANK, MICROBATCH))
    )


def lay_out_step(
    gradient: Named, per_example: Named, weights: np.ndarray, ranks: int, microbatches: int
) -> RecordedStep:
    """A step from its parts: weights `[examples]` in equal runs, or `[ranks, microbatches, n]`.

    Raises:
        ValueError: weights have another shape than ranks and microbatches say, or do not divide.
    """
    check_num_replicas("diagnose: --ranks", ranks)
    check_microbatches("diagnose: --microbatches", microbatches)
    weights = np.asarray(weights)
    fits = weights.ndim == 1 and weights.size % (ranks * microbatches) == 0
    if not (weights.size and (fits or weights.shape[:-1] == (ranks, microbatches))):
        raise ValueError(
            f"diagnose: --weights must hold one number per example, in {ranks} x {microbatches} "
            f"equal runs for ranks and microbatches, or be [ranks, microbatches, examples], got "
            f"shape {weights.shape}. Fill short microbatches up with weight 0, and per-example "
            "gradients with 0."
        )
    part = np.repeat(np.arange(ranks * microbatches), weights.size // (ranks * microbatches))
    return RecordedStep(
        gradient, per_example, weights.reshape(-1), part // microbatches, part % microbatches
    )


def diagnose_recorded(step: RecordedStep, *, rtol: float = 1e-3) -> Diagnosis:
    """The convention of one step that was written down.

    The rule: as for `diagnose_step`. Rows of weight 0 whose own gradient is 0 or not finite are
    left out, as what they counted cannot show.

    Args:
        step: the step.
        rtol: how exactly counts must fit, relative to the largest.

    Raises:
        ValueError: names, shapes or lengths differ; something is not finite; a weight is negative;
            the examples' gradients do not determine what they counted; the weights are so even
            that a vote of each rank's is right too; or `rtol` is not in `[0, 1)`.
    """
    weights = np.asarray(step.weights, float)
    _check_step(step, weights)
    count = len(weights)
    own = {name: np.asarray(x, float).reshape(count, -1) for name, x in step.per_example.items()}
    finite = np.all([np.isfinite(x).all(axis=1) for x in own.values()], axis=0)
    silent = np.all([(x == 0).all(axis=1) for x in own.values()], axis=0)
    used = (weights > 0) | (finite & ~silent)
    solved = effective_weights(
        {name: np.asarray(step.gradient[name]) for name in own},
        {name: np.asarray(x)[used] for name, x in step.per_example.items()},
        rtol=rtol,
    )
    numbers = int(step.rank.max()) + 1, int(step.microbatch.max()) + 1
    table = RowTable.of(step.rank, step.microbatch, *numbers)
    laid_out = table.lay_out(weights)
    found = diagnose_weights(table.lay_out(solved, used), laid_out, rtol=rtol)
    found = replace(found, shown="the step is as recorded")
    if found.convention != "unknown" or "global_mean" not in found.alternatives:
        return found
    # Right in this step; whether that says anything depends on what weights it had.
    totals = laid_out.sum(axis=(1, 2) if len(laid_out) > 1 else 2).reshape(-1)
    if len(totals) > 1 and np.all(totals == totals[0]):
        raise ValueError(
            "diagnose: the step must weigh its ranks and microbatches unequally, got weights under "
            f"which {' and '.join(found.alternatives)} are the same. Record a step whose "
            "microbatches hold other weights, and some padding."
        )
    return replace(
        found,
        convention="global_mean",
        factor=1.0,
        words=RIGHT.words,
        advice="Nothing to mend in this step: every example counts as its weight, once.",
        alternatives=tuple(name for name in found.alternatives if name != "global_mean"),
    )


def _check_step(step: RecordedStep, weights: np.ndarray) -> None:
    names = set(step.gradient) ^ set(step.per_example)
    if names:
        raise ValueError(
            "diagnose: gradient and per-example gradients must have the same names, got "
            f"{list_some(sorted(names))} in one of them alone. Write both from one model."
        )
    for name, value in step.gradient.items():
        own = step.per_example[name]
        if own.shape != (len(weights), *value.shape):
            raise ValueError(
                f"diagnose: the per-example gradient of {name} must have the shape "
                f"{(len(weights), *value.shape)}, of as many examples as there are weights, got "
                f"{own.shape}. Stack the examples' gradients along a first axis."
            )
        if not np.isfinite(value).all():
            raise ValueError(
                f"diagnose: the gradient must be finite, got NaN or infinity at {name}. Look for a "
                "mean over no examples, or a loss of NaN at weight 0."
            )
        if not np.isfinite(np.asarray(own)[weights > 0]).all():
            raise ValueError(
                "diagnose: per-example gradients must be finite where there is weight, got NaN or "
                f"infinity at {name}. Look for an example whose loss is not finite."
            )
    lengths = {len(step.rank), len(step.microbatch), len(weights)}
    good = np.isfinite(weights).all() and (weights >= 0).all() and weights.any()
    numbers = (step.rank, step.microbatch)
    whole = all(each.dtype.kind in "iu" and (each >= 0).all() for each in numbers)
    if len(lengths) > 1 or not good or not whole:
        raise ValueError(
            "diagnose: weights must be finite, at least 0, and not all 0, each with a rank and a "
            f"microbatch of its own, got {len(weights)} weights for {len(step.rank)} examples. "
            "A step without weight shows nothing."
        )
