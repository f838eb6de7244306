"""The command line as a whole: help, version, what it loads, and one line for what is wrong."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import COMMANDS, PLAN, printed, refusal, run

import jax_ddp_weighting

HELP = Path(__file__).parent / "help"


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_is_what_it_was(command, capsys, monkeypatch):
    # On purpose? COLUMNS=80 python -m jax_ddp_weighting COMMAND --help > tests/cli/help/COMMAND.txt
    monkeypatch.setenv("COLUMNS", "80")
    assert run(*command.split(), "--help") == 0
    kept = (HELP / f"{command or 'all'}.txt").read_text()
    assert printed(capsys).split("\n") == [line.rstrip() for line in kept.splitlines()]


def test_every_help_that_is_kept_belongs_to_a_command():
    assert {path.stem for path in HELP.glob("*.txt")} == {"all", *COMMANDS}


def test_the_version_is_printed(capsys):
    assert run("--version") == 0
    assert capsys.readouterr().out == f"jax-ddp-weighting {jax_ddp_weighting.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("", r"Missing command"),
        ("plam", r"No such command 'plam'"),
    ],
)
def test_bad_input_gets_one_line(arguments, said, capsys):
    assert re.search(said, refusal(capsys, *arguments.split()))


def test_a_reader_that_has_gone_hears_no_complaint():
    # in a process of its own: its standard output is closed
    command = f"{sys.executable} -m jax_ddp_weighting audit -n 9 -w 3 -b 1 --epochs 999 --json"
    ran = subprocess.run(["bash", "-c", f"{command} | head -1"], capture_output=True, text=True)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "{\n", "")


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


LOADED = """import sys
from jax_ddp_weighting.cli import app
app.run({})
assert 'jax' not in sys.modules"""


@pytest.mark.parametrize("command", ["plan", "audit"])
def test_plan_and_audit_start_without_jax(command):
    # in a process of its own: this one has imported JAX long ago
    assert python(LOADED.format([command, *PLAN])).returncode == 0


def test_the_check_for_jax_can_fail():
    ran = python("import jax\n" + LOADED.format(["plan", *PLAN]))
    assert "AssertionError" in ran.stderr


@pytest.mark.parametrize("package", ["typer", "rich"])
def test_a_missing_extra_is_one_line(package):
    hidden = f"import sys; sys.modules[{package!r}] = None\n"
    start = "from jax_ddp_weighting.__main__ import main; sys.exit(main())"
    ran = python(hidden + start)
    assert ran.returncode == 2
    assert ran.stderr.count("\n") == 1
    assert "pip install 'jax-ddp-weighting[cli]'" in ran.stderr
