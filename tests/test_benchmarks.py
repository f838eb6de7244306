"""The runner of the benchmarks: one table of ratios, kept, and compared with the run before."""

import importlib
import json
import re
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parent.parent
FAKE = """
import sys
from pathlib import Path
from ratios import headed, keep

if __name__ == "__main__":
    headed("Sorting")
    headed(" n = 10")
    keep("ours", 0.5 * {factor})
    headed(" n = 20")
    keep("ours", 0.25)
    sys.exit({status})
"""


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(folder / "benchmarks"), *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def prepared(folder: Path, factor: float = 1, status: int = 0) -> Path:
    (folder / "benchmarks").mkdir(exist_ok=True)
    for name in ("__main__.py", "picture.py", "ratios.py"):
        shutil.copy(ROOT / "benchmarks" / name, folder / "benchmarks")
    (folder / "benchmarks" / "sorting.py").write_text(FAKE.format(factor=factor, status=status))
    return folder


def test_ratios_are_kept_and_compared_with_the_run_before(tmp_path):
    first = run(prepared(tmp_path))
    assert first.returncode == 0, first.stderr
    (kept,) = (tmp_path / ".benchmarks").glob("*.json")
    assert json.loads(kept.read_text())["ratios"] == {
        "sorting": {"Sorting | n = 10 | ours": 0.5, "Sorting | n = 20 | ours": 0.25}
    }
    second = run(prepared(tmp_path, factor=1.5), "sorting", "--against", str(kept))
    assert second.returncode == 0, second.stderr
    assert re.search(r"n = 10 . ours +\S+ 0\.75 +\S+ 0\.5 +\S+ \+50% !", second.stdout)
    assert re.search(r"n = 20 . ours +\S+ 0\.25 +\S+ 0\.25 +\S+ \+0% ", second.stdout)


def test_the_table_is_drawn_too(tmp_path):
    ran = run(prepared(tmp_path))
    assert ran.returncode == 0, ran.stderr
    (drawn,) = (tmp_path / ".benchmarks").glob("*.png")
    assert drawn.read_bytes().startswith(b"\x89PNG")
    assert f"drawn in {drawn}" in ran.stdout


def test_a_release_is_kept_and_the_newest_is_what_others_are_compared_with(tmp_path):
    prepared(tmp_path)
    assert run(tmp_path, "--release", "sorting").returncode == 2  # of all, or none
    kept = run(tmp_path, "--release")
    assert kept.returncode == 0, kept.stderr
    released = tmp_path / "benchmarks" / "released"
    (path,) = released.glob("*.json")
    assert path.stem == version("jax-ddp-weighting")
    old = json.loads(path.read_text())
    old["ratios"]["sorting"]["Sorting | n = 10 | ours"] = 0.4
    for name in ("0.9.0", "0.10.0"):  # not as words sort
        (released / f"{name}.json").write_text(json.dumps(old))
        old["ratios"]["sorting"]["Sorting | n = 10 | ours"] = 0.25
    ran = run(tmp_path)
    assert "compared with" in ran.stdout
    assert "0.10.0.json" in ran.stdout
    assert re.search(r"n = 10 . ours +\S+ 0\.5 +\S+ 0\.25 +\S+ \+100% !", ran.stdout)


def test_a_release_that_failed_is_not_kept(tmp_path):
    assert run(prepared(tmp_path, status=3), "--release").returncode == 1
    assert not (tmp_path / "benchmarks" / "released").exists()


CHILD = """
import subprocess
import sys
from ratios import headed, keep

if __name__ == "__main__":
    if sys.argv[1:]:
        keep("ours", 2.0)
    else:
        for processes in (2, {second}):
            headed(f"{{processes}} processes")
            subprocess.run([sys.executable, __file__, "child"], check=True)
"""


def test_ratios_of_processes_that_a_benchmark_starts_stand_under_its_headings(tmp_path):
    prepared(tmp_path)
    (tmp_path / "benchmarks" / "sorting.py").write_text(CHILD.format(second=4))
    assert run(tmp_path).returncode == 0
    (kept,) = (tmp_path / ".benchmarks").glob("*.json")
    names = set(json.loads(kept.read_text())["ratios"]["sorting"])
    assert names == {"2 processes | ours", "4 processes | ours"}


def test_two_ratios_of_one_name_are_refused(tmp_path):
    prepared(tmp_path)
    (tmp_path / "benchmarks" / "sorting.py").write_text(CHILD.format(second=2))
    ran = run(tmp_path)
    assert ran.returncode == 1
    assert "sorting.py: two ratios have one name" in ran.stderr


def test_a_benchmark_that_fails_is_said(tmp_path):
    ran = run(prepared(tmp_path, status=3))
    assert ran.returncode == 1
    assert "failed: sorting" in ran.stderr


def test_an_unknown_benchmark_is_refused(tmp_path):
    ran = run(prepared(tmp_path), "sortign")
    assert ran.returncode == 2
    assert "no benchmark sortign; there are sorting" in ran.stderr


def test_every_benchmark_of_ours_keeps_its_ratios():
    for path in (ROOT / "benchmarks").glob("*.py"):
        source = path.read_text()
        if path.name != "__main__.py" and "__main__" in source:
            # `line` prints a ratio and keeps it
            keeps = r"^from (ratios import .*\bkeep|sampler import .*\bline)\b"
            assert re.search(keeps, source, re.MULTILINE), path.name


def test_curves_of_long_runs_are_drawn_and_the_same_bytes_again(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    picture = importlib.import_module("picture")
    sample = {"MiB": 200.0, "descriptors": 20, "threads": 2, "keys": 0}
    curves = [{"steps": [sample] * 11} for _ in range(2)]
    for name in ("first", "second"):
        picture.save_curves(tmp_path / name, curves, {"steps": 5_000})
    drawn = (tmp_path / "first").read_text()
    assert drawn == (tmp_path / "second").read_text()
    for text in ("steps", "memory, MiB", "keys in the service", "process 1"):
        assert f">{text}</text>" in drawn
    committed = (ROOT / "docs" / "pictures" / "long-runs.svg").read_text()
    for text in ("steps", "agreements", "iterators", "file descriptors"):
        assert f">{text}</text>" in committed
