"""Statistics of a step: sums over all rows, microbatches and ranks, known before any loss is taken.

The share of tokens that each expert gets, the size of each class, a global normaliser: what a loss
needs to know of the whole step while it is given one rank's microbatch.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.tree_util import keystr
from jaxtyping import Array, PyTree

from jax_ddp_weighting.distributed import mesh
from jax_ddp_weighting.distributed.mesh import AxisName
from jax_ddp_weighting.weighting.counts import Count, Sum, as_sum, as_wide, is_count, to_divisor
from jax_ddp_weighting.weighting.denominators import sum_over_ranks
from jax_ddp_weighting.weighting.loss_terms import describe, is_number
from jax_ddp_weighting.weighting.microbatches import Rows, take_microbatch, twice_the_rows
from jax_ddp_weighting.weighting.named_arguments import find_named
from jax_ddp_weighting.weighting.row_parts import count_once
from jax_ddp_weighting.weighting.sums import WeightedSum

Statistics = Callable[..., PyTree]
"""`(params, batch) -> pytree of arrays`, the sums over the rows that it is given; with `rng`,
`state` or `replicated` by name, if its signature names them."""


class Own(NamedTuple):
    """What a rank's microbatch has for itself."""

    batch: PyTree
    rng: Array | None
    keys: Array | None


class Shared(NamedTuple):
    """What is the same for every rank and microbatch."""

    params: PyTree
    state: PyTree
    replicated: PyTree


def check_statistics(statistics: Any, *, caller: str) -> None:
    """Raises `TypeError` for statistics that cannot be called."""
    if statistics is not None and not callable(statistics):
        raise TypeError(
            f"{caller}: statistics must be a function (params, batch) of sums over rows, got "
            f"{describe(statistics)}. What is known beforehand is given as replicated=."
        )


def call_statistics(
    statistics: Statistics,
    first: Any,
    batch: PyTree,
    offered: Mapping[str, Any],
    *,
    names: str = "params, batch",
) -> PyTree:
    """What the function returns, given what of `offered` it names and there is.

    Args:
        statistics: the function.
        first: its first argument: parameters, variables or a model.
        batch: the rows.
        offered: what it may be given by name; None is what is not there.
        names: what its positional arguments are, for the error.
    """
    named = find_named(statistics, names, offered, argument="value_and_grad: statistics")
    return statistics(first, batch, **named)


def sum_statistics(
    statistics: Statistics,
    params: PyTree,
    rows: Rows,
    state: PyTree,
    *,
    microbatches: int,
    axis_name: AxisName | None,
    part_axes: tuple[str, ...] = (),
) -> PyTree:
    """The statistics of a whole step, the same on every rank.

    The rule: one more forward pass, of what the function computes alone, and one all-reduce per
    dtype. Integers are added up exactly, as weights are, and come as floats.

    Args:
        statistics: the function.
        params: parameters as they were given, the same on every rank.
        rows: the rank's rows.
        state: the model's state before the step, which every microbatch is given.
        microbatches: how many microbatches the rows are split into.
        axis_name: the mapped data axis, or None.
        part_axes: those over which parts of rows lie: what is made of whole rows counts once there.

    Raises:
        TypeError: it returns something else than numbers.
        ValueError: a shape depends on the number of rows, or it has summed over the ranks itself.
    """

    def take(own: Own, shared: Shared) -> PyTree:
        rng = own.rng if own.keys is None else own.keys
        given = {"rng": rng, "state": shared.state, "replicated": shared.replicated}
        return call_statistics(statistics, shared.params, own.batch, given)

    def sum_rows(k: Any) -> PyTree:
        part = take_microbatch(rows, k, microbatches)
        own, shared = Own(part.batch, part.rng, part.keys), Shared(params, state, part.replicated)
        found = _check_numbers(take(own, shared))
        _check_sums(found, take, own, shared, axis_name)
        return count_once(jax.tree.map(_to_sum, found), part_axes)

    if microbatches == 1:
        sums = sum_rows(0)
    else:
        _, each = lax.scan(lambda _, k: (None, sum_rows(k)), None, jnp.arange(microbatches))
        sums = jax.tree.map(partial(jnp.sum, axis=0), each)
    if axis_name is not None:
        sums = mesh.vary(sums, axis_name)
    sums = sum_over_ranks(sums, axis_name)
    return jax.tree.map(lambda each: lax.stop_gradient(_to_float(each)), sums, is_leaf=is_count)


def _to_sum(value: Array) -> Sum:
    if value.dtype == jnp.uint32:  # whose upper half an int32 has no room for
        return Count((value >> 16).astype(jnp.int32), (value & 0xFFFF).astype(jnp.int32))
    return as_sum(as_wide(value))


