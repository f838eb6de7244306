"""Programs of the guides that need torch or grain print what they show."""

import re
from pathlib import Path

import pytest
from programs import run_program

GUIDES = Path(__file__).parents[2] / "docs" / "guides"
BLOCK = re.compile(r"```python\n(.*?)```\n\n```text\n(.*?)```", re.DOTALL)
NEEDS_EXTRAS = re.compile(r"^import (torch|grain)$", re.MULTILINE)
PROGRAMS = [
    pytest.param(code, output, id=path.stem)
    for path in sorted(GUIDES.glob("*.md"))
    for code, output in BLOCK.findall(path.read_text())
    if NEEDS_EXTRAS.search(code)
]


@pytest.mark.parametrize(("code", "output"), PROGRAMS)
def test_programs_with_torch_and_grain_print_what_is_shown(code, output, tmp_path):
    status, out, err = run_program(code, tmp_path)
    assert status == 0, err
    assert out == output


def test_there_are_such_programs():
    assert {each.id for each in PROGRAMS} == {"feeding", "from-torch-ddp"}
