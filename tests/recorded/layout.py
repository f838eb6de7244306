"""Recorded JSON as it is written: a block for each case, keys in their order, numbers in lines."""

import json
import sys
import textwrap
from pathlib import Path
from typing import Any

WIDTH = 100


def lay_out(value: Any, indent: str = "") -> str:
    """JSON of `value`: on one line where it fits, else a line for each entry of it."""
    compact = json.dumps(value, ensure_ascii=False)
    if len(indent) + len(compact) <= WIDTH - 1 or not isinstance(value, dict | list):
        return compact
    deeper = indent + "  "
    if isinstance(value, dict):
        entries = [f"{json.dumps(key)}: {lay_out(each, deeper)}" for key, each in value.items()]
        return "{\n" + ",\n".join(deeper + entry for entry in entries) + "\n" + indent + "}"
    if not any(isinstance(each, dict | list) for each in value):
        lines = textwrap.wrap(compact[1:-1], WIDTH - len(deeper))  # numbers, as many as fit
        return "[\n" + "\n".join(deeper + line for line in lines) + "\n" + indent + "]"
    return "[\n" + ",\n".join(deeper + lay_out(each, deeper) for each in value) + f"\n{indent}]"


def write(make: Any, path: Path) -> None:
    """What every script here does: writes its record where it lies, or to the path it is given."""
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else path
    path.write_text(lay_out(make()) + "\n")
