"""Imports point down the house, names have one home, and what is numpy alone never imports JAX."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import jax_ddp_weighting
from jax_ddp_weighting._rooms import FLOORS, PUBLIC

PACKAGE = Path(jax_ddp_weighting.__file__).parent
ROOMS = [room for floor in FLOORS for room in floor]
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
FILES = sorted(
    path.relative_to(PACKAGE)
    for path in PACKAGE.rglob("*.py")
    if path.relative_to(PACKAGE).name != "__main__.py" and path.parent != PACKAGE
)
PREFIX = "jax_ddp_weighting."


def imported(source: str) -> dict[str, set[str]]:
    """The package's modules that a source imports, wherever in the file, and what from them."""
    found: dict[str, set[str]] = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                found.setdefault(alias.name, set())
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.setdefault(node.module, set()).update(alias.name for alias in node.names)
    package = {name: names for name, names in found.items() if name.startswith(PREFIX)}
    for name in found.get(PREFIX.rstrip("."), set()):  # from jax_ddp_weighting import name
        package[PREFIX + name] = set()
    return {name.removeprefix(PREFIX): names for name, names in package.items()}


def picture(text: str) -> list[tuple[str, ...]]:
    """The floors of the house as an indented block shows them: rooms, and words about them."""
    lines = re.findall(r"(?m)^    (\S.*)$", text)
    return [tuple(re.split(r" \| ", re.split(r"  +", line)[0])) for line in lines]


def test_contributing_shows_the_house_as_the_list_has_it():
    assert picture((PACKAGE.parent / "CONTRIBUTING.md").read_text()) == list(FLOORS)


def test_a_picture_of_another_house_is_found():
    assert picture("    cli    calls\n    train | data  steps\n") == [("cli",), ("train", "data")]
    right = (PACKAGE.parent / "CONTRIBUTING.md").read_text()
    assert picture(right.replace("sampling | distributed", "sampling | data")) != list(FLOORS)


def room_of(module: str) -> str:
    return module.split(".")[0]


def not_below(room: str, source: str) -> set[str]:
    """The rooms that a file of `room` imports from and that do not lie below it."""
    rooms = {room_of(module) for module in imported(source)} - {room}
    return {each for each in rooms if FLOOR.get(each, -1) <= FLOOR[room]}


def test_the_list_holds_every_room_and_no_other():
    folders = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").is_file()}
    files = {path.stem for path in PACKAGE.glob("*.py")} - {"__init__", "__main__", "_rooms"}
    assert folders | files == set(ROOMS)


@pytest.mark.parametrize("file", FILES, ids=str)
def test_imports_point_down_the_house(file):
    assert not_below(file.parts[0], (PACKAGE / file).read_text()) == set()


@pytest.mark.parametrize("room", FLOORS[-1])
def test_the_lowest_floor_imports_nothing_of_the_house(room):
    assert not_below(room, (PACKAGE / f"{room}.py").read_text()) == set()


def test_the_check_of_the_direction_can_fail():
    assert not_below("sampling", "from jax_ddp_weighting.data.batch import Batch") == {"data"}
    assert not_below("data", "def f():\n    from jax_ddp_weighting import train") == {"train"}
    neighbour = "from jax_ddp_weighting.distributed import mesh"
    assert not_below("sampling", neighbour) == {"distributed"}
    assert not_below("weighting", "import jax_ddp_weighting.cli.app") == {"cli"}
    assert not_below("cli", "from jax_ddp_weighting.train.step import StepReport") == set()


def cycles(imports: dict[str, set[str]]) -> set[str]:
    """The modules that import each other in a circle."""
    left = dict(imports)
    while free := [module for module, needs in left.items() if not needs & left.keys()]:
        for module in free:
            del left[module]
    return set(left)


