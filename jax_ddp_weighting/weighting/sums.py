"""Numerators and denominators, kept apart until the one division.

Whatever leaves an example out, or makes it count less, is a weight here: padding rows, ignored
labels, class weights, token weights, fractional weights.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from jax_ddp_weighting._arguments import check_integer
from jax_ddp_weighting.distributed import mesh
from jax_ddp_weighting.distributed.between_steps import in_one_program
from jax_ddp_weighting.distributed.mesh import AxisName
from jax_ddp_weighting.distributed.placement import check_not_cut, check_not_lost
from jax_ddp_weighting.weighting.counts import (
    DOES_NOT_FIT,
    LARGEST,
    add_checked,
    as_wide,
    check_width,
    is_bad,
    is_too_wide,
    psum_checked,
    sum_weights,
    to_weight,
    widened_dtype,
)
from jax_ddp_weighting.weighting.dtypes import widen


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["total", "weight", "beyond"],
    meta_fields=[],
    drop_fields=["counted_once"],
)
@dataclass(frozen=True)
class WeightedSum:
    """A numerator and a denominator that are kept apart until the one division.

    The rule: sums add, means do not. Add these over microbatches, sum them over ranks, and take the
    mean last. What is added is widened first, to float32 or int32 at least, so that narrow sums
    made by hand do not stop counting or wrap round.

    A weight is finite and at least 0. One that is not, or a sum of int32 that passes 2**31 - 1, is
    a bad weight: it stays negative or NaN in whatever it is added to, and its mean is NaN.

    Both may be arrays of one shape, such as one element a class or a bin, for `evaluate` and for
    sums of your own; a loss is a scalar. Everything here is elementwise: an element without weight
    has mean 0, and a bad weight spoils its own element alone. One scalar weight may stand for all
    elements of a total. The mean over the elements that are there, and no others, is
    `sum.mean()[sum.weight > 0].mean()`.

    Attributes:
        total: sum of weight times loss, a scalar or an array of at least float32.
        weight: sum of the weights, of the shape of `total` or a scalar; an integer when the weights
            were integers.
        beyond: what `total` and `weight` leave out, as a `WeightedSum` of floats: in what
            `value_and_grad` reports, an integer of 32 bits that cannot hold its sum is 2**31 - 1,
            and the rest is here. None in all other sums.

    Example:
        >>> first, second = WeightedSum(1.0, 1), WeightedSum(9.0, 3)
        >>> float((first + second).mean())  # the mean of the two means would be 2.0
        2.5

        Of three classes the last is absent:

        >>> found = WeightedSum(np.array([3, 1, 0]), np.array([4, 4, 0]))
        >>> found.mean().tolist(), float(found.mean()[found.weight > 0].mean())
        ([0.75, 0.25, 0.0], 0.5)
    """

    total: Any
    weight: Any
    beyond: Any = field(default=None, repr=False)  # None almost everywhere
    # A note of what `once` has made, in no pytree: lost in transformations, it decides nothing but
    # whether a loss function's term is refused a divisor.
    counted_once: bool = field(default=False, repr=False, compare=False, kw_only=True)

    def __add__(self, other: "WeightedSum") -> "WeightedSum":
        if not isinstance(other, WeightedSum):
            return NotImplemented
        totals, weights = (self.total, other.total), (self.weight, other.weight)
        for each in (self, other):
            check_shapes(each, caller="WeightedSum.__add__")
        for name, (one, more) in (("totals", totals), ("weights", weights)):
            if np.shape(one) != np.shape(more):
                raise ValueError(
                    f"WeightedSum.__add__: {name} must have one shape, got {np.shape(one)} and "
                    f"{np.shape(more)}. Sums of other classes or bins do not add."
                )
        if any(isinstance(each, jax.Array) for each in (*totals, *weights)):
            for each in (*totals, *weights):
                check_width(each)
            total, weight = in_one_program(add_checked, totals, weights)
        else:  # on the host: Python's numbers have no end, and numpy's are as wide as need be
            total, weight = _add_on_host(*totals), _add_host_weights(*weights)
        beyond = [each.beyond for each in (self, other) if each.beyond is not None]
        return WeightedSum(total, weight, sum(beyond) if beyond else None)

    def __radd__(self, other: Any) -> "WeightedSum":
        # sum() starts at the integer 0
        return self if isinstance(other, int) and other == 0 else NotImplemented

    def psum(self, axis_name: AxisName) -> "WeightedSum":
        """The sum over all ranks of a mapped axis, the same on every rank."""
        check_shapes(self, caller="WeightedSum.psum")
        total, weight = psum_checked(self.total, self.weight, axis_name)
        return WeightedSum(total, weight, self.beyond and self.beyond.psum(axis_name))

    def whole(self) -> "WeightedSum":
        """The same with nothing left `beyond`: as floats, if anything may be."""
        return in_one_program(_make_whole, _in_floats(self))

    def mean(self) -> Array:
        """`total / weight`; 0, with gradient 0, where the weight is 0. The weight gets none.

        NaN where the weight is negative, NaN or infinite. Elementwise, in the shape of `total`.
        """
        check_shapes(self, caller="WeightedSum.mean")
        return in_one_program(_find_mean, _in_floats(self))

    def once(self, value: Any) -> "WeightedSum":
        """A term that is counted once per step and divided by nothing, such as a regulariser.

        The rule: it weighs 1 wherever this sum has any weight, so that its mean over ranks and
        microbatches is `value` itself, and a step without accepted rows has no regulariser either.

        Args:
            value: a scalar that is the same on every rank, such as half the squared norm of the
                parameters (of shards: the `psum` of theirs). An array of the shape of `weight`, or
                any array beside a scalar weight, gives a sum of arrays.

        Returns:
            A `WeightedSum` of integer weight 1 or 0, in the shape of `weight`. It takes
            no divisor in `value_and_grad`, for its total is added up over ranks and microbatches:
            what scales it is its coefficient.

        Raises:
            ValueError: `value` has another shape than that.

        Example:
            >>> nll = WeightedSum(jnp.float32(6.0), jnp.int32(4))
            >>> penalty = nll.once(0.25) + nll.once(0.25)  # two microbatches
            >>> float(penalty.mean())
            0.25
        """
        present = jnp.asarray(self.weight) > 0
        if present.ndim and np.shape(value) not in ((), present.shape):
            raise ValueError(
                "WeightedSum.once: value must be a scalar or have the shape of weight, got "
                f"{np.shape(value)} and weight {present.shape}."
            )
        value, weight = jnp.where(present, value, 0.0), present.astype(jnp.int32)
        return WeightedSum(value, weight, counted_once=True)


def weighted_sum(
    losses: Array,
    weights: Array | None = None,
    *,
    axis: int | tuple[int, ...] | None = None,
) -> WeightedSum:
    """Sum of weight times loss, beside the sum of the weights.

    The rule: every kind of exclusion is a weight. Ignored labels, padding rows, class weights,
    token weights and fractional weights are all multiplied in here and never clamped to 1. For the
    mean over sequences of each one's own mean, packed ones too, give every token the weight one
    over the number of tokens of its sequence.

    Args:
        losses: any shape; one loss per row, token, or whatever is being weighed.
        weights: the shape of `losses`, each at least 0; every loss weighs 1 when None. Integer
            (or bool) weights are summed as integers, exactly, up to 2**31. No gradient flows into
            them.
        axis: the axis, or axes, to sum over; all of them when None. Those that are left make a sum
            of arrays, for `evaluate`: `axis=0` of `[rows, classes]` sums each class by itself.

    Returns:
        A `WeightedSum` of scalars, or of arrays of the axes that are left. The total is float32, or
        float64 for float64 losses; hits given as bools with integer weights are counted in
        integers. A loss of weight 0 cannot poison it,
        not even as NaN or infinity, and receives gradient 0. What made the NaN can still poison a
        gradient further up, since 0 times an infinite derivative is NaN: feed padding rows finite
        data, as `batches` does, or begin the loss function with
        `x = jnp.where(weights[:, None] > 0, x, 0)`.

    Raises:
        TypeError: `axis` is no integer and no tuple of them, or weights are complex.
        ValueError: `weights` has another shape than `losses`; `losses` has no such axis, or it is
            named twice; or JAX would cut a number that is on the host, such as an integer of more
            than 32 bits while x64 is off.

    Example:
        >>> losses = jnp.array([2.0, 4.0, jnp.nan])
        >>> float(weighted_sum(losses, jnp.array([0.25, 0.25, 0.0])).mean())
        3.0

        The mean of each class, where a class of three is absent; and what share of rows it has:

        >>> losses, classes = jnp.array([2.0, 4.0, 5.0]), jnp.array([0, 0, 2])
        >>> is_class = jax.nn.one_hot(classes, 3, dtype=jnp.int32)  # [rows, classes]
        >>> found = weighted_sum(jnp.repeat(losses[:, None], 3, axis=1), is_class, axis=0)
        >>> found.mean().tolist(), found.weight.tolist()
        ([3.0, 0.0, 5.0], [2, 0, 1])
        >>> [round(share, 2) for share in weighted_sum(is_class, axis=0).mean().tolist()]
        [0.67, 0.0, 0.33]
    """
    _check_on_host(losses, "losses", caller="weighted_sum")
    losses = jnp.asarray(losses)
    axes = _check_axis(axis, losses)
    if weights is None:
        return _count_all(losses, axes)
    _check_on_host(weights, "weights", caller="weighted_sum")
    weights = jnp.asarray(weights)
    if jnp.issubdtype(weights.dtype, jnp.complexfloating):
        raise TypeError(
            f"weighted_sum: weights must be real numbers, got {weights.dtype}. They say how much "
            "a loss counts."
        )
    if weights.shape != losses.shape:
        raise ValueError(
            f"weighted_sum: weights must have the shape of losses, got weights {weights.shape} and "
            f"losses {losses.shape}. Reduce the losses to one per example, or spell the weights "
            "out per token."
        )
    return WeightedSum(*_sum_weighted(losses, weights, axes))


@partial(jax.jit, static_argnames="axes", inline=True)
def _sum_weighted(losses: Array, weights: Array, axes: tuple[int, ...]) -> tuple[Array, Array]:
    """The total and the weight: one program, where thirty of an operation each were launched."""
    weights = lax.stop_gradient(weights)
    fractional = jnp.issubdtype(weights.dtype, jnp.inexact)
    # float32 at least: bfloat16 stops counting at 256
    wide = widened_dtype(weights)
    if losses.dtype == jnp.bool_ and not fractional:
        dtype = wide
    else:
        dtype = widen(jnp.float32, losses.dtype)
        dtype = widen(dtype, wide) if fractional else dtype
    weight, bad = sum_weights(weights, axes)
    # a bad weight is in no product either: 0 times the gradient of NaN would be NaN
    weights = jnp.where(is_bad(weights), 0, weights).astype(dtype)
    # a scalar 0: zeros made like the losses forget how they lie over Explicit axes
    kept = jnp.where(weights != 0, losses, jnp.zeros((), losses.dtype)).astype(dtype)
    return jnp.sum(kept * weights, axis=axes), to_weight(weight, bad, wide)


def _check_on_host(values: Any, name: str, *, caller: str) -> None:
    """Refuses numbers of numpy's or Python's that JAX would cut, or weights it would make 0."""
    on_host = np.ndarray | np.generic | int | float
    leaves = jax.tree.leaves(values) if isinstance(values, list | tuple) else [values]
    if all(isinstance(leaf, on_host) for leaf in leaves):
        array = np.asarray(values)
        check_not_cut(array, name, caller=caller)
        if name == "weights":
            check_not_lost(array, caller=caller)


def _count_all(losses: Array, axes: tuple[int, ...]) -> WeightedSum:
    """The sum of losses that weigh 1 each: how many they are is no sum, and known beforehand."""
    size = math.prod(losses.shape[i] for i in axes)
    counted = jnp.int32 if size <= LARGEST else jnp.float32
    dtype = counted if losses.dtype == jnp.bool_ else widen(jnp.float32, losses.dtype)
    total = jnp.sum(losses.astype(dtype), axis=axes)
    return WeightedSum(total, jnp.full(total.shape, size, counted))


def _check_axis(axis: int | tuple[int, ...] | None, losses: Array) -> tuple[int, ...]:
    """The axes to sum over, counted from the front."""
    if axis is None:
        return tuple(range(losses.ndim))
    axes = axis if isinstance(axis, tuple) else (axis,)
    found = []
    for each in axes:
        number = check_integer(
            "weighted_sum: axis",
            each,
            -losses.ndim,
            losses.ndim - 1,
            rule=f"be an axis of losses {losses.shape}, or a tuple of them",
        )
        found.append(number % losses.ndim)
    if len(set(found)) < len(found):
        raise ValueError(
            f"weighted_sum: axis must name each axis once, got {axis!r} for losses {losses.shape}."
        )
    return tuple(found)


def valid_labels(labels: Array, ignore_index: int = -100) -> tuple[Array, Array]:
    """Labels that are safe to index with, and the weights that leave out the ignored ones.

    The rule: the label is replaced before the loss sees it. An out-of-range label gives NaN in some
    losses and a finite wrong value in others, and a weight of 0 mends only the second.

    Args:
        labels: integers of any shape.
        ignore_index: the label that marks a position as not counting; -100 is torch's.

    Returns:
        `(labels, weights)`, both of the shape of `labels`: ignored labels replaced by 0, and int32
        weights, 0 where the label was ignored and 1 elsewhere.

    Raises:
        TypeError: `labels` are not integers, or `ignore_index` is none.
        ValueError: JAX would cut a label that is on the host.

    Example:
        >>> labels, weights = valid_labels(jnp.array([3, -100, 1]))
        >>> labels.tolist(), weights.tolist()
        ([3, 0, 1], [1, 0, 1])
    """
    _check_on_host(labels, "labels", caller="valid_labels")
    labels = jnp.asarray(labels)
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise TypeError(
            f"valid_labels: labels must be integers, got {labels.dtype}. One-hot or soft labels "
            "have no ignore_index: give their weights to weighted_sum directly."
        )
    check_integer(
        "valid_labels: ignore_index", ignore_index, -(2**63), 2**63 - 1, rule="be an integer"
    )
    held = jnp.iinfo(labels.dtype)
    if held.min <= ignore_index <= held.max:
        valid = labels != ignore_index
    else:  # no label can be it, and JAX would wrap it around to a class
        valid = ~mesh.zeros_like(labels, bool)
    return jnp.where(valid, labels, jnp.zeros((), labels.dtype)), valid.astype(jnp.int32)


def find_means(terms: Mapping[str, WeightedSum], divisors: Mapping[str, Any]) -> dict[str, Array]:
    """Each term's mean, over its divisor where it has one and over its weight where not."""
    for name in terms.keys() - divisors.keys():
        check_shapes(terms[name], caller="WeightedSum.mean")
    return in_one_program(
        _find_means, {name: _in_floats(each) for name, each in terms.items()}, dict(divisors)
    )


