"""Faults, and where they strike: three real processes, one of which is at fault, told in time.

`python tests/faults/matrix.py` runs all and prints the table of the docs.
"""

import re
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import processes

LIMIT_S = 4
SLACK_S = 8  # on a busy machine, over the limit and a quarter of it

PROGRAM = r"""
import logging, os, signal, sys, threading, time
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
import jax_ddp_weighting as jdw

PLACE, FAULT, WHO, LIMIT = sys_place, sys_fault, sys_who, sys_limit
mesh = jdw.data_mesh()
plan = jdw.EpochPlan(60, num_replicas=3, batch_size=2)
rows = np.ones((60, 4096), np.float32)

def loss_fn(params, batch):
    return jdw.weighted_sum(((params["w"] - batch.data) ** 2).mean(1), batch.weights)

metric = lambda params, batch: jdw.weighted_sum((batch.data * params["w"]).sum(1), batch.weights)
step = jdw.make_train_step(loss_fn, mesh)
state = TrainState.create(apply_fn=None, params={"w": jnp.zeros(4096)}, tx=optax.sgd(0.1))
started = [time.monotonic()]

def say(text):
    print(round(time.monotonic() - started[0], 1), " ".join(text.split()), flush=True)

class Told(logging.Handler):
    def emit(self, record):
        say("in the log: " + record.getMessage())
        threading.Timer(3 + 2 * (rank == 0), os._exit, (0,)).start()

logging.getLogger("jax_ddp_weighting.batches").addHandler(Told())

def strike():
    "The fault, where it strikes; for the others, the time from which it is counted."
    started[0] = time.monotonic()
    if rank != WHO:
        return
    if FAULT in ("killed", "stopped"):
        os.kill(os.getpid(), signal.SIGKILL if FAULT == "killed" else signal.SIGSTOP)
    if FAULT == "late":
        time.sleep(LIMIT + 4)
    if FAULT == "raises":
        raise OSError("disk gone")

def fetch(ids):
    fetch.calls += 1
    if fetch.calls == fetch.strikes:
        strike()
    return rows[ids]

fetch.calls, fetch.strikes = 0, -1

def train(epoch, **options):
    global state
    for batch in jdw.batches(plan, epoch, fetch, mesh, prefetch=0, timeout_s=LIMIT, **options):
        state, report = step(state, batch)
        float(report.loss.value)
        started[0] = time.monotonic() if fetch.strikes > 0 else started[0]

def start():
    strike()
    jdw.check_agreement(jdw.EpochRecord.of(plan, 0, "m"), LIMIT)

def in_a_step():
    train(0)
    fetch.calls, fetch.strikes = 0, 4
    train(1)

def at_a_boundary():
    train(0)
    strike()
    train(1)

def in_a_join():
    global state
    stream = ([jdw.Batch.of(fetch(np.arange(2)))][0] for _ in range(8))
    fetch.strikes = 4
    for batch in jdw.join_batches(stream, mesh, timeout_s=LIMIT):
        state, report = step(state, batch)
        float(report.loss.value)
        started[0] = time.monotonic()

def in_evaluation():
    batches = list(jdw.batches(plan, 0, fetch, mesh))
    jdw.evaluate(metric, batches[:2], mesh, params=state.params)
    def some():
        for number, batch in enumerate(batches + batches):
            if number == 10:
                strike()
            yield batch
    jdw.evaluate(metric, some(), mesh, params=state.params, timeout_s=LIMIT)

def while_gathering():
    ids = np.arange(4) + 4 * rank
    jdw.gather_by_id(ids, None, ids)
    strike()
    jdw.gather_by_id(ids, None, ids, timeout_s=LIMIT)

def in_a_checkpoint():
    ledger = jdw.Ledger(60, epoch=0)
    jdw.gather_ledger(ledger)
    strike()
    jdw.gather_ledger(ledger, timeout_s=LIMIT)

try:
    globals()[PLACE.replace(" ", "_")]()
    say("nothing")
except BaseException as error:
    say(f"{type(error).__name__}: {error}")
time.sleep(4 if rank else 7)  # process 0 ends all others
os._exit(0)
"""


