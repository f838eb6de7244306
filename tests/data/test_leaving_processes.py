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


@pytest.mark.parametrize("attempt", range(10))  # it is a race, which one run may win by luck
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
