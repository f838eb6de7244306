"""Who reads a sampler: a loader that reads ahead of training, or training itself."""

import sys
import threading
from collections.abc import Iterator, Sized
from types import FrameType
from typing import Any

_DEPTH = 16  # callers looked at: a loader is about five away from the ids it reads
_STREAMS, _STREAM = "jax_ddp_weighting.data.streams", "join_batches"


class Reader:
    """Whoever reads one pass of a sampler, as seen when it begins."""

    def __init__(self) -> None:
        self._thread: int | None = None  # that reads
        # who reads ahead of whoever trains, and what they have read and not handed out
        self._ahead: list[tuple[str, Sized | None]] = []

    def note(self) -> None:
        """Look at the callers: they are the reader."""
        self._thread = threading.get_ident()
        self._ahead = list(_find_ahead())

    def note_end(self) -> None:
        """Look again: a loader with workers may have begun before `join_batches` was given it."""
        known = {name for name, _ in self._ahead}
        self._ahead += [each for each in _find_ahead() if each[0] not in known]

    def find_ahead(self) -> str | None:
        """Who reads ahead of training, so that what was read says too much; None if nobody does."""
        for name, undelivered in self._ahead:
            # torchdata's loader saves the state of each batch as it reads, and means that; but it
            # does not know of whoever reads the loader itself ahead
            meant = name != _STREAM and _is_called_by("torchdata")
            if (undelivered is None or len(undelivered)) and not meant:
                return name
        elsewhere = self._thread is not None and self._thread != threading.get_ident()
        return "another thread" if elsewhere and not self._ahead else None

    def __getstate__(self) -> dict[str, Any]:
        # this process's own are left out
        return self.__dict__ | {
            "_thread": None,
            "_ahead": [(name, None) for name, _ in self._ahead],
        }


def _find_ahead() -> Iterator[tuple[str, Sized | None]]:
    """Those among the callers that read ahead, and what they have read and not handed out.

    A sampler is not told who reads it, and an id that waits in a loader's queue is lost to a state
    that counts it as read. So the callers are looked at, once a pass: torch's loaders, and those
    that are made from them, read in `_next_index`, and with workers keep what is under way in
    `_task_info`; accelerate's holds one batch back, and so does `join_batches`.
    """
    for frame in _callers():
        if frame.f_globals.get("__name__") == "accelerate.data_loader":
            yield "accelerate's loader", None
            return
        # of no other frames: looking at its variables would keep them alive as long as it runs
        if frame.f_globals.get("__name__") == _STREAMS and frame.f_code.co_name == "read":
            yield _STREAM, frame.f_locals["self"].undelivered
            return
        if frame.f_code.co_name == "_next_index":
            loader = frame.f_locals.get("self")
            if getattr(loader, "_num_workers", 0):
                yield "a loader with workers", getattr(loader, "_task_info", None)


def find_batch_size() -> int | None:
    """How many items a torch loader is fetching for a batch, in the process that fetches them."""
    for frame in _callers():
        if frame.f_globals.get("__name__") == "torch.utils.data._utils.fetch":
            fetcher, wanted = (
                frame.f_locals.get(name) for name in ("self", "possibly_batched_index")
            )
            if getattr(fetcher, "auto_collation", False) and isinstance(wanted, Sized):
                return len(wanted)
    return None


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
