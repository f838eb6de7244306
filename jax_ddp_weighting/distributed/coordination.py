"""What processes tell each other through JAX's coordination service, within a limit of time.

No device takes part, so a process that is late or gone is named where a collective would hang. This
is the only file that touches the client of `jax.distributed`.
"""

import inspect
import json
import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from numbers import Real
from queue import Empty, SimpleQueue
from threading import Event, Lock, Thread
from typing import Any, Generic, TypeVar, cast

import jax
import numpy as np
from jax._src import distributed  # the client has no public name; Orbax takes it from here too

from jax_ddp_weighting._arguments import list_some

_log = logging.getLogger("jax_ddp_weighting.coordination")

_ROOT = "jax_ddp_weighting"
WAIT_S = 60.0
"""How long one process waits for others by default. It is less than the 100 s after which JAX ends
all processes where one was killed, and the 300 s for which one that leaves waits for the others, so
that whoever is gone is named first."""
T = TypeVar("T")


def this_process() -> tuple[int, int]:
    """This process's index, and how many there are, without starting a backend.

    Starting one would itself wait for every process, for minutes and without naming any.

    Raises:
        RuntimeError: there are several processes and `jax.distributed` was not initialized.
    """
    if _client() is not None:
        return distributed.global_state.process_id, distributed.global_state.num_processes
    if jax.process_count() > 1:
        raise RuntimeError(
            "jax_ddp_weighting: several processes must be started with "
            f"jax.distributed.initialize(), got {jax.process_count()} processes without it. Call "
            "it at the top of the program."
        )
    return 0, 1


