"""The seed's own cases, for every parameter's gradient, before any step, in every regime."""

import re
from dataclasses import replace
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jax_ddp_weighting import (
    Batch,
    EpochPlan,
    GlobalLoss,
    ParityError,
    WeightedSum,
    check_additive,
    check_gradients,
    diagnose_step,
    diagnose_weights,
    effective_weights,
    value_and_grad,
    weighted_sum,
)
from jax_ddp_weighting.distributed.mesh import ENGINES
from jax_ddp_weighting.testing.comparison import compare


class Network(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(nn.tanh(nn.Dense(5)(x)))


NETWORK = Network()
X = np.random.default_rng(1).normal(size=(47, 4))
Y = np.random.default_rng(2).normal(size=(47, 3))


def loss_fn(params, batch):
    x, y = batch.data
    return weighted_sum(jnp.sum((NETWORK.apply(params, x) - y) ** 2, axis=-1), batch.weights)


def network_params(dtype=np.float32):
    params = jax.jit(NETWORK.init)(jax.random.key(0), jnp.asarray(X[:1]))
    return jax.tree.map(lambda leaf: np.asarray(leaf, dtype), params)


def batch_of(ids, weights=None):
    return Batch.of((X[ids], Y[ids]), weights, ids)


def wrong(loss_of_rank):
    """A way to take gradients that is wrong on purpose, called as `value_and_grad` is."""

    def make(loss_fn, *, axis_name, microbatches, coefficients):
        def fn(params, batch):
            local = jax.tree.map(lambda p: lax.pcast(p, axis_name, to="varying"), params)
            value, grads = jax.value_and_grad(lambda p: loss_of_rank(loss_fn(p, batch)))(local)
            return GlobalLoss(lax.pmean(value, axis_name), {}), lax.pmean(grads, axis_name)

        return fn

    return make


local_mean = wrong(lambda local: local.mean())
SPLITS = {
    "four examples as 3 + 1": (range(4), [(3, 1)]),
    "four examples as 4 + 0": (range(4), [(4, 0)]),
    "ranks of 2, 1, 1 and no rows": (range(4), [(2, 1, 1, 0)]),
}


@pytest.mark.parametrize(("name", "microbatches"), [*zip(SPLITS, [3, 1, 3], strict=True)])
def test_splits_of_one_batch_give_one_gradient_in_float64(name, microbatches):
    ids, splits = SPLITS[name]
    with jax.enable_x64(True):
        report = check_gradients(
            loss_fn,
            network_params(float),
            batch_of(np.array(ids)),
            splits,
            microbatches=microbatches,
        )
    # the loss and four leaves in each regime, none of them skipped
    assert len(report.differences) == 5 * len(ENGINES)
    assert {each.rtol for each in report.differences} == {1e-12}


@pytest.mark.parametrize("name", SPLITS)
def test_the_mean_of_local_means_fails_that_check(name):
    ids, splits = SPLITS[name]
    with pytest.raises(ParityError, match=r"of \d+ gradient leaves differ at rtol=1e-05"):
        check_gradients(
            loss_fn,
            network_params(),
            batch_of(np.array(ids)),
            splits,
            engines=["shard_map"],
            gradient=local_mean,
        )


@pytest.mark.parametrize("epoch", [2, 3])
def test_a_short_final_step_and_the_next_epochs_have_one_devices_gradients(epoch):
    plan = EpochPlan(47, num_replicas=3, batch_size=4, seed=7)
    last = plan.steps_per_epoch - 1
    slots = plan.batch(epoch, last)
    split = tuple(slots.weights.sum(axis=1).tolist())
    assert split == (4, 4, 3)
    with jax.enable_x64(True):
        order = np.concatenate(
            [ids[w > 0] for ids, w in zip(slots.ids, slots.weights, strict=True)]
        )
        check_gradients(
            loss_fn,
            network_params(),
            batch_of(order),
            [split],
            engines=["shard_map"],
            microbatches=2,
        )


def test_an_epoch_change_changes_the_batch_that_is_proved():
    plan = EpochPlan(47, num_replicas=3, batch_size=4, seed=7)
    assert not np.array_equal(plan.batch(2, 3).ids, plan.batch(3, 3).ids)


def test_float32_stays_within_its_own_tolerance():
    batch = batch_of(np.arange(7))
    engines = ["jit", "shard_map"]
    report = check_gradients(loss_fn, network_params(), batch, [(4, 1, 2), (7, 0)], engines=engines)
    assert report.worst.difference <= 1e-5


def test_fractional_and_zero_weights_are_part_of_the_proof():
    weights = np.array([0.25, 0.0, 3.0, 1.0, 0.5])
    with jax.enable_x64(True):
        check_gradients(
            loss_fn,
            network_params(),
            batch_of(np.arange(5), weights),
            [(3, 2), (1, 4)],
            engines=["jit", "shard_map_unchecked"],
        )


def test_weight_that_counts_in_the_denominator_alone_is_dealt_with_its_row():
    missing = np.array([0.0, 2.0, 0.0, 1.0, 0.0])
    batch = replace(batch_of(np.arange(5)), missing=missing)
    report = check_gradients(
        loss_fn, network_params(), batch, [(3, 2), (1, 4)], engines=["vmap"], float64=True
    )
    assert report.worst.equal


def summed(loss_fn, *, axis_name, microbatches, coefficients):
    """The textbook rule in default shard_map, where JAX has summed the gradient already."""

    def fn(params, batch):
        def share(params):
            local = loss_fn(params, batch)
            return local.total * lax.axis_size(axis_name) / lax.psum(local.weight, axis_name)

        value, grads = jax.value_and_grad(share)(params)
        return GlobalLoss(lax.pmean(value, axis_name), {}), lax.pmean(grads, axis_name)

    return fn


def test_a_constant_ratio_is_explained():
    message = (
        r"4 of 5 gradient leaves differ at rtol=1e-05; worst params\['params'\].* "
        r"\([\d, ]+\): ratio 2.000 on 2 ranks. A ratio equal to the number of ranks means the "
        r"gradient was summed twice."
    )
    arguments = (loss_fn, network_params(), batch_of(np.arange(4)), [(3, 1)])
    with pytest.raises(ParityError, match=message) as caught:
        check_gradients(*arguments, engines=["shard_map"], gradient=summed)
    assert caught.value.report.worst.ratio == pytest.approx(2.0)
    # and the same spelling is right without the check
    check_gradients(*arguments, engines=["shard_map_unchecked", "pmap", "vmap"], gradient=summed)


def test_a_gradient_of_nan_is_a_difference():
    def poisoned(loss_fn, **options):
        right = value_and_grad(loss_fn, **options)

        def fn(params, batch):
            loss, grads = right(params, batch)
            return loss, jax.tree.map(lambda g: g * jnp.nan, grads)

        return fn

    with pytest.raises(ParityError, match="4 of 5 gradient leaves differ"):
        check_gradients(
            loss_fn,
            network_params(),
            batch_of(np.arange(4)),
            [(3, 1)],
            engines=["jit"],
            gradient=poisoned,
        )


@pytest.mark.parametrize(
    ("splits", "message"),
    [
        ([(3, 2)], r"splits must deal out all 4 rows, got \(3, 2\), which deals out 5"),
        ([(5, -1)], r"splits must deal out all 4 rows, got \(5, -1\)"),
        ([(1,) * 4 + (0,) * 5], r"9 devices wanted on cpu, 8 found"),
    ],
)
def test_splits_that_cannot_be_are_refused(splits, message):
    with pytest.raises(ValueError, match=message):
        check_gradients(loss_fn, network_params(), batch_of(np.arange(4)), splits)


def test_data_without_weights_are_refused():
    with pytest.raises(TypeError, match="batch must be a Batch, got tuple"):
        check_gradients(loss_fn, network_params(), (X, Y), [(3, 1)])


# --- what a difference means ----------------------------------------------------------------------


def scaled(factor):
    """Our gradient, times what a factor of (ranks, microbatches) makes of it."""

    def make(loss_fn, *, axis_name, microbatches, coefficients):
        ours = value_and_grad(loss_fn, axis_name=axis_name, microbatches=microbatches)

        def fn(params, batch):
            loss, grads = ours(params, batch)
            ranks = 2 if axis_name is None else lax.axis_size(axis_name)
            return loss, jax.tree.map(lambda g: g * factor(ranks, microbatches), grads)

        return fn

    return make


RATIOS = {
    "equal to the number of ranks means": lambda W, K: W,
    "of one over the number of ranks means": lambda W, K: 1 / W,
    "equal to the number of microbatches means": lambda W, K: K,
    "of one over the number of microbatches means": lambda W, K: 1 / K,
    "equal to ranks times microbatches means": lambda W, K: W * K,
    "of one over ranks times microbatches means": lambda W, K: 1 / (W * K),
}


def square_loss(w, batch):
    return weighted_sum((w - batch.data) ** 2, batch.weights)


@pytest.mark.parametrize("meaning", RATIOS)
def test_each_constant_ratio_has_its_meaning(meaning):
    with pytest.raises(ParityError, match=f"on 2 ranks of 3 microbatches. A ratio {meaning}"):
        check_gradients(
            square_loss,
            np.float32(0.5),
            Batch.of(np.float32([1, 2, 4, 8])),
            [(3, 1)],
            engines=["vmap"],
            microbatches=3,
            gradient=scaled(RATIOS[meaning]),
        )


def on_each_leaf(**factors):
    """Our gradient, leaves and loss each times a factor of its own."""

    def make(loss_fn, **options):
        ours = value_and_grad(loss_fn, **options)

        def fn(params, batch):
            loss, grads = ours(params, batch)
            scaled = {name: grad * factors.get(name, 1.0) for name, grad in grads.items()}
            return loss.value * factors.get("loss", 1.0), scaled

        return fn

    return make


def mean_of_local_means(loss_fn, *, axis_name, **_):
    def fn(params, batch):
        return lax.pmean(jax.value_and_grad(lambda p: loss_fn(p, batch).mean())(params), axis_name)

    return fn


VECTORS = {"a": np.float32(X[0]), "b": np.float32(X[1])}
SCALARS = {"a": np.float32(0.5), "b": np.float32(0.25)}


def of_two_leaves(params, batch):
    a, b = (jnp.broadcast_to(params[name], batch.data.shape) for name in ("a", "b"))
    out = jnp.tanh(jnp.sum(batch.data * a, -1, keepdims=True)) + batch.data * b
    return weighted_sum(jnp.sum(out**2, -1), batch.weights)


CONSTANT = "A constant ratio means that the denominator is wrong and the rows' weights are right"
MEANINGS = {
    # what is in it; parameters, gradient on trial, what is said
    "weights of rows, though the loss is worst": (
        VECTORS, mean_of_local_means, "Rows count by other weights"),
    "weights of rows, in single numbers": (
        SCALARS, mean_of_local_means, "Rows count by other weights"),
    "weights of rows, in one number": (
        {"a": SCALARS["a"], "b": VECTORS["b"]}, mean_of_local_means, "Rows count by other weights"),
    "a denominator": (VECTORS, on_each_leaf(a=1.4, b=1.4, loss=1.4), CONSTANT),
    "a denominator of the gradient": (VECTORS, on_each_leaf(a=1.4, b=1.4), CONSTANT),
    "a denominator, and another of the loss": (
        VECTORS, on_each_leaf(a=1.4, b=1.4, loss=3), CONSTANT),
    "a denominator of single numbers": (SCALARS, on_each_leaf(a=1.4, b=1.4), CONSTANT),
    "the loss alone": (VECTORS, on_each_leaf(loss=1.4), "A single number always has a ratio: loss"),
    "a single number": (
        SCALARS, on_each_leaf(a=1.4), r"A single number always has a ratio: params\['a"),
    "one leaf": (VECTORS, on_each_leaf(a=1.4), "A constant ratio of some leaves, where others are"),
    "one leaf thrown away": (VECTORS, on_each_leaf(a=0), "A constant ratio of some leaves"),
    "each leaf": (VECTORS, on_each_leaf(a=1.4, b=3), "A constant ratio for each leaf, but not one"),
}  # fmt: skip


@pytest.mark.parametrize("case", MEANINGS)
def test_what_a_ratio_means_is_judged_by_leaves_that_can_tell(case):
    params, gradient, said = MEANINGS[case]
    batch = Batch.of(X[:4].astype(np.float32))
    arguments = (of_two_leaves, params, batch, [(3, 1)])
    with pytest.raises(ParityError, match=said):
        check_gradients(*arguments, engines=["vmap"], gradient=gradient)


def test_a_mean_of_local_means_of_a_single_number_is_not_said_to_weigh_rows_rightly():
    arguments = (square_loss, np.float32(0.5), Batch.of(np.float32([1, 2, 4, 8])), [(3, 1)])
    with pytest.raises(ParityError, match="A single number always has a ratio: ") as caught:
        check_gradients(*arguments, engines=["vmap"], gradient=mean_of_local_means)
    assert "weights are right" not in str(caught.value)


def test_a_ratio_that_is_not_constant_names_the_leaf_and_says_so():
    def one_leaf(loss_fn, **options):
        ours = value_and_grad(loss_fn, **options)

        def fn(params, batch):
            loss, grads = ours(params, batch)
            grads["params"]["Dense_0"]["kernel"] *= jnp.linspace(1.0, 2.0, 15).reshape(5, 3)
            return loss, grads

        return fn

    message = (
        r"1 of 5 gradient leaves differ .* worst params\['params'\]\['Dense_0'\]\['kernel'\] "
        r"\(5, 3\): no constant ratio on 2 ranks. Rows count by other weights"
    )
    with pytest.raises(ParityError, match=message):
        check_gradients(
            loss_fn,
            network_params(),
            batch_of(np.arange(4)),
            [(3, 1)],
            engines=["vmap"],
            gradient=one_leaf,
        )


def test_float64_by_request_leaves_jax_as_it_was():
    assert not jax.config.jax_enable_x64
    report = check_gradients(
        loss_fn, network_params(), batch_of(np.arange(4)), [(3, 1)], engines=["vmap"], float64=True
    )
    assert {each.rtol for each in report.differences} == {1e-12}
    assert not jax.config.jax_enable_x64


def test_a_loss_that_falls_back_to_float32_is_told_apart_from_a_wrong_one():
    def single(params, batch):
        x, y = batch.data
        out = NETWORK.apply(jax.tree.map(jnp.float32, params), jnp.float32(x))
        return weighted_sum(jnp.sum((out - y) ** 2, axis=-1), batch.weights)

    with pytest.raises(ParityError, match="A difference this small is float32's rounding"):
        check_gradients(
            single, network_params(), batch_of(np.arange(7)), [(4, 3)], engines=["vmap"],
            float64=True,
        )  # fmt: skip
    check_gradients(
        single, network_params(), batch_of(np.arange(7)), [(4, 3)], engines=["vmap"],
        float64=True, rtol=1e-5,
    )  # fmt: skip


@pytest.mark.parametrize("float64", [False, True])
def test_a_gradient_that_cancels_to_rounding_is_equal(float64):
    def normalised(params, batch):
        """A bias before a normalisation: its gradient is rounding and nothing else."""
        x, y = batch.data
        out = x @ params["w"] + params["bias"]
        out = (out - out.mean(axis=-1, keepdims=True)) / out.std(axis=-1, keepdims=True)
        return weighted_sum(jnp.sum((out - y) ** 2, axis=-1), batch.weights)

    params = {"w": np.float32(X[:4, :3]), "bias": np.float32(0.7)}
    report = check_gradients(
        normalised,
        params,
        batch_of(np.arange(40)),
        [(23, 17)],
        engines=["vmap"],
        microbatches=2,
        float64=float64,
    )
    assert {each.leaf for each in report.differences} == {"loss", "params['bias']", "params['w']"}


@pytest.mark.parametrize("seed", range(2))
def test_a_leaf_that_cancels_within_each_row_in_bfloat16_is_equal(seed):
    def normalised(params, batch):
        x, y = batch.data
        out = x @ params["w"] + params["bias"]
        out = (out - out.mean(axis=-1, keepdims=True)) / out.std(axis=-1, keepdims=True)
        return weighted_sum(jnp.sum((out - y) ** 2, axis=-1), batch.weights)

    rng = np.random.default_rng(seed)
    params = {"w": rng.normal(size=(4, 3)).astype(jnp.bfloat16), "bias": jnp.bfloat16(0.7)}
    batch = Batch.of((X[:12].astype(jnp.bfloat16), Y[:12].astype(jnp.bfloat16)))
    options = {"engines": ["vmap"], "microbatches": 2}
    report = check_gradients(normalised, params, batch, [(7, 5)], **options)
    assert report.worst.equal
    with pytest.raises(ParityError, match=r"worst params\['w'\]"):
        check_gradients(
            normalised, params, batch, [(7, 5)], **options, gradient=scaled(lambda W, K: 1.1)
        )


def test_a_report_prints_a_table_of_its_leaves():
    report = check_gradients(
        loss_fn, network_params(), batch_of(np.arange(4)), [(3, 1), (4, 0)], engines=["vmap"]
    )
    lines = str(report).splitlines()
    assert lines[0].split() == ["leaf", "difference", "allowed", "ratio", "where"]
    assert [line.split()[0] for line in lines[1:]] == [each.leaf for each in report.by_leaf()]
    assert len(lines) == 6
    assert [(each.split, each.engine) for each in report.by_run()] == [
        ((3, 1), "vmap"),
        ((4, 0), "vmap"),
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"engines": ["jit", "xmap"]}, r"engines must be a list of some of jit, .*'xmap'"),
        ({"engines": []}, r"engines must be a list of some of .* got \[\]"),
        ({"engines": "jit"}, "engines must be a list of some of .* got 'jit'"),
        ({"splits": []}, "splits must name at least one split, got none"),
        ({"microbatches": 0}, r"microbatches must be an integer in \[1, 2\*\*31\], got 0"),
    ],
)
def test_a_check_that_would_compare_nothing_is_refused(options, message):
    arguments = {"splits": [(3, 1)]} | options
    with pytest.raises(ValueError, match=message):
        check_gradients(loss_fn, network_params(), batch_of(np.arange(4)), **arguments)


