"""A file that is there whole or not at all."""

import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

PARTIAL = ".partial"
"""How the names of unfinished files end; they begin with a dot."""


@contextmanager
def open_whole(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A file to write that takes the place of `path` when the block ends without an error.

    The rule: whoever reads `path` finds the old content or the new, whole, whatever happens in
    between and however many write at once. A link stays a link, and the file that it leads to is
    written; a file that is there keeps its mode; what is no regular file, such as a pipe, is
    written straight, because nothing can take its place.

    Args:
        path: the file, in a folder that is there.

    Raises:
        OSError: the file cannot be written; its `filename` is `path`.
    """
    target = Path(os.path.realpath(path))  # of a link, what it leads to
    # A name of its own for every writer, since threads share their process's number; and a short
    # one, where the whole may be of 255 bytes.
    unfinished = target.with_name(f".{target.name[:50]}.{secrets.token_hex(8)}{PARTIAL}")
    try:
        # of the path, not of `target`: what /dev/stdout leads to has no path that can be opened
        mode = os.stat(path).st_mode if os.path.exists(path) else None
        if mode is not None and not stat.S_ISREG(mode):
            with open(path, "wb") as file:
                yield file
            return
        try:
            with unfinished.open("xb") as file:
                yield file
                if mode is not None:
                    os.fchmod(file.fileno(), stat.S_IMODE(mode))
                file.flush()
                os.fsync(file.fileno())  # or a crash may leave the new name on an empty file
            unfinished.replace(target)
        finally:
            unfinished.unlink(missing_ok=True)
    except OSError as error:
        if error.errno and error.filename in (None, str(unfinished), str(target)):
            error.filename = os.fspath(path)  # the file that was asked for, not its stand-in
        raise