@dataclass(frozen=True)
class Meeting:
    """One exchange between processes, which ends with one conclusion for all of them.

    Every process calls `next_meeting` in the same order, so that the n-th meeting of one is the
    n-th of all. Nothing of one meeting can be read in another; its keys are deleted when the last
    process has read the conclusion.

    Attributes:
        folder: where in the key-value store the meeting takes place.
        index: this process.
        among: the processes that take part, in ascending order.
        patience_s: how long one call to the service may take.
    """

    folder: str
    index: int
    among: tuple[int, ...]
    patience_s: float = 10.0

    def conclude(
        self,
        said: str,
        judge: Callable[[dict[int, str]], str],
        *,
        timeout_s: float,
        log: Callable[[str], None] | None = None,
    ) -> str:
        """What `judge` makes of what everybody said: the same text for all of them.

        The rule: the last process to speak judges; if somebody's time is up before, that one judges
        without those who are missing, and their word comes too late. The first conclusion stands.
        Each process makes four calls to the service, whatever their number, and one more for each
        second that it waits; the one that judges reads what all have said.

        Process 0 holds the service, and ends everybody's calls when it leaves. So it stays, within
        the time left and a second at least, until all who were heard have been told.

        Args:
            said: what this process has to say.
            judge: makes the conclusion from a dict of process index to what it said, in which those
                who have not spoken in time are missing. The same function everywhere.
            timeout_s: how long to wait for the others, from now.
            log: is given the conclusion before anybody waits for others to be told it.

        Raises:
            RuntimeError: the service does not answer.
        """
        log = log or (lambda conclusion: None)
        client = _client()
        if client is None or self.among == (self.index,):
            conclusion = judge({self.index: said})
            log(conclusion)
            return conclusion
        deadline = time.monotonic() + timeout_s
        left = Event()

        def talk() -> str:
            # said first and counted after: whoever counts up to all can read what all have said
            client.key_value_set(f"{self.folder}/said/{self.index}", said)
            spoken = client.key_value_increment(f"{self.folder}/spoken", 1)
            conclusion = None
            if spoken < len(self.among):
                conclusion = _await(client, self._conclusion, deadline, left)
            if conclusion is None and not left.is_set():
                conclusion = self._judge(client, judge)
            return conclusion or ""  # the latter is read by nobody

        try:
            concluded = _ask_service(talk, timeout_s + _grace(timeout_s))
        except RuntimeError:
            raise
        except BaseException:  # a signal's: this process leaves, and the others wait for it
            left.set()
            with suppress(RuntimeError):  # it may be the service that is gone; leave all the same
                _ask_service(lambda: self._judge(client, judge, without=self.index), 1)
            raise
        heard, conclusion = json.loads(concluded)
        log(conclusion)
        self._part(client, tuple(_indices(heard)), deadline)
        return conclusion

    def aside(self, subject: str) -> "Meeting":
        """Another meeting of the same processes, which need not take place."""
        return replace(self, folder=f"{self.folder} {subject}")

    def leave_note(self, subject: str, text: str) -> None:
        """A few words of this process's for whoever reads the notes on the subject."""
        key = f"{self.folder} {subject}/{self.index}"
        self._ask(lambda: _client().key_value_set(key, text, allow_overwrite=True))
        with _lock:
            _noted.setdefault(self.folder.rsplit("/", 1)[0], set()).add(key)

    def read_notes(self, subject: str) -> dict[int, str]:
        """The notes on a subject, by process."""
        pairs = self._ask(lambda: _client().key_value_dir_get(f"{self.folder} {subject}/"))
        return {int(key.rsplit("/", 1)[1]): text for key, text in pairs}

    def call(self) -> None:
        """Asks the others to come, if they look."""
        key = f"{self.folder}/called/yes"
        self._ask(lambda: _client().key_value_set(key, "", allow_overwrite=True))

    def called(self) -> bool:
        """Whether somebody has called."""
        return bool(self._ask(lambda: _client().key_value_dir_get(f"{self.folder}/called/")))

    def _ask(self, talk: Callable[[], T]) -> T:
        return _ask_service(talk, self.patience_s)

    @property
    def _conclusion(self) -> str:
        return f"{self.folder}/conclusion"

    def _judge(
        self, client: Any, judge: Callable[[dict[int, str]], str], without: int | None = None
    ) -> str:
        """The conclusion, and those who were heard: this process's, or what stands already."""
        pairs = client.key_value_dir_get(f"{self.folder}/said/")
        heard = {int(key.rsplit("/", 1)[1]): text for key, text in pairs}
        heard.pop(without, None)  # type: ignore[arg-type]  # no process is None
        heard = dict(sorted(heard.items()))
        concluded = json.dumps([_runs(tuple(heard)), judge(heard)])
        # Two may judge: the last to speak, and one whose time was up. The service keeps the first.
        try:
            client.key_value_set(self._conclusion, concluded)
        except jax.errors.JaxRuntimeError as error:
            if _status(error) != "ALREADY_EXISTS":
                raise
            return client.key_value_try_get(self._conclusion)
        return concluded

    def _part(self, client: Any, heard: tuple[int, ...], deadline: float) -> None:
        """Goes apart: process 0 last of those who were heard."""
        counter = f"{self.folder}/read"
        # One counter for both: those who were heard count ones, those who came too late the rest.
        one = 1 if self.index in heard else _LATE
        if self.index == 0:
            others = len(heard) - (0 in heard)
            deadline = max(deadline, time.monotonic() + 1)
            pause = 1e-3
            while time.monotonic() < deadline:
                # at process 0 the service is next door: asking it often costs little
                if self._ask(partial(_count, client, counter)) % _LATE >= others:
                    break
                time.sleep(pause)
                pause = min(2 * pause, 0.05)
        try:
            read = self._ask(lambda: client.key_value_increment(counter, one))
            if read % _LATE + read // _LATE == len(self.among):
                self._ask(lambda: client.key_value_delete(f"{self.folder}/"))
        except RuntimeError:
            # Process 0 may be gone by now. It waited for this call to reach it, not for its answer
            # to come back; and all there was to say has been said.
            if self.index == 0:
                raise


_LATE = 2**32  # more than there are processes


_lock = Lock()
_held: dict[str, int] = {}  # topic -> meetings so far
_noted: dict[str, set[str]] = {}  # topic -> keys of notes that stand in the service
_held_by: list[Any] = []  # the client they were held over: a new service knows nothing of the old


