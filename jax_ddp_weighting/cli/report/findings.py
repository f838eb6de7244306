"""A report on a plan and a convention: what was read, and how much each example counted."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh
from jaxtyping import Array, Float, Float64, Int64

from jax_ddp_weighting._arguments import check_integer
from jax_ddp_weighting.cli.epoch_audits import RANKS, AuditedEpoch, audit_epochs
from jax_ddp_weighting.cli.plan_summary import audit_as_dict, describe_plan
from jax_ddp_weighting.data.batch import Batch
from jax_ddp_weighting.distributed.mesh import over_ranks
from jax_ddp_weighting.sampling.plan import EpochPlan
from jax_ddp_weighting.sampling.slots import Slots
from jax_ddp_weighting.testing.conventions import CONVENTIONS, candidates
from jax_ddp_weighting.weighting.gradient import value_and_grad
from jax_ddp_weighting.weighting.sums import WeightedSum, weighted_sum

CHOICES = tuple(name for name in CONVENTIONS if name != "unknown")
COMPARED = ("mean_of_means", "mean_of_nonempty_means", "rank_token_mean", "step_token_mean")
OURS = "ours, measured"
_SLOTS = 20_000_000  # over all epochs: they are walked one step at a time
_STEP_SLOTS = 200_000  # of the step that is looked at closely
_MEASURED = 200_000_000  # numbers of 4 bytes: each rank's gradient holds every slot of that step
_WEIGHTS = (1e-30, 1e30)  # of examples: sums of many stay within float32


@dataclass(frozen=True)
class StepWeights:
    """How much each slot of one step counted, in units of one example's share.

    Attributes:
        step: the step of epoch 0.
        weights: `[ranks, microbatches, rows]`, what each slot weighs: what it should count.
        counted: the same layout: what it counts by the convention.
        ours: the same layout, as read off one gradient that the library made.
    """

    step: int
    weights: Float64[np.ndarray, "ranks microbatches rows"]
    counted: Float64[np.ndarray, "ranks microbatches rows"]
    ours: Float64[np.ndarray, "ranks microbatches rows"]


@dataclass(frozen=True)
class Findings:
    """Everything that a report shows.

    Attributes:
        plan: who reads what.
        audited: what each epoch covered.
        seen: `[num_examples]`, in how many accepted slots each id was over all epochs.
        accepted: `[ranks, steps]`, accepted rows of epoch 0.
        copies: `[ranks, steps]`, those of them whose id had been accepted before.
        convention: the convention that was chosen.
        looked_at: the last step of epoch 0, slot by slot.
        microbatches: the numbers of microbatches of `errors`.
        errors: by convention, the relative error of that step's gradient for each number of
            microbatches, for examples whose gradients are orthogonal and of one length.
    """

    plan: EpochPlan
    audited: list[AuditedEpoch]
    seen: Int64[np.ndarray, " num_examples"]
    accepted: Int64[np.ndarray, "ranks steps"]
    copies: Int64[np.ndarray, "ranks steps"]
    convention: str
    looked_at: StepWeights
    microbatches: list[int]
    errors: dict[str, list[float]]

    @property
    def exactly_once(self) -> bool:
        """Whether every epoch counted every id exactly once."""
        return all(each.audit.exactly_once for each in self.audited)

    @property
    def times_seen(self) -> dict[int, int]:
        """How many ids were seen how often."""
        times, ids = np.unique(self.seen, return_counts=True)
        return dict(zip(times.tolist(), ids.tolist(), strict=True))

    def as_dict(self) -> dict[str, Any]:
        """The findings in types that JSON knows, without the maps of slots."""
        return {
            "exactly_once": self.exactly_once,
            "plan": describe_plan(self.plan),
            "epochs": [audit_as_dict(each.audit) for each in self.audited],
            "times_seen": {str(times): ids for times, ids in self.times_seen.items()},
            "convention": self.convention,
            "step": self.looked_at.step,
            "microbatches": self.microbatches,
            "errors": self.errors,
        }


def find(
    plan: EpochPlan,
    epochs: int,
    convention: str,
    *,
    microbatches: int = 1,
    example_weights: Float64[np.ndarray, " num_examples"] | None = None,
    advance: Callable[[int], object] = lambda slots: None,
) -> Findings:
    """What a report says of a plan, by walking it and by running the library's own gradient.

    Args:
        plan: who reads what.
        epochs: how many epochs to walk.
        convention: one of `CHOICES`, to be set beside the right weights.
        microbatches: microbatches of each rank in the step that is looked at.
        example_weights: what each example weighs, such as its number of tokens; 1 by default.
        advance: is told of slots as they are walked, for a progress bar.

    Returns:
        `Findings`.

    Raises:
        ValueError: the plan is too large for pictures, has no steps, or a choice is unknown.

    Example:
        >>> findings = find(EpochPlan(47, 3, 8, tail="repeat"), 2, "mean_of_means")
        >>> findings.times_seen, int(findings.copies.sum())
        ({2: 45, 3: 2}, 1)
    """
    _check_choices(plan, epochs, convention, microbatches, example_weights)
    audited = audit_epochs(plan, epochs, advance=advance)
    seen = np.zeros(plan.num_examples, np.int64)
    met = np.zeros(plan.num_examples, bool)
    accepted = np.zeros((plan.num_replicas, plan.steps_per_epoch), np.int64)
    copies = np.zeros_like(accepted)
    for epoch in range(epochs):
        for step in range(plan.steps_per_epoch):
            slots = plan.batch(epoch, step)
            counts = slots.weights > 0
            np.add.at(seen, slots.ids[counts], 1)
            if epoch == 0:
                accepted[:, step] = counts.sum(axis=1)
                copies[:, step] = _count_copies(slots.ids, counts, met)
            advance(slots.ids.size)
    last = plan.batch(0, plan.steps_per_epoch - 1)
    if not _lay_out(last, 1, example_weights).any():
        raise ValueError(
            "report: the last step of epoch 0 must weigh something, got example weights of 0 alone."
            " Give the examples that count a weight above 0."
        )
    numbers = sorted({1, microbatches, *(2**k for k in range(5) if 2**k <= plan.batch_size)})
    errors: dict[str, list[float]] = {}
    for number in numbers:
        weights = _lay_out(last, number, example_weights)
        right = weights / weights.sum()
        errors.setdefault(OURS, []).append(_relative_error(measure(weights), right))
        for name in dict.fromkeys((convention, *COMPARED)):
            errors.setdefault(name, []).append(_relative_error(count_by(name, weights), right))
    weights = _lay_out(last, microbatches, example_weights)
    looked_at = StepWeights(
        plan.steps_per_epoch - 1,
        weights,
        count_by(convention, weights) * weights.sum(),
        measure(weights) * weights.sum(),
    )
    return Findings(plan, audited, seen, accepted, copies, convention, looked_at, numbers, errors)


def count_by(
    convention: str, weights: Float64[np.ndarray, "ranks microbatches rows"]
) -> Float64[np.ndarray, "ranks microbatches rows"]:
    """What each slot counts by a convention, named as a diagnosis names it.

    Example:
        >>> weights = np.array([[[1.0, 0.0]], [[1.0, 1.0]]])
        >>> count_by("mean_of_means", weights).tolist()
        [[[0.5, 0.0]], [[0.25, 0.25]]]
    """
    ranks, microbatches, _ = weights.shape
    match = next(m for m in candidates(ranks, microbatches) if m.convention == convention)
    return match.factor * match.scheme.counted(weights)


def measure(
    weights: Float64[np.ndarray, "ranks microbatches rows"],
) -> Float64[np.ndarray, "ranks microbatches rows"]:
    """What each slot counts in the gradient that `value_and_grad` makes, read off it.

    Every slot has a parameter of its own, which is its loss: its gradient is what it counts.

    Example:
        >>> measure(np.array([[[1.0, 0.0]], [[1.0, 1.0]]])).round(6).tolist()
        [[[0.333333, 0.0]], [[0.333333, 0.333333]]]
    """
    ranks, microbatches, rows = weights.shape
    # row j of a rank belongs to microbatch j % microbatches
    flat = weights.swapaxes(1, 2).reshape(-1).astype(np.float32)
    counts = _differentiate(flat, ranks, microbatches)
    return np.asarray(counts, float).reshape(ranks, rows, microbatches).swapaxes(1, 2)


# compiled once for all steps of one shape, where a function made in `measure` would be each time
@partial(jax.jit, static_argnames=("ranks", "microbatches"))
def _differentiate(weights: Float[Array, " slots"], ranks: int, microbatches: int) -> Array:
    def loss_fn(params: Array, batch: Batch) -> WeightedSum:
        return weighted_sum(params[batch.data], batch.weights)

    gradient = value_and_grad(loss_fn, axis_name="data", microbatches=microbatches)
    mapped = over_ranks(gradient, AbstractMesh((ranks,), ("data",)), engine="vmap")
    slots = jnp.arange(weights.size)
    return mapped(jnp.zeros(weights.size), Batch.of(slots, weights=weights))[1]


def _relative_error(counted: np.ndarray, right: np.ndarray) -> float:
    return float(np.linalg.norm(counted - right) / np.linalg.norm(right))


def _lay_out(slots: Slots, microbatches: int, example_weights: np.ndarray | None) -> np.ndarray:
    """A step's weights as `[ranks, microbatches, rows]`, filled up where they do not divide."""
    weights = slots.weights.astype(float)
    if example_weights is not None:
        weights *= example_weights[slots.ids]
    ranks, width = weights.shape
    rows = -(-width // microbatches)
    weights = np.pad(weights, ((0, 0), (0, rows * microbatches - width)))
    return weights.reshape(ranks, rows, microbatches).swapaxes(1, 2)


def _count_copies(ids: np.ndarray, counts: np.ndarray, met: np.ndarray) -> np.ndarray:
    """Each rank's accepted rows of a step whose id was met before; those of the step are met then.

    Args:
        ids: `[ranks, rows]`.
        counts: of the same shape, whether a row is accepted.
        met: `[num_examples]`, whether an id was accepted before; written to.
    """
    copies = np.zeros(len(ids), np.int64)
    for column, here in zip(ids.T, counts.T, strict=True):  # as the epoch is ordered: row by row
        first = np.zeros(len(column), bool)
        first[np.unique(column, return_index=True)[1]] = True
        copies += here & (met[column] | ~first)
        met[column[here]] = True
    return copies


def _check_choices(
    plan: EpochPlan, epochs: int, convention: str, microbatches: int, example_weights: Any
) -> None:
    check_integer("report: epochs", epochs, 1, 10_000)
    remedy = "A microbatch has at least one row."
    check_integer("report: microbatches", microbatches, 1, plan.batch_size, remedy)
    if convention not in CHOICES:
        raise ValueError(
            f"report: convention must be one of {', '.join(CHOICES)}, got {convention!r}."
            " diagnose names that of your own code."
        )
    if not plan.steps_per_epoch:
        raise ValueError(
            f"report: the plan must have a step, got {plan.num_examples} examples for"
            f" {plan.num_replicas * plan.batch_size} rows under tail={plan.tail}. Take fewer rows,"
            " or tail=mask."
        )
    for what, number, most in (
        ("slots of all epochs", plan.num_samples * plan.num_replicas * epochs, _SLOTS),
        ("ranks of all epochs", plan.num_replicas * epochs, RANKS),
        ("slots of a step", plan.num_replicas * plan.batch_size, _STEP_SLOTS),
        ("ranks times slots of a step", plan.num_replicas**2 * plan.batch_size, _MEASURED),
    ):
        if number > most:
            raise ValueError(
                f"report: {what} must be at most {most:,} to be drawn, got {number:,}."
                " plan and audit tell of larger plans, without pictures."
            )
    if example_weights is None:
        return
    if len(example_weights) != plan.num_examples:
        raise ValueError(
            f"report: example weights must be one for each of the {plan.num_examples} examples, got"
            f" {len(example_weights)}. Write one number for each id, in the order of the ids."
        )
    low, high = _WEIGHTS
    held = (example_weights == 0) | ((example_weights >= low) & (example_weights <= high))
    wrong = np.flatnonzero(~held)
    if wrong.size:
        raise ValueError(
            f"report: example weights must be 0 or in [{low:g}, {high:g}], got"
            f" {example_weights[wrong[0]]:g} at row {wrong[0]}. Scale them, all by one factor: only"
            " their ratios count. An example that is not to count weighs 0."
        )


def sum_microbatches(looked_at: StepWeights) -> list[tuple[Any, ...]]:
    """Rank, microbatch, accepted rows, and what they should count, do count, and count with us."""
    sums = [each.sum(axis=2) for each in (looked_at.weights, looked_at.counted, looked_at.ours)]
    rows = (looked_at.weights > 0).sum(axis=2)
    return [
        (rank, k, int(rows[rank, k]), *(float(each[rank, k]) for each in sums))
        for rank, k in np.ndindex(*rows.shape)
    ]
