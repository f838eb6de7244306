"""Batches made ahead: never too many, errors at their step, and nobody is held by a fetch."""

import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from jax_ddp_weighting import EpochPlan, batches, data_mesh

PLAN = EpochPlan(40, num_replicas=1, batch_size=4)


class Fetch:
    """Hangs at one step, until the test lets it go on."""

    def __init__(self, hangs_at=None):
        self.hangs_at = hangs_at
        self.calls = 0
        self.hanging, self.go_on = threading.Event(), threading.Event()
        self.over = False

    def __call__(self, ids):
        self.calls += 1
        if self.calls - 1 == self.hangs_at:
            self.hanging.set()
            self.go_on.wait(20)
            self.over = True
        return np.zeros(len(ids))


@pytest.mark.parametrize("prefetch", [1, 2, 5])
def test_no_more_than_prefetch_are_made_ahead(prefetch):
    fetch = Fetch()
    stream = batches(PLAN, 0, fetch, data_mesh(1), prefetch=prefetch)
    assert fetch.calls == 0
    for step in range(3):
        next(stream)
        until = time.monotonic() + 10
        while fetch.calls < step + 1 + prefetch and time.monotonic() < until:
            time.sleep(1e-3)
        time.sleep(0.05)  # were there room for one more, it would be fetched now
        assert fetch.calls == step + 1 + prefetch
    stream.close()


def test_a_consumers_error_comes_at_once_while_a_fetch_hangs():
    fetch = Fetch(hangs_at=2)

    def consume():
        for _ in batches(PLAN, 0, fetch, data_mesh(1)):
            assert fetch.hanging.wait(60)
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        consume()
    assert not fetch.over  # it has come while the fetch was under way
    fetch.go_on.set()


def test_a_loop_is_left_at_once_while_a_fetch_hangs_and_nothing_more_is_fetched():
    fetch = Fetch(hangs_at=1)
    for _ in batches(PLAN, 0, fetch, data_mesh(1)):
        assert fetch.hanging.wait(60)
        break
    assert not fetch.over
    fetch.go_on.set()
    for thread in threading.enumerate():
        if thread.name == "batches":
            thread.join(10)
            assert not thread.is_alive()
    assert fetch.calls == 2


HANGS = """
import time
import numpy as np
from jax_ddp_weighting import EpochPlan, batches, data_mesh

def fetch(ids):
    if 5 in ids:
        print("hangs", flush=True)
        time.sleep(600)
    return np.zeros((len(ids), 4))

plan = EpochPlan(40, 1, 4, shuffle=False)
{loop}
print("left", flush=True)
"""
LOOPS = {
    "break": "for batch in batches(plan, 0, fetch, data_mesh(1)):\n    time.sleep(0.2)\n    break",
    "error": "for batch in batches(plan, 0, fetch, data_mesh(1)):\n    raise SystemExit(0)",
    "kept": "stream = batches(plan, 0, fetch, data_mesh(1))\nnext(stream)\ntime.sleep(0.2)",
}


@pytest.mark.parametrize("loop", LOOPS)
def test_a_program_ends_while_a_fetch_hangs(loop):
    program = HANGS.format(loop=LOOPS[loop])
    # ten times less than the fetch hangs for, so that only one that is held fails
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr == ""
    assert ("left" in ran.stdout) == (loop != "error")
