"""A rank's rows, what a loss function is given with them, and how both come to a microbatch."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.tree_util import keystr
from jaxtyping import Array, PyTree


class Rows(NamedTuple):
    """A rank's rows, and what a loss function is given with them.

    Attributes:
        batch: a pytree of arrays `[rows, ...]`.
        rng: one key for all rows, or None.
        keys: a key per row, or None.
        replicated: what is no row, and so is never split; or None.
        statistics: those of the whole step, or None where it takes none.
    """

    batch: PyTree
    rng: Array | None = None
    keys: Array | None = None
    replicated: PyTree = None
    statistics: PyTree = None


def take_microbatch(rows: Rows, k: Any, microbatches: int) -> Rows:
    """The rows of microbatch `k`; all of them, and the rng as it is, where there is one."""
    if microbatches == 1:
        return rows
    rng = None if rows.rng is None else jax.random.fold_in(rows.rng, k)
    split = [_take_rows(tree, k, microbatches) for tree in (rows.batch, rows.keys)]
    return Rows(split[0], rng, split[1], rows.replicated, rows.statistics)


def check_rows(batch: PyTree, *, caller: str) -> None:
    """Raises `ValueError` unless every leaf has one leading axis of as many rows as the others."""
    leaves = jax.tree_util.tree_leaves_with_path(batch)
    shapes = [jnp.shape(leaf) for _, leaf in leaves]
    for (path, _), shape in zip(leaves, shapes, strict=True):
        if not shape or shape[0] != (shapes[0] or shape)[0]:
            beside = "" if not shape else f" beside {shapes[0]} at batch{keystr(leaves[0][0])}"
            raise ValueError(
                f"{caller}: batch must have one leading axis of rows, as long in every leaf, got "
                f"shape {shape} at batch{keystr(path)}{beside}. What is no row, such as class "
                "weights or a teacher, is given beside the batch: replicated=."
            )


def twice_the_rows(rows: PyTree) -> PyTree:
    """The shapes of twice as many rows, to ask what hangs on how many there are."""

    def double(leaf: Any) -> jax.ShapeDtypeStruct:
        count, *rest = jnp.shape(leaf)
        return jax.ShapeDtypeStruct((2 * count, *rest), jnp.result_type(leaf))

    return jax.tree.map(double, rows)


def _take_rows(batch: PyTree, k: Any, microbatches: int) -> PyTree:
    def rows(path: Any, leaf: Array) -> Array:
        shape = jnp.shape(leaf)
        if not shape or shape[0] % microbatches:
            raise ValueError(
                f"value_and_grad: microbatches must divide the rows of every leaf of batch, got "
                f"{microbatches} microbatches and shape {shape} at batch"
                f"{keystr(path)}. Pad with rows of weight 0, as Batch.padded("
                f"{microbatches}) does, or choose another number."
            )
        split = jnp.reshape(leaf, (shape[0] // microbatches, microbatches, *shape[1:]))
        return lax.dynamic_index_in_dim(split, k, axis=1, keepdims=False)

    return jax.tree_util.tree_map_with_path(rows, batch)
