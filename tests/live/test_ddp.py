"""Training beside torch itself: real DistributedDataParallel over gloo, 2 and 3 processes."""

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from strict import STRICT

from jax_ddp_weighting import diagnose_weights, effective_weights

ROOT = Path(__file__).parents[2]
RECORD = json.loads((ROOT / "tests" / "recorded" / "torch_reference.json").read_text())
ALLOWED = {"float32": 1e-5, "float64": 1e-10}


@pytest.fixture(scope="module")
def example(tmp_path_factory):
    """What the example printed, and what it recorded."""
    path = tmp_path_factory.mktemp("reference") / "record.json"
    command = [*STRICT, str(ROOT / "examples" / "torch_reference.py")]
    ran = subprocess.run(
        [*command, "--record", str(path)], capture_output=True, text=True, timeout=600
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout, json.loads(path.read_text())


def test_the_example_finds_torch_and_us_equal_and_names_the_rest(example):
    out, _ = example
    assert out.count("a. torch, written right") == 4
    assert out.count("b. torch as usual: mean_of_means, factor 1") == 2
    assert "c. torch's join, initial_ranks: mean_of_means, factor 1" in out
    assert "c. torch's join, active_ranks: mean_of_nonempty_means, factor 1" in out
    assert "initial_ranks: 37.00 36.67 33.33" in out
    assert "active_ranks: 37.00 55.00 100.00" in out


def relative(a, b):
    a, b = np.asarray(a), np.asarray(b)
    return np.max(np.abs(a - b)) / np.max(np.abs(b))


@pytest.mark.parametrize("ranks", ["2", "3"])
def test_what_the_base_suite_has_recorded_is_what_torch_gives(example, ranks):
    found, recorded = example[1]["ranks"][ranks], RECORD["ranks"][ranks]
    assert found.keys() == recorded.keys()
    for dtype, each in recorded["right"].items():
        assert relative(found["right"][dtype]["losses"], each["losses"]) < ALLOWED[dtype]
        for step, gradient in each["gradients"].items():
            assert relative(found["right"][dtype]["gradients"][step], gradient) < ALLOWED[dtype]
    for name in found.keys() - {"right"}:
        assert relative(found[name], recorded[name]) < 1e-12
    # and the comparison can fail
    assert relative(found["usual"], recorded["right"]["float64"]["gradients"]["0"]) > 1e-2


def test_torchs_own_gradients_go_in_as_they_are():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    x = torch.randn(5, 5)

    def gradient(loss):
        model.zero_grad()
        loss.backward()
        return {name: leaf.grad.clone() for name, leaf in model.named_parameters()}

    own = [gradient(model(row[None]).sum() ** 2) for row in x]
    own = {name: torch.stack([each[name] for each in own]) for name in own[0]}
    means = [(model(rows) ** 2).mean() for rows in (x[:4], x[4:])]  # two ranks, 4 rows and 1
    found = effective_weights(gradient(sum(means) / 2), own)
    np.testing.assert_allclose(found, [1 / 8] * 4 + [1 / 2], rtol=1e-3)
    counts = np.zeros((2, 1, 4))
    counts[0, 0], counts[1, 0, 0] = found[:4], found[4]
    weights = np.array([[[1, 1, 1, 1]], [[1, 0, 0, 0]]])
    assert diagnose_weights(counts, weights).convention == "mean_of_means"