def next_meeting(
    topic: str, index: int, among: tuple[int, ...], timeout_s: float = WAIT_S
) -> Meeting:
    """The next meeting on a topic of the processes `among`, of which this one is `index`.

    Process 0 may be stopped, and the service silent: who waits `timeout_s` for others does not wait
    much longer for that.
    """
    with _lock:
        client = _client()
        if not _held_by or _held_by[0] is not client:
            _held_by[:] = [client]
            _held.clear()
            _noted.clear()
        # a numbering of its own for each circle: some processes may meet without the others
        topic = f"{topic}/{'-'.join(_runs(among))}"
        number = _held.get(topic, 0)
        _held[topic] = number + 1
        # notes of the meeting before concern nobody any more, or a service would fill up with them
        stale = _noted.pop(f"{_ROOT}/{topic}", set())
    if stale:
        with suppress(RuntimeError):
            _ask_service(lambda: [client.key_value_delete(key) for key in stale])
    patience_s = min(10.0, max(1.0, timeout_s / 2))
    return Meeting(f"{_ROOT}/{topic}/{number}", index, among, patience_s)


def check_timeout(argument: str, timeout_s: Any) -> float:
    """A time limit as a float, if it is a number of seconds that can be waited for.

    Where there are several processes, one that JAX may be too impatient for is said in the log.

    Raises:
        TypeError: it is no number.
        ValueError: it is not above 0, or above 1e8.
    """
    remedy = "It is in seconds: 60 is a minute."
    real = isinstance(timeout_s, Real | np.integer | np.floating)
    if not real or isinstance(timeout_s, bool):
        kind = type(timeout_s).__name__
        raise TypeError(f"{argument} must be a number, got {timeout_s!r} ({kind}). {remedy}")
    seconds = float(cast(Any, timeout_s))
    if not (seconds > 0 and math.isfinite(seconds)):
        raise ValueError(f"{argument} must be above 0 and finite, got {timeout_s}. {remedy}")
    if seconds > _LONGEST:  # further than the clocks of threads and of the service count
        raise ValueError(
            f"{argument} must be at most {_LONGEST:g}, which is three years, got {seconds:g}. "
            f"{remedy}"
        )
    _compare_with_heartbeat(argument, seconds)
    return seconds


_LONGEST = 1e8
_compared: set[tuple[str, float]] = set()


def _compare_with_heartbeat(argument: str, timeout_s: float) -> None:
    """Says, once, where JAX ends all processes before one that was killed could be named.

    JAX does not tell what heartbeat it was given. So the limit is held against its default.
    """
    client = _client()
    if client is None or this_process()[1] == 1 or (argument, timeout_s) in _compared:
        return
    _compared.add((argument, timeout_s))
    defaults = inspect.signature(jax.distributed.initialize).parameters
    for name in ("heartbeat_timeout_seconds", "shutdown_timeout_seconds"):
        limit = getattr(defaults.get(name), "default", math.inf)
        if timeout_s + _grace(timeout_s) >= limit:
            _log.warning(
                "%s is %g, and %s of jax.distributed.initialize is %g unless you gave it another: "
                "JAX would end all processes before one that is gone can be named. Give a smaller "
                "timeout_s, or initialize a longer time.",
                argument,
                timeout_s,
                name,
                limit,
            )


def find_grace(timeout_s: float) -> float:
    """How much later than others a process may have come to wait for them."""
    return min(timeout_s / 4, 10.0)


def name_ranks(indices: Any, noun: str = "rank") -> str:
    """`rank 1`, or `ranks 0, 2, 5`; at most ten, then a count."""
    indices = list(indices)
    if len(indices) == 1:
        return f"{noun} {indices[0]}"
    return f"{noun}{'es' if noun.endswith('s') else 's'} {list_some(indices)}"