def _to_float(total: Sum) -> Array:
    total = to_divisor(total)
    inexact = jnp.issubdtype(total.dtype, jnp.inexact)
    return total if inexact else total.astype(jnp.result_type(float))


def _check_numbers(found: PyTree) -> PyTree:
    """The statistics as arrays of numbers."""

    def check(path: Any, leaf: Any) -> Any:
        if isinstance(leaf, WeightedSum):  # a sum and its weight, of which a loss takes the mean
            return jax.tree.map(lambda each: check(path, each), leaf)
        is_bool = isinstance(leaf, bool) or getattr(leaf, "dtype", None) == jnp.bool_
        if is_bool or not is_number(leaf):
            raise TypeError(
                "value_and_grad: statistics must return a pytree of arrays of numbers, got "
                f"{describe(leaf)}{_where(path)}. Return sums over the rows, such as "
                "{'positives': jnp.sum(batch.weights * labels)}."
            )
        return jnp.asarray(leaf)

    def is_leaf(node: Any) -> bool:
        return node is None or isinstance(node, WeightedSum)

    checked = jax.tree_util.tree_map_with_path(check, found, is_leaf=is_leaf)
    if not jax.tree.leaves(checked):
        raise TypeError(
            f"value_and_grad: statistics must return at least one array, got {describe(found)}. "
            "Leave statistics out where a loss needs none."
        )
    return checked


def _check_sums(
    found: PyTree,
    take: Callable[[Own, Shared], PyTree],
    own: Own,
    shared: Shared,
    axis_name: AxisName | None,
) -> None:
    """Raises `ValueError` for leaves that are no sums over the rank's rows.

    What has an entry per row shows in twice the rows; what is made of the parameters alone, and
    would be added up as often as there are ranks and microbatches, in the program; what has been
    summed over the ranks before, in its type. (A number that is made of nothing is taken for one
    that the shapes of the rows have given.)
    """
    rows = own.batch, own.keys
    twice = twice_the_rows(rows)

    def take_twice(twice: PyTree, rng: Any, shared: Shared) -> PyTree:
        batch, keys = jax.tree.map(mesh.vary_like, twice, rows)
        return jax.tree.map(jnp.asarray, take(Own(batch, rng, keys), shared))

    try:
        traced = jax.make_jaxpr(take_twice, return_shape=True)(twice, own.rng, shared)
    except (TypeError, ValueError):  # made for one number of rows: it cannot be asked
        return
    program, shapes = traced
    count = len(jax.tree.leaves((twice, own.rng)))
    of_rows = _find_dependent(program.jaxpr, program.jaxpr.invars[:count])
    of_shared = _find_dependent(program.jaxpr, program.jaxpr.invars[count:])
    leaves = jax.tree_util.tree_leaves_with_path(found)
    for i, (path, leaf) in enumerate(leaves):
        other = jax.tree.leaves(shapes)[i].shape
        if leaf.shape != other:
            raise ValueError(
                "value_and_grad: statistics must return sums over rows, of a shape that does not "
                f"depend on how many there are, got {leaf.shape}{_where(path)}, and {other} of "
                "twice the rows. Sum over the rows: jnp.sum(..., axis=0)."
            )
        if of_shared[i] and not of_rows[i]:
            raise ValueError(
                "value_and_grad: statistics must return sums over the rows that they are given, "
                f"got what is made of none of them{_where(path)}, and would be added up over ranks "
                "and microbatches. Compute in the loss function what needs no sum."
            )
        if of_rows[i] and axis_name is not None and _is_summed(leaf, axis_name):
            raise ValueError(
                "value_and_grad: statistics must return sums over the rank's own rows, got what is "
                f"the same on every rank of {axis_name!r}{_where(path)}. Ranks are summed here, "
                "once: leave out a psum of your own."
            )


def _find_dependent(program: Any, inputs: Sequence[Any]) -> list[bool]:
    """Which results of a program depend on these of its inputs."""
    dependent = set(inputs)
    for equation in program.eqns:
        if any(each in dependent for each in equation.invars if not hasattr(each, "val")):
            dependent.update(equation.outvars)
    return [not hasattr(each, "val") and each in dependent for each in program.outvars]


def _is_summed(value: Array, axis_name: AxisName) -> bool:
    """Whether types tell that what was made of a rank's rows is the same on every rank."""
    return mesh.is_checked(axis_name) and not mesh.varies(value, axis_name)


def _where(path: Any) -> str:
    return f" at statistics{keystr(path)}" if path else ""
