"""Batches over several processes: each fetches its own ranks' rows, and none goes on alone."""

import processes

# Two processes with two devices each, whose numbers start at 0 and at 2048.
PROGRAM = r"""
import numpy as np
from jax.sharding import Mesh
import jax_ddp_weighting as jdw
from jax_ddp_weighting.distributed.placement import RankPlacement

pixels = np.arange(47 * 3, dtype=np.float32).reshape(47, 3)
plan = jdw.EpochPlan(47, num_replicas=4, batch_size=3, seed=1)
devices = np.array(sorted(jax.devices(), key=lambda device: device.id))
assert {device.process_index for device in devices[:2]} == {0}
assert devices[-1].id > 1000

meshes = {
    "in order": Mesh(devices, ("data",)),
    "reversed": Mesh(devices[::-1], ("data",)),
    "interleaved": Mesh(devices[[0, 2, 1, 3]], ("data",)),
    "a second axis inside": Mesh(devices.reshape(2, 2), ("data", "model")),
    "a second axis across": Mesh(devices.reshape(2, 2).T, ("data", "model")),
}
for name, mesh in meshes.items():
    here = plan if mesh.shape["data"] == 4 else jdw.EpochPlan(47, 2, 6, seed=1)
    fetched = []

    def fetch(ids):
        fetched.extend(ids.tolist())
        return {"pixels": pixels[ids], "id": ids.astype(np.int32)}

    wanted = set()
    for step, batch in enumerate(jdw.batches(here, 0, fetch, mesh)):
        slots = here.batch(0, step)
        assert batch.data["pixels"].shape == (12, 3)
        for shard in batch.data["pixels"].addressable_shards:
            place = int(np.argwhere(mesh.devices == shard.device)[0, 0])
            np.testing.assert_array_equal(shard.data, pixels[slots.ids[place]])
            wanted |= set(slots.ids[place].tolist())
        for leaf, slot in ((batch.ids, slots.ids), (batch.weights, slots.weights)):
            for shard in leaf.addressable_shards:
                place = int(np.argwhere(mesh.devices == shard.device)[0, 0])
                np.testing.assert_array_equal(shard.data, slot[place])
        # what is global is one and the same on every process
        total = jax.jit(lambda batch: batch.weights.sum())(batch)
        assert int(total) == here.accepted(step)
    assert set(fetched) == wanted, name
    print(name, "ok", flush=True)

mesh = meshes["in order"]

def told(name, fetch, mesh=mesh, plan=plan, **options):
    try:
        print(name, [batch.data.shape for batch in jdw.batches(plan, 0, fetch, mesh, **options)][0])
    except (ValueError, RuntimeError, OSError) as error:
        print(name, type(error).__name__, str(error).replace("\n", " "), flush=True)

def failing(ids):
    raise OSError("disk")

told("shapes", lambda ids: pixels[ids, : 3 - rank])
told("dtypes", lambda ids: pixels[ids].astype([np.float32, np.int32][rank]), prefetch=0)
told("structures", lambda ids: [{"x": pixels[ids]}, pixels[ids]][rank])
told("alike", lambda ids: pixels[ids].astype([np.float32, np.float64][rank]))
told("failure", lambda ids: failing(ids) if rank == 1 else pixels[ids])
place = RankPlacement.place
if rank == 1:
    RankPlacement.place = lambda placement, rows: failing(rows)  # as where memory is full
told("placing", lambda ids: pixels[ids], timeout_s=20)
RankPlacement.place = place
# a stream of this process alone concerns no other one
mine = Mesh(np.array(jax.local_devices()), ("data",))
if rank == 0:
    told("alone", lambda ids: pixels[ids], mine, jdw.EpochPlan(47, 2, 6))
# and one that the other process does not read ends within its time
if rank == 0:
    told("absent", lambda ids: pixels[ids], timeout_s=1)
else:
    jdw.batches(plan, 0, failing, mesh)
told("after all", lambda ids: pixels[ids])
# the mesh of other processes is theirs alone
if rank == 1:
    told("theirs", lambda ids: pixels[ids], Mesh(devices[:2], ("data",)), jdw.EpochPlan(47, 2, 6))
# each process enters the rows that it holds, and of those that both hold one does
for name in ("in order", "a second axis across"):
    here = plan if meshes[name].shape["data"] == 4 else jdw.EpochPlan(47, 2, 6, seed=1)
    ledger = jdw.Ledger(47, epoch=0)
    for batch in jdw.batches(here, 0, lambda ids: pixels[ids], meshes[name]):
        ledger.add(batch.ids, batch.weights)
    print("ledger", ledger.accepted, ledger.num_due, flush=True)
"""


def test_any_layout_works_and_unequal_rows_are_refused_before_they_are_global():
    ended = processes.launch(PROGRAM, 2, devices=2, timeout_s=60)
    assert [each.code for each in ended] == [0, 0], ended
    both = [
        *("in order ok", "reversed ok", "interleaved ok"),
        *("a second axis inside ok", "a second axis across ok"),
        "shapes ValueError batches: rows must have one form on all processes, got data is "
        "'float32[3]' on process 0, 'float32[2]' on process 1. Pad them to one shape, and give "
        "them one dtype.",
        "dtypes ValueError batches: rows must have one form on all processes, got data is "
        "'float32[3]' on process 0, 'int32[3]' on process 1. Pad them to one shape, and give "
        "them one dtype.",
        "structures ValueError batches: rows must have one form on all processes, got structure is "
        "\"PyTreeDef({'x': *})\" on process 0, 'PyTreeDef(*)' on process 1; data['x'] is "
        "'float32[3]' on process 0, not there on process 1; data is not there on process 0, "
        "'float32[3]' on process 1. Pad them to one shape, and give them one dtype.",
        "alike (12, 3)",
    ]
    failure = [
        "failure RuntimeError batches: on process 1: fetch failed at epoch 0, step 0: "
        "OSError: disk.",
        "failure OSError disk",
    ]
    placing = [
        "placing RuntimeError batches: on process 1: its rows could not be placed at epoch 0, "
        "step 0: OSError: disk.",
        "placing OSError disk",
    ]
    alone = [
        "alone (12, 3)",
        "absent RuntimeError batches: process 1 absent, without first rows after 1 s. Look at the "
        "logs of the absent: they are gone or slow; timeout_s gives more time.",
    ]
    theirs = (
        "theirs ValueError batches: mesh must hold a device of this process, got processes 0 for "
        "process 1. Make it of jax.devices(), or call this on the processes that it holds."
    )
    after = "after all (12, 3)"
    first, second = ended[0].out.splitlines(), ended[1].out.splitlines()
    assert first[:-2] == [*both, failure[0], placing[0], *alone, after]
    assert second[:-2] == [*both, failure[1], placing[1], after, theirs]
    assert first[-2:] == ["ledger 24 23", "ledger 47 0"]
    assert second[-2:] == ["ledger 23 24", "ledger 0 47"]
