"""Streams of unknown length, dealt out to ranks and to their loaders' workers, with a position."""

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from itertools import islice
from multiprocessing.context import get_spawning_popen
from multiprocessing.sharedctypes import RawArray
from typing import Any

from jax_ddp_weighting._arguments import (
    MAX_EXAMPLES,
    check_at_least,
    check_below,
    check_epoch,
    check_integer,
    check_num_replicas,
    check_rank,
)
from jax_ddp_weighting.sampling.reading import Reader, find_batch_size

_VERSION = 1
_OF_PROCESS = ("_owner", "_shared")

# What the process that trains and its loader's workers tell one another, as int64: how often a
# place was chosen, and which; for which choice workers read another pass; how many items their
# loader batches, where that is not what was told; and, by worker, for which choice it began.
_CHOICE, _EPOCH, _START, _AGAIN, _BATCHED, _BEGUN = range(6)
_MOST_WORKERS = 1024


class ShardedIterable:
    """One rank's share of a stream whose length nobody knows, and of its loader's workers'.

    The rule: from its position on, item ``i`` of the stream goes to rank ``i % num_replicas``; of
    a rank's items, worker ``w`` of ``k`` gets every ``k``-th run of `batch_size`, so that a loader
    with `batch_size` hands them out in the stream's own order. With ``batch_size=1`` this is item
    ``i % (num_replicas * workers)``. All ranks read the whole stream and keep their share: it must
    be the same on all. Shares differ by one item at most, and nobody knows before whose is longer:
    feed steps through `join_batches`, which reads one batch ahead. Items have no ids: what was read
    is counted by position. Workers that stay from epoch to epoch are told of `set_epoch` and
    `load_state_dict` when they begin to read.

    Args:
        source: what to read: an iterable that begins anew each time, whose `set_epoch` is called
            if it has one, or a function of the epoch that returns one. It is the same stream on
            every rank and worker.
        num_replicas: number of ranks; JAX's process count by default.
        rank: this rank; JAX's process index by default.
        batch_size: items that the loader puts in a batch, where it has workers. With another
            number they read in another order than the stream's, of which no `consumed` can tell.

    Raises:
        TypeError: the source cannot be iterated, or but once; or a number is none.
        ValueError: a number is out of range.

    Example:
        >>> shares = [ShardedIterable("abcdefg", 2, rank) for rank in (0, 1)]
        >>> [list(share) for share in shares]
        [['a', 'c', 'e', 'g'], ['b', 'd', 'f']]
        >>> reading = iter(shares[0])
        >>> next(reading), next(reading), shares[0].state_dict()
        ('a', 'c', {'version': 1, 'epoch': 0, 'position': 4})
        >>> rest = [ShardedIterable("abcdefg", 3, rank) for rank in range(3)]
        >>> for share in rest: share.load_state_dict(shares[0].state_dict())
        >>> [list(share) for share in rest]
        [['e'], ['f'], ['g']]
    """

    def __init__(
        self,
        source: Iterable[Any] | Callable[[int], Iterable[Any]],
        num_replicas: int | None = None,
        rank: int | None = None,
        *,
        batch_size: int = 1,
    ) -> None:
        if isinstance(source, Iterator) or not (callable(source) or isinstance(source, Iterable)):
            what = "can be read but once" if isinstance(source, Iterator) else "cannot be read"
            raise TypeError(
                "ShardedIterable: source must be an iterable that begins anew, or a function of"
                f" the epoch that returns one, got {type(source).__name__}, which {what}. Give"
                " the function that makes it."
            )
        if num_replicas is None or rank is None:
            import jax  # only who asks for JAX's ranks pays for it

            num_replicas = jax.process_count() if num_replicas is None else num_replicas
            rank = jax.process_index() if rank is None else rank
        self.source = source
        self.num_replicas = check_num_replicas("ShardedIterable: num_replicas", num_replicas)
        self.rank = check_rank("ShardedIterable: rank", rank, self.num_replicas)
        self.batch_size = check_at_least("ShardedIterable: batch_size", batch_size, 1)
        self.epoch = 0
        self._start = 0  # items of the stream that were read before
        self._taken = 0  # since then, by this rank, or this worker of it
        self._worker, self._workers = 0, 1  # who had taken them
        self._fresh = True  # whether nothing of the pass has been read
        self._ended = False
        self._reader = Reader()
        self._share_with_workers()

    def _share_with_workers(self) -> None:
        """A loader's workers read copies: what they and the process that made them must know."""
        self._owner = os.getpid()
        self._shared: Any = RawArray("q", _BEGUN + _MOST_WORKERS)
        self._shared[_CHOICE] = self._choice = 1
        self._shared[_EPOCH], self._shared[_START] = self.epoch, self._start

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next pass reads; from its start, unless it was resumed.

        Raises:
            TypeError: the epoch is no integer.
            ValueError: the epoch is negative.
        """
        epoch = check_epoch("ShardedIterable.set_epoch: epoch", epoch)
        if epoch != self.epoch:
            self.epoch, self._start, self._taken, self._fresh = epoch, 0, 0, True
            self._ended = False
            self._tell_workers()

    def _tell_workers(self) -> None:
        if os.getpid() == self._owner:
            self._shared[_EPOCH], self._shared[_START] = self.epoch, self._start
            self._shared[_BATCHED] = 0
            self._choice += 1
            self._shared[_CHOICE] = self._choice  # last: a worker looks at it first
        else:  # a state of a worker's own, which torchdata's loader has kept
            self._choice = self._shared[_CHOICE]
            self._shared[_BEGUN + _find_worker()[0]] = 0

    def _hear(self, worker: int, workers: int) -> None:
        """In a loader's worker: what was chosen since it was made, and what others are to know."""
        if worker >= _MOST_WORKERS:
            raise ValueError(
                f"ShardedIterable: a loader must have at most {_MOST_WORKERS} workers, got worker"
                f" {worker}."
            )
        shared = self._shared
        if shared[_CHOICE] != self._choice:  # this worker outlives an epoch
            self._choice, self.epoch = shared[_CHOICE], shared[_EPOCH]
            self._start, self._taken, self._fresh = shared[_START], 0, True
        if shared[_BEGUN + worker] == self._choice:  # its copy is new, and the pass is not
            self._fresh = False
        if not self._fresh:
            shared[_AGAIN] = self._choice
        shared[_BEGUN + worker] = self._choice
        batched = find_batch_size()
        if workers > 1 and batched is not None and batched != self.batch_size:
            shared[_BATCHED] = batched

    def __iter__(self) -> Iterator[Any]:
        worker, workers = _find_worker()
        return self._read(worker, workers)

    def _read(self, worker: int, workers: int) -> Iterator[Any]:
        if os.getpid() != self._owner:
            self._hear(worker, workers)
        if not self._fresh:  # another pass over the same epoch, from its start
            self._start, self._taken = 0, 0
        if self._taken and (self._worker, self._workers) != (worker, workers):
            raise ValueError(
                f"ShardedIterable: a state of worker {self._worker} of {self._workers} must be"
                f" loaded into that one, got worker {worker} of {workers}."
                " state_dict(consumed=...) serves any number of workers."
            )
        self._fresh, self._ended = False, False
        self._worker, self._workers = worker, workers
        self._reader.note()
        source: Any = self.source
        if hasattr(source, "set_epoch"):
            source.set_epoch(self.epoch)
        items = source if isinstance(source, Iterable) else source(self.epoch)
        mine = islice(items, self._start + self.rank, None, self.num_replicas)
        skipped, run, taken = self._taken, self.batch_size, 0
        for place, item in enumerate(mine):
            if place // run % workers != worker:
                continue
            taken += 1
            if taken > skipped:  # what this worker had given before its state was saved
                self._taken = taken
                yield item
        self._ended = True

    def state_dict(self, *, consumed: int | None = None) -> dict[str, Any]:
        """Where the stream is, as plain JSON-able values.

        In a loader's worker it is that worker's own, for the same worker of as many, as torchdata's
        loader keeps it. Else it serves every rank, and any number of ranks and workers. What a
        loader's workers read the training process cannot know: there `consumed` must be given.

        Args:
            consumed: items of this rank that training has really used since the pass began, or
                since the position that was loaded; the items of whole batches. Needed where items
                are read ahead, as by a loader with workers or by `join_batches`; those yielded by
                default.

        Raises:
            ValueError: `consumed` is out of range; or it is not given where items were read ahead,
                and so would be lost; or it is given where a loader's workers put another number of
                items in a batch than `batch_size`.
        """
        argument = "ShardedIterable.state_dict: consumed"
        state = {"version": _VERSION, "epoch": self.epoch}
        here = (self._worker, self._workers) if self._taken else _find_worker()
        if consumed is None and here[1] > 1:
            own = {"position": self._start, "taken": self._taken, "num_replicas": self.num_replicas}
            return state | own | dict(zip(("worker", "workers"), here, strict=True))
        ahead = self._reader.find_ahead()
        by_workers = os.getpid() == self._owner and self._choice in self._shared[_BEGUN:]
        if by_workers:
            ahead = "a loader's workers"
        if consumed is None and ahead is not None:
            raise ValueError(
                f"{argument} must be given where items are read ahead of training, here by {ahead},"
                " got None. It counts this rank's items that were used since the pass began."
                " Between epochs, call set_epoch first."
            )
        start = self._start
        if by_workers:
            batched = self._shared[_BATCHED]
            if batched:
                raise ValueError(
                    f"ShardedIterable: batch_size must be the loader's where it has workers, got"
                    f" {self.batch_size} and batches of {batched}. They read in another order than"
                    " the stream's, in which no position tells what was used."
                )
            start = 0 if self._shared[_AGAIN] == self._choice else start
        read = self._taken if consumed is None else check_at_least(argument, consumed, 0)
        if self._ended and read == self._taken:  # the others may have had one item more
            read += 1
        return state | {"position": start + read * self.num_replicas}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to where a state was saved: the next pass reads the rest of that epoch.

        What was read before is read again, and passed over: a stream has no other way there.

        Raises:
            TypeError: the state is no mapping, or a number in it is none.
            ValueError: the state is incomplete, or of another version; or one worker's of another
                number of ranks. Nothing was changed then.
        """
        function = "ShardedIterable.load_state_dict"
        if not isinstance(state, Mapping):
            raise TypeError(
                f"{function}: state must be a mapping, got {type(state).__name__}. state_dict"
                " gives one."
            )
        missing = [name for name in ("version", "epoch", "position") if name not in state]
        if missing or state["version"] != _VERSION:
            raise ValueError(
                f"{function}: state must hold version {_VERSION}, epoch and position, got"
                f" {dict(state)}. It is no state of this kind."
            )
        epoch = check_epoch(f"{function}: epoch", state["epoch"])
        start = check_integer(f"{function}: position", state["position"], 0, MAX_EXAMPLES)
        taken, worker, workers = 0, 0, 1
        if "taken" in state:
            taken = check_integer(f"{function}: taken", state["taken"], 0, MAX_EXAMPLES)
            workers = check_at_least(f"{function}: workers", state.get("workers"), 1)
            worker = check_below(f"{function}: worker", state.get("worker"), workers)
            if state.get("num_replicas") != self.num_replicas:
                raise ValueError(
                    f"{function}: num_replicas must be as when one worker's state was saved,"
                    f" {state.get('num_replicas')}, got {self.num_replicas}."
                    " state_dict(consumed=...) serves any number."
                )
        self.epoch, self._start, self._taken = epoch, start, taken
        self._worker, self._workers = worker, workers
        self._fresh, self._ended = True, False
        self._tell_workers()

    def __getstate__(self) -> dict[str, Any]:
        if get_spawning_popen() is not None:  # to a worker
            return self.__dict__
        return {name: value for name, value in self.__dict__.items() if name not in _OF_PROCESS}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        if "_owner" not in state:  # a copy, with workers of its own
            self._share_with_workers()

    def torch_dataset(self) -> Any:
        """This share as a ``torch.utils.data.IterableDataset``, which a DataLoader asks for."""
        return torch_dataset(self)

    def __repr__(self) -> str:
        return (
            f"ShardedIterable({type(self.source).__name__}, num_replicas={self.num_replicas},"
            f" rank={self.rank}, batch_size={self.batch_size}, epoch={self.epoch})"
        )


def _find_worker() -> tuple[int, int]:
    """Which of how many workers of torch's loader this process is; 0 of 1 where it is none."""
    torch_data = sys.modules.get("torch.utils.data")  # who has not imported it has no workers
    info = None if torch_data is None else torch_data.get_worker_info()
    return (0, 1) if info is None else (info.id, info.num_workers)


