"""What rows look like, and one look for a whole stream: on every process and at every step."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from jax_ddp_weighting.distributed.coordination import Meeting, find_differences, name_ranks

RowFormat = dict[str, str]
"""The structure of rows, and the dtype and the shape of one row of each leaf."""


def describe_rows(rows: PyTree) -> RowFormat:
    """The form of rows as they would be on a device: arrays with one leading axis."""
    found = {"structure": str(jax.tree.structure(rows))}
    for path, leaf in jax.tree_util.tree_leaves_with_path(rows):
        shape = ", ".join(map(str, leaf.shape[1:]))
        found[f"data{jax.tree_util.keystr(path)}"] = f"{device_dtype(leaf.dtype)}[{shape}]"
    return found


def device_dtype(dtype: Any) -> np.dtype:
    """What a dtype becomes on a device: 32 bits wide at most, unless x64 is on."""
    return jax.dtypes.canonicalize_dtype(dtype)


def check_format(caller: str, format: RowFormat, first: RowFormat) -> None:
    """Refuses rows of another form than the first ones of their stream.

    Raises:
        ValueError: the forms differ; names the first leaf that does.
    """
    for leaf in first | format:
        before, now = first.get(leaf, "nothing"), format.get(leaf, "nothing")
        if before != now:
            raise ValueError(
                f"{caller}: rows must keep the form of the first ones, got {now} for {before} at "
                f"{leaf}. Pad rows to one shape, and give them one dtype."
            )


class FormatAgreement:
    """Whether the first rows of a stream have one form on all processes: asked once.

    Args:
        caller: who speaks in errors.
        meeting: the meeting of the stream.
        timeout_s: how long to wait for the other processes' first rows.
    """

    def __init__(self, caller: str, meeting: Meeting, timeout_s: float) -> None:
        self._caller = caller
        self._meeting = meeting
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

    def check(self, rows: PyTree) -> None:
        """Refuses rows that differ from the first ones, here or on another process.

        Raises:
            ValueError: forms differ, over steps or over processes.
            RuntimeError: another process failed to make its first rows, or did not in time.
        """
        found = describe_rows(rows)
        if self._first is None:
            self._first = found
            kind, text = self._conclude(found)
            if kind:
                raise {"ValueError": ValueError, "RuntimeError": RuntimeError}[kind](text)
        check_format(self._caller, found, self._first)

    def _conclude(self, said: RowFormat) -> tuple[str, str]:
        text = self._meeting.conclude(json.dumps(said), self._judge, timeout_s=self._timeout_s)
        kind, text = json.loads(text)
        return kind, text

    def _judge(self, said: dict[int, str]) -> str:
        formats = {process: json.loads(text) for process, text in said.items()}
        failed = {
            process: each["failure"] for process, each in formats.items() if "failure" in each
        }
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
        elif differences := find_differences(formats, "process"):
            kind = "ValueError"
            text = (
                f"rows must have one form on all processes, got {'; '.join(differences)}. Pad "
                "them to one shape, and give them one dtype."
            )
        return json.dumps([kind, f"{self._caller}: {text}"])
