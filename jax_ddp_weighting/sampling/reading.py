"""Who reads a sampler: a loader that reads ahead of training, or training itself."""

import sys
import threading
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any

_DEPTH = 16  # callers looked at: a loader is about five away from the ids it reads


class Reader:
    """Whoever reads one pass of a sampler, as seen when it begins."""

    def __init__(self) -> None:
        self._thread: int | None = None  # that reads
        self._loader: str | None = None  # that reads ahead of whoever trains
        self._undelivered: Mapping[int, Any] | None = None  # what it has read and not handed out

    def note(self) -> None:
        """Look at the callers: they are the reader."""
        self._thread = threading.get_ident()
        self._loader, self._undelivered = _find_loader()

    def find_ahead(self) -> str | None:
        """Who reads ahead of training, so that what was read says too much; None if nobody does."""
        if self._loader is not None:
            # torchdata's loader saves the state of each batch as it reads, and means that
            waiting = self._undelivered is None or len(self._undelivered)
            return self._loader if waiting and not _is_called_by("torchdata") else None
        if self._thread is not None and self._thread != threading.get_ident():
            return "another thread"
        return None

    def __getstate__(self) -> dict[str, Any]:
        # this process's own are left out
        return self.__dict__ | {"_thread": None, "_undelivered": None}


def _find_loader() -> tuple[str | None, Mapping[int, Any] | None]:
    """A loader among the callers that reads ahead, and what it has read and not handed out.

    A sampler is not told who reads it, and an id that waits in a loader's queue is lost to a state
    that counts it as read. So the callers are looked at, once a pass: torch's loaders, and those
    that are made from them, read in `_next_index`, and with workers keep what is under way in
    `_task_info`; accelerate's holds one batch back.
    """
    for frame in _callers():
        if frame.f_globals.get("__name__") == "accelerate.data_loader":
            return "accelerate's loader", None
        # of no other frame: looking at its variables would keep them alive as long as it runs
        if frame.f_code.co_name == "_next_index":
            loader = frame.f_locals.get("self")
            if getattr(loader, "_num_workers", 0):
                return "a loader with workers", getattr(loader, "_task_info", None)
    return None, None


def _is_called_by(package: str) -> bool:
    return any(frame.f_globals.get("__name__", "").startswith(package) for frame in _callers())


def _callers() -> Iterator[FrameType]:
    """The frames of the callers, as far up as a loader may sit."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_DEPTH):
        if frame is None:
            return
        yield frame
        frame = frame.f_back
