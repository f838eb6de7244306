"""Whether both halves of a term, its total and its weight, are sums over the rank's own rows."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.interpreters import partial_eval
from jaxtyping import Array, PyTree

from jax_ddp_weighting.distributed import mesh
from jax_ddp_weighting.distributed.collectives import trace
from jax_ddp_weighting.distributed.mesh import AxisName
from jax_ddp_weighting.weighting.microbatches import twice_the_rows
from jax_ddp_weighting.weighting.sums import WeightedSum

# No axes, so that no reduction over one takes them off what is made of these.
_ROWS = "rows"
_WHOLE = "whole"


class OwnRows(NamedTuple):
    """What a loss is given of the rank's own rows: arrays `[rows, ...]`."""

    batch: PyTree
    keys: Array | None


Take = Callable[[OwnRows, Mapping[int, Any]], Mapping[str, WeightedSum]]
"""The terms of a loss, of the rank's own rows and of what is the whole step's."""


def check_halves(
    terms: Mapping[str, WeightedSum],
    take: Take,
    own: OwnRows,
    whole: Mapping[int, Any],
    *,
    axis_name: AxisName | None,
    part_axes: tuple[str, ...],
    microbatches: int,
) -> None:
    """Raises `ValueError` for a term of which one half alone is of the rank's own rows.

    The other half was summed over the ranks before, or is a number of the whole step: it would be
    added up once more for each rank and microbatch. What is made of neither, such as the weight of
    a loss without weights, means what it says: so the program is looked at, where types do not
    tell that all is well.

    Args:
        terms: the terms that the loss has returned.
        take: computes them again.
        own: what it is given of the rows.
        whole: and of the step: statistics, what is replicated, the state.
        axis_name: the mapped data axis, or None for the global view.
        part_axes: those of the axes over which parts of rows lie.
        microbatches: how many microbatches the rows are split into.
    """
    if axis_name is None:
        if microbatches == 1 or not whole:
            return
        names, checked = frozenset[str](), False
    else:
        names = frozenset(mesh.names_of(axis_name)) - frozenset(part_axes)
        checked = mesh.is_checked(axis_name)
    if checked:
        halves = [mesh.varying_axes(each) & names for each in _halves_of(terms)]
        if halves[::2] == halves[1::2]:
            return
    spread = [mesh.varying_axes(x) & names if checked else names for x in jax.tree.leaves(own)]
    program = trace(lambda given: _halves_of(take(*given)), (own, whole))
    found = program.find_names(
        [*(each | {_ROWS} for each in spread), *[frozenset({_WHOLE})] * len(whole)]
    )
    everywhere = frozenset[str]().union(*spread)
    for name, total, weight in zip(terms, found[::2], found[1::2], strict=True):
        for noun, half, other in (("weight", weight, total), ("total", total, weight)):
            summed = everywhere & other - half
            if _ROWS in half and summed:
                raise ValueError(
                    "value_and_grad: loss_fn must return both halves of a term of the rank's own "
                    f"rows, got for {name!r} a {noun} that was summed over the ranks of "
                    f"{tuple(sorted(summed))}, and the other half not. Ranks are summed here, "
                    "once: leave out a psum of your own."
                )
        if _WHOLE in weight and _ROWS not in weight and _ROWS in total:
            _check_weight(name, take, own, whole)


def _check_weight(name: str, take: Take, own: OwnRows, whole: Mapping[int, Any]) -> None:
    """Raises `ValueError` for a weight of the whole step: one that twice the rows do not change.

    Rows that all weigh such a number are right: their weight is added up over them.
    """

    def weigh(given: OwnRows) -> Array:
        given = jax.tree.map(mesh.vary_like, given, own)
        return jnp.asarray(take(given, whole)[name].weight)

    try:
        once, twice = (
            str(partial_eval.dce_jaxpr(jax.make_jaxpr(weigh)(rows).jaxpr, [True])[0])
            for rows in (own, twice_the_rows(own))
        )
    except (TypeError, ValueError):  # made for one number of rows: it cannot be asked
        return
    if once == twice:
        raise ValueError(
            "value_and_grad: loss_fn must return both halves of a term of the rank's own rows, got "
            f"for {name!r} a weight that is one number of the whole step, made of statistics, "
            "replicated or state alone, and would be added up over ranks and microbatches. Return "
            "the weight of the rows that loss_fn is given; what the term is divided by where that "
            "is not their sum is given as divisors=."
        )


def _halves_of(terms: Mapping[str, WeightedSum]) -> list[Array]:
    return [jnp.asarray(half) for each in terms.values() for half in (each.total, each.weight)]
