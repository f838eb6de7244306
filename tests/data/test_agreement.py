"""Ranks that hold different epochs, or are not there, are named on every rank before they hang."""

import json
import logging
from dataclasses import replace

import numpy as np
import processes
import pytest

import jax_ddp_weighting
from jax_ddp_weighting import (
    DisagreementError,
    EpochPlan,
    EpochRecord,
    check_agreement,
    manifest_hash,
)

PLAN = EpochPlan(47, num_replicas=3, batch_size=8, seed=5)
RECORD = EpochRecord.of(PLAN, 2, manifest_hash(np.arange(47)))


def test_a_record_holds_all_that_decides_who_reads_what():
    assert json.loads(RECORD.to_json()) == {
        "world_size": 3,
        "rank": 0,
        "manifest_hash": manifest_hash(np.arange(47)),
        "num_examples": 47,
        "seed": 5,
        "epoch": 2,
        "shuffle": True,
        "order": "keyed",
        "tail": "mask",
        "batch_size": 8,
        "steps": 2,
        "accepted": 47,
        "library_version": jax_ddp_weighting.__version__,
        "start_step": 0,
    }


def test_one_process_agrees_with_itself_and_logs_one_line(caplog):
    with caplog.at_level(logging.INFO, "jax_ddp_weighting"):
        assert check_agreement(RECORD) is None
    assert caplog.messages == [RECORD.to_json()]
    assert "\n" not in caplog.messages[0]


def test_a_record_of_an_order_of_ones_own_names_its_digest():
    records = [
        EpochRecord.of(EpochPlan.from_order(ids, 1, 1), 0, "m") for ids in ([0, 1], [1, 0], [0, 1])
    ]
    assert records[0] == records[2]
    assert records[0].order != records[1].order


def test_a_record_of_the_rest_of_an_epoch_says_from_which_place():
    """Places that are less than a round apart may leave as many steps and slots."""
    rests = [replace(PLAN, tail="drop").resumed(2, place) for place in (20, 21)]
    records = [EpochRecord.of(rest, 2, "m") for rest in rests]
    assert (records[0].steps, records[0].accepted) == (records[1].steps, records[1].accepted)
    assert [record.order for record in records] == ["keyed from place 20", "keyed from place 21"]


def test_a_record_holds_the_step_it_starts_at():
    resumed = EpochRecord.of(PLAN, 2, RECORD.manifest_hash, start_step=1)
    assert resumed == replace(RECORD, start_step=1)
    assert EpochRecord.of(PLAN, 2, "m", start_step=PLAN.steps_per_epoch).start_step == 2
    for wrong in (-1, 3):
        with pytest.raises(ValueError, match=rf"start_step must be in \[0, 2\], got {wrong}"):
            EpochRecord.of(PLAN, 2, "m", start_step=wrong)


@pytest.mark.parametrize(
    ("record", "timeout_s", "error", "message"),
    [
        (RECORD, -1, ValueError, r"timeout_s must be above 0 and finite, got -1"),
        (RECORD, 0, ValueError, r"timeout_s must be above 0 and finite, got 0"),
        (RECORD, float("inf"), ValueError, r"got inf"),
        (RECORD, "10", TypeError, r"timeout_s must be a number, got '10' \(str\)"),
        (RECORD, True, TypeError, r"timeout_s must be a number, got True \(bool\)"),
        (RECORD, 1j, TypeError, r"timeout_s must be a number, got 1j"),
        (RECORD, np.complex64(1), TypeError, r"timeout_s must be a number"),
        (RECORD, 1e16, ValueError, r"timeout_s must be at most 1e\+08, which is three years"),
        (PLAN, 1, TypeError, r"record must be an EpochRecord, got EpochPlan"),
        (replace(RECORD, rank=1), 1, ValueError, r"this process's own, rank 0, got rank 1"),
        (
            replace(RECORD, library_version="0.0.1"),
            1,
            DisagreementError,
            r"made by this version, .*, got library_version '0.0.1' on rank 0",
        ),
    ],
)
def test_bad_arguments_of_the_check_are_refused(record, timeout_s, error, message):
    with pytest.raises(error, match=message):
        check_agreement(record, timeout_s)


@pytest.mark.parametrize("timeout_s", [np.int64(5), np.float32(0.5), np.uint8(5), 1e8])
def test_a_limit_of_any_kind_of_number_is_taken(timeout_s):
    check_agreement(RECORD, timeout_s)


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [(3, TypeError, "name must be a string, got 3"), ("a/b", ValueError, "hold no slash")],
)
def test_a_name_of_a_check_is_a_part_of_a_key(name, error, message):
    with pytest.raises(error, match=message):
        check_agreement(RECORD, name=name)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"epoch": "0"}, TypeError, r"EpochRecord: epoch must be an integer in .* got '0' \(str\)"),
        ({"epoch": -1}, ValueError, r"epoch must be an integer in \[0, 2\*\*64\), got -1"),
        ({"seed": 0.5}, TypeError, r"seed must be an integer"),
        ({"shuffle": 1}, TypeError, r"shuffle must be of type bool, got 1 \(int\)"),
        ({"order": None}, TypeError, r"order must be of type str, got None \(NoneType\)"),
    ],
)
def test_a_record_checks_itself(changed, error, message):
    with pytest.raises(error, match=message):
        replace(RECORD, **changed)
    assert replace(RECORD, epoch=np.int64(3)).to_json() == replace(RECORD, epoch=3).to_json()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((RECORD, 0, "m"), TypeError, r"plan must be an EpochPlan, .* got EpochRecord"),
        ((PLAN, -1, "m"), ValueError, r"epoch must be an integer of at least 0, got -1"),
        ((PLAN, 0, np.arange(3)), TypeError, r"manifest_hash must be a string, got array"),
        ((PLAN, 0, ""), ValueError, r"manifest_hash must not be empty"),
    ],
)
def test_bad_arguments_of_a_record_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        EpochRecord.of(*arguments)


