"""Uneven streams over several processes: every rank stops with the same sentence, none hangs."""

import re

import processes

# Three processes, so that a survivor has somebody to agree with. One launch checks all: the last
# case kills a process.
PROGRAM = r"""
import os, signal, time
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
from jax.experimental import multihost_utils
from jax.sharding import Mesh
import jax_ddp_weighting as jdw

mesh = jdw.data_mesh()

def loss_fn(params, batch):
    return jdw.weighted_sum(params["w"] * batch.data, batch.weights)

step = jdw.make_train_step(loss_fn, mesh)

def state(**options):
    params = {"w": jnp.float32(0)}
    return TrainState.create(apply_fn=None, params=params, tx=optax.sgd(1.0, **options))

def steps(count, rows=1):
    for _ in range(count):
        yield jdw.Batch.of(np.full(rows, 10.0**rank, np.float32))

def pulls(stream, state=None, **options):
    "What each step moved the parameter by, which is its gradient."
    state, before, moved = state or globals()["state"](), 0.0, []
    for batch in jdw.join_batches(stream, mesh, **options):
        state, _ = step(state, batch)
        moved.append(round(before - float(state.params["w"]), 3))
        before = float(state.params["w"])
    return moved, state

for convention in ("initial_ranks", "active_ranks", "example"):
    print(convention, pulls(steps(rank + 1), convention=convention)[0], flush=True)
print("ragged", pulls(steps(rank + 1, rows=rank + 1), convention="active_ranks")[0], flush=True)
print("empty", pulls(steps(2 if rank == 1 else 0))[0], flush=True)
print("nothing", pulls(steps(0))[0], flush=True)

def sized(*sizes):
    return [jdw.Batch.of(np.full(size, 10.0**rank, np.float32)) for size in sizes]

mine = [sized(1, 3), sized(2, 1, 5), sized(0, 1)][rank]
print("sizes", pulls(mine, sizes=[2, 3, 6])[0], flush=True)
widths = [len(batch.weights) // 3 for batch in jdw.join_batches(mine, mesh, sizes=[2, 3, 6])]
print("widths", widths, flush=True)
print("shortest", pulls(steps(rank + 2), convention="shortest")[0], flush=True)
mine = [sized(2, 1), sized(1, 1, 1), sized(1)][rank]
print("cycle", pulls(mine, convention="cycle", sizes=[1, 2])[0], flush=True)
uneven = pulls(steps([1, 3, 2][rank]), state(momentum=0.9))[1]
momenta = multihost_utils.process_allgather(uneven.opt_state[0].trace["w"].addressable_data(0))
print("momentum", "one for all" if len(set(momenta.tolist())) == 1 else momenta, flush=True)

def raising(at):
    yield from steps(at)
    if rank == 1:
        raise OSError("disk gone")
    yield from steps(10 - at)

def told(case, stream, mesh=mesh, **options):
    seen, start, took = 0, time.monotonic(), 0.0
    try:
        for batch in jdw.join_batches(stream, mesh, **options):
            seen += 1
            start = time.monotonic()
        print(case, seen, "no error", flush=True)
    except RuntimeError as error:
        bounded = time.monotonic() - start < options.get("timeout_s", 30) + 2
        print(case, seen, bounded, str(error).replace("\n", " "), flush=True)

told("raises", raising(3))
told("raises at once", raising(0))

def changing():
    yield from steps(1)
    yield jdw.Batch.of(np.zeros((1, 1 + rank // 2), np.float32)[:, rank // 2])
    if rank == 2:
        yield jdw.Batch.of(np.zeros((1, 2), np.float32))

told("changes", changing())
told("forms", [jdw.Batch.of(np.zeros((1, 1 + rank), np.float32))])
told("conventions", steps(1), convention=["example", "active_ranks"][rank // 2])
told("sizes differ", steps(1), sizes=[2, 4 + rank // 2])
told("too large", sized(1 + rank), sizes=[1, 2])
told("names", steps(1), name=f"epoch {rank // 2}")
if rank < 2:  # a mesh of some processes alone
    told("two of three", steps(rank + 1), Mesh(np.array(jax.devices()[:2]), ("data",)))

client = jax._src.distributed.global_state.client
client.wait_at_barrier("all", 30_000)
if rank == 0:
    print("keys left", client.key_value_dir_get("jax_ddp_weighting/"), flush=True)
client.wait_at_barrier("read", 30_000)

def killed():
    yield from steps(2)
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    yield from steps(3)

told("killed", killed(), timeout_s=4)
"""


