"""Runs the notebooks beside it, each in a kernel of its own; they stay as they are, without output.

`python examples/notebooks/run.py` runs all of them, `... run.py NAME` one. What a cell raises ends
it. Needs the extra `notebooks`.
"""

import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).parent


def main(names: list[str]) -> None:
    found = {path.stem: path for path in sorted(HERE.glob("*.ipynb"))}
    unknown = [name for name in names if name not in found]
    if unknown:
        sys.exit(f"no notebook {', '.join(unknown)}; there are {', '.join(found)}")
    for name in names or found:
        start = time.perf_counter()
        notebook = nbformat.read(found[name], as_version=4)
        NotebookClient(notebook, timeout=600, kernel_name="python3").execute()
        print(f"{name}: {time.perf_counter() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
