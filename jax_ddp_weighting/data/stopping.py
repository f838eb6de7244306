"""Whether any rank goes on, agreed by the devices a step ahead; if not, who is to blame."""

import json
import time
from bisect import bisect_left
from functools import cache
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from jax_ddp_weighting.data.streams import Stream
from jax_ddp_weighting.distributed import mesh as meshes
from jax_ddp_weighting.distributed.coordination import Meeting, find_grace, name_ranks
from jax_ddp_weighting.distributed.placement import RankPlacement, name_holders

ENDED, GOES_ON, STOPS, FAILED = range(4)
"""What a rank is about to do, in the order in which it decides for all."""

MOST_WIDTHS = 128
"""How many widths of steps there can be: they are told in a byte."""

# Two numbers would do. But XLA's CPU client runs small computations in the thread that asks for
# them, where nothing could bound the wait for the other processes.
_STATE_WIDTH = 4096


class Stopping:
    """Whether any rank goes on, asked of all for every step.

    Args:
        streams: this process's streams.
        placement: where the ranks are.
        meeting: the meeting of the streams of all processes.
        timeout_s: how long to wait for the other processes at a step.
        widths: the rows per rank that a step may have, ascending.
        at_shortest: whether the first stream that ends ends all.
    """

    def __init__(
        self,
        streams: list[Stream],
        placement: RankPlacement,
        meeting: Meeting,
        timeout_s: float,
        widths: tuple[int, ...],
        *,
        at_shortest: bool = False,
    ) -> None:
        self._streams = streams
        self._widths = widths
        self._at_shortest = at_shortest
        self._placement = placement
        self._meeting = meeting
        self._timeout_s = timeout_s
        self._alone = len(placement.processes) == 1
        self._placed: dict[tuple[int, int], jax.Array] = {}
        self._asked: Any = None  # state and width, or an array of both on its way
        self._waited = False  # for the answer, before the step
        # How often in a row the loop was seen to have waited for its step. Twice count, so that one
        # loss now and then does not; the first time does, since so far nothing is known.
        self._in_step = 1
        self._turn = self._look = 0  # steps so far, and when to look again

    def ask(self) -> None:
        """Asks for the greatest state of all ranks: it is then on its way from the devices."""
        state = find_state(self._streams, at_shortest=self._at_shortest)
        # apart from the state: one that is through, and begins again, has rows to make room for
        said = state, find_width(find_rows(self._streams), self._widths)
        if self._alone:
            self._asked = said
            return
        if said not in self._placed:  # of the few that there are
            each = np.repeat(np.array([said], np.int8), _STATE_WIDTH // 2, axis=1)
            self._placed[said] = self._placement.place(
                each.repeat(len(self._placement.local), axis=0)
            )
        everywhere = meshes.replicated_sharding(self._placement.mesh)
        self._asked = _greatest(everywhere)(self._placed[said])

    def wait_for_all(self, step: int) -> None:
        """Waits for the answer now, if that costs nothing; else leaves it to `read`.

        Where the loop reads each step's loss, the devices are idle by now, and the answer comes as
        soon as all processes have come to this step. So one that does not is named before the
        caller starts a step that would hang in a collective, where nothing but the collective's own
        limit could end it. Where the loop reads nothing the devices are busy with the step before:
        the host would wait for them, and does not; such a loop comes back by itself.

        Raises:
            RuntimeError: as `read`.
        """
        self._turn += 1
        self._waited = not self._alone and self._in_step >= 2 and self._turn != self._look
        if self._waited:
            self._wait(step)

    def read(self, step: int) -> tuple[int, int]:
        """The state that `ask` asked for, and which of the widths the next step has.

        Raises:
            RuntimeError: it has not come in time; names the processes that do not wait too.
        """
        if self._alone:
            return self._asked
        if not self._waited:
            self._learn()
            self._wait(step)
        state, width = np.asarray(self._asked.addressable_data(0)).tolist()
        return state, width

    def _learn(self) -> None:
        """Whether the loop reads its steps: then what was asked before a step is known after it."""
        self._in_step = self._in_step + 1 if self._asked.is_ready() else 0
        # while waits go before steps nothing is learned, so one is left out now and then
        self._look = self._turn + min(8 << self._in_step, 256)

    def is_known_to_end(self) -> bool:
        """Whether it is known already that no rank takes a further step."""
        if self._alone or not self._asked.is_ready():
            return False
        try:
            return int(np.asarray(self._asked.addressable_data(0))[0]) != GOES_ON
        except jax.errors.JaxRuntimeError:
            return False  # it is for `read` to say

    def _wait(self, step: int) -> None:
        reason = ""
        # Asking the devices is free but bounds nothing; asking the service is bounded but a round
        # trip. So the devices are polled, and the service only where a step takes long.
        stalled = self._meeting.aside("stalled")
        grace = find_grace(self._timeout_s)
        start = time.monotonic()
        look, pause = start + grace / 2, 1e-4
        while not self._asked.is_ready():
            time.sleep(pause)
            pause = min(2 * pause, 1e-2)
            now = time.monotonic()
            if now - start > self._timeout_s:
                stalled.call()  # those who started to wait later need not wait as long to be told
                break
            if now > look:
                if stalled.called():
                    break
                look = now + grace / 2
        else:
            try:
                self._asked.block_until_ready()
                return
            except jax.errors.JaxRuntimeError as error:
                # when a process is killed, only some get this over gloo: they tell the rest
                reason = f"the devices say: {str(error).splitlines()[0]}"
                stalled.call()

        def judge(said: dict[int, str]) -> str:
            absent = [process for process in self._placement.processes if process not in said]
            who = (
                f"{name_holders(absent, self._placement)} absent" if absent else "all ranks waited"
            )
            return (
                f"join_batches: {who} at step {step}, {reason or f'after {self._timeout_s:g} s'}. "
                "Look at the logs of the absent: they are gone, have left the loop, or their "
                "stream is slow; timeout_s gives more time."
            )

        raise RuntimeError(stalled.conclude("", judge, timeout_s=grace))


def find_state(streams: list[Stream], *, at_shortest: bool = False) -> int:
    """What this process's ranks are about to do.

    Args:
        streams: this process's streams.
        at_shortest: whether the first stream that ends ends all.
    """
    if any(stream.failure for stream in streams):
        return FAILED
    if at_shortest and any(stream.ended for stream in streams):
        return STOPS
    return ENDED if all(stream.ended for stream in streams) else GOES_ON


def find_rows(streams: list[Stream]) -> int:
    """The most rows that a rank of this process has in the next step."""
    return max(stream.rows_per_rank for stream in streams)


def find_width(rows: int, widths: tuple[int, ...]) -> int:
    """Which of some widths, ascending, is the least that holds so many rows; the last if none."""
    return min(bisect_left(widths, rows), len(widths) - 1)


@cache
def _greatest(everywhere: NamedSharding) -> Any:
    def take_greatest(said: jax.Array) -> jax.Array:
        return said.reshape(said.shape[0], 2, -1).max(axis=(0, 2))

    return jax.jit(take_greatest, out_shardings=everywhere)


def raise_failure(
    streams: list[Stream], meeting: Meeting, placement: RankPlacement, step: int, timeout_s: float
) -> None:
    """Raises what went wrong, on every process the same.

    Raises:
        RuntimeError: always.
    """
    failures = {
        name_ranks(stream.ranks): f"{type(stream.failure).__name__}: {stream.failure}"
        for stream in streams
        if stream.failure
    }

    def judge(said: dict[int, str]) -> str:
        told = []
        for process, text in said.items():
            for ranks, failure in json.loads(text).items():
                told.append(f"{ranks} (process {process}): {failure}")
        return (
            f"join_batches: the stream failed at step {step} on {'; on '.join(told)}. Every rank "
            f"stops here, after {step} steps."
        )

    text = meeting.aside("failed").conclude(json.dumps(failures), judge, timeout_s=timeout_s)
    cause = next((stream.failure for stream in streams if stream.failure), None)
    raise RuntimeError(text) from cause