# What each process runs. Rank 1 is the culprit, except where all are well. `expected` holds what
# every surviving rank must be told, the culprit too where it comes back. No device is ever touched:
# a backend would wait for the absent by itself.
FAULTS = r"""
import os, re, signal, time
from dataclasses import replace
import numpy as np
from jax._src import distributed
import jax_ddp_weighting as jdw
from jax_ddp_weighting.data import agreement

plan = jdw.EpochPlan(47, num_replicas=3, batch_size=8)
ids = np.arange(47)
TIMEOUT = 4

def check(case, expected, plan=plan, epoch=0, ids=ids, timeout_s=30.0, **changed):
    record = replace(jdw.EpochRecord.of(plan, epoch, jdw.manifest_hash(ids)), **changed)
    start = time.monotonic()
    try:
        jdw.check_agreement(record, timeout_s)
        found = "agreed"
    except jdw.DisagreementError as error:
        found = str(error)
    took = time.monotonic() - start
    right = all(re.search(each, found) for each in expected)
    bounded = took < timeout_s + 2
    print(case, "ok" if right and bounded else f"WRONG after {took:.1f} s: {found}", flush=True)

def either(**changed):
    return replace(plan, **changed) if rank == 1 else plan

check("same", ["^agreed$"])
check("seed", ["seed is 7 on rank 1, 0 on ranks 0, 2"], either(seed=7))
check("epoch", ["epoch is 3 on rank 1, 0 on ranks 0, 2"], epoch=3 if rank == 1 else 0)
check("length", ["num_examples is 46 on rank 1, 47 on ranks 0, 2", "accepted is 46 on rank 1"],
      either(num_examples=46))
check("manifest", ["manifest_hash is '[0-9a-f]{64}' on rank 1, '[0-9a-f]{64}' on ranks 0, 2"],
      ids=ids[::-1] if rank == 1 else ids)
check("order", ["order is 'torch' on rank 1, 'keyed' on ranks 0, 2"], either(order="torch"))
check("tail", ["tail is 'drop' on rank 1, 'mask' on ranks 0, 2", "steps is 1 on rank 1"],
      either(tail="drop"))
check("batch size", ["batch_size is 4 on rank 1, 8 on ranks 0, 2"], either(batch_size=4))
check("two at once", ["seed is 7 on rank 1", "batch_size is 4 on rank 1"],
      either(seed=7, batch_size=4))
check("version", ["library_version is '0.0.1' on rank 1"],
      library_version="0.0.1" if rank == 1 else jdw.__version__)
check("start step", ["start_step is 1 on rank 1, 0 on ranks 0, 2"], start_step=int(rank == 1))
check("same again", ["^agreed$"])

client = distributed.global_state.client

def after_the_others(case):
    "Rank 1 goes on when the others have been told of it."
    if rank == 1:
        client.blocking_key_value_get(f"told {case}", 60_000)
    elif rank == 0:
        client.key_value_set(f"told {case}", "")

# late: the others are told within their time, and rank 1 when it comes
if rank == 1:
    after_the_others("late")
check("late", [r"rank 1 absent, not there after 4 s; ranks 0, 2 waited"], timeout_s=TIMEOUT)
after_the_others("late")

# absent: rank 1 misses a call altogether, and its next one meets the one that it missed
if rank == 1:
    after_the_others("absent")
    check("a call behind", [r"rank 1 absent"], timeout_s=TIMEOUT)
else:
    check("absent", [r"rank 1 absent"], timeout_s=TIMEOUT)
    after_the_others("absent")
check("same after absence", ["^agreed$"])

# the last one to read has cleaned up; the barrier is the test's own
client.wait_at_barrier("cleaned", 10_000)
print("keys left", client.key_value_dir_get("jax_ddp_weighting/"), flush=True)
client.wait_at_barrier("read", 10_000)

# killed before the check, while it holds nothing that others could be told
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
check("killed", [r"rank 1 absent"], timeout_s=TIMEOUT)
"""


@pytest.fixture(scope="module")
def faults():
    # three processes, because with two nobody can tell who is wrong
    return processes.launch(FAULTS, 3, timeout_s=90, heartbeat_s=30)


ALL = [
    *("same", "seed", "epoch", "length", "manifest", "order", "tail", "batch size"),
    *("two at once", "version", "start step", "same again", "late"),
]


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_every_fault_is_named_on_every_rank_within_its_time(faults, rank):
    last = ["a call behind"] if rank == 1 else ["absent"]
    cases = [*ALL, *last, "same after absence"]
    told = faults[rank].out.splitlines()
    assert told[: len(cases)] == [f"{case} ok" for case in cases], faults[rank]
    assert told[len(cases)] == "keys left []"
    if rank == 1:
        assert faults[rank].code == -9
        assert told[len(cases) + 1 :] == []
    else:
        assert told[len(cases) + 1 :] == ["killed ok"], faults[rank]
