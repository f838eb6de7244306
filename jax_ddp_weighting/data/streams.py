"""One rank's stream of batches of its own: read one ahead, checked, filled up, gone on with."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from jax_ddp_weighting.data.batch import Batch, check_batch
from jax_ddp_weighting.data.row_format import RowFormat, check_format, describe_rows, device_dtype
from jax_ddp_weighting.distributed.placement import device_ids


class Stream:
    """A stream, read one batch ahead of the one that is given out.

    The rule: a stream that has ended goes on with its last rows at weight 0; one that has failed
    says so once, and is not read again. A batch short of rows is filled up with rows of weight 0.

    Args:
        batches: the stream, of `Batch`es on the host.
        ranks: the ranks that share its rows.

    Attributes:
        upcoming: the batch read ahead, None if there is none.
        failure: what went wrong in reading it, None if nothing did.
    """

    def __init__(self, batches: Iterator[Any], ranks: tuple[int, ...]) -> None:
        self.ranks = ranks
        self.upcoming: Batch | None = None
        self.failure: Exception | None = None
        self.format: RowFormat | None = None
        self._batches = batches
        self._rows = 0
        self._last: Batch | None = None
        self.read()

    @property
    def rows_per_rank(self) -> int:
        """How many rows each rank gets of the batch read ahead, the last of them filled up."""
        return 0 if self.upcoming is None else -(-len(self.upcoming.weights) // len(self.ranks))

    def settle(self, rows_per_rank: int, like: Batch | None) -> None:
        """Takes on what all streams have agreed on.

        Args:
            rows_per_rank: what every batch is filled up to; no later one may have more.
            like: a batch of no rows, of the form that all batches have; for a stream without any.
        """
        self._rows = rows_per_rank * len(self.ranks)
        if self.upcoming is None and like is not None:
            zeros = jax.tree.map(lambda x: np.zeros((self._rows, *x.shape[1:]), x.dtype), like)
            self._last = zeros

    def take(self) -> Batch:
        """The next rows `[rows_per_rank * len(ranks)]`."""
        if self.upcoming is None:
            assert self._last is not None  # it has been settled
            return replace(self._last, weights=np.zeros_like(self._last.weights))
        self._last = self.upcoming.padded(self._rows)
        self.read()
        return self._last

    def read(self) -> None:
        """Reads one batch ahead."""
        self.upcoming = None
        try:
            self.upcoming = self._check(next(self._batches))
        except StopIteration:
            self._batches = iter(())
        except Exception as error:  # somebody else's code: it is raised on every rank
            self.failure = error
            self._batches = iter(())

    def _check(self, batch: Any) -> Batch:
        check_batch("join_batches: a stream must yield Batches", batch)
        batch = jax.tree.map(np.asarray, batch)
        found = len(batch.weights)
        if not found:
            raise ValueError(
                "join_batches: a batch must have rows, got none. Leave it out: a stream may be "
                "shorter than others, or empty."
            )
        if self._rows and found > self._rows:
            raise ValueError(
                f"join_batches: a batch must have at most the {self._rows} rows of the first one, "
                f"got {found}. Put full batches first and the short one last."
            )
        found_format = describe_rows(batch.data) | {
            "weights": str(device_dtype(batch.weights.dtype))
        }
        if self.format is None:
            self.format = found_format
        check_format("join_batches", found_format, self.format)
        return Batch(batch.data, device_ids(batch.ids, caller="join_batches"), batch.weights)
