"""Errors of Orbax's threads, which keep them to themselves while they wait for other processes."""

import logging
import os
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from orbax.checkpoint import CheckpointManager

# Where a write fails on one process its threads wait for those of the others, and they for it, for
# `AsyncOptions(timeout_secs=)`, before anything is raised. But the error is logged at once.
_LOGGER, _THREAD = "absl", "async_save"


@dataclass
class _Known:
    """What is known of a manager: the error that was noted last, and the one that was raised."""

    noted: BaseException | None = None
    told: BaseException | None = None


_lock = Lock()
_known: "WeakKeyDictionary[CheckpointManager, _Known]" = WeakKeyDictionary()


def _note(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if isinstance(record.exc_info, tuple) else None
    if record.threadName == _THREAD and error is not None:
        text = record.getMessage()
        with _lock:
            for manager, known in _known.items():
                if os.fspath(manager.directory) + os.sep in text:
                    known.noted = error
    return True  # a filter that lets all pass: a handler would keep errors off the screen


def _find(manager: "CheckpointManager") -> _Known:
    with _lock:
        return _known.setdefault(manager, _Known())


def hear_background(manager: "CheckpointManager") -> None:
    """From now on, what fails in the background of this manager is noted."""
    _find(manager).noted = None
    logging.getLogger(_LOGGER).addFilter(_note)  # once, however often it is called


def forget_background(manager: "CheckpointManager") -> None:
    """Nothing is said any more of what was noted: it was said in other words."""
    _find(manager).noted = None


def forget_told(manager: "CheckpointManager") -> None:
    """Another write is under way: what was told is of one before."""
    _find(manager).told = None


def has_failed(manager: "CheckpointManager") -> bool:
    """Whether there is an error that `check_background` will raise."""
    return _find(manager).noted is not None


def check_background(manager: "CheckpointManager", caller: str) -> None:
    """Nothing, unless a write in the background has failed; that is said once.

    Raises:
        RuntimeError: it has, on this process.
    """
    known = _find(manager)
    error, known.noted = known.noted, None
    if error is not None and is_news(manager, error):
        raise not_written(caller, error) from error


def check_told(manager: "CheckpointManager", caller: str) -> None:
    """Nothing, unless the last write has failed: what Orbax's threads do since is wait in vain.

    Raises:
        RuntimeError: it has, and was told of before.
    """
    if (error := _find(manager).told) is not None:
        raise not_written(caller, error) from error


def is_news(manager: "CheckpointManager", error: BaseException) -> bool:
    """Whether nobody has been told of this error yet."""
    known = _find(manager)
    before, known.told = known.told, error
    return before is not error


def not_written(caller: str, error: BaseException) -> RuntimeError:
    """The error of whoever waits for a checkpoint that was not written."""
    return RuntimeError(
        f"{caller}: the checkpoint before must have been written, got {type(error).__name__}: "
        f"{error} The one before that is the last that is whole: see to the disk, and save again."
    )
