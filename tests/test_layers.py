"""Imports point up the list of DESIGN's house, and the numpy half never imports JAX."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import jax_ddp_weighting

PACKAGE = Path(jax_ddp_weighting.__file__).parent
NUMPY_HALF = [
    *[
        "arguments",
        "order",
        "tally",
        "coverage",
        "entries",
        "ledger",
        "audit",
        "plan",
        "views",
        "sampler",
        "manifest",
    ],
]
JAX_HALF = [
    *["coordination", "mesh", "sums", "batch", "terms", "weighting", "layout", "forms", "feed"],
    *["skipping", "multi_steps", "compiled", "step", "nnx_train", "train"],
    *["streams", "stopping", "join"],
    *["exchange", "places", "predictions", "shards", "rows", "gathering", "parts", "evaluation"],
    *["agreement", "norm"],
    *["differences", "additive", "parity"],
    *["probes", "conventions", "effective", "naming", "diagnosis"],
]
# The command line; beside what it starts without JAX, what only some commands import.
FACE = ["idfiles", "walk", "summary", "console", "options", "targets"]
SHOWN = ["proof", "report", "figures", "page"]
COMMANDS = ["reading", "counting", "cli"]
HOUSE = NUMPY_HALF + JAX_HALF + FACE + SHOWN + COMMANDS


def imported(source: str) -> set[str]:
    """The package's modules that a source imports, wherever in the file it does so."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    prefix = "jax_ddp_weighting."
    return {name.removeprefix(prefix).split(".")[0] for name in found if name.startswith(prefix)}


def below(module: str, source: str) -> set[str]:
    """What the module imports that does not stand above it in the house."""
    return {
        name
        for name in imported(source)
        if name in HOUSE and HOUSE.index(name) >= HOUSE.index(module)
    }


def test_every_module_is_in_the_house():
    modules = {path.stem for path in PACKAGE.glob("*.py")} - {"__init__", "__main__"}
    assert modules == set(HOUSE)


@pytest.mark.parametrize("module", HOUSE)
def test_imports_point_up_the_house(module):
    assert below(module, (PACKAGE / f"{module}.py").read_text()) == set()


def test_the_layer_check_can_fail():
    assert below("plan", "from jax_ddp_weighting.feed import Batch") == {"feed"}
    assert below("plan", "def f():\n    from jax_ddp_weighting import sampler") == {"sampler"}


def modules_after(statement: str) -> set[str]:
    code = f"{statement}\nimport sys; print(*sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(out.stdout.split())


@pytest.mark.parametrize("module", [*NUMPY_HALF, *FACE, *COMMANDS])
def test_the_numpy_half_and_the_command_line_import_no_jax(module):
    # in a process of its own: this one has imported JAX long ago
    loaded = modules_after(f"import jax_ddp_weighting.{module}")
    assert "jax" not in loaded
    assert "scipy" not in loaded  # 0.2 s that only torch's order needs


def test_the_no_jax_check_can_fail():
    assert "jax" in modules_after("import jax_ddp_weighting.mesh")


def test_every_public_name_resolves_and_is_known_to_type_checkers():
    typed = set()
    for node in ast.walk(ast.parse((PACKAGE / "__init__.py").read_text())):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            typed = {a.asname for each in node.body for a in each.names}  # type: ignore[attr-defined]
    assert typed == set(jax_ddp_weighting.__all__)
    for name in jax_ddp_weighting.__all__:
        value = getattr(jax_ddp_weighting, name)
        assert value.__name__ == name
        assert value.__doc__, f"{name} has no docstring"


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'weighed_sum'"):
        jax_ddp_weighting.weighed_sum


# Where users look for a name. A file that grew was split; its names stayed.
MODULES = {
    "order": "torch_order keyed_order",
    "plan": "Slots EpochPlan",
    "sampler": "DistributedSampler",
    "audit": "audit_ids EpochAudit Ledger CoverageError",
    "mesh": "force_cpu_devices data_mesh",
    "weighting": "WeightedSum GlobalLoss weighted_sum valid_labels value_and_grad rank_share",
    "feed": "Batch batches",
    "train": "make_train_step make_nnx_train_step weighted_multi_steps",
    "join": "join_batches",
    "evaluation": "gather_by_id evaluate",
    "agreement": "EpochRecord check_agreement manifest_hash DisagreementError",
    "norm": "BatchNorm NnxBatchNorm",
    "parity": "check_gradients check_additive ParityError",
    "diagnosis": "effective_weights diagnose Diagnosis",
}


@pytest.mark.parametrize("module", MODULES)
def test_each_name_comes_from_its_subjects_module_too(module):
    loaded = getattr(jax_ddp_weighting, module)
    for name in MODULES[module].split():
        assert getattr(loaded, name) is getattr(jax_ddp_weighting, name)
