"""Parameters sharded over mapped axes: each shard's own gradient, summed once, in every regime."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import shards
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jax_ddp_weighting import average_gradients, rank_share, value_and_grad, weighted_sum

RNG = np.random.default_rng(5)
PARAMS = {
    "w1": RNG.normal(size=(4, 8)) / 2,
    "rest": {"b1": RNG.normal(size=8), "w2": RNG.normal(size=(8, 4)) / 3, "scale": np.array(0.7)},
}
ROWS = {"x": RNG.normal(size=(16, 4)), "y": RNG.normal(size=(16, 4))}
# four ranks of four rows, with 3, 1.5, 0 and 2 of weight
ROWS["weights"] = np.array([1, 1, 0, 1, 0.5, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 2])

FSDP = {"w1": P("data"), "rest": {"b1": P("data"), "w2": P(None, "data"), "scale": P()}}
# some over one axis, one over the other, one over both in either order
MIXED = {
    "w1": P("fsdp"),
    "rest": {"b1": P("replica"), "w2": P(("replica", "fsdp"), None), "scale": P()},
}
TWO = {"replica": 2, "fsdp": 2}


def sums(params, rows):
    rest = params["rest"]
    hidden = jnp.tanh(rows["x"] @ params["w1"] + rest["b1"][None])
    errors = jnp.sum((hidden @ rest["w2"] * rest["scale"] - rows["y"]) ** 2, axis=-1)
    return weighted_sum(errors, rows["weights"])


@cache
def right():
    with jax.enable_x64(True):
        whole = lambda params, rows: (lambda s: (s.total, s.weight))(sums(params, rows))  # noqa: E731
        return shards.on_one_device(whole, PARAMS, ROWS)


def gradient_of(specs, axis_name, *, param_specs="the same", microbatches=1):
    param_specs = specs if isinstance(param_specs, str) else param_specs

    def gathered(params, rows):
        return sums(shards.gather(params, specs), rows)

    fn = value_and_grad(
        gathered, axis_name=axis_name, microbatches=microbatches, param_specs=param_specs
    )
    return lambda params, rows: (lambda loss, g: (loss.value, g))(*fn(params, rows))


def run(regime, specs, axes, fn):
    with jax.enable_x64(True):
        return shards.run(regime, fn, PARAMS, specs, ROWS, P(tuple(axes)), axes)


@pytest.mark.parametrize(
    ("regime", "microbatches"),
    [("shard_map", 1), ("shard_map", 2), ("shard_map_unchecked", 2), ("pmap", 1), ("vmap", 2)],
)
def test_each_shard_gets_its_own_gradient(regime, microbatches):
    fn = gradient_of(FSDP, "data", microbatches=microbatches)
    shards.assert_the_same(run(regime, FSDP, {"data": 4}, fn), right())


@pytest.mark.parametrize(
    ("regime", "microbatches"), [("shard_map", 2), ("shard_map_unchecked", 1), ("vmap", 1)]
)
def test_it_is_summed_over_the_axes_it_is_not_sharded_over(regime, microbatches):
    fn = gradient_of(MIXED, ("replica", "fsdp"), microbatches=microbatches)
    shards.assert_the_same(run(regime, MIXED, TWO, fn), right())


def test_the_gradient_of_shards_summed_once_more_fails_the_same_check():
    def again(params, rows):
        value, gradients = gradient_of(FSDP, "data")(params, rows)
        return value, lax.psum(gradients, "data")

    found = run("shard_map_unchecked", FSDP, {"data": 4}, again)
    with pytest.raises(AssertionError, match="rtol=1e-12"):
        shards.assert_the_same(found, right())


@pytest.mark.parametrize("regime", shards.REGIMES)
def test_the_gradient_of_a_share_is_averaged_as_the_parameter_lies(regime):
    axes, specs = ({"data": 4}, FSDP) if regime == "pmap" else (TWO, MIXED)

    def fn(params, rows):
        def share(params):
            return rank_share(sums(shards.gather(params, specs), rows), tuple(axes))

        value, gradients = jax.value_and_grad(share)(params)
        averaged = average_gradients(gradients, tuple(axes), param_specs=specs)
        return lax.pmean(value, tuple(axes)), averaged

    shards.assert_the_same(run(regime, specs, axes, fn), right())


def test_the_pmean_of_a_share_of_shards_fails_the_same_check():
    def fn(params, rows):
        def share(params):
            return rank_share(sums(shards.gather(params, FSDP), rows), "data")

        return lax.pmean(jax.value_and_grad(share)(params), "data")

    found = run("vmap", FSDP, {"data": 4}, fn)
    with pytest.raises(AssertionError, match="rtol=1e-12"):
        shards.assert_the_same(found, right())


@pytest.mark.parametrize("regime", shards.REGIMES)
@pytest.mark.parametrize("param_specs", [None, {"w1": P(), "rest": FSDP["rest"]}])
def test_a_shard_without_its_spec_is_refused_in_every_regime(regime, param_specs):
    message = r"value_and_grad: param_specs must name every axis .* got none with 'data' at params"
    with pytest.raises(ValueError, match=message + ".* Pass param_specs=|pass param_specs="):
        run(regime, FSDP, {"data": 4}, gradient_of(FSDP, "data", param_specs=param_specs))


def test_a_parameter_made_varying_by_pcast_is_refused_by_its_name():
    def fn(params, rows):
        params = jax.tree.map(lambda leaf: lax.pcast(leaf, "data", to="varying"), params)
        loss, gradients = value_and_grad(sums, axis_name="data")(params, rows)
        return loss.value, gradients

    with pytest.raises(ValueError, match=r"made varying by pcast, .* as it was before the pcast"):
        run("shard_map", P(), {"data": 4}, fn)


def test_a_varying_gradient_of_a_share_is_refused_without_its_spec():
    def fn(params, rows):
        share = lambda params: rank_share(sums(shards.gather(params, FSDP), rows), "data")  # noqa: E731
        return lax.pmean(share(params), "data"), average_gradients(jax.grad(share)(params), "data")

    with pytest.raises(ValueError, match=r"average_gradients: .* at gradients\['rest'\]"):
        run("shard_map", FSDP, {"data": 4}, fn)


def whole_specs(specs, regime="shard_map", axis_name="data"):
    """`specs` said of parameters that are the same on every rank."""
    fn = value_and_grad(sums, axis_name=axis_name, param_specs=specs)
    return run(regime, P(), {"data": 2}, lambda p, r: (lambda a, g: (a.value, g))(*fn(p, r)))


@pytest.mark.parametrize(
    ("specs", "error", "message"),
    [
        (
            P("data"),
            ValueError,
            r"at most one entry for each dimension, got .* at params\['rest'\]",
        ),
        (
            {**FSDP, "w1": P("data", "data")},
            ValueError,
            r"must name each axis once, got .*'data', 'data'\) at params\['w1'\]",
        ),
        (
            {"w1": P("mdoel"), "rest": P()},
            ValueError,
            r"axes that are mapped here, got 'mdoel' at params",
        ),
        (FSDP, ValueError, r"axes over which the parameter varies, got 'data' at params.*in_specs"),
        (
            {"w1": P()},
            ValueError,
            r"must have the structure of params, or of its first levels, got",
        ),
        ({**FSDP, "w1": "data"}, TypeError, r"must be PartitionSpecs, got str. P\(\) is for"),
        (
            {**FSDP, "w1": NamedSharding(shards.make_mesh({"data": 2}), P())},
            TypeError,
            r"must be PartitionSpecs, got NamedSharding. Take its .spec",
        ),
        ({**FSDP, "w1": P(P.UNCONSTRAINED)}, TypeError, "which axes it is sharded over, got"),
    ],
)
def test_wrong_specs_are_refused(specs, error, message):
    with pytest.raises(error, match=f"value_and_grad: param_specs .*{message}"):
        whole_specs(specs)


def test_a_prefix_will_do_and_specs_of_the_global_view_say_nothing():
    fn = gradient_of({"w1": P("data"), "rest": P()}, "data")
    specs = {"w1": P("data"), "rest": P()}
    shards.assert_the_same(run("shard_map", specs, {"data": 4}, fn), right())
    with jax.enable_x64(True):
        loss, gradients = value_and_grad(sums, param_specs=FSDP)(PARAMS, ROWS)
        shards.assert_the_same((loss.value, gradients), right())
        with pytest.raises(ValueError, match="must have the structure of params"):
            value_and_grad(sums, param_specs={"w1": P()})(PARAMS, ROWS)