def test_a_reference_that_is_not_finite_is_refused():
    def poisoned(params, batch):
        return weighted_sum(jnp.log(-jnp.abs(batch.data[0][:, 0])), batch.weights)

    with pytest.raises(ValueError, match=r"must be finite on one device .* at loss"):
        check_gradients(poisoned, network_params(), batch_of(np.arange(4)), [(3, 1)])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda grads: grads["params"], "trees of one structure however the rows are split"),
        (
            lambda grads: jax.tree.map(lambda g: g[None], grads),
            r"leaves of one shape .* got \(1, 3\) for \(3,\) at params",
        ),
    ],
)
def test_a_gradient_of_another_structure_or_shape_is_refused(change, message):
    def changed(loss_fn, **options):
        ours = value_and_grad(loss_fn, **options)

        def fn(params, batch):
            loss, grads = ours(params, batch)
            return loss, change(grads)

        return fn

    with pytest.raises(ValueError, match=message):
        check_gradients(
            loss_fn,
            network_params(),
            batch_of(np.arange(4)),
            [(3, 1)],
            engines=["vmap"],
            gradient=changed,
        )


@pytest.mark.parametrize("rtol", [-1e-5, 1.0, float("nan")])
def test_a_tolerance_that_tells_nothing_is_refused(rtol):
    batch = Batch.of(np.arange(4.0))
    one = np.ones((1, 1, 1))
    for name, call in {
        "check_gradients": lambda: check_gradients(loss_fn, 1.0, batch, [(3, 1)], rtol=rtol),
        "check_additive": lambda: check_additive(loss_fn, 1.0, batch, rtol=rtol),
        "effective_weights": lambda: effective_weights(np.ones(2), np.eye(2), rtol=rtol),
        "diagnose_weights": lambda: diagnose_weights(one, one, rtol=rtol),
        "diagnose_step": lambda: diagnose_step(
            lambda w, _: w, 1.0, batch, loss_of_example=lambda w, x: w * x, ranks=1, rtol=rtol
        ),
    }.items():
        with pytest.raises(ValueError, match=rf"^{name}: rtol must be in \[0, 1\), got {rtol:g}"):
            call()
    with pytest.raises(TypeError, match=r"check_gradients: rtol must be a number .* got '1e-5'"):
        check_gradients(loss_fn, 1.0, batch, [(3, 1)], rtol="1e-5")


