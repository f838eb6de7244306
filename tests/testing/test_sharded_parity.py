"""Parity and diagnosis on meshes of two axes, and of parameters in shards."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_ddp_weighting import (
    Batch,
    ParityError,
    check_gradients,
    diagnose,
    diagnose_step,
    make_train_step,
    value_and_grad,
    weighted_sum,
)

RNG = np.random.default_rng(2)
PARAMS = {
    "up": RNG.normal(size=(3, 4)),
    "down": RNG.normal(size=(4, 2)),
    "bias": RNG.normal(size=2),
}
BATCH = Batch.of(RNG.normal(size=(6, 3)), weights=np.array([1, 0.5, 2, 0, 1, 1]))
TENSOR = {"up": P(None, "model"), "down": P("model"), "bias": P()}
FSDP = {"up": P(None, "data"), "down": P("data"), "bias": P("data")}
BOTH = {"up": P(None, ("model", "data")), "down": P("model", "data"), "bias": P()}


def whole(params, batch, add=lambda part: part):
    out = add(jnp.tanh(batch.data @ params["up"]) @ params["down"]) + params["bias"][None]
    return weighted_sum(jnp.sum(out**2, axis=-1), batch.weights)


def tensor(params, batch):
    return whole(params, batch, lambda part: lax.psum(part, "model"))


def gathered(params, batch):
    up = lax.all_gather(params["up"], "data", axis=1, tiled=True)
    down, bias = lax.all_gather((params["down"], params["bias"]), "data", tiled=True)
    return whole({"up": up, "down": down, "bias": bias}, batch)


def both(params, batch):
    up = lax.all_gather(params["up"], "data", axis=1, tiled=True)
    down = lax.all_gather(params["down"], "data", axis=1, tiled=True)
    return tensor({**params, "up": up, "down": down}, batch)


@pytest.mark.parametrize(
    ("loss_fn", "splits", "options"),
    [
        (tensor, [(4, 2)], {"param_specs": TENSOR, "axes": {"model": 2}, "microbatches": 2}),
        (both, [(5, 1)], {"param_specs": BOTH, "axes": {"model": 2}}),
        (gathered, [(4, 2)], {"param_specs": FSDP}),
        (gathered, [(6, 0)], {"param_specs": FSDP, "engines": ["fake_pmap"]}),
    ],
)
def test_gradients_of_shards_are_those_of_one_device(loss_fn, splits, options):
    report = check_gradients(
        loss_fn, PARAMS, BATCH, splits, reference=whole, float64=True, **options
    )
    wanted = options.get("engines") or ["shard_map", "shard_map_unchecked", "vmap"]
    wanted = [*wanted, "pmap"] if "engines" not in options and "axes" not in options else wanted
    assert {each.engine for each in report.differences} == set(wanted)
    assert {each.leaf for each in report.differences} == {
        "loss",
        *(f"params['{name}']" for name in PARAMS),
    }


def test_the_global_view_is_given_parameters_that_lie_so():
    check_gradients(
        whole, PARAMS, BATCH, [(4, 2)], param_specs=BOTH, axes={"model": 2}, engines=["jit"]
    )


def summed_again(loss_fn, *, param_specs, **options):
    """As is written where nobody says what is sharded: all gradients summed over all axes."""
    own = value_and_grad(loss_fn, param_specs=param_specs, **options)

    def gradient(params, batch):
        loss, gradients = own(params, batch)
        return loss, {**gradients, "up": lax.psum(gradients["up"], "model")}

    return gradient


@pytest.mark.parametrize("engine", ["shard_map_unchecked", "vmap"])
def test_a_gradient_that_is_summed_over_the_model_axis_too_fails(engine):
    options = {"param_specs": TENSOR, "axes": {"model": 2}, "reference": whole}
    with pytest.raises(ParityError, match=r"1 of \d gradient leaves differ .* worst params..up"):
        check_gradients(
            tensor, PARAMS, BATCH, [(4, 2)], gradient=summed_again, engines=[engine], **options
        )


def test_one_rank_that_differs_is_found():
    def other_on_one_rank(loss_fn, **options):
        own = value_and_grad(loss_fn, **options)

        def gradient(params, batch):
            loss, gradients = own(params, batch)
            last = (lax.axis_index("data") == 1) & (lax.axis_index("model") == 0)
            return loss, {**gradients, "bias": gradients["bias"] * jnp.where(last, 1.5, 1.0)}

        return gradient

    options = {"param_specs": TENSOR, "axes": {"model": 2}, "reference": whole, "engines": ["vmap"]}
    with pytest.raises(ParityError, match=r"worst params\['bias'\] .*ratio 1.500"):
        check_gradients(tensor, PARAMS, BATCH, [(4, 2)], gradient=other_on_one_rank, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"param_specs": TENSOR}, "param_specs must name 'data' or one of axes, got 'model'"),
        ({"axes": {"data": 2}}, "axes must give the sizes of axes beside 'data'"),
        ({"axes": {"model": 0}}, "axes must give the sizes of axes beside 'data'"),
        (
            {"axes": {"model": 2}, "engines": ["pmap"]},
            "engines must map several axes .* 'pmap'",
        ),
        ({"axes": {"model": 8}, "engines": ["shard_map"]}, "must have 16 devices, got 8. Call"),
        ({"param_specs": {"up": P()}}, "param_specs must have the structure of params"),
        (
            {"param_specs": {**TENSOR, "up": P("model")}, "axes": {"model": 2}},
            r"must split parameters evenly, got P.* and shape \(3, 4\) at params\['up'\]",
        ),
    ],
)
def test_what_no_mesh_has_is_refused(options, message):
    with pytest.raises(ValueError, match=f"check_gradients: .*{message}"):
        check_gradients(tensor, PARAMS, BATCH, [(4, 2)], reference=whole, **options)


def mesh_of(names):
    kinds = (AxisType.Auto,) * 2
    return jax.make_mesh((2, 2), names, axis_types=kinds, devices=jax.devices()[:4])


def on_grid(after):
    """A reduction on a mesh of data and fsdp, with the probe's parameters in shards."""
    mesh = mesh_of(("data", "fsdp"))

    @cache
    def compiled(token_loss):
        def loss_fn(shard, rows):
            whole = lax.all_gather(shard, "fsdp", tiled=True)
            return weighted_sum(token_loss(whole, rows[0]), rows[1])

        def fn(shard, rows):
            options = {"axis_name": ("data", "fsdp"), "param_specs": P("fsdp")}
            return after(value_and_grad(loss_fn, microbatches=3, **options)(shard, rows)[1])

        specs = (P("fsdp"), P(("data", "fsdp")))
        mapped = jax.shard_map(fn, mesh=mesh, in_specs=specs, out_specs=specs[0], check_vma=False)
        return jax.jit(mapped)

    def gradient_of(token_loss, params, tokens, weights):
        rows = jax.tree.map(lambda leaf: leaf.reshape(-1, leaf.shape[-1]), (tokens, weights))
        padded = jnp.pad(params, (0, -len(params) % 2))
        return compiled(token_loss)(padded, rows)[: len(params)]

    return gradient_of


