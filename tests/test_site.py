"""The documentation's programs and commands print what it shows, and every public name is in it."""

import re
import shlex
import subprocess
from pathlib import Path

import jax
import pytest
from programs import run_program

import jax_ddp_weighting
from jax_ddp_weighting._rooms import PUBLIC
from jax_ddp_weighting.cli import app as cli

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))
BLOCK = re.compile(r"```python\n(.*?)```\n\n```text\n(.*?)```", re.DOTALL)
CONSOLE = re.compile(r"```console\n(.*?)```", re.DOTALL)
# these are run by tests/live/test_guides.py
NEEDS_EXTRAS = re.compile(r"^import (torch|grain)$", re.MULTILINE)
PROGRAMS = [
    pytest.param(code, output, id=f"{page} {place}")
    for page in PAGES
    for place, (code, output) in enumerate(BLOCK.findall((DOCS / page).read_text()))
    if not NEEDS_EXTRAS.search(code)
]


@pytest.fixture(scope="module", autouse=True)
def started():
    """JAX has started: a command leaves it as it is, with the suite's eight devices."""
    assert len(jax.devices()) == 8


@pytest.mark.parametrize(("code", "output"), PROGRAMS)
def test_programs_print_what_is_shown(code, output, tmp_path):
    # in a process of its own: a program sets its own device count
    status, out, err = run_program(code, tmp_path)
    assert status == 0, err
    assert out == output


def test_a_run_that_was_logged_as_shown_can_be_audited_as_shown(tmp_path, monkeypatch):
    text = (DOCS / "command-line.md").read_text()
    (program,) = [code for code, _ in BLOCK.findall(text) if "json.dumps" in code]
    assert run_program(program, tmp_path)[0] == 0
    (command,) = re.findall(r"^jax-ddp-weighting (audit .*\.jsonl .*)$", text, flags=re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    arguments = command.replace("epoch0-*.jsonl", *map(str, tmp_path.glob("epoch0-*.jsonl")))
    assert cli.run(arguments.split()) == 0
    without_weights = arguments.replace(" --weight-column weights", "")
    assert cli.run(without_weights.split()) == 1


def test_every_program_shows_its_output():
    shown = {}
    for page in PAGES:
        text = (DOCS / page).read_text()
        programs = re.findall(r"^```python$", text, flags=re.MULTILINE)
        shown[page] = len(BLOCK.findall(text))
        case = page == "command-line.md"  # a module of the user's own, which a command runs
        assert len(programs) == shown[page] + case, page
    paths = ("tutorial/", "guides/")
    assert all(shown[page] for page in PAGES if page.startswith(paths))


def test_the_case_that_is_shown_can_be_proved(tmp_path, monkeypatch):
    (case,) = re.findall(
        r"```python\n((?:(?!```).)*?^def case\(\):.*?)```",
        (DOCS / "command-line.md").read_text(),
        re.DOTALL | re.MULTILINE,
    )
    (tmp_path / "shown_case.py").write_text(case)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert cli.run(["parity", "shown_case:case", "--split", "2,1", "--engine", "vmap"]) == 0


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


def names_shown(page: str) -> list[str]:
    """The names that a page of the reference documents."""
    return re.findall(r"^::: jax_ddp_weighting\.(\w+)$", page, flags=re.MULTILINE)


def reference() -> dict[str, str]:
    """The pages of the reference, by the room that each is about."""
    return {path.stem: path.read_text() for path in (DOCS / "reference").glob("*.md")}


def rooms_shown() -> dict[str, tuple[str, ...]]:
    """What the reference is to show: the public names of every room, but for the version."""
    return {room.lstrip("_"): names for room, names in PUBLIC.items() if room != "_version"}


def test_every_public_name_is_on_one_page_of_the_reference():
    shown = names_shown("".join(reference().values()))
    assert sorted(shown) == sorted(jax_ddp_weighting.__all__)


def test_the_reference_has_a_page_for_each_room_with_the_rooms_names():
    found = {room: sorted(names_shown(page)) for room, page in reference().items()}
    assert found == {room: sorted(names) for room, names in rooms_shown().items()}


def test_a_name_that_a_page_does_not_show_is_found():
    page = reference()["data"]
    assert sorted(names_shown(page)) == sorted(PUBLIC["data"])
    assert sorted(names_shown(page.replace("::: jax_ddp_weighting.Batch\n", ""))) != sorted(
        PUBLIC["data"]
    )


def pages_named(navigation: str) -> list[str]:
    """The pages that a navigation names, in its order; read as text: no mkdocs in the suite."""
    return re.findall(r": ([\w/-]+\.md)$", navigation, flags=re.MULTILINE)


def test_every_page_is_in_the_navigation():
    assert sorted(pages_named((ROOT / "mkdocs.yml").read_text())) == PAGES


def test_the_navigation_names_the_rooms_in_the_order_of_the_list():
    navigation = (ROOT / "mkdocs.yml").read_text().partition("  - Reference:\n")[2]
    assert navigation.splitlines() == [f"      - {r}: reference/{r}.md" for r in rooms_shown()]


def test_a_page_that_the_navigation_leaves_out_is_found():
    navigation = (ROOT / "mkdocs.yml").read_text()
    assert sorted(pages_named(navigation.replace("reference/data.md", "data"))) != PAGES


def test_links_between_pages_lead_to_pages_and_names():
    for page in PAGES:
        links = re.findall(r"\]\(([^)#:]+\.md)(?:#([^)]*))?\)", (DOCS / page).read_text())
        for target, anchor in links:
            text = ((DOCS / page).parent / target).read_text()
            if anchor.startswith("jax_ddp_weighting."):
                assert anchor.removeprefix("jax_ddp_weighting.") in names_shown(text), page
