"""Train on digits, be killed, go on with other processes and devices, and end as if nothing was.

    python examples/resumable.py

It starts two processes with two CPU devices each, and one of them kills itself (SIGKILL) at a
random step. What is left is killed too, and the run goes on in one process with three devices,
which kills itself at a later step; then in three processes with one device each, to the end.
Whatever was read after the last checkpoint is read again, by a state that has not seen it: each
image counts once an epoch, which the ledger proves, and the parameters are those of a run that
nobody disturbed. Each step holds the same images on any number of ranks, so they differ by the
rounding of sums that are added up in another order: less than 1e-5 of their size in float32, where
one image that counts twice makes a hundred times as much.
"""

import argparse
import multiprocessing
import os
import random
import signal
import socket
import sys
import tempfile

import flax.linen as nn
import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding, PartitionSpec
from sklearn.datasets import load_digits

import jax_ddp_weighting as jdw

TRAIN, EPOCHS = 1437, 2
ROWS = 60  # rows per step over all ranks: divides by 1, 3 and 4 ranks, but not the images
SAVED_EVERY = 5  # steps

FORKED = multiprocessing.get_context("forkserver")  # which imports JAX once, and makes no device
FORKED.set_forkserver_preload(["flax.training.train_state", "jax", "optax"])


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


def train(mesh, folder, on_step=lambda step: None):
    """The trained state. What makes it a run that survives is marked; the rest is any loop."""
    digits = load_digits()
    pixels = (digits.data[:TRAIN] / 16).astype(np.float32)
    labels = digits.target[:TRAIN].astype(np.int32)
    plan = jdw.EpochPlan(TRAIN, mesh.shape["data"], ROWS // mesh.shape["data"])
    train_step = jdw.make_train_step(loss_fn, mesh)
    params = model.init(jax.random.key(0), jnp.zeros((1, 64)))
    state = TrainState.create(apply_fn=None, params=params, tx=optax.sgd(0.2, momentum=0.9))
    step = 0

    manifest = jdw.manifest_hash([pixels.tobytes(), labels.tobytes()])  # here the run survives
    options = ocp.CheckpointManagerOptions(save_interval_steps=SAVED_EVERY, max_to_keep=2)
    manager = ocp.CheckpointManager(folder, options=options)
    state = jax.device_put(state, NamedSharding(mesh, PartitionSpec()))
    position = jdw.RunPosition.of(plan, 0, 0, manifest_hash=manifest)
    run = jdw.restore_run(manager, like=state)
    if run is not None:
        run.position.check(plan, manifest_hash=manifest, ledger=run.consumed)
        step, state, position = run.step, run.state, run.position
        if jax.process_index() == 0:
            print(f"goes on after step {step}, {run.consumed.num_due} images due", flush=True)

    for epoch in range(position.epoch, EPOCHS):
        ledger = jdw.Ledger(TRAIN, epoch=epoch)  # here it survives
        if run is not None and epoch == position.epoch:
            ledger = run.ledger
        rest = position.rest(plan, epoch)
        fetch = lambda ids: {"pixels": pixels[ids], "label": labels[ids]}  # noqa: E731
        for taken, batch in enumerate(jdw.batches(rest, epoch, fetch, mesh), start=1):
            state, _ = train_step(state, batch)
            step += 1
            ledger.add(batch.ids, batch.weights)  # and here
            now = jdw.RunPosition.of(rest, epoch, taken, manifest_hash=manifest)
            jdw.save_run(manager, step, state, now, ledger)
            on_step(step)
        jdw.gather_ledger(ledger).check_exactly_once()  # and here
        if jax.process_index() == 0:
            print(f"epoch {epoch}: each of {TRAIN} images once", flush=True)
    manager.close()  # and here: it waits for the checkpoint that is being saved
    return state


def work(process, processes, devices, coordinator, folder, result, kill_at):
    """One process, which has made no device yet."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", devices)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_preemption_service", False)  # SIGTERM is to end, not to be noted
    if processes > 1:
        jax.distributed.initialize(coordinator, processes, process, shutdown_timeout_seconds=80)
    mesh = jdw.data_mesh()

    def on_step(step):
        if step == kill_at and process == processes - 1:
            os.kill(os.getpid(), signal.SIGKILL)

    state = train(mesh, folder, on_step)
    flat, _ = jax.flatten_util.ravel_pytree(jax.device_get(state.params))
    if process == 0:
        np.save(result, flat)
        print(f"{processes} x {devices}: trained", flush=True)
    if processes > 1:
        jax.distributed.shutdown()  # a barrier: process 0 holds the service, and leaves last
    sys.stdout.flush()
    os._exit(0)  # now and then XLA's CPU client hangs while the interpreter ends


def launch(processes, devices, folder, result, kill_at=0):
    """Runs so many processes on this machine; where one is killed, ends all, as clusters do."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{probe.getsockname()[1]}"
    given = processes, devices, coordinator, folder, result, kill_at
    started = [FORKED.Process(target=work, args=(each, *given)) for each in range(processes)]
    for process in started:
        process.start()
    try:
        started[-1].join(120)  # the one that is to be killed
        if started[-1].exitcode == 0:
            for process in started:
                process.join(120)
    finally:
        for process in started:
            process.kill()
            process.join()
    ended = {process.exitcode for process in started}
    if ended - {0, -signal.SIGKILL} or (0 in ended) == bool(kill_at):
        raise SystemExit(f"{processes} x {devices} ended otherwise than planned")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=None, help="of the steps at which it is killed")
    options = parser.parse_args()

    steps = EPOCHS * -(-TRAIN // ROWS)
    chance = random.Random(options.seed)
    first, second = sorted(chance.sample(range(SAVED_EVERY + 2, steps), 2))
    with tempfile.TemporaryDirectory() as folder:
        result, right = f"{folder}/survived.npy", f"{folder}/undisturbed.npy"
        for processes, devices, kill_at in ((2, 2, first), (1, 3, second), (3, 1, 0)):
            told = f", killed at step {kill_at} of {steps}" if kill_at else ""
            print(f"{processes} x {devices}{told}", flush=True)
            launch(processes, devices, f"{folder}/run", result, kill_at)
        print("1 x 1, undisturbed", flush=True)
        launch(1, 1, f"{folder}/other", right)
        survived, undisturbed = np.load(result), np.load(right)
    off = float(np.abs(survived - undisturbed).max() / np.abs(undisturbed).max())
    print(f"parameters are within {off:.1e} of those of a run that nobody disturbed")
    return 0 if off < 1e-5 else 1


if __name__ == "__main__":
    sys.exit(main())
