"""Errors of Orbax's threads, which keep them to themselves while they wait for other processes."""

import logging
import os
from threading import Lock

# Where a write fails on one process its threads wait for those of the others, and they for it, for
# `AsyncOptions(timeout_secs=)`, before anything is raised. But the error is logged at once.
_LOGGER, _THREAD = "absl", "async_save"

_lock = Lock()
_failed: dict[str, BaseException] = {}  # by the manager's directory
_told: dict[str, BaseException] = {}  # the last that was raised


def _note(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if isinstance(record.exc_info, tuple) else None
    if record.threadName == _THREAD and error is not None:
        text = record.getMessage()
        with _lock:
            _failed.update({folder: error for folder in _heard if folder + os.sep in text})
    return True  # a filter that lets all pass: a handler would keep errors off the screen


_heard: set[str] = set()


def hear_background(folder: str | os.PathLike[str]) -> None:
    """From now on, what fails in the background of a manager of this directory is noted."""
    with _lock:
        _heard.add(os.fspath(folder))
        _failed.pop(os.fspath(folder), None)
    logging.getLogger(_LOGGER).addFilter(_note)  # once, however often it is called


def forget_told(folder: str | os.PathLike[str]) -> None:
    """Another write is under way: what was told is of one before."""
    with _lock:
        _told.pop(os.fspath(folder), None)


def has_failed(folder: str | os.PathLike[str]) -> bool:
    """Whether there is an error that `check_background` will raise."""
    with _lock:
        return os.fspath(folder) in _failed


def forget_background(folder: str | os.PathLike[str]) -> None:
    """Nothing is said any more of what was noted: it was said in other words."""
    with _lock:
        _failed.pop(os.fspath(folder), None)


def check_background(folder: str | os.PathLike[str], caller: str) -> None:
    """Nothing, unless a write in the background has failed; that is said once.

    Raises:
        RuntimeError: it has, on this process.
    """
    with _lock:
        error = _failed.pop(os.fspath(folder), None)
    if error is not None and is_news(folder, error):
        raise not_written(caller, error) from error


def check_told(folder: str | os.PathLike[str], caller: str) -> None:
    """Nothing, unless the last write has failed: what Orbax's threads do since is wait in vain.

    Raises:
        RuntimeError: it has, and was told of before.
    """
    with _lock:
        error = _told.get(os.fspath(folder))
    if error is not None:
        raise not_written(caller, error) from error


def is_news(folder: str | os.PathLike[str], error: BaseException) -> bool:
    """Whether nobody has been told of this error yet."""
    with _lock:
        known = _told.get(os.fspath(folder)) is error
        _told[os.fspath(folder)] = error
    return not known


def not_written(caller: str, error: BaseException) -> RuntimeError:
    """The error of whoever waits for a checkpoint that was not written."""
    return RuntimeError(
        f"{caller}: the checkpoint before must have been written, got {type(error).__name__}: "
        f"{error} The one before that is the last that is whole: see to the disk, and save again."
    )
