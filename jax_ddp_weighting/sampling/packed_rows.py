"""Rows of several sequences as a model reads them: tokens, segments, positions and weights."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Float32, Int32, Integer

from jax_ddp_weighting._arguments import check_integer

NO_SEQUENCE = -1
"""Stands in a row's ids where it holds no further sequence."""


class PackedRows(NamedTuple):
    """Rows as a model reads them, each of shape ``[..., length]``.

    Attributes:
        tokens: the sequences of each row, one behind the other, then 0.
        segment_ids: 1 for the first sequence of a row, 2 for the second, and so on; 0 is padding.
        positions: the place of a token in its own sequence, from 0.
        weights: how much a token counts; 0 is padding.
    """

    tokens: np.ndarray
    segment_ids: Int32[np.ndarray, "..."]
    positions: Int32[np.ndarray, "..."]
    weights: Float32[np.ndarray, "..."]


def pack_rows(
    ids: Integer[np.ndarray, "*rows most"],
    sequence: Callable[[int], Any],
    length: int,
    *,
    per: Literal["token", "sequence"] = "token",
) -> PackedRows:
    """Rows of tokens out of the ids that a `PackedPlan` puts together.

    The rule: a row's sequences lie one behind the other, from its first place on. Tokens attend to
    those of their own segment only, which is the model's to see to. A token weighs 1, or, where
    ``per="sequence"``, one over the tokens of its sequence, so that every sequence counts once.

    Args:
        ids: ids of each row, -1 where it holds no further one: ``slots.ids`` of a `PackedPlan`, or
            what `batches` hands to `fetch`.
        sequence: ``sequence(id)`` returns the tokens of one sequence, ``[tokens]``.
        length: tokens of a row: ``slots.length``.
        per: what weighs 1: "token" or "sequence".

    Returns:
        `PackedRows` of the shape of `ids`, with `length` for its last axis; the dtype of tokens is
        that of the sequences.

    Raises:
        ValueError: the sequences of a row are longer than it, or one has no or several axes.

    Example:
        >>> words = [[5, 6, 7], [8], [4, 4]]
        >>> rows = pack_rows(np.array([[0, 2, -1], [1, -1, -1]]), words.__getitem__, 6)
        >>> rows.tokens.tolist()
        [[5, 6, 7, 4, 4, 0], [8, 0, 0, 0, 0, 0]]
        >>> rows.segment_ids.tolist()
        [[1, 1, 1, 2, 2, 0], [1, 0, 0, 0, 0, 0]]
        >>> rows.positions.tolist()
        [[0, 1, 2, 0, 1, 0], [0, 0, 0, 0, 0, 0]]
    """
    length = check_integer("pack_rows: length", length, 1, 2**31)
    if per not in ("token", "sequence"):
        raise ValueError(f'pack_rows: per must be "token" or "sequence", got {per!r}.')
    ids = np.asarray(ids)
    rows = ids.reshape(-1, ids.shape[-1])
    found = [[np.asarray(sequence(int(i))) for i in row if i != NO_SEQUENCE] for row in rows]
    flat = [tokens for row in found for tokens in row]
    for tokens in flat:
        if tokens.ndim != 1 or not len(tokens):
            raise ValueError(
                "pack_rows: sequence must return the tokens of one sequence, [tokens], got shape"
                f" {tokens.shape}. Pack what goes with tokens in a call of its own."
            )
    dtype = np.result_type(*{tokens.dtype for tokens in flat}) if flat else np.dtype(np.int32)
    shape = (len(rows), length)
    tokens, weights = np.zeros(shape, dtype), np.zeros(shape, np.float32)
    segments, positions = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    for row, sequences in enumerate(found):
        held = sum(map(len, sequences))
        if held > length:
            raise ValueError(
                f"pack_rows: a row must hold {length} tokens at most, got {held} of ids"
                f" {rows[row][rows[row] != NO_SEQUENCE].tolist()}. The lengths that the plan was"
                " given are not those of the sequences."
            )
        start = 0
        for number, each in enumerate(sequences, 1):
            place = slice(start, start := start + len(each))
            tokens[row, place], segments[row, place] = each, number
            positions[row, place] = np.arange(len(each))
            weights[row, place] = 1 if per == "token" else 1 / len(each)
    back = (*ids.shape[:-1], length)
    return PackedRows(*(each.reshape(back) for each in (tokens, segments, positions, weights)))