def test_no_modules_import_each_other_in_a_circle():
    def modules_imported(file: Path) -> set[str]:
        found = set()
        for module, names in imported((PACKAGE / file).read_text()).items():
            found |= {module, *(f"{module}.{name}" for name in names)}
        return found

    graph = {
        ".".join(file.with_suffix("").parts): modules_imported(file)
        for file in FILES
        if file.name != "__init__.py"
    }
    assert cycles(graph) == set()
    assert cycles({"a": {"b"}, "b": {"a"}, "c": {"a"}}) == {"a", "b", "c"}  # it can fail


def defined(source: str) -> set[str]:
    """The names that a module defines itself, rather than imports."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return found


def taken_secondhand(source: str) -> set[str]:
    """What a source imports from a module that has only imported it, or from a room's front."""
    found = set()
    for module, names in imported(source).items():
        path = PACKAGE.joinpath(*module.split("."))
        if path.is_dir():
            found |= {f"{module}.{name}" for name in names if not (path / f"{name}.py").is_file()}
        elif path.with_suffix(".py").is_file():
            home = defined(path.with_suffix(".py").read_text())
            found |= {f"{module}.{name}" for name in names - home}
    return found


@pytest.mark.parametrize("file", [f for f in FILES if f.name != "__init__.py"], ids=str)
def test_names_are_imported_from_where_they_are_defined(file):
    assert taken_secondhand((PACKAGE / file).read_text()) == set()


def test_a_name_taken_secondhand_is_found():
    through_the_front = "from jax_ddp_weighting.data import Batch"
    through_another = "from jax_ddp_weighting.data.loader import Batch"
    assert taken_secondhand(through_the_front) == {"data.Batch"}
    assert taken_secondhand(through_another) == {"data.loader.Batch"}
    assert taken_secondhand("from jax_ddp_weighting.data.batch import Batch") == set()


def modules_after(*statements: str) -> list[set[str]]:
    """The modules that are loaded after each of the statements, in a process of their own."""
    code = "import sys\n" + "\n".join(f"{each}\nprint(*sys.modules)" for each in statements)
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return [set(line.split()) for line in out.stdout.splitlines()]


def test_rooms_load_no_more_than_they_need():
    # in one process that loads more and more: this one has imported JAX long ago
    sampling, command_line, train, nnx = modules_after(
        "import jax_ddp_weighting.sampling",
        "import jax_ddp_weighting.cli.app",
        "import jax_ddp_weighting.train",
        "from jax_ddp_weighting.train import make_nnx_train_step",
    )
    for loaded in (sampling, command_line):
        assert "jax" not in loaded
        assert "scipy" not in loaded  # 0.2 s that only torch's order needs
    assert "jax" in train  # so the checks above can fail, and the next one too
    assert "flax.nnx" not in train
    assert "flax.nnx" in nnx


@pytest.mark.parametrize("room", PUBLIC)
def test_a_room_exports_what_the_list_says(room):
    loaded = getattr(jax_ddp_weighting, room)
    if not room.startswith("_"):
        assert sorted(loaded.__all__) == sorted(PUBLIC[room])
    for name in PUBLIC[room]:
        assert getattr(loaded, name) is getattr(jax_ddp_weighting, name)


def test_every_public_name_is_documented():
    for name in jax_ddp_weighting.__all__:
        value = getattr(jax_ddp_weighting, name)
        if callable(value):
            assert value.__name__ == name
            assert value.__doc__, f"{name} has no docstring"


def test_no_module_bears_the_name_of_a_function_that_its_room_exports():
    for room, names in PUBLIC.items():
        modules = {path.stem for path in (PACKAGE / room).glob("*.py")}
        assert modules.isdisjoint(names), room


def test_type_checkers_see_the_public_names_of_every_room():
    seen = set()
    for node in ast.walk(ast.parse((PACKAGE / "__init__.py").read_text())):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            seen = {each.module.removeprefix(PREFIX) for each in node.body}  # type: ignore[attr-defined]
    assert seen == set(PUBLIC)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'weighed_sum'"):
        jax_ddp_weighting.weighed_sum
    with pytest.raises(AttributeError, match="has no attribute 'make_trian_step'"):
        jax_ddp_weighting.train.make_trian_step
