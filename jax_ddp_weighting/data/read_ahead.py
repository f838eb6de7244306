"""Batches made ahead of the step that runs, in a thread that holds up nobody who leaves."""

import atexit
import threading
import time
from collections.abc import Callable, Generator
from queue import SimpleQueue
from typing import Any
from weakref import WeakSet

from jax_ddp_weighting.data.batch import Batch


def read_ahead(
    steps: range, prefetch: int, fetch: Callable[[int], Any], place: Callable[[Any], Batch]
) -> Generator[Batch, None, None]:
    """`place(fetch(step))` for every step, at most `prefetch` of them ahead of the one yielded.

    The rule: errors surface at their own step. Whoever leaves, by an error, a `break` or the end of
    the program, leaves at once, whatever `fetch` is doing; its result is then not placed.

    Args:
        steps: the steps.
        prefetch: how many are made ahead; 0 makes each when it is asked for, in the same thread.
        fetch: what may take long: somebody else's code.
        place: what puts the result on devices.
    """
    # A generator, since it turns a StopIteration out of `fetch` into an error, where `map` would
    # take it for the end of the epoch.
    if not prefetch:
        for step in steps:
            yield place(fetch(step))
        return
    reader = _Reader(steps, prefetch, fetch, place)
    try:
        for _ in steps:
            yield reader.take()
    finally:  # the loop was left early, or a fetch failed: start nothing more
        reader.leave()


class _Reader:
    """A thread that makes batches as there is room for them."""

    def __init__(
        self, steps: range, prefetch: int, fetch: Callable[[int], Any], place: Callable[..., Batch]
    ) -> None:
        self._steps, self._fetch, self._place = steps, fetch, place
        self._room = threading.Semaphore(prefetch)
        self._left = False
        self._made: SimpleQueue[tuple[Batch | None, BaseException | None]] = SimpleQueue()
        # A daemon: the threads of a ThreadPoolExecutor are joined by its `with` and again by the
        # interpreter as it exits, so that a fetch that hangs would hold both.
        self._thread = threading.Thread(target=self._run, name="batches", daemon=True)
        if not _running:
            atexit.register(_leave_all)  # once is enough, and more do no harm
        _running.add(self)
        self._thread.start()

    def take(self) -> Batch:
        self._room.release()
        batch, error = self._made.get()
        if error is not None:
            raise error
        assert batch is not None  # it is one of the two
        return batch

    def leave(self) -> None:
        self._left = True
        self._room.release()  # it may wait for room

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            for step in self._steps:
                self._room.acquire()
                if self._left:
                    return
                fetched = self._fetch(step)
                if self._left:
                    return
                self._made.put((self._place(fetched), None))
                del fetched  # or its memory would be held while the next is fetched
        except BaseException as error:  # it belongs to the consumer, at its step
            self._made.put((None, error))


_running: WeakSet[_Reader] = WeakSet()
_GRACE_S = 0.5


def _leave_all() -> None:
    """Lets threads out of JAX before the interpreter goes down.

    A daemon thread that comes back from C++ into an interpreter that is no more aborts the process.
    Placing takes milliseconds and is waited for; a fetch that takes longer is not.
    """
    readers = list(_running)
    for reader in readers:
        reader.leave()
    deadline = time.monotonic() + _GRACE_S
    for reader in readers:
        reader.join(max(0.0, deadline - time.monotonic()))