@pytest.mark.parametrize(
    ("after", "convention", "factor"),
    [
        (lambda gradient: gradient, "global_mean", 1),
        (lambda gradient: lax.psum(gradient, "data"), "unknown", 2),
        (lambda gradient: gradient * 4, "times_ranks", 4),
    ],
)
def test_a_reduction_of_shards_is_diagnosed(after, convention, factor):
    found = diagnose(on_grid(after), num_replicas=4, microbatches=3)
    assert (found.convention, round(found.factor, 3)) == (convention, factor)


def test_a_training_step_on_a_grid_is_diagnosed():
    mesh = mesh_of(("data", "model"))
    x = RNG.normal(size=(8, 6, 4))

    def loss_fn(params, batch):
        losses = jnp.sum(jnp.tanh(batch.data @ params["w"]) ** 2, axis=(1, 2))
        return weighted_sum(losses, batch.weights)

    def loss_of_example(params, example):
        return jnp.sum(jnp.tanh(example @ params["w"]) ** 2)

    step = make_train_step(loss_fn, mesh, batch_spec=P("data", "model"), microbatches=2)

    def run(params, batch):
        lie = NamedSharding(mesh, P("data", "model"))
        params = {"w": jax.device_put(params["w"], lie)}
        state = TrainState.create(apply_fn=None, params=params, tx=optax.sgd(1.0))
        state, report = step(state, batch)
        return state.params, report

    with jax.enable_x64(True):
        batch = Batch.of(x, weights=np.array([1, 2, 0, 1, 3, 1, 0, 1]))
        found = diagnose_step(
            run,
            {"w": RNG.normal(size=(4, 4))},
            batch,
            loss_of_example=loss_of_example,
            ranks=2,
            learning_rate=1.0,
        )
    assert (found.convention, round(found.factor, 6)) == ("global_mean", 1)
