"""The step for nnx: what flax's own step does on one device, on any number of ranks."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jax_ddp_weighting import (
    Batch,
    EpochPlan,
    NnxBatchNorm,
    batches,
    data_mesh,
    make_nnx_train_step,
    weighted_multi_steps,
    weighted_sum,
)
from jax_ddp_weighting.train.step_options import STEP_ENGINES

X = np.random.default_rng(0).normal(size=(23, 4)).astype(np.float32)
Y = np.sin(X.sum(1))


class Model(nnx.Module):
    def __init__(self, rngs, *, axis_name=None, rate=0.0, norm=nnx.BatchNorm):
        self.inner = nnx.Linear(4, 4, rngs=rngs)
        self.tied = self.inner  # one variable that has two names
        self.norm = norm(4, momentum=0.5, axis_name=axis_name, rngs=rngs)
        self.dropout = nnx.Dropout(rate, rngs=rngs)
        self.outer = nnx.Linear(4, 1, rngs=rngs)

    def __call__(self, x, **weights):
        x = self.norm(x, **weights)
        return self.outer(self.dropout(jnp.tanh(self.tied(self.inner(x)))))[:, 0]


def new_pair(tx, **options):
    model = Model(nnx.Rngs(0), **options)
    return model, nnx.Optimizer(model, tx, wrt=nnx.Param)


def loss_fn(model, batch):
    x, y = batch.data
    return weighted_sum((model(x) - y) ** 2, batch.weights)


def fetch(ids):
    return X[ids], Y[ids]


def variables_of(*objects):
    return [jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(each))) for each in objects]


def without_keys(model):
    return jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model, nnx.Not(nnx.RngState))))


def flax_run(plan, tx):
    """The same run by flax alone, on one device, without padding rows; no statistics of batches."""
    model, optimizer = new_pair(tx)
    model.norm.use_running_average = True

    @nnx.jit
    def step(model, optimizer, x, y):
        loss, grads = nnx.value_and_grad(lambda model: jnp.mean((model(x) - y) ** 2))(model)
        optimizer.update(model, grads)
        return loss

    losses = []
    for i in range(plan.steps_per_epoch):
        slots = plan.batch(0, i)
        losses.append(float(step(model, optimizer, *fetch(slots.ids[slots.weights > 0]))))
    return losses, model


@pytest.mark.parametrize("engine", STEP_ENGINES)
def test_a_run_with_a_short_step_equals_flaxs_own_on_one_device(engine):
    plan = EpochPlan(23, num_replicas=2, batch_size=4)
    mesh = data_mesh(2)
    traces = []

    def counted(model, batch):
        traces.append(1)
        return loss_fn(model, batch)

    step = make_nnx_train_step(counted, mesh, engine=engine, microbatches=2)
    model, optimizer = new_pair(optax.adamw(0.05))
    model.norm.use_running_average = True
    losses, per_step = [], []
    for batch in batches(plan, 0, fetch, mesh):
        report = step(model, optimizer, batch)
        losses.append(float(report.loss.value))
        per_step.append(len(traces))
    expected, right = flax_run(plan, optax.adamw(0.05))
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6),
        without_keys(model),
        without_keys(right),
    )
    assert int(optimizer.step[...]) == plan.steps_per_epoch
    assert per_step == [per_step[0]] * len(per_step)
    assert model.tied is model.inner

    model.norm.use_running_average = False  # another structure, so another compilation
    if engine == "jit":
        step(model, optimizer, batch)
        assert len(traces) > per_step[-1]
        assert not np.array_equal(model.norm.mean[...], np.zeros(4))


def test_the_comparison_with_flax_can_fail():
    mask, repeat = (EpochPlan(23, num_replicas=2, batch_size=4, tail=t) for t in ("mask", "repeat"))
    a, _ = flax_run(mask, optax.adamw(0.05))
    b, _ = flax_run(repeat, optax.adamw(0.05))
    assert abs(a[-1] / b[-1] - 1) > 1e-3


@pytest.mark.parametrize("engine", STEP_ENGINES)
def test_other_variables_pass_through_and_a_step_without_weight_changes_nothing(engine):
    axis_name = None if engine == "jit" else "data"
    model, optimizer = new_pair(optax.adamw(0.1), axis_name=axis_name, rate=0.5)
    step = make_nnx_train_step(loss_fn, data_mesh(2), engine=engine, microbatches=2)
    rows = fetch(np.arange(8))
    step(model, optimizer, Batch.of(rows))
    mean = 0.5 * (0.5 * X[:8:2].mean(0)) + 0.5 * X[1:8:2].mean(0)
    np.testing.assert_allclose(model.norm.mean[...], mean, rtol=1e-5)
    assert int(model.dropout.rngs.count[...]) == 2
    before = variables_of(*nnx_states(model, optimizer))
    report = step(model, optimizer, Batch.of(rows, weights=np.zeros(8, np.int32)))
    assert report.skipped
    assert report.loss.value == 0.0
    jax.tree.map(np.testing.assert_array_equal, before, variables_of(*nnx_states(model, optimizer)))


def nnx_states(model, optimizer):
    """Both, without random keys, which numpy does not hold."""
    return nnx.state(model, nnx.Not(nnx.RngKey)), optimizer


def test_ranks_draw_their_own_numbers_and_the_model_keeps_its_key():
    def noise(model, batch):
        drawn = jax.random.normal(model.dropout.rngs(), ())
        return weighted_sum(model(batch.data[0]) * 0 + drawn, batch.weights)

    def mean_of(ranks):
        model, optimizer = new_pair(optax.sgd(0.1), axis_name="data")
        key = jax.random.key_data(model.dropout.rngs.key[...])
        step = make_nnx_train_step(noise, data_mesh(ranks))
        report = step(model, optimizer, Batch.of(fetch(np.arange(4))))
        np.testing.assert_array_equal(jax.random.key_data(model.dropout.rngs.key[...]), key)
        draws = [jax.random.fold_in(model.dropout.rngs.key[...], r) for r in range(ranks)]
        draws = [float(jax.random.normal(jax.random.fold_in(key, 0), ())) for key in draws]
        return float(report.loss.value), np.mean(draws)

    value, expected = mean_of(2)
    assert value == pytest.approx(expected, rel=1e-5)
    assert value != pytest.approx(mean_of(1)[0], rel=1e-2)


def test_batch_norm_over_uneven_ranks_trains_as_on_one_device():
    def weighed(model, batch):
        x, y = batch.data
        return weighted_sum((model(x, weights=batch.weights) - y) ** 2, batch.weights)

    def run(engine, ranks, ids, weights):
        axis_name = None if engine == "jit" else "data"
        model, optimizer = new_pair(optax.sgd(0.1), axis_name=axis_name, norm=NnxBatchNorm)
        step = make_nnx_train_step(weighed, data_mesh(ranks), engine=engine)
        step(model, optimizer, Batch.of(fetch(ids), weights=np.int32(weights)))
        return without_keys(model)

    ids = np.arange(8)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6),
        run("shard_map", 2, ids, [1, 0, 0, 0, 1, 1, 1, 1]),
        run("jit", 1, ids[[0, 4, 5, 6, 7]], [1] * 5),
    )


def test_statistics_of_the_rank_alone_are_refused():
    model, optimizer = new_pair(optax.sgd(0.1))
    step = make_nnx_train_step(loss_fn, data_mesh(2))
    with pytest.raises(ValueError, match=r"may vary over 'data' at state.*\['norm'\]\['mean'\]"):
        step(model, optimizer, Batch.of(fetch(np.arange(4))))
    np.testing.assert_array_equal(model.norm.mean[...], np.zeros(4))  # and nothing was lost


def test_keys_per_example_give_one_step_however_rows_are_split():
    def dropped(model, batch, keys):
        x, y = batch.data
        kept = jax.vmap(lambda key: jax.random.bernoulli(key, 0.5, (4,)))(keys)
        return weighted_sum((model(x * kept) - y) ** 2, batch.weights)

    def run(ranks, microbatches, order):
        model = Model(nnx.Rngs(0))
        model.norm.use_running_average = True
        optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
        step = make_nnx_train_step(
            dropped, data_mesh(ranks), microbatches=microbatches, rng_per="example"
        )
        step(model, optimizer, Batch.of(fetch(order), ids=order), jax.random.key(0))
        return without_keys(model)

    order = np.arange(8)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7),
        run(1, 1, order),
        run(2, 2, order[::-1]),
    )


@pytest.mark.parametrize("axis_type", [AxisType.Auto])
def test_sharded_variables_stay_where_they_lie(axis_type):
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(axis_type,) * 2)
    sharding = NamedSharding(mesh, PartitionSpec(None, "model"))
    model, optimizer = new_pair(optax.adam(0.1))
    model.norm.use_running_average = True
    model.inner.kernel.set_value(jax.device_put(model.inner.kernel[...], sharding))
    optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
    step = make_nnx_train_step(loss_fn, mesh, engine="jit")
    for _ in range(2):
        step(model, optimizer, Batch.of(fetch(np.arange(4))))
    assert model.inner.kernel[...].sharding.is_equivalent_to(sharding, 2)
    moment = optimizer.opt_state[0].mu["inner"]["kernel"][...]
    assert moment.sharding.is_equivalent_to(sharding, 2)


def test_windows_of_steps_count_each_step_as_its_weight():
    class Scalar(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.float32(0))

    def mean_loss(model, batch):
        return weighted_sum(model.w[...] * batch.data, batch.weights)

    model = Scalar()
    optimizer = nnx.Optimizer(model, weighted_multi_steps(optax.sgd(1.0), 2), wrt=nnx.Param)
    step = make_nnx_train_step(mean_loss, data_mesh(2))
    found = []
    for value, rows, flush in [(1, 1, False), (3, 3, False), (5, 2, True)]:
        weights = (np.arange(4) < rows).astype(np.int32)
        step(model, optimizer, Batch.of(np.full(4, value, np.float32), weights), flush=flush)
        found.append(float(model.w[...]))
    assert found == [0.0, -2.5, -7.5]


def growing(model, batch):
    model.extra = nnx.Variable(jnp.zeros(()))
    return loss_fn(model, batch)


def drawing(model, batch, keys):
    return loss_fn(model, batch)


@pytest.mark.parametrize(
    ("fn", "options", "message"),
    [
        (growing, {}, "must leave the model's structure as it is"),
        (drawing, {"rng_per": "example"}, "must draw from its rng alone where rng_per='example'"),
    ],
)
def test_loss_functions_that_would_lose_something_are_refused(fn, options, message):
    model, optimizer = new_pair(optax.sgd(0.1), axis_name="data", rate=0.5)
    step = make_nnx_train_step(fn, data_mesh(1), **options)
    rng = [jax.random.key(0)] if options else []
    with pytest.raises(ValueError, match=f"make_nnx_train_step: loss_fn {message}"):
        step(model, optimizer, Batch.of(fetch(np.arange(4))), *rng)


def test_bad_calls_are_refused():
    model, optimizer = new_pair(optax.sgd(0.1))
    batch = Batch.of(fetch(np.arange(4)))
    step = make_nnx_train_step(loss_fn, data_mesh(2))
    with pytest.raises(TypeError, match=r"model must be an nnx.Module, got dict. For a flax"):
        step({}, optimizer, batch)
    with pytest.raises(TypeError, match=r"optimizer must be an nnx.Optimizer, got GradientTrans"):
        step(model, optimizer.tx, batch)
    with pytest.raises(TypeError, match="batch must be a Batch, got tuple"):
        step(model, optimizer, fetch(np.arange(4)))
    with pytest.raises(TypeError, match=r"must take \(model, batch, rng\) when the step is given"):
        step(model, optimizer, batch, jax.random.key(0))
    with pytest.raises(ValueError, match="make_nnx_train_step: engine must be one of"):
        make_nnx_train_step(loss_fn, data_mesh(2), engine="ddp")


def test_an_optimizer_of_other_parameters_is_refused():
    class Other(nnx.Module):
        def __init__(self):
            self.other = nnx.Linear(2, 1, rngs=nnx.Rngs(0))

    def loss_fn(model, batch):
        return weighted_sum(model(batch.data)[:, 0], batch.weights)

    model, batch = nnx.Linear(2, 1, rngs=nnx.Rngs(0)), Batch.of(np.ones((2, 2), np.float32))
    step = make_nnx_train_step(loss_fn, data_mesh(1))
    other = nnx.Optimizer(Other(), optax.adam(0.1), wrt=nnx.Param)
    with pytest.raises(ValueError, match=r"optimizer must be made for this model, got .*'other'"):
        step(model, other, batch)
    wide = nnx.Optimizer(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), optax.adam(0.1), wrt=nnx.Param)
    with pytest.raises(TypeError, match=r"must leave .* float32\[3\] for float32\[1\] at .*'bias'"):
        step(model, wide, batch)
    nothing = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.LoRAParam)
    with pytest.raises(ValueError, match=r"optimizer must train parameters .* got wrt=.*LoRAParam"):
        step(model, nothing, batch)