def test_a_tolerance_of_zero_compares_bit_for_bit():
    def plain(w, batch):
        return weighted_sum(w * batch.data, batch.weights)

    batch = Batch.of(np.float32([1, 2, 3, 4]))
    report = check_gradients(plain, np.float32(1), batch, (2, 2), engines=["vmap"], rtol=0)
    assert report.worst.excess == 0
    options = {"engines": ["pmap"], "rtol": 0, "gradient": local_mean}
    with pytest.raises(ParityError, match="differ at rtol=0"):
        check_gradients(plain, np.float32(1), batch, (3, 1), **options)
    check_additive(plain, np.float32(1), batch, (2, 2))  # one split, as it is


def test_complex_gradients_are_compared_whole():
    def loss(w, batch):
        return weighted_sum(jnp.abs(w - batch.data) ** 2, batch.weights)

    right = {"params": np.array([1 + 2j, 3 - 1j])}
    options = {
        "split": (1,),
        "engine": "vmap",
        "rtol": None,
        "caller": "test",
        "sizes": {"params": 3.0},
    }
    (same,) = compare(right, right, **options)
    (other,) = compare({"params": right["params"].real.astype(complex)}, right, **options)
    assert same.equal
    assert not other.equal


# --- chex's stand-in for pmap ---------------------------------------------------------------------


