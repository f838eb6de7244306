"""Many steps, agreements and iterators in two processes, and what they leave behind: nothing."""

import json

import processes

PROGRAM = r"""
import gc, json, os, threading
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
import jax_ddp_weighting as jdw

mesh = jdw.data_mesh()
plan = jdw.EpochPlan(64, num_replicas=mesh.size, batch_size=4)
rows = np.ones((64, 8), np.float32)
fetch = lambda ids: rows[ids]
client = jax._src.distributed.global_state.client

def loss_fn(params, batch):
    return jdw.weighted_sum((params["w"] - batch.data.sum(1)) ** 2, batch.weights)

step = jdw.make_train_step(loss_fn, mesh)
state = TrainState.create(apply_fn=None, params={"w": jnp.zeros(())}, tx=optax.sgd(0.1))
batch = next(jdw.batches(plan, 0, fetch, mesh))

def take_step(number):
    global state
    state, _ = step(state, batch)

def agree(number):
    jdw.check_agreement(jdw.EpochRecord.of(plan, number, "m"))

def open_and_drop(number):
    if number % 2:
        stream = jdw.batches(plan, number, fetch, mesh, prefetch=1 + number % 3)
    else:
        stream = jdw.join_batches([jdw.Batch.of(rows[:4])] * 3, mesh)
    if number % 4 < 2:
        next(stream)

def sample():
    jax.block_until_ready(state)
    gc.collect()
    client.wait_at_barrier(f"sample {len(samples)}", 60_000)  # nothing is on its way
    with open("/proc/self/statm") as file:
        resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    found = {
        "MiB": round(resident, 1),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "keys": len(client.key_value_dir_get("jax_ddp_weighting/")),
    }
    client.wait_at_barrier(f"sampled {len(samples)}", 60_000)
    samples.append(found)
    return found

samples = []
for name, act, times in (
    ("agreements", agree, AGREEMENTS), ("iterators", open_and_drop, ITERATORS),
    ("steps", take_step, STEPS),
):
    curve = [sample()]
    for part in range(10):
        for number in range(times * part // 10, times * (part + 1) // 10):
            act(number)
        curve.append(sample())
    print(json.dumps([name, curve]), flush=True)
"""


def measure(*, steps, agreements, iterators, timeout_s):
    """Of each process the curves by name: eleven samples of each."""
    program = PROGRAM
    for name, times in (("STEPS", steps), ("AGREEMENTS", agreements), ("ITERATORS", iterators)):
        program = program.replace(name, str(times))
    ended = processes.launch(program, 2, timeout_s=timeout_s, heartbeat_s=60)
    assert [each.code for each in ended] == [0, 0], ended
    return [dict(map(json.loads, each.out.splitlines())) for each in ended]


def check_flat(curves):
    """Raises unless nothing grows after the first third, which fills pools and caches."""
    for name, curve in curves.items():
        settled, last = curve[4:], curve[-1]
        assert last["keys"] <= 4, (name, curve)  # notes of the last meeting, which nobody reads
        for what, slack in (("descriptors", 2), ("threads", 6)):
            assert last[what] <= settled[0][what] + slack, (name, what, curve)
        assert last["MiB"] <= settled[0]["MiB"] + 8, (name, curve)
