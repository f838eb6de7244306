"""What each process knows, told to all of them: messages, errors, and rows a chunk at a time.

Everything travels as bytes through one all-gather whose shape every process agrees on beforehand,
because JAX's own gather of host values cuts int64 to int32, refuses strings, and aborts the process
on unequal shapes.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_ddp_weighting.distributed.waiting import AbsentError, Waiting

_FRAME = 4096  # bytes of a message's first frame
_HEADER = 8  # of them for its length
# Bytes a process sends at once: gloo's best between 2**16 and 2**24 (benchmarks/evaluation.py).
_CHUNK = 1 << 20
_ALIGNED = 16  # rows per chunk are a multiple of it, so that every column starts aligned


@cache
def _one_device_each() -> tuple[Mesh, Any, Any]:
    """A mesh of one device per process, this process's device, and the compiled all-gather."""
    first: dict[int, Any] = {}
    for device in jax.devices():
        first.setdefault(device.process_index, device)
    mesh = Mesh(np.array([first[p] for p in sorted(first)]), ("processes",))
    there = NamedSharding(mesh, PartitionSpec("processes"))
    everywhere = NamedSharding(mesh, PartitionSpec())
    # XLA's CPU client runs what it thinks cheap in the thread that starts it, where nothing could
    # bound the wait for the others. A copy is cheap to it, whatever its size; a maximum is not.
    gather = jax.jit(lambda x: (x, x.max(axis=1)), out_shardings=(everywhere, there))
    return mesh, first[jax.process_index()], gather


def allgather_bytes(sent: np.ndarray, waiting: Waiting) -> np.ndarray:
    """What every process sent, on every process.

    Args:
        sent: uint8 `[bytes]`, of the same length on every process, at least a frame's.
        waiting: bounds the wait for the others.

    Returns:
        uint8 `[processes, bytes]`, read-only.
    """
    if waiting.alone:
        return sent[None]

    def start() -> jax.Array:
        mesh, device, gather = _one_device_each()
        stacked = jax.make_array_from_single_device_arrays(
            (mesh.size, len(sent)),
            NamedSharding(mesh, PartitionSpec("processes")),
            [jax.device_put(sent[None], device)],
        )
        return gather(stacked)[0].addressable_data(0)

    if not _one_device_each.cache_info().currsize:  # the first use of a device waits for all
        waiting.wait(lambda: None, lambda _: jax.devices())
    # reading waits for all; after that `sent` may be written again
    return waiting.wait(start, np.asarray)


def allgather_messages(message: Any, waiting: Waiting) -> list[Any]:
    """The message of every process, in process order, on every process.

    Args:
        message: anything that JSON holds.
        waiting: bounds the wait for the others.
    """
    if waiting.alone:
        return [message]
    text = json.dumps(message).encode()
    # Every process must gather the same number of bytes before it can know how many others have. So
    # all send one frame of a fixed size, which says how long the message is, and then the rests.
    head, tail = text[: _FRAME - _HEADER], text[_FRAME - _HEADER :]
    frame = len(text).to_bytes(_HEADER, "little") + head
    frames = allgather_bytes(np.frombuffer(frame.ljust(_FRAME), np.uint8), waiting)
    lengths = [int.from_bytes(each[:_HEADER].tobytes(), "little") for each in frames]
    whole = [each[_HEADER:].tobytes() for each in frames]
    rest = max(lengths) - (_FRAME - _HEADER)
    if rest > 0:  # a power of two, so that few lengths are ever compiled
        padded = tail.ljust(max(_FRAME, 1 << (rest - 1).bit_length()))
        tails = allgather_bytes(np.frombuffer(padded, np.uint8), waiting)
        whole = [first + each.tobytes() for first, each in zip(whole, tails, strict=True)]
    return [json.loads(each[:length]) for each, length in zip(whole, lengths, strict=True)]


class Round:
    """What each process has to say in one block of `together`."""

    def __init__(self) -> None:
        self._message: Any = None
        self.heard: list[Any] = []

    def tell(self, message: Any) -> None:
        """What the others will have heard once the block has ended; JSON holds it."""
        self._message = message