def _find_means(terms: dict[str, WeightedSum], divisors: dict[str, Any]) -> dict[str, Array]:
    return {
        name: divide(_make_whole(each).total, divisors[name])
        if name in divisors
        else _find_mean(each)
        for name, each in terms.items()
    }


def _in_floats(each: WeightedSum) -> WeightedSum:
    """The same; in floats what no integer of JAX's holds, since all that comes of it is a mean."""
    total, weight = (
        np.asarray(value, np.float64) if is_too_wide(value) else value
        for value in (each.total, each.weight)
    )
    return WeightedSum(total, weight, each.beyond)


def _make_whole(each: WeightedSum) -> WeightedSum:
    total, weight = as_wide(each.total), as_wide(each.weight)
    if each.beyond is None:
        return WeightedSum(total, weight)
    return WeightedSum(
        *(
            kept.astype(widened_dtype(kept, rest)) + rest
            for kept, rest in ((total, each.beyond.total), (weight, each.beyond.weight))
        )
    )


def _find_mean(each: WeightedSum) -> Array:
    whole = _make_whole(each)
    mean = divide(whole.total, whole.weight)
    return jnp.where(is_bad(whole.weight), jnp.nan, mean).astype(mean.dtype)


def divide(total: Any, weight: Any) -> Array:
    """`total / weight`, and 0 with gradient 0 where the weight is 0: the library's one division.

    No gradient flows into the weight: what a row counts is decided, not learned.
    """
    return _divide(jnp.asarray(total), jnp.asarray(weight))


