"""Ratios of a benchmark, kept beside what it prints, so that runs can be compared.

`python benchmarks` names a file by the environment; a benchmark run by itself keeps nothing.
"""

import json
import os
from pathlib import Path

FILE = "BENCHMARK_RATIOS"
_HEADINGS = "BENCHMARK_HEADINGS"  # in the environment, for the processes that a benchmark starts


def headed(text: str) -> None:
    """Print a heading, under which the following ratios are kept; blanks before it say how deep."""
    print(text, flush=True)
    depth = len(text) - len(text.lstrip())
    above = [entry for entry in _headings() if entry[0] < depth]
    os.environ[_HEADINGS] = json.dumps([*above, [depth, text.strip()]])


def _headings() -> list[list]:
    return json.loads(os.environ.get(_HEADINGS, "[]"))


def keep(what: str, ratio: float) -> None:
    """Keep a ratio: the time of what is named over that of what it is compared with."""
    if path := os.environ.get(FILE):
        where = [heading for _, heading in _headings()]
        with Path(path).open("a") as file:
            print(json.dumps({"what": " | ".join([*where, what]), "ratio": ratio}), file=file)
