"""Programs of the documentation, each in a process of its own: a program chooses its devices."""

import os
import sys
import tempfile
from pathlib import Path

from forked import FORKED

ROOT = Path(__file__).parent.parent
EXAMPLE = """
import runpy, sys
from strict import be_strict
be_strict()
path, *_ = sys.argv = {arguments}
sys.path.insert(0, path.rpartition("/")[0])
runpy.run_path(path, run_name="__main__")
"""


def run_example(name: str | Path, *arguments: str) -> str:
    """What an example prints, run as `python -W error examples/name` runs it."""
    code = EXAMPLE.format(arguments=[str(ROOT / "examples" / name), *arguments])
    status, out, err = run_program(code, ROOT)
    assert status == 0, err
    return out


def run_program(code: str, folder: Path) -> tuple[int, str, str]:
    """The exit status of a program that runs in a folder, and what it printed on both streams."""
    with tempfile.TemporaryDirectory() as kept:
        printed = [Path(kept) / name for name in ("out", "err")]
        process = FORKED.Process(target=_run, args=(code, folder, printed))
        process.start()
        process.join(300)
        if process.exitcode is None:
            process.kill()
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
