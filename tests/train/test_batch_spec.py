"""Rows over further axes of the mesh, and tokens of one row on several ranks: one device's run."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_ddp_weighting import (
    Batch,
    EpochPlan,
    WeightedSum,
    make_nnx_train_step,
    make_train_epoch,
    make_train_step,
    weighted_sum,
)

RNG = np.random.default_rng(3)
ROWS, LENGTH, WIDTH = 8, 6, 4
PARAMS = {name: RNG.normal(size=(WIDTH, WIDTH)) / 2 for name in ("q", "k", "v")}
DATA = {
    "x": RNG.normal(size=(ROWS, LENGTH, WIDTH)),
    "valid": (RNG.random((ROWS, LENGTH)) < 0.6).astype(float),
    "label": RNG.normal(size=ROWS),
}
WEIGHTS = np.array([1, 1, 0.5, 1, 0, 1, 0, 2.0])
GRID, PAIR = (("data", "seq"), (2, 2)), (("replica", "fsdp"), (2, 2))


def mesh_of(names, shape):
    devices, kinds = jax.devices()[: int(np.prod(shape))], (AxisType.Auto,) * len(shape)
    return jax.make_mesh(shape, names, axis_types=kinds, devices=devices)


def attend(params, x, *, whole=lambda leaf: leaf, first=0):
    """What each token gathers of itself and those before it."""
    q, k, v = (x @ params[name] for name in "qkv")
    k, v = whole(k), whole(v)
    before = (first + jnp.arange(q.shape[1]))[:, None] >= jnp.arange(k.shape[1])[None]
    scores = jnp.where(before[None], jnp.einsum("btd,bsd->bts", q, k), -jnp.inf)
    return jnp.einsum("bts,bsd->btd", jax.nn.softmax(scores, axis=-1), v)


def of_tokens(params, batch):
    """Every token that counts counts once, as its row does."""
    out = attend(params, batch.data["x"])
    losses = jnp.sum((out - batch.data["x"]) ** 2, axis=-1)
    return weighted_sum(losses, batch.data["valid"] * batch.weights[:, None])


def of_rows(params, batch):
    """A loss per row, made of all of its tokens."""
    out = attend(params, batch.data["x"])
    return weighted_sum((jnp.mean(out, axis=(1, 2)) - batch.data["label"]) ** 2, batch.weights)


def attend_by_hand(params, x):
    return attend(
        params,
        x,
        whole=lambda leaf: lax.all_gather(leaf, "seq", axis=1, tiled=True),
        first=lax.axis_index("seq") * x.shape[1],
    )


def of_own_tokens(params, batch):
    """The same as `of_tokens`, of a rank's tokens."""
    out = attend_by_hand(params, batch.data["x"])
    losses = jnp.sum((out - batch.data["x"]) ** 2, axis=-1)
    return weighted_sum(losses, batch.data["valid"] * batch.weights[:, None])


def of_both(params, batch, *, statistics, attend=attend, add=lambda leaf: leaf):
    """Terms of rows, of tokens and of parameters, and statistics of both kinds."""
    out = attend(params, batch.data["x"])
    means = add(jnp.sum(out, axis=(1, 2))) / (LENGTH * WIDTH)
    rows = weighted_sum((means - batch.data["label"]) ** 2, batch.weights)
    tokens = weighted_sum(jnp.sum(out**2, axis=-1), batch.data["valid"] * batch.weights[:, None])
    norm = sum(jnp.sum(leaf**2) for leaf in params.values())
    ratio = statistics["tokens"] / statistics["rows"]
    rows = WeightedSum(rows.total * ratio, rows.weight)
    return {"rows": rows, "tokens": tokens, "norm": rows.once(norm)}


def count(params, batch):
    tokens = jnp.sum(batch.data["valid"] * batch.weights[:, None])
    size = jnp.sum(params["q"] ** 2)
    return {"tokens": tokens * size, "rows": jnp.sum(batch.weights) * size}


