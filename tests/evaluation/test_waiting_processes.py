"""Whatever fails, is late or is gone on one process is told to all of them, in time."""

import processes

# In processes of their own, since it is about what travels between them. One launch for all that
# every process survives, and a kill at its end.
PROGRAM = r"""
import os, signal, time
from contextlib import nullcontext
from unittest import mock
import numpy as np
import jax_ddp_weighting as jdw
from jax_ddp_weighting.distributed import allgather
from jax_ddp_weighting.evaluation import gathering, predictions

plan = jdw.EpochPlan(12, num_replicas=3, batch_size=2)
ids, rows = np.arange(4) + 4 * rank, np.ones((4, 3))

def told(name, call, limit=10):
    start = time.monotonic()
    try:
        said = call()
    except Exception as error:
        said = f"{type(error).__name__} {error}"
    print(name, time.monotonic() - start < limit, said, flush=True)

told("due", lambda: jdw.due_step(FOLDER, plan))
told("epoch", lambda: jdw.due_step(FOLDER, plan, epoch=-1 if rank == 1 else 0))
def denied(path, *args, **kwargs):
    raise PermissionError("not yours")
jdw.write_part(FOLDER, ids, None, rows)
told("all", lambda: len(set(allgather.allgather_messages(rank, gathering.Waiting("test", 60)))))
if rank == 1:
    with mock.patch("pathlib.Path.open", denied):
        told("denied", lambda: jdw.due_step(FOLDER, plan))
else:
    told("denied", lambda: jdw.due_step(FOLDER, plan))

def gather(**options):
    return len(jdw.gather_by_id(ids, None, rows, num_examples=12, **options))

def fails(*_, **__):
    raise MemoryError("no room")

def fails_later(*_, **__):
    fails()
    yield

told("gathered", gather)
for what in (
    "jax_ddp_weighting.evaluation.gathering.np.empty",
    "jax_ddp_weighting.distributed.allgather.np.zeros",
    "jax_ddp_weighting.distributed.allgather._chunks",  # a generator
    "jax_ddp_weighting.evaluation.gathering.Table",
    "jax_ddp_weighting.evaluation.gathering.Table.put",
    "jax_ddp_weighting.evaluation.gathering.columns_of",
):
    how = fails_later if "_chunks" in what else fails
    with mock.patch(what, how) if rank == 1 else nullcontext():
        told(what.rsplit(".", 1)[1], gather)
told("again", gather)
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
told("killed", lambda: gather(timeout_s=4))
os._exit(0)
"""


def test_what_fails_on_one_process_is_told_to_all_and_one_that_is_killed_is_named(tmp_path):
    program = PROGRAM.replace("FOLDER", repr(str(tmp_path)))
    ended = processes.launch(program, 3, timeout_s=90, heartbeat_s=60)
    for rank, each in enumerate(ended):
        here = "" if rank == 1 else " (raised on process 1)"
        error = "MemoryError no room" if rank == 1 else "RuntimeError MemoryError: no room" + here
        starts = {
            "due": "0",
            "epoch": "ValueError due_step: epoch must be an integer in [0, 2**63), got -1.",
            "all": "3",
            "denied": ("" if rank == 1 else "RuntimeError ") + "PermissionError",
            "gathered": "12",
            **dict.fromkeys(("empty", "zeros", "_chunks", "Table", "put", "columns_of"), error),
            "again": "12",
            "killed": "RuntimeError",
        }
        if rank == 1:
            del starts["killed"]
        lines = [line.split(" True ", 1) for line in each.out.splitlines()]
        assert [name for name, _ in lines] == list(starts), each
        for name, said in lines[: -1 if rank != 1 else None]:
            assert said.startswith(starts[name]), (name, each)
        if rank != 1:
            assert "AbsentError gather_by_id: process 1 absent, " in each.out.splitlines()[-1]


# One comes late, one is interrupted in its wait, and one waits on.
INTERRUPTED = r"""
import os, signal, threading, time
import numpy as np
import jax_ddp_weighting as jdw

ids = np.arange(4) + 4 * rank
jdw.gather_by_id(ids, None, ids)  # devices and their connections are there from here on
start = time.monotonic()
if rank == 2:
    time.sleep(12)
if rank == 1:
    threading.Timer(2, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    jdw.gather_by_id(ids, None, ids, timeout_s=16)
except BaseException as error:
    print(time.monotonic() - start < {0: 11, 1: 3.5, 2: 30}[rank], type(error).__name__, error,
          flush=True)
time.sleep(1)
os._exit(0)
"""


def test_a_signal_ends_the_wait_of_a_gather_and_the_others_are_told():
    ended = processes.launch(INTERRUPTED, 3, timeout_s=60, heartbeat_s=60)
    assert ended[1].out.startswith("True KeyboardInterrupt"), ended
    said = "True AbsentError gather_by_id: processes 1, 2 absent"
    assert ended[0].out.startswith(said), ended


STOPPED = r"""
import os, signal, time
import jax.numpy as jnp
import numpy as np
import jax_ddp_weighting as jdw

mesh = jdw.data_mesh()
plan = jdw.EpochPlan(60, num_replicas=2, batch_size=1)
metric = lambda batch: jdw.weighted_sum(batch.data.sum(1), batch.weights)

def rows(ids):
    if STOPS and rank == 1 and rows.calls == 15:
        os.kill(os.getpid(), signal.SIGSTOP)
    rows.calls += 1
    return np.ones((len(ids), 8192)) * ids[:, None]

rows.calls = 0
start = time.monotonic()
batches = jdw.batches(plan, 0, rows, mesh, timeout_s=30, prefetch=0)
if rank == 1 and not STOPS:
    time.sleep(8)
try:
    print(jdw.evaluate(metric, batches, mesh, timeout_s=4)["loss"], flush=True)
except RuntimeError as error:
    print(time.monotonic() - start < 20, error, flush=True)
os._exit(0)
"""


def test_a_process_that_does_not_come_to_an_evaluation_or_stops_in_it_is_named():
    for stops in (True, False):
        program = STOPPED.replace("STOPS", str(stops))
        ended = processes.launch(program, 2, timeout_s=20 + 5 * (not stops), heartbeat_s=60)
        assert ended[0].out.startswith("True evaluate: process 1 absent, "), ended
