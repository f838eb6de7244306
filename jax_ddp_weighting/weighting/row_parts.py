"""Rows whose parts lie on several ranks: what is a part's own adds up, what is a row's counts once.

Where the tokens of a row lie over an axis, every rank of it holds the row's own weight and label
too. In a checked `shard_map` types tell the two apart: what is made of tokens varies over the axis,
and what is made of rows alone does not.
"""

from collections.abc import Mapping
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from jax_ddp_weighting.distributed import mesh
from jax_ddp_weighting.weighting.sums import WeightedSum

T = TypeVar("T")


def count_once(tree: T, part_axes: tuple[str, ...]) -> T:
    """The tree, in which what is the same on all ranks that share a row is 0 on all but the first.

    Args:
        tree: any pytree of sums.
        part_axes: the axes that parts of rows lie over.
    """

    def count(leaf: jax.Array) -> jax.Array:
        same = [axis for axis in part_axes if not mesh.varies(leaf, axis)]
        for axis in same:
            leaf = jnp.where(lax.axis_index(axis) == 0, leaf, jnp.zeros_like(leaf))
        return leaf

    return jax.tree.map(count, tree)


def count_terms(
    terms: Mapping[str, WeightedSum], part_axes: tuple[str, ...], *, once: frozenset[str]
) -> dict[str, WeightedSum]:
    """The terms, those of whole rows counted once.

    Args:
        terms: what a loss function returned, by name, widened.
        part_axes: the axes that parts of rows lie over.
        once: the names of those that `WeightedSum.once` made, whose weights count ranks.

    Raises:
        ValueError: of a term the total is made of parts and the weight of rows, or the other way
            round: one would be added up over the axis, and the other not.
    """
    if not part_axes:
        return dict(terms)
    for name, each in terms.items():
        for axis in part_axes:
            total, weight = (mesh.varies(jnp.asarray(x), axis) for x in (each.total, each.weight))
            if total != weight and name not in once:
                same, other = ("weight", "total") if total else ("total", "weight")
                raise ValueError(
                    f"value_and_grad: loss_fn must return a total and a weight that both are made "
                    f"of a rank's own tokens, or both of whole rows, got a {same} for term {name!r}"
                    f" that is the same on every rank of {axis!r} beside a {other} that varies "
                    f"over it. Tokens are weighed by what lies as they do, such as a leaf of the "
                    f"batch's data (or by weights of their shape that jax.lax.pcast(weights, "
                    f"{axis!r}, to='varying') says are theirs). The loss of a row is first made of "
                    f"all its tokens: jax.lax.psum over {axis!r}, or pmean of what is the same."
                )
    return {
        name: each if name in once else count_once(each, part_axes) for name, each in terms.items()
    }
