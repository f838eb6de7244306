"""Programs of the documentation, each in a process of its own: a program chooses its devices."""

import os
import sys
import tempfile
from pathlib import Path

from forked import FORKED


def run_program(code: str, folder: Path) -> tuple[int, str, str]:
    """The exit status of a program that runs in a folder, and what it printed on both streams."""
    with tempfile.TemporaryDirectory() as kept:
        printed = [Path(kept) / name for name in ("out", "err")]
        process = FORKED.Process(target=_run, args=(code, folder, printed))
        process.start()
        process.join()
        return process.exitcode, *(path.read_text() for path in printed)


def _run(code: str, folder: Path, printed: list[Path]) -> None:
    for number, path in enumerate(printed, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    os.chdir(folder)
    main = {"__name__": "__main__"}
    try:
        exec(compile(code, "program", "exec"), main)
    finally:
        sys.stdout.flush()
