"""Train a small flax network on real digits over several devices, every example counted once.

Where there are no accelerators, four CPU devices are faked. The 1,437 training images divide
neither by the devices nor by the batches: the last step of each epoch is short and uneven, and
still every image counts once. At the end the gradient of exactly such a step is compared with one
device's, and with what averaging the devices' local means would have given.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
from jax import lax
from rich.progress import Progress
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


def loss_fn(params, batch):
    """Numerator and denominator of the loss; the library divides, once, by the global weight."""
    logits = model.apply(params, batch.data["pixels"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.data["label"])
    return jdw.weighted_sum(losses, batch.weights)


@jax.jit
def hits(params, batch):
    """How many rows are classified right, counted in integers."""
    right = jnp.argmax(model.apply(params, batch.data["pixels"]), axis=-1) == batch.data["label"]
    return jdw.weighted_sum(right, batch.weights)


def mean_of_local_means(loss_fn, *, axis_name, **_):
    """The usual data-parallel gradient: each device has one vote, however many rows it holds."""

    def gradient(params, batch):
        value, grads = jax.value_and_grad(lambda p: loss_fn(p, batch).mean())(params)
        return jdw.GlobalLoss(*lax.pmean((value, {}), axis_name)), lax.pmean(grads, axis_name)

    return gradient


def main():
    jax.config.update("jax_num_cpu_devices", 4)  # accelerators, where there are any, come first
    mesh = jdw.data_mesh()
    ranks = mesh.shape["data"]
    print(f"{ranks} {jax.devices()[0].platform} devices, {ROWS_PER_RANK} rows each per step")

    digits = load_digits()
    shuffled = jdw.torch_order(len(digits.target), seed=0)
    train_ids, test_ids = shuffled[:TRAIN], shuffled[TRAIN:]

    def rows_of(subset):
        pixels = (digits.data[subset] / 16).astype(np.float32)
        labels = digits.target[subset].astype(np.int32)
        return lambda ids: {"pixels": pixels[ids], "label": labels[ids]}

    plan = jdw.EpochPlan(TRAIN, num_replicas=ranks, batch_size=ROWS_PER_RANK)
    step = jdw.make_train_step(loss_fn, mesh)
    params = model.init(jax.random.key(0), jnp.zeros((1, 64)))
    schedule = optax.cosine_decay_schedule(5e-3, EPOCHS * plan.steps_per_epoch)
    state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.adamw(schedule))

    previous = None
    with Progress(transient=True) as progress:
        bar = progress.add_task("training", total=EPOCHS * plan.steps_per_epoch)
        for epoch in range(EPOCHS):
            ids, weights, losses = [], [], []
            for batch in jdw.batches(plan, epoch, rows_of(train_ids), mesh):
                ids.append(np.asarray(batch.ids))
                weights.append(np.asarray(batch.weights))
                state, report = step(state, batch)
                losses.append(report.loss.terms["loss"])
                progress.advance(bar)
            ids, weights = np.concatenate(ids), np.concatenate(weights)
            audit = jdw.audit_ids(ids, TRAIN, weights=weights)
            audit.check_exactly_once()
            order = ids[weights > 0]
            changed = "first" if previous is None else str(not np.array_equal(order, previous))
            previous = order
            progress.console.print(
                f"epoch {epoch:2}: loss {float(sum(losses).mean()):.4f}  slots {audit.slots}  "
                f"accepted {audit.accepted}  duplicated {len(audit.duplicated)}  "
                f"omitted {len(audit.omitted)}  order changed: {changed}",
                highlight=False,
                soft_wrap=True,
            )

    test_plan = jdw.EpochPlan(TEST, num_replicas=ranks, batch_size=ROWS_PER_RANK, shuffle=False)
    test_batches = list(jdw.batches(test_plan, 0, rows_of(test_ids), mesh))
    counted = sum(hits(state.params, batch) for batch in test_batches)
    print(f"accuracy: {float(counted.mean()):.4f} = {counted.total} of {counted.weight} test ids")

    last = plan.steps_per_epoch - 1
    slots = plan.batch(EPOCHS, last)
    split = tuple(slots.weights.sum(axis=1).tolist())
    short = slots.ids[slots.weights > 0]
    short = jdw.Batch.of(rows_of(train_ids)(short), ids=short)
    ours = jdw.check_gradients(loss_fn, state.params, short, [split]).worst.difference
    try:
        jdw.check_gradients(
            loss_fn,
            state.params,
            short,
            [split],
            engines=["shard_map_unchecked"],
            gradient=mean_of_local_means,
        )
    except jdw.ParityError as error:
        naive = error.report.worst.difference
    print(
        f"parity: on a last step of {' + '.join(map(str, split))} rows the gradient of {ranks} "
        f"devices is within {ours:.1e} of one device's; the mean of local means is {naive:.0%} off"
    )


if __name__ == "__main__":
    main()