@pytest.mark.parametrize("microbatches", [1, 2])
def test_ranks_faked_by_chex_have_one_devices_gradients(microbatches):
    report = check_gradients(
        loss_fn,
        network_params(),
        batch_of(np.arange(11)),
        [(3, 1) + (1,) * 7],  # nine ranks, more than there are devices
        engines=["fake_pmap"],
        microbatches=microbatches,
        float64=True,
    )
    assert {each.engine for each in report.differences} == {"fake_pmap"}
    assert len(report.differences) == 5
    assert jax.pmap.__module__.startswith("jax")  # what was patched is put back


def right_on_the_first_rank_alone(loss_fn, **options):
    ours = value_and_grad(loss_fn, **options)

    def fn(params, batch):
        loss, grads = ours(params, batch)
        wrong = 1.0 + lax.axis_index("data")
        return loss, jax.tree.map(lambda g: g * wrong, grads)

    return fn


def test_a_gradient_that_differs_from_rank_to_rank_is_seen_by_the_fake_alone():
    arguments = (loss_fn, network_params(), batch_of(np.arange(4)), [(3, 1)])
    options = {"gradient": right_on_the_first_rank_alone}
    check_gradients(*arguments, engines=["pmap"], **options)  # which hands out the first rank's
    with pytest.raises(ParityError, match=r"4 of 5 gradient leaves differ .* ratio 2.000"):
        check_gradients(*arguments, engines=["fake_pmap"], **options)


