"""A training step: one device's step, whatever the engine; skipped where nothing has weight."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jax_ddp_weighting import (
    Batch,
    BatchNorm,
    EpochPlan,
    batches,
    data_mesh,
    make_train_step,
    weighted_multi_steps,
    weighted_sum,
)
from jax_ddp_weighting.distributed import mesh as meshes
from jax_ddp_weighting.train import step as step_module
from jax_ddp_weighting.train.step import STEP_ENGINES

X = np.random.default_rng(0).normal(size=(47, 3)).astype(np.float32)
Y = X @ np.float32([1.0, -2.0, 0.5]) + np.float32(0.1)


def loss_fn(params, batch):
    x, y = batch.data
    return weighted_sum((x @ params["w"] + params["b"] - y) ** 2, batch.weights)


def new_state(tx):
    params = {"w": jnp.zeros(3), "b": jnp.zeros(())}
    return TrainState.create(apply_fn=None, params=params, tx=tx)


def fetch(ids):
    return X[ids], Y[ids]


def reference_losses(plan, epochs, tx):
    """The same run on one device, written with plain JAX and without padding rows."""
    state, losses = new_state(tx), []
    for epoch in range(epochs):
        for step in range(plan.steps_per_epoch):
            slots = plan.batch(epoch, step)
            ids = slots.ids[slots.weights > 0]

            def mean(params, ids=ids):
                return jnp.mean((X[ids] @ params["w"] + params["b"] - Y[ids]) ** 2)

            loss, grads = jax.value_and_grad(mean)(state.params)
            state = state.apply_gradients(grads=grads)
            losses.append(float(loss))
    return losses, state


def mesh_of(axis_type, ranks=4):
    return jax.make_mesh(
        (ranks,), ("data",), axis_types=(axis_type,), devices=jax.devices()[:ranks]
    )


@pytest.mark.parametrize(
    ("axis_type", "microbatches"), [(AxisType.Auto, 1), (AxisType.Explicit, 4)]
)
@pytest.mark.parametrize("engine", STEP_ENGINES)
def test_a_run_with_short_steps_is_one_devices_run_and_compiles_once(
    engine, axis_type, microbatches, caplog
):
    traces = []

    def counted(params, batch):
        traces.append(1)
        return loss_fn(params, batch)

    plan = EpochPlan(47, num_replicas=4, batch_size=4, seed=1)
    tx = optax.adam(0.05)
    mesh = mesh_of(axis_type)
    step = make_train_step(counted, mesh, engine=engine, microbatches=microbatches)
    state, losses, per_step = new_state(tx), [], []
    with jax.log_compiles():
        for epoch in range(2):
            for batch in batches(plan, epoch, fetch, mesh):
                state, report = step(state, batch)
                losses.append(float(report.loss.value))
                per_step.append(len(traces))
                assert not report.skipped
                assert report.weight == np.sum(np.asarray(batch.weights))
    expected, end = reference_losses(plan, 2, tx)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
        state.params,
        end.params,
    )
    assert per_step == [per_step[0]] * len(per_step)
    messages = [record.getMessage() for record in caplog.records]
    assert sum("XLA compilation of jit(step)" in message for message in messages) == 1


def test_the_run_comparison_can_fail():
    # the tail's copies counted, as tail="repeat" does, is another run
    mask = EpochPlan(47, num_replicas=4, batch_size=4, seed=1)
    repeat = EpochPlan(47, num_replicas=4, batch_size=4, seed=1, tail="repeat")
    a, _ = reference_losses(mask, 2, optax.adam(0.05))
    b, _ = reference_losses(repeat, 2, optax.adam(0.05))
    assert np.max(np.abs(np.array(a) / np.array(b) - 1)) > 1e-3


def token_loss(params, batch):
    """A regulariser and an accuracy beside the loss of whichever rows have a label."""
    x, y = batch.data
    labelled = batch.weights * (y > -100)  # where the label is ignored a row has no weight
    losses = weighted_sum((x @ params["w"] + params["b"] - y) ** 2, labelled)
    return {
        "loss": losses,
        "norm": losses.once(jnp.sum(params["w"] ** 2) + 1.0),
        "rows": weighted_sum(y > 0, batch.weights),
    }


TOKEN_COEFFICIENTS = {"loss": 1.0, "norm": 0.5, "rows": 0.0}


@pytest.mark.parametrize("engine", STEP_ENGINES)
def test_a_step_without_weight_changes_nothing(engine):
    # Relax 285: the optimizer moved in a step without valid tokens
    mesh = data_mesh(4)
    step = make_train_step(token_loss, mesh, engine=engine, coefficients=TOKEN_COEFFICIENTS)
    rows = fetch(np.arange(8))
    state, report = step(
        new_state(optax.adamw(optax.linear_schedule(0.1, 0.0, 10))), Batch.of(rows)
    )
    assert not report.skipped
    before = jax.device_get(state)
    ignored = X[:8], np.full(8, -100, np.float32)
    for batch in (Batch.of(rows, weights=np.zeros(8, np.int32)), Batch.of(ignored)):
        state, report = step(state, batch)
        assert report.skipped
        assert report.loss.value == 0.0
        assert report.weight == np.sum(batch.weights)
        assert report.means["norm"] == 0.0
        jax.tree.map(np.testing.assert_array_equal, before, jax.device_get(state))
    assert int(state.step) == 1
    assert report.means["rows"] == 0.0


def test_adamw_would_have_moved_on_the_zero_gradient_of_such_a_step():
    state = new_state(optax.adamw(0.1))
    state = state.apply_gradients(grads={"w": jnp.ones(3), "b": jnp.ones(())})
    moved = state.apply_gradients(grads={"w": jnp.zeros(3), "b": jnp.zeros(())})
    assert np.all(np.abs(np.asarray(moved.params["w"] - state.params["w"])) > 1e-2)


@pytest.mark.parametrize("engine", STEP_ENGINES)
def test_a_rank_without_rows_leaves_the_others_mean(engine):
    # Megatron 1764, Automodel 3796: NaN from the rank's own 0 / 0
    weights = np.array([1, 1, 0, 0, 1, 1, 1, 0], np.int32)
    step = make_train_step(loss_fn, data_mesh(4), engine=engine)
    batch = Batch.of(fetch(np.arange(8)), weights=weights)
    state, report = step(new_state(optax.sgd(1.0)), batch)
    kept = weights > 0
    right = np.mean(2 * Y[:8][kept, None] * X[:8][kept], axis=0)
    np.testing.assert_allclose(state.params["w"], right, rtol=1e-5)
    assert report.loss.value == pytest.approx(np.mean(Y[:8][kept] ** 2), rel=1e-5)
    totals = np.where(kept, Y[:8] ** 2, 0).reshape(4, 2).sum(1)
    with np.errstate(invalid="ignore"):  # one vote per rank
        local = totals / weights.reshape(4, 2).sum(1)
    assert np.isnan(np.mean(local))


@pytest.mark.parametrize("engine", STEP_ENGINES)
def test_loss_and_step_do_not_depend_on_the_number_of_microbatches(engine):
    # transformers 45305, axolotl 2262: both grew with the number of microbatches
    batch = Batch.of(fetch(np.arange(16)), weights=np.arange(16) % 3)
    found = []
    for microbatches in (1, 2, 4):
        step = make_train_step(loss_fn, data_mesh(2), engine=engine, microbatches=microbatches)
        state, report = step(new_state(optax.sgd(1.0)), batch)
        found.append((np.asarray(report.loss.value), np.asarray(state.params["w"])))
    for value, w in found[1:]:
        np.testing.assert_allclose(value, found[0][0], rtol=1e-6)
        np.testing.assert_allclose(w, found[0][1], rtol=1e-5)


def test_summing_the_microbatches_means_grows_with_their_number():
    losses, weights = Y[:16] ** 2, np.arange(16) % 3
    summed = [
        sum(np.average(losses[k::n], weights=weights[k::n]) for k in range(n)) for n in (1, 2, 4)
    ]
    assert summed[1] / summed[0] > 1.5
    assert summed[2] / summed[0] > 3


def test_terms_have_their_own_denominators():
    def terms(params, batch):
        x, y = batch.data
        losses = (x @ params["w"] + params["b"] - y) ** 2
        tokens = weighted_sum(losses, batch.weights)
        return {
            "square": tokens,
            "heavy": weighted_sum(losses, batch.weights * 3.0),
            "norm": tokens.once(jnp.sum(params["w"] ** 2)),
        }

    coefficients = {"square": 1.0, "heavy": 2.0, "norm": 0.5}
    weights = np.array([1, 1, 1, 0, 1, 0, 0, 0], np.int32)
    state = new_state(optax.sgd(0.1)).replace(params={"w": jnp.ones(3), "b": jnp.zeros(())})
    step = make_train_step(terms, data_mesh(4), coefficients=coefficients, microbatches=2)
    _, report = step(state, Batch.of(fetch(np.arange(8)), weights=weights))
    square = np.mean((X[:8] @ np.ones(3, np.float32) - Y[:8])[weights > 0] ** 2)
    assert report.means["square"] == pytest.approx(square, rel=1e-5)
    assert report.means["heavy"] == pytest.approx(square, rel=1e-5)
    assert report.means["norm"] == pytest.approx(3.0)
    assert report.loss.value == pytest.approx(3 * square + 1.5, rel=1e-5)


def test_each_rank_and_microbatch_has_its_own_rng():
    def noisy(params, batch, rng):
        drawn = jax.random.normal(rng, ())
        return weighted_sum(params["b"] + jnp.full(batch.weights.shape, drawn), batch.weights)

    step = make_train_step(noisy, data_mesh(4), microbatches=2)
    batch = Batch.of(fetch(np.arange(8)))
    values = []
    for rng in (jax.random.key(0), jax.random.key(0), jax.random.key(1)):
        _, report = step(new_state(optax.sgd(0.1)), batch, rng)
        values.append(float(report.loss.value))
    keys = [
        jax.random.fold_in(jax.random.fold_in(jax.random.key(0), rank), k)
        for rank in range(4)
        for k in range(2)
    ]
    mean = np.mean([float(jax.random.normal(key, ())) for key in keys])
    assert values[0] == values[1] == pytest.approx(mean, rel=1e-5)
    assert values[2] != values[0]


def test_keys_per_example_give_one_run_however_rows_are_split():
    def dropped(params, batch, keys):
        x, y = batch.data
        kept = jax.vmap(lambda key: jax.random.bernoulli(key, 0.5, (3,)))(keys)
        return weighted_sum(((x * kept) @ params["w"] + params["b"] - y) ** 2, batch.weights)

    def run(rng_per, engine, ranks, microbatches, order):
        fn = dropped
        if rng_per == "rank":

            def fn(params, batch, rng):
                return dropped(params, batch, jax.random.split(rng, batch.weights.shape[0]))

        step = make_train_step(
            fn, data_mesh(ranks), engine=engine, microbatches=microbatches, rng_per=rng_per
        )
        state = new_state(optax.sgd(0.1)).replace(params={"w": jnp.ones(3), "b": jnp.zeros(())})
        batch = Batch.of((X[order], Y[order]), ids=order)
        for i in range(2):
            state, _ = step(state, batch, jax.random.fold_in(jax.random.key(0), i))
        return np.asarray(state.params["w"])

    order = np.arange(8)
    splits = [
        ("jit", 1, 1, order),
        ("pmap", 2, 2, order),
        ("shard_map", 4, 1, order[::-1]),
    ]
    first, *others = [run("example", *split) for split in splits]
    for other in others:
        np.testing.assert_allclose(first, other, rtol=1e-5)
    assert not np.allclose(run("rank", *splits[0]), run("rank", *splits[1]), rtol=1e-3)


def test_an_examples_key_depends_on_all_bits_of_its_id_and_not_on_their_width():
    def first_draw(ids, x64):
        with jax.enable_x64(x64):
            keys = step_module._example_keys(jax.random.key(0), jnp.asarray(np.array(ids)))
            return np.asarray(jax.random.key_data(keys))

    narrow, wide = first_draw(np.int32([0, 1, 7]), False), first_draw([0, 1, 7], True)
    np.testing.assert_array_equal(narrow, wide)
    large = first_draw([2**40 + 7, 2**41 + 7, 7], True)
    assert len(np.unique(large, axis=0)) == 3


class StatsState(TrainState):
    batch_stats: Any


class Normalised(nn.Module):
    axis_name: str | None = "data"
    norm: Any = nn.BatchNorm

    @nn.compact
    def __call__(self, x, weights):
        norm = self.norm(
            use_running_average=False, axis_name=self.axis_name, momentum=0.5, name="norm"
        )
        # ours takes weights, flax's a mask
        weighed = {"weights": weights} if self.norm is BatchNorm else {"mask": weights[:, None] > 0}
        return nn.Dense(1)(jnp.tanh(norm(x, **weighed)))[:, 0]


def stats_run(engine, model, mesh, microbatches=1, batches=1, empty=(), rows=8, weights=1):
    def fn(variables, batch):
        x, y = batch.data
        out, updates = model.apply(variables, x, batch.weights, mutable=["batch_stats"])
        return weighted_sum((out - y) ** 2, batch.weights), updates

    variables = Normalised(None).init(jax.random.key(0), X[:2], np.ones(2))
    state = StatsState.create(
        apply_fn=None,
        params=variables["params"],
        tx=optax.sgd(0.1),
        batch_stats=variables["batch_stats"],
    )
    step = make_train_step(
        fn, mesh, engine=engine, microbatches=microbatches, mutable="batch_stats"
    )
    for i in range(batches):
        ids = np.arange(rows) + rows * i
        counted = np.broadcast_to(np.int32(weights), rows) * (i not in empty)
        state, _ = step(state, Batch.of(fetch(ids), weights=counted))
    return jax.device_get(state.batch_stats["norm"]["mean"]), jax.device_get(state.params)


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("engine", STEP_ENGINES)
def test_collections_pass_through_the_microbatches_and_steps_in_order(engine, microbatches):
    model = Normalised("data" if engine != "jit" else None)
    mesh = data_mesh(2)
    mean, params = stats_run(engine, model, mesh, microbatches, batches=3, empty=(1,))
    expected = np.zeros(3)
    for first in (0, 16):  # the step without weight leaves the statistics alone
        rows = X[first : first + 8].reshape(-1, microbatches, 3)
        for k in range(microbatches):
            expected = 0.5 * expected + 0.5 * rows[:, k].mean(0)
    np.testing.assert_allclose(mean, expected, rtol=1e-5)
    if microbatches == 1:
        _, right = stats_run("jit", Normalised(None), data_mesh(1), 1, batches=3, empty=(1,))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4), params, right)


@pytest.mark.parametrize("engine", ["shard_map", "pmap"])
def test_batch_norm_over_uneven_ranks_trains_as_on_one_device(engine):
    uneven, whole = [1, 0, 0, 0, 1, 1, 1, 1], data_mesh(1)

    def run(norm):
        return stats_run(engine, Normalised("data", norm), data_mesh(2), weights=uneven)

    def gaps(found):
        right = stats_run("jit", Normalised(None), whole, weights=uneven)
        gaps = jax.tree.map(lambda a, b: np.max(np.abs(a - b)), found, right)
        return np.array(jax.tree.leaves(gaps))

    assert np.max(gaps(run(BatchNorm))) < 1e-6
    assert np.max(gaps(run(nn.BatchNorm))) > 1e-3  # flax's gives each rank one vote


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("engine", ["shard_map", "pmap"])
def test_collections_that_would_differ_from_rank_to_rank_are_refused(engine, microbatches):
    with pytest.raises(
        ValueError,
        match=r"the same on every rank, got one that may vary over 'data' at "
        r"state\['batch_stats'\]\['norm'\]\['mean'\]",
    ):
        stats_run(engine, Normalised(None), data_mesh(2), microbatches)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda sums, stats: sums, "must return .sums, updates. where mutable is given, got Weigh"),
        (lambda sums, stats: (sums, {}), r"must return updates of \['stats'\], got \[\]"),
        (
            lambda sums, stats: (sums, {"stats": stats.astype(jnp.bfloat16)}),
            r"form it was given, got bfloat16\[2\] for float32\[2\] at state\['stats'\]",
        ),
        (
            lambda sums, stats: (sums, {"stats": (stats, stats)}),
            "state of the structure it was given",
        ),
    ],
)
def test_updates_of_another_form_are_refused(returned, message):
    class State(TrainState):
        stats: Any

    def fn(variables, batch):
        return returned(loss_fn(variables["params"], batch), variables["stats"])

    step = make_train_step(fn, data_mesh(1), mutable=["stats"])
    state = State.create(
        apply_fn=None, params=new_state(optax.sgd(1)).params, tx=optax.sgd(1), stats=jnp.zeros(2)
    )
    with pytest.raises((TypeError, ValueError), match=message):
        step(state, Batch.of(fetch(np.arange(4))))


def test_the_users_own_arrays_survive_the_donation():
    class Keyed(TrainState):
        key: Any

    params, key = new_state(optax.sgd(0.1)).params, jax.random.key(0)
    state = Keyed.create(apply_fn=None, params=params, tx=optax.sgd(0.1), key=key)
    step = make_train_step(loss_fn, data_mesh(1))
    after, _ = step(state, Batch.of(fetch(np.arange(8))))
    np.testing.assert_array_equal(params["w"], np.zeros(3))
    assert not key.is_deleted()
    step(after, Batch.of(fetch(np.arange(8))))
    assert after.params["w"].is_deleted()


def test_a_state_may_hold_the_same_array_twice():
    class Averaged(TrainState):
        ema: Any

    mesh = data_mesh(2)
    params = meshes.place({"w": jnp.ones(3), "b": jnp.ones(())}, meshes.replicated_sharding(mesh))
    state = Averaged.create(apply_fn=None, params=params, tx=optax.sgd(0.1), ema=params)
    state, _ = make_train_step(loss_fn, mesh)(state, Batch.of(fetch(np.arange(8))))
    np.testing.assert_array_equal(state.ema["w"], np.ones(3))


WIDE = np.random.default_rng(1).normal(size=(16, 8)).astype(np.float32)


def two_layers(params, batch):
    hidden = jnp.tanh(batch.data @ params["in"])  # axes of type Explicit allow no sharded sums here
    return weighted_sum(
        jnp.sum((hidden * jnp.sum(params["out"], 0, keepdims=True)) ** 2, -1), batch.weights
    )


# where each parameter lies, by name of the layout
LAYOUTS = {
    "model": {"in": PartitionSpec(None, "model"), "out": PartitionSpec(None, "model")},
    "fsdp": {"in": PartitionSpec("data", None), "out": PartitionSpec("data", "model")},
}


@pytest.mark.parametrize(
    ("engine", "layout", "axis_type"),
    [
        ("jit", "model", AxisType.Auto),
        ("jit", "fsdp", AxisType.Auto),
        ("shard_map", "model", AxisType.Auto),
        ("jit", "model", AxisType.Explicit),
        ("shard_map", "model", AxisType.Explicit),
    ],
)
def test_sharded_parameters_stay_where_they_lie_and_train_as_on_one_device(
    engine, layout, axis_type
):
    rng = np.random.default_rng(2)
    params = {name: rng.normal(size=(8, 8)).astype(np.float32) / 3 for name in ("in", "out")}
    weights = np.arange(16) % 3

    def run(mesh, engine, layout):
        placed = {
            name: jax.device_put(value, NamedSharding(mesh, LAYOUTS[layout][name]))
            if layout
            else value
            for name, value in params.items()
        }
        state = TrainState.create(apply_fn=None, params=placed, tx=optax.adam(1e-2))
        step = make_train_step(two_layers, mesh, engine=engine, microbatches=2)
        for _ in range(3):
            state, report = step(state, Batch.of(WIDE, weights=weights))
        return state, report

    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(axis_type,) * 2)
    state, report = run(mesh, engine, layout)
    for tree in (state.params, state.opt_state[0].mu, state.opt_state[0].nu):
        for name, leaf in tree.items():
            assert leaf.sharding.is_equivalent_to(NamedSharding(mesh, LAYOUTS[layout][name]), 2)
    right, expected = run(data_mesh(1), "jit", None)
    assert report.loss.value == pytest.approx(float(expected.loss.value), rel=1e-5)
    for name in params:
        np.testing.assert_allclose(state.params[name], right.params[name], rtol=1e-4, atol=1e-6)
        assert np.max(np.abs(state.params[name] - params[name])) > 1e-2


def test_steps_of_infinite_gradients_are_left_out_by_optax():
    step = make_train_step(loss_fn, data_mesh(2))
    state = new_state(optax.apply_if_finite(optax.sgd(0.1), 3))
    good = Batch.of(fetch(np.arange(4)))
    bad = Batch.of((X[:4] * np.float32(1e30), Y[:4] * np.float32(1e30)))
    state, _ = step(state, good)
    before = jax.device_get(state.params)
    state, report = step(state, bad)
    assert not report.skipped
    jax.tree.map(np.testing.assert_array_equal, before, jax.device_get(state.params))
    assert int(state.opt_state.total_notfinite) == 1


def mean_loss(params, batch):
    return weighted_sum(params["w"] * batch.data, batch.weights)


@pytest.mark.parametrize("engine", STEP_ENGINES)
def test_windows_of_steps_count_each_step_as_its_weight(engine):
    tx = weighted_multi_steps(optax.adam(0.1), 2)
    step = make_train_step(mean_loss, data_mesh(2), engine=engine)
    state = TrainState.create(apply_fn=None, params={"w": jnp.float32(0)}, tx=tx)

    def batch(value, rows):
        return Batch.of(np.full(4, value, np.float32), weights=(np.arange(4) < rows).astype("i4"))

    moments = []
    # a mean of one row and a mean of three; a window cut short by a step without any weight
    for value, rows, flush in [(1, 1, False), (3, 3, False), (5, 2, False), (0, 0, True)]:
        state, report = step(state, batch(value, rows), flush=flush)
        moments.append(float(state.opt_state.inner_opt_state[0].mu["w"]))
    second = 0.1 * 2.5
    assert moments == pytest.approx([0, second, second, 0.9 * second + 0.1 * 5], rel=1e-5)
    assert report.skipped
    assert int(state.opt_state.gradient_step) == 2


def test_windows_of_several_terms_are_refused():
    def terms(params, batch):
        return {"a": mean_loss(params, batch), "b": mean_loss(params, batch)}

    step = make_train_step(terms, data_mesh(1), coefficients={"a": 1.0, "b": 1.0})
    state = TrainState.create(
        apply_fn=None,
        params={"w": jnp.float32(0)},
        tx=weighted_multi_steps(optax.sgd(1.0), 2),
    )
    with pytest.raises(ValueError, match=r"one term under weighted_multi_steps, got terms \['a'"):
        step(state, Batch.of(np.ones(4, np.float32)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"engine": "ddp"}, "engine must be one of shard_map, jit, pmap, got 'ddp'"),
        ({"rng_per": "row"}, "rng_per must be one of rank, example, got 'row'"),
        ({"axis_name": "batch"}, "mesh must have the axis 'batch'"),
        ({"microbatches": 0}, "microbatches must be an integer, at least 1, got 0"),
    ],
)
def test_bad_options_are_refused_at_once(options, message):
    with pytest.raises(ValueError, match=f"make_train_step: {message}"):
        make_train_step(loss_fn, data_mesh(2), **options)


def test_bad_calls_are_refused():
    state, batch = new_state(optax.sgd(0.1)), Batch.of(fetch(np.arange(4)))
    step = make_train_step(loss_fn, data_mesh(2), microbatches=2)
    with pytest.raises(TypeError, match="batch must be a Batch, got dict"):
        step(state, {"x": X})
    with pytest.raises(ValueError, match="rows that divide by 2 ranks, got 5"):
        step(state, Batch.of(fetch(np.arange(5))))
    with pytest.raises(ValueError, match="rows per rank that divide by 2 microbatches, got 3"):
        step(state, Batch.of(fetch(np.arange(6))))
    with pytest.raises(TypeError, match="state must be a flax TrainState, got dict"):
        step(state.params, batch)
    with pytest.raises(TypeError, match="rng must be one key, got 0"):
        step(state, batch, 0)
    with pytest.raises(TypeError, match="rng must be one key, got Array"):
        step(state, batch, jax.random.split(jax.random.key(0)))
    with pytest.raises(
        TypeError, match=r"must take \(params, batch, rng\) when the step is given an rng, got \(pa"
    ):
        step(state, batch, jax.random.key(0))
    plain = state.replace(tx=optax.GradientTransformation(state.tx.init, state.tx.update))
    with pytest.raises(TypeError, match=r"extra arguments to be given \['flush'\], got Gradient"):
        step(plain, batch, flush=True)
    with pytest.raises(TypeError, match="a field for each name in mutable, got none for 'stats'"):
        make_train_step(loss_fn, data_mesh(2), mutable="stats")(state, batch)
    with pytest.raises(ValueError, match="rng must be given where rng_per='example', got None"):
        make_train_step(loss_fn, data_mesh(2), rng_per="example")(state, batch)


def test_bad_calls_after_good_ones_are_refused_and_lose_nothing():
    mesh = data_mesh(2)

    def rows(count):
        return meshes.place(Batch.of(fetch(np.arange(count))), meshes.row_sharding(mesh, "data"))

    step = make_train_step(lambda params, batch, rng: loss_fn(params, batch), mesh, microbatches=2)
    keys = jax.random.split(jax.random.key(0), 3)
    state, _ = step(new_state(optax.sgd(0.1)), rows(8), keys[0])
    with pytest.raises(ValueError, match="rows per rank that divide by 2 microbatches, got 3"):
        step(state, rows(6), keys[1])
    with pytest.raises(TypeError, match="rng must be one key, got"):
        step(state, rows(8), keys)
    with pytest.raises(TypeError, match="batch must be a Batch, got tuple"):
        step(state, rows(8).data, keys[1])
    with pytest.raises(TypeError, match="state must be a flax TrainState, got dict"):
        step(state.params, rows(8), keys[1])
    _, report = step(state, rows(8), keys[1])
    assert int(report.weight) == 8


@pytest.mark.parametrize("leaf", [jnp.float32(0.07), jnp.array(0.07), jnp.log(1 / 0.07), 0.07])
@pytest.mark.parametrize("tx", [optax.sgd(0.1), optax.adamw(1e-3)])
def test_a_weakly_typed_parameter_compiles_no_second_step(leaf, tx):
    traces = []

    def loss_fn(params, batch):
        traces.append(1)
        return weighted_sum((params["w"] - batch.data) ** 2, batch.weights)

    step = make_train_step(loss_fn, data_mesh(2))
    state = TrainState.create(apply_fn=None, params={"w": leaf}, tx=tx)
    counts = []
    for _ in range(3):
        state, _ = step(state, Batch.of(np.arange(8, dtype=np.float32)))
        counts.append(len(traces))
    assert counts[0] == counts[-1]


def scalar_state():
    return TrainState.create(apply_fn=None, params={"w": jnp.float32(0)}, tx=optax.sgd(0.1))


def scalar_loss(params, batch, *_):
    return weighted_sum((params["w"] - batch.data) ** 2, batch.weights)


@pytest.mark.parametrize("wide", [2**32 + 5, -(2**40) - 1])
def test_ids_that_a_device_would_cut_are_refused(wide):
    batch = Batch.of(np.zeros(2, np.float32), ids=np.array([5, wide]))
    step = make_train_step(scalar_loss, data_mesh(1), rng_per="example")
    with pytest.raises(ValueError, match=rf"ids must be of at most 32 bits .* got {wide}"):
        step(scalar_state(), batch, jax.random.key(0))
    with jax.enable_x64(True):
        step(scalar_state(), batch, jax.random.key(0))


def test_a_term_may_have_any_name():
    def loss_fn(params, batch):
        return {"accepted rows": scalar_loss(params, batch)}

    step = make_train_step(loss_fn, data_mesh(1), coefficients={"accepted rows": 1.0})
    state, report = step(scalar_state(), Batch.of(np.ones(3, np.float32)))
    assert list(report.means) == ["accepted rows"]
    np.testing.assert_allclose(float(state.params["w"]), 0.2)


@pytest.mark.parametrize(("dtype", "rows"), [(jnp.bfloat16, 1028), (jnp.float16, 70000)])
def test_accepted_weight_is_counted_in_float32_at_least(dtype, rows):
    batch = Batch.of(np.zeros(rows, np.float32), weights=jnp.ones(rows, dtype))
    _, report = make_train_step(scalar_loss, data_mesh(1))(scalar_state(), batch)
    assert float(report.weight) == rows


def test_coefficients_of_which_none_trains_are_refused():
    with pytest.raises(ValueError, match=r"coefficients must have one that is not 0, got \{'a': 0"):
        make_train_step(scalar_loss, data_mesh(1), coefficients={"a": 0.0})
    with pytest.raises(
        TypeError, match=r"make_train_step: mesh must be a jax\.sharding\.Mesh, got"
    ):
        make_train_step(scalar_loss, 4)
