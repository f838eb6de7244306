"""Whatever the documentation prints is what the code does."""

import doctest
import importlib
import re
import shlex
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from programs import run_program

import jax_ddp_weighting

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "jax_ddp_weighting"
MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in PACKAGE.rglob("[a-z_]*.py")
    if path.stem not in ("__init__", "__main__")
)

# What every example may use without importing it.
NAMES = {name: getattr(jax_ddp_weighting, name) for name in jax_ddp_weighting.__all__}
NAMES |= {"jax": jax, "jnp": jnp, "np": np, "jdw": jax_ddp_weighting}


@pytest.mark.parametrize("module", MODULES)
def test_docstring_examples_run(module):
    loaded = importlib.import_module(module)
    result = doctest.testmod(loaded, extraglobs=NAMES, optionflags=doctest.ELLIPSIS)
    assert result.failed == 0


def test_the_docstring_check_can_fail():
    wrong = doctest.DocTestParser().get_doctest(">>> 1 + 1\n3\n", {}, "wrong", None, None)
    assert doctest.DocTestRunner(verbose=False).run(wrong, out=lambda text: None).failed == 1


def test_public_functions_show_an_example():
    for name in jax_ddp_weighting.__all__:
        value = getattr(jax_ddp_weighting, name)
        if callable(value) and not (isinstance(value, type) and issubclass(value, Exception)):
            assert ">>>" in value.__doc__ or name in WITHOUT_EXAMPLE, name


# see their makers
WITHOUT_EXAMPLE = {"Batch", "EpochAudit", "EpochReport", "GlobalLoss", "Slots", "StepReport"} | {
    "RestoredRun",
    "PackedRows",
    "PaddingReport",
    "StepPadding",
}


def readme_programs() -> list[tuple[str, str]]:
    """Each python block of the README, with the text block right after it as its output."""
    text = (ROOT / "README.md").read_text()
    pattern = r"```python\n(.*?)```\n(?:\s*```text\n(.*?)```)?"
    return [(code, output) for code, output in re.findall(pattern, text, flags=re.DOTALL)]


@pytest.mark.parametrize(("code", "output"), readme_programs())
def test_readme_programs_print_what_the_readme_shows(code, output):
    # in a process of its own: a program sets its own device count
    status, out, err = run_program(code, ROOT)
    assert status == 0, err
    assert out == output


def test_a_program_that_fails_or_prints_something_else_is_found():
    status, out, err = run_program("print(1)\n1 / 0", ROOT)
    assert (status, out) == (1, "1\n")
    assert "ZeroDivisionError" in err


def test_the_readme_has_a_program():
    assert readme_programs()


def test_the_readme_can_be_read_in_five_minutes():
    assert len((ROOT / "README.md").read_text().split()) <= 1200


def readme_commands() -> list[str]:
    """Each line of the README's shell blocks that calls our command."""
    blocks = re.findall(r"```sh\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    return [line for line in "".join(blocks).splitlines() if line.startswith("jax-ddp-weighting ")]


@pytest.mark.parametrize(
    ("command", "code"), [("audit", 1), ("parity", 0)]
)  # a wrong plan, a right library
def test_the_readmes_commands_find_what_it_says(command, code):
    (line,) = [each for each in readme_commands() if each.split()[1] == command]
    arguments = shlex.split(line, comments=True)[1:]
    program = f"import sys\nfrom jax_ddp_weighting.cli.app import run\nsys.exit(run({arguments}))"
    status, _, err = run_program(program, ROOT)
    assert (status, err) == (code, "")


def test_every_command_of_the_readme_is_run():
    assert [line.split()[1] for line in readme_commands()] == ["audit", "parity"]


def test_the_readmes_links_lead_somewhere():
    links = re.findall(r"\]\(([^)]+)\)", (ROOT / "README.md").read_text())
    assert [link for link in links if not (ROOT / link.split("#")[0]).is_file()] == []
    assert links
