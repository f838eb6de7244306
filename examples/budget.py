"""Train on sentences of unequal length by a budget of tokens, and once more with packed rows.

A toy language: the next token follows from the last one. `BudgetPlan` gives every rank's step as
many rows as its budget of tokens takes, in a few shapes that are known beforehand: so many
compilations, and no more. `PackedPlan` puts several sentences into each row. Either way each token
of each sentence counts once, which the ledger shows.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState

import jax_ddp_weighting as jdw

SENTENCES, RANKS, BUDGET, WORDS = 400, 2, 600, 32

rng = np.random.default_rng(0)
LENGTHS = np.clip(rng.lognormal(np.log(25), 0.8, SENTENCES).astype(int), 2, 120)
NEXT = rng.permutation(WORDS)  # the language: what follows each word


def sentence(i):
    words = [i % WORDS]
    while len(words) < LENGTHS[i]:
        words.append(NEXT[words[-1]])
    return np.array(words, np.int32)


def fetch_padded(ids, length):
    """Rows of one sentence each, padded to the length of the step."""
    tokens = np.zeros((len(ids), length), np.int32)
    segment_ids = np.zeros_like(tokens)
    for row, i in enumerate(ids):
        tokens[row, : LENGTHS[i]], segment_ids[row, : LENGTHS[i]] = sentence(i), 1
    return {"tokens": tokens, "segment_ids": segment_ids}


def fetch_packed(ids, length):
    """Rows of several sentences."""
    rows = jdw.pack_rows(ids, sentence, length)
    return {"tokens": rows.tokens, "segment_ids": rows.segment_ids}


traced = set()


def loss_fn(params, batch):
    """Of each word the next one, if it is of the same sentence: none is told across a border."""
    tokens, segments = batch.data["tokens"], batch.data["segment_ids"]
    traced.add((tokens.shape[0], tokens.shape[1]))  # runs when compiled only
    losses = optax.softmax_cross_entropy_with_integer_labels(
        jax.nn.one_hot(tokens[:, :-1], WORDS) @ params["next"], tokens[:, 1:]
    )
    inside = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)
    # a row of padding holds a real sentence, at weight 0; a packed row of nothing has no segment
    counts = batch.weights if batch.weights.ndim == 1 else batch.weights.max(axis=1)
    return jdw.weighted_sum(losses, inside * counts[:, None])


def main():
    jax.config.update("jax_num_cpu_devices", RANKS)  # accelerators, where there are any, come first
    mesh = jdw.data_mesh(RANKS)
    budget = jdw.BudgetPlan(LENGTHS, RANKS, BUDGET, shapes=2)
    packed = jdw.PackedPlan(LENGTHS, RANKS, 4, BUDGET // 4)
    found = budget.padding()
    print(f"{SENTENCES} sentences of {LENGTHS.min()} to {LENGTHS.max()} words, {RANKS} ranks")
    print(
        f"padding: plain {found.plain.padding:.1%} in {found.plain.shapes} shapes, by budget"
        f" {found.plan.padding:.1%} in {found.plan.shapes}, packed {packed.padding():.1%} in one"
    )
    step = jdw.make_train_step(loss_fn, mesh)
    for name, plan, fetch in (("budget", budget, fetch_padded), ("packed", packed, fetch_packed)):
        traced.clear()
        params = {"next": jnp.zeros((WORDS, WORDS))}
        state = TrainState.create(apply_fn=None, params=params, tx=OPTIMIZER)
        for epoch in range(2):
            ledger, words, losses = jdw.Ledger(SENTENCES, epoch=epoch), 0, []
            for batch in jdw.batches(plan, epoch, fetch, mesh):
                state, report = step(state, batch)
                term = report.loss.terms["loss"]
                words, losses = words + int(term.weight), [*losses, float(term.mean())]
                ledger.add(batch.ids, batch.weights)
            ledger.check_exactly_once()
            print(
                f"{name} epoch {epoch}: {len(losses)} steps, {words} words, loss {losses[-1]:.3f}"
            )
        told = set(plan.step_shapes)
        print(f"{name}: compiled {len(traced)} shapes, all told before: {traced == told}")


OPTIMIZER = optax.sgd(30.0)

if __name__ == "__main__":
    main()