@dataclass(frozen=True)
class Case:
    """A fault of one process, and what the others are told.

    Attributes:
        place: where it strikes.
        fault: what happens.
        who: the process at fault.
        told: what those who are left are told; a regular expression.
        at_once: whether they need not wait for the limit.
    """

    place: str
    fault: str
    who: int
    told: str
    at_once: bool = False

    @property
    def name(self) -> str:
        return f"{self.fault} {self.place}, process {self.who}"


PLACES = (
    "start",
    "at a boundary",
    "in a step",
    "in a join",
    "in evaluation",
    "while gathering",
    "in a checkpoint",
)
_NAMED = {
    "start": r"DisagreementError: check_agreement: .*rank {} absent",
    "at a boundary": r"RuntimeError: batches: process {} absent",
    "in a step": r"in the log: batches: .*\(process {}\)",
    "in a join": r"RuntimeError: join_batches: rank {} \(process {}\) absent",
    "in evaluation": r"AbsentError: evaluate: process {} absent",
    "while gathering": r"AbsentError: gather_by_id: process {} absent",
    "in a checkpoint": r"AbsentError: gather_ledger: process {} absent",
}
# While process 0 is stopped the service is silent, whatever the place.
_SILENT = r"process 0 does not answer|process 0\)? (absent|last heard)"
# When it is killed JAX ends all others at once; what they were told before that is luck.
_ENDED = r"JAX distributed service detected fatal errors"


def _cases() -> tuple[Case, ...]:
    cases = []
    for place in PLACES:
        named = _NAMED[place].replace("{}", "1")
        devices = r"|Gloo|[Cc]onnection|devices say"  # over gloo some are told by it, and first
        for fault in ("killed", "stopped", "late"):
            told = named + (devices if fault == "killed" else "")
            cases.append(Case(place, fault, 1, told))
        cases.append(Case(place, "stopped", 0, _SILENT))
        cases.append(Case(place, "killed", 0, _ENDED, at_once=True))
    cases.append(Case("in a step", "raises", 1, r"process 1\) left the loop .* disk gone", True))
    cases.append(Case("in a join", "raises", 1, r"the stream failed .*OSError: disk gone", True))
    return tuple(cases)


CASES = _cases()


def run(case: Case) -> list[str]:
    """What each process that is left was told, seconds first.

    Raises:
        AssertionError: one was told something else, too late, or nothing.
    """
    program = PROGRAM
    values = {"place": case.place, "fault": case.fault, "who": case.who, "limit": LIMIT_S}
    for name, value in values.items():
        program = program.replace(f"sys_{name}", repr(value))
    ended = processes.launch(program, 3, timeout_s=60, heartbeat_s=45)
    found = []
    for rank, each in enumerate(ended):
        if rank == case.who:
            continue
        if case.told == _ENDED:
            assert each.code in (-6, 1), (case.name, each)
            assert _ENDED in each.err, (case.name, each)
            found.append("0.0 JAX ends the process")
            continue
        (line,) = each.out.splitlines()[:1] or [""]
        assert re.search(case.told, line), (case.name, rank, each)
        seconds = float(line.split()[0])
        limit = SLACK_S + (0 if case.at_once else LIMIT_S * 1.25)
        assert seconds <= limit, (case.name, rank, line)
        found.append(line)
    return found


def main() -> int:
    words = sys.argv[1:]
    failed = 0
    for case in CASES:
        if words and not all(word in case.name for word in words):
            continue
        try:
            found = run(case)
        except AssertionError as error:
            failed += 1
            print(f"FAILED {case.name}: {str(error)[:1500]}", flush=True)
            continue
        slowest = max(float(line.split()[0]) for line in found)
        text = found[0].split(" ", 1)[1][:110]
        print(
            f"| {case.place} | {case.fault}, process {case.who} | {slowest} s | {text} |",
            flush=True,
        )
    return failed


if __name__ == "__main__":
    sys.exit(main())
