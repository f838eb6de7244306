"""A small causal transformer on real text, and what four conventions do to its gradient.

The text is Python's own reference, which ships with the interpreter. Paragraphs of any length are
packed into sequences; the first line of a paragraph is its prompt and is not learnt (label -100).
So every sequence holds another number of tokens that count, and whoever averages means of
sequences, microbatches or ranks counts some tokens more than others. The gradient of each
convention is compared with the right one, over the number of microbatches.

    python examples/tokens.py [--plot errors.png]
"""

import argparse
from pydoc_data.topics import topics

import flax.linen as nn
import jax
import numpy as np
import optax
from flax.training.train_state import TrainState
from jax.flatten_util import ravel_pytree
from jax.sharding import PartitionSpec
from rich.progress import Progress

import jax_ddp_weighting as jdw

RANKS = 4
LENGTH = 96  # tokens in a sequence: bytes, since they need no vocabulary
SEQUENCES = 384
ROWS_PER_RANK = 16
EPOCHS = 2
MICROBATCHES = (1, 4, 16)
IGNORED = -100


# --- text -----------------------------------------------------------------------------------------


def paragraphs():
    """Each paragraph of Python's reference, as bytes and the length of its prompt."""
    for topic in topics.values():
        for text in topic.split("\n\n"):
            prompt, line_end, _ = text.strip().partition("\n")
            yield text.strip().encode()[:LENGTH], len((prompt + line_end).encode()) * bool(line_end)


def packed(num_sequences):
    """Paragraphs packed one after another into sequences, as long as they fit.

    Segments number the paragraphs of a sequence from 1; 0 is what was left free.
    """
    shape = (num_sequences, LENGTH)
    rows = {name: np.zeros(shape, np.int32) for name in ("tokens", "segments", "places")}
    rows["labels"] = np.full(shape, IGNORED, np.int32)
    row, start, segment = 0, 0, 1
    for text, prompt in paragraphs():
        length = len(text) - 1  # each byte foretells the next
        if length < 1:
            continue
        if start + length > LENGTH:
            row, start, segment = row + 1, 0, 1
            if row == num_sequences:
                break
        here = slice(start, start + length)
        values = np.frombuffer(text, np.uint8).astype(np.int32)
        rows["tokens"][row, here] = values[:-1]
        rows["labels"][row, here] = np.where(np.arange(1, length + 1) < prompt, IGNORED, values[1:])
        rows["segments"][row, here] = segment
        rows["places"][row, here] = np.arange(length)
        start, segment = start + length, segment + 1
    return rows


# --- model ----------------------------------------------------------------------------------------


class Block(nn.Module):
    """Attention among the earlier tokens of the same paragraph, then a small network."""

    @nn.compact
    def __call__(self, x, mask):
        x = x + nn.MultiHeadDotProductAttention(4)(nn.LayerNorm()(x), mask=mask)
        return x + nn.Dense(x.shape[-1])(nn.gelu(nn.Dense(2 * x.shape[-1])(nn.LayerNorm()(x))))


class Transformer(nn.Module):
    """Logits of the next byte."""

    width: int = 48
    layers: int = 1

    @nn.compact
    def __call__(self, tokens, segments, places):
        x = nn.Embed(256, self.width)(tokens) + nn.Embed(LENGTH, self.width)(places)
        same = segments[:, None, :, None] == segments[:, None, None, :]
        mask = same & nn.make_causal_mask(tokens, dtype=bool)
        for _ in range(self.layers):
            x = Block()(x, mask)
        return nn.Dense(256)(nn.LayerNorm()(x))


model = Transformer()


def loss_fn(params, batch):
    """Numerator and denominator over tokens: a row's weight reaches each of its tokens."""
    data = batch.data
    logits = model.apply(params, data["tokens"], data["segments"], data["places"])
    labels, weights = jdw.valid_labels(data["labels"], IGNORED)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return jdw.weighted_sum(losses, weights * batch.weights[:, None])


# --- conventions ----------------------------------------------------------------------------------


def sums_of(params, batch):
    """Each row's gradient of its summed loss, and its weight: all that a convention gets to see."""

    def row_total(params, row):
        local = loss_fn(params, jax.tree.map(lambda leaf: leaf[None], row))
        return local.total, local.weight

    by_row = jax.jit(jax.vmap(jax.grad(row_total, has_aux=True), in_axes=(None, 0)))
    gradients, weights = by_row(params, batch)
    gradients = jax.vmap(lambda tree: ravel_pytree(tree)[0])(gradients)
    return np.asarray(gradients, float), np.asarray(weights, float)


