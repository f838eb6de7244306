"""What the base suite has recorded is what the scripts beside it write."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

RECORDED = Path(__file__).parents[1] / "recorded"


def written(script, path):
    subprocess.run([sys.executable, str(RECORDED / script), str(path)], check=True, timeout=300)
    return path.read_text()


# torch_reference.json holds rounding, and is compared by its numbers in test_ddp
@pytest.mark.parametrize("name", ["denominators", "torch_sampler"])
def test_a_record_is_what_its_script_writes(name, tmp_path):
    record = (RECORDED / f"{name}.json").read_text()
    assert written(f"make_{name}.py", tmp_path / "record.json") == record


def test_a_record_of_other_numbers_is_another_text(tmp_path):
    record = json.loads((RECORDED / "torch_sampler.json").read_text())
    record["cases"][-1][-1][0].reverse()
    path = tmp_path / "other.json"
    code = f"import layout, pathlib; layout.write(lambda: {record!r}, pathlib.Path({str(path)!r}))"
    subprocess.run([sys.executable, "-c", code], cwd=RECORDED, check=True)
    assert path.read_text() != (RECORDED / "torch_sampler.json").read_text()
    assert json.loads(path.read_text()) == record  # laid out, nothing is lost
