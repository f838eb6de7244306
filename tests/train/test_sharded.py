"""Parameters sharded over devices: the gradient of one device, and each shard stays where it is."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_ddp_weighting import Batch, GlobalLoss, make_train_step, value_and_grad, weighted_sum
from jax_ddp_weighting.distributed import mesh as meshes

RNG = np.random.default_rng(7)
PARAMS = {
    "w1": RNG.normal(size=(6, 8)) / 3,
    "b1": RNG.normal(size=8),
    "w2": RNG.normal(size=(8, 2)) / 3,
}
X, Y = RNG.normal(size=(12, 6)), RNG.normal(size=(12, 2))
# two ranks of six rows: 5 accepted and 1, one of them fractional
WEIGHTS = np.array([1, 1, 0.5, 1, 0, 1, 0, 0, 0, 1, 0, 0])

TENSOR = {"w1": P(None, "model"), "b1": P("model"), "w2": P("model", None)}
FSDP = {"w1": P("data", None), "b1": P("data"), "w2": P("data", None)}
BOTH = {"w1": P("data", "model"), "b1": P("model"), "w2": P("model", "data")}


def loss_fn(params, batch):
    x, y = batch.data
    h = jnp.tanh(x @ params["w1"] + params["b1"][None])
    return weighted_sum(jnp.sum((h @ params["w2"] - y) ** 2, axis=-1), batch.weights)


def explicit_loss(rows):
    """The same for `Explicit` axes, where a model says how an ambiguous product lies."""

    def loss_fn(params, batch):
        x, y = batch.data
        h = jnp.tanh(x @ params["w1"] + params["b1"][None])
        out = jnp.dot(h, params["w2"], out_sharding=P(rows, None))
        return weighted_sum(jnp.sum((out - y) ** 2, axis=-1), batch.weights)

    return loss_fn


def gathering_loss(params, batch):
    """The same for parameters sharded over an `Explicit` data axis: gathered when needed."""
    return loss_fn(jax.tree.map(lambda leaf: jax.sharding.reshard(leaf, P()), params), batch)


def on_one_device(params, weights=WEIGHTS):
    def mean(params):
        kept = weights > 0
        h = jnp.tanh(X[kept] @ params["w1"] + params["b1"][None])
        losses = jnp.sum((h @ params["w2"] - Y[kept]) ** 2, axis=-1)
        return jnp.sum(losses * weights[kept]) / weights.sum()

    return jax.jit(jax.value_and_grad(mean))(params)


def mesh_of(axis_type=AxisType.Auto):
    return jax.make_mesh(
        (2, 2), ("data", "model"), axis_types=(axis_type,) * 2, devices=jax.devices()[:4]
    )


def sharded(mesh, specs):
    return {
        name: jax.device_put(jnp.asarray(PARAMS[name]), NamedSharding(mesh, spec))
        for name, spec in specs.items()
    }


def gradient_on(mesh, specs, engine, loss_fn, *, make=value_and_grad, microbatches=1):
    axis_name = None if engine == "jit" else "data"
    fn = make(loss_fn, axis_name=axis_name, microbatches=microbatches)
    params = sharded(mesh, specs)
    rows = meshes.place(Batch.of((X, Y), weights=WEIGHTS), meshes.row_sharding(mesh, "data"))
    shardings = jax.tree.map(lambda leaf: leaf.sharding, params)
    with jax.set_mesh(mesh):
        mapped = meshes.over_ranks(fn, mesh, engine=engine)
        loss, gradients = jax.jit(mapped, out_shardings=(None, shardings))(params, rows)
    for name, spec in specs.items():
        shard = gradients[name].addressable_shards[0].data
        assert shard.size == PARAMS[name].size // 2 ** sum(axis is not None for axis in spec)
    return loss.value, gradients


def assert_the_same(found, right):
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(right), strict=True)
    for a, b in pairs:
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12 * np.max(np.abs(b)))


AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
CASES = {
    "tensor parallel, jit": ("jit", TENSOR, AUTO, loss_fn),
    "sharded over data, jit": ("jit", FSDP, AUTO, loss_fn),
    "sharded over both, jit": ("jit", BOTH, AUTO, loss_fn),
    "tensor parallel, explicit, jit": ("jit", TENSOR, EXPLICIT, explicit_loss("data")),
    "sharded over data, explicit, jit": ("jit", FSDP, EXPLICIT, gathering_loss),
    "tensor parallel, shard_map over data": ("shard_map", TENSOR, AUTO, loss_fn),
    "the same, unchecked": ("shard_map_unchecked", TENSOR, AUTO, loss_fn),
    "the same, explicit": ("shard_map", TENSOR, EXPLICIT, explicit_loss(None)),
}


@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("case", CASES)
def test_the_gradient_of_sharded_parameters_is_that_of_one_device(case, microbatches):
    engine, specs, axis_type, loss = CASES[case]
    with jax.enable_x64(True):
        found = gradient_on(mesh_of(axis_type), specs, engine, loss, microbatches=microbatches)
        assert_the_same(found, on_one_device(PARAMS))


def mean_of_local_means(loss_fn, *, axis_name, microbatches):
    def fn(params, batch):
        params = meshes.vary(params, axis_name)
        value, gradients = jax.value_and_grad(lambda p: loss_fn(p, batch).mean())(params)
        return GlobalLoss(lax.pmean(value, axis_name), {}), lax.pmean(gradients, axis_name)

    return fn


def test_the_mean_of_local_means_fails_the_same_check():
    with jax.enable_x64(True):
        found = gradient_on(mesh_of(), TENSOR, "shard_map", loss_fn, make=mean_of_local_means)
        right = on_one_device(PARAMS)
    with pytest.raises(AssertionError, match="rtol=1e-12"):
        assert_the_same(found, right)


@pytest.mark.parametrize(
    ("engine", "specs"), [("jit", TENSOR), ("jit", FSDP), ("shard_map", TENSOR)]
)
def test_a_run_with_sharded_parameters_is_one_devices_run(engine, specs):
    mesh, tx = mesh_of(), optax.adam(0.05)
    step = make_train_step(loss_fn, mesh, engine=engine, microbatches=3)
    with jax.enable_x64(True):
        state = TrainState.create(apply_fn=None, params=sharded(mesh, specs), tx=tx)
        params = jax.tree.map(jnp.asarray, PARAMS)
        moments, update = tx.init(params), jax.jit(tx.update)
        for count in (12, 4, 7):
            weights = WEIGHTS * (np.arange(12) < count)
            state, report = step(state, Batch.of((X, Y), weights=weights))
            value, gradients = on_one_device(params, weights)
            updates, moments = update(gradients, moments, params)
            params = optax.apply_updates(params, updates)
            np.testing.assert_allclose(report.loss.value, value, rtol=1e-12)
    for name, spec in specs.items():
        assert state.params[name].sharding.spec == spec
        assert state.opt_state[0].mu[name].sharding.spec == spec
        np.testing.assert_allclose(state.params[name], params[name], rtol=1e-10, atol=1e-10)