SAME = [
    "initial_ranks [37.0, 36.667, 33.333]",
    "active_ranks [37.0, 55.0, 100.0]",
    "example [37.0, 55.0, 100.0]",
    "ragged [37.0, 55.0, 100.0]",
    "empty [10.0, 10.0]",
    "nothing []",
    "sizes [7.0, 22.6, 10.0]",
    "widths [2, 3, 6]",
    "shortest [37.0, 37.0]",
    "cycle [28.0, 37.0, 28.0]",
    "momentum one for all",
]
# what is said, after how many steps, by whose own error, and whether within the time
TOLD = {
    "raises": (3, "the stream failed at step 3 on rank 1 (process 1): OSError: disk gone"),
    "raises at once": (0, "the stream failed at step 0 on rank 1 (process 1): OSError: disk gone"),
    "changes": (
        2,
        "the stream failed at step 2 on rank 2 (process 2): ValueError: join_batches: rows must "
        "keep the form of the first ones, got float32[2] for float32[] at data",
    ),
    "forms": (
        0,
        "all ranks must have one form of rows and one convention, got data is 'float32[1]' on "
        "rank 0, 'float32[2]' on rank 1, 'float32[3]' on rank 2",
    ),
    "conventions": (
        0,
        "all ranks must have one form of rows and one convention, got convention is "
        "'active_ranks' on process 2, 'example' on processes 0, 1",
    ),
    "sizes differ": (
        0,
        "all ranks must have one form of rows and one convention, got sizes is '2, 5' on process "
        "2, '2, 4' on processes 0, 1",
    ),
    "too large": (0, "a batch must have at most 2 rows per rank, the largest of sizes, got 3."),
    "names": (
        0,
        "all ranks must have one form of rows and one convention, got name is 'epoch 1' on "
        "process 2, 'epoch 0' on processes 0, 1",
    ),
    # it is gone before step 2, which the others know before or after the batch of step 1
    "killed": ("[12]", "rank 2 (process 2) absent at step 2, the devices say: "),
}


def test_uneven_streams_over_processes_end_together_whatever_happens():
    ended = processes.launch(PROGRAM, 3, timeout_s=100, heartbeat_s=30)
    assert ended[2].code == -9, ended[2]
    for rank, each in enumerate(ended):
        starts = [re.escape(line) for line in SAME]
        starts += [
            f"{name} {steps} True {re.escape(f'join_batches: {text}')}"
            for name, (steps, text) in TOLD.items()
        ]
        if rank < 2:  # before the last, in which rank 2 is killed
            starts[-1:-1] = ["two of three 2 no error", *[r"keys left \[\]"][rank:]]
        else:
            del starts[-1]
        lines = each.out.splitlines()
        assert len(lines) == len(starts), each
        for line, start in zip(lines, starts, strict=True):
            assert re.match(start, line), (start, each)


LEFT = r"""
import os, signal, time
import numpy as np
import jax_ddp_weighting as jdw

joined = jdw.join_batches([jdw.Batch.of(np.zeros(1))] * 5, jdw.data_mesh(), timeout_s=3)
if rank == 1:
    next(joined), next(joined)
    time.sleep(6)  # it does something else
else:
    start = time.monotonic()
    try:
        list(joined)
    except RuntimeError as error:
        print(time.monotonic() - start < 6, error, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(60)
print("never said", flush=True)
"""


def test_a_rank_that_leaves_early_is_named_and_rank_0s_death_ends_all():
    # the second half is JAX's own promise: what check_agreement and join_batches say they rely on
    ended = processes.launch(LEFT, 2, timeout_s=40)
    said = "True join_batches: rank 1 (process 1) absent at step 3, after 3 s. Look at the logs"
    assert ended[0].out.startswith(said), ended
    assert ended[0].code == -9
    assert ended[1].code in (-6, 1)  # jax 0.9 exits, newer ones abort
    assert ended[1].out == ""
    assert "JAX distributed service detected fatal errors" in ended[1].err


# A loop that reads each step's loss waits inside XLA, where no error can reach it.
READS = r"""
import os, time
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
import jax_ddp_weighting as jdw

mesh = jdw.data_mesh()

def loss_fn(params, batch):
    return jdw.weighted_sum((params["w"] - batch.data) ** 2, batch.weights)

step = jdw.make_train_step(loss_fn, mesh)
state = TrainState.create(apply_fn=None, params={"w": jnp.float32(0)}, tx=optax.sgd(0.1))
joined = jdw.join_batches([jdw.Batch.of(np.ones(2, np.float32))] * 9, mesh, timeout_s=4)
start = time.monotonic()
try:
    for number, batch in enumerate(joined):
        if rank == 1 and LEAVES:
            break
        state, report = step(state, batch)
        loss = float(report.loss.value)
        start = time.monotonic()
        if rank == 1 and GOES_ON_ELSEWHERE:
            break
except RuntimeError as error:
    print(number, time.monotonic() - start < 8, error, flush=True)
if rank == 1:
    del joined
    time.sleep(12)
os._exit(0)
"""


def test_a_rank_that_does_not_come_to_a_step_is_named_in_time_though_each_loss_is_read():
    program = READS.replace("LEAVES", "False").replace("GOES_ON_ELSEWHERE", "number == 2")
    ended = processes.launch(program, 3, timeout_s=60, heartbeat_s=60)
    for rank in (0, 2):
        said = "2 True join_batches: rank 1 (process 1) absent at step 4, after 4 s. Look at the"
        assert ended[rank].out.startswith(said), ended


def test_a_rank_that_leaves_a_step_that_others_run_is_named_in_the_log_in_time():
    program = READS.replace("LEAVES", "number == 2").replace("GOES_ON_ELSEWHERE", "False")
    ended = processes.launch(program, 3, timeout_s=60, heartbeat_s=60)
    for rank in (0, 2):
        assert "join_batches: this process has been at step 2 for 4 s: rank 1 (process 1) left "
        assert "left the loop at step 2. A step ends when" in ended[rank].err, ended
