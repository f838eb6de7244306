"""Evaluate on real digits over four devices: every rate is that of the 360 test images.

Three ways, each exact whatever the number of devices and the batch size:

- `evaluate` sums numerators and denominators on the devices while the model trains;
- `gather_by_id` brings predictions to the host, where any metric of scikit-learn takes them;
- metrics that average under a mask, as those of clu and flax.nnx do, are given the gathered rows
  and no mask. For masks are no weights: of values 1 and 3 that weigh 1 and 1/4 the mean is 1.4; a
  mask of bools, as clu's, makes it 2.0, nnx's Average 1.75, since it counts in integers, and both
  let NaN under a zero through.

Beside them is what a gather by position gives, which counts the padding of the last batch.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from flax.training.train_state import TrainState
from sklearn.datasets import load_digits
from sklearn.metrics import confusion_matrix, f1_score, roc_auc_score

import jax_ddp_weighting as jdw

EPOCHS, ROWS_PER_RANK, TRAIN = 5, 51, 1437


def logits_of(params, pixels):
    return pixels @ params["kernel"] + params["bias"]


def loss_fn(params, batch):
    losses = optax.softmax_cross_entropy_with_integer_labels(
        logits_of(params, batch.data["pixels"]), batch.data["label"]
    )
    return jdw.weighted_sum(losses, batch.weights)


def metric_fn(params, batch):
    """Defined once, with the parameters handed in: so it is compiled once for the whole run."""
    right = logits_of(params, batch.data["pixels"]).argmax(-1) == batch.data["label"]
    return {
        "accuracy": jdw.weighted_sum(right, batch.weights),
        "loss": loss_fn(params, batch),
    }


@jax.jit
def predict(params, batch):
    return jax.nn.softmax(logits_of(params, batch.data["pixels"]))


def main():
    jax.config.update("jax_num_cpu_devices", 4)  # accelerators, where there are any, come first
    mesh = jdw.data_mesh()
    ranks = mesh.shape["data"]
    digits = load_digits()
    shuffled = jdw.torch_order(len(digits.target), seed=0)
    train_ids, test_ids = shuffled[:TRAIN], shuffled[TRAIN:]
    labels = digits.target[test_ids].astype(np.int32)

    def rows_of(subset):
        pixels = (digits.data[subset] / 16).astype(np.float32)
        label = digits.target[subset].astype(np.int32)
        return lambda ids: {"pixels": pixels[ids], "label": label[ids]}

    params = {"kernel": jnp.zeros((64, 10)), "bias": jnp.zeros((1, 10))}
    state = TrainState.create(apply_fn=None, params=params, tx=optax.adam(0.05))
    step = jdw.make_train_step(loss_fn, mesh)
    plan = jdw.EpochPlan(TRAIN, ranks, ROWS_PER_RANK)
    test_plan = jdw.EpochPlan(len(test_ids), ranks, ROWS_PER_RANK)
    for epoch in range(EPOCHS):
        for batch in jdw.batches(plan, epoch, rows_of(train_ids), mesh):
            state, _ = step(state, batch)
        test = jdw.batches(test_plan, epoch, rows_of(test_ids), mesh)
        found = jdw.evaluate(metric_fn, test, mesh, params=state.params)
        hits = found.sums["accuracy"]
        print(
            f"epoch {epoch}: loss {found['loss']:.4f}  accuracy {found['accuracy']:.4f} = "
            f"{hits.total} of {hits.weight}"
        )

    ids, weights, predictions = [], [], []
    for batch in jdw.batches(test_plan, 0, rows_of(test_ids), mesh):
        ids.append(batch.ids)
        weights.append(batch.weights)
        predictions.append(predict(state.params, batch))
    gathered = jdw.gather_by_id(ids, weights, predictions, num_examples=len(test_ids))
    chances = gathered.predictions  # row j belongs to gathered.ids[j], which is j here
    guesses = chances.argmax(1)
    assert (guesses == labels).sum() == hits.total
    f1 = f1_score(labels, guesses, average="macro")
    print(f"scikit-learn, on the {len(gathered)} rows: macro F1 {f1:.4f}")
    area = roc_auc_score(labels, chances / chances.sum(1, keepdims=True), multi_class="ovr")
    print(f"  one-against-rest ROC area {area:.4f}, confusions {counted(labels, guesses)}")

    metrics = nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), top=nnx.metrics.Average("top"))
    for start in range(0, len(gathered), 64):  # any batches will do: no row is padding now
        rows = slice(start, start + 64)
        metrics.update(
            logits=jnp.asarray(chances[rows]),
            labels=jnp.asarray(labels[rows]),
            top=jnp.asarray(chances[rows].max(1)),
        )
    shown = {name: f"{float(value):.4f}" for name, value in metrics.compute().items()}
    print(f"flax.nnx, on the same rows: {shown}")

    everything = np.concatenate([np.asarray(each) for each in predictions]).argmax(1)
    positions = np.concatenate([np.asarray(each) for each in ids])
    wrong = (everything == labels[positions]).sum()
    print(f"by position, padding and all: {wrong} of {len(everything)}")


def counted(labels, guesses):
    table = confusion_matrix(labels, guesses)
    return int(table.sum() - np.trace(table))


if __name__ == "__main__":
    main()