def test_the_mean_of_local_means_fails_under_the_fake_too():
    def local_mean(loss_fn, **_):
        def fn(params, batch):  # as pmap code has it: nothing to make varying
            value, grads = jax.value_and_grad(lambda p: loss_fn(p, batch).mean())(params)
            return GlobalLoss(lax.pmean(value, "data"), {}), lax.pmean(grads, "data")

        return fn

    with pytest.raises(ParityError, match="5 of 5 gradient leaves differ"):
        check_gradients(
            loss_fn,
            network_params(),
            batch_of(np.arange(4)),
            [(3, 1)],
            engines=["fake_pmap"],
            gradient=local_mean,
        )


# --- rounding, and what it is measured by ---------------------------------------------------------

# A least squares problem solved exactly: rows pull by up to 20, and together by nothing.
LINE = np.arange(12.0)
AROUND = np.array([3.0, -1.0, 4.0, -1.0, 5.0, -9.0, 2.0, -6.0, 5.0, -3.0, 5.0, -4.0])


def line_loss(params, batch):
    x, y = batch.data
    return weighted_sum((params["slope"] * x + params["at"] - y) ** 2, batch.weights)


def at_the_optimum(dtype):
    slope, at = np.polyfit(LINE, AROUND, 1)
    params = {"slope": np.asarray(slope, dtype), "at": np.asarray(at, dtype)}
    return params, Batch.of((LINE.astype(dtype), AROUND.astype(dtype)))