@partial(jax.jit, inline=True)
def _divide(total: Array, weight: Array) -> Array:
    weight = lax.stop_gradient(weight)
    floating = jnp.issubdtype(total.dtype, jnp.inexact)
    dtype = widen(jnp.float32, total.dtype) if floating else jnp.result_type(float)
    empty = weight == 0
    safe = jnp.where(empty, jnp.ones_like(weight), weight).astype(dtype)
    return jnp.where(empty, jnp.zeros((), dtype), total.astype(dtype) / safe)


def check_shapes(each: WeightedSum, *, caller: str, noun: str = "") -> None:
    """Raises `ValueError` unless there is one weight for each element of the total, or one for all.

    Broadcasting would let a weight by row divide columns, wherever the lengths happen to agree.
    """
    total, weight = np.shape(each.total), np.shape(each.weight)
    if weight not in ((), total):
        raise ValueError(
            f"{caller}: weight must have the shape of total, or be a scalar, got weight {weight} "
            f"and total {total}{noun}. jnp.broadcast_to spells out a weight that several elements "
            "share."
        )


def _add_on_host(a: Any, b: Any) -> Any:
    a, b = _widen_host(a), _widen_host(b)
    with np.errstate(over="ignore"):
        total = a + b
    if _is_int64(a) and _is_int64(b) and np.any((a ^ total) & (b ^ total) < 0):  # wrapped round
        total = a.astype(object) + b.astype(object)
    if (
        isinstance(total, np.ndarray)
        and total.dtype == object
        and not is_too_wide(total, 2**63 - 1)
    ):
        total = total.astype(np.int64)
    return total


