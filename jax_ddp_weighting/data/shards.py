"""Rows of a batch on the host, dealt to ranks in memory of this process's own, and placed."""

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jax_ddp_weighting.data.batch import Batch
from jax_ddp_weighting.distributed.placement import RankPlacement, copy_aligned, empty_aligned


@dataclass(frozen=True)
class Shards:
    """A column of rows as `RankPlacement.place_shards` wants them: an array for each rank."""

    arrays: list[np.ndarray]


def deal_rows(batch: Batch, ranks: int, width: int) -> Batch:
    """A copy of the batch's rows, `width` of them for each of some ranks, in order.

    What is missing is filled up by copies of the first row, or by zeros where there is none, so
    that it is as finite as the rows are.

    Args:
        batch: a batch on the host, of at most `ranks * width` rows.
        ranks: how many ranks share its rows.
        width: rows per rank.

    Returns:
        A `Batch` of `Shards` in data and ids; weights, and what is missing, stay arrays
        `[ranks * width]`, in which the added rows weigh 0.
    """
    rows, slots = len(batch.weights), ranks * width

    def deal(column: np.ndarray) -> Shards:
        arrays = []
        for first in range(0, slots, width):
            shard = empty_aligned((width, *column.shape[1:]), column.dtype)
            some = column[first : first + width]
            np.copyto(shard[: len(some)], some, casting="same_kind")
            shard[len(some) :] = column[0] if rows else 0
            arrays.append(shard)
        return Shards(arrays)

    def lengthen(values: np.ndarray) -> np.ndarray:
        longer = np.zeros(slots, values.dtype)
        longer[:rows] = values
        return longer

    return Batch(
        jax.tree.map(deal, batch.data),
        deal(batch.ids),
        lengthen(batch.weights),
        None if batch.missing is None else lengthen(batch.missing),
    )


def place_dealt(dealt: list[Batch], placement: RankPlacement) -> Batch:
    """The global batch of this process's dealt rows, and of what other processes place.

    Args:
        dealt: batches as `deal_rows` returns them, whose ranks are all of this process's, in order.
        placement: where the ranks are.
    """

    def split(values: np.ndarray, ranks: int) -> Shards:
        # a copy each, since not every slice starts where JAX takes memory as it is
        return Shards([copy_aligned(each) for each in np.split(values, ranks)])

    def complete(rows: Batch) -> Batch:
        ranks = len(rows.ids.arrays)
        missing = None if rows.missing is None else split(rows.missing, ranks)
        return Batch(rows.data, rows.ids, split(rows.weights, ranks), missing)

    def place(*columns: Any) -> jax.Array:
        return placement.place_shards([each for column in columns for each in column.arrays])

    return jax.tree.map(place, *map(complete, dealt))
