"""An unknown reduction's convention, named: which tokens its gradient counted, and by how much.

A gradient is linear in what each token counts. So a loss in which every token has a parameter of
its own reads all the counts off one gradient.
"""

import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jax_ddp_weighting._arguments import (
    check_callable,
    check_microbatches,
    check_num_replicas,
    check_rtol,
)
from jax_ddp_weighting.testing.conventions import (
    EMPTY_STEP,
    WEIGHTS,
    Match,
    Seen,
    deviation,
    find_factor,
    matches,
    probes,
)
from jax_ddp_weighting.testing.diagnosis import (
    NEAR,
    Diagnosis,
    diagnose_counts,
    put_in_words,
    unknown,
)
from jax_ddp_weighting.testing.remedies import advise

_RTOL = 1e-5  # float32 rounds to some 1e-7 here; the conventions lie 1e-3 and more apart

GradientOf = Callable[[Callable[[Array, Array], Array], Array, Array, Array], Any]
"""`gradient_of(token_loss, params, tokens, weights)`: a reduction on trial."""


def diagnose(
    gradient_of: GradientOf,
    *,
    num_replicas: int,
    microbatches: int = 1,
    weights: str = "any",
    rtol: float = _RTOL,
) -> Diagnosis:
    """The convention by which a reduction counts tokens: runs it on uneven probes and names it.

    The rule: every token of a probe has a parameter of its own, so that one gradient shows what
    each token counted. The probes hold padding, empty microbatches, an empty rank, fractional
    weights, less weight than 1 altogether, and none at all; a name is given only if it explains all
    of them, and a right one only if the gradient is finite on all of them. Two more probes have
    steep and gentle losses, to find counts that depend on the data, and steps that take another
    loss than the one they are given. What has no name then is called once more as before, to find
    steps that are noisy or keep a state. Where equal numbers of ranks and microbatches leave a
    factor with two reasons, other numbers are tried, as far as the code takes them.

    Args:
        gradient_of: `gradient_of(token_loss, params, tokens, weights)` reduces as the code on trial
            does, and returns the gradient it would apply, of the shape of `params`, as one rank
            holds it. `tokens` (integers) and `weights` (floats) are `[num_replicas, microbatches,
            tokens]`; `token_loss(params, tokens)` returns one loss per token, for tokens of any
            shape, and is differentiable. It is called up to ten times with the same shapes, and up
            to twice with one microbatch or rank more, which it may refuse.
        num_replicas: how many ranks the tokens are laid out for.
        microbatches: how many microbatches each rank accumulates.
        weights: what weights the probes hold: `"any"`, or `"binary"` for 0 and 1 alone, for code
            that takes masks: it says what such code does with masks.
        rtol: how exactly counts must fit, relative to the largest; about 1e-2 for bfloat16. On the
            probes conventions lie .05 and more apart, .03 where they are masks.

    Returns:
        A `Diagnosis`. Its name is the plainest true one: with one rank or one microbatch several
        coincide, and its `alternatives` list them, beside a right one those that more ranks could
        show. A mixture, and counts that depend on the data,
        are `unknown`, and the counts are shown.

    Raises:
        ValueError: the numbers are below 1, `weights` is unknown, `rtol` is not in `[0, 1)`, or
            `gradient_of` returns no gradient of `params`.
        TypeError: `gradient_of` reduces torch's tensors, for which there is `diagnose_torch`.

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
        Fix: Divide by the weight summed over all ranks (psum), not by the rank's own, ...
        Note: the gradient is not finite where a whole rank or microbatch is empty.
    """
    remedy = "It takes (token_loss, params, tokens, weights) and returns the gradient of params."
    check_callable("diagnose: gradient_of", gradient_of, remedy)
    num_replicas = check_num_replicas("diagnose: num_replicas", num_replicas)
    microbatches = check_microbatches("diagnose: microbatches", microbatches)
    check_rtol("diagnose: rtol", rtol)
    if weights not in WEIGHTS:
        raise ValueError(
            f"diagnose: weights must be one of {', '.join(WEIGHTS)}, got {weights!r}. 'any' is the "
            "default; 'binary' probes with masks alone."
        )
    laid_out = probes(num_replicas, microbatches, weights)
    notes = ()
    seen = {}
    for label, each in laid_out.items():
        try:
            seen[label] = each, _count(gradient_of, label, each)
        except Exception as error:  # whatever it is, it is the code's own refusal of no weight
            if label != EMPTY_STEP:
                raise
            notes = (f"it raises {type(error).__name__} where {label}.",)
    found = diagnose_counts(seen, rtol=rtol)
    found = replace(found, notes=(*found.notes, *notes))
    label, (given, counted) = next(iter(seen.items()))
    table = {"shown": label, "weights": given, "counted": counted}

    def is_unsteady() -> bool:
        return not deviation(_count(gradient_of, label, given), counted) <= rtol

    if not counted.any() or not np.isfinite(counted).all():
        return found
    if found.convention == "unknown" and is_unsteady():
        return say_unsteady(**table)
    # Twice, as both sides are rounded; and what nearly has a name is as noisy as it is far from it.
    allowed = 2 * rtol if found.convention != "unknown" else 2 * max(rtol, NEAR)

    def counts_of_kind(kind: str) -> tuple[bool, bool, dict[str, Any]]:
        """Whether counts go with the losses' slopes, whether they are as ever, and their table."""
        where = f"{label} and losses are {kind}"
        loss, slopes_of = _KINDS[kind]
        again = _count(gradient_of, where, given, loss)
        own = again / slopes_of(_number_tokens(given))
        table = {"shown": where, "weights": given, "counted": own}
        return deviation(own, counted) <= allowed, deviation(again, counted) <= allowed, table

    steep, gentle = counts_of_kind("steep"), counts_of_kind("gentle")
    if steep[0] and gentle[0]:
        return _tell_factors_apart(gradient_of, found, seen, rtol)
    if found.convention != "unknown" and is_unsteady():
        return say_unsteady(**table)
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


