"""Training over processes is training in one: the digits example, compared at every step."""

import importlib.util
import re
import subprocess
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree
from strict import STRICT

from jax_ddp_weighting import data_mesh

EXAMPLE = Path(__file__).parents[2] / "examples" / "multiprocess.py"


def recorded(mesh, **options):
    """Loss and parameters at every step of an epoch in this process."""
    spec = importlib.util.spec_from_file_location("multiprocess", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    losses, params = [], []

    def record(report, state):
        losses.append(float(report.loss.value))
        params.append(ravel_pytree(jax.device_get(state.params))[0])

    example.train(mesh, epochs=1, on_step=record, **options)
    return np.array(losses), np.array(params)


@pytest.fixture(scope="module")
def alone():
    return recorded(data_mesh(1))


def differences(one, other):
    """The largest difference of a loss and of a parameter, step by step."""
    return [
        np.abs(mine - theirs).reshape(len(mine), -1).max(axis=1)
        for mine, theirs in zip(one, other, strict=True)
    ]


@pytest.mark.parametrize("processes", [3])
def test_processes_have_the_losses_and_parameters_of_one(processes, alone, tmp_path):
    # as a user runs it; the launcher kills its processes at the limit, and this one the launcher
    record = tmp_path / "steps.npz"
    command = [*STRICT, EXAMPLE, "--launch", processes, "--devices", 2]
    command += ["--epochs", 1, "--record", record, "--timeout", 200]
    ran = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stderr
    assert f"{processes} processes, {2 * processes} cpu devices: accuracy 0.9000" in ran.stdout
    ranks = re.findall(r'jax_ddp_weighting.agreement {"world_size": (\d), "rank": (\d)', ran.stderr)
    expected = [(str(2 * processes), str(process)) for process in range(processes)]
    assert sorted(ranks) == expected
    with np.load(record) as steps:
        found = steps["losses"], steps["params"]
    assert found[0].shape == (24,)
    for difference in differences(alone, found):
        assert difference.max() <= 1e-6


def test_the_comparison_of_steps_can_fail(alone):
    # copies that count, as torch's sampler has them: only the last step is uneven
    losses, params = differences(alone, recorded(data_mesh(6), tail="repeat"))
    assert max(losses[:-1].max(), params[:-1].max()) <= 1e-6
    assert min(losses[-1], params[-1]) > 1e-5
