"""The package as a user gets it: built, installed in a clean environment, and used from there.

`make test-package` runs it; it asks the package index for the dependencies.
"""

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent

GRADIENTS = """
import jax_ddp_weighting as jdw
jdw.force_cpu_devices(2)
import jax, numpy as np
names = [name for name in jdw.__all__ if getattr(jdw, name) is None]
plan = jdw.EpochPlan(5, num_replicas=2, batch_size=2)
audit = jdw.audit_ids([plan.slots(0, r).ids for r in (0, 1)], 5,
                      weights=[plan.slots(0, r).weights for r in (0, 1)])
def loss_fn(w, batch):
    return jdw.weighted_sum((w - batch.data) ** 2, batch.weights)
report = jdw.check_gradients(loss_fn, np.float32(3), jdw.Batch.of(np.float32([0, 1, 5])), [(2, 1)])
print(names, audit.exactly_once, report.worst.equal, jdw.__file__)
"""

# What a user writes, with the types that the docstrings promise.
TYPED = """
import jax
import jax_ddp_weighting as jdw
import numpy as np
import optax
from flax.training.train_state import TrainState

plan = jdw.EpochPlan(47, num_replicas=3, batch_size=8, tail="mask")
steps: int = plan.steps_per_epoch
ids: list[int] = list(jdw.DistributedSampler(47, 3, 0))


def loss_fn(params: dict[str, jax.Array], batch: jdw.Batch) -> jdw.WeightedSum:
    return jdw.weighted_sum((params["w"] - batch.data) ** 2, batch.weights)


mesh = jdw.data_mesh()
step = jdw.make_train_step(loss_fn, mesh, microbatches=2)
state = TrainState.create(apply_fn=len, params={}, tx=optax.sgd(1.0))
for batch in jdw.batches(plan, 0, lambda ids: np.float32(ids), mesh):
    state, report = step(state, batch)
    print(report.loss.value, report.skipped)
duplicated: int = jdw.audit_ids(ids, 47).num_duplicated
"""
WRONGLY_TYPED = """
import jax_ddp_weighting as jdw

plan = jdw.EpochPlan(47, num_replicas=3, batch_size=8, tail="masked")
steps: str = plan.steps_per_epoch
"""


def run(*command, code=0, **options):
    """What a command printed, on both streams; it must end with `code`."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL"))}
    ran = subprocess.run(
        list(map(str, command)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        **options,
    )
    assert ran.returncode == code, ran.stdout
    return ran.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The wheel, made from the sdist, and the sdist."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--outdir", folder, ROOT)
    return next(folder.glob("*.whl")), next(folder.glob("*.tar.gz"))


@pytest.fixture(scope="module")
def environment(built, tmp_path_factory):
    """A new environment with the wheel and what it depends on, without extras."""
    folder = tmp_path_factory.mktemp("clean")
    run(sys.executable, "-m", "venv", folder)
    run(folder / "bin" / "python", "-m", "pip", "install", "--quiet", built[0])
    return folder


def test_the_wheel_holds_the_package_alone(built):
    wheel, _ = built
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"jax_ddp_weighting"}
    files = {path.relative_to(ROOT) for path in ROOT.glob("jax_ddp_weighting/**/*.*")}
    kept = {str(path) for path in files if "__pycache__" not in path.parts}
    inside = {name for name in names if name.startswith("jax_ddp_weighting/")}
    assert inside == kept >= {"jax_ddp_weighting/py.typed", "jax_ddp_weighting/cli/app.py"}
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_sdist_holds_what_is_tracked_and_nothing_that_lies_about(built):
    _, sdist = built
    with tarfile.open(sdist) as archive:
        members = archive.getmembers()
    assert {member.name.split("/")[0] for member in members} == {sdist.name.removesuffix(".tar.gz")}
    packed = {member.name.split("/", 1)[-1] for member in members if member.isfile()}
    tracked = run("git", "ls-files", "-z", cwd=ROOT).strip("\0").split("\0")
    assert packed == {*tracked, "PKG-INFO"}


def test_the_library_works_on_its_core_dependencies(environment, tmp_path):
    printed = run(environment / "bin" / "python", "-W", "error", "-c", GRADIENTS, cwd=tmp_path)
    *_, line = printed.splitlines()
    assert line.startswith(f"[] True True {environment}")


def test_commands_say_which_extra_is_missing_then_work_with_it(environment, built, tmp_path):
    program, pip = (environment / "bin" / name for name in ("jax-ddp-weighting", "pip"))
    plan = [program, "plan", "-n", "47", "-w", "3", "-b", "8"]
    (line,) = run(*plan, code=2, cwd=tmp_path).splitlines()
    assert line.endswith("Install the extra: pip install 'jax-ddp-weighting[cli]'")

    run(pip, "install", "--quiet", f"{built[0]}[cli]")
    assert "23" in run(*plan, cwd=tmp_path)
    run(program, "parity", cwd=tmp_path)
    report = [program, "report", "page.html", "-n", "47", "-w", "3", "-b", "8"]
    (line,) = run(*report, code=2, cwd=tmp_path).splitlines()
    assert "matplotlib" in line
    assert line.endswith("pip install 'jax-ddp-weighting[cli,plot]'")


def test_type_checkers_know_the_types_of_the_installed_package(environment, tmp_path):
    checker = [Path(sys.executable).parent / "pyright", "--pythonpath", environment / "bin/python"]
    (tmp_path / "right.py").write_text(TYPED)
    (tmp_path / "wrong.py").write_text(WRONGLY_TYPED)
    assert "0 errors" in run(*checker, "right.py", cwd=tmp_path)
    assert "2 errors" in run(*checker, "wrong.py", code=1, cwd=tmp_path)
