"""Parameters sharded over the data axis, in every engine: one device's run, and what it costs."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax.training.train_state import TrainState
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_ddp_weighting import Batch, BatchNorm, make_train_step, weighted_multi_steps, weighted_sum

RNG = np.random.default_rng(7)
PARAMS = {
    "w1": RNG.normal(size=(6, 8)) / 3,
    "b1": RNG.normal(size=8),
    "w2": RNG.normal(size=(8, 2)) / 3,
    "scale": np.array(0.9),
}
X, Y = RNG.normal(size=(24, 6)), RNG.normal(size=(24, 2))
WEIGHTS = np.concatenate([[1, 1, 0.5, 1, 0, 1, 0, 0, 0, 1, 0, 0], np.zeros(6), np.ones(6)])

FSDP = {"w1": P(None, "data"), "b1": P("data"), "w2": P("data", None), "scale": P()}
BOTH = {"w1": P("data", "model"), "b1": P(("data", "model")), "w2": P("model", "data")}
BOTH["scale"] = P()
MINOR = {**BOTH, "b1": P(("model", "data"))}
TWO_DATA = {"w1": P("replica", "fsdp"), "b1": P("fsdp"), "w2": P(("replica", "fsdp")), "scale": P()}


def loss_fn(params, batch):
    x, y = batch.data
    h = jnp.tanh(x @ params["w1"] + params["b1"][None])
    out = h @ params["w2"] * params["scale"]
    return weighted_sum(jnp.sum((out - y) ** 2, axis=-1), batch.weights)


def mesh_of(shape, names, kind=AxisType.Auto):
    devices = jax.devices()[: int(np.prod(shape))]
    return jax.make_mesh(shape, names, axis_types=(kind,) * len(shape), devices=devices)


def state_on(mesh, specs, tx):
    params = {
        name: jax.device_put(jnp.asarray(PARAMS[name]), NamedSharding(mesh, spec))
        for name, spec in specs.items()
    }
    return TrainState.create(apply_fn=None, params=params, tx=tx)


def batches():
    for count in (24, 9, 16):
        yield Batch.of((X, Y), weights=WEIGHTS * (np.arange(24) < count))


def one_devices_run(tx):
    params = jax.tree.map(jnp.asarray, PARAMS)
    moments, values = tx.init(params), []

    @jax.jit
    def take_step(params, moments, batch):
        def mean(params):
            found = loss_fn(params, batch)
            return found.total / found.weight

        value, gradients = jax.value_and_grad(mean)(params)
        updates, moments = tx.update(gradients, moments, params)
        return optax.apply_updates(params, updates), moments, value

    for batch in batches():
        params, moments, value = take_step(params, moments, batch)
        values.append(float(value))
    return params, values


DATA = (("data",), (4,), "data")
GRID = (("data", "model"), (2, 2), "data")
PAIR = (("replica", "fsdp"), (2, 2), ("replica", "fsdp"))


@pytest.mark.parametrize(
    ("layout", "specs", "kind", "options"),
    [
        (DATA, FSDP, AxisType.Auto, {"microbatches": 3}),
        (DATA, FSDP, AxisType.Auto, {"microbatches": 3, "gather_per": "microbatch"}),
        (DATA, FSDP, AxisType.Auto, {"engine": "jit"}),
        (DATA, FSDP, AxisType.Explicit, {}),
        (GRID, BOTH, AxisType.Auto, {"microbatches": 2}),
        (GRID, MINOR, AxisType.Auto, {"gather_per": "microbatch"}),
        (PAIR, TWO_DATA, AxisType.Auto, {"microbatches": 2}),
    ],
)
def test_a_run_is_one_devices_run_and_shards_stay_where_they_lie(layout, specs, kind, options):
    names, shape, axis_name = layout
    mesh, tx = (
        mesh_of(shape, names, kind),
        optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.05)),
    )
    step = make_train_step(loss_fn, mesh, axis_name=axis_name, grad_norm=True, **options)
    with jax.enable_x64(True):
        state, values = state_on(mesh, specs, tx), []
        for batch in batches():
            state, report = step(state, batch)
            values.append(float(report.loss.value))
        right, expected = one_devices_run(tx)
    np.testing.assert_allclose(values, expected, rtol=1e-12)
    for name, spec in specs.items():
        sharding = NamedSharding(mesh, spec)
        for leaf in (state.params[name], state.opt_state[1][0].mu[name]):
            assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
        np.testing.assert_allclose(state.params[name], right[name], rtol=1e-11, atol=1e-11)


def test_an_optimizer_that_sees_shards_wrongly_summed_fails_the_same_check():
    # the control: what came of it while gradients of shards were summed once more
    mesh, tx = mesh_of((4,), ("data",)), optax.sgd(0.05)
    step = make_train_step(loss_fn, mesh)
    with jax.enable_x64(True):
        state = state_on(mesh, FSDP, optax.chain(optax.scale(4.0), tx))
        for batch in batches():
            state, _ = step(state, batch)
        right, _ = one_devices_run(tx)
    assert np.max(np.abs(state.params["w1"] - right["w1"])) > 1e-3


class WithNorm(TrainState):
    norm: jax.Array


@pytest.mark.parametrize(
    "options",
    [{}, {"microbatches": 2}, {"gather_per": "microbatch", "microbatches": 2}],
)
def test_a_state_made_of_sharded_parameters_statistics_and_windows_are_one_devices(options):
    """All that reads parameters beside the loss sees them whole."""
    split = {"microbatches": options.get("microbatches", 1)}

    def loss_with_norm(variables, batch, *, statistics):
        params = variables["params"]
        sums = loss_fn({**params, "scale": params["scale"] * statistics["size"] / 10}, batch)
        return sums, {"norm": variables["norm"] + jnp.sum(params["w1"] ** 2)}

    def statistics(variables, batch):
        size = jnp.sum(variables["params"]["w2"] ** 2)
        return {"size": jnp.sum(batch.weights) * size}

    def run(mesh, specs, **options):
        params = {
            name: jax.device_put(jnp.asarray(PARAMS[name]), NamedSharding(mesh, specs[name]))
            for name in PARAMS
        }
        clipped = optax.chain(optax.clip_by_global_norm(0.3), optax.adam(0.05))
        tx = weighted_multi_steps(clipped, 2, should_skip_update_fn=optax.skip_not_finite)
        state = WithNorm.create(apply_fn=None, params=params, tx=tx, norm=jnp.zeros(()))
        options = {"mutable": "norm", "statistics": statistics, "grad_norm": True, **options}
        step = make_train_step(loss_with_norm, mesh, **options)
        found = []
        for batch in batches():
            state, report = step(state, batch)
            found.append([float(report.loss.value), float(report.grad_norm)])
        return state, found

    with jax.enable_x64(True):
        found, values = run(mesh_of((4,), ("data",)), FSDP, **options)
        right, expected = run(mesh_of((1,), ("data",)), dict.fromkeys(FSDP, P()), **split)
    np.testing.assert_allclose(values, expected, rtol=1e-12)
    np.testing.assert_allclose(found.norm, right.norm, rtol=1e-12)
    assert found.opt_state.acc_grads["w1"].sharding.spec == P(None, "data")
    for name in PARAMS:
        np.testing.assert_allclose(found.params[name], right.params[name], rtol=1e-11, atol=1e-11)


class Normed(nn.Module):
    axis_name: str | None = None

    @nn.compact
    def __call__(self, x, weights):
        h = nn.Dense(8, param_dtype=jnp.float64)(x)
        norm = BatchNorm(
            use_running_average=False, axis_name=self.axis_name, param_dtype=jnp.float64
        )
        return nn.Dense(4, param_dtype=jnp.float64)(jnp.tanh(norm(h, weights=weights)))


class WithStats(TrainState):
    batch_stats: Any


@pytest.mark.parametrize("options", [{"gather_per": "microbatch"}, {}, {"engine": "jit"}])
def test_batch_norm_and_the_norm_of_gradients_see_sharded_parameters_whole(options):
    """Every parameter sharded: features of the norm, and what is clipped by the norm of all."""

    def run(mesh, axis_name, **options):
        def loss_fn(variables, batch):
            model = Normed(axis_name)
            out, new = model.apply(variables, batch.data[0], batch.weights, mutable="batch_stats")
            return weighted_sum(jnp.sum(out**2, axis=-1), batch.weights), new

        variables = jax.jit(Normed().init)(jax.random.key(0), X, WEIGHTS)

        def lie(leaf):
            spec = P(*[None] * (leaf.ndim - 1), "data")
            return jax.device_put(leaf, NamedSharding(mesh, spec))

        tx = optax.chain(optax.clip_by_global_norm(0.2), optax.sgd(0.5))
        params = jax.tree.map(lie, variables["params"])
        stats = variables["batch_stats"]
        state = WithStats.create(apply_fn=None, params=params, tx=tx, batch_stats=stats)
        step = make_train_step(
            loss_fn, mesh, mutable="batch_stats", grad_norm=True, donate=False, **options
        )
        norms = []
        for batch in list(batches())[:2]:
            state, report = step(state, batch)
            norms.append(float(report.grad_norm))
        return norms, {"params": state.params, "batch_stats": state.batch_stats}

    mesh = mesh_of((4,), ("data",))
    with jax.enable_x64(True):
        axis_name = None if options.get("engine") == "jit" else "data"
        norms, found = run(mesh, axis_name, **options)
        expected, right = run(mesh_of((1,), ("data",)), "data")
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(right), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6 if a.dtype == jnp.float32 else 1e-11, atol=1e-11)
    np.testing.assert_allclose(norms, expected, rtol=1e-11)
    assert min(norms) > 0.4  # twice what it is clipped to: a quarter's own norm would clip less


def compiled_step(**options):
    mesh = mesh_of((4,), ("data",))
    step = make_train_step(loss_fn, mesh, **options)
    batch = Batch.of((X.astype(np.float32), Y.astype(np.float32)), weights=np.ones(24, np.int32))
    state = state_on(mesh, FSDP, optax.adam(0.05))
    return step.lower(state, batch).compile()


def count(text, name):
    """How often a collective stands in a program, and how often of these inside a loop."""
    lines = re.findall(rf"^.* {name}(?:-start)?\(.*$", text, re.MULTILINE)
    return len(lines), sum("/while/body/" in line for line in lines)


@pytest.mark.parametrize(("gather_per", "in_loop"), [("step", 0), ("microbatch", 3)])
def test_each_sharded_parameter_is_gathered_and_scattered_once(gather_per, in_loop):
    compiled = compiled_step(microbatches=3, gather_per=gather_per)
    text = compiled.as_text()
    assert count(text, "all-gather") == count(text, "reduce-scatter") == (3, in_loop)
    sizes = {name: 4 * value.size for name, value in PARAMS.items()}
    sharded = sum(size for name, size in sizes.items() if FSDP[name] != P())
    rows = 4 * 6 * (6 + 2 + 1)  # a rank's x, y and weights; ids are not used
    # parameters and two moments, a quarter of those that are sharded; two counts
    expected = 3 * (sharded // 4 + sizes["scale"]) + 2 * 4 + rows
    assert compiled.memory_analysis().argument_size_in_bytes == expected


def test_when_to_gather_is_one_of_two():
    with pytest.raises(ValueError, match=r"gather_per must be one of step, microbatch, got 'row'"):
        make_train_step(loss_fn, mesh_of((1,), ("data",)), gather_per="row")
