"""Right training steps in the styles that people write, compiled once, and random batches."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
from jax import lax
from jax.sharding import PartitionSpec as P

from jax_ddp_weighting import Batch, data_mesh, diagnose_step

RANKS, MICROBATCHES, ROWS, FEATURES = 2, 2, 12, 64


def loss_of_row(params, row):
    x, y = row
    return jnp.square(jnp.tanh(x @ params["w"] + params["b"]) - y)


def total_of(params, data, weights):
    return jnp.sum(jax.vmap(loss_of_row, (None, 0))(params, data) * weights)


def over(gradient, weight):
    return jax.tree.map(lambda leaf: leaf / weight, gradient)


def pcast_by_hand(params, data, weights):
    """Parameters made varying, local sums, one psum of each."""

    def on_rank(params, data, weights):
        local = jax.tree.map(lambda p: lax.pcast(p, "data", to="varying"), params)
        gradient = jax.grad(total_of)(local, data, weights)
        return over(lax.psum(gradient, "data"), lax.psum(jnp.sum(weights), "data"))

    specs = {"in_specs": (P(), P("data"), P("data")), "out_specs": P()}
    return jax.shard_map(on_rank, mesh=data_mesh(RANKS), **specs)(params, data, weights)


def global_view(params, data, weights):
    """The weighted mean of the global array."""
    return jax.grad(lambda p: total_of(p, data, weights) / jnp.sum(weights))(params)


def accumulate_then_divide(params, data, weights):
    """Sums over microbatches, each of rows k, k + K, ...; divided at the end."""

    def split(leaf):
        return jnp.swapaxes(leaf.reshape(-1, MICROBATCHES, *leaf.shape[1:]), 0, 1)

    def add(held, part):
        gradient = jax.grad(total_of)(params, *part)
        return jax.tree.map(jnp.add, held, (gradient, jnp.sum(part[1]))), None

    start = jax.tree.map(jnp.zeros_like, params), jnp.zeros(())
    found, _ = lax.scan(add, start, jax.tree.map(split, (data, weights)))
    return over(*found)


def in_pmap(params, data, weights):
    """The textbook rule under pmap."""
    rows = jax.tree.map(lambda leaf: leaf.reshape(RANKS, -1, *leaf.shape[1:]), (data, weights))
    return jax.tree.map(lambda leaf: leaf[0], _pmapped()(params, *rows))


@cache
def _pmapped():
    def on_rank(params, data, weights):
        def share(params):
            scale = lax.axis_size("data") / lax.psum(jnp.sum(weights), "data")
            return total_of(params, data, weights) * scale

        return lax.pmean(jax.grad(share)(params), "data")

    return jax.pmap(on_rank, "data", in_axes=(None, 0, 0), devices=jax.devices()[:RANKS])


CHAIN = optax.chain(
    optax.clip_by_global_norm(1e-3), optax.adamw(1e-2), optax.add_noise(0.1, 0.5, 0)
)


@partial(jax.jit, donate_argnums=0)
def chained(state, batch):
    """Any optimizer behind it: it is put on trial."""
    return state.apply_gradients(grads=global_view(state.params, batch.data, batch.weights))


GRADIENTS = {
    "pcast by hand": jax.jit(pcast_by_hand),
    "global view": jax.jit(global_view),
    "accumulate then divide": jax.jit(accumulate_then_divide),
    "pmap": in_pmap,
}
STYLES = (*GRADIENTS, "optax chain")


def draw(seed):
    """Parameters, rows, and weights of some random kind: masks, importances, little, much."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(ROWS, FEATURES)).astype(np.float32) / 8
    y = rng.uniform(1.5, 3, ROWS).astype(np.float32)  # out of tanh's reach: no row is learned
    params = {"w": rng.normal(size=FEATURES).astype(np.float32) / 2, "b": np.float32(0.1)}
    there = rng.random(ROWS) < rng.uniform(0.3, 1.0)
    there[rng.integers(ROWS)] = True
    size = [np.ones(ROWS), rng.uniform(0.1, 4, ROWS), rng.uniform(0.001, 0.1, ROWS)][seed % 3]
    return params, Batch.of((x, y), (there * size).astype(np.float32))


def diagnose_style(style, seed, gradient_of=None):
    """What a step of this style is named on a random batch, of some split."""
    params, batch = draw(seed)
    rng = np.random.default_rng(seed)
    split = [
        {"ranks": RANKS, "microbatches": MICROBATCHES},
        {"ranks": RANKS, "microbatches": np.arange(ROWS) % MICROBATCHES},
        {"ranks": rng.permutation(np.arange(ROWS) % 3), "microbatches": np.zeros(ROWS, int)},
    ][seed // 3 % 3]  # a right step is right however its rows are told to be dealt
    given = {"loss_of_example": loss_of_row, **split}
    if style == "optax chain":
        params = jax.tree.map(jnp.asarray, params)
        state = TrainState.create(apply_fn=None, params=params, tx=CHAIN)
        return diagnose_step(chained, state, batch, **given)
    gradient_of = GRADIENTS[style] if gradient_of is None else gradient_of
    return diagnose_step(
        lambda params, batch: gradient_of(params, batch.data, batch.weights), params, batch, **given
    )


def check_not_misnamed(found):
    """Right; or a batch of masks that are too even to tell, of which right is the first name."""
    if found.right:
        return True
    assert found.words == "what this batch is too even to tell", str(found)
    assert found.alternatives[0] == "global_mean"
    return False
