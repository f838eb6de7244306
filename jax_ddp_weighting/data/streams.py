"""One rank's stream of batches of its own: read one ahead, copied, filled up, gone on with."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from jax_ddp_weighting.data.batch import Batch, check_batch, check_batch_values
from jax_ddp_weighting.data.row_format import RowFormat, check_format, describe_batch
from jax_ddp_weighting.data.shards import deal_rows
from jax_ddp_weighting.distributed.placement import device_ids

_END = object()  # a stream may yield anything, and is told what it should


class Stream:
    """A stream, read one batch ahead of the one that is given out.

    The rule: what the stream hands over is copied before anything else is read, for it may fill one
    buffer over and over, or share one with another stream. A stream that has ended goes on with its
    last rows at weight 0, and so does one that yields a batch of no rows; one that has failed says
    so once, and is not read again. A batch short of rows is filled up with rows of weight 0.

    Args:
        batches: the stream, of `Batch`es on the host.
        ranks: the ranks that share its rows.
        again: begin it again where it ends, if it had any rows.

    Attributes:
        upcoming: the batch read ahead, None if there is none; a copy.
        through: whether it has been read to its end, and begun again.
        failure: what went wrong in reading it, None if nothing did.
        format: what its rows look like, None if it has had none.
        undelivered: the rows of the batch read ahead, or nothing; a sampler that is read through
            the stream looks at it, for what it has yielded is further than training.
    """

    def __init__(
        self, batches: Iterable[Any], ranks: tuple[int, ...], *, again: bool = False
    ) -> None:
        self.ranks = ranks
        self.upcoming: Batch | None = None
        self.through = False
        self.failure: Exception | None = None
        self.format: RowFormat | None = None
        self._batches = iter(batches)
        self._again = batches if again else None
        self._had_rows = False
        self.undelivered: list[int] = []
        self._widths: tuple[int, ...] = ()  # rows per rank of a step, once they are settled
        self._last: Batch | None = None
        self.read()

    @property
    def ended(self) -> bool:
        """Whether it has given every batch of its own."""
        return self.upcoming is None or self.through

    @property
    def rows_per_rank(self) -> int:
        """How many rows each rank gets of the batch read ahead, the last of them filled up."""
        return -(-sum(self.undelivered) // len(self.ranks))

    def settle(self, widths: tuple[int, ...], like: Batch | None) -> None:
        """Takes on what all streams have agreed on.

        Args:
            widths: the rows per rank that a step may have, ascending; no batch may have more.
            like: a batch of no rows, of the form that all batches have.
        """
        self._widths = widths
        if like is None:  # no stream has anything
            return
        self.format = self.format or describe_batch(like)
        self._last = self._hold(like)
        if self.upcoming is not None:
            self.upcoming = self._hold(self.upcoming)

    def take(self, width: int) -> Batch:
        """The next rows: `Shards` of data and ids, weights `[width * len(ranks)]`."""
        assert self._last is not None  # it has been settled
        if self.upcoming is None:
            return self._deal(_weigh_nothing(self._last), width)
        self._last = self.upcoming
        self.read()
        return self._deal(self._last, width)

    def read(self) -> None:
        """Reads one batch ahead."""
        self.upcoming = None
        self.undelivered.clear()
        try:
            batch = self._read_one()
            if batch is None:
                return
            self.undelivered.append(len(batch.weights))
            # before the stream is asked for more, or any other one is
            self.upcoming = self._hold(batch) if self._widths else jax.tree.map(np.array, batch)
        except Exception as error:  # somebody else's code: it is raised on every rank
            self.failure = error
            self._batches = iter(())

    def _read_one(self) -> Batch | None:
        batch = next(self._batches, _END)
        if batch is not _END:
            return self._check(batch)
        self._batches = iter(())
        if self._again is None or not self._had_rows:  # one without rows would begin for ever
            return None
        self.through = True
        self._batches = iter(self._again)
        batch = next(self._batches, _END)
        if batch is not _END:
            return self._check(batch)
        raise ValueError(
            'join_batches: a stream must begin again with convention="cycle", got no batch the '
            "second time. Give a list, or an object whose __iter__ begins anew."
        )

    def _check(self, batch: Any) -> Batch:
        check_batch("join_batches: a stream must yield Batches", batch)
        batch = jax.tree.map(np.asarray, batch)
        rows = len(batch.weights)
        if self._widths and rows > self._widths[-1] * len(self.ranks):
            most = self._widths[-1] * len(self.ranks)
            raise ValueError(
                f"join_batches: a batch must have at most the {most} rows of the first one, or of "
                f"the largest of sizes, got {rows}. Put full batches first, or state larger sizes."
            )
        if rows:  # what no rows would look like does not matter
            self._had_rows = True
            described = describe_batch(batch)
            self.format = self.format or described
            check_format("join_batches", described, self.format)
        check_batch_values(batch, caller="join_batches")
        return Batch(batch.data, device_ids(batch.ids, caller="join_batches"), batch.weights)

    def _hold(self, batch: Batch) -> Batch:
        """The batch's rows in memory of this process's own; the last ones again if it has none."""
        if not len(batch.weights) and self._last is not None:
            return _weigh_nothing(self._last)
        if len(self._widths) == 1:
            return deal_rows(batch, len(self.ranks), self._widths[0])
        return jax.tree.map(np.array, batch)  # how wide its step is depends on other ranks

    def _deal(self, batch: Batch, width: int) -> Batch:
        """What is held, dealt to the ranks, if it is not yet."""
        if len(self._widths) == 1:
            return batch
        most = width * len(self.ranks)  # only rows that weigh nothing can be more
        some = jax.tree.map(lambda column: column[:most], batch)
        return deal_rows(some, len(self.ranks), width)


def _weigh_nothing(batch: Batch) -> Batch:
    return replace(batch, weights=np.zeros_like(batch.weights))
