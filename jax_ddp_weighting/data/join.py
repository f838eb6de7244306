"""Ranks that run out of data at different times: their streams as steps that all of them take."""

import base64
import json
import pickle
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jax_ddp_weighting._arguments import check_at_least, list_some
from jax_ddp_weighting.data.batch import Batch
from jax_ddp_weighting.data.shards import place_dealt
from jax_ddp_weighting.data.stopping import (
    ENDED,
    FAILED,
    GOES_ON,
    MOST_WIDTHS,
    STOPS,
    Stopping,
    find_rows,
    find_width,
    raise_failure,
)
from jax_ddp_weighting.data.streams import Stream
from jax_ddp_weighting.data.watching import Watch
from jax_ddp_weighting.distributed import coordination
from jax_ddp_weighting.distributed.coordination import Meeting, find_differences, name_ranks
from jax_ddp_weighting.distributed.mesh import AxisName
from jax_ddp_weighting.distributed.placement import RankPlacement, name_holders

JOIN_CONVENTIONS = ("example", "active_ranks", "initial_ranks", "shortest", "cycle")
"""Where ranks have unequal data, or none any more: what a step's gradient is divided by, or whether
all stop with the first stream that ends, or have it begin again."""


def join_batches(
    batches: Iterable[Batch] | Sequence[Iterable[Batch]],
    mesh: Mesh,
    *,
    convention: str = "example",
    sizes: Sequence[int] | None = None,
    name: str = "",
    axis_name: AxisName = "data",
    timeout_s: float = coordination.WAIT_S,
) -> Iterator[Batch]:
    """Streams of unknown and different length as global batches: steps that all ranks take.

    The rule: a stream that has ended goes on with rows of weight 0 until all have, so every rank
    takes every step and its optimizer state stays the others'. What a step is divided by, or what
    becomes of a stream that has ended, is `convention`:

    - "example": the weight of all rows: each row counts as its weight. The right one, mostly.
    - "active_ranks": ranks that still have rows: the mean of their means (torch's Join with
      `divide_by_initial_world_size=False`).
    - "initial_ranks": all ranks, ended ones too: what is left pulls less and less (torch's
      default).
    - "shortest": as "example", and all stop with the stream that ends first. What the others have
      left is not read: an epoch of theirs is not whole.
    - "cycle": as "example", and a stream that ends begins again until all are through: its rows
      count again, so short streams count for more. Streams must be lists, or objects whose
      `__iter__` begins anew; one without rows has none to begin with.

    "active_ranks" and "initial_ranks" rescale the rows' weights to one vote a stream. They do so
    per row: under a loss that multiplies in weights of its own, per token, a stream has as many
    votes as its rows have tokens on average. A stream whose rows all weigh 0 in a step has no mean
    to vote with.
    Under "initial_ranks" the votes that are missing are in `Batch.missing`, which `value_and_grad`
    and the training steps count in; your own reduction must too. It is a rule for gradients: a
    metric has no rows to divide by where a rank is gone, so join what is to be evaluated by
    "example": "shortest" and "cycle" count rows never, and again.

    Whether anybody goes on is agreed by the devices, one step ahead: the greatest of a number of
    each rank is started before the step that runs meanwhile and read after it, so the devices never
    wait for the host. The first batches' form, and a failure, go through the coordination service.

    What a stream yields is copied before it is asked for more: it may fill one buffer over and
    over. A batch of no rows is a step in which the stream has nothing, and counts as weight 0.
    In the loop each stream has been read one batch further than the batch that was handed out: what
    a loader knows of its own position, such as torchdata's, is that of the next step. Our samplers
    ask for `consumed=` there.

    All steps have the rows of the first one, unless `sizes` are stated: then each has the least of
    them that holds the most rows of any rank, so that batches may grow and shrink, as those of a
    budget of tokens do, and a step compiles once for each size, known before. Which one it is, the
    devices say together with whether anybody goes on.

    If a stream raises, or changes form, every rank takes the steps before, and then every rank
    raises an error that names the rank, the step and the message. If a process does not come to a
    step at all, the others name it after `timeout_s`, and at most a quarter of that or 10 s more:
    it was killed, has left the loop, or is slow. After that the devices are not to be used again.

    Whatever the loop reads meanwhile: to one that reads each step's loss, a step is handed out only
    once all processes have come to it. What is left is
    a process that takes a batch and then leaves the loop without running the step. The others wait
    for it in that step's collective, inside XLA, where nothing can be raised; there the logger
    `jax_ddp_weighting.join` names it in time, at level ERROR, and the error of the collective's own
    library comes when that gives up.

    What JAX itself does when a process is killed: over gloo, some of the others, not all, get an
    error from whatever array they read next; `heartbeat_timeout_seconds` later (100, unless
    `jax.distributed.initialize` was told otherwise) all are ended; at once, if it was process 0.

    Args:
        batches: this process's stream of host `Batch`es, whose rows its ranks share; or a sequence
            of such streams, one for each of its ranks on the mesh, in order. The first batches'
            rows, the most of any rank, are what all batches are filled up to. Processes that share
            a rank, on a mesh of further axes, must give it the same stream.
        mesh: a mesh with the axis.
        convention: "example", "active_ranks", "initial_ranks", "shortest" or "cycle"; the same on
            every process.
        sizes: rows per rank that a step may have, ascending, such as ``[4, 8, 16]``; the same on
            every process. Only those of the first batches by default.
        name: what this is a stream of, such as ``"epoch 3"``; the same on every process. It tells
            apart processes that have opened unequally many streams so far.
        axis_name: the data axis.
        timeout_s: how many seconds to wait for other processes, at the first batch and at a step.

    Returns:
        An iterator of global batches, every leaf sharded over the axis; as many as the longest
        stream has, or the shortest. Weights are as they came, or float32 votes.

    Raises:
        TypeError: `batches` cannot be iterated, or with "cycle" not again.
        ValueError: the convention is unknown, sizes are not ascending, the mesh lacks the axis,
            holds no device of this process or not one for each stream, or `timeout_s` is not above
            0. At once, not at the first batch.
        RuntimeError: while iterating: a rank's stream failed, the first batches have different
            forms, or a process is not there.

    Matches:
        torch 2.13.0's `Join` over `DistributedDataParallel`, in what gradients are divided by.

    Example:
        >>> long = [Batch.of(np.array([1.0, 2.0])), Batch.of(np.array([3.0]))]
        >>> for batch in join_batches(long, data_mesh(1)):
        ...     print(batch.data.tolist(), batch.weights.tolist())
        [1.0, 2.0] [1, 1]
        [3.0, 3.0] [1, 0]
        >>> growing = [Batch.of(np.arange(float(rows))) for rows in (1, 3, 2)]
        >>> for batch in join_batches(growing, data_mesh(1), sizes=[2, 4]):
        ...     print(batch.weights.tolist())
        [1, 0]
        [1, 1, 1, 0]
        [1, 1]
    """
    if convention not in JOIN_CONVENTIONS:
        raise ValueError(
            f"join_batches: convention must be one of {', '.join(JOIN_CONVENTIONS)}, got "
            f'{convention!r}. "example" counts every row as its weight.'
        )
    widths = _check_sizes(sizes)
    timeout_s = coordination.check_timeout("join_batches: timeout_s", timeout_s)
    placement = RankPlacement.here(mesh, axis_name, caller="join_batches")
    ranks = placement.local
    if not isinstance(batches, Iterable):
        raise TypeError(
            f"join_batches: batches must be a stream or several, got {type(batches).__name__}. A "
            "stream is anything that yields Batches."
        )
    several = _split_streams(batches, ranks)
    streams: list[tuple[Any, tuple[int, ...]]]
    if several is None:
        streams = [(batches, ranks)]
    else:
        streams = [(each, (rank,)) for each, rank in zip(several, ranks, strict=True)]
    if convention == "cycle":
        for stream, _ in streams:
            _check_begins_again(stream)
    meeting = coordination.next_meeting("join", jax.process_index(), placement.processes, timeout_s)
    sizes_text = ", ".join(map(str, widths)) or "those of the first batches"
    compared = {"convention": convention, "name": name, "sizes": sizes_text}
    return _join(streams, placement, meeting, compared, widths, timeout_s)


