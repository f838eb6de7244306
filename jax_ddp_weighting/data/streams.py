"""One rank's stream of batches of its own: read one ahead, copied, filled up, gone on with."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from jax_ddp_weighting.data.batch import Batch, check_batch, check_batch_values
from jax_ddp_weighting.data.row_format import RowFormat, check_format, describe_batch
from jax_ddp_weighting.data.shards import deal_rows
from jax_ddp_weighting.distributed.placement import device_ids


class Stream:
    """A stream, read one batch ahead of the one that is given out.

    The rule: what the stream hands over is copied before anything else is read, for it may fill one
    buffer over and over, or share one with another stream. A stream that has ended goes on with its
    last rows at weight 0, and so does one that yields a batch of no rows; one that has failed says
    so once, and is not read again. A batch short of rows is filled up with rows of weight 0.

    Args:
        batches: the stream, of `Batch`es on the host.
        ranks: the ranks that share its rows.

    Attributes:
        upcoming: the batch read ahead, None if there is none; a copy.
        failure: what went wrong in reading it, None if nothing did.
        format: what its rows look like, None if it has had none.
    """

    def __init__(self, batches: Iterator[Any], ranks: tuple[int, ...]) -> None:
        self.ranks = ranks
        self.upcoming: Batch | None = None
        self.failure: Exception | None = None
        self.format: RowFormat | None = None
        self._batches = batches
        self._width = 0  # rows per rank, once that is settled
        self._last: Batch | None = None
        self.read()

    @property
    def rows_per_rank(self) -> int:
        """How many rows each rank gets of the first batch, the last of them filled up."""
        rows = 0 if self.upcoming is None else len(self.upcoming.weights)
        return -(-rows // len(self.ranks))

    def settle(self, rows_per_rank: int, like: Batch | None) -> None:
        """Takes on what all streams have agreed on.

        Args:
            rows_per_rank: what every batch is filled up to; no later one may have more.
            like: a batch of no rows, of the form that all batches have.
        """
        self._width = rows_per_rank
        if like is None:  # no stream has anything
            return
        self.format = self.format or describe_batch(like)
        self._last = self._deal(like)
        if self.upcoming is not None:
            self.upcoming = self._deal(self.upcoming)

    def take(self) -> Batch:
        """The next rows: `Shards` of data and ids, weights `[rows_per_rank * len(ranks)]`."""
        assert self._last is not None  # it has been settled
        if self.upcoming is None:
            return replace(self._last, weights=np.zeros_like(self._last.weights))
        self._last = self.upcoming
        self.read()
        return self._last

    def read(self) -> None:
        """Reads one batch ahead."""
        self.upcoming = None
        try:
            batch = self._check(next(self._batches))
            # before the stream is asked for more, or any other one is
            self.upcoming = self._deal(batch) if self._width else jax.tree.map(np.array, batch)
        except StopIteration:
            self._batches = iter(())
        except Exception as error:  # somebody else's code: it is raised on every rank
            self.failure = error
            self._batches = iter(())

    def _check(self, batch: Any) -> Batch:
        check_batch("join_batches: a stream must yield Batches", batch)
        batch = jax.tree.map(np.asarray, batch)
        rows, most = len(batch.weights), self._width * len(self.ranks)
        if most and rows > most:
            raise ValueError(
                f"join_batches: a batch must have at most the {most} rows of the first one, "
                f"got {rows}. Put full batches first and the short one last."
            )
        if rows:  # what no rows would look like does not matter
            described = describe_batch(batch)
            self.format = self.format or described
            check_format("join_batches", described, self.format)
        check_batch_values(batch, caller="join_batches")
        return Batch(batch.data, device_ids(batch.ids, caller="join_batches"), batch.weights)

    def _deal(self, batch: Batch) -> Batch:
        """The batch's rows in memory of this process's own; the last ones again if it has none."""
        if not len(batch.weights) and self._last is not None:
            return replace(self._last, weights=np.zeros_like(self._last.weights))
        return deal_rows(batch, len(self.ranks), self._width)
