"""Ratios of a benchmark, kept beside what it prints, so that runs can be compared.

`python benchmarks` names a file by the environment; a benchmark run by itself keeps nothing.
"""

import json
import os
from pathlib import Path

FILE = "BENCHMARK_RATIOS"
_headings: dict[int, str] = {}


def headed(text: str) -> None:
    """Print a heading, under which the following ratios are kept; blanks before it say how deep."""
    print(text, flush=True)
    depth = len(text) - len(text.lstrip())
    for deeper in [each for each in _headings if each >= depth]:
        del _headings[deeper]
    _headings[depth] = text.strip()


def keep(what: str, ratio: float) -> None:
    """Keep a ratio: the time of what is named over that of what it is compared with."""
    if path := os.environ.get(FILE):
        where = [_headings[depth] for depth in sorted(_headings)]
        with Path(path).open("a") as file:
            print(json.dumps({"what": " | ".join([*where, what]), "ratio": ratio}), file=file)