def _check_sizes(sizes: Sequence[int] | None) -> tuple[int, ...]:
    if sizes is None:
        return ()
    remedy = "They are rows per rank."
    widths = tuple(check_at_least("join_batches: sizes", each, 1, remedy) for each in sizes)
    if not widths or list(widths) != sorted(set(widths)) or len(widths) > MOST_WIDTHS:
        raise ValueError(
            f"join_batches: sizes must be 1 to {MOST_WIDTHS} different numbers in ascending order, "
            f"got {list_some(widths) or 'none'}. A step compiles once for each."
        )
    return widths


def _check_begins_again(stream: Iterable[Any]) -> None:
    if isinstance(stream, Iterator):
        raise TypeError(
            'join_batches: a stream must begin again with convention="cycle", got '
            f"{type(stream).__name__}, which can be read but once. Give a list, or an object whose "
            "__iter__ begins anew."
        )


def _split_streams(batches: Any, ranks: tuple[int, ...]) -> Sequence[Any] | None:
    """The streams of a sequence of them; None where `batches` is one stream."""
    if not isinstance(batches, list | tuple) or not batches:
        return None
    if not all(isinstance(each, Iterable) for each in batches):
        return None
    if len(batches) != len(ranks):
        raise ValueError(
            "join_batches: batches must be one stream, or one for each rank of this process, got "
            f"{len(batches)} streams for {name_ranks(ranks)}. An empty list is a rank without data."
        )
    return batches


