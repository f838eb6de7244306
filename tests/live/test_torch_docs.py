"""The programs of the pages that need torch print what is shown; those of the guides elsewhere."""

import re
from pathlib import Path

import pytest
from programs import run_program

DOCS = Path(__file__).parents[2] / "docs"
BLOCK = re.compile(r"```py\n(.*?)```\n\n```text\n(.*?)```", re.DOTALL)
PROGRAMS = [
    pytest.param(code, output, id=f"{path.name} {place}")
    for path in sorted(DOCS.glob("*.md"))
    for place, (code, output) in enumerate(BLOCK.findall(path.read_text()))
]


@pytest.mark.parametrize(("code", "output"), PROGRAMS)
def test_programs_with_torch_print_what_is_shown(code, output, tmp_path):
    # in a process of its own, as a reader runs it
    status, out, err = run_program(code, tmp_path)
    assert status == 0, err
    assert out == output


def test_every_program_with_torch_shows_its_output():
    texts = [path.read_text() for path in DOCS.glob("*.md")]
    assert len(PROGRAMS) == sum(len(re.findall(r"^```py$", t, re.MULTILINE)) for t in texts) == 3
