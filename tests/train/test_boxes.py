"""flax's partitioning boxes that name the data axis, in the engines that map it and in jit."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_ddp_weighting import Batch, make_nnx_train_step, make_train_step, weighted_sum
from jax_ddp_weighting.train.boxes import box_as, free_boxes

X = np.random.default_rng(0).normal(size=(16, 4))
WEIGHTS = np.array([1, 1, 0, 0.5, 1, 0, 1, 1, 0, 0, 0, 2, 0, 0, 0, 0])
RULES = (("embed", "data"), ("mlp", "model"))
AXES = {"data": 2, "model": 2}


class TwoLayers(nn.Module):
    logical: bool = False

    @nn.compact
    def __call__(self, x):
        box = nn.with_logical_partitioning if self.logical else nn.with_partitioning
        names = ("embed", "mlp") if self.logical else ("data", "model")
        init = nn.initializers.lecun_normal()
        hidden = nn.Dense(8, kernel_init=box(init, names), param_dtype=jnp.float64)(x)
        out = nn.Dense(2, kernel_init=box(init, names[::-1]), param_dtype=jnp.float64)
        return out(jnp.tanh(hidden))


def make_mesh(axes=AXES):
    devices = jax.devices()[: int(np.prod(list(axes.values())))]
    kinds = (AxisType.Auto,) * len(axes)
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=kinds, devices=devices)


def make_loss(logical):
    def loss_fn(params, batch):
        out = TwoLayers(logical).apply({"params": params}, batch.data)
        return weighted_sum(jnp.sum(out**2, axis=-1), batch.weights)

    return loss_fn


def one_devices_run():
    params = nn.meta.unbox(TwoLayers().init(jax.random.key(0), X)["params"])
    state = TrainState.create(apply_fn=None, params=params, tx=optax.adam(0.1))
    return run(make_train_step(make_loss(False), make_mesh({"data": 1})), state)


def run(step, state):
    for _ in range(2):
        state, report = step(state, Batch.of(X, weights=WEIGHTS))
    return state, float(report.loss.value)


@pytest.mark.parametrize("engine", ["shard_map", "jit"])
@pytest.mark.parametrize("logical", [False, True])
def test_a_boxed_state_trains_as_on_one_device_and_stays_sharded(engine, logical):
    mesh = make_mesh()

    def init():
        params = TwoLayers(logical).init(jax.random.key(0), X)["params"]
        return TrainState.create(apply_fn=None, params=params, tx=optax.adam(0.1))

    with jax.enable_x64(True), nn.logical_axis_rules(RULES):
        shapes = jax.eval_shape(init)
        specs = nn.get_partition_spec(shapes)
        if logical:
            shardings = nn.logical_to_mesh_sharding(specs, mesh, RULES)
        else:
            shardings = nn.get_sharding(shapes, mesh)
        state = jax.jit(init, out_shardings=shardings)()
        state, value = run(make_train_step(make_loss(logical), mesh, engine=engine), state)
        right, expected = one_devices_run()
    assert value == pytest.approx(expected, rel=1e-12)
    for tree in (state.params, state.opt_state[0].nu):
        kernel = tree["Dense_0"]["kernel"]
        assert isinstance(kernel, nn.Partitioned)
        assert kernel.value.sharding.is_equivalent_to(NamedSharding(mesh, P("data", "model")), 2)
    found = jax.tree.leaves(state.params)
    for leaf, other in zip(found, jax.tree.leaves(right.params), strict=True):
        np.testing.assert_allclose(leaf, other, rtol=1e-11, atol=1e-12)


class NnxLayers(nnx.Module):
    def __init__(self, boxed):
        init, rngs = nnx.initializers.lecun_normal(), nnx.Rngs(0)
        box = nnx.with_partitioning if boxed else lambda init, names: init
        self.first = nnx.Linear(
            4, 8, rngs=rngs, kernel_init=box(init, ("data", "model")), param_dtype=jnp.float64
        )
        self.last = nnx.Linear(
            8, 2, rngs=rngs, kernel_init=box(init, ("model", "data")), param_dtype=jnp.float64
        )

    def __call__(self, x):
        return self.last(jnp.tanh(self.first(x)))


@pytest.mark.parametrize("gather_per", ["step", "microbatch"])
def test_a_boxed_module_trains_as_on_one_device_and_stays_sharded(gather_per):
    def loss_fn(model, batch):
        return weighted_sum(jnp.sum(model(batch.data) ** 2, axis=-1), batch.weights)

    def train(mesh, boxed, **options):
        model = NnxLayers(boxed)
        optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
        step = make_nnx_train_step(loss_fn, mesh, **options)
        for _ in range(2):
            report = step(model, optimizer, Batch.of(X, weights=WEIGHTS))
        return model, optimizer, float(report.loss.value)

    mesh = make_mesh()
    with jax.enable_x64(True):
        with jax.set_mesh(mesh):
            options = {"microbatches": 2, "gather_per": gather_per}
            model, optimizer, value = train(mesh, True, **options)
        right, _, expected = train(make_mesh({"data": 1}), False)
    assert value == pytest.approx(expected, rel=1e-12)
    for tree in (model, optimizer.opt_state[0].mu):
        assert tree.first.kernel.get_value().sharding.spec == P("data", "model")
    np.testing.assert_allclose(model.last.kernel, right.last.kernel, rtol=1e-11, atol=1e-12)


def test_only_names_of_mapped_axes_are_left_out_and_come_back():
    tree = {
        "a": nn.Partitioned(jnp.ones((2, 2, 2)), (("data", "model"), "data", "model")),
        "b": nn.LogicallyPartitioned(jnp.ones((2, 2)), ("embed", "mlp"), rules=RULES),
        "c": jnp.ones(2),
    }
    free = free_boxes(tree, "data")
    assert free["a"].names == ("model", None, "model")
    assert free["b"].names == (None, "mlp")
    assert jax.tree.structure(box_as(free, tree)) == jax.tree.structure(tree)
    assert free_boxes(tree, None) is tree