def _join(
    given: list[tuple[Iterable[Any], tuple[int, ...]]],
    placement: RankPlacement,
    meeting: Meeting,
    compared: dict[str, str],
    widths: tuple[int, ...],
    timeout_s: float,
) -> Iterator[Batch]:
    convention = compared["convention"]
    streams = [Stream(stream, ranks, again=convention == "cycle") for stream, ranks in given]
    (state, width), widths = _open(streams, placement, meeting, compared, widths, timeout_s)
    at_shortest = convention == "shortest"
    stopping = Stopping(streams, placement, meeting, timeout_s, widths, at_shortest=at_shortest)
    watch = Watch(
        "join_batches", meeting, placement, timeout_s, lambda step: stopping.is_known_to_end()
    )
    step = 0
    try:
        while state == GOES_ON:
            rows = [stream.take(widths[width]) for stream in streams]
            taken = [_give_votes(each, convention) for each in rows]
            batch = place_dealt(taken, placement)
            # asked before the step that the caller runs on this batch, and read after, unless it
            # can be known before without a wait
            stopping.ask()
            stopping.wait_for_all(step + 1)
            watch.enter(step)
            yield batch
            step += 1
            state, width = stopping.read(step)
    except GeneratorExit:  # by a break, or an error in the loop
        watch.leave()
        raise
    finally:
        watch.end()
    if state == FAILED:
        raise_failure(streams, meeting, placement, step, timeout_s)


def _give_votes(rows: Batch, convention: str) -> Batch:
    """The rows with the weights that the convention gives them."""
    if convention in ("example", "shortest", "cycle"):
        return rows
    total = rows.weights.sum(dtype=np.float64)
    # in float64, and float32 last: a stream's votes add up to one, whatever its weights were
    votes = (rows.weights / total if total else rows.weights).astype(np.float32)
    missing = None
    if convention == "initial_ranks":
        missing = np.zeros_like(votes)
        missing[0] = 0 if total else 1  # the stream's one vote, which nobody casts
    return Batch(rows.data, rows.ids, votes, missing)


