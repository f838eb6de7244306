"""Processes that would read different things are told so, all of them, before the first step."""

import processes

PROGRAM = r"""
import time
from dataclasses import replace
import numpy as np
import jax_ddp_weighting as jdw

mesh = jdw.data_mesh()
plan = jdw.EpochPlan(12, num_replicas=2, batch_size=2)
rows = np.arange(12, dtype=np.float32)

def told(name, plan=plan, epoch=0, fetch=lambda ids: rows[ids], **options):
    start = time.monotonic()
    try:
        found = [float(jax.jit(lambda b: (b.data * b.weights).sum())(batch))
                 for batch in jdw.batches(plan, epoch, fetch, mesh, timeout_s=20, **options)]
        said = sum(found)
    except (ValueError, RuntimeError) as error:
        said = f"{type(error).__name__} {error}"
    print(name, time.monotonic() - start < 15, said, flush=True)

def either(**changed):
    return replace(plan, **changed) if rank == 1 else plan

told("same")
told("seed", either(seed=7))
told("epoch", epoch=rank)
told("tail", either(num_examples=13, tail=["mask", "drop"][rank]))
told("order", either(order="torch"))
told("given", either(shuffle=False))
told("batch size", either(batch_size=3))
told("examples", either(num_examples=11))
told("start", start_step=2 * rank)
told("nothing left", start_step=3 * rank)
told("resumed", plan.resumed(0, 1 + rank))
told("all at once", either(seed=7, batch_size=1), epoch=rank, start_step=rank)
told("both", either(seed=7), fetch=lambda ids: rows[ids].astype([np.float32, np.int32][rank]))
told("all at their end", start_step=3)
told("the same resumed", start_step=1)
"""

SAME = "batches: all processes must read the same steps of the same plan, got "
TOLD = {
    "seed": ["seed is 0 on process 0, 7 on process 1"],
    "epoch": ["epoch is 0 on process 0, 1 on process 1"],
    "tail": ["tail is 'mask' on process 0, 'drop' on process 1", "num_examples is "],
    "order": ["order is 'keyed' on process 0, 'torch' on process 1"],
    "given": ["shuffle is True on process 0, False on process 1"],
    "batch size": ["batch_size is 2 on process 0, 3 on process 1", "steps is 3 on process 0"],
    "examples": ["num_examples is 12 on process 0, 11 on process 1"],
    "start": ["start_step is 0 on process 0, 2 on process 1"],
    "nothing left": ["start_step is 0 on process 0, 3 on process 1"],
    "resumed": ["start is 1 on process 0, 2 on process 1"],
    "all at once": ["seed is", "batch_size is", "epoch is", "start_step is"],
    "both": ["seed is", "rows must have one form on all processes, got data is 'float32[]'"],
}


def test_each_difference_of_what_is_read_is_named_on_every_process():
    ended = processes.launch(PROGRAM, 2, timeout_s=90)
    for each in ended:
        lines = dict(line.split(" True ", 1) for line in each.out.splitlines())
        assert lines.pop("same") == "66.0", each
        assert lines.pop("all at their end") == "0"
        assert 0 < float(lines.pop("the same resumed")) < 66
        assert set(lines) == set(TOLD), each
        for name, differences in TOLD.items():
            assert lines[name].startswith(f"ValueError {SAME}"), lines[name]
            for difference in differences:
                assert difference in lines[name]