def _add_host_weights(a: Any, b: Any) -> Any:
    """The sum of two weights, bad where one of them is: -1 and 3 are not 2."""
    a, b = _widen_host(a), _widen_host(b)
    total = _add_on_host(a, b)
    bad = _is_bad_on_host(a) | _is_bad_on_host(b)
    if not np.any(bad):
        return total
    whole = isinstance(total, int) or np.asarray(total).dtype.kind in "iuO"
    marked = np.where(bad, DOES_NOT_FIT if whole else np.nan, total)
    return marked if np.ndim(total) else marked.item()


def _is_bad_on_host(weight: Any) -> Any:
    return ~(np.asarray(weight >= 0) & np.asarray(weight != np.inf)).astype(bool)


def _is_int64(value: Any) -> bool:
    return isinstance(value, np.generic | np.ndarray) and value.dtype == np.int64


def _widen_host(value: Any) -> Any:
    if isinstance(value, list | tuple):
        value = np.asarray(value)  # a list would be made longer
    if not isinstance(value, np.generic | np.ndarray):
        return value
    if value.dtype == np.uint64:
        return value.astype(object)  # numpy adds them to int64 as floats
    least = np.float32 if jnp.issubdtype(value.dtype, jnp.inexact) else np.int64
    return value.astype(np.promote_types(least, value.dtype))