def run(loss_fn, mesh, *, specs=None, **options):
    params = {
        name: jax.device_put(jnp.asarray(leaf), NamedSharding(mesh, specs or P()))
        for name, leaf in PARAMS.items()
    }
    state = TrainState.create(apply_fn=None, params=params, tx=optax.adam(0.05))
    step, reports = make_train_step(loss_fn, mesh, **options), []
    for count in (ROWS, 3):
        state, report = step(state, Batch.of(DATA, weights=WEIGHTS * (np.arange(ROWS) < count)))
        reports.append(report)
    return state, reports


@cache
def one_devices_run(loss_fn):
    options = OPTIONS if loss_fn is of_both else {}
    return run(loss_fn, mesh_of(("data",), (1,)), **options)


def assert_one_devices_run(found, loss_fn):
    state, reports = found
    right, expected = one_devices_run(loss_fn)
    for a, b in zip(reports, expected, strict=True):
        np.testing.assert_allclose(a.loss.value, b.loss.value, rtol=1e-12)
        np.testing.assert_allclose(a.weight, b.weight, rtol=1e-12)
        for name, term in b.loss.terms.items():
            if name != "norm":  # whose weight counts ranks
                np.testing.assert_allclose(a.loss.terms[name].weight, term.weight, rtol=1e-12)
    for name, leaf in right.params.items():
        np.testing.assert_allclose(state.params[name], leaf, rtol=1e-11, atol=1e-11)


TOKENS = {"x": P("data", "seq"), "valid": P("data", "seq"), "label": P("data")}
ALL = P(("replica", "fsdp"))
INNER = {"x": P(("replica", "fsdp")), "valid": P("fsdp"), "label": P("fsdp")}


@pytest.mark.parametrize(
    ("loss_fn", "layout", "specs", "options"),
    [
        (of_tokens, GRID, P(), {"batch_spec": TOKENS, "microbatches": 2}),
        (of_rows, GRID, P("data"), {"batch_spec": TOKENS}),
        (of_rows, GRID, P("seq", "data"), {"batch_spec": TOKENS, "engine": "jit"}),
        (of_rows, PAIR, P("fsdp"), {"batch_spec": ALL, "gather_per": "microbatch"}),
        # of rows over two axes one is mapped, and the other is XLA's
        (of_tokens, PAIR, P("fsdp", "replica"), {"batch_spec": INNER, "axis_name": "fsdp"}),
    ],
)
def test_a_run_with_rows_over_further_axes_is_one_devices(loss_fn, layout, specs, options):
    with jax.enable_x64(True):
        found = run(loss_fn, mesh_of(*layout), specs=specs, **options)
        assert_one_devices_run(found, loss_fn)


BY_HAND = {"axis_name": ("data", "seq"), "batch_spec": TOKENS}


ALONE = {"axis_name": "seq", "batch_spec": {**TOKENS, "x": P(None, "seq"), "valid": P(None, "seq")}}
ALONE["batch_spec"]["label"] = P()


@pytest.mark.parametrize(
    ("specs", "options"), [(P(), BY_HAND), (P("seq"), {**BY_HAND, "microbatches": 2}), (P(), ALONE)]
)
def test_a_run_of_each_ranks_own_tokens_is_one_devices(specs, options):
    with jax.enable_x64(True):
        found = run(of_own_tokens, mesh_of(*GRID), specs=specs, **options)
        assert_one_devices_run(found, of_tokens)


def test_a_loss_that_uses_an_axis_that_is_not_mapped_is_told_how_to_map_it():
    message = "axis_name must name the axes that loss_fn uses, got 'data' and .*seq"
    with pytest.raises(ValueError, match=f"make_train_step: {message}"):
        run(of_own_tokens, mesh_of(*GRID), batch_spec=TOKENS)


def test_tokens_that_do_not_see_the_other_ranks_fail_the_same_check():
    with jax.enable_x64(True):
        found = run(of_tokens, mesh_of(*GRID), **BY_HAND)
        with pytest.raises(AssertionError, match="rtol=1e-12"):
            assert_one_devices_run(found, of_tokens)


OPTIONS = {
    "coefficients": {"rows": 1.0, "tokens": 0.5, "norm": 0.1},
    "divisors": {"rows": lambda weight: jnp.maximum(weight, 5), "tokens": 7.0},
    "statistics": count,
}


