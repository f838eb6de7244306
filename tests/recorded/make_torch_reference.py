"""Writes torch_reference.json: what examples/torch_reference.py records of torch's own training.

Needs torch, of the version that the record names.

    python tests/recorded/make_torch_reference.py
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import layout

EXAMPLE = Path(__file__).parents[2] / "examples" / "torch_reference.py"


def make() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "record.json")
        subprocess.run([sys.executable, str(EXAMPLE), "--record", str(path)], check=True)
        return json.loads(path.read_text())


if __name__ == "__main__":
    layout.write(make, Path(__file__).parent / "torch_reference.json")
