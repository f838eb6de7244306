"""What processes compare as they open an epoch: who reads what, and what rows look like."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from jax_ddp_weighting.data.row_format import RowFormat, check_format
from jax_ddp_weighting.distributed.coordination import Meeting, find_differences, name_ranks


class Opening:
    """One meeting at the first step of an epoch, and the rows of later steps held to it.

    Processes that read different steps, or steps of different plans, would give no error of their
    own: their rows form a global batch all the same, or one of them ends before the others.

    Args:
        caller: who speaks in errors.
        meeting: the meeting of the epoch.
        reading: every number that decides who reads what, by name; JSON holds them.
        timeout_s: how long to wait for the other processes' first rows.
    """

    def __init__(
        self, caller: str, meeting: Meeting, reading: Mapping[str, Any], timeout_s: float
    ) -> None:
        self._caller = caller
        self._meeting = meeting
        self._reading = dict(reading)
        self._timeout_s = timeout_s
        self._first: RowFormat | None = None

    @contextmanager
    def report_failure(self, what: str) -> Iterator[None]:
        """A block that makes rows; if it fails at the first ones, the others are told.

        Raises:
            Exception: whatever the block raised, here.
        """
        try:
            yield
        except Exception as error:  # whatever it is, the others wait for these rows
            if self._first is None:
                self._first = {}  # asked, if in vain: what is prefetched already asks no more
                self._conclude({"failure": f"{what}: {type(error).__name__}: {error}"})
            raise

    def check(self, found: RowFormat, width: int = 0) -> int:
        """Refuses rows that differ from the first ones, here or on another process.

        Args:
            found: what the rows look like.
            width: how many each rank has, if processes may have unequally many.

        Returns:
            The greatest width of any process, at the first rows.

        Raises:
            ValueError: processes read different things, or forms of rows differ, over processes or
                over steps.
            RuntimeError: another process failed to make its first rows, or did not in time.
        """
        if self._first is None:
            self._first = found
            return self._meet({"reading": self._reading, "format": found, "width": width})
        check_format(self._caller, found, self._first)
        return width

    def check_without_rows(self) -> None:
        """The same for a process that has no step to take, while others may have some.

        Raises:
            ValueError: processes read different things.
            RuntimeError: another process failed to make its first rows, or did not in time.
        """
        self._meet({"reading": self._reading, "format": None, "width": 0})

    def _meet(self, said: dict[str, Any]) -> int:
        kind, text, width = json.loads(self._conclude(said))
        if kind:
            raise {"ValueError": ValueError, "RuntimeError": RuntimeError}[kind](text)
        return width

    def _conclude(self, said: dict[str, Any]) -> str:
        return self._meeting.conclude(json.dumps(said), self._judge, timeout_s=self._timeout_s)

    def _judge(self, said: dict[int, str]) -> str:
        each = {process: json.loads(text) for process, text in said.items()}
        failed = {process: one["failure"] for process, one in each.items() if "failure" in one}
        absent = [process for process in self._meeting.among if process not in said]
        kind, text = "", ""
        if failed:
            kind = "RuntimeError"
            text = f"on {'; on '.join(f'process {p}: {text}' for p, text in failed.items())}."
        elif absent:
            kind = "RuntimeError"
            text = (
                f"{name_ranks(absent, 'process')} absent, without first rows after "
                f"{self._timeout_s:g} s. Look at the logs of the absent: they "
                "are gone or slow; timeout_s gives more time."
            )
        elif differences := _name_differences(each):
            kind, text = "ValueError", differences
        width = max(one.get("width", 0) for one in each.values())
        return json.dumps([kind, f"{self._caller}: {text}", width])


def _name_differences(said: dict[int, dict[str, Any]]) -> str:
    sentences = []
    reading = {process: one["reading"] for process, one in said.items()}
    if differences := find_differences(reading, "process"):
        sentences.append(
            f"all processes must read the same steps of the same plan, got "
            f"{'; '.join(differences)}. Give every process the same arguments."
        )
    formats = {process: one["format"] for process, one in said.items() if one["format"]}
    if differences := find_differences(formats, "process"):
        sentences.append(
            f"rows must have one form on all processes, got {'; '.join(differences)}. Pad "
            "them to one shape, and give them one dtype."
        )
    return " ".join(sentences)