@pytest.mark.parametrize(
    ("dtype", "microbatches", "engines"),
    [
        (np.float32, 1, ["jit", "fake_pmap"]),
        (jnp.bfloat16, 2, ["shard_map", "vmap"]),
    ],
)
def test_a_gradient_of_nothing_but_rounding_is_right(dtype, microbatches, engines):
    params, batch = at_the_optimum(dtype)
    check_gradients(
        line_loss, params, batch, [(7, 5), (1, 11)], engines=engines, microbatches=microbatches
    )


def test_a_float64_gradient_of_nothing_but_rounding_is_right():
    params, batch = at_the_optimum(np.float64)
    check_gradients(
        line_loss, params, batch, [(7, 5), (1, 11)], engines=["jit", "pmap"], float64=True
    )


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_a_wrong_gradient_is_wrong_at_an_optimum_too(dtype):
    params, batch = at_the_optimum(dtype)
    with pytest.raises(ParityError, match="gradient leaves differ"):
        check_gradients(
            line_loss, params, batch, [(1, 11)], engines=["shard_map"], gradient=local_mean
        )


def reduced_in_bfloat16(loss_fn, *, axis_name, microbatches, coefficients):
    """As the wire is made narrow: right, and rounded."""
    ours = value_and_grad(
        loss_fn, axis_name=axis_name, microbatches=microbatches, coefficients=coefficients
    )

    def fn(params, batch):
        loss, grads = ours(params, batch)
        narrow = jax.tree.map(lambda g: g.astype(jnp.bfloat16).astype(g.dtype), grads)
        return loss, narrow

    return fn


