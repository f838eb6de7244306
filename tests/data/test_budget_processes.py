"""Batches by tokens over two processes: the same shapes on both, and other plans told apart."""

import re

import processes

PROGRAM = r"""
import numpy as np
import jax_ddp_weighting as jdw

lengths = np.random.default_rng(0).integers(1, 30, 57)
mesh = jdw.data_mesh()

def fetch(ids, length):
    rows = np.zeros((len(ids), length), np.int32)
    rows[:, 0] = ids
    return rows

whole = jdw.BudgetPlan(lengths, 2, 90, shapes=3)
for plan in (whole, whole.resumed(0, 5)):
    ledger = jdw.Ledger(57, epoch=0)
    for step, batch in enumerate(jdw.batches(plan, 0, fetch, mesh)):
        rows, length = plan.shape(0, step)
        assert batch.data.shape == (2 * rows, length)
        (shard,) = batch.data.addressable_shards
        assert shard.data[:, 0].tolist() == plan.batch(0, step).ids[rank].tolist()
        ledger.add(batch.ids, batch.weights)
    assert ledger.accepted == plan.slots(0, rank).weights.sum()
packed = jdw.PackedPlan(lengths, 2, 2, 64)
ledger = jdw.Ledger(57, epoch=0)
for batch in jdw.batches(packed, 0, lambda ids, length: np.zeros((len(ids), length)), mesh):
    ledger.add(batch.ids, batch.weights)
assert ledger.accepted == sum(
    packed.batch(0, step, [rank]).weights.sum() for step in range(packed.steps_per_epoch(0))
)

def told(name, plan, fetch=fetch):
    try:
        list(jdw.batches(plan, 0, fetch, mesh))
        print(name, "read", flush=True)
    except (ValueError, RuntimeError) as error:
        print(name, type(error).__name__, str(error).replace("\n", " "), flush=True)

told("budgets", jdw.BudgetPlan(lengths, 2, 90 + rank, shapes=3))
told("lengths", jdw.BudgetPlan(np.roll(lengths, rank), 2, 90, shapes=3))
told("rests", whole.resumed(0, 0, budget=90 - 60 * rank))
told("kinds", packed if rank else whole, lambda ids, length: np.zeros((len(ids), length), np.int32))
told("short rows", whole, lambda ids, length: fetch(ids, length - rank))
"""


def test_processes_read_the_same_steps_or_are_told_apart():
    ended = processes.launch(PROGRAM, 2, devices=1, timeout_s=90)
    assert [each.code for each in ended] == [0, 0], ended
    lines = [each.out.splitlines() for each in ended]
    for name, told in (
        ("budgets", "order is 'by budget 90 of 2 ranks .*' on process 0, 'by budget 91 of"),
        ("lengths", "order is .* lengths .*' on process 0, .* lengths .*' on process 1"),
        ("rests", r"shapes is .* on process 0, .* on process 1"),
        ("kinds", "order is 'by budget .*' on process 0, 'packed into rows .*' on process 1"),
    ):
        for said in lines:
            (line,) = (each for each in said if each.startswith(name))
            start = f"{name} ValueError batches: all processes must read the same steps of the same"
            assert line.startswith(start)
            assert re.search(told, line), line
    short = [said[-1] for said in lines]
    assert short[0].startswith("short rows RuntimeError batches: on process 1: fetch failed at")
    assert "fetch must return rows padded to the length that it is given" in short[0]
    assert short[1].startswith("short rows ValueError batches: fetch must return rows padded to")
