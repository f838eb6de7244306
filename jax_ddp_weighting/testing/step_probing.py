"""A whole training step's convention, named: what each row of its own batch counted.

A gradient is linear in what each row counts, so that least squares finds the counts of a real model
on a real batch.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from jax_ddp_weighting._arguments import check_rtol
from jax_ddp_weighting.data.batch import Batch, check_batch
from jax_ddp_weighting.testing.conventions import deviation
from jax_ddp_weighting.testing.diagnosis import Diagnosis, diagnose_weights
from jax_ddp_weighting.testing.per_example import effective_weights, per_example_gradients
from jax_ddp_weighting.testing.probing import say_unsteady


def diagnose_step(
    step: Callable[[Any, Any], Any],
    params: PyTree,
    batch: Batch,
    *,
    loss_of_example: Callable[[Any, Any], Any],
    ranks: int | Sequence[int],
    microbatches: int | Sequence[int] = 1,
    learning_rate: float | None = None,
    rtol: float = 1e-3,
) -> Diagnosis:
    """The convention of a whole training step, run on its own model and batch.

    The rule: the step's gradient is solved for what each row counted (`effective_weights`), and the
    counts are named (`diagnose_weights`). Nothing is assumed of the step but that it is plain SGD,
    or hands its gradient out.

    Args:
        step: `step(params, batch)` returns the parameters after one step of SGD at `learning_rate`;
            or, with `learning_rate=None`, the gradient itself. The same structure as `params`, or a
            tuple that begins with it. It is given copies, which it may donate; and it is called
            again if its counts have no name, to find steps that are noisy or keep a state.
        params: the parameters, a pytree.
        batch: the rows of one step over all ranks. Unequal weights on ranks and microbatches tell
            most. Every row's gradient must be its own: fewer rows than parameters, no copies.
        loss_of_example: `loss_of_example(params, example)` is the scalar loss of one row of
            `batch.data`, without weight and without leading axis.
        ranks: the rank of each row; or how many ranks hold equal runs of rows, in order.
        microbatches: the microbatch of each row; or how many hold equal runs of a rank's rows.
        learning_rate: the step's; 1.0 loses least to rounding.
        rtol: how exactly counts must fit, relative to the largest.

    Returns:
        A `Diagnosis`, its table over the batch's own rows.

    Raises:
        ValueError: rows cannot be dealt as told, their counts cannot be solved for, or `rtol` is
            not in `[0, 1)`.
        TypeError: `batch` is no `Batch`.

    Example:
        >>> x = np.array([[1.0, 0, 0, 0], [0, 1, 0, 1], [0, 0, 1, 2], [1, 1, 1, 0]])
        >>> batch = Batch.of(x, weights=np.array([1, 1, 1, 0]))
        >>> def mean_of_rank_means(w, batch):  # two rows on each of two ranks
        ...     def loss(w, x, weights):
        ...         return jnp.sum((x @ w) * weights) / weights.sum()
        ...     first = jax.grad(loss)(w, batch.data[:2], batch.weights[:2])
        ...     return (first + jax.grad(loss)(w, batch.data[2:], batch.weights[2:])) / 2
        >>> found = diagnose_step(
        ...     mean_of_rank_means, jnp.ones(4), batch, loss_of_example=lambda w, x: x @ w, ranks=2
        ... )
        >>> found.convention, found.counted.sum(axis=-1).round(2).tolist()
        ('mean_of_means', [[0.5], [0.5]])
    """
    check_batch("diagnose_step: batch must be a Batch", batch)
    check_rtol("diagnose_step: rtol", rtol)
    if learning_rate is not None and not (np.isfinite(learning_rate) and learning_rate):
        raise ValueError(
            f"diagnose_step: learning_rate must be finite and not 0, got {learning_rate}. It is "
            "the step's own; leave it out where the step returns its gradient."
        )
    weights = np.asarray(batch.weights, float)
    rank, num_ranks = _assign_rows("ranks", ranks, np.zeros(len(weights), int))
    micro, num_micro = _assign_rows("microbatches", microbatches, rank)
    part = rank * num_micro + micro
    order = np.argsort(part, kind="stable")
    place = np.empty_like(part)
    place[order] = np.arange(len(part)) - np.searchsorted(part[order], part[order])

    own = per_example_gradients(loss_of_example, params, batch.data)
    shape = (num_ranks, num_micro, int(place.max()) + 1)
    laid_out, counted = np.zeros(shape), np.zeros(shape)
    laid_out[rank, micro, place] = weights
    gradient = _gradient_of_step(step, params, batch, learning_rate)

    def is_unsteady() -> bool:
        again = _gradient_of_step(step, params, batch, learning_rate)
        one, two = (_flatten(each) for each in (gradient, again))
        return not deviation(two, one) <= rtol

    try:
        counted[rank, micro, place] = effective_weights(gradient, own, rtol=rtol)
    except ValueError:  # no such sum: which noise explains better than what the error would say
        if is_unsteady():
            return say_unsteady()
        raise
    found = replace(diagnose_weights(counted, laid_out, rtol=rtol), shown="the batch is yours")
    if found.convention == "unknown" and is_unsteady():
        return say_unsteady(shown=found.shown, weights=laid_out, counted=counted)
    return found


def _gradient_of_step(
    step: Callable[[Any, Any], Any], params: PyTree, batch: Batch, learning_rate: float | None
) -> PyTree:
    """The gradient that a step applied to copies of its own, which it may donate."""

    def copy(leaf: Any) -> Any:
        return jnp.copy(leaf) if isinstance(leaf, jax.Array) else np.copy(leaf)

    result = step(jax.tree.map(copy, params), jax.tree.map(copy, batch))
    structure = jax.tree.structure(params)
    if jax.tree.structure(result) != structure and isinstance(result, tuple) and result:
        result = result[0]  # (parameters, metrics), as most steps return it
    if jax.tree.structure(result) != structure:
        raise ValueError(
            "diagnose_step: step must return the parameters, or the gradient where there is no "
            f"learning_rate, in the structure of params, got {jax.tree.structure(result)} for "
            f"{structure}. Return them alone, or first in a tuple: lambda params, batch: "
            "train_step(state_of(params), batch)[0].params."
        )
    if learning_rate is None:
        return result
    return jax.tree.map(
        lambda before, after: (
            (np.asarray(before, float) - np.asarray(after, float)) / learning_rate
        ),
        params,
        result,
    )


def _flatten(tree: PyTree) -> np.ndarray:
    return np.concatenate([np.ravel(np.asarray(leaf, float)) for leaf in jax.tree.leaves(tree)])


def _assign_rows(
    name: str, given: int | Sequence[int], within: np.ndarray
) -> tuple[np.ndarray, int]:
    """Each row's number, and how many numbers there are: as given, or equal runs of a group."""
    if not isinstance(given, int | np.integer):
        numbers = np.asarray(given)
        if numbers.shape != within.shape or numbers.dtype.kind not in "iu" or numbers.min() < 0:
            raise ValueError(
                f"diagnose_step: {name} must be one integer of at least 0 per row, got "
                f"{numbers.tolist()} for {len(within)} rows. Count from zero."
            )
        return numbers, int(numbers.max()) + 1
    sizes = np.bincount(within)
    if given < 1 or (sizes % given).any():
        raise ValueError(
            f"diagnose_step: {name} must divide the rows {sizes.tolist()} into equal runs, got "
            f"{given}. Give one number per row instead."
        )
    numbers = np.empty_like(within)
    for group, size in enumerate(sizes):
        numbers[within == group] = np.arange(size) * given // max(size, 1)
    return numbers, given