@pytest.mark.parametrize("engine", ["jit", "fake_pmap"])
def test_a_reduction_in_bfloat16_has_its_cause_and_a_remedy_that_works(engine):
    arguments = (loss_fn, network_params(), batch_of(np.arange(11)), [(7, 4)])
    options = {"engines": [engine], "gradient": reduced_in_bfloat16}
    message = r"is bfloat16's rounding: .* computes in bfloat16. Allow rtol=([\d.]+), or"
    with pytest.raises(ParityError, match=message) as caught:
        check_gradients(*arguments, **options)
    rtol = float(re.search(message, str(caught.value))[1])
    assert rtol <= 0.02
    check_gradients(*arguments, rtol=rtol, **options)
    params, batch = at_the_optimum(np.float32)
    check_gradients(line_loss, params, batch, [(7, 5)], rtol=rtol, **options)


def test_a_mean_of_means_is_no_rounding_though_something_computes_in_bfloat16():
    def narrow_loss(params, batch):
        x, y = batch.data
        out = NETWORK.apply(jax.tree.map(jnp.bfloat16, params), x.astype(jnp.bfloat16))
        return weighted_sum(jnp.sum((out.astype(y.dtype) - y) ** 2, axis=-1), batch.weights)

    arguments = (narrow_loss, network_params(), batch_of(np.arange(4)), [(3, 1)])
    with pytest.raises(ParityError, match="Rows count by other weights than their own"):
        check_gradients(*arguments, engines=["shard_map"], gradient=local_mean)


def test_sums_that_cancel_add_up():
    params, batch = at_the_optimum(np.float32)
    check_additive(line_loss, params, batch, [(7, 5), (1, 11)])

    def of_the_mean(params, batch):
        x, y = batch.data
        return weighted_sum((params["slope"] * x + params["at"] - y.mean()) ** 2, batch.weights)

    with pytest.raises(ParityError, match="sums do not add up"):
        check_additive(of_the_mean, params, batch, [(1, 11)])


def of_two_sizes(params, batch, part):
    big = jnp.tanh(batch.data @ params["big"])
    return weighted_sum(big + jnp.sin(batch.data @ params["small"]) * part, batch.weights)


def without_the_small(loss_fn, **options):
    """A reduction that throws one leaf's gradient away."""
    ours = value_and_grad(loss_fn, **options)

    def fn(params, batch):
        loss, grads = ours(params, batch)
        return loss, {**grads, "small": 0 * grads["small"]}

    return fn


@pytest.mark.parametrize(
    ("dtype", "rtol", "part"),
    [(np.float32, 1e-2, 1e-3), (np.float32, 0.3, 1e-3), (jnp.bfloat16, None, 0.02)],
)
def test_no_tolerance_hides_a_leaf_whose_gradient_is_thrown_away(dtype, rtol, part):
    params = {name: np.full(4, 0.1, dtype) for name in ("big", "small")}
    loss_of = partial(of_two_sizes, part=part)
    arguments = (loss_of, params, Batch.of(X[:6].astype(dtype)), [(4, 2)])
    options = {"engines": ["vmap"], "rtol": rtol}
    check_gradients(*arguments, **options)
    with pytest.raises(ParityError, match=r"worst params\['small'\] \(4,\)"):
        check_gradients(*arguments, gradient=without_the_small, **options)


def test_a_loss_is_measured_by_itself_and_not_by_its_gradients():
    def steep(w, batch):
        return weighted_sum(1e-3 + 1e4 * (w - batch.data), batch.weights)

    def off(loss_fn, **options):
        ours = value_and_grad(loss_fn, **options)

        def fn(params, batch):
            loss, grads = ours(params, batch)
            return loss.value * 2, grads

        return fn

    batch = Batch.of(np.float32([1, 1, 1, 1]))
    with pytest.raises(ParityError, match=r"worst loss \(\): ratio 2\.000"):
        check_gradients(steep, np.float32(1), batch, (3, 1), engines=["vmap"], gradient=off)


# --- keys, states, auxiliary output and losses of one's own ---------------------------------------


def noisy_loss(params, batch, rng):
    x, y = batch.data
    keys = jax.vmap(jax.random.fold_in, (None, 0))(rng, batch.ids)
    kept = jax.vmap(lambda key: jax.random.bernoulli(key, 0.7, (3,)))(keys)
    return weighted_sum(jnp.sum(kept * (NETWORK.apply(params, x) - y) ** 2, -1), batch.weights)


