"""Train on digits in several processes: one script, on this machine and on a pod.

On this machine, two processes with two CPU devices each:

    python examples/multiprocess.py --launch 2 --devices 2

On a pod, start it once per host (or per accelerator) and without options: under SLURM and Open MPI,
on TPU pods and in Kubernetes jobs `jax.distributed.initialize()` finds the others by itself.
Elsewhere say who is who:

    python examples/multiprocess.py --coordinator HOST:PORT --processes 2 --process 0

Every process says at the start of an epoch what it holds of it, and none goes on alone: give one of
them another `--seed` to see it named. Whatever the number of processes and devices, each of the
1,437 images counts once, and losses and parameters are those of one process.
"""

import argparse
import logging
import os
import signal
import socket
import subprocess
import sys
import time

import flax.linen as nn
import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
from sklearn.datasets import load_digits

import jax_ddp_weighting as jdw

TRAIN, TEST = 1437, 360
ROWS = 60  # rows per step over all ranks: divides by 1, 2, 4 and 6 ranks, but not the images


class Classifier(nn.Module):
    """One hidden layer, 64 pixels in and 10 logits out."""

    @nn.compact
    def __call__(self, pixels):
        return nn.Dense(10)(nn.relu(nn.Dense(32)(pixels)))


model = Classifier()


def loss_fn(params, batch):
    logits = model.apply(params, batch.data["pixels"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.data["label"])
    return jdw.weighted_sum(losses, batch.weights)


def hits(params, batch):
    right = jnp.argmax(model.apply(params, batch.data["pixels"]), axis=-1) == batch.data["label"]
    return {"accuracy": jdw.weighted_sum(right, batch.weights)}


def train(mesh, *, epochs=2, seed=0, tail="mask", on_step=lambda report, state: None):
    """The trained state, and the accuracy on the test images. The same code for any mesh."""
    digits = load_digits()
    pixels = (digits.data / 16).astype(np.float32)
    labels = digits.target.astype(np.int32)
    shuffled = jdw.torch_order(len(labels), seed=0)
    manifest = jdw.manifest_hash([shuffled[:TRAIN], pixels.tobytes(), labels.tobytes()])

    def rows_of(subset):  # a process asks for its own ranks' rows only
        return lambda ids: {"pixels": pixels[subset[ids]], "label": labels[subset[ids]]}

    ranks = mesh.shape["data"]
    plan = jdw.EpochPlan(TRAIN, ranks, ROWS // ranks, seed=seed, tail=tail)
    step = jdw.make_train_step(loss_fn, mesh)
    params = model.init(jax.random.key(0), jnp.zeros((1, 64)))
    state = TrainState.create(apply_fn=None, params=params, tx=optax.sgd(0.2, momentum=0.9))
    for epoch in range(epochs):
        # before the first collective: from here on, a rank that is missing would hang the others
        jdw.check_agreement(jdw.EpochRecord.of(plan, epoch, manifest), timeout_s=60)
        losses = []
        for batch in jdw.batches(plan, epoch, rows_of(shuffled[:TRAIN]), mesh):
            state, report = step(state, batch)
            losses.append(report.loss.terms["loss"])
            on_step(report, state)
        mean = float(sum(losses).mean())
        if jax.process_index() == 0:
            print(f"epoch {epoch}: loss {mean:.4f} of {sum(losses).weight} images", flush=True)

    test_plan = jdw.EpochPlan(TEST, ranks, ROWS // ranks, shuffle=False)
    test_batches = jdw.batches(test_plan, 0, rows_of(shuffled[TRAIN:]), mesh)
    return state, jdw.evaluate(hits, test_batches, mesh, params=state.params)


def run_process(options):
    """One process of several: what each host of a pod runs."""
    logging.basicConfig(level=logging.INFO, format="%(name)s %(message)s")
    logging.getLogger("jax").setLevel(logging.WARNING)
    jax.distributed.initialize(  # None, None, None on a pod: JAX finds out
        options.coordinator,
        options.processes,
        options.process,
        shutdown_timeout_seconds=80,  # a process that failed waits while others may wait for it
    )
    mesh = jdw.data_mesh()
    recorded = {"losses": [], "params": []}

    def record(report, state):
        recorded["losses"].append(float(report.loss.value))
        recorded["params"].append(jax.flatten_util.ravel_pytree(jax.device_get(state.params))[0])

    on_step = {"on_step": record} if options.record else {}
    _, result = train(mesh, epochs=options.epochs, seed=options.seed, **on_step)
    if jax.process_index() == 0:
        print(
            f"{jax.process_count()} processes, {mesh.size} {jax.devices()[0].platform} devices: "
            f"accuracy {result['accuracy']:.4f} of {result.accepted} test images",
            flush=True,
        )
        if options.record:
            np.savez(options.record, **recorded)
    jax.distributed.shutdown()  # a barrier: process 0 holds the service, and leaves last
    if jax.devices()[0].platform == "cpu":
        # Now and then XLA's CPU client (jax 0.10, 0.12) hangs while the interpreter ends.
        sys.stdout.flush()
        os._exit(0)


def launch(options, arguments):
    """Starts the processes on this machine, and ends all when one fails or time runs out."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{probe.getsockname()[1]}"
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(options.devices),
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
        "JAX_ENABLE_PREEMPTION_SERVICE": "0",  # SIGTERM is to end a process, not to be noted
    }
    processes = []
    for process in range(options.launch):
        who = ["--coordinator", coordinator, "--processes", options.launch, "--process", process]
        command = [sys.executable, __file__, *arguments, *map(str, who)]
        processes.append(subprocess.Popen(command, env=environment, start_new_session=True))
    deadline = time.monotonic() + options.timeout
    try:
        while any(process.poll() is None for process in processes):
            if time.monotonic() > deadline:
                raise SystemExit(f"killed after {options.timeout} s")
            if any(process.poll() for process in processes):  # one failed: some time for the others
                deadline = min(deadline, time.monotonic() + 30)
            time.sleep(0.05)
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    return max(abs(process.returncode) for process in processes)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    local = parser.add_argument_group("on this machine")
    local.add_argument("--launch", type=int, metavar="N", help="start N processes")
    local.add_argument("--devices", type=int, default=2, help="CPU devices of each")
    local.add_argument("--timeout", type=float, default=300, help="seconds until all are killed")
    pod = parser.add_argument_group("where JAX does not find out by itself")
    pod.add_argument("--coordinator", help="host:port of process 0")
    pod.add_argument("--processes", type=int, help="how many")
    pod.add_argument("--process", type=int, help="which one this is, from 0")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--record", help="a file for every step's loss and parameters")
    options = parser.parse_args()
    if options.launch:
        passed_on = ["--epochs", str(options.epochs), "--seed", str(options.seed)]
        passed_on += ["--record", options.record] if options.record else []
        sys.exit(launch(options, passed_on))
    run_process(options)


if __name__ == "__main__":
    main()
