"""Processes that leave as soon as they have been told: all of them have been told before."""

import processes
import pytest

# Process 0 holds the coordination service, and JAX ends every other process once that is gone. Each
# leaves at once, by os._exit: no shutdown that would wait for the others.
PROGRAM = r"""
import os, sys
import numpy as np
import jax_ddp_weighting as jdw

plan = jdw.EpochPlan(47, num_replicas=3, batch_size=8, seed=7 if rank == ODD else 0)
record = jdw.EpochRecord.of(plan, 0, jdw.manifest_hash(np.arange(47)))
try:
    jdw.check_agreement(record, 30)
    print("agreed", flush=True)
except jdw.DisagreementError as error:
    print(error, flush=True)
os._exit(0)
"""


@pytest.mark.parametrize("attempt", range(3))  # it is a race, which one run may win by luck
def test_all_are_told_before_anybody_leaves(attempt):
    odd = (None, 0, 1, 2)[attempt % 4]
    ended = processes.launch(PROGRAM.replace("ODD", repr(odd)), 3, timeout_s=60, heartbeat_s=30)
    said = "agreed" if odd is None else f"seed is 7 on rank {odd}, 0 on ranks"
    for each in ended:
        assert said in each.out, ended
    if odd is not None:  # logged too, before anybody could be ended
        assert all(said in each.err for each in ended), ended


STOPPED = r"""
import os, signal, threading, time
import numpy as np
import jax_ddp_weighting as jdw

if rank == 0:
    # a child, since a stopped process cannot wake itself
    if os.fork() == 0:
        time.sleep(12)
        os.kill(os.getppid(), signal.SIGCONT)
        os._exit(0)
    print("stops", flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)
else:
    time.sleep(1)  # it is stopped by now
    plan = jdw.EpochPlan(47, num_replicas=2, batch_size=8)
    record = jdw.EpochRecord.of(plan, 0, jdw.manifest_hash(np.arange(47)))
    start = time.monotonic()
    try:
        jdw.check_agreement(record, 4)
    except RuntimeError as error:
        print(time.monotonic() - start < 8, error, flush=True)
os._exit(0)
"""


def test_a_process_0_that_is_stopped_is_named_in_time():
    ended = processes.launch(STOPPED, 2, timeout_s=60, heartbeat_s=60)
    assert ended[1].out.startswith("True jax_ddp_weighting: the coordination service must"), ended
    assert "process 0 does not answer" in ended[1].out


SIGNALLED = r"""
import os, signal, threading, time
import numpy as np
import jax_ddp_weighting as jdw

plan = jdw.EpochPlan(47, num_replicas=3, batch_size=8)
record = jdw.EpochRecord.of(plan, 0, jdw.manifest_hash(np.arange(47)))

def leave(number, frame):
    raise SystemExit("told to leave")

signal.signal(signal.SIGTERM, leave)
start = time.monotonic()
if rank == 0:  # it never comes
    time.sleep(10)
elif rank == 1:
    threading.Timer(2, os.kill, (os.getpid(), SIGNAL)).start()
    try:
        jdw.check_agreement(record, 40)
    except BaseException as error:
        print(time.monotonic() - start < 6, type(error).__name__, flush=True)
else:
    try:
        jdw.check_agreement(record, 40)
    except jdw.DisagreementError as error:
        print(time.monotonic() - start < 9, error, flush=True)
time.sleep(1)
os._exit(0)
"""


@pytest.mark.parametrize(
    ("number", "error"), [("signal.SIGINT", "KeyboardInterrupt"), ("signal.SIGTERM", "SystemExit")]
)
def test_a_signal_ends_the_wait_and_the_others_are_told(number, error):
    ended = processes.launch(SIGNALLED.replace("SIGNAL", number), 3, timeout_s=60, heartbeat_s=60)
    assert ended[1].out == f"True {error}\n", ended
    assert ended[2].out.startswith("True check_agreement: epoch 0: ranks 0, 1 absent"), ended


