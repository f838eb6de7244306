"""Real digits with flax nnx: one training run on one device and on four, and the same parameters.

The four devices (faked, where there are no others) hold uneven rows in the last step of each epoch,
and accumulate three microbatches. One device reads the same rows at once. If every image counts
once, and nothing else decides the gradient, both runs end with the same parameters, but for
rounding.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from rich.progress import Progress
from sklearn.datasets import load_digits

import jax_ddp_weighting as jdw

EPOCHS = 8
ROWS = 204  # in a step over all devices: 7 full steps, then one of 9 rows
TRAIN, TEST = 1437, 360


class Classifier(nnx.Module):
    """A convolution, then a hidden layer: 8 x 8 pixels in and 10 logits out."""

    def __init__(self, rngs):
        self.convolution = nnx.Conv(1, 16, (3, 3), rngs=rngs)
        self.hidden = nnx.Linear(16 * 16, 64, rngs=rngs)
        self.out = nnx.Linear(64, 10, rngs=rngs)

    def __call__(self, pixels):
        x = nnx.relu(self.convolution(pixels))
        x = nnx.avg_pool(x, (2, 2), (2, 2))
        x = nnx.relu(self.hidden(x.reshape(x.shape[0], -1)))
        return self.out(x)


def loss_fn(model, batch):
    """Numerator and denominator; the library divides, once, by the weight of the whole step."""
    losses = optax.softmax_cross_entropy_with_integer_labels(
        model(batch.data["pixels"]), batch.data["label"]
    )
    return jdw.weighted_sum(losses, batch.weights)


@nnx.jit
def hits(model, batch):
    """How many rows are classified right, counted in integers."""
    right = jnp.argmax(model(batch.data["pixels"]), axis=-1) == batch.data["label"]
    return jdw.weighted_sum(right, batch.weights)


def trained(ranks, microbatches, fetch, advance):
    """A model trained on so many devices, its mesh, and the mean loss of each epoch."""
    mesh = jdw.data_mesh(ranks)
    model = Classifier(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(5e-3), wrt=nnx.Param)
    step = jdw.make_nnx_train_step(loss_fn, mesh, microbatches=microbatches)
    plan = jdw.EpochPlan(TRAIN, num_replicas=ranks, batch_size=ROWS // ranks)
    losses = []
    for epoch in range(EPOCHS):
        sums = []
        for batch in jdw.batches(plan, epoch, fetch, mesh):
            sums.append(step(model, optimizer, batch).loss.terms["loss"])
            advance()
        whole = sum(sums)
        assert int(whole.weight) == TRAIN
        losses.append(float(whole.mean()))
    return model, mesh, losses


def main():
    jdw.force_cpu_devices(4)
    digits = load_digits()
    shuffled = jdw.torch_order(len(digits.target), seed=0)
    pixels = (digits.images / 16).astype(np.float32)[..., None]
    labels = digits.target.astype(np.int32)

    def rows_of(subset):
        return lambda ids: {"pixels": pixels[subset[ids]], "label": labels[subset[ids]]}

    fetch = rows_of(shuffled[:TRAIN])
    with Progress(transient=True) as progress:
        bar = progress.add_task("training twice", total=2 * EPOCHS * -(-TRAIN // ROWS))
        one, _, alone = trained(1, 1, fetch, lambda: progress.advance(bar))
        four, mesh, spread = trained(4, 3, fetch, lambda: progress.advance(bar))
    for epoch, (a, b) in enumerate(zip(alone, spread, strict=True)):
        print(f"epoch {epoch}: loss on one device {a:.5f}, on four {b:.5f}")

    pairs = zip(
        *(jax.tree.leaves(jax.device_get(nnx.state(m, nnx.Param))) for m in (one, four)),
        strict=True,
    )
    off = max(float(np.abs(a - b).max() / np.abs(a).max()) for a, b in pairs)
    print(f"after {EPOCHS} epochs the parameters of four devices are within {off:.1e} of one's")

    plan = jdw.EpochPlan(TEST, num_replicas=4, batch_size=51, shuffle=False)
    counted = sum(hits(four, b) for b in jdw.batches(plan, 0, rows_of(shuffled[TRAIN:]), mesh))
    print(f"accuracy: {float(counted.mean()):.4f} = {counted.total} of {counted.weight} test ids")

    assert off < 1e-3
    assert int(counted.weight) == TEST
    assert float(counted.mean()) > 0.9


if __name__ == "__main__":
    main()
