"""The documentation's programs and commands print what it shows, and every public name is in it."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import jax_ddp_weighting
from jax_ddp_weighting.cli import app as cli

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))
BLOCK = re.compile(r"```python\n(.*?)```\n\n```text\n(.*?)```", re.DOTALL)
CONSOLE = re.compile(r"```console\n(.*?)```", re.DOTALL)
PROGRAMS = [
    pytest.param(code, output, id=f"{page} {place}")
    for page in PAGES
    for place, (code, output) in enumerate(BLOCK.findall((DOCS / page).read_text()))
]


@pytest.mark.parametrize(("code", "output"), PROGRAMS)
def test_programs_print_what_is_shown(code, output, tmp_path):
    # in a process of its own: a program sets its own device count
    command = [sys.executable, "-c", code]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == output


def test_a_run_that_was_logged_as_shown_can_be_audited_as_shown(tmp_path, monkeypatch):
    text = (DOCS / "command-line.md").read_text()
    (program,) = [code for code, _ in BLOCK.findall(text) if "json.dumps" in code]
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, cwd=tmp_path)
    (command,) = re.findall(r"^jax-ddp-weighting (audit .*\.jsonl .*)$", text, flags=re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    arguments = command.replace("epoch0-*.jsonl", *map(str, tmp_path.glob("epoch0-*.jsonl")))
    assert cli.run(arguments.split()) == 0
    without_weights = arguments.replace(" --weight-column weights", "")
    assert cli.run(without_weights.split()) == 1


def test_every_program_of_the_tutorial_shows_its_output():
    for path in (DOCS / "tutorial").glob("*.md"):
        programs = re.findall(r"^```python$", path.read_text(), flags=re.MULTILINE)
        assert len(programs) == len(BLOCK.findall(path.read_text())) > 0, path.name


def commands() -> list[tuple[str, str]]:
    """Each command of the documentation and what it is shown to print."""
    found = []
    for block in CONSOLE.findall((DOCS / "command-line.md").read_text()):
        for part in block.removeprefix("$ ").split("\n$ "):
            command, _, output = part.partition("\n")
            found.append((command, output))
    return found


def agrees(shown: str, printed: str) -> bool:
    """Whether a text is as shown, but for times, rounding, and the width of tables."""

    def tidy(text: str) -> list[str]:
        text = re.sub(r"\S+ ms", "TIME ms", re.sub("─+", "─", text))
        lines = [" ".join(line.split()) for line in text.splitlines() if line.strip()]
        rounding = re.compile(r"(?<= )(0|\S+e-0[6-9])(?= |$)")
        return [rounding.sub("0", line) if " + " in line else line for line in lines]

    return tidy(shown) == tidy(printed)


def test_commands_print_what_is_shown(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for command, shown in commands():
        name, *arguments = shlex.split(command)
        if name == "jax-ddp-weighting":
            assert cli.run(arguments) in (0, 1), command
        else:
            subprocess.run(command, shell=True, check=True)
        printed = capsys.readouterr().out
        assert agrees(shown, printed), f"{command}\n{printed}"


def test_a_command_that_prints_something_else_is_found():
    shown = commands()[0][1]
    assert agrees(shown, shown)
    assert not agrees(shown, shown.replace("47", "46"))
    assert not agrees("5 + 1  1e-07", "5 + 1  1e-02")


def test_every_command_is_documented():
    shown = (DOCS / "command-line.md").read_text()
    names = [command.name or command.callback.__name__ for command in cli.app.registered_commands]
    assert re.findall(r"^## (\w+)$", shown, flags=re.MULTILINE) == names


def test_every_public_name_is_on_one_page_of_the_reference():
    pages = "".join(path.read_text() for path in sorted((DOCS / "reference").glob("*.md")))
    shown = re.findall(r"^::: jax_ddp_weighting\.(\w+)$", pages, flags=re.MULTILINE)
    assert sorted(shown) == sorted(jax_ddp_weighting.__all__)


def test_every_page_is_in_the_navigation():
    # read as text: the base suite does without mkdocs
    named = re.findall(r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), flags=re.MULTILINE)
    assert sorted(named) == PAGES