def test_noise_of_each_rows_own_is_part_of_the_proof():
    check_gradients(
        noisy_loss,
        network_params(),
        batch_of(np.arange(5)),
        [(3, 2)],
        engines=["jit", "shard_map", "fake_pmap"],
        microbatches=2,
        rng=jax.random.key(3),
    )


def test_noise_of_a_whole_rank_fails_it():
    def of_the_rank(params, batch, rng):
        x, y = batch.data
        kept = jax.random.bernoulli(rng, 0.7, y.shape)
        return weighted_sum(jnp.sum(kept * (NETWORK.apply(params, x) - y) ** 2, -1), batch.weights)

    arguments = (of_the_rank, network_params(), batch_of(np.arange(5)), [(3, 2)])
    with pytest.raises(ParityError, match="Rows count by other weights"):
        check_gradients(*arguments, engines=["vmap"], rng=jax.random.key(3))


@pytest.mark.parametrize(
    ("float64", "engines"), [(False, ["jit", "shard_map", "fake_pmap"]), (True, ["vmap"])]
)
def test_keys_in_a_batch_are_dealt_with_their_rows(float64, engines):
    def keyed_loss(params, batch):
        x, keys = batch.data
        noise = jax.vmap(lambda key: jax.random.normal(key, (3,), jnp.float32))(keys)
        return weighted_sum(jnp.sum((NETWORK.apply(params, x) - noise) ** 2, -1), batch.weights)

    keys = jax.random.split(jax.random.key(1), 5)
    batch = Batch.of((X[:5].astype(np.float32), keys))
    report = check_gradients(
        keyed_loss,
        network_params(),
        batch,
        [(3, 2)],
        engines=engines,
        float64=float64,
        rtol=1e-5,
    )
    assert report.worst.equal
    check_additive(keyed_loss, network_params(), batch, [(3, 2)])


def test_a_loss_with_state_and_auxiliary_output_is_compared_without_them():
    def stateful(params, batch, state):
        x, y = batch.data
        losses = jnp.sum((NETWORK.apply(params, x) * state["scale"] - y) ** 2, axis=-1)
        return weighted_sum(losses, batch.weights), {"scale": state["scale"] + 1.0}, losses

    arguments = (stateful, network_params(), batch_of(np.arange(5)), [(3, 2)])
    options = {"state": {"scale": np.float32(2.0)}, "has_aux": True}
    check_gradients(*arguments, engines=["shard_map", "pmap", "fake_pmap"], **options)

    def thrice(loss_fn, **options):
        ours = value_and_grad(loss_fn, **options)

        def fn(params, batch, **state):
            loss, grads = ours(params, batch, **state)
            return loss, jax.tree.map(lambda g: 3 * g, grads)

        return fn

    with pytest.raises(ParityError, match=r"ratio 3\.000"):
        check_gradients(*arguments, engines=["vmap"], gradient=thrice, **options)


def test_a_gradient_with_a_plain_loss_is_compared_by_its_number():
    def plain(loss_fn, *, axis_name, microbatches, coefficients):
        ours = value_and_grad(loss_fn, axis_name=axis_name)

        def fn(params, batch):
            loss, grads = ours(params, batch)
            return loss.value, grads

        return fn

    arguments = (loss_fn, network_params(), batch_of(np.arange(4)), [(3, 1)])
    check_gradients(*arguments, engines=["shard_map", "vmap"], gradient=plain)


def test_a_gradient_that_is_not_called_as_ours_is_refused_in_words():
    arguments = (loss_fn, network_params(), batch_of(np.arange(4)), [(3, 1)])
    with pytest.raises(
        TypeError, match=r"gradient must take \(loss_fn, axis_name, microbatches, coe"
    ):
        check_gradients(*arguments, gradient=jax.value_and_grad)
    with pytest.raises(TypeError, match=r"returns \(loss, gradients\), got a dict of"):
        check_gradients(
            *arguments,
            gradient=lambda loss_fn, **options: lambda params, batch: {"w": params["params"]},
        )


def test_a_factor_that_fits_the_worst_split_alone_is_not_named_as_the_cause():
    def mean_inside(w, batch):
        losses = w * batch.data * batch.weights
        return WeightedSum(losses.mean(), batch.weights.sum())

    batch = Batch.of(np.float32([1, 2, 3, 4, 5, 6]))
    with pytest.raises(ParityError, match=r"ratio 2\.000 on 2 ranks. A ratio that changes with"):
        check_gradients(mean_inside, np.float32(1), batch, [(3, 3), (4, 2)], engines=["vmap"])
