"""A wait for what the devices of several processes do together, bounded, and heard by signals."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from queue import Empty
from typing import TypeVar

import jax

from jax_ddp_weighting.distributed.coordination import (
    Aside,
    Meeting,
    find_grace,
    name_ranks,
    next_meeting,
    this_process,
)
from jax_ddp_weighting.distributed.under_way import list_under_way, list_unfinished

S = TypeVar("S")
T = TypeVar("T")
_SLICE_S = 0.5
_LONGEST = 1e8  # seconds, three years: what waits so long is given up by another limit
_FAILED = "failed "


class AbsentError(RuntimeError):
    """A process that has not come, or is gone; the message names it."""


class FailedError(RuntimeError):
    """Another process has failed; the message names it, and says why."""


class Waiting:
    """Waits that all processes go through in the same order, and names those who do not come.

    The rule: whoever waits in a collective that another process never enters waits in XLA, for as
    long as that likes and without a name. So a thread waits for it that can be abandoned.
    Once it takes longer than `timeout_s`, or the devices give up, those who wait too say so through
    the coordination service; if all do, the devices are slow and are waited for again. A process
    that is interrupted while it waits tells the others.

    After an error the devices are not to be used again.

    Args:
        caller: who speaks in errors.
        timeout_s: how many seconds to wait for other processes.
        among: the processes that take part, in ascending order; all by default.
    """

    def __init__(self, caller: str, timeout_s: float, among: tuple[int, ...] | None = None) -> None:
        index, count = this_process()
        self.among = tuple(range(count)) if among is None else among
        self.alone = self.among == (index,)
        self._caller, self._timeout_s = caller, timeout_s
        self._meeting = next_meeting(caller, index, self.among, timeout_s)
        self._waits = self._stalls = 0

    def meet(self) -> None:
        """Waits until all processes have come, before any device is used.

        Raises:
            AbsentError: a process has not come in time; it names who.
        """

        def judge(said: dict[int, str]) -> str:
            absent = [process for process in self.among if process not in said]
            if not absent:
                return ""
            return (
                f"{self._caller}: {name_ranks(absent, 'process')} absent, not there after "
                f"{self._timeout_s:g} s. Look at the logs of the absent: they are gone, stopped, "
                "or have not come to this call; timeout_s gives more time."
            )

        if text := self._meeting.conclude("", judge, timeout_s=self._timeout_s):
            raise AbsentError(text)

    def wait(self, start: Callable[[], S], finish: Callable[[S], T]) -> T:
        """`finish(start())`, of which `finish` may take long.

        What devices are to do together is started by `start`, in the thread of the caller: XLA's
        CPU client keeps the order of what one thread starts, and of that alone, and processes whose
        collectives come in another order get each other's numbers.

        Raises:
            AbsentError: a process is absent or late, or the devices gave up; it names who.
            BaseException: whatever else a call raised.
        """
        if self.alone:
            return finish(start())
        self._settle()
        self._waits += 1
        return self._await(start, finish)

    def run(self, call: Callable[[], T]) -> T:
        """`call()`, in which processes wait for each other by means that know no limit.

        The rule: it is over when it is over on all of them. Where it fails on one, that one raises
        its own error, and the others are told of it and wait no longer.

        Raises:
            AbsentError: a process is absent; it names who.
            FailedError: it failed on another process; it names which, and why.
            BaseException: whatever it raised here.
        """
        if self.alone:
            return call()
        self._settle()
        self._waits += 1
        over = self._meeting.aside(f"over {self._waits}")

        def finish(_: None) -> T:
            found = call()
            # whoever left now would be absent where the others look for those who take long
            over.conclude("", lambda said: "", timeout_s=_LONGEST)
            return found

        return self._await(lambda: None, finish, tells=True)

    @contextmanager
    def telling(self) -> Iterator[None]:
        """A block whose error on one process ends the waits of the others, and is told to them."""
        try:
            yield
        except (AbsentError, FailedError):
            raise  # all know
        except Exception as error:  # whatever it is, the others wait for what will not come
            if not self.alone:
                self._tell_failure(self._meeting.aside(f"stalled {self._stalls}"), error)
            raise

    def _settle(self) -> None:
        # Steps that wait in collectives of their own hold the few threads of XLA's CPU client, and
        # a process that gives it one more thing to wait for may leave none for what others wait on.
        # What the user has computed meanwhile cannot be known, but what is there at first can.
        if under_way := list_under_way() if self._waits else list_unfinished():
            self._await(lambda: under_way, jax.block_until_ready)

    def _await(self, start: Callable[[], S], finish: Callable[[S], T], *, tells: bool = False) -> T:
        aside: Aside[T] | None = None
        while True:
            stalled = self._meeting.aside(f"stalled {self._stalls}")
            reason = ""
            try:
                aside = aside or Aside(partial(finish, start()), self._caller)
                for seconds in self._slices(stalled):
                    with suppress(Empty):
                        return aside.wait(seconds)
            except Exception as error:  # whatever it is: it is told, raised, or the devices' own
                if tells:
                    self._tell_failure(stalled, error)
                    raise
                if not isinstance(error, jax.errors.JaxRuntimeError):
                    raise
                # over gloo only some get an error when a process is killed: they tell the rest
                reason = f"the devices say: {str(error).splitlines()[0]}"
                stalled.call()
            except BaseException:  # a signal's: the others need not wait longer
                with suppress(RuntimeError):
                    stalled.call()
                raise
            self._conclude(stalled, reason)
            self._stalls += 1  # all are there, so all count it

    def _slices(self, stalled: Meeting) -> Iterator[float]:
        """Seconds to wait, again and again, until it has taken too long, here or elsewhere."""
        start = time.monotonic()
        look = start + find_grace(self._timeout_s) / 2
        while (now := time.monotonic()) - start < self._timeout_s:
            if now > look:
                if stalled.called():
                    return
                look = now + find_grace(self._timeout_s) / 2
            yield min(_SLICE_S, self._timeout_s)
        stalled.call()  # those who came later need not wait as long to be told

    def _tell_failure(self, stalled: Meeting, error: Exception) -> None:
        error.add_note(
            f"{self._caller}: the other processes are told, and stop here too. The devices are not "
            "to be used again."
        )
        # the error itself is what is raised here: it may be the service that is gone
        try:
            stalled.call()
            text = " ".join(str(error).split()).rstrip(".")
            self._conclude(stalled, "", f"{type(error).__name__}: {text}")
        except AbsentError as absent:
            error.add_note(str(absent))
        except RuntimeError:
            pass

    def _conclude(self, stalled: Meeting, reason: str, failure: str = "") -> None:
        def judge(said: dict[int, str]) -> str:
            each = {process: json.loads(text) for process, text in said.items()}
            failures = [f"process {p} failed: {text}" for p, (_, _, text) in each.items() if text]
            reasons = dict.fromkeys(reason for _, reason, _ in each.values() if reason)
            last = max(waits for waits, _, _ in each.values())
            late = [process for process, (waits, _, _) in each.items() if waits < last]
            absent = [process for process in self.among if process not in said]
            if failures and not absent:
                return (
                    f"{_FAILED}{self._caller}: {'; '.join(failures)}. Every process stops here; "
                    "the devices are not to be used again."
                )
            reasons |= dict.fromkeys(failures)
            who = [f"{name_ranks(absent, 'process')} absent"] if absent else []
            who += [f"{name_ranks(late, 'process')} late"] if late else []
            if not (who or reasons):
                return ""
            return (
                f"{self._caller}: {', '.join(who) or 'all processes are there'}, "
                f"{'; '.join(reasons) or f'after {self._timeout_s:g} s'}. Look at the logs of the "
                "absent and late: they are gone, stopped, or have not come to this call; timeout_s "
                "gives more time."
            )

        said = json.dumps([self._waits, reason, failure])
        text = stalled.conclude(said, judge, timeout_s=find_grace(self._timeout_s))
        if text.startswith(_FAILED):
            raise FailedError(text.removeprefix(_FAILED))
        if text:
            raise AbsentError(text)