ROWS = r"""
import numpy as np
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState
import jax_ddp_weighting as jdw

mesh = jdw.data_mesh()
shape = {"x": np.zeros((0, 2), np.float32)}

def loss_fn(params, batch):
    return jdw.weighted_sum(params["w"] * batch.data["x"].sum(1), batch.weights)

step = jdw.make_train_step(loss_fn, mesh)
state = TrainState.create(apply_fn=None, params={"w": jnp.float32(0)}, tx=optax.sgd(1.0))

def own(count, weights=None, dtype=np.float32):
    x = np.full((count, 2), rank + 1, dtype)
    return jdw.Batch.of({"x": x}, weights, ids=np.arange(count) + 100 * rank)

def told(name, call):
    try:
        print(name, call(), flush=True)
    except (ValueError, RuntimeError, TypeError) as error:
        print(name, type(error).__name__, str(error), flush=True)

def pull(batch):
    return float(state.params["w"] - step(state, batch)[0].params["w"])

metric = lambda batch: jdw.weighted_sum(batch.data["x"][:, 0], batch.weights)

# host rows, of one number and of unequal ones: no collective is entered
for count in (4, 3 + rank):
    told("step", lambda: pull(own(count)))
    told("evaluate", lambda: jdw.evaluate(metric, [own(count)], mesh)["loss"])
told("on a device", lambda: pull(jax.tree.map(jnp.asarray, own(4))))

def given(batch):
    found = jdw.global_batch(batch, mesh, timeout_s=20)
    weights = [shard.data.tolist() for shard in found.weights.addressable_shards]
    return found.weights.shape, weights, pull(found), jdw.evaluate(metric, [found], mesh)["loss"]

# 1 for each row of process 0, 2 for each of process 1, each summed over two columns in the step
told("equal", lambda: given(own(4)))
told("unequal", lambda: given(own([5, 1][rank])))
told("none on one", lambda: given(own([3, 0][rank])))
told("weights", lambda: given(own(2, np.float32([1, 3]) if rank else np.float32([1, 0]))))
told("dtypes", lambda: given(own(2, dtype=[np.float32, np.int32][rank])))
told("cut", lambda: given(own(2, dtype=np.float32) if rank == 0 else
     jdw.Batch({"x": np.full((2, 2), 2**40)}, np.arange(2), np.ones(2, np.int32))))
told("none at all", lambda: jdw.global_batch(own(0), mesh).weights.sum())
"""


def test_rows_of_each_process_become_a_global_batch_and_else_are_refused():
    ended = processes.launch(ROWS, 2, devices=2, timeout_s=90)
    for rank, each in enumerate(ended):
        lines = each.out.splitlines()
        for line, count in zip(lines[:4], (4, 4, 3 + rank, 3 + rank), strict=True):
            caller = "train step" if line.startswith("step") else "evaluate"
            assert f"ValueError {caller}: batch must be a global one on a mesh of" in line, each
            assert "global_batch(batch, mesh) makes one" in line
            if caller == "train step":  # evaluate may have filled it up
                assert f"got {count} rows of process {rank} alone" in line
        assert lines[4].startswith("on a device ValueError train step: batch must be a global")
        # sums over 4 and 4 rows, then 5 and 1, and so on; evaluate takes one column
        right = {
            "equal": ((8,), [[1, 1], [1, 1]], 3.0, 1.5),
            "unequal": (
                (12,),
                [[[1, 1, 1], [1, 1, 0]], [[1, 0, 0], [0, 0, 0]]][rank],
                7 / 3,
                7 / 6,
            ),
            "none on one": ((8,), [[[1, 1], [1, 0]], [[0, 0], [0, 0]]][rank], 2.0, 1.0),
            "weights": ((4,), [[[1.0], [0.0]], [[1.0], [3.0]]][rank], 18 / 5, 9 / 5),
        }
        for line, (name, (shape, weights, pulled, mean)) in zip(
            lines[5:9], right.items(), strict=True
        ):
            assert line.startswith(f"{name} ({shape}, {weights}, "), (line, each)
            found = [float(number) for number in line.rstrip(")").split(", ")[-2:]]
            assert abs(found[0] - pulled) < 1e-5, line
            assert abs(found[1] - mean) < 1e-6, line
        assert lines[9].startswith(
            "dtypes ValueError global_batch: rows must have one form on all processes, got "
            "data['x'] is 'float32[2]' on process 0, 'int32[2]' on process 1."
        ), each
        cut = "data['x'] must be of at most 32 bits while x64 is off, got 1099511627776"
        there = "RuntimeError global_batch: on process 1: its rows were refused: ValueError"
        assert cut in lines[10], each
        assert lines[10].startswith("cut ValueError" if rank else f"cut {there}")
        assert lines[11:] == ["none at all 0"], each
