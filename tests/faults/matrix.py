"""Faults, and where they strike: three real processes, one of which is at fault, told in time.

`python tests/faults/matrix.py` runs all and prints the table of the docs.
"""

import re
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import processes

LIMIT_S = 4
SLACK_S = 8  # on a busy machine, over the limit and a quarter of it

PROGRAM = r"""
import logging, os, resource, signal, sys, tempfile, threading, time
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
import jax_ddp_weighting as jdw

PLACE, FAULT, WHO, LIMIT, FOLDER = sys_place, sys_fault, sys_who, sys_limit, sys_folder
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
    if FAULT == "has a full disk":  # as good as: no file may be longer, whoever writes it
        resource.setrlimit(resource.RLIMIT_FSIZE, (4000, resource.RLIM_INFINITY))

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
        in_loop()

def in_loop():
    "What the loop does besides; it strikes at its fifth step, or never."
    in_loop.steps += 1
    if in_loop.steps == in_loop.strikes:
        strike()

in_loop.steps, in_loop.strikes = 0, -1

def start():
    strike()
    jdw.check_agreement(jdw.EpochRecord.of(plan, 0, "m"), LIMIT)

def in_a_step():
    train(0)
    fetch.calls, fetch.strikes = 0, 4
    train(1)

def in_the_loop_of_batches():
    in_loop.strikes = 5
    train(0)

def in_the_loop_of_a_join():
    in_loop.strikes = 5
    in_a_join(strikes=-1)

def at_a_boundary():
    train(0)
    strike()
    train(1)

def in_a_join(strikes=4):
    global state
    stream = ([jdw.Batch.of(fetch(np.arange(2)))][0] for _ in range(8))
    fetch.strikes = strikes
    for batch in jdw.join_batches(stream, mesh, timeout_s=LIMIT):
        state, report = step(state, batch)
        float(report.loss.value)
        started[0] = time.monotonic()
        in_loop()

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

def in_a_ledger():
    ledger = jdw.Ledger(60, epoch=0)
    jdw.gather_ledger(ledger)
    strike()
    jdw.gather_ledger(ledger, timeout_s=LIMIT)

class Struck:
    "A number of the state, which strikes as Orbax asks for it: the others wait in Orbax."
    shape, dtype = (), np.dtype("float32")
    def __array__(self, dtype=None, copy=None):
        strike()
        return np.zeros((), np.float32)

def save(number, tree, ledger=True):
    position = jdw.RunPosition.of(plan, 0, number, manifest_hash="m")
    ledger = jdw.Ledger(60, epoch=0) if ledger else None
    jdw.save_run(save.manager, number, tree, position, ledger, timeout_s=LIMIT)
    started[0] = time.monotonic()

def before_a_checkpoint():
    train(0)
    save(1, state.params, ledger=False)
    strike()
    save(2, state.params, ledger=False)

def inside_a_checkpoint():
    train(0)
    save(1, state.params)
    save(2, {**state.params, "x": Struck()})

def after_a_checkpoint():
    "In the background; of chance, so that Orbax cannot make it small."
    noise = np.random.default_rng(0).normal(size=(3, 20_000))
    shards = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    noise = jax.device_put(noise.astype(np.float32), shards)
    save(1, {"w": noise})
    jdw.finish_saving(save.manager)
    strike()
    save(2, {"w": noise})
    jdw.finish_saving(save.manager, timeout_s=LIMIT)

if PLACE.endswith("a checkpoint"):
    import orbax.checkpoint as ocp
    save.manager = ocp.CheckpointManager(FOLDER)

try:
    globals()[PLACE.replace(" ", "_")]()
    say("nothing")
except BaseException as error:
    say(f"{type(error).__name__}: {error}")
# process 0 ends all others; and one that is gone is found by the devices before it is named
time.sleep(8 if rank == WHO else 4 if rank else 7)
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
    "in a ledger",
    "before a checkpoint",
    "inside a checkpoint",
)
_NAMED = {
    "start": r"DisagreementError: check_agreement: .*rank {} absent",
    "at a boundary": r"RuntimeError: batches: process {} absent",
    "in a step": r"in the log: batches: .*\(process {}\)",
    "in a join": r"RuntimeError: join_batches: rank {} \(process {}\) absent",
    "in evaluation": r"AbsentError: evaluate: process {} absent",
    "while gathering": r"AbsentError: gather_by_id: process {} absent",
    "in a ledger": r"AbsentError: gather_ledger: process {} absent",
    "before a checkpoint": r"AbsentError: save_run: process {} absent",
    "inside a checkpoint": r"AbsentError: save_run: process {} absent",
}
# While process 0 is stopped the service is silent, whatever the place.
_SILENT = r"process 0 does not answer|process 0\)? (absent|last heard)"
# When it is killed JAX ends all others at once; what they were told before that is luck.
_FAILED, _GONE = r"FailedError: {}: process {} failed: {}", "OSError: disk gone"
_ENDED = r"JAX distributed service detected fatal errors"


def _cases() -> tuple[Case, ...]:
    cases = []
    for place in PLACES:
        named = _NAMED[place].replace("{}", "1")
        devices = r"|Gloo|[Cc]onnection|devices say"  # over gloo some are told by it, and first
        for fault in ("killed", "stopped", "late"):
            told = named + (devices if fault == "killed" else "")
            if (place, fault) == ("inside a checkpoint", "late"):
                told = "nothing"  # all are there: the disk is slow, and is waited for
            cases.append(Case(place, fault, 1, told))
        cases.append(Case(place, "stopped", 0, _SILENT))
        cases.append(Case(place, "killed", 0, _ENDED, at_once=True))
    cases.append(Case("in a step", "raises", 1, r"process 1\) left the loop .* disk gone", True))
    cases.append(Case("in the loop of batches", "raises", 1, r"log: batches: .*process 1\) left"))
    cases.append(Case("in the loop of a join", "raises", 1, r"join_batches: .*\(process 1\)"))
    cases.append(Case("while gathering", "raises", 1, _NAMED["while gathering"].format(1)))
    cases.append(Case("in evaluation", "raises", 1, _FAILED.format("evaluate", 1, _GONE), True))
    for who in (0, 1):
        told = _FAILED.format("save_run", who, _GONE)
        cases.append(Case("inside a checkpoint", "raises", who, told, True))
        told = _FAILED.format("finish_saving", who, "RuntimeError: .*must have been written")
        cases.append(Case("after a checkpoint", "has a full disk", who, told, True))
    cases.append(Case("in a join", "raises", 1, r"the stream failed .*OSError: disk gone", True))
    return tuple(cases)


CASES = _cases()


def run(case: Case) -> list[str]:
    """What each process that is left was told, seconds first.

    Raises:
        AssertionError: one was told something else, too late, or nothing.
    """
    with tempfile.TemporaryDirectory() as folder:
        program = PROGRAM
        values = {"place": case.place, "fault": case.fault, "who": case.who, "limit": LIMIT_S}
        for name, value in {**values, "folder": folder}.items():
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
