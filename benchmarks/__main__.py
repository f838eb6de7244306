"""Every benchmark, one table of ratios, and what became of them since an earlier run.

`python benchmarks` runs all of them, some for minutes; `python benchmarks step` one. A ratio is the
time of ours over that of what it is compared with in the same run: below 1, ours is faster. Each
run is kept as JSON in `.benchmarks`, and compared with the latest before it, or `--against FILE`.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ratios import FILE
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
KEPT = HERE.parent / ".benchmarks"
MOVED = 0.2  # a ratio that changed by more is marked; a busy machine moves them by less


def benchmarks(folder: Path) -> dict[str, Path]:
    """Those that can be run by themselves, by name."""
    runnable = 'if __name__ == "__main__":'
    found = {path.stem: path for path in sorted(folder.glob("*.py")) if path.name != "__main__.py"}
    return {name: path for name, path in found.items() if runnable in path.read_text()}


def ratios_of(path: Path, options: list[str]) -> dict[str, float] | None:
    """What a benchmark compared; None where it failed."""
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder) / "ratios"
        kept.touch()
        command = [sys.executable, str(path), *options]
        if subprocess.run(command, env={**os.environ, FILE: str(kept)}).returncode:
            return None
        entries = [json.loads(line) for line in kept.read_text().splitlines()]
    ratios = {entry["what"]: entry["ratio"] for entry in entries}
    if len(ratios) < len(entries):
        sys.exit(f"{path.name}: two ratios have one name; a heading would tell them apart.")
    return ratios


def machine() -> dict[str, Any]:
    """Where the run took place."""
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S"),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "jax": version("jax"),
        "numpy": version("numpy"),
    }


def compared(now: dict[str, Any], before: dict[str, Any] | None) -> list[tuple[str, ...]]:
    """A row for each ratio: benchmark, what, ratio, the ratio before, and the change."""
    rows = []
    for name, ratios in now["ratios"].items():
        earlier = (before or {"ratios": {}})["ratios"].get(name, {})
        for what, ratio in (ratios or {}).items():
            row = [name, what, f"{ratio:.3g}", "", ""]
            if what in earlier:
                change = ratio / earlier[what] - 1
                mark = " !" if abs(change) > MOVED else ""
                row[3:] = [f"{earlier[what]:.3g}", f"{change:+.0%}{mark}"]
            rows.append(tuple(row))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="which to run; all by default")
    parser.add_argument("--against", type=Path, help="an earlier run to compare with")
    arguments = parser.parse_args()
    found = benchmarks(HERE)
    unknown = [name for name in arguments.names if name not in found]
    if unknown:
        parser.error(f"no benchmark {', '.join(unknown)}; there are {', '.join(found)}")
    earlier = sorted(KEPT.glob("*.json"))
    against = arguments.against or (earlier[-1] if earlier else None)
    if against is not None and not against.is_file():
        parser.error(f"{against}: no such file")
    before = json.loads(against.read_text()) if against else None

    now: dict[str, Any] = {"machine": machine(), "ratios": {}}
    for name in arguments.names or found:
        print(f"== {name}", flush=True)
        now["ratios"][name] = ratios_of(found[name], [])

    table = Table("benchmark", "what", "ratio", "before", "change", title="Ours over theirs")
    for row in compared(now, before):
        table.add_row(*row)
    console = Console(highlight=False)
    console.width = max(console.width, 140)
    console.print(table)
    KEPT.mkdir(exist_ok=True)
    path = KEPT / f"{now['machine']['time'].replace(':', '')}.json"
    path.write_text(json.dumps(now, indent=2) + "\n")
    print(f"kept in {path}" + (f", compared with {against}" if against else ""))
    failed = [name for name, ratios in now["ratios"].items() if ratios is None]
    if failed:
        print(f"failed: {', '.join(failed)}; what was wrong stands above", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
