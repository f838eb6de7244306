"""What a release is made of agrees: version, changelog, citation, workflows, hooks, tables."""

import importlib.util
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from jax_ddp_weighting import __version__

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
CHECK = ROOT / ".ci" / "check_release.py"
MEANT = ("jax_ddp_weighting/_version.py", "CHANGELOG.md", "CITATION.cff")


def load_check():
    spec = importlib.util.spec_from_file_location("check_release", CHECK)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


check = load_check()


def make_release(folder: Path) -> Path:
    """The files that a release reads, with nothing unreleased."""
    for name in MEANT:
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    text = (folder / "CHANGELOG.md").read_text()
    emptied = re.sub(r"(?<=## Unreleased\n).*?(?=^## )", "\n", text, count=1, flags=re.M | re.S)
    (folder / "CHANGELOG.md").write_text(emptied)
    return folder


def test_the_version_can_be_released_under_its_tag(tmp_path):
    assert check.find_faults(f"v{__version__}", make_release(tmp_path)) == []


@pytest.mark.parametrize(
    ("name", "old", "new", "said"),
    [
        (MEANT[0], __version__, "9.9.9", "the tag must be v9.9.9"),
        (MEANT[1], "## Unreleased\n", "## Unreleased\n\n- Something.\n", "an empty"),
        (MEANT[1], "## Unreleased\n", "", 'an empty "Unreleased"'),
        (MEANT[1], f"## {__version__} - ", f"## {__version__} of ", "YYYY-MM-DD"),
        (MEANT[2], f"version: {__version__}", "version: 0.0.1", "must have version"),
        (MEANT[2], "date-released: 2", "date-released: 1", "must have date-released"),
    ],
)
def test_what_differs_is_named(tmp_path, name, old, new, said):
    path = make_release(tmp_path) / name
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    assert any(said in fault for fault in check.find_faults(f"v{__version__}", tmp_path))


def test_a_wrong_tag_ends_the_program():
    ran = subprocess.run([sys.executable, CHECK, "v0.0.0"], capture_output=True, text=True)
    assert ran.returncode == 1
    assert f"the tag must be v{__version__}" in ran.stderr


def test_the_changelog_has_dated_versions_newest_first_under_fixed_headings():
    text = (ROOT / "CHANGELOG.md").read_text()
    unreleased, *released = check.split_changelog(text)
    assert unreleased == "Unreleased"
    dates = [re.fullmatch(r"\d+\.\d+\.\d+ - (\d{4}-\d\d-\d\d)", each)[1] for each in released]
    assert dates == sorted(dates, reverse=True)
    assert released[0].startswith(f"{__version__} - ")
    headings = set(re.findall(r"^### (.+)$", text, re.MULTILINE))
    assert headings <= {"Added", "Changed", "Deprecated", "Fixed"}


def test_the_workflows_run_what_everybody_runs():
    test, release = (
        yaml.safe_load((ROOT / ".github" / "workflows" / f"{name}.yml").read_text())
        for name in ("test", "release")
    )
    steps = [step for job in test["jobs"].values() for step in job["steps"]]
    assert ".ci/run" in [step.get("run") for step in steps]
    assert release["jobs"]["test"]["uses"] == "./.github/workflows/test.yml"
    publish = release["jobs"]["publish"]
    assert publish["permissions"] == {"id-token": "write"}
    assert "secrets" not in str(release)
    (asked,) = {job["needs"] for job in [publish]}
    assert release["jobs"][asked]["needs"] == "test"


def test_what_the_workflows_fetch_cannot_change_unseen():
    texts = [path.read_text() for path in (ROOT / ".github" / "workflows").glob("*.yml")]
    used = re.findall(r"uses: (?!\./)(\S+)@(\S+)", "\n".join(texts))
    moving = {action for action, at in used if not re.fullmatch("[0-9a-f]{40}", at)}
    assert len(used) == 10
    assert moving == {"pypa/gh-action-pypi-publish"}


def test_every_make_target_that_ci_and_the_workflows_name_is_there():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    texts = [(ROOT / ".ci" / "run").read_text()]
    texts += [path.read_text() for path in (ROOT / ".github").rglob("*.yml")]
    named = set(re.findall(r"^\s*(?:- run: )?make ([\w-]+)", "\n".join(texts), re.MULTILINE))
    assert {"lint", "test", "docs"} <= named <= targets


def test_the_hooks_are_the_projects_own_lint():
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    (repository,) = config["repos"]
    assert repository["repo"] == "local"  # nothing is fetched, and versions are those of CI
    programs = [hook["entry"].split()[0] for hook in repository["hooks"]]
    assert programs == [".venv/bin/ruff", ".venv/bin/ruff", ".venv/bin/pyright"]
    requirements = " ".join(PROJECT["project"]["optional-dependencies"]["test"])
    assert "ruff" in requirements
    assert "pyright" in requirements


def test_the_issue_templates_can_be_read():
    for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"):
        form = yaml.safe_load(path.read_text())
        if path.name != "config.yml":
            assert {"name", "description", "body"} <= set(form), path.name
            ids = [field["id"] for field in form["body"]]
            assert len(set(ids)) == len(ids) > 0


def versions_run() -> list[dict[str, str]]:
    """The rows of the table of versions that the suite has run on."""
    lines = (ROOT / "docs" / "versions.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if "|" in line]
    return [dict(zip(rows[0], row, strict=True)) for row in rows[2:]]


def test_the_oldest_versions_in_the_table_are_those_that_are_allowed():
    oldest = versions_run()[0]
    bounds = dict(each.split(">=") for each in PROJECT["project"]["dependencies"])
    for name in ("jax", "flax", "optax", "chex"):
        assert oldest[name] == bounds[name], name
    assert oldest["numpy"].startswith(bounds["numpy"])
    assert PROJECT["project"]["requires-python"] == f">={oldest['Python']}"


def test_the_pythons_in_the_table_are_those_that_the_package_claims():
    claimed = {
        each.rsplit(" :: ")[-1]
        for each in PROJECT["project"]["classifiers"]
        if each.startswith("Programming Language :: Python :: 3.")
    }
    assert claimed == {row["Python"] for row in versions_run()}
