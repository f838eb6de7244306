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


def find_state(streams: list[Stream]) -> int:
    """What this process's ranks are about to do."""
    if any(stream.failure for stream in streams):
        return FAILED
    return GOES_ON if any(stream.upcoming is not None for stream in streams) else ENDED


def ask(state: int, layout: RankPlacement) -> Any:
    """The greatest state of all ranks; on its way from the devices if there are more processes."""
    if len(layout.processes) == 1:
        return state
    # a whole row of numbers for each rank, all alike: see _STATE_WIDTH
    states = layout.place_rows(np.full((len(layout.local), _STATE_WIDTH), state, np.int8))
    return _greatest(meshes.replicated_sharding(layout.mesh))(states)


@cache
def _greatest(everywhere: NamedSharding) -> Any:
    return jax.jit(jnp.max, out_shardings=everywhere)


def read_answer(
    answer: Any, meeting: Meeting, layout: RankPlacement, step: int, timeout_s: float
) -> int:
    """The state that `ask` asked for.

    Raises:
        RuntimeError: it has not come within `timeout_s`; names the processes that do not wait too.
    """
    if isinstance(answer, int):
        return answer
    # Asking the devices is free but bounds nothing; asking the service is bounded but a round trip.
    # So the devices are polled, and the service only where a step takes conspicuously long.
    stalled = meeting.aside("stalled")
    grace = min(timeout_s / 4, 10.0)
    reason = ""
    start = time.monotonic()
    look, pause = start + grace / 2, 1e-4
    while not answer.is_ready():
        time.sleep(pause)
        pause = min(2 * pause, 1e-2)
        now = time.monotonic()
        if now - start > timeout_s:
            stalled.call()  # those who started to wait later need not wait as long to be told
            break
        if now > look:
            if stalled.called():
                break
            look = now + grace / 2
    else:
        try:
            return int(answer.addressable_data(0))
        except jax.errors.JaxRuntimeError as error:
            # over gloo only some get this when a process is killed: they tell the rest
            reason = f"the devices say: {str(error).splitlines()[0]}"
            stalled.call()

    def judge(said: dict[int, str]) -> str:
        absent = [process for process in layout.processes if process not in said]
        who = f"{name_holders(absent, layout)} absent" if absent else "all ranks waited"
        return (
            f"join_batches: {who} at step {step}, {reason or f'after {timeout_s:g} s'}. Look at "
            "the logs of the absent: they are gone, have left the loop, or their stream is slow; "
            "timeout_s gives more time."
        )

    raise RuntimeError(stalled.conclude("", judge, timeout_s=grace))


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
