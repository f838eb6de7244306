"""A disk that is full: told by name and at once, and what was there before stays."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# No file may be longer than the limit, whoever writes it: as good as a full disk, and no mount.
# What is printed goes to a pipe, which has no such limit.
PROGRAM = r"""
import os, resource, sys, tempfile, warnings
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import jax_ddp_weighting as jdw

folder = sys.argv[1]
noise = np.random.default_rng(0).normal(size=5_000).astype(np.float32)
plan = jdw.EpochPlan(100_000, num_replicas=1, batch_size=1_000)

def run_at(step):
    ledger = jdw.Ledger(100_000, epoch=0)
    for taken in range(step):
        ledger.add(plan.batch(0, taken).ids)
    return jdw.RunPosition.of(plan, 0, step, manifest_hash="m"), ledger

def full(limit=3_000):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))

def free():
    full(resource.RLIM_INFINITY)

def told(act):
    try:
        return act()
    except (OSError, RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"

def listed(where):
    return sorted(os.listdir(where))

# a ledger
path = f"{folder}/ledger"
run_at(1)[1].save(path)
full()
text = told(lambda: run_at(2)[1].save(path))
assert text.startswith("OSError: [Errno 27]") and text.endswith(f"{path!r}"), text
free()
assert jdw.Ledger.load(path).digest == run_at(1)[1].digest
assert listed(folder) == ["ledger"]

# parts, and what is made of them
parts = f"{folder}/parts"
jdw.write_part(parts, np.arange(1_000), None, noise[:1_000], run="r")
before = listed(parts)
full()
text = told(lambda: jdw.write_part(parts, np.arange(1_000, 2_000), None, noise[:1_000], run="r"))
assert text.startswith("OSError: [Errno 27]") and "part-00000-" in text, text
again = told(lambda: jdw.write_part(parts, np.arange(1_000), None, noise[:1_000], run="r"))
assert again.startswith("OSError: [Errno 27]"), again
text = told(lambda: jdw.read_parts(parts, run="r", into=f"{folder}/result"))
assert text.startswith("OSError: [Errno 27]"), text
free()
assert listed(parts) == before and listed(f"{folder}/result") == []
np.testing.assert_array_equal(jdw.read_parts(parts, run="r").predictions, noise[:1_000])
assert jdw.held_ids(parts, run="r").tolist() == list(range(1_000))

# a checkpoint: at once, and in the background
for background in (False, True):
    where = f"{folder}/{background}"
    options = ocp.CheckpointManagerOptions(
        enable_async_checkpointing=background, max_to_keep=1)
    with ocp.CheckpointManager(where, options=options) as manager:
        state = {"w": jnp.asarray(noise)}
        jdw.save_run(manager, 1, state, *run_at(1))
        jdw.finish_saving(manager)
        for again in range(2):  # as often as it happens
            full()
            text = told(lambda: jdw.save_run(manager, 2 + again, {"w": -state["w"]}, *run_at(2)))
            if background:
                assert text is True
                text = told(lambda: jdw.finish_saving(manager))
                assert text.startswith("RuntimeError: finish_saving: the checkpoint before"), text
            assert "Failed to write" in text, text
            free()
            jdw.finish_saving(manager)  # it is told once
            run = jdw.restore_run(manager, state)
            assert (run.step, run.consumed.num_due) == (1, 99_000)
            np.testing.assert_array_equal(run.state["w"], noise)
        if background:  # told by the next save too, and by restoring
            for act in (lambda: jdw.save_run(manager, 5, state, *run_at(3)),
                        lambda: jdw.restore_run(manager, state)):
                full()
                assert jdw.save_run(manager, 4, state, *run_at(3))
                assert "_run: the checkpoint before must have been written" in told(act)
                free()
        assert jdw.save_run(manager, 6, state, *run_at(3))
        jdw.finish_saving(manager)
        assert jdw.restore_run(manager, state).consumed.num_due == 97_000
print("all told")
"""


@pytest.mark.quick
def test_a_full_disk_is_told_and_what_was_there_stays(tmp_path):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert ended.stdout == "all told\n", ended.stderr[-3000:]