@pytest.mark.parametrize(
    ("specs", "more"),
    [(P(), {"microbatches": 2}), (P("seq"), {"gather_per": "microbatch"}), (P("seq"), {})],
)
def test_what_is_a_rows_counts_once_beside_what_is_a_tokens(specs, more):
    by_hand = partial(of_both, attend=attend_by_hand, add=lambda leaf: lax.psum(leaf, "seq"))
    with jax.enable_x64(True):
        found = run(by_hand, mesh_of(*GRID), specs=specs, **BY_HAND, **OPTIONS, **more)
        assert_one_devices_run(found, of_both)


def test_bad_weights_of_rows_are_counted_once_each():
    step = make_train_step(of_own_tokens, mesh_of(*GRID), **BY_HAND)
    state = TrainState.create(
        apply_fn=None, params=jax.tree.map(jnp.float32, PARAMS), tx=optax.sgd(0.1)
    )
    data = jax.tree.map(np.float32, DATA)
    weights = jnp.array([1, -1, 1, jnp.nan, 1, 1, 1, 1])
    _, report = step(state, Batch.of(data, weights=weights))
    assert (int(report.bad_weights), bool(report.skipped)) == (2, True)


@pytest.mark.parametrize(
    "loss_fn",
    [
        # the sum of a row's tokens here, over the whole weight of the row
        lambda params, batch: weighted_sum(
            jnp.sum(attend(params, batch.data["x"]), axis=(1, 2)), batch.weights
        ),
        lambda params, batch: weighted_sum(jnp.sum(attend(params, batch.data["x"]), axis=-1)),
        lambda params, batch: WeightedSum(
            lax.psum(jnp.sum(attend(params, batch.data["x"])), "seq"), jnp.sum(batch.data["valid"])
        ),
    ],
)
def test_a_term_of_rows_and_tokens_at_once_is_refused(loss_fn):
    message = r"loss_fn must return a total and a weight that both are .* every rank of 'seq'"
    with pytest.raises(ValueError, match=message):
        run(loss_fn, mesh_of(*GRID), **BY_HAND)


class Attention(nnx.Module):
    def __init__(self):
        for name, leaf in PARAMS.items():
            setattr(self, name, nnx.Param(jnp.asarray(leaf)))


def test_an_nnx_module_is_given_such_rows_too():
    def loss_fn(model, batch):
        return of_rows({name: getattr(model, name)[...] for name in PARAMS}, batch)

    def train(mesh, **options):
        model = Attention()
        optimizer = nnx.Optimizer(model, optax.adam(0.05), wrt=nnx.Param)
        step = make_nnx_train_step(loss_fn, mesh, **options)
        step(model, optimizer, Batch.of(DATA, weights=WEIGHTS))
        return model

    with jax.enable_x64(True):
        found = train(mesh_of(*GRID), batch_spec=TOKENS)
        right = train(mesh_of(("data",), (1,)))
    for name in PARAMS:
        np.testing.assert_allclose(
            getattr(found, name)[...], getattr(right, name)[...], rtol=1e-11, atol=1e-11
        )


def test_an_epoch_as_one_program_is_given_such_rows_too():
    def loss_fn(params, batch):
        means = jnp.mean(batch.data["x"], axis=(1, 2))
        return weighted_sum((params["w"] - means) ** 2, batch.weights)

    plan = EpochPlan(ROWS, num_replicas=2, batch_size=3, shuffle=False, tail="mask")
    state = TrainState.create(apply_fn=None, params={"w": jnp.float32(0)}, tx=optax.sgd(0.5))
    run_epoch = make_train_epoch(loss_fn, mesh_of(*GRID), plan, batch_spec=TOKENS)
    state, _ = run_epoch(state, jax.tree.map(np.float32, DATA), 0)
    last = np.mean(DATA["x"], axis=(1, 2))[6:]  # two rows of six
    np.testing.assert_allclose(state.params["w"], np.mean(last), rtol=1e-5)


