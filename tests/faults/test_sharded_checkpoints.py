"""Sharded states, saved by two processes of two devices, one of which is killed inside a save.

What is left is restored on other numbers of devices, and saved there for two processes again.
"""

import re
import signal

import processes
import pytest

STATE = r"""
import os, signal, sys
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding, PartitionSpec as P
import jax_ddp_weighting as jdw

SPECS = {"wide": P("data"), "tall": P(None, "data"), "bias": P()}
mesh = jdw.data_mesh()
plan = jdw.EpochPlan(48, num_replicas=mesh.size, batch_size=12 // mesh.size)

def state_of(number):
    "Parameters, and moments of Adam's beside them, each sharded over the data axis."
    tx = optax.adam(0.1)
    whole = {"wide": np.arange(36.0).reshape(12, 3), "tall": np.arange(24.0).reshape(2, 12)}
    whole["bias"] = np.arange(3.0)
    def laid(tree, add):
        return {name: jax.device_put(np.float32(tree[name] + add), NamedSharding(mesh, SPECS[name]))
                for name in tree}
    moments = optax.ScaleByAdamState(
        jax.device_put(np.int32(number), NamedSharding(mesh, P())),
        laid(whole, 100 * number), laid(whole, 1000 * number))
    state = TrainState.create(apply_fn=None, params=laid(whole, number), tx=tx)
    return state.replace(step=number, opt_state=(moments, *state.opt_state[1:]))

def check(run, number):
    right, found = state_of(number), run.state
    assert run.step == number and found.step == number, (run.step, found.step)
    for wanted, got in zip(jax.tree.leaves(right), jax.tree.leaves(found), strict=True):
        if not isinstance(wanted, jax.Array):
            continue
        assert got.sharding == wanted.sharding, (got.sharding, wanted.sharding)
        assert got.dtype == wanted.dtype
        shards = zip(got.addressable_shards, wanted.addressable_shards, strict=True)
        for mine, theirs in shards:
            np.testing.assert_array_equal(mine.data, theirs.data)
    assert len({str(shard.index) for shard in found.params["wide"].addressable_shards}) > 1 or \
        mesh.size == 1
    run.position.check(plan, manifest_hash="m", ledger=run.consumed)
    assert run.consumed.num_due == 48 - 12 * number, run.consumed.num_due
    whole = jdw.gather_ledger(run.ledger)
    assert whole.digest == run.consumed.digest and whole.accepted + whole.num_due == 48
    return whole

def taken(number, start=0, ledger=None):
    "This process's part of the steps so far."
    ledger = ledger or jdw.Ledger(48, epoch=0)
    per = mesh.size // processes
    for step in range(start, number):
        ids = plan.batch(0, step).ids.reshape(mesh.size, -1)
        ledger.add(ids[rank * per : (rank + 1) * per].reshape(-1))
    return ledger

def save(manager, number, state, ledger):
    position = jdw.RunPosition.of(plan, 0, number, manifest_hash="m")
    jdw.save_run(manager, number, state, position, ledger)
"""

SAVED = (
    STATE
    + r"""
class Kill:
    "A number of the state; whoever asks for it inside Orbax's save is killed, on process 1."
    shape, dtype = (), np.dtype("float32")
    def __array__(self, dtype=None, copy=None):
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return np.zeros((), np.float32)

manager = ocp.CheckpointManager(FOLDER)
for number in (1, 2):
    save(manager, number, state_of(number), taken(number))
jdw.finish_saving(manager)
check(jdw.restore_run(manager, state_of(0)), 2)
print("saved", flush=True)
try:
    save(manager, 3, {"params": state_of(3).params, "x": Kill()}, taken(3))
except Exception as error:
    print(type(error).__name__, *getattr(error, "__notes__", ()), error, flush=True)
os._exit(3)
"""
)

RESTORED = (
    STATE
    + r"""
with ocp.CheckpointManager(FOLDER) as manager:
    run = jdw.restore_run(manager, state_of(0))
    check(run, FOUND)
    # the rows of the next step, dealt out to the processes and devices that are there now
    save(manager, FOUND + 1, state_of(FOUND + 1), taken(FOUND + 1, FOUND, run.ledger))
    jdw.finish_saving(manager)
    check(jdw.restore_run(manager, state_of(0)), FOUND + 1)
print("went on", flush=True)
"""
)


def run(program, count, devices, folder, found=0):
    program = program.replace("FOLDER", repr(str(folder))).replace("FOUND", str(found))
    return processes.launch(program, count, devices=devices, heartbeat_s=30)


@pytest.mark.quick
def test_a_sharded_run_survives_a_kill_inside_a_save_and_goes_on_anywhere(tmp_path):
    first, second = run(SAVED, 2, 2, tmp_path)
    assert first.out.startswith("saved\n"), first
    assert second.code == -signal.SIGKILL, second
    # the one that is left is told of it, by name
    assert re.search(r"process 1 absent", first.out), first
    assert not (tmp_path / "3").exists()
    for count, devices, found in ((1, 3, 2), (2, 2, 3)):
        ended = run(RESTORED, count, devices, tmp_path, found)
        assert [each.out for each in ended] == ["went on\n"] * count, ended


@pytest.mark.quick
def test_a_state_that_is_not_what_was_saved_is_seen(tmp_path):
    """The check of the test above can fail: of another step, another layout, another ledger."""
    program = STATE + (
        "with ocp.CheckpointManager(FOLDER) as manager:\n"
        "    save(manager, 1, state_of(1), taken(1))\n"
        "    save(manager, 2, state_of(1), taken(2))\n"
        "    save(manager, 3, state_of(3), taken(2))\n"
        "    jdw.finish_saving(manager)\n"
        "    def told(number, like):\n"
        "        try:\n"
        "            check(jdw.restore_run(manager, like, step=number), number)\n"
        "        except (AssertionError, ValueError) as error:\n"
        "            return type(error).__name__\n"
        "        return 'right'\n"
        "    whole = jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, P())),\n"
        "                         state_of(0))\n"
        "    print(told(1, state_of(0)), told(2, state_of(0)), told(3, state_of(0)),\n"
        "          told(1, whole))\n"
    )
    (ended,) = run(program, 1, 4, tmp_path)
    assert ended.out == "right AssertionError AssertionError AssertionError\n", ended
