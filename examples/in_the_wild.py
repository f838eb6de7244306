"""How well-known trainers weigh their tokens, by name, and what that costs on uneven text.

    python examples/in_the_wild.py          the table; and the HF Trainer, where it is installed
    python examples/in_the_wild.py NAME     the whole diagnosis of one of them

Each reduction below says in our own words what a public trainer does with a batch, as its source
had it when it was read (docs/in-the-wild.md says where). None of them is a bug by itself: batches
packed to the last token have nothing uneven. The batch here is paragraphs of Python's own manual,
padded. The last rows are a real Trainer of Hugging Face's transformers, over two processes of DDP
and two microbatches, with a model made from a config.
"""

import os
import socket
import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import jax_ddp_weighting as jdw

RANKS, MICROBATCHES = 2, 2


# --- what a trainer does with tokens and weights [ranks, microbatches, tokens] --------------------


def total_of(token_loss, params, tokens, weights):
    """The sum of the losses that count."""
    return jnp.sum(token_loss(params, tokens) * weights)


def mean_of(token_loss, params, tokens, weights, guard=0.0):
    """The mean as a loss function returns it, with what it adds to its divisor, if anything."""
    return total_of(token_loss, params, tokens, weights) / (jnp.sum(weights) + guard)


def averaged_over_ranks(loss_of_rank):
    """What `pmap` with a `pmean` of the gradients does; each rank has its row of the arrays."""

    def gradient_of(token_loss, params, tokens, weights):
        def on_rank(tokens, weights):
            own = jax.grad(partial(loss_of_rank, token_loss))(params, tokens, weights)
            return lax.pmean(own, "batch")

        return jax.vmap(on_rank, axis_name="batch")(tokens, weights)[0]

    return gradient_of


def over_microbatches(combine, guard=0.0):
    """The gradients of the microbatches' means over all ranks, combined."""

    def gradient_of(token_loss, params, tokens, weights):
        mean = jax.grad(partial(mean_of, token_loss, guard=guard))
        own = [mean(params, tokens[:, k], weights[:, k]) for k in range(tokens.shape[1])]
        return combine(own)

    return gradient_of


def sequence_means(guarded):
    """Each sequence's own mean, and the mean of all sequences; a microbatch here is a sequence."""

    def gradient_of(token_loss, params, tokens, weights):
        def loss(params):
            lengths = jnp.sum(weights, axis=-1)
            lengths = jnp.maximum(lengths, 1e-10) if guarded else lengths
            return jnp.mean(jnp.sum(token_loss(params, tokens) * weights, axis=-1) / lengths)

        return jax.grad(loss)(params)

    return gradient_of


def summed(token_loss, params, tokens, weights):
    """The sum, undivided, for optimizers that do not see how large a gradient is."""
    return jax.grad(partial(total_of, token_loss))(params, tokens, weights)


def sums_over_their_weight(token_loss, params, tokens, weights):
    """Microbatches' totals and weights added up, and divided at the end."""
    grads, weight = jnp.zeros_like(params), 0.0
    for k in range(tokens.shape[1]):
        part = tokens[:, k], weights[:, k]
        grads += jax.grad(partial(total_of, token_loss))(params, *part)
        weight += jnp.sum(part[1])
    return grads / weight


def whole_mean(token_loss, params, tokens, weights):
    """One masked mean over the global array, guarded by a tiny number."""
    return jax.grad(partial(mean_of, token_loss, guard=1e-8))(params, tokens, weights)


def boxes(token_loss, params, tokens, weights):
    """The boxes of all ranks, averaged over the ranks and 1 at least; the gradients averaged."""
    held = jnp.maximum(jnp.sum(weights) / len(weights), 1.0)
    own = [
        jax.grad(partial(total_of, token_loss))(params, tokens[r], weights[r]) / held
        for r in range(len(weights))
    ]
    return sum(own) / len(own)


def multi_steps(token_loss, params, tokens, weights):
    """`optax.MultiSteps` over the microbatches' means."""
    optimizer = optax.MultiSteps(optax.sgd(1.0), every_k_schedule=tokens.shape[1])
    state, start = optimizer.init(params), params
    for k in range(tokens.shape[1]):
        mean = partial(mean_of, token_loss, guard=1e-8)
        grads = jax.grad(mean)(params, tokens[:, k], weights[:, k])
        updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    return start - params


@dataclass(frozen=True)
class Trainer:
    """A reduction, and the layout of a batch [ranks, microbatches, tokens] that it is given.

    Attributes:
        gradient_of: what it does, as `diagnose` takes it.
        microbatches: how many each rank has.
        weights: the kind of weights that it takes, as `diagnose` names them.
    """

    gradient_of: Any
    microbatches: int = 1
    weights: str = "any"