def test_the_compiled_step_is_given_a_part_of_each_row():
    """By its shapes: where a batch lies elsewhere it is moved, and the tokens are split."""
    mesh = mesh_of(*GRID)
    step = make_train_step(of_tokens, mesh, batch_spec=TOKENS)
    state = TrainState.create(
        apply_fn=None, params=jax.tree.map(jnp.float32, PARAMS), tx=optax.sgd(0.1)
    )
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32), DATA)
    rows = jax.ShapeDtypeStruct((ROWS,), jnp.int32)
    lowered = step.lower(state, Batch(shapes, rows, rows))
    size = lowered.compile().memory_analysis().argument_size_in_bytes
    params = 4 * 3 * WIDTH**2
    # a half of the rows and a half of their tokens; ids and labels are not used
    assert size == params + 4 + 4 * (ROWS // 2) * (LENGTH // 2) * (WIDTH + 1) + 4 * ROWS // 2


@pytest.mark.parametrize("other", [AxisType.Auto, AxisType.Explicit])
def test_over_explicit_axes_rows_come_to_lie_as_is_said(other):
    def loss_fn(params, batch):
        x = batch.data["x"]
        losses = jnp.sum(jnp.tanh(x) ** 2, axis=-1) * params["w"]
        return weighted_sum(losses, batch.data["valid"])

    kinds = (AxisType.Explicit, other)
    mesh = jax.make_mesh((2, 2), GRID[0], axis_types=kinds, devices=jax.devices()[:4])
    state = TrainState.create(apply_fn=None, params={"w": jnp.ones(())}, tx=optax.sgd(0.1))
    batch = Batch.of(jax.tree.map(np.float32, DATA))
    placed = jax.device_put(batch, NamedSharding(mesh, P("data")))
    found = []
    for each in (batch, placed):
        step = make_train_step(loss_fn, mesh, batch_spec=TOKENS, donate=False)
        found.append(float(step(state, each)[1].loss.value))
    losses = np.sum(np.tanh(DATA["x"]) ** 2, axis=-1)
    right = np.sum(losses * DATA["valid"]) / np.sum(DATA["valid"])
    np.testing.assert_allclose(found, right, rtol=1e-6)


@pytest.mark.parametrize(
    ("spec", "options", "error", "message"),
    [
        ("data", {}, TypeError, r"batch_spec must be PartitionSpecs, got str. P\('data'\) is for"),
        (NamedSharding(mesh_of(*GRID), P()), {}, TypeError, r"got NamedSharding. Take its \.spec"),
        ({}, {}, ValueError, r"must hold a PartitionSpec, got \{\}. Leave it out"),
        (
            P("data", "sqe"),
            {},
            ValueError,
            r"name axes of the mesh, got 'sqe' in .*'data', 'seq'",
        ),
        (P("data", "data"), {}, ValueError, "must name each axis once, got"),
        (P("data", P.UNCONSTRAINED), {}, TypeError, "must say of every dimension which axes"),
        (P(None, "seq"), {}, ValueError, "axis_name must be given where batch_spec does not shard"),
        (P(), {}, ValueError, "axis_name must be given where batch_spec does not shard"),
        (
            {**TOKENS, "label": P(("data", "seq"))},
            {},
            ValueError,
            "axis_name must be given where batch_spec does not shard the rows of every leaf over",
        ),
        (
            {**TOKENS, "label": P(("data", "seq"))},
            {"axis_name": ("data", "seq")},
            ValueError,
            "batch_spec must shard the rows of every leaf over the same axes of axis_name",
        ),
        (P("data"), {"axis_name": ("data", "seq")}, ValueError, "name the data axis, .*'seq' of"),
        (P("data"), {"engine": "pmap"}, ValueError, "batch_spec must be left out under pmap"),
    ],
)
def test_wrong_specs_are_refused_when_the_step_is_made(spec, options, error, message):
    with pytest.raises(error, match=f"make_train_step: .*{message}"):
        make_train_step(of_tokens, mesh_of(*GRID), batch_spec=spec, **options)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (P("data", "seq"), r"make_train_step: batch_spec must have at most one entry .*'label'\]"),
        ({"x": P("data")}, "make_train_step: batch_spec must have the structure of the batch's"),
        (
            {**TOKENS, "x": P("data", None, ("seq", "model"))},
            r"parts that .* dimension 2 into, got",
        ),
    ],
)
def test_specs_that_do_not_fit_a_batch_are_refused_when_it_comes(spec, message):
    mesh = mesh_of(("data", "seq", "model"), (2, 1, 3))
    with pytest.raises(ValueError, match=message):
        run(of_tokens, mesh, batch_spec=spec)