# --- the first batches ----------------------------------------------------------------------------


def _open(
    streams: list[Stream],
    placement: RankPlacement,
    meeting: Meeting,
    compared: dict[str, str],
    widths: tuple[int, ...],
    timeout_s: float,
) -> tuple[tuple[int, int], tuple[int, ...]]:
    """Agrees with the other processes on what batches look like.

    Returns:
        The first state and which of the widths the first step has; and the widths.
    """
    # A process without any rows must make arrays like the others', of this structure and form; a
    # batch of no rows is the last to ask.
    there = [stream for stream in streams if stream.upcoming is not None]
    there.sort(key=lambda stream: stream.format is None)
    like = [jax.tree.map(lambda x: x[:0], stream.upcoming) for stream in there]
    said = {
        "compared": compared,
        "rows": find_rows(streams),
        "goes on": bool(there),
        "ended": any(stream.ended for stream in streams),
        "failed": any(stream.failure for stream in streams),
        "forms": {stream.ranks[0]: stream.format for stream in streams if stream.format},
        "like": _pack(like[0]) if like else None,
    }
    most = widths[-1] if widths else None
    judge = partial(_judge_opening, placement=placement, most=most, timeout_s=timeout_s)
    concluded = json.loads(meeting.conclude(json.dumps(said), judge, timeout_s=timeout_s))
    if concluded["trouble"]:
        raise RuntimeError(concluded["trouble"])
    widths = widths or (max(1, concluded["rows"]),)
    for stream in streams:
        stream.settle(widths, _unpack(concluded["like"]))
    state = GOES_ON if concluded["goes on"] else ENDED
    if concluded["ended"] and compared["convention"] == "shortest":
        state = STOPS
    if concluded["failed"]:
        state = FAILED
    return (state, find_width(concluded["rows"], widths)), widths


def _judge_opening(
    said: dict[int, str], *, placement: RankPlacement, most: int | None, timeout_s: float
) -> str:
    each = {process: json.loads(text) for process, text in said.items()}
    absent = [process for process in placement.processes if process not in said]
    forms = {int(rank): form for one in each.values() for rank, form in one["forms"].items()}
    compared = {process: one["compared"] for process, one in each.items()}
    trouble = ""
    if absent:
        trouble = (
            f"join_batches: {name_holders(absent, placement)} absent, without a first batch after "
            f"{timeout_s:g} s. Look at the logs of the absent: they are gone or slow; timeout_s "
            "gives more time."
        )
    elif differences := [*find_differences(compared, "process"), *find_differences(forms)]:
        trouble = (
            f"join_batches: all ranks must have one form of rows and one convention, got "
            f"{'; '.join(differences)}. Pad rows to one shape, and give them one dtype."
        )
    elif most is not None and (rows := max(one["rows"] for one in each.values())) > most:
        trouble = (
            f"join_batches: a batch must have at most {most} rows per rank, the largest of sizes, "
            f"got {rows}. State a larger one."
        )
    with_rows_first = sorted(each.values(), key=lambda one: not one["forms"])
    likes = [one["like"] for one in with_rows_first if one["like"]]
    return json.dumps(
        {
            "trouble": trouble,
            "failed": any(one["failed"] for one in each.values()),
            "rows": max(one["rows"] for one in each.values()),
            "goes on": any(one["goes on"] for one in each.values()),
            "ended": any(one["ended"] for one in each.values()),
            "like": likes[0] if likes else None,
        }
    )


def _pack(like: Batch) -> str:
    # Only processes of one job read it. A pickle, since nothing else holds any pytree.
    return base64.b64encode(pickle.dumps(like)).decode()


def _unpack(text: str | None) -> Batch | None:
    return None if text is None else pickle.loads(base64.b64decode(text))
