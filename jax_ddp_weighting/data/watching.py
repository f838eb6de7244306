"""A look at the other processes while this one runs a step, where no error could reach it."""

import json
import logging
import time
from threading import Event, Thread

from jax_ddp_weighting.data.stopping import Stopping, find_grace, name_holders
from jax_ddp_weighting.distributed.coordination import Meeting
from jax_ddp_weighting.distributed.placement import RankPlacement

_log = logging.getLogger("jax_ddp_weighting.join")  # as documented


class Watch:
    """Names, in the log, who keeps this process's step from ending.

    The rule: who waits in a collective that another process never enters waits in XLA, where Python
    raises nothing and hears no signal. So a thread looks at the time. Once this process has been at
    one step for `timeout_s`, those who have left the loop are named, those who are at an earlier
    step, and, a little later, those of whom nothing is known. Where all are at the same step there
    is nothing to name: their step takes long. A process at one step for a quarter of that says
    where it is, and one that leaves the loop early says so; else this costs nothing.

    Args:
        meeting: the meeting of the streams of all processes.
        layout: where the ranks are.
        stopping: what is known of the end.
        timeout_s: how long a step may take.
    """

    def __init__(
        self, meeting: Meeting, layout: RankPlacement, stopping: Stopping, timeout_s: float
    ) -> None:
        self._meeting = meeting
        self._layout = layout
        self._stopping = stopping
        self._timeout_s = timeout_s
        self._at = (0, time.monotonic())  # the step, and since when
        self._over = Event()
        self._thread = Thread(target=self._run, name="join_batches", daemon=True)
        if len(layout.processes) > 1:
            self._thread.start()

    def enter(self, step: int) -> None:
        """The loop comes to a step."""
        self._at = step, time.monotonic()

    def end(self, *, early: bool = False) -> None:
        """The loop is over; `early`, if others may go on without this process."""
        self._over.set()
        if early and len(self._layout.processes) > 1:
            self._meeting.leave_note("left", json.dumps(self._at[0]))

    def _run(self) -> None:
        grace = find_grace(self._timeout_s)
        said = named = -1
        while not self._over.wait(min(1.0, grace / 4)):
            step, since = self._at
            stuck = time.monotonic() - since
            if stuck > grace * 0.75 and said < step:
                said = step
                self._meeting.leave_note("at", json.dumps(step))
            if stuck > self._timeout_s and named < step:
                culprits = self._find_culprits(step, certain=stuck < self._timeout_s + grace)
                if culprits and self._at == (step, since):
                    named = step
                    _log.error(
                        "join_batches: this process has been at step %d for %.0f s: %s. A step "
                        "ends when all ranks have run it: look at their logs. What the devices "
                        "say will come later, and name nobody.",
                        step,
                        stuck,
                        "; ".join(culprits),
                    )

    def _find_culprits(self, step: int, *, certain: bool) -> list[str]:
        left = {p: json.loads(text) for p, text in self._meeting.read_notes("left").items()}
        at = {p: json.loads(text) for p, text in self._meeting.read_notes("at").items()}
        culprits = [
            f"{name_holders([process], self._layout)} left the loop at step {last}"
            for process, last in left.items()
        ]
        culprits += [
            f"{name_holders([process], self._layout)} still at step {last}"
            for process, last in at.items()
            if last < step and process not in left
        ]
        absent = [p for p in self._layout.processes if p not in left | at]
        if absent and not culprits and not certain and not self._stopping.is_known_to_end():
            culprits.append(f"{name_holders(absent, self._layout)} absent")
        return culprits
