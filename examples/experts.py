"""Experts on real text, balanced over the whole step however it is split.

A router sends each byte to one of four small networks, and a second term of the loss keeps their
shares even: the share of tokens that an expert gets, times its mean probability. Means of products
are no products of means, so shares taken within each microbatch (as is usual) give another gradient
for every number of ranks and microbatches. Taken as `statistics=`, they are the whole step's.

    python examples/experts.py
"""

from pydoc_data.topics import topics

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec

import jax_ddp_weighting as jdw

EXPERTS = 4
LENGTH = 32  # bytes in a row: a paragraph of Python's own reference, which may be shorter
ROWS = 512
WIDTH = 16
ROWS_PER_STEP = 64
EPOCHS = 3
SPLITS = [(1, 1), (2, 4), (4, 2)]  # ranks, microbatches
COEFFICIENTS = {"nll": 1.0, "balance": 1.0}


def paragraphs():
    """Bytes `[rows, LENGTH]` of as many paragraphs, and how long each of them is."""
    texts = [text.strip() for topic in topics.values() for text in topic.split("\n\n")]
    texts = [text.encode()[:LENGTH] for text in texts if len(text) > 3][:ROWS]
    rows = [np.frombuffer(text.ljust(LENGTH, b"\0"), np.uint8) for text in texts]
    return np.stack(rows).astype(np.int32), np.array(list(map(len, texts)), np.int32)


def first_params():
    """Parameters of a table of bytes, a router, the experts, and what gives the next byte."""
    rng = np.random.default_rng(0)
    shapes = {
        "bytes": (256, WIDTH),
        "router": (WIDTH, EXPERTS),
        "experts": (EXPERTS, WIDTH, WIDTH),
        "out": (WIDTH, 256),
    }
    return {name: rng.normal(0, 0.25, shape).astype(np.float32) for name, shape in shapes.items()}


def route(params, tokens):
    """Vectors of bytes `[rows, places, WIDTH]`, and the logits and the choice of their experts."""
    x = jnp.take(params["bytes"], tokens, axis=0)
    logits = x @ params["router"]
    return x, logits, jax.nn.one_hot(jnp.argmax(logits, -1), EXPERTS)


def weights_of(batch):
    """Which bytes have a next one: the rest of a row is padding, and some rows are."""
    real = jnp.arange(LENGTH - 1)[None] < batch.data["lengths"][:, None] - 1
    return real * batch.weights[:, None]


def tokens_by_expert(params, batch):
    """How many bytes each expert gets: a sum over rows, which is all that statistics may be."""
    _, _, chosen = route(params, batch.data["tokens"][:, :-1])
    return jnp.sum(chosen * weights_of(batch)[..., None], (0, 1))


def loss_fn(params, batch, statistics):
    """Two terms, each over all bytes of the step; the shares come from the whole step."""
    tokens, weights = batch.data["tokens"], weights_of(batch)
    x, router, chosen = route(params, tokens[:, :-1])
    probabilities = jax.nn.softmax(router)
    gate = jnp.sum(chosen * probabilities, -1, keepdims=True)
    x = x + gate * jnp.tanh(jnp.einsum("rtw,ewv,rte->rtv", x, params["experts"], chosen))
    logits = x @ params["out"]
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    shares = statistics / jnp.maximum(jnp.sum(statistics), 1)
    balance = EXPERTS * jnp.sum(probabilities * shares[None, None], -1)
    return {"nll": jdw.weighted_sum(nll, weights), "balance": jdw.weighted_sum(balance, weights)}


def gradients_of(params, batch, ranks, microbatches):
    """The router's gradient with the shares of the step, and of each rank's own microbatch."""
    options = {"axis_name": "data", "microbatches": microbatches, "coefficients": COEFFICIENTS}

    def whole(router):
        return {**params, "router": router}

    def ours(router, batch, *, statistics):
        return loss_fn(whole(router), batch, statistics)

    def usual(router, batch):
        statistics = tokens_by_expert(whole(router), batch)
        return loss_fn(whole(router), batch, jax.lax.stop_gradient(statistics))

    def shares(router, batch):
        return tokens_by_expert(whole(router), batch)

    def both(router, batch):
        steps = [
            jdw.value_and_grad(ours, statistics=shares, **options),
            jdw.value_and_grad(usual, **options),
        ]
        return [step(router, batch)[1] for step in steps]

    mapped = jax.shard_map(
        both,
        mesh=jdw.data_mesh(ranks),
        in_specs=(PartitionSpec(), PartitionSpec("data")),
        out_specs=PartitionSpec(),
    )
    return list(map(np.asarray, jax.jit(mapped)(params["router"], batch)))


def main():
    jdw.force_cpu_devices(4)
    tokens, lengths = paragraphs()

    def fetch(ids):
        return {"tokens": tokens[ids], "lengths": lengths[ids]}

    params = first_params()
    batch = jdw.Batch.of(fetch(np.arange(ROWS_PER_STEP)), ids=np.arange(ROWS_PER_STEP))
    right = gradients_of(params, batch, 1, 1)[0]
    errors = {"shares of the step": [], "of each microbatch": []}
    for split in SPLITS:
        for name, found in zip(errors, gradients_of(params, batch, *split), strict=True):
            errors[name].append(np.linalg.norm(found - right) / np.linalg.norm(right))
    print("error of the router's gradient, by ranks x microbatches")
    print(f"{'':18}" + "".join(f"{f'{r} x {k}':>8}" for r, k in SPLITS))
    for name, values in errors.items():
        print(f"{name:18}" + "".join(f"{value:8.0e}" for value in values))

    mesh = jdw.data_mesh(4)
    plan = jdw.EpochPlan(ROWS, num_replicas=4, batch_size=ROWS_PER_STEP // 4)
    step = jdw.make_train_step(
        loss_fn, mesh, microbatches=2, coefficients=COEFFICIENTS, statistics=tokens_by_expert
    )
    state = TrainState.create(apply_fn=None, params=params, tx=optax.adam(5e-3))
    for epoch in range(EPOCHS):
        counts, nll = 0, []
        for batch in jdw.batches(plan, epoch, fetch, mesh):
            state, report = step(state, batch)
            counts = counts + np.asarray(report.loss.statistics)
            nll.append(report.loss.terms["nll"])
        assert counts.sum() == (lengths - 1).sum()  # every byte went to one expert, once
        shares = "  ".join(f"{share:.2f}" for share in counts / counts.sum())
        print(f"epoch {epoch}: {float(sum(nll).mean()):.3f} nats a byte, shares {shares}")

    assert max(errors["shares of the step"]) < 1e-5
    assert errors["of each microbatch"][0] < 1e-5 < 5e-3 < min(errors["of each microbatch"][1:])


if __name__ == "__main__":
    main()
