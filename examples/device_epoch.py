"""Train a network on real digits without a host in the loop: thirty epochs are one program.

Where there are no accelerators, four CPU devices are faked. The images lie on the devices, ids are
made there, and all steps of all epochs run in one compiled scan; so does the evaluation. Then the
same training is run by the loop over batches that the host fetches: its parameters are the same,
bit for bit.
"""

import time

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding, PartitionSpec
from sklearn.datasets import load_digits

import jax_ddp_weighting as jdw

EPOCHS = 30
ROWS_PER_RANK = 51  # over 4 ranks: 7 full steps of 204 rows, then one of 3 + 2 + 2 + 2
TRAIN, TEST = 1437, 360


class Classifier(nn.Module):
    """Two hidden layers, 64 pixels in and 10 logits out."""

    @nn.compact
    def __call__(self, pixels):
        for width in (128, 64):
            pixels = nn.relu(nn.Dense(width)(pixels))
        return nn.Dense(10)(pixels)


model = Classifier()


def loss_fn(params, batch, keys):
    """Noise of each image's own key: the same however the images are dealt out."""
    noise = jax.vmap(lambda key: 0.05 * jax.random.normal(key, (64,)))(keys)
    logits = model.apply(params, batch.data["pixels"] + noise)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.data["label"])
    return jdw.weighted_sum(losses, batch.weights)


def metric_fn(params, batch):
    right = jnp.argmax(model.apply(params, batch.data["pixels"]), axis=-1) == batch.data["label"]
    return {"accuracy": jdw.weighted_sum(right, batch.weights)}


def main():
    jax.config.update("jax_num_cpu_devices", 4)  # accelerators, where there are any, come first
    mesh = jdw.data_mesh()
    ranks = mesh.shape["data"]
    print(f"{ranks} {jax.devices()[0].platform} devices, {ROWS_PER_RANK} rows each per step")

    digits = load_digits()
    shuffled = jdw.torch_order(len(digits.target), seed=0)
    pixels, labels = (digits.data / 16).astype(np.float32), digits.target.astype(np.int32)

    def rows_of(ids):
        return {"pixels": pixels[ids], "label": labels[ids]}

    train, test = rows_of(shuffled[:TRAIN]), rows_of(shuffled[TRAIN:])
    everywhere = NamedSharding(mesh, PartitionSpec())
    on_devices, test_on_devices = jax.device_put((train, test), everywhere)

    plan = jdw.EpochPlan(TRAIN, num_replicas=ranks, batch_size=ROWS_PER_RANK)
    rng = jax.random.key(1)
    params = model.init(jax.random.key(0), jnp.zeros((1, 64)))
    schedule = optax.cosine_decay_schedule(5e-3, EPOCHS * plan.steps_per_epoch)
    start = TrainState.create(apply_fn=model.apply, params=params, tx=optax.adamw(schedule))

    run_epochs = jdw.make_train_epoch(loss_fn, mesh, plan, rng_per="example")
    for turn in ("compiled and run", "run again"):
        began = time.perf_counter()
        state, reports = run_epochs(start, on_devices, epochs=EPOCHS, rng=rng)
        jax.block_until_ready(state)
        print(f"{EPOCHS} epochs as one program, {turn}: {time.perf_counter() - began:.2f} s")
    weights = np.asarray(reports.weight)  # [epochs, steps]
    losses = (np.asarray(reports.loss.value) * weights).sum(axis=1) / weights.sum(axis=1)
    print(f"images counted in each epoch: {sorted(set(weights.sum(axis=1).tolist()))}")
    print(f"loss of the first epoch {losses[0]:.4f}, of the last {losses[-1]:.4f}")

    test_plan = jdw.EpochPlan(TEST, num_replicas=ranks, batch_size=ROWS_PER_RANK, shuffle=False)
    found = jdw.make_evaluation(metric_fn, mesh, test_plan)(state.params, test_on_devices)
    hits = found.sums["accuracy"]
    print(f"accuracy: {found['accuracy']:.4f} = {hits.total} of {hits.weight} test images")

    step = jdw.make_train_step(loss_fn, mesh, rng_per="example")
    looped, began = start, time.perf_counter()
    for epoch in range(EPOCHS):
        of_epoch = jax.random.fold_in(rng, epoch)
        read = jdw.batches(plan, epoch, lambda ids: jax.tree.map(lambda x: x[ids], train), mesh)
        for number, batch in enumerate(read):
            looped, _ = step(looped, batch, jax.random.fold_in(of_epoch, number))
    jax.block_until_ready(looped)
    print(f"the same by the loop, compiled and run: {time.perf_counter() - began:.2f} s")
    pairs = zip(jax.tree.leaves(state), jax.tree.leaves(looped), strict=True)
    same = all(np.array_equal(a, b) for a, b in pairs)
    print(f"parameters and optimizer state of both are equal to the last bit: {same}")


if __name__ == "__main__":
    main()