ROWS = 4  # of each rank, in the batch that is measured

TRAINERS = {
    "flax, wmt example (pmap)": Trainer(averaged_over_ranks(mean_of), weights="binary"),
    "scenic, weighted losses (pmap)": Trainer(averaged_over_ranks(partial(mean_of, guard=1e-8))),
    "EasyLM, tokens of a sequence": Trainer(sequence_means(guarded=True), ROWS, "binary"),
    "big_vision, captions": Trainer(sequence_means(guarded=False), ROWS),
    "t5x, as it comes": Trainer(summed, MICROBATCHES),
    "t5x, by real target tokens": Trainer(over_microbatches(sum), MICROBATCHES),
    "levanter, accumulation of 2022": Trainer(
        over_microbatches(lambda own: sum(own) / len(own)), MICROBATCHES
    ),
    "MaxText, accumulation": Trainer(sums_over_their_weight, MICROBATCHES, "binary"),
    "MaxText, accumulation by MultiSteps": Trainer(multi_steps, MICROBATCHES, "binary"),
    "MaxText, one batch": Trainer(whole_mean, weights="binary"),
    "kauldron, masked losses": Trainer(whole_mean),
    "DETR, number of boxes": Trainer(boxes),
}


def diagnosed(name):
    """What `diagnose` says of one of them."""
    trainer = TRAINERS[name]
    return jdw.diagnose(
        trainer.gradient_of,
        num_replicas=RANKS,
        microbatches=trainer.microbatches,
        weights=trainer.weights,
    )


# --- what it costs --------------------------------------------------------------------------------


LONGEST = 400


def paragraphs():
    """Paragraphs of Python's manual, uneven as they are: `[ranks, rows, characters]`, weights."""
    texts = [text.strip() for topic in topics.values() for text in topic.split("\n\n")]
    texts = [text for text in texts if text.isascii() and len(text) > 20][: RANKS * ROWS]
    tokens = np.zeros((len(texts), LONGEST), np.int32)
    weights = np.zeros((len(texts), LONGEST), np.float32)
    for row, text in enumerate(texts):
        pairs = list(zip(text[:LONGEST].encode(), text[1:LONGEST].encode(), strict=False))
        tokens[row, : len(pairs)] = [128 * first + second for first, second in pairs]
        weights[row, : len(pairs)] = 1
    return tokens.reshape(RANKS, ROWS, -1), weights.reshape(RANKS, ROWS, -1)


def bigram_loss(params, tokens):
    """The next character from the last, by a table of logits."""
    logits = params.reshape(128, 128)
    first, second = tokens // 128, tokens % 128
    return jax.nn.logsumexp(logits[first], axis=-1) - logits[first, second]


def own_loss(params, tokens):
    """A loss that is the token's own parameter, so that a gradient shows what each counts."""
    return params[tokens]


@dataclass(frozen=True)
class Cost:
    """What a reduction does to the text.

    Attributes:
        low: the smallest that a token counts, in multiples of its right share.
        high: the largest.
        off: how far the gradient is from the right one, relative to it.
        off_at_best: the same at the best learning rate, which mends factors and nothing else.
    """

    low: float
    high: float
    off: float
    off_at_best: float


def measure(trainer):
    """The cost of one reduction on the paragraphs."""
    tokens, weights = (
        each.reshape(RANKS, trainer.microbatches, -1) for each in map(jnp.asarray, paragraphs())
    )
    places = jnp.arange(tokens.size).reshape(tokens.shape)
    counted = trainer.gradient_of(own_loss, jnp.zeros(tokens.size), places, weights)
    share = np.asarray(counted)[np.ravel(weights) > 0] * float(weights.sum())
    found = np.asarray(trainer.gradient_of(bigram_loss, jnp.zeros(128**2), tokens, weights))
    right = np.asarray(whole_mean(bigram_loss, jnp.zeros(128**2), tokens, weights))
    size = np.linalg.norm(right)
    scale = float(found @ right / (found @ found))
    off, at_best = (np.linalg.norm(each - right) / size for each in (found, scale * found))
    return Cost(float(share.min()), float(share.max()), float(off), float(at_best))


# --- a real Trainer -------------------------------------------------------------------------------

HF_LENGTHS = np.array([[[14, 12], [13, 15]], [[3, 5], [9, 2]]])  # of each rank's microbatches' rows
HF_NEEDS = ("accelerate", "torch", "transformers")


def hf_text(place):
    length = HF_LENGTHS.reshape(-1)[place]
    return np.random.default_rng(place).integers(1, 16, length).tolist()


