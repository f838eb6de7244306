"""What `check_gradients` and `check_additive` are given, refused before anything is computed."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from jax_ddp_weighting._arguments import check_callable
from jax_ddp_weighting.data.batch import Batch, check_batch


def check_case(loss_fn: Any, params: PyTree, batch: Any, *, caller: str) -> None:
    """Raises for what has no gradient, or one that is 0 whatever is done wrong.

    Raises:
        TypeError: the loss is no function, a parameter no float, or the batch no `Batch`.
        ValueError: all of the batch has weight 0.
    """
    check_batch(f"{caller}: batch must be a Batch", batch)
    remedy = "It takes (params, batch) and returns a WeightedSum."
    check_callable(f"{caller}: loss_fn", loss_fn, remedy)
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        dtype = leaf.dtype if hasattr(leaf, "dtype") else np.asarray(leaf).dtype
        if not jnp.issubdtype(dtype, jnp.inexact):
            raise TypeError(
                f"{caller}: params must be floating point, got {dtype} at params"
                f"{jax.tree_util.keystr(path)}. Keep counters and keys outside params."
            )
    _check_weight(batch, caller=caller)


def _check_weight(batch: Batch, *, caller: str) -> None:
    weights = np.asarray(batch.weights)
    if not weights.any():  # what is NaN or negative is another's to say
        raise ValueError(
            f"{caller}: batch must have a row of weight above 0, got {len(weights)} rows without "
            "weight. Their gradient is 0 however it is reduced."
        )


def check_splits(splits: Any, *, caller: str) -> None:
    """Raises `TypeError` unless it is one split, or several: integers, or sequences of them."""
    if _is_split(splits) or (_is_list(splits) and all(map(_is_split, splits))):
        return
    raise TypeError(
        f"{caller}: splits must be tuples of rows, integers, got {splits!r}. For instance "
        "[(3, 1), (2, 2)] for two ways to deal out four rows."
    )


def _is_split(split: Any) -> bool:
    return _is_list(split) and all(
        isinstance(rows, int | np.integer) and not isinstance(rows, bool) for rows in split
    )


def _is_list(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return value.ndim > 0
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)
