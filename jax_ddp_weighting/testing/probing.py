"""An unknown step's convention, named: which examples its gradient counted, and by how much.

A gradient is linear in what each example counts. So a loss in which every token has a parameter of
its own reads all the counts off one gradient (`diagnose`), and for a real model and batch least
squares does (`diagnose_step`).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from jax_ddp_weighting._arguments import check_microbatches, check_num_replicas, check_rtol
from jax_ddp_weighting.data.batch import Batch, check_batch
from jax_ddp_weighting.testing.conventions import deviation, probes
from jax_ddp_weighting.testing.diagnosis import (
    Diagnosis,
    diagnose_counts,
    diagnose_weights,
    unknown,
)
from jax_ddp_weighting.testing.per_example import effective_weights, per_example_gradients

_RTOL = 1e-5  # float32 rounds to some 1e-7 here; the conventions lie 1e-3 and more apart

GradientOf = Callable[[Callable[[Array, Array], Array], Array, Array, Array], Any]
"""`gradient_of(token_loss, params, tokens, weights)`: a reduction on trial."""


def diagnose(gradient_of: GradientOf, *, num_replicas: int, microbatches: int = 1) -> Diagnosis:
    """The convention by which a reduction counts tokens: runs it on uneven probes and names it.

    The rule: every token of a probe has a parameter of its own, so that one gradient shows what
    each token counted. The probes hold padding, empty microbatches, an empty rank, fractional
    weights, and less weight than 1 altogether; a name is given only if it explains all of them. A
    last probe has other losses, to find counts that depend on the data.

    Args:
        gradient_of: `gradient_of(token_loss, params, tokens, weights)` reduces as the code on trial
            does, and returns the gradient it would apply, of the shape of `params`, as one rank
            holds it. `tokens` (integers) and `weights` (floats) are `[num_replicas, microbatches,
            tokens]`; `token_loss(params, tokens)` returns one loss per token, for tokens of any
            shape, and is differentiable. It is called up to six times, always with the same shapes.
        num_replicas: how many ranks the tokens are laid out for.
        microbatches: how many microbatches each rank accumulates.

    Returns:
        A `Diagnosis`. Its name is the plainest true one: with one rank or one microbatch several
        coincide, and its `alternatives` list them. A mixture, and counts that depend on the data,
        are `unknown`, and the counts are shown.

    Raises:
        ValueError: the numbers are below 1, or `gradient_of` returns no gradient of `params`.

    Example:
        >>> def gradient_of(token_loss, params, tokens, weights):
        ...     def local_mean(params, tokens, weights):
        ...         return (token_loss(params, tokens) * weights).sum() / weights.sum()
        ...
        ...     by_rank = [jax.grad(local_mean)(params, tokens[r], weights[r]) for r in range(2)]
        ...     return (by_rank[0] + by_rank[1]) / 2
        >>> print(diagnose(gradient_of, num_replicas=2, microbatches=2))
        rank_token_mean, factor 1: the step takes the mean of the ranks' own means.
        Each token counts this many times its right share, where every microbatch holds some weight:
                      microbatch 0      microbatch 1
        rank 0    0.889 (weight 3)  0.889 (weight 6)
        rank 1    1.143 (weight 2)  1.143 (weight 5)
        Fix: Divide by the weight summed over all ranks (psum), not by the rank's own: ...
        Note: the gradient is not finite where a whole rank or microbatch is empty.
    """
    num_replicas = check_num_replicas("diagnose: num_replicas", num_replicas)
    microbatches = check_microbatches("diagnose: microbatches", microbatches)
    laid_out = probes(num_replicas, microbatches)
    shape = next(iter(laid_out.values())).shape
    tokens = np.arange(np.prod(shape)).reshape(shape)

    def counts(label: str, weights: np.ndarray, token_loss: Any, losses: np.ndarray) -> np.ndarray:
        params = jnp.asarray(losses.reshape(-1), float)
        given = jnp.asarray(tokens), jnp.asarray(weights, params.dtype)
        try:
            gradient = gradient_of(token_loss, params, *given)
        except Exception as error:  # of any kind, since it goes on with a note
            error.add_note(f"diagnose: gradient_of failed on the probe where {label}.")
            raise
        return _check_gradient(gradient, params.shape).reshape(shape)

    # Not 0, where a loss scale or a clip would do nothing, nor all alike.
    losses = 1 + tokens % 5 / 4
    seen = {label: (each, counts(label, each, _loss, losses)) for label, each in laid_out.items()}
    found = diagnose_counts(seen, rtol=_RTOL)
    label, (weights, counted) = next(iter(seen.items()))
    label = f"{label} and losses are steep"
    again = counts(label, weights, _steep_loss, 4 - losses)
    slopes = _slopes(tokens)
    if not counted.any() or not np.isfinite(counted).all():
        return found
    if min(deviation(again / slopes, counted), deviation(again, counted)) <= _RTOL:
        return found  # in proportion to the slopes; or the same as ever, which `named` has said
    return unknown(
        "counts that depend on the losses",
        advice="Look at the gradient before whatever depends on its size or on the losses: "
        "clipping, loss scaling, weights made from losses, losses over several rows.",
        notes=(*found.notes, f"with losses of slope 1 it takes {found.words}."),
        shown=label,
        weights=weights,
        counted=again / slopes,
    )


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
            or, with `learning_rate=None`, the gradient itself. The same structure as `params`.
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
    result = step(params, batch)
    if learning_rate is not None:
        result = jax.tree.map(
            lambda before, after: (np.asarray(before, float) - np.asarray(after)) / learning_rate,
            params,
            result,
        )
    solved = effective_weights(result, own, rtol=rtol)
    shape = (num_ranks, num_micro, int(place.max()) + 1)
    laid_out, counted = np.zeros(shape), np.zeros(shape)
    laid_out[rank, micro, place] = weights
    counted[rank, micro, place] = solved
    return replace(diagnose_weights(counted, laid_out, rtol=rtol), shown="the batch is yours")


def _loss(params: Array, tokens: Array) -> Array:
    # No indexing, which explicitly sharded meshes refuse; exact, since one_hot is of 0 and 1.
    return jnp.dot(
        jax.nn.one_hot(tokens, params.size, dtype=params.dtype), params, precision="highest"
    )


def _steep_loss(params: Array, tokens: Array) -> Array:
    return _loss(params, tokens) * _slopes(tokens).astype(params.dtype)


def _slopes(tokens: Any) -> Any:
    # Steep enough for any common clip, of four sizes, and exact in every dtype down to bfloat16.
    return 16 + 32 * (tokens % 4)


def _check_gradient(gradient: Any, shape: tuple[int, ...]) -> np.ndarray:
    leaves = jax.tree.leaves(gradient)
    shapes = [np.shape(leaf) for leaf in leaves]
    if shapes != [shape]:
        raise ValueError(
            f"diagnose: gradient_of must return the gradient of params, of shape {shape}, got "
            f"{type(gradient).__name__} of shapes {shapes}. Return what the code would apply, as "
            "one rank holds it, without the loss."
        )
    return np.asarray(leaves[0], float)


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