def conventions(gradients, weights, microbatches):
    """What code in use makes of one step of `RANKS` ranks and some microbatches.

    Gradients and weights are summed over the rows of each (rank, microbatch) first.
    """
    shape = (RANKS, -1, microbatches)  # row j of a rank belongs to microbatch j % microbatches
    gradients = gradients.reshape(*shape, gradients.shape[-1]).sum(1)
    weights = weights.reshape(shape).sum(1)[..., None]
    tokens = LENGTH * ROWS_PER_RANK / microbatches
    return {
        "mean of means": (gradients / np.maximum(weights, 1)).mean((0, 1)),
        "rank means": (gradients.sum(1) / weights.sum(1)).mean(0),
        "microbatch means": (gradients.sum(0) / weights.sum(0)).mean(0),
        "padding counted": (gradients / tokens).mean((0, 1)),
    }


def errors_of(params, batch, mesh):
    """Relative gradient errors against one device that holds the batch, by convention."""
    by_row, weights = sums_of(params, batch)
    right = by_row.sum(0) / weights.sum()

    def off(gradient):
        return float(np.linalg.norm(gradient - right) / np.linalg.norm(right))

    errors = {}
    for microbatches in MICROBATCHES:
        ours = jdw.value_and_grad(loss_fn, axis_name="data", microbatches=microbatches)
        mapped = jax.shard_map(
            ours,
            mesh=mesh,
            in_specs=(PartitionSpec(), PartitionSpec("data")),
            out_specs=PartitionSpec(),
        )
        gradients = jax.jit(mapped)(params, batch)[1]
        found = {"ours": np.asarray(ravel_pytree(gradients)[0], float)}
        found |= conventions(by_row, weights, microbatches)
        for name, gradient in found.items():
            errors.setdefault(name, []).append(off(gradient))
    return errors


def plotted(errors, path):
    """The errors over the number of microbatches, as a picture."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for name, values in errors.items():
        axes.loglog(
            MICROBATCHES,
            np.maximum(values, 1e-8),
            marker="o",
            label=name,
            lw=3 if name == "ours" else 1.5,
        )
    axes.set(xlabel="microbatches per step", ylabel="relative error of the gradient")
    axes.grid(alpha=0.3)
    axes.set_xticks(MICROBATCHES, MICROBATCHES)
    axes.minorticks_off()
    axes.legend()
    figure.savefig(path, dpi=150)


# --- the run --------------------------------------------------------------------------------------


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--plot", help="write the errors to this picture")
    arguments = parser.parse_args()

    jdw.force_cpu_devices(RANKS)
    mesh = jdw.data_mesh()
    text = packed(SEQUENCES)
    counts = (text["labels"] != IGNORED).sum(1)
    print(
        f"{SEQUENCES} sequences of {LENGTH} tokens; {counts.min()} to {counts.max()} of them count,"
        f" {counts.sum()} in all"
    )

    def fetch(ids):
        return {name: rows[ids] for name, rows in text.items()}

    plan = jdw.EpochPlan(SEQUENCES, num_replicas=RANKS, batch_size=ROWS_PER_RANK)
    step = jdw.make_train_step(loss_fn, mesh, microbatches=4)
    variables = model.init(
        jax.random.key(0), *(text[n][:1] for n in ("tokens", "segments", "places"))
    )
    state = TrainState.create(apply_fn=None, params=variables, tx=optax.adamw(1e-2))
    losses = []
    with Progress(transient=True) as progress:
        bar = progress.add_task("training", total=EPOCHS * plan.steps_per_epoch)
        for epoch in range(EPOCHS):
            sums = []
            for batch in jdw.batches(plan, epoch, fetch, mesh):
                state, report = step(state, batch)
                sums.append(report.loss.terms["loss"])
                progress.advance(bar)
            epoch_sum = sum(sums)
            losses.append(float(epoch_sum.mean()))
            assert int(epoch_sum.weight) == counts.sum()  # every token once, and no other
            progress.console.print(
                f"epoch {epoch}: {losses[-1]:.3f} nats a byte over {epoch_sum.weight} tokens",
                highlight=False,
            )

    batch = next(iter(jdw.batches(plan, EPOCHS, fetch, mesh)))
    errors = errors_of(state.params, batch, mesh)
    print("\nrelative error of the gradient of one step, by microbatches per step")
    print(f"{'':18}" + "".join(f"{k:>10}" for k in MICROBATCHES))
    for name, values in errors.items():
        print(f"{name:18}" + "".join(f"{value:10.1e}" for value in values))
    if arguments.plot:
        plotted(errors, arguments.plot)
        print(f"drawn in {arguments.plot}")

    assert losses[-1] < losses[0]
    assert max(errors["ours"]) < 1e-5
    naive = errors["mean of means"]
    assert naive[-1] > 2 * naive[0] > 1000 * max(errors["ours"])


if __name__ == "__main__":
    main()
