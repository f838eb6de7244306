"""What agreement costs: check_agreement per epoch, and join_batches per step beside a plain loop.

`python benchmarks/processes.py` starts 2 and then 4 processes on this machine, over gloo. Rounds of
the things compared alternate, and every process runs the same ones. Shown are process 0's medians
over the rounds, their range, and ratios of medians. On two cores four processes wait for a core
more than for each other: read the ratios.
"""

import os
import socket
import statistics
import subprocess
import sys
import time

from ratios import headed, keep

ROUNDS, STEPS, CHECKS = 7, 60, 100
ROWS, WIDTH = 64, 256  # of a rank's batch


def line(what, seconds, reference=None):
    median, low, high = (f(seconds) * 1e3 for f in (statistics.median, min, max))
    ratio = ""
    if reference:
        value = median / statistics.median(reference) / 1e3
        keep(what, value)
        ratio = f"   {value:.2f} of it"
    print(f"  {what:<44}{median:8.3f} ms ({low:.3f} to {high:.3f}){ratio}", flush=True)


def one_process(rank, processes, port):
    import jax

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_num_cpu_devices", 1)
    jax.distributed.initialize(f"127.0.0.1:{port}", processes, rank)
    import jax.numpy as jnp
    import numpy as np
    import optax
    from flax.training.train_state import TrainState
    from jax.experimental import multihost_utils

    import jax_ddp_weighting as jdw
    from jax_ddp_weighting.distributed.placement import RankPlacement

    mesh = jdw.data_mesh()
    record = jdw.EpochRecord.of(jdw.EpochPlan(10**6, processes, ROWS), 0, "0" * 64)
    layout = RankPlacement.of(mesh, "data", caller="benchmark")
    data = np.random.default_rng(rank).normal(size=(ROWS, WIDTH)).astype(np.float32)
    local = [jdw.Batch.of(data)] * STEPS

    def loss_fn(params, batch):
        hidden = jnp.tanh(batch.data @ params["first"])
        return jdw.weighted_sum(jnp.square(hidden @ params["second"]).sum(-1), batch.weights)

    step = jdw.make_train_step(loss_fn, mesh)
    shapes = {"first": (WIDTH, WIDTH), "second": (WIDTH, WIDTH)}
    params = {name: jnp.full(shape, 0.01) for name, shape in shapes.items()}
    state = TrainState.create(apply_fn=None, params=params, tx=optax.sgd(1e-3))

    def plain():
        return map(layout.place, local)

    def joined():
        return jdw.join_batches(local, mesh)

    def per_step(batches):
        nonlocal state
        multihost_utils.sync_global_devices("start")
        start = time.perf_counter()
        for batch in batches:
            state, report = step(state, batch)
        jax.block_until_ready(report)
        return (time.perf_counter() - start) / STEPS

    def per_check(check):
        multihost_utils.sync_global_devices("start")
        start = time.perf_counter()
        for _ in range(CHECKS):
            check()
        return (time.perf_counter() - start) / CHECKS

    things = {
        "a loop over global batches, per step": lambda: per_step(plain()),
        "a loop over join_batches, per step": lambda: per_step(joined()),
        "a device all-gather of one number": lambda: per_check(
            lambda: multihost_utils.process_allgather(np.int32(rank))
        ),
        "check_agreement": lambda: per_check(lambda: jdw.check_agreement(record)),
    }
    times = {name: [] for name in things}
    for round_ in range(ROUNDS + 1):
        for name, thing in things.items():
            seconds = thing()
            if round_:  # the first compiles
                times[name].append(seconds)
    if rank == 0:
        loop, join, gather, check = times
        line(loop, times[loop])
        line(join, times[join], times[loop])
        line(gather, times[gather])
        line(check, times[check], times[gather])
    jax.distributed.shutdown()
    sys.stdout.flush()
    os._exit(0)  # XLA's CPU client may hang while the interpreter ends


def main():
    if len(sys.argv) > 1:
        return one_process(*map(int, sys.argv[1:]))
    for processes in (2, 4):
        headed(f"{processes} processes, {ROWS} rows of {WIDTH} each, {os.cpu_count()} cores")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        started = [
            subprocess.Popen(
                [sys.executable, __file__, *map(str, (rank, processes, port))],
                env=os.environ | {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_PREEMPTION_SERVICE": "0"},
            )
            for rank in range(processes)
        ]
        try:
            for each in started:
                each.wait(timeout=600)
        finally:
            for each in started:
                each.kill()
    return None


if __name__ == "__main__":
    main()