# A fetch that fails, a loop that is left, a process that is killed in a step: while the others wait
# in a collective, where no error can reach them, the log names it.
LEFT = r"""
import logging, os, signal, threading, time
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
import jax_ddp_weighting as jdw

mesh = jdw.data_mesh()
plan = jdw.EpochPlan(24, num_replicas=3, batch_size=2)

def fetch(ids):
    fetch.calls += 1
    if rank == 1 and fetch.calls == 3 and HOW == "fetch":
        raise OSError("disk gone")
    if rank == 1 and fetch.calls == 3 and HOW == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    return np.ones((len(ids), 4), np.float32)

fetch.calls = 0

def loss_fn(params, batch):
    return jdw.weighted_sum((params["w"] - batch.data.sum(1)) ** 2, batch.weights)

step = jdw.make_train_step(loss_fn, mesh)
state = TrainState.create(apply_fn=None, params={"w": jnp.float32(0)}, tx=optax.sgd(0.1))
start = time.monotonic()

class Told(logging.Handler):
    def emit(self, record):
        print(time.monotonic() - start < LIMIT, record.getMessage(), flush=True)
        threading.Timer(3, os._exit, (0,)).start()  # process 0 ends all others

logging.getLogger("jax_ddp_weighting.batches").addHandler(Told())
try:
    for number, batch in enumerate(jdw.batches(plan, 0, fetch, mesh, prefetch=0, timeout_s=4)):
        state, report = step(state, batch)
        float(report.loss.value)
        start = time.monotonic()
except OSError as error:
    print("raised", error, flush=True)
time.sleep(10)
os._exit(0)
"""


@pytest.mark.parametrize(
    ("how", "limit", "said"),
    [
        ("fetch", 4, "rank 1 (process 1) left the loop at step 1, since"),
        ("stop", 9, "rank 1 (process 1) "),
    ],
)
def test_whoever_leaves_a_loop_over_batches_is_named_in_the_others_log(how, limit, said):
    program = LEFT.replace("HOW", repr(how)).replace("LIMIT", str(limit))
    ended = processes.launch(program, 3, timeout_s=30, heartbeat_s=60)
    for rank in (0, 2):
        assert ended[rank].out.startswith("True batches: this process has been at step 2"), ended
        assert said in ended[rank].out
        assert (how == "stop") == ("absent" in ended[rank].out or "last heard" in ended[rank].out)
    if how == "fetch":
        assert ended[1].out == "raised disk gone\n"


NAMED = r"""
import threading
import numpy as np
import jax_ddp_weighting as jdw
from jax_ddp_weighting.distributed import coordination

plan = jdw.EpochPlan(47, num_replicas=2, batch_size=8)
records = {name: jdw.EpochRecord.of(plan, epoch, "m") for name, epoch in (("a", 0), ("b", 1))}
found = {}

def check(name):
    found[name] = "agreed"
    try:
        jdw.check_agreement(records[name], np.int64(20), name=name)
    except jdw.DisagreementError as error:
        found[name] = str(error)

for times in range(10):  # threads come in any order
    threads = [threading.Thread(target=check, args=(name,)) for name in "ab"[:: 1 - 2 * rank]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if set(found.values()) != {"agreed"}:
        break
print(sorted(found.items()), flush=True)
try:
    jdw.check_agreement(records["a"], 20, name="ab"[rank])
except jdw.DisagreementError as error:
    print("never met", flush=True)
"""


def test_threads_that_check_records_of_their_own_meet_by_name():
    ended = processes.launch(NAMED.replace('"a"], 20', '"a"], 1'), 2, timeout_s=60, heartbeat_s=60)
    for each in ended:
        assert each.out == "[('a', 'agreed'), ('b', 'agreed')]\nnever met\n", ended
        # JAX's own heartbeat is longer than these, so nothing is said
        assert "JAX would end all processes" not in each.err


PATIENT = r"""
import logging
logging.basicConfig()
import numpy as np
import jax_ddp_weighting as jdw

plan = jdw.EpochPlan(4, num_replicas=2, batch_size=2)
for timeout_s in (60, 95, 95, 300):
    print(timeout_s, flush=True)
    list(jdw.batches(plan, 0, lambda ids: ids, jdw.data_mesh(), timeout_s=timeout_s))
"""


def test_a_limit_that_jax_is_too_impatient_for_is_said_once():
    ended = processes.launch(PATIENT, 2, timeout_s=60, heartbeat_s=60)
    for each in ended:
        said = [line for line in each.err.splitlines() if "JAX would end" in line]
        assert len(said) == 3, ended
        start = "WARNING:jax_ddp_weighting.coordination:batches: timeout_s is"
        assert said[0].startswith(f"{start} 95, and heartbeat_timeout_seconds of jax.distributed")
        assert said[1].startswith(f"{start} 300, and heartbeat_timeout_seconds")
        assert said[2].startswith(f"{start} 300, and shutdown_timeout_seconds")
