"""A look at the other processes while this one runs a step, where no error could reach it."""

import json
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from threading import Event, Thread
from typing import Any

from jax_ddp_weighting.distributed.coordination import Meeting, find_grace
from jax_ddp_weighting.distributed.placement import RankPlacement, name_holders

_LOGGERS = {  # as documented
    "batches": "jax_ddp_weighting.batches",
    "join_batches": "jax_ddp_weighting.join",
}


class Watch:
    """Names, in the log, who keeps this process's step from ending.

    The rule: who waits in a collective that another process never enters waits in XLA, where Python
    raises nothing and hears no signal. So a thread looks at the time. Once this process has been at
    one step for `timeout_s`, those who have left the loop are named, those who are at an earlier
    step, and, a little later, those of whom nothing is known. Where all are at the same step there
    is nothing to name: their step takes long. A process at one step for a quarter of that says
    where it is, and one that leaves the loop early says so; else this costs nothing. One that has
    left by an error of its own is named as soon as that is known.

    Args:
        caller: who speaks.
        meeting: the meeting of the streams of all processes.
        placement: where the ranks are.
        timeout_s: how long a step may take.
        is_known_to_end: whether it is known already that the step it is at is the last one, after
            which a process may be anywhere.
    """

    def __init__(
        self,
        caller: str,
        meeting: Meeting,
        placement: RankPlacement,
        timeout_s: float,
        is_known_to_end: Callable[[int], bool],
    ) -> None:
        self._caller = caller
        self._log = logging.getLogger(_LOGGERS[caller])
        self._meeting = meeting
        self._placement = placement
        self._is_known_to_end = is_known_to_end
        self._timeout_s = timeout_s
        self._at = (0, time.monotonic())  # the step, and since when
        self._over = Event()
        if len(placement.processes) > 1:
            Thread(target=self._run, name=caller, daemon=True).start()

    def enter(self, step: int) -> None:
        """The loop comes to a step."""
        self._at = step, time.monotonic()

    def end(self) -> None:
        """The loop is over."""
        self._over.set()

    def leave(self, why: str = "") -> None:
        """The loop is over, while others may go on without this process."""
        self._over.set()
        if len(self._placement.processes) > 1:
            with suppress(RuntimeError):  # it may be the service that is gone; leave all the same
                self._meeting.leave_note("left", json.dumps([self._at[0], why]))

    def _run(self) -> None:
        grace = find_grace(self._timeout_s)
        said = named = -1
        while not self._over.wait(min(1.0, grace / 4)):
            step, since = self._at
            stuck = time.monotonic() - since
            if stuck < grace * 0.75:
                continue
            try:
                if said < step:
                    said = step
                    self._meeting.leave_note("at", json.dumps(step))
                left = self._read("left")
                failed = any(why for _, why in left.values())
                if named >= step or (stuck < self._timeout_s and not failed):
                    continue
                culprits = self._find_culprits(
                    step,
                    left,
                    early=stuck < self._timeout_s,
                    certain=stuck < self._timeout_s + grace,
                )
            except RuntimeError as error:  # the service's, which process 0 holds
                culprits = [str(error)]
            if culprits and self._at == (step, since):
                named = step
                self._log.error(
                    "%s: this process has been at step %d for %.0f s: %s. A step ends when all "
                    "ranks have run it: look at their logs. What the devices say will come later, "
                    "and name nobody.",
                    self._caller,
                    step,
                    stuck,
                    "; ".join(culprits),
                )

    def _read(self, subject: str) -> dict[int, Any]:
        return {p: json.loads(text) for p, text in self._meeting.read_notes(subject).items()}

    def _find_culprits(
        self, step: int, left: dict[int, Any], *, early: bool, certain: bool
    ) -> list[str]:
        at = self._read("at")
        culprits = [
            f"{name_holders([process], self._placement)} left the loop at step {last}"
            + (f", since {why}" if why else "")
            for process, (last, why) in left.items()
        ]
        if early:  # those who are behind may be about to say where they are now
            return culprits
        culprits += [
            f"{name_holders([process], self._placement)} last heard of at step {last}"
            for process, last in at.items()
            if last < step and process not in left
        ]
        absent = [p for p in self._placement.processes if p not in left | at]
        if absent and not culprits and not certain and not self._is_known_to_end(step):
            culprits.append(f"{name_holders(absent, self._placement)} absent")
        return culprits
