"""Whether any rank goes on, agreed by the devices a step ahead; if not, who is to blame."""

import json
import time
from collections.abc import Sequence
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from jax_ddp_weighting.data.streams import Stream
from jax_ddp_weighting.distributed import mesh as meshes
from jax_ddp_weighting.distributed.coordination import Meeting, name_ranks
from jax_ddp_weighting.distributed.placement import RankPlacement

ENDED, GOES_ON, FAILED = range(3)
"""What a rank is about to do, in the order in which it decides for all."""

# One number would do. But XLA's CPU client runs small computations in the thread that asks for
# them, where nothing could bound the wait for the other processes.
_STATE_WIDTH = 4096


class Stopping:
    """Whether any rank goes on, asked of all for every step.

    Args:
        streams: this process's streams.
        layout: where the ranks are.
        meeting: the meeting of the streams of all processes.
        timeout_s: how long to wait for the other processes at a step.
    """

    def __init__(
        self, streams: list[Stream], layout: RankPlacement, meeting: Meeting, timeout_s: float
    ) -> None:
        self._streams = streams
        self._layout = layout
        self._meeting = meeting
        self._timeout_s = timeout_s
        self._alone = len(layout.processes) == 1
        self._placed: dict[int, jax.Array] = {}
        self._asked: Any = None  # a number, or an array on its way
        self._waited = False  # for the answer, before the step
        # How often in a row the loop was seen to have waited for its step. Twice count, so that one
        # loss now and then does not; the first time does, since so far nothing is known.
        self._in_step = 1
        self._turn = self._look = 0  # steps so far, and when to look again

    def ask(self) -> None:
        """Asks for the greatest state of all ranks: it is then on its way from the devices."""
        state = find_state(self._streams)
        if self._alone:
            self._asked = state
            return
        if state not in self._placed:  # of the three that there are
            shape = len(self._layout.local), _STATE_WIDTH
            self._placed[state] = self._layout.place(np.full(shape, state, np.int8))
        everywhere = meshes.replicated_sharding(self._layout.mesh)
        self._asked = _greatest(everywhere)(self._placed[state])

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

    def read(self, step: int) -> int:
        """The state that `ask` asked for.

        Raises:
            RuntimeError: it has not come in time; names the processes that do not wait too.
        """
        if self._alone:
            return self._asked
        if not self._waited:
            self._learn()
            self._wait(step)
        return int(self._asked.addressable_data(0))

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
            return int(self._asked.addressable_data(0)) != GOES_ON
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
            absent = [process for process in self._layout.processes if process not in said]
            who = f"{name_holders(absent, self._layout)} absent" if absent else "all ranks waited"
            return (
                f"join_batches: {who} at step {step}, {reason or f'after {self._timeout_s:g} s'}. "
                "Look at the logs of the absent: they are gone, have left the loop, or their "
                "stream is slow; timeout_s gives more time."
            )

        raise RuntimeError(stalled.conclude("", judge, timeout_s=grace))


def find_state(streams: list[Stream]) -> int:
    """What this process's ranks are about to do."""
    if any(stream.failure for stream in streams):
        return FAILED
    return GOES_ON if any(stream.upcoming is not None for stream in streams) else ENDED


def find_grace(timeout_s: float) -> float:
    """How much later than others a process may have come to wait for them."""
    return min(timeout_s / 4, 10.0)


@cache
def _greatest(everywhere: NamedSharding) -> Any:
    return jax.jit(jnp.max, out_shardings=everywhere)


def raise_failure(
    streams: list[Stream], meeting: Meeting, layout: RankPlacement, step: int, timeout_s: float
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


def name_holders(processes: Sequence[int], layout: RankPlacement) -> str:
    """The ranks of processes, and the processes."""
    ranks = [rank for process in processes for rank in layout.held[process]]
    return f"{name_ranks(ranks)} ({name_ranks(processes, 'process')})"
