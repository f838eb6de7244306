"""Steps that devices have been given and have not finished, on faked CPU devices."""

import time
from collections import deque
from collections.abc import Iterable
from typing import Any

import jax
from jax.core import Tracer

STEPS_UNDER_WAY = 2
"""How many steps may be under way on several CPU devices.

XLA's CPU client has a thread for each device, and lets 32 computations of a device be in flight.
Whoever launches the next one waits in one of those threads, which the steps in flight need to meet
in their collectives: XLA waits 40 s for the last one, and aborts the process. What users compute
of a report that is not there yet counts too: 15 operations of theirs for each step. Ours wait for
what they need.
"""

_under_way: deque[Any] = deque()


def hold_back(newest: Any) -> None:
    """Notes an array of a step, and waits until `STEPS_UNDER_WAY` are under way at most."""
    if isinstance(newest, Tracer):  # a step inside somebody's own jit
        return
    _under_way.append(newest)
    if len(_under_way) > STEPS_UNDER_WAY:
        oldest = _under_way.popleft()
        if not oldest.is_deleted():
            _wait_until_ready(oldest)


def wait_for_all(arrays: Iterable[Any]) -> None:
    """Waits for those that several CPU devices hold, before something is computed of them."""
    for each in arrays:
        if not isinstance(each, jax.Array) or each.is_deleted():
            continue
        devices = each.sharding.device_set
        if len(devices) > 1 and next(iter(devices)).platform == "cpu":
            _wait_until_ready(each)


def list_under_way() -> list[Any]:
    """The arrays of steps that are not finished."""
    return _keep_unfinished(_under_way)


def list_unfinished() -> list[Any]:
    """All arrays of the process that are not finished, whoever's computations they come from."""
    return _keep_unfinished(jax.live_arrays())


def _keep_unfinished(arrays: Iterable[Any]) -> list[Any]:
    # another thread may have given one away meanwhile
    return [each for each in arrays if not (each.is_deleted() or each.is_ready())]


def _wait_until_ready(array: Any) -> None:
    """Waits for an array where signals are heard: JAX's own wait hears none until it is over.

    It may be over never, where another process is gone.
    """
    pause = 1e-4
    while not array.is_ready():
        time.sleep(pause)
        pause = min(2 * pause, 5e-3)
    array.block_until_ready()  # an error of the computation is raised here
