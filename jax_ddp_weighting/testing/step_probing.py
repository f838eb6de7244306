"""A whole training step's convention, named: what each row of its own batch counted.

A gradient is linear in what each row counts, so that least squares finds the counts of a real model
on a real batch.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeGuard

import jax
import numpy as np
import optax
from jaxtyping import PyTree

from jax_ddp_weighting._arguments import check_at_least, check_callable, check_rtol, list_some
from jax_ddp_weighting.data.batch import Batch, check_batch
from jax_ddp_weighting.testing.conventions import deviation
from jax_ddp_weighting.testing.diagnosis import Diagnosis, diagnose_weights, unknown
from jax_ddp_weighting.testing.per_example import effective_weights
from jax_ddp_weighting.testing.probing import say_unsteady
from jax_ddp_weighting.testing.row_gradients import (
    differentiate_rows,
    find_in_training,
    find_solvable,
    flatten_rows,
)
from jax_ddp_weighting.testing.row_table import RowTable
from jax_ddp_weighting.testing.trials import prepare_trial
from jax_ddp_weighting.weighting.loss_terms import describe, is_number


def diagnose_step(
    step: Callable[..., Any],
    params: PyTree,
    batch: Batch,
    *,
    loss_of_example: Callable[..., Any],
    ranks: int | Sequence[int],
    microbatches: int | Sequence[int] = 1,
    calls: int = 1,
    learning_rate: float | None = None,
    optimizer: optax.GradientTransformation | None = None,
    rng: Any = None,
    keys: Any = None,
    rtol: float = 1e-3,
) -> Diagnosis:
    """The convention of a whole training step, run on its own model and batch.

    The rule: the step's gradient is solved for what each row counted (`effective_weights`), and the
    counts are named (`diagnose_weights`). The gradient is what the step hands to its optimizer. Of
    a state that holds its optimizer one is put in its place for the trial, which keeps what it is
    given and moves nothing, inside `optax.MultiSteps` and `weighted_multi_steps` too. A step that
    holds its own is run with it, and the update is undone, where SGD, momentum or Adam made it.

    Args:
        step: the training step. It is given copies, which it may donate; and it is called again if
            its counts have no name, to find steps that are noisy or keep a state. By `params` it is
            called as

            - `step(params, batch)`, and returns the parameters after one step of SGD at
              `learning_rate`, or with None the gradient itself, alone or first in a tuple;
            - `step(state, batch)`, and returns the train state, alone or in a tuple;
            - `step(params, opt_state, batch)` with `optimizer`, and returns both in a tuple;
            - `step(model, optimizer, batch)` of nnx, and updates both in place;
            - `step(model, batch)` of nnx, and updates the model in place by SGD at `learning_rate`,
              or returns the gradient.
        params: the parameters, a pytree; or a train state, with fields `params` and `opt_state` (of
            flax's the optimizer is put on trial); `(params, opt_state)`; an `nnx.Module`; or
            `(model, optimizer)` of nnx.
        batch: the rows of one step over all ranks. Unequal weights on ranks and microbatches tell
            most. Every row's gradient must be its own: fewer rows than parameters, no copies. (Rows
            of weight 0 may be copies of others, as padding is; what they count is then counted with
            those.)
        loss_of_example: `loss_of_example(params, example)` is the scalar loss of one row of
            `batch.data`, without weight and without leading axis; or the row's `WeightedSum`, such
            as `weighted_sum(losses, is_token)` of its tokens: the row then weighs `batch.weights`
            times the weight of that sum. For nnx it is given the model.
        ranks: the rank of each row; or how many ranks hold equal runs of rows, in order.
        microbatches: the microbatch of each row; or how many hold equal runs of a rank's rows.
        calls: how many calls of the step make one update. Each is given the rows of its own
            microbatches, in order, as a batch: of as many of them as divide by the calls; where
            `microbatches` is 1, of one each.
        learning_rate: the step's, if it is plain SGD; 1.0 loses least to rounding.
        optimizer: the optax optimizer that the step applies, to be undone; that inside of a window.
        rng: one key, handed to the step after the batch, the same at every call.
        keys: one key for each row, handed to `loss_of_example` after the example: those that the
            step draws with. Else leave dropout out, in the step and in the loss.
        rtol: how exactly counts must fit, relative to the largest.

    Returns:
        A `Diagnosis`, its table over the batch's own rows. Of a gradient that is not finite it is
        `unknown`, and its notes say what in the batch may be the cause.

    Raises:
        ValueError: rows cannot be dealt as told, their counts cannot be solved for, the update
            cannot be undone, the calls make no update or several, the step returns something else,
            or `rtol` is not in `[0, 1)`.
        TypeError: `batch` is no `Batch`, a function, number or optimizer is none, or a row's loss
            neither a scalar nor one `WeightedSum`.

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

        A step that takes a train state, donates it, and is given its own optimizer:

        >>> import optax
        >>> from flax.training.train_state import TrainState
        >>> def train_step(state, batch):
        ...     grads = {"w": mean_of_rank_means(state.params["w"], batch)}
        ...     return state.apply_gradients(grads=grads), {"first": grads["w"][0]}
        >>> params = {"w": jnp.ones(4)}
        >>> state = TrainState.create(apply_fn=None, params=params, tx=optax.adamw(1e-3))
        >>> found = diagnose_step(
        ...     jax.jit(train_step, donate_argnums=0),
        ...     state,
        ...     batch,
        ...     loss_of_example=lambda params, x: x @ params["w"],
        ...     ranks=2,
        ... )
        >>> found.convention
        'mean_of_means'
    """
    check_batch("diagnose_step: batch must be a Batch", batch)
    check_rtol("diagnose_step: rtol", rtol)
    _check_rate(learning_rate)
    check_at_least(
        "diagnose_step: calls", calls, 1, "1 is a step of one call.", kind="an integer, "
    )
    if _is_count(microbatches) and microbatches == 1:
        microbatches = calls
    weights = np.asarray(batch.weights, float)
    if weights.ndim != 1:
        raise ValueError(
            f"diagnose_step: batch must have one weight for each row, got shape {weights.shape}. "
            "What several examples in a row weigh is the weight of loss_of_example's WeightedSum."
        )
    if not weights.any():
        raise ValueError(
            f"diagnose_step: batch must have rows of weight above 0, got none of {len(weights)}. A"
            " step without weight shows nothing."
        )
    remedy = "It takes what it carries and a batch: step(params, batch), step(state, batch)."
    check_callable("diagnose_step: step", step, remedy)
    remedy = "It takes (params, example) and returns the loss of one row."
    check_callable("diagnose_step: loss_of_example", loss_of_example, remedy)
    _check_optimizer_and_keys(optimizer, keys, len(weights))
    rank, num_ranks = _assign_rows("ranks", ranks, np.zeros(len(weights), int))
    micro, num_micro = _assign_rows("microbatches", microbatches, rank)
    batches = _split_calls(batch, micro, num_micro, calls)
    table = RowTable.of(rank, micro, num_ranks, num_micro)
    own_params, wrt, gradient_of = prepare_trial(
        params, learning_rate=learning_rate, optimizer=optimizer
    )
    own, row_weights = differentiate_rows(loss_of_example, own_params, batch.data, keys, wrt)
    rest = () if rng is None else (rng,)
    weights = weights * row_weights
    laid_out, rows = table.lay_out(weights), find_solvable(own, weights)
    shown = jax.tree.map(lambda leaf: leaf[rows], own)

    def run() -> PyTree:
        leaves = gradient_of(step, batches, rest)
        structure = jax.tree.structure(own)
        if len(leaves) != structure.num_leaves:
            raise ValueError(
                "diagnose_step: step must have one gradient for each parameter that "
                f"loss_of_example has, got {len(leaves)} for {structure.num_leaves}. Parameters "
                "that are frozen are left out of both."
            )
        return jax.tree.unflatten(structure, leaves)

    gradient = run()
    # before all else: nothing can be solved for, and NaN is not equal to itself
    if not all(np.isfinite(np.asarray(leaf)).all() for leaf in jax.tree.leaves(gradient)):
        return _say_not_finite(own, weights, laid_out)

    def is_unsteady() -> bool:
        one, two = (_flatten(each) for each in (gradient, run()))
        return not deviation(two, one) <= rtol

    try:
        solved = effective_weights(gradient, shown, rtol=rtol)
    except ValueError as error:  # no such sum: what explains it better than the error would
        if is_unsteady():
            return say_unsteady()
        in_training = find_in_training(own_params)
        if in_training:
            raise ValueError(
                "diagnose_step: loss_of_example must take each row by itself, got "
                f"{list_some(in_training)}, in training, by which rows depend on each other or on "
                "what is drawn for them. Call eval() of the model for this trial, and use it so in "
                "the step too."
            ) from error
        raise
    counted = table.lay_out(solved, rows)
    found = replace(diagnose_weights(counted, laid_out, rtol=rtol), shown="the batch is yours")
    if found.convention == "unknown" and is_unsteady():
        return say_unsteady(shown=found.shown, weights=laid_out, counted=counted)
    return found


def _split_calls(batch: Batch, microbatch: np.ndarray, number: int, calls: int) -> list[Batch]:
    """The rows that each of some calls of a step is given: as many microbatches of each rank."""
    if number % calls:
        raise ValueError(
            f"diagnose_step: calls must divide the {number} microbatches, got {calls}. Each "
            "call is given as many of them."
        )
    if calls == 1:
        return [batch]
    call_of = microbatch // (number // calls)
    rows = [np.flatnonzero(call_of == call) for call in range(calls)]
    return [jax.tree.map(lambda leaf, own=own: leaf[own], batch) for own in rows]


def _say_not_finite(own: PyTree, weights: np.ndarray, laid_out: np.ndarray) -> Diagnosis:
    """The diagnosis of a gradient of NaN or infinity, with whatever in the batch may be its cause.

    Args:
        own: each row's gradient, `[rows, ...]`.
        weights: the rows' weights.
        laid_out: the same, `[ranks, microbatches, rows]`.
    """
    broken = ~np.isfinite(flatten_rows(own, len(weights))).all(axis=1)
    kinds = [
        (broken & (weights > 0), "of weight above 0", ""),
        (broken & (weights == 0), "of weight 0", ": 0 times NaN is NaN"),
    ]
    notes = []
    for rows, kind, why in kinds:
        found = np.flatnonzero(rows)
        if found.size:
            named, has = ("row", "has") if found.size == 1 else ("rows", "have")
            notes.append(
                f"{named} {list_some(found)}, {kind}, {has} a gradient of NaN or infinity{why}."
            )
    held = laid_out.sum(axis=2)
    empty = [f"rank {r}" for r in np.flatnonzero(~held.any(axis=1))]
    empty += [f"microbatch {k} of rank {r}" for r, k in np.argwhere(held == 0) if held[r].any()]
    if empty:
        notes.append(f"{list_some(empty)} {'holds' if len(empty) == 1 else 'hold'} no weight.")
    return unknown(
        "a gradient that is not finite",
        advice="Look for a mean over no examples, or a loss of NaN at weight 0: guard each division"
        " against a weight of exactly 0, as WeightedSum.mean does, and select with jnp.where, "
        "before the gradient is taken.",
        notes=tuple(notes),
    )


def _flatten(tree: PyTree) -> np.ndarray:
    return np.concatenate([np.ravel(np.asarray(leaf, float)) for leaf in jax.tree.leaves(tree)])


def _check_rate(learning_rate: Any) -> None:
    if learning_rate is None:
        return
    is_bool = isinstance(learning_rate, bool)
    if is_bool or not is_number(learning_rate, real=True) or np.shape(learning_rate) != ():
        raise TypeError(
            f"diagnose_step: learning_rate must be a number, got {describe(learning_rate)}. Of a "
            "schedule give the rate of this step."
        )
    if not (np.isfinite(learning_rate) and learning_rate):
        raise ValueError(
            f"diagnose_step: learning_rate must be finite and not 0, got {learning_rate}. It is "
            "the step's own; leave it out where the step returns its gradient."
        )


def _check_optimizer_and_keys(optimizer: Any, keys: Any, rows: int) -> None:
    is_one = hasattr(optimizer, "init") and hasattr(optimizer, "update")
    if optimizer is not None and not is_one:
        raise TypeError(
            "diagnose_step: optimizer must be an optax transformation, got "
            f"{type(optimizer).__name__}. Give, for instance, optax.adamw(1e-3)."
        )
    shapes = [np.shape(leaf) for leaf in jax.tree.leaves(keys)]
    if any(shape[:1] != (rows,) for shape in shapes):
        raise ValueError(
            f"diagnose_step: keys must be one for each of {rows} rows, got shapes {shapes}. Those "
            f"that the step draws with, such as jax.random.split(rng, {rows})."
        )


def _is_count(given: Any) -> TypeGuard[int]:
    return isinstance(given, int | np.integer) and not isinstance(given, bool)


def _assign_rows(
    name: str, given: int | Sequence[int], within: np.ndarray
) -> tuple[np.ndarray, int]:
    """Each row's number, and how many numbers there are: as given, or equal runs of a group."""
    if _is_count(given):
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
    try:
        numbers = np.asarray(given)
    except ValueError:  # rows of unequal length
        numbers = np.array(given, object)
    if numbers.ndim == 0:
        raise TypeError(
            f"diagnose_step: {name} must be an integer of at least 1, or one for each row, got "
            f"{given!r} ({type(given).__name__}). Give how many hold equal runs of rows."
        )
    if numbers.shape != within.shape or numbers.dtype.kind not in "iu" or numbers.min() < 0:
        raise ValueError(
            f"diagnose_step: {name} must be one integer of at least 0 per row, got "
            f"{numbers.tolist()} for {len(within)} rows. Count from zero."
        )
    return numbers, int(numbers.max()) + 1
