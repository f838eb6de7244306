"""Every benchmark, one table of ratios, and what became of them since an earlier run.

`python benchmarks` runs all of them, some for minutes; `python benchmarks step` one. A ratio is the
time of ours over that of what it is compared with in the same run: below 1, ours is faster. Each
run is kept in `.benchmarks`, as JSON and as a picture, and compared with the last release's, where
one is kept in `released`; else with the run before; or `--against FILE`. Before a release, on a
quiet machine: `python benchmarks --release` keeps a run of all as that of this version.
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

import picture
from ratios import FILE
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
KEPT = HERE.parent / ".benchmarks"
RELEASED = HERE / "released"
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


def last_release(folder: Path) -> Path | None:
    """The kept run of the newest version; None where none is kept."""
    found = [path for path in folder.glob("*.json") if path.stem.replace(".", "").isdigit()]
    return max(found, key=lambda path: [int(part) for part in path.stem.split(".")], default=None)


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
    parser.add_argument("--release", action="store_true", help="keep this run as the release's")
    arguments = parser.parse_args()
    if arguments.release and arguments.names:
        parser.error("--release keeps a run of all benchmarks: name none.")
    found = benchmarks(HERE)
    unknown = [name for name in arguments.names if name not in found]
    if unknown:
        parser.error(f"no benchmark {', '.join(unknown)}; there are {', '.join(found)}")
    earlier = sorted(KEPT.glob("*.json"))
    against = arguments.against or last_release(RELEASED) or (earlier[-1] if earlier else None)
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
    drawn = path.with_suffix(".png")
    picture.save(drawn, now["ratios"], (before or {"ratios": {}})["ratios"])
    print(f"kept in {path}, drawn in {drawn}" + (f", compared with {against}" if against else ""))
    failed = [name for name, ratios in now["ratios"].items() if ratios is None]
    if failed:
        print(f"failed: {', '.join(failed)}; what was wrong stands above", file=sys.stderr)
    elif arguments.release:
        RELEASED.mkdir(exist_ok=True)
        released = RELEASED / f"{version('jax-ddp-weighting')}.json"
        released.write_text(path.read_text())
        print(f"the release's: {released}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
