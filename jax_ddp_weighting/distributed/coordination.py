"""What processes tell each other through JAX's coordination service, within a limit of time.

No device takes part, so a process that is late or gone is named where a collective would hang. This
is the only file that touches the client of `jax.distributed`.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any

import jax
from jax._src import distributed  # the client has no public name; Orbax takes it from here too

from jax_ddp_weighting._arguments import list_some

_ROOT = "jax_ddp_weighting"


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
    """

    folder: str
    index: int
    among: tuple[int, ...]

    def conclude(
        self, said: str, judge: Callable[[dict[int, str]], str], *, timeout_s: float
    ) -> str:
        """What `judge` makes of what everybody said: the same text for all of them.

        The rule: the last process to speak judges; if somebody's time is up before, that one judges
        without those who are missing, and their word comes too late. The first conclusion stands.
        Each process makes four calls to the service, whatever their number, and the one that judges
        reads what all have said.

        Args:
            said: what this process has to say.
            judge: makes the conclusion from a dict of process index to what it said, in which those
                who have not spoken in time are missing. The same function everywhere.
            timeout_s: how long to wait for the others, from now.

        Raises:
            RuntimeError: the service does not answer.
        """
        client = _client()
        if client is None or self.among == (self.index,):
            return judge({self.index: said})
        with _name_service():
            # said first and counted after: whoever counts up to all can read what all have said
            client.key_value_set(f"{self.folder}/said/{self.index}", said)
            spoken = client.key_value_increment(f"{self.folder}/spoken", 1)
            conclusion = None
            if spoken < len(self.among):
                conclusion = _await(client, self._conclusion, timeout_s)
            if conclusion is None:
                pairs = client.key_value_dir_get(f"{self.folder}/said/")
                heard = {int(key.rsplit("/", 1)[1]): text for key, text in pairs}
                conclusion = self._first(client, judge(dict(sorted(heard.items()))))
            if client.key_value_increment(f"{self.folder}/read", 1) == len(self.among):
                client.key_value_delete(f"{self.folder}/")
            return conclusion

    def aside(self, subject: str) -> "Meeting":
        """Another meeting of the same processes, which need not take place."""
        return replace(self, folder=f"{self.folder} {subject}")

    def call(self) -> None:
        """Asks the others to come, if they look."""
        with _name_service():
            _client().key_value_set(f"{self.folder}/called/yes", "", allow_overwrite=True)

    def called(self) -> bool:
        """Whether somebody has called."""
        with _name_service():
            return bool(_client().key_value_dir_get(f"{self.folder}/called/"))

    @property
    def _conclusion(self) -> str:
        return f"{self.folder}/conclusion"

    def _first(self, client: Any, conclusion: str) -> str:
        # Two may judge: the last to speak, and one whose time was up. The service keeps the first.
        try:
            client.key_value_set(self._conclusion, conclusion)
        except jax.errors.JaxRuntimeError as error:
            if _status(error) != "ALREADY_EXISTS":
                raise
            return client.key_value_try_get(self._conclusion)
        return conclusion


_lock = Lock()
_held: dict[str, int] = {}  # topic -> meetings so far
_held_by: list[Any] = []  # the client they were held over: a new service knows nothing of the old


def next_meeting(topic: str, index: int, among: tuple[int, ...]) -> Meeting:
    """The next meeting on a topic of the processes `among`, of which this one is `index`."""
    with _lock:
        client = _client()
        if not _held_by or _held_by[0] is not client:
            _held_by[:] = [client]
            _held.clear()
        # a numbering of its own for each circle: some processes may meet without the others
        topic = f"{topic}/{'-'.join(_runs(among))}"
        number = _held.get(topic, 0)
        _held[topic] = number + 1
    return Meeting(f"{_ROOT}/{topic}/{number}", index, among)


def check_timeout(argument: str, timeout_s: Any) -> None:
    """Refuses a time limit that is no positive number of seconds.

    Raises:
        TypeError: it is no number.
        ValueError: it is not above 0, or not finite.
    """
    remedy = "It is in seconds: 60 is a minute."
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float):
        kind = type(timeout_s).__name__
        raise TypeError(f"{argument} must be a number, got {timeout_s!r} ({kind}). {remedy}")
    if not (timeout_s > 0 and math.isfinite(timeout_s)):
        raise ValueError(f"{argument} must be above 0 and finite, got {timeout_s}. {remedy}")


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


def _await(client: Any, key: str, timeout_s: float) -> str | None:
    try:
        return client.blocking_key_value_get(key, max(1, round(timeout_s * 1000)))
    except jax.errors.JaxRuntimeError as error:
        if _status(error) != "DEADLINE_EXCEEDED":
            raise
        return None


def _status(error: Exception) -> str:
    return str(error).split(":", 1)[0]


@contextmanager
def _name_service() -> Iterator[None]:
    try:
        yield
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