def hf_model():
    """A language model of some seven hundred parameters, made from a config."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    return LlamaForCausalLM(LlamaConfig(vocab_size=16, num_attention_heads=1, **sizes))


def hf_process(rank, port, folder, average_tokens):
    """One of two processes: one optimizer step of an unchanged Trainer."""
    where = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in where.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
    import torch
    from transformers import PrinterCallback, Trainer, TrainingArguments

    torch.set_num_threads(1)
    model, seen = hf_model(), []
    before = {name: leaf.detach().clone() for name, leaf in model.named_parameters()}

    def collate(rows):
        seen.append([row["place"] for row in rows])
        longest = max(len(row["text"]) for row in rows)
        fill = [[0] * (longest - len(row["text"])) for row in rows]
        ids = torch.tensor([row["text"] + zeros for row, zeros in zip(rows, fill, strict=True)])
        real = (ids > 0).long()
        return {
            "input_ids": ids,
            "attention_mask": real,
            "labels": torch.where(real > 0, ids, -100),
        }

    # Plain SGD at rate 1 without clipping, so that what it moved is its gradient.
    arguments = TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=HF_LENGTHS.shape[2],
        gradient_accumulation_steps=MICROBATCHES,
        average_tokens_across_devices=average_tokens,
        max_steps=1,
        optim="sgd",
        learning_rate=1.0,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        use_cpu=True,
        ddp_backend="gloo",
        ddp_find_unused_parameters=False,
        remove_unused_columns=False,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )
    data = [{"place": place, "text": hf_text(place)} for place in range(HF_LENGTHS.size)]
    trainer = Trainer(model=model, args=arguments, train_dataset=data, data_collator=collate)
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    moved = {f"/{n}": (before[n] - leaf.detach()).numpy() for n, leaf in model.named_parameters()}
    np.savez(Path(folder, f"{rank}.npz"), places=np.array(seen[:MICROBATCHES]), **moved)
    torch.distributed.barrier()
    os._exit(0)  # gloo's threads may abort an interpreter that is taken down in the usual way


def run_hf(average_tokens):
    """The diagnosis of one step of the Trainer, by what each of its texts counted."""
    import torch
    from torch import multiprocessing

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        arguments = port, folder, average_tokens
        multiprocessing.spawn(hf_process, args=arguments, nprocs=RANKS)
        found = [dict(np.load(Path(folder, f"{rank}.npz"))) for rank in range(RANKS)]
    places = np.array([each.pop("places") for each in found])  # [ranks, microbatches, rows]
    model, own = hf_model(), {name: [] for name in found[0]}
    for place in places.reshape(-1):
        text = torch.tensor([hf_text(place)])
        model.zero_grad()
        model(input_ids=text, labels=text).loss.backward()
        for name, leaf in model.named_parameters():
            own[f"/{name}"].append(leaf.grad.numpy().copy())
    own = {name: np.stack(each) for name, each in own.items()}
    counted = jdw.effective_weights(found[0], own)
    predicted = HF_LENGTHS.reshape(-1)[places] - 1  # the first token has none before it
    return jdw.diagnose_weights(counted.reshape(places.shape), predicted)


HF = {
    "HF Trainer, tokens averaged across devices": True,
    "HF Trainer, each device its own tokens": False,
}


# --- the table ------------------------------------------------------------------------------------


def show(name, found, shares, offs, width):
    factor = "" if found.factor is None else f"{found.factor:.3g}"
    counts = f"{min(shares):.2f} to {max(shares):.2f}"
    costs = "".join(f"  {off:7.1%}" if off < 10 else f"  {'':7}" for off in offs)
    print(f"{name:{width}}  {found.convention:15}  {factor:>6}  {counts:>18}{costs}".rstrip())
    if found.convention == "unknown":
        print(f"{'':{width}}  {found.words}")


def main():
    """Prints the table, or one diagnosis."""
    if len(sys.argv) > 1:
        name = " ".join(sys.argv[1:])
        print(run_hf(HF[name]) if name in HF else diagnosed(name))
        return
    width = max(map(len, [*TRAINERS, *HF]))
    print(
        f"{'what it does as':{width}}  {'is named':15}  {'factor':>6}  {'a token counts':>18}  "
        f"{'off':>7}  {'at best':>7}"
    )
    for name, trainer in TRAINERS.items():
        cost = measure(trainer)
        offs = cost.off, cost.off_at_best
        show(name, diagnosed(name), (cost.low, cost.high), offs, width)
    missing = [name for name in HF_NEEDS if not find_spec(name)]
    if missing:
        print(f"HF Trainer: not run, needs {', '.join(HF_NEEDS)}: {', '.join(missing)} missing")
        return
    for name, average_tokens in HF.items():
        found = run_hf(average_tokens)
        held = found.weights > 0
        show(
            name, found, found.counted[held] / found.weights[held] * found.weights.sum(), (), width
        )


if __name__ == "__main__":
    main()