@contextmanager
def together(waiting: Waiting, *raised_as_they_are: type[Exception]) -> Iterator[Round]:
    """A block that fails on every process where it fails on one, so that none waits for another.

    The process where it failed raises its own error; the others raise one that names the process:
    of the same type where that is `TypeError`, `ValueError` or one of those given, and else a
    `RuntimeError`. Where it fails on none, all have `heard` each other in process order. Every
    process must reach the block's end; one that does not is named in time.

    Args:
        waiting: bounds the wait for the others.
        raised_as_they_are: further types of error that one message makes.
    """
    here = Round()
    failure: Exception | None = None
    # No early exit: a process that failed still takes part in the exchange below, or the others
    # would wait in it. Only an Exception is held back; Ctrl-C is not to wait for anybody.
    try:
        yield here
    except AbsentError:
        raise  # there is nobody to tell it to
    except Exception as error:  # whatever it is, the others wait to be told; it is raised below
        failure = error
    told = None if failure is None else [type(failure).__name__, str(failure)]
    everyone = allgather_messages([told, None if told else here._message], waiting)
    if failure is not None:
        raise failure
    for process, (failed, message) in enumerate(everyone):
        if failed is not None:
            name, text = failed
            where = f"(raised on process {process})"
            for kind in (TypeError, ValueError, *raised_as_they_are):
                if name == kind.__name__:
                    raise kind(f"{text} {where}")
            raise RuntimeError(f"{name}: {text} {where}")
        here.heard.append(message)


Columns = list[np.ndarray]
"""Arrays of one number of rows."""


RowsLike = Sequence[tuple[np.dtype, tuple[int, ...]]]
"""The dtype and the shape of a row of each column."""


def row_bytes(like: RowsLike) -> int:
    """The bytes of a row over all columns."""
    return sum(dtype.itemsize * int(np.prod(shape)) for dtype, shape in like)


def rows_per_chunk(row_bytes: int) -> int:
    """How many rows of so many bytes a process sends at once."""
    return max(1, _CHUNK // (max(1, row_bytes) * _ALIGNED)) * _ALIGNED


def allgather_rows(
    pieces: Iterable[Columns],
    counts: Sequence[int],
    like: RowsLike,
    put: Callable[[int, Columns], None],
    waiting: Waiting,
) -> None:
    """Every process's rows, on every process, in chunks of a bounded size.

    The rule: what fails in `pieces` or in `put` fails here and alone, when all rows have travelled:
    the others wait for them. `together` tells them then.

    Args:
        pieces: this process's rows, a few at a time; in all `counts[process]` of them.
        counts: how many rows each process has; the same on every process.
        like: the dtype and the shape of a row, for each column; the same on every process.
        put: called as `put(place, columns)` with some rows, and the place of the first of them in
            the numbering that counts all rows of process 0, then those of process 1, and so on. The
            columns may be overwritten afterwards.
        waiting: bounds the wait for the others.
    """
    if waiting.alone:
        place = 0
        for columns in pieces:
            put(place, columns)
            place += len(columns[0])
        return
    # a power of two where there are few rows, so that few lengths are ever compiled
    most = max(counts, default=0)
    size = min(rows_per_chunk(row_bytes(like)), max(_ALIGNED, 1 << (most - 1).bit_length()))
    firsts = np.cumsum([0, *counts])
    with together(waiting):  # a process without the memory for it is not to be waited for
        # one buffer for all chunks: allgather_bytes has read it when it returns
        buffer = np.zeros(max(_FRAME, size * row_bytes(like)), np.uint8)
    own, chunks = _columns_in(buffer, size, like), _chunks(pieces, size)
    failure: Exception | None = None

    def fill() -> None:
        filled = 0
        for columns in next(chunks, ()):  # nothing any more on processes that have fewer rows
            stop = filled + len(columns[0])
            for into, column in zip(own, columns, strict=True):
                into[filled:stop] = column
            filled = stop

    def take(start: int, everything: np.ndarray) -> None:
        for process, received in enumerate(everything):
            here = min(size, counts[process] - start)
            if here > 0:
                columns = _columns_in(received, size, like)
                put(int(firsts[process]) + start, [column[:here] for column in columns])

    for start in range(0, most, size):
        # Once something has failed here, memory most likely, the rest is sent for the others' sake.
        try:
            if failure is None:
                fill()
        except Exception as error:  # raised below
            failure = error
        received = allgather_bytes(buffer, waiting)
        try:
            if failure is None:
                take(start, received)
        except Exception as error:  # raised below
            failure = error
    if failure is not None:
        raise failure


def _columns_in(buffer: np.ndarray, size: int, like: RowsLike) -> Columns:
    """Views of a buffer: `size` rows of the first column, then of the second, and so on."""
    columns, start = [], 0
    for dtype, shape in like:
        stop = start + size * dtype.itemsize * int(np.prod(shape))
        if stop > start:
            columns.append(buffer[start:stop].view(dtype).reshape(size, *shape))
        else:  # rows of no bytes: a width of 0, or strings that are all empty
            columns.append(np.zeros((size, *shape), dtype))
        start = stop
    return columns


def _chunks(pieces: Iterable[Columns], size: int) -> Iterator[list[Columns]]:
    """The pieces, cut and grouped so that each group but the last has `size` rows."""
    group: list[Columns] = []
    room = size
    for columns in pieces:
        while len(columns[0]):
            group.append([column[:room] for column in columns])
            columns = [column[room:] for column in columns]
            room -= len(group[-1][0])
            if not room:
                yield group
                group, room = [], size
    if group:
        yield group
