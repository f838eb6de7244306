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
from jax_ddp_weighting.testing.conventions import EMPTY_STEP, deviation, probes
from jax_ddp_weighting.testing.diagnosis import (
    NEAR,
    Diagnosis,
    diagnose_counts,
    diagnose_weights,
    unknown,
)
from jax_ddp_weighting.testing.per_example import effective_weights, per_example_gradients

_RTOL = 1e-5  # float32 rounds to some 1e-7 here; the conventions lie 1e-3 and more apart

GradientOf = Callable[[Callable[[Array, Array], Array], Array, Array, Array], Any]
"""`gradient_of(token_loss, params, tokens, weights)`: a reduction on trial."""


def diagnose(
    gradient_of: GradientOf, *, num_replicas: int, microbatches: int = 1, rtol: float = _RTOL
) -> Diagnosis:
    """The convention by which a reduction counts tokens: runs it on uneven probes and names it.

    The rule: every token of a probe has a parameter of its own, so that one gradient shows what
    each token counted. The probes hold padding, empty microbatches, an empty rank, fractional
    weights, less weight than 1 altogether, and none at all; a name is given only if it explains all
    of them, and a right one only if the gradient is finite on all of them. Two more probes have
    steep and gentle losses, to find counts that depend on the data, and steps that take another
    loss than the one they are given. What has no name then is called once more as before, to find
    steps that are noisy or keep a state.

    Args:
        gradient_of: `gradient_of(token_loss, params, tokens, weights)` reduces as the code on trial
            does, and returns the gradient it would apply, of the shape of `params`, as one rank
            holds it. `tokens` (integers) and `weights` (floats) are `[num_replicas, microbatches,
            tokens]`; `token_loss(params, tokens)` returns one loss per token, for tokens of any
            shape, and is differentiable. It is called up to ten times, with the same shapes.
        num_replicas: how many ranks the tokens are laid out for.
        microbatches: how many microbatches each rank accumulates.
        rtol: how exactly counts must fit, relative to the largest; about 1e-2 for bfloat16. On the
            probes conventions lie .05 and more apart.

    Returns:
        A `Diagnosis`. Its name is the plainest true one: with one rank or one microbatch several
        coincide, and its `alternatives` list them. A mixture, and counts that depend on the data,
        are `unknown`, and the counts are shown.

    Raises:
        ValueError: the numbers are below 1, `rtol` is not in `[0, 1)`, or `gradient_of` returns no
            gradient of `params`.

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
    check_rtol("diagnose: rtol", rtol)
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
    notes = ()
    seen = {}
    for label, each in laid_out.items():
        try:
            seen[label] = each, counts(label, each, _loss, losses)
        except Exception as error:  # whatever it is, it is the code's own refusal of no weight
            if label != EMPTY_STEP:
                raise
            notes = (f"it raises {type(error).__name__} where {label}.",)
    found = diagnose_counts(seen, rtol=rtol)
    found = replace(found, notes=(*found.notes, *notes))
    label, (weights, counted) = next(iter(seen.items()))

    def is_unsteady() -> bool:
        return not deviation(counts(label, weights, _loss, losses), counted) <= rtol

    if not counted.any() or not np.isfinite(counted).all():
        return found
    if found.convention == "unknown" and is_unsteady():
        return _say_unsteady(shown=label, weights=weights, counted=counted)
    # Twice, as both sides are rounded; and what nearly has a name is as noisy as it is far from it.
    allowed = 2 * rtol if found.convention != "unknown" else 2 * max(rtol, NEAR)

    def counts_of_kind(kind: str) -> tuple[bool, bool, dict[str, Any]]:
        """Whether counts go with the losses' slopes, whether they are as ever, and their table."""
        where = f"{label} and losses are {kind}"
        loss, slopes_of = _KINDS[kind]
        again = counts(where, weights, loss, 4 - losses)
        own = again / slopes_of(tokens)
        table = {"shown": where, "weights": weights, "counted": own}
        return deviation(own, counted) <= allowed, deviation(again, counted) <= allowed, table

    steep, gentle = counts_of_kind("steep"), counts_of_kind("gentle")
    if steep[0] and gentle[0]:
        return found
    if found.convention != "unknown" and is_unsteady():
        return _say_unsteady(shown=label, weights=weights, counted=counted)
    # The same gradient of every loss: it never took the loss, or clipped it wherever it was seen.
    if steep[1] and gentle[1] and counts_of_kind("faint")[1]:
        if found.convention == "unknown":
            return found  # it ignores its batch, or has a gradient of its own, as has been said
        return unknown(
            "the same gradient whatever token_loss is: it ignores the loss that it is given",
            advice="Call token_loss(params, tokens) where your code computes its losses, and take "
            "the gradient through it: what was seen is not your code's own.",
            notes=(*found.notes, f"that gradient is {found.words}."),
        )
    return unknown(
        "counts that depend on the losses",
        advice="Look at the gradient before whatever depends on its size or on the losses: "
        "clipping, of the whole or of each example, loss scaling, weights made from losses, losses "
        "over several rows.",
        notes=(*found.notes, f"with losses of slope 1 it takes {found.words}."),
        **(gentle if steep[0] else steep)[2],
    )


def _say_unsteady(**table: Any) -> Diagnosis:
    return unknown(
        "another gradient each time it is called with the same input: it is noisy or keeps a state",
        advice="Take the noise out (a fixed key, no dropout) and give every call a state of its "
        "own; or, if the noise is small, allow it with rtol=.",
        **table,
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
            return _say_unsteady()
        raise
    found = replace(diagnose_weights(counted, laid_out, rtol=rtol), shown="the batch is yours")
    if found.convention == "unknown" and is_unsteady():
        return _say_unsteady(shown=found.shown, weights=laid_out, counted=counted)
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


def _loss(params: Array, tokens: Array) -> Array:
    # No indexing, which explicitly sharded meshes refuse; exact, since one_hot is of 0 and 1.
    return jnp.dot(
        jax.nn.one_hot(tokens, params.size, dtype=params.dtype), params, precision="highest"
    )


def _steep_slopes(tokens: Any) -> Any:
    # Steep enough for any common clip, of four sizes, and exact in every dtype down to bfloat16.
    return 16 + 32 * (tokens % 4)


def _gentle_slopes(tokens: Any) -> Any:
    # Below 1, for clips at 1; not far below, as steps that return parameters round them off.
    return (4 + tokens % 4) / 8


def _faint_slopes(tokens: Any) -> Any:
    return _gentle_slopes(tokens) / 2**10


def _steep_loss(params: Array, tokens: Array) -> Array:
    return _loss(params, tokens) * _steep_slopes(tokens).astype(params.dtype)


def _gentle_loss(params: Array, tokens: Array) -> Array:
    return _loss(params, tokens) * _gentle_slopes(tokens).astype(params.dtype)


def _faint_loss(params: Array, tokens: Array) -> Array:
    return _loss(params, tokens) * _faint_slopes(tokens).astype(params.dtype)


# Functions of their own, rather than closures, so that code on trial may compile by token_loss.
_KINDS = {
    "steep": (_steep_loss, _steep_slopes),
    "gentle": (_gentle_loss, _gentle_slopes),
    "faint": (_faint_loss, _faint_slopes),
}


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