def _count(
    gradient_of: GradientOf, label: str, weights: np.ndarray, token_loss: Any = None
) -> np.ndarray:
    """What each token of these weights counted."""
    tokens = _number_tokens(weights)
    # Not 0, where a loss scale or a clip would do nothing, nor all alike.
    losses = 1 + tokens % 5 / 4
    if token_loss is not None:
        losses = 4 - losses
    params = jnp.asarray(losses.reshape(-1), float)
    given = jnp.asarray(tokens), jnp.asarray(weights, params.dtype)
    try:
        gradient = gradient_of(token_loss or _loss, params, *given)
    except Exception as error:  # of any kind, since it goes on with a note
        error.add_note(f"diagnose: gradient_of failed on the probe where {label}.")
        if _comes_from_torch(error):
            raise TypeError(
                "diagnose: gradient_of must reduce arrays of JAX, got a reduction in torch, which "
                f"raised {type(error).__name__} on them. diagnose_torch gives it the same probes "
                "as tensors."
            ) from error
        raise
    return _check_gradient(gradient, params.shape).reshape(weights.shape)


def _number_tokens(weights: np.ndarray) -> np.ndarray:
    return np.arange(weights.size).reshape(weights.shape)


def _tell_factors_apart(
    gradient_of: GradientOf, found: Diagnosis, seen: Mapping[str, Seen], rtol: float
) -> Diagnosis:
    """The diagnosis, in which equal numbers of ranks and microbatches leave no name open.

    The rule: where one factor has several reasons, the code is tried with one microbatch more, and
    with one rank more, as far as it takes them. A reason counts as found only where the factor
    moves with its number: one that stays as it is may be written down in the code.
    """
    finite = [pair for pair in seen.values() if np.isfinite(pair[1]).all()]
    ranks, microbatches, _ = finite[0][0].shape
    fitting = matches(finite, rtol=rtol)
    reasons = [each for each in fitting if each.scheme is fitting[0].scheme]
    named = bool(reasons) and found.convention == reasons[0].convention
    if not named or len(reasons) == 1 or min(ranks, microbatches) == 1:
        return found
    for more in ((ranks, microbatches + 1), (ranks + 1, microbatches)):
        label, weights = next(iter(probes(*more).items()))
        try:
            counted = _count(gradient_of, label, weights)
        except Exception:  # whatever it is: not all code can be called with other numbers
            continue
        fit = [each for each in reasons if deviation(counted, each.counted(weights)) <= rtol]
        moved = [each for each in fit if find_factor(each.powers, *more) != each.factor]
        if moved:
            return _settle(found, moved[0], reasons)
        if any(each.powers == (0, 0) for each in fit):
            break  # right with other numbers too
    return found


# What JAX's arrays do not have and torch's tensors do.
_OF_TENSORS = ("backward", "requires_grad", "detach", "clone", "grad", "cpu", "float", "double")


def _comes_from_torch(error: Exception) -> bool:
    """Whether it was raised because torch was given arrays of JAX, or JAX torch's tensors."""
    if "torch" not in sys.modules:
        return False
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    modules = [str(frame.f_globals.get("__name__", "")) for frame in frames]
    if any(name.split(".")[0] == "torch" for name in modules):
        return True
    if isinstance(error, AttributeError):
        name = error.name or ""
        return isinstance(error.obj, jax.Array) and name.rstrip("_").startswith(_OF_TENSORS)
    return isinstance(error, TypeError) and "Tensor" in str(error)


def _settle(found: Diagnosis, reason: Match, reasons: Sequence[Match]) -> Diagnosis:
    """The diagnosis with one reason for its factor."""
    ruled_out = {each.convention for each in reasons} - {reason.convention}
    left = tuple(name for name in found.alternatives if name not in ruled_out)
    left = tuple(name for name in left if name != reason.convention)
    if reason.convention == "unknown":
        words = f"{put_in_words(reason)}, which is {reason.factor:.4g} with these numbers"
        return replace(
            unknown(words, notes=found.notes, alternatives=left),
            factor=reason.factor,
            shown=found.shown,
            weights=found.weights,
            counted=found.counted,
        )
    return replace(
        found,
        convention=reason.convention,
        advice=advise(reason, left),
        words=put_in_words(reason),
        alternatives=left,
    )


def say_unsteady(**table: Any) -> Diagnosis:
    """The diagnosis of code that does not give one gradient for one input."""
    return unknown(
        "another gradient each time it is called with the same input: it is noisy or keeps a state",
        advice="Take the noise out (a fixed key, no dropout) and give every call a state of its "
        "own; or, if the noise is small, allow it with rtol=.",
        **table,
    )


def _loss(params: Array, tokens: Array) -> Array:
    if any(type(each).__module__.split(".")[0] == "torch" for each in (params, tokens)):
        raise TypeError("token_loss takes arrays of JAX, got a Tensor of torch")
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
