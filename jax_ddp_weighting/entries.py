"""Ids and weights as somebody gives them, checked before anything is counted."""

import numpy as np

from jax_ddp_weighting.arguments import listed

Rank = tuple[np.ndarray, np.ndarray | None]  # one rank's ids, and its weights if there are any


def checked(function: str, ids: list[np.ndarray], weights: list[np.ndarray] | None) -> list[Rank]:
    """Every rank's ids and weights, flat, of one length, and such as they must be."""
    for rank_ids in ids:
        if rank_ids.size and rank_ids.dtype.kind not in "iu":
            raise TypeError(
                f"{function}: ids must be integers, got {rank_ids.dtype}. Give them in an integer"
                " dtype, which holds 64 bits at most."
            )
    flat = [np.ravel(r) if r.size else np.zeros(0, np.int64) for r in ids]
    if weights is None:
        return [(rank_ids, None) for rank_ids in flat]
    shapes, wanted = [[array.shape for array in part] for part in (weights, ids)]
    if shapes != wanted:
        raise ValueError(
            f"{function}: weights must have the shape of ids, got {_shape(shapes)} and"
            f" {_shape(wanted)}. Every slot has one weight."
        )
    for values in weights:
        if values.dtype.kind not in "iufbV":  # V: bfloat16 and its kin, which compare as numbers
            raise TypeError(f"{function}: weights must be numbers, got {values.dtype}.")
        if values.size and not (values.min() >= 0 and values.max() < np.inf):  # NaN is neither
            wrong = values[~((values >= 0) & np.isfinite(values))]
            raise ValueError(
                f"{function}: weights must be finite and at least 0, got {wrong[0]}."
                " Padding has weight 0."
            )
    return list(zip(flat, map(np.ravel, weights), strict=True))


def _shape(shapes: list[tuple[int, ...]]) -> str:
    return str(shapes[0]) if len(shapes) == 1 else f"by rank {listed(shapes)}"
