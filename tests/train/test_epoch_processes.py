"""An epoch as one program over processes, which only processes of their own can show."""

from processes import launch

PROGRAM = """
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding, PartitionSpec

import jax_ddp_weighting as jdw

x = np.random.default_rng(0).normal(size=(48, 3)).astype(np.float32)
y = x @ np.float32([1, -2, 3])


def loss_fn(params, batch):
    return jdw.weighted_sum((batch.data[0] @ params["w"] - batch.data[1]) ** 2, batch.weights)


def start():
    return TrainState.create(apply_fn=None, params={"w": jnp.zeros(3)}, tx=optax.sgd(0.05))


def ends(run, *data):
    state = start()
    for epoch in range(3):
        state = run(state, *data, epoch)
    return np.asarray(state.params["w"])


def loop(state, epoch):
    for batch in jdw.batches(plan, epoch, lambda ids: (x[ids], y[ids]), mesh):
        state, _ = step(state, batch)
    return state


mesh = jdw.data_mesh()
plan = jdw.EpochPlan(48, num_replicas=4, batch_size=5)
told = []
options = {"progress": lambda *each: told.append(each)}
run_epoch = jdw.make_train_epoch(loss_fn, mesh, plan, **options)
step = jdw.make_train_step(loss_fn, mesh)
rows = NamedSharding(mesh, PartitionSpec("data"))
spread = [jax.make_array_from_callback(each.shape, rows, lambda i, e=each: e[i]) for each in (x, y)]
wanted = ends(loop)
for data in ((x, y), tuple(spread)):
    found = ends(lambda *given: run_epoch(*given)[0], data)
    print(np.array_equal(found, wanted))
jax.effects_barrier()
evaluate = jdw.make_evaluation(lambda b: jdw.weighted_sum(b.data[1], b.weights), mesh, plan)
print(evaluate(None, (x, y)).sums["loss"].weight, len(told), wanted.tobytes().hex())
"""


def test_processes_end_with_the_bits_of_their_loop_and_one_is_told_of_progress():
    first, second = launch(PROGRAM, 2, devices=2)
    for each in (first, second):
        assert each.code == 0, each.err
        assert each.out.splitlines()[:2] == ["True", "True"]
    (weight, told, bits), (_, other_told, other_bits) = (
        each.out.splitlines()[2].split() for each in (first, second)
    )
    assert (weight, told, other_told) == ("48", "18", "0")
    assert bits == other_bits