def torch_dataset(share: ShardedIterable) -> Any:
    """A share as torch's own class, which a DataLoader tells from a dataset with ids by its type.

    Args:
        share: the share; everything is asked of it, and its state too.

    Returns:
        A ``torch.utils.data.IterableDataset``. A pickle or a deep copy has a share of its own.
    """
    return _make_dataset_class()(share)


@cache
def _make_dataset_class() -> type:
    """The class, made when it is first asked for: torch is no dependency."""
    from torch.utils.data import (  # pyright: ignore[reportMissingImports]  # optional
        IterableDataset,
    )

    class TorchIterable(IterableDataset):
        def __init__(self, share: ShardedIterable) -> None:
            self.share = share

        def __iter__(self) -> Iterator[Any]:
            return iter(self.share)

        def set_epoch(self, epoch: int) -> None:
            self.share.set_epoch(epoch)

        def state_dict(self, **options: Any) -> dict[str, Any]:
            return self.share.state_dict(**options)

        def load_state_dict(self, state: Any) -> None:
            self.share.load_state_dict(state)

        def __reduce__(self) -> tuple[Any, ...]:
            return torch_dataset, (self.share,)  # the class is no module's: it is made again

        def __repr__(self) -> str:
            return f"torch_dataset({self.share!r})"

    return TorchIterable