def find_differences(said: dict[int, dict[str, Any]], noun: str = "rank") -> list[str]:
    """Each entry that is not the same in all: `seed is 7 on rank 1, 0 on ranks 0, 2`."""
    found = []
    for name in dict.fromkeys(name for each in said.values() for name in each):
        holders: dict[str, list[int]] = {}
        for index, each in said.items():
            value = repr(each[name]) if name in each else "not there"
            holders.setdefault(value, []).append(index)
        if len(holders) > 1:
            # the smallest groups first: most likely they are the ones that are wrong
            groups = sorted(holders.items(), key=lambda group: len(group[1]))
            shown = [f"{value} on {name_ranks(indices, noun)}" for value, indices in groups[:10]]
            if len(groups) > 10:
                shown.append(f"and {len(groups) - 10} more values")
            found.append(f"{name} is {', '.join(shown)}")
    return found


def _client() -> Any:
    return distributed.global_state.client


def _await(client: Any, key: str, deadline: float, left: Event) -> str | None:
    """What stands at a key, once something does; None if nothing does in time."""
    while not left.is_set():
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            return None
        try:
            return client.blocking_key_value_get(key, max(1, round(min(remaining, 1.0) * 1000)))
        except jax.errors.JaxRuntimeError as error:
            if _status(error) != "DEADLINE_EXCEEDED":
                raise
    return None


def _count(client: Any, counter: str) -> int:
    try:
        return int(client.key_value_try_get(counter))
    except jax.errors.JaxRuntimeError as error:
        if _status(error) != "NOT_FOUND":
            raise
        return 0


def _status(error: Exception) -> str:
    return str(error).split(":", 1)[0]


def _grace(timeout_s: float) -> float:
    """How long the service may take to answer beyond the time that processes wait for others."""
    return min(max(1.0, timeout_s / 4), 10.0)


class Aside(Generic[T]):
    """A call in a thread of its own, which can be waited for in slices, and be abandoned.

    Calls into C++ see no signals, and some ignore even their own timeouts.
    """

    def __init__(self, call: Callable[[], T], name: str) -> None:
        self._answers: SimpleQueue[tuple[T | None, BaseException | None]] = SimpleQueue()

        def run() -> None:
            try:
                self._answers.put((call(), None))
            except BaseException as error:  # it belongs to the caller
                self._answers.put((None, error))

        Thread(target=run, name=name, daemon=True).start()

    def wait(self, seconds: float) -> T:
        """What the call returns.

        Raises:
            Empty: it has not, within so many seconds.
            BaseException: whatever the call raised.
        """
        answer, error = self._answers.get(timeout=seconds)
        if error is not None:
            raise error
        return cast(T, answer)


def _ask_service(talk: Callable[[], T], limit_s: float = 10.0) -> T:
    """What `talk` returns, which makes calls to the service.

    The client's calls see no signals, and ignore even their own timeouts while process 0 is
    stopped. So they are made in a thread that can be abandoned.

    Raises:
        RuntimeError: the service answers with an error, or not within `limit_s`.
    """
    try:
        return Aside(talk, "coordination").wait(limit_s)
    except Empty:
        raise RuntimeError(
            f"jax_ddp_weighting: the coordination service must answer, got nothing for "
            f"{limit_s:g} s: process 0 does not answer. It holds the service, and is stopped or "
            "cut off: look at its log first."
        ) from None
    except jax.errors.JaxRuntimeError as error:
        raise RuntimeError(
            "jax_ddp_weighting: the coordination service must answer, got "
            f"{str(error).splitlines()[0]}. Process 0 holds it: look at its log first."
        ) from error


def _runs(indices: tuple[int, ...]) -> list[str]:
    """`(0, 1, 2, 5)` as `["0:3", "5:6"]`."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and runs[-1][1] == index:
            runs[-1][1] = index + 1
        else:
            runs.append([index, index + 1])
    return [f"{start}:{stop}" for start, stop in runs]


def _indices(runs: list[str]) -> Iterator[int]:
    """What `_runs` was given."""
    for run in runs:
        start, stop = map(int, run.split(":"))
        yield from range(start, stop)
