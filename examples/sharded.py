"""A small transformer in shards, on a mesh of data x fsdp x model, equal to one device.

The text is Python's own reference, which ships with the interpreter, as bytes. Rows lie over the
axes data and fsdp; parameters lie over fsdp, which are gathered where they are used, and over
model, where XLA splits the work; so do the moments of the optimizer. The model is written as for
one device: its boxes, which flax makes by `nn.with_partitioning`, say where each parameter lies.

    python examples/sharded.py
"""

from functools import partial
from pydoc_data.topics import topics

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
from jax.sharding import AxisType, PartitionSpec

import jax_ddp_weighting as jdw

AXES = {"data": 2, "fsdp": 2, "model": 2}
ROW_AXES = ("data", "fsdp")
LENGTH, WIDTH, HEADS = 24, 16, 2
ROWS, STEPS = 4, 20  # of each of four ranks of rows
KERNEL = nn.initializers.lecun_normal()
# in float64, where two right ways of adding up differ by next to nothing, whatever Adam makes of it
Dense, LayerNorm, Embed = (
    partial(layer, dtype=np.float64, param_dtype=np.float64)
    for layer in (nn.Dense, nn.LayerNorm, nn.Embed)
)


def lines():
    """Each line of the reference by itself, as bytes up to a length; most are shorter."""
    text = "\n".join(topics.values()).encode()
    found = [line.strip()[: LENGTH + 1] for line in text.split(b"\n")]
    return [line for line in found if len(line) > 1]


def fetch_from(texts):
    def fetch(ids):
        rows = np.zeros((len(ids), LENGTH + 1), np.uint8)
        for row, i in zip(rows, ids, strict=True):
            row[: len(texts[i])] = np.frombuffer(texts[i], np.uint8)
        lengths = np.array([len(texts[i]) - 1 for i in ids])
        weights = np.arange(LENGTH) < lengths[:, None]  # each byte foretells the next
        return {"tokens": rows.astype(np.int32), "weights": weights.astype(np.int32)}

    return fetch


def across(*names):
    """A kernel that lies so over the mesh."""
    return nn.with_partitioning(KERNEL, names)


class Block(nn.Module):
    """Attention among the bytes before, of heads that lie over model, and a network that does."""

    @nn.compact
    def __call__(self, x):
        def heads(name):
            kernel = across("fsdp", "model")
            return Dense(WIDTH, kernel_init=kernel, name=name)(h).reshape(shape)

        h, shape = LayerNorm()(x), (*x.shape[:2], HEADS, WIDTH // HEADS)
        mask = nn.make_causal_mask(x[..., 0], dtype=bool)
        mixed = nn.dot_product_attention(heads("q"), heads("k"), heads("v"), mask=mask)
        x = x + Dense(WIDTH, kernel_init=across("model", "fsdp"))(mixed.reshape(x.shape))
        up = Dense(4 * WIDTH, kernel_init=across("fsdp", "model"))(LayerNorm()(x))
        return x + Dense(WIDTH, kernel_init=across("model", "fsdp"))(nn.gelu(up))


class Transformer(nn.Module):
    """Logits of the next byte."""

    @nn.compact
    def __call__(self, tokens):
        table = nn.with_partitioning(nn.initializers.normal(0.1), ("fsdp", "model"))
        x = Embed(256, WIDTH, embedding_init=table)(tokens)
        places = self.param("places", nn.initializers.normal(0.1), (LENGTH, WIDTH), np.float64)
        x = Block()(x + places)
        return Dense(256, kernel_init=across("fsdp", "model"))(LayerNorm()(x))


def loss_fn(params, batch):
    tokens = batch.data["tokens"]
    logits = Transformer().apply({"params": params}, tokens[:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return jdw.weighted_sum(losses, batch.data["weights"] * batch.weights[:, None])


def new_state(mesh):
    """The state in shards, made where it lies."""

    def init():
        params = Transformer().init(jax.random.key(0), jnp.zeros((1, LENGTH), jnp.int32))["params"]
        tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-3))
        return TrainState.create(apply_fn=None, params=params, tx=tx)

    shardings = nn.get_sharding(jax.eval_shape(init), mesh)
    return jax.jit(init, out_shardings=shardings)()


def bytes_on_a_device(state):
    shards = [leaf.addressable_shards[0].data for leaf in jax.tree.leaves(state)]
    return sum(shard.nbytes for shard in shards)


def train(mesh, plan, fetch):
    step = jdw.make_train_step(loss_fn, mesh, batch_spec=PartitionSpec(ROW_AXES))
    state, losses = new_state(mesh), []
    for batch in jdw.batches(plan, 0, fetch, mesh, axis_name=ROW_AXES):
        state, report = step(state, batch)
        losses.append(float(report.loss.value))
    return state, losses


def main():
    jdw.force_cpu_devices(8)
    jax.config.update("jax_enable_x64", True)
    texts = lines()[: 4 * ROWS * STEPS - 5]  # the last step is short
    fetch = fetch_from(texts)
    kinds = (AxisType.Auto,) * len(AXES)
    mesh = jax.make_mesh(tuple(AXES.values()), tuple(AXES), axis_types=kinds)
    one = jax.make_mesh((1, 1, 1), tuple(AXES), axis_types=kinds, devices=jax.devices()[:1])

    plan = jdw.EpochPlan(len(texts), num_replicas=4, batch_size=ROWS, tail="mask")
    state, losses = train(mesh, plan, fetch)
    whole = jdw.EpochPlan(len(texts), num_replicas=1, batch_size=4 * ROWS, tail="mask")
    right, expected = train(one, whole, fetch)

    kernel = state.params["Block_0"]["Dense_1"]["kernel"].value
    print(f"{len(losses)} steps on {dict(mesh.shape)}; a kernel {kernel.shape} lies over")
    print(f"{kernel.sharding.spec}, {kernel.addressable_shards[0].data.shape} on each device")
    part, all_of_it = bytes_on_a_device(state), bytes_on_a_device(right)
    print(f"state: {part / 1024:.0f} of {all_of_it / 1024:.0f} KiB on each device")
    print(
        f"loss {losses[0]:.4f} at first, {losses[-1]:.4f} at last; on one device {expected[-1]:.4f}"
    )

    pairs = zip(jax.tree.leaves(state.params), jax.tree.leaves(right.params), strict=True)
    off = max(float(np.max(np.abs(np.asarray(a) - np.asarray(b)))) for a, b in pairs)
    print(f"parameters within {off:.1e} of one device's")
    assert off < 1e-9
    assert losses[-1] < losses[0] - 0.5


if __name__ == "__main__":
    main()
