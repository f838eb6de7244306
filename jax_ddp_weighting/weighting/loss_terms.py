"""What a loss function returns: one sum or several by name, and what its model keeps."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, PyTree

from jax_ddp_weighting.distributed import mesh
from jax_ddp_weighting.distributed.mesh import AxisName
from jax_ddp_weighting.weighting.sums import WeightedSum, check_shapes

LossFn = Callable[..., Any]
"""`(params, batch) -> WeightedSum`, or a dict of them; with `rng` as a third argument if one is
given; paired with auxiliary output if `has_aux`."""


def name_sums(sums: Any) -> dict[str, WeightedSum] | None:
    """Sums by name, a single one as `"loss"`; None for whatever else somebody returned."""
    if isinstance(sums, WeightedSum):
        return {"loss": sums}
    if isinstance(sums, Mapping) and sums:
        return dict(sums) if all(isinstance(s, WeightedSum) for s in sums.values()) else None
    return None


def check_scalars(
    terms: Mapping[str, WeightedSum], *, returned_by: str, called: str = "term "
) -> None:
    """Raises unless every sum is one of scalars; the others speak in the error.

    Raises:
        TypeError: a total or a weight is no number, or a weight is complex.
        ValueError: one is no scalar.
    """
    for name, each in terms.items():
        _check_numbers(each, returned_by, f"{called}{name!r}")
        if jnp.shape(each.total) != () or jnp.shape(each.weight) != ():
            raise ValueError(
                f"{returned_by} must return scalar sums, got total {jnp.shape(each.total)} and "
                f"weight {jnp.shape(each.weight)} for {called}{name!r}. weighted_sum makes them. "
                "Sums of arrays, such as a confusion matrix, are for evaluate."
            )


def check_arrays(terms: Mapping[str, WeightedSum], *, returned_by: str) -> None:
    """Raises unless every sum is one of real numbers, or of arrays of them in shapes that fit.

    Raises:
        TypeError: a total or a weight is no real number.
        ValueError: a weight has another shape than its total, and is no scalar.
    """
    for name, each in terms.items():
        _check_numbers(each, returned_by, repr(name), real=True)
        check_shapes(each, caller=returned_by, noun=f" for {name!r}")


def _check_numbers(each: WeightedSum, returned_by: str, called: str, *, real: bool = False) -> None:
    if not (is_number(each.total, real=real) and is_number(each.weight, real=True)):
        raise TypeError(
            f"{returned_by} must return sums of {'real ' * real}numbers, got total "
            f"{describe(each.total)} and weight {describe(each.weight)} for {called}. weighted_sum "
            "makes them."
        )


def is_number(value: Any, *, real: bool = False) -> bool:
    """Whether it is a number, or an array of numbers of any shape; bools count as such."""
    if not hasattr(value, "dtype"):
        return isinstance(value, int | float | (int if real else complex))
    kinds = (jnp.bool_, jnp.integer, jnp.floating if real else jnp.inexact)
    return any(jnp.issubdtype(value.dtype, kind) for kind in kinds)


def name_terms(
    sums: Any, coefficients: Mapping[str, Any] | None, *, caller: str = "value_and_grad"
) -> dict[str, WeightedSum]:
    """What a loss function returned, as terms by name, each of which has a coefficient.

    They come widened: what a loss function has summed by hand may be as narrow as int8.
    """
    terms = name_sums(sums)
    if terms is None:
        raise TypeError(
            f"{caller}: loss_fn must return a WeightedSum or a dict of them, got "
            f"{describe(sums)}. Return weighted_sum(losses, weights): a mean has lost its "
            "denominator, and ranks of unequal weight cannot be averaged any more."
        )
    if isinstance(sums, WeightedSum):  # which needs no coefficient, and may be given its own
        if coefficients is not None and set(coefficients) != {"loss"}:
            raise ValueError(
                f"{caller}: coefficients must name the terms of loss_fn, got "
                f"{sorted(coefficients)} for one unnamed WeightedSum. Return a dict of terms, or "
                "leave coefficients out."
            )
    elif coefficients is None or set(coefficients) != set(terms):
        got = "none" if coefficients is None else sorted(coefficients)
        raise ValueError(
            f"{caller}: coefficients must name every term of loss_fn, got {got} for "
            f"terms {sorted(terms)}. Give each term its factor: "
            f"coefficients={{{', '.join(f'{name!r}: 1.0' for name in sorted(terms))}}}."
        )
    check_scalars(terms, returned_by=f"{caller}: loss_fn")
    return {name: each.whole() for name, each in terms.items()}


def check_factors(coefficients: Mapping[str, Any] | None, *, caller: str) -> None:
    """Raises unless coefficients are a finite number, or a function, for each term.

    Raises:
        TypeError: they are no dict of numbers.
        ValueError: one is NaN or infinite.
    """
    if coefficients is None:
        return
    if not isinstance(coefficients, Mapping):
        raise TypeError(
            f"{caller}: coefficients must be a dict of a number for each term, got "
            f"{type(coefficients).__name__}. For instance {{'nll': 1.0, 'z_loss': 0.1}}."
        )
    for name, factor in coefficients.items():
        if not (callable(factor) or (is_number(factor, real=True) and np.shape(factor) == ())):
            raise TypeError(
                f"{caller}: coefficients must be one number for each term, got {factor!r} for "
                f"{name!r}. How much rows or classes count is a weight."
            )
        on_host = isinstance(factor, int | float | np.ndarray | np.generic)
        if on_host and not np.isfinite(factor):
            raise ValueError(
                f"{caller}: coefficients must be finite, got {factor!r} for {name!r}. 0 leaves a "
                "term out of the loss and reports it all the same."
            )


def check_coefficients(coefficients: Mapping[str, Any] | None, *, caller: str) -> None:
    """Raises `TypeError` for a coefficient that is a function, where nobody counts steps."""
    check_factors(coefficients, caller=caller)
    for name, factor in (coefficients or {}).items():
        if callable(factor):
            raise TypeError(
                f"{caller}: coefficients must be numbers, got a function for {name!r}. Only a "
                "training step knows the number of the step: call it yourself, coefficients={"
                f"{name!r}: schedule(count)}}, where count may be traced."
            )


def has_gradient(factor: Any) -> bool:
    """Whether a term has a part in the loss: a coefficient of 0 makes it a mere metric.

    However the 0 is spelled: as a number, a bool, or an array on the host or on a device. Of a
    traced coefficient, or a function of the step, nothing is known while the program is made, so
    its term pulls.
    """
    return isinstance(factor, Tracer) or callable(factor) or bool(np.any(np.asarray(factor) != 0))


def unpack(out: Any, *extras: str) -> tuple[Any, ...]:
    """The sums, and whatever else a loss function said that it returns."""
    if not (isinstance(out, tuple) and len(out) == 1 + len(extras)):
        options = [f"has_{extra}" for extra in extras]
        raise TypeError(
            f"value_and_grad: loss_fn must return (sums, {', '.join(extras)}) when "
            f"{' and '.join(f'{option}=True' for option in options)}, got {describe(out)}. "
            f"Return a tuple, or leave {' and '.join(options)} out."
        )
    return out


def check_totals(terms: Mapping[str, WeightedSum]) -> None:
    """Raises `TypeError` for totals that `jax.grad` would refuse too."""
    for name, each in terms.items():
        if not jnp.issubdtype(each.total.dtype, jnp.floating):
            raise TypeError(
                "value_and_grad: loss_fn must return a total of floats for a term that pulls, got "
                f"{each.total.dtype} for term {name!r}. It has no gradient: take a float loss, or "
                "give what is only to be reported the coefficient 0."
            )


def check_axes(
    terms: Mapping[str, WeightedSum], axis_name: AxisName | None, params: PyTree
) -> None:
    """Raises `ValueError` if types tell that rows lie over an axis that nobody has named."""
    for name, each in terms.items():
        more = mesh.unnamed_axes(each, axis_name, parameters=params)
        if more:
            named = (
                ()
                if axis_name is None
                else (axis_name,)
                if isinstance(axis_name, str)
                else tuple(axis_name)
            )
            every = (*named, *more)
            raise ValueError(
                "value_and_grad: axis_name must name every mapped axis that rows lie over, got "
                f"{axis_name!r} for term {name!r}, which varies over {more} too. Pass axis_name="
                f"{every[0] if len(every) == 1 else every!r}, or sum the term over the axis."
            )


def check_state(
    old: PyTree, new: PyTree, axis_name: AxisName | None, again: Callable[[], PyTree]
) -> PyTree:
    """The new state of a model, if it has the form of the old one and is the same on every rank.

    Args:
        old: the state that went in.
        new: the state that came out.
        axis_name: the mapped data axis, or None.
        again: the new state once more, computed from the parameters as they were given. Those that
            gradients are taken of have been made to vary over the ranks, in type alone, and so has
            what a model keeps of them, such as the norm of a weight. Only what varies even so may
            differ from rank to rank.
    """
    if jax.tree.structure(old) != jax.tree.structure(new):
        raise ValueError(
            "value_and_grad: loss_fn must return a state of the structure it was given, got "
            f"{jax.tree.structure(new)} for {jax.tree.structure(old)}. Return all that came in, "
            "and nothing else."
        )
    new = jax.tree_util.tree_map_with_path(_check_form, old, new)
    if axis_name is None or not any(mesh.varies(leaf, axis_name) for leaf in jax.tree.leaves(new)):
        return new

    def check_same(path: Any, leaf: Array, shared: Any) -> Array:
        if not mesh.varies(leaf, axis_name):
            return leaf
        shared = jnp.asarray(shared)
        if mesh.varies(shared, axis_name):
            raise ValueError(
                "value_and_grad: loss_fn must return a state that is the same on every rank, got "
                f"one that may vary over {axis_name!r} at state{jax.tree_util.keystr(path)}. Sum "
                "what it is made of over the ranks, as a BatchNorm that is given the axis does."
            )
        return shared

    return jax.tree_util.tree_map_with_path(check_same, new, again())


def _check_form(path: Any, before: Any, after: Any) -> Array:
    before, after = jnp.asarray(before), jnp.asarray(after)
    if (before.shape, before.dtype) != (after.shape, after.dtype):
        raise ValueError(
            f"value_and_grad: loss_fn must return a state of the form it was given, got "
            f"{describe(after)} for {describe(before)} at state"
            f"{jax.tree_util.keystr(path)}. Cast it back, or initialise it so."
        )
    return after


def describe(value: Any) -> str:
    """What somebody returned in place of a sum, in a few words for an error."""
    if hasattr(value, "dtype"):
        return f"{value.dtype}{list(value.shape)}"
    if isinstance(value, tuple):
        return f"a tuple of {', '.join(describe(each) for each in value)}"
    if isinstance(value, Mapping):
        return f"a dict of {', '.join(sorted({describe(each) for each in value.values()}))}"
    return type(value).__name__
