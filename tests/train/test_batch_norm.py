"""Batch statistics over accepted rows of all ranks: flax's own layers on those rows alone."""

from functools import cache, partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import regimes
from flax import nnx

from jax_ddp_weighting import BatchNorm, NnxBatchNorm, value_and_grad, weighted_sum

RANKS, ROWS, INPUTS, FEATURES = 4, 6, 3, 4
RNG = np.random.default_rng(5)
X = RNG.normal(2.0, 1.0, size=(RANKS * ROWS, INPUTS))
Y = RNG.normal(size=(RANKS * ROWS, 1))
# ranks of 6, 1, 2 and no accepted rows; one of them counts twice
WEIGHTS = np.array([[1] * 6, [0, 0, 1, 0, 0, 0], [2, 0, 0, 0, 0, 1], [0] * 6]).reshape(-1)


class Network(nn.Module):
    """Swaps the class of its norm, and nothing else."""

    norm: type[nn.BatchNorm] = BatchNorm
    axis_name: str | tuple[str, ...] | None = None

    @nn.compact
    def __call__(self, x, **weights):
        h = nn.Dense(FEATURES)(x)
        h = self.norm(use_running_average=False, momentum=0.75, axis_name=self.axis_name)(
            h, **weights
        )
        return nn.Dense(1)(nn.tanh(h))


class NnxNetwork(nnx.Module):
    def __init__(self, norm=NnxBatchNorm, axis_name=None):
        rngs = nnx.Rngs(0)
        self.first = nnx.Linear(INPUTS, FEATURES, rngs=rngs)
        self.norm = norm(FEATURES, momentum=0.75, axis_name=axis_name, rngs=rngs)
        self.last = nnx.Linear(FEATURES, 1, rngs=rngs)

    def __call__(self, x, **weights):
        return self.last(nnx.tanh(self.norm(self.first(x), **weights)))


def linen_parts(norm=BatchNorm, axis_name=None):
    """Parameters, running averages, and a function of both and the input."""
    model = Network(norm, axis_name)
    variables = jax.jit(Network().init)(jax.random.key(0), jnp.ones((2, INPUTS)))

    def apply(params, stats, x, **weights):
        variables = {"params": params, "batch_stats": stats}
        y, new = model.apply(variables, x, mutable=["batch_stats"], **weights)
        return y, new["batch_stats"]

    return variables["params"], variables["batch_stats"], apply


def nnx_parts(norm=NnxBatchNorm, axis_name=None):
    graph, params, stats = nnx.split(NnxNetwork(norm, axis_name), nnx.Param, nnx.BatchStat)

    def apply(params, stats, x, **weights):
        model = nnx.merge(graph, params, stats)
        return model(x, **weights), nnx.state(model, nnx.BatchStat)

    return nnx.to_pure_dict(params), nnx.to_pure_dict(stats), partial(_pure, apply, params, stats)


def _pure(apply, param_state, stat_state, params, stats, x, **weights):
    param_state, stat_state = (jax.tree.map(lambda v: v, s) for s in (param_state, stat_state))
    nnx.replace_by_pure_dict(param_state, params)
    nnx.replace_by_pure_dict(stat_state, stats)
    y, new = apply(param_state, stat_state, x, **weights)
    return y, nnx.to_pure_dict(new)


PARTS = {"linen": linen_parts, "nnx": nnx_parts}
FLAX = {"linen": nn.BatchNorm, "nnx": nnx.BatchNorm}
OURS = {"linen": BatchNorm, "nnx": NnxBatchNorm}


def in_float64(tree):
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), tree)


@cache
def on_one_device(kind):
    """flax's own layer and a plain mean, on the accepted rows alone, each as often as it weighs."""
    kept = np.repeat(np.arange(len(X)), WEIGHTS)
    params, stats, apply = PARTS[kind](FLAX[kind])

    def loss(params):
        y, new = apply(params, in_float64(stats), jnp.asarray(X[kept]))
        return jnp.mean((y - Y[kept]) ** 2), new

    (value, new), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(in_float64(params))
    return jax.device_get((value, new, gradient))


def in_regime(kind, regime, norm=None, weights=WEIGHTS, name="weights"):
    axis_name = None if regime.startswith("jit") else regimes.axis_of(regime)
    params, stats, apply = PARTS[kind](OURS[kind] if norm is None else norm, axis_name)

    def make(_):
        def loss_fn(params, rows):
            x, y, weights, shaped = rows
            out, new = apply(params[0], params[1], x, **{name: shaped})
            return weighted_sum(jnp.sum((out - y) ** 2, axis=-1), weights), new

        def fn(params, rows):
            stats = params[1]

            def with_stats(params, rows):
                return loss_fn((params, stats), rows)

            gradient_of = value_and_grad(with_stats, axis_name=axis_name, has_aux=True)
            (loss, new), gradient = gradient_of(params[0], rows)
            return loss.value, new, gradient

        return fn

    shaped = weights[:, None] if name == "mask" else weights
    rows = tuple(map(jnp.asarray, (X, Y, weights, shaped)))
    return jax.device_get(regimes.run(regime, RANKS, make, in_float64((params, stats)), rows))


def assert_the_same(found, right):
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(right), strict=True)
    for a, b in pairs:
        scale = max(1.0, np.max(np.abs(b)))
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12 * scale)


@pytest.mark.parametrize(
    ("kind", "regime"),
    [("linen", each) for each in ("jit", "shard_map", "shard_map_unchecked", "pmap", "vmap")]
    + [("linen", each) for each in ("jit_explicit", "shard_map_explicit", "shard_map_two_axes")]
    + [("nnx", each) for each in ("jit", "shard_map", "pmap")],
)
def test_outputs_averages_and_gradients_are_those_of_one_device(kind, regime):
    with jax.enable_x64(True):
        assert_the_same(in_regime(kind, regime), on_one_device(kind))


@pytest.mark.parametrize(("kind", "regime"), [("linen", "shard_map_unchecked"), ("nnx", "pmap")])
def test_flaxs_own_layer_fails_the_same_check(kind, regime):
    with jax.enable_x64(True), pytest.raises(AssertionError, match="rtol=1e-12"):
        assert_the_same(
            in_regime(kind, regime, FLAX[kind], WEIGHTS > 0, "mask"), on_one_device(kind)
        )


def test_fractional_weights_count_as_such():
    with jax.enable_x64(True):
        found = in_regime("linen", "vmap", weights=WEIGHTS * 0.25)
        assert_the_same(found, on_one_device("linen"))


def statistics(kind, norm, ranks, name="weights", **options):
    """Mean and variance that every rank keeps, of one feature, under an axis held by vmap."""
    width = max(map(len, ranks))
    x = np.array([[*rank, *[99.0] * (width - len(rank))] for rank in ranks], np.float32)[..., None]
    accepted = np.array([[j < len(rank) for j in range(width)] for rank in ranks])
    if name == "mask":
        accepted = accepted[..., None]

    def one(x, accepted):
        if kind == "linen":
            layer = norm(use_running_average=False, momentum=0.0, axis_name="data", **options)
            variables = jax.jit(layer.init)(jax.random.key(0), x)
            _, new = layer.apply(variables, x, mutable="batch_stats", **{name: accepted})
            return new["batch_stats"]["mean"], new["batch_stats"]["var"]
        layer = norm(1, momentum=0.0, axis_name="data", rngs=nnx.Rngs(0), **options)
        layer(x, **{name: accepted})
        return layer.mean[...], layer.var[...]

    mean, var = jax.jit(jax.vmap(one, axis_name="data"))(x, accepted)
    assert np.ptp(mean) == np.ptp(var) == 0
    return float(mean[0, 0]), float(var[0, 0])


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("kind", PARTS)
def test_rows_0_and_2_4_6_have_mean_3_and_variance_5(kind, fast):
    ranks = [[0], [2, 4, 6]]
    options = {"use_fast_variance": fast}
    assert statistics(kind, OURS[kind], ranks, **options) == pytest.approx((3, 5), rel=1e-6)
    theirs = statistics(kind, FLAX[kind], ranks, "mask", **options)
    assert theirs[0] == pytest.approx(2)
    if fast:
        assert theirs[1] == pytest.approx(16 / 3)


def test_a_full_rank_and_one_row_have_the_mean_of_rows():
    # flax 2417: uneven ranks give 6 for the mean, where 4 is right
    ranks = [[1, 2, 3], [10]]
    assert statistics("linen", BatchNorm, ranks)[0] == pytest.approx(4)
    assert statistics("linen", nn.BatchNorm, ranks, "mask")[0] == pytest.approx(6)


@pytest.mark.parametrize("kind", PARTS)
def test_a_step_without_weight_keeps_the_running_averages_and_normalises_by_them(kind):
    with jax.enable_x64(True):
        params, stats, apply = PARTS[kind]()
        params = in_float64(params)
        stats = jax.tree.map(lambda leaf: jnp.full(leaf.shape, 2.0), in_float64(stats))

        def loss(params):
            y, new = apply(params, stats, jnp.asarray(X), weights=jnp.zeros(len(X), jnp.int32))
            return jnp.sum(y**2), (y, new)

        (_, (y, new)), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
        jax.tree.map(np.testing.assert_array_equal, new, stats)
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((y, gradient)))


def test_nan_under_weight_0_does_not_reach_the_statistics_or_other_rows():
    norm = BatchNorm(use_running_average=False)
    x = jnp.array([[1.0], [3.0], [jnp.nan]])
    variables = jax.jit(norm.init)(jax.random.key(0), x[:2])

    def apply(x, **weights):
        return norm.apply(variables, x, mutable="batch_stats", **weights)

    y, new = apply(x, weights=jnp.array([1, 1, 0]))
    right, kept = apply(x[:2])
    np.testing.assert_array_equal(y[:2], right)
    jax.tree.map(np.testing.assert_array_equal, new, kept)


OPTIONS = {
    "plain": {},
    "slow variance": {"use_fast_variance": False},
    "features first": {"axis": 1},
    "two feature axes": {"axis": (1, -1)},
    "no scale": {"use_scale": False},
    "no bias": {"use_bias": False, "epsilon": 0.1},
    "bfloat16": {"dtype": jnp.bfloat16},
    "bfloat16 parameters": {"param_dtype": jnp.bfloat16},
}
INPUT = RNG.normal(size=(5, 4, 4)).astype(np.float32)


CASES = [(name, "float32") for name in OPTIONS] + [("plain", "bfloat16"), ("no scale", "bfloat16")]


def assert_as_in_flax(found, right):
    pairs = zip(jax.tree.leaves_with_path(found), jax.tree.leaves_with_path(right), strict=True)
    for (path, ours), (flax_path, flax) in pairs:
        assert (path, ours.dtype, ours.shape) == (flax_path, flax.dtype, flax.shape)
        tolerance = 1e-5 if flax.dtype == jnp.float32 else 2e-2
        ours, flax = np.asarray(ours, float), np.asarray(flax, float)
        np.testing.assert_allclose(ours, flax, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_linen_options_mean_what_they_mean_in_flax(name, dtype):
    def run(norm, x):
        layer = norm(momentum=0.9, **OPTIONS[name])
        variables = layer.init(jax.random.key(0), x, use_running_average=False)
        y, new = layer.apply(variables, x, use_running_average=False, mutable="batch_stats")
        evaluated = layer.apply({**variables, **new}, x, use_running_average=True)
        return variables, y, new, evaluated

    x = jnp.asarray(INPUT, dtype)
    assert_as_in_flax(*(jax.jit(partial(run, norm))(x) for norm in (BatchNorm, nn.BatchNorm)))


@pytest.mark.parametrize(("name", "dtype"), [each for each in CASES if "two" not in each[0]])
def test_nnx_options_mean_what_they_mean_in_flax(name, dtype):
    def run(norm, x):
        layer = norm(4, momentum=0.9, rngs=nnx.Rngs(0), **OPTIONS[name])
        before = nnx.to_pure_dict(nnx.state(layer))
        y = layer(x)
        return before, y, nnx.to_pure_dict(nnx.state(layer)), layer(x, use_running_average=True)

    x = jnp.asarray(INPUT, dtype)
    assert_as_in_flax(*(jax.jit(partial(run, norm))(x) for norm in (NnxBatchNorm, nnx.BatchNorm)))


def test_a_model_that_swaps_the_class_has_the_same_variables():
    variables = [
        jax.jit(Network(norm).init)(jax.random.key(0), jnp.ones((2, INPUTS)))
        for norm in (BatchNorm, nn.BatchNorm)
    ]
    jax.tree.map(np.testing.assert_array_equal, *variables)
    states = [nnx.to_pure_dict(nnx.state(NnxNetwork(n))) for n in (NnxBatchNorm, nnx.BatchNorm)]
    jax.tree.map(np.testing.assert_array_equal, *states)


@jax.jit
def kept_statistics(x, weights):
    norm = BatchNorm(use_running_average=False, momentum=0.0)
    variables = jax.jit(norm.init)(jax.random.key(0), x)
    return norm.apply(variables, x, weights=weights, mutable="batch_stats")[1]["batch_stats"]


@pytest.mark.parametrize(
    "weights",
    [
        np.array([[1, 1, 0], [1, 0, 0]]),
        np.array([[1, 1, 0], [1, 0, 0]])[..., None],
        np.array([[0.5, 0.5, 0], [0.5, 0, 0]]),
    ],
)
def test_positions_have_weights_of_their_own(weights):
    x = RNG.normal(size=(2, 3, 2)).astype(np.float32)
    new = kept_statistics(x, weights)
    kept = x[weights.reshape(2, 3) > 0]
    np.testing.assert_allclose(new["mean"], kept.mean(axis=0), rtol=1e-5)
    np.testing.assert_allclose(new["var"], kept.var(axis=0), rtol=1e-4)


def test_a_weight_per_row_counts_every_position_of_the_row():
    x = RNG.normal(size=(3, 4, 2)).astype(np.float32)
    new = kept_statistics(x, np.array([1, 0, 1]))
    kept = x[[0, 2]].reshape(-1, 2)
    np.testing.assert_allclose(new["mean"], kept.mean(axis=0), rtol=1e-5)


def test_complex_inputs_have_real_variances():
    x = RNG.normal(size=(6, 2)) + 1j * RNG.normal(size=(6, 2))
    norm = BatchNorm(use_running_average=False, momentum=0.0, use_bias=False, use_scale=False)
    x = jnp.asarray(x, jnp.complex64)
    y, _ = norm.apply(jax.jit(norm.init)(jax.random.key(0), x), x, mutable="batch_stats")
    right = (x - x.mean(0, keepdims=True)) / np.std(np.asarray(x), axis=0, keepdims=True)
    np.testing.assert_allclose(y, right, rtol=1e-3)


def test_groups_of_ranks_have_statistics_of_their_own():
    norm = BatchNorm(
        use_running_average=False,
        momentum=0.0,
        axis_name="data",
        axis_index_groups=[[0, 1], [2, 3]],
    )
    x = np.float32([[0, 9], [2, 4], [1, 1], [5, 9]])[..., None]
    weights = np.array([[1, 0], [1, 1], [1, 1], [1, 0]])
    variables = jax.jit(norm.init)(jax.random.key(0), x[0])

    def means(x, weights):
        _, new = norm.apply(variables, x, weights=weights, mutable="batch_stats")
        return new["batch_stats"]["mean"]

    found = jax.pmap(means, "data", devices=jax.devices()[:4])(x, weights)
    np.testing.assert_allclose(found[:, 0], [2, 2, 7 / 3, 7 / 3], rtol=1e-6)


@pytest.mark.parametrize("weights", [(4,), (5, 3), (5, 4, 4), (5, 4, 4, 1)])
def test_weights_of_another_shape_are_refused(weights):
    norm = BatchNorm(use_running_average=False)
    variables = jax.jit(norm.init)(jax.random.key(0), INPUT)
    message = r"BatchNorm: weights must have the shape of the leading axes of x, got weights \("
    with pytest.raises(ValueError, match=message):
        norm.apply(variables, INPUT, weights=np.ones(weights), mutable="batch_stats")


def test_an_axis_that_is_not_mapped_is_named():
    norm = BatchNorm(use_running_average=False, axis_name="data")
    variables = jax.jit(norm.init)(jax.random.key(0), INPUT)
    with pytest.raises(ValueError, match="BatchNorm: axis_name must be an axis mapped here"):
        norm.apply(variables, INPUT, mutable="batch_stats")


@pytest.mark.parametrize("weights", [None, np.ones(2**15, np.int32)])
def test_more_positions_than_int32_counts(weights):
    norm = BatchNorm(use_running_average=False)
    rows = jax.ShapeDtypeStruct((2**15, 256, 256, 1), jnp.bfloat16)
    key = jax.random.key(0)
    out, _ = jax.eval_shape(lambda x: norm.init_with_output(key, x, weights=weights), rows)
    assert out.shape == rows.shape


@pytest.mark.parametrize("weight", [2**19 - 1, 2**19, 2**22])
def test_large_weights_do_not_wrap_around(weight):
    norm = BatchNorm(use_running_average=False, momentum=0.0, use_fast_variance=False)
    x = jnp.arange(4.0)[:, None, None] * jnp.ones((4, 1024, 1))
    variables = jax.jit(norm.init)(jax.random.key(0), x)
    weights = jnp.full((4,), weight)
    _, updates = norm.apply(variables, x, weights=weights, mutable="batch_stats")
    # 4096 terms in float32, in an order of XLA's choice; one that wrapped around would be far off
    np.testing.assert_allclose(updates["batch_stats"]["mean"], [1.5], rtol=1e-5)


def test_groups_of_ranks_are_refused_in_words_where_jax_has_none():
    norm = BatchNorm(
        use_running_average=False, axis_name="data", axis_index_groups=[[0, 1], [2, 3]]
    )
    variables = jax.jit(norm.init)(jax.random.key(0), jnp.ones((2, 3)))

    def make(axis_name):
        return lambda variables, x: norm.apply(variables, x, mutable="batch_stats")[1]

    with pytest.raises(ValueError, match=r"BatchNorm: axis_index_groups must be None where shard_"):
        regimes.run("shard_map", 4, make, variables, np.ones((8, 3), np.float32))


@pytest.mark.parametrize("bad", [-1.0, np.nan, np.inf])
@pytest.mark.parametrize("fast", [True, False])
def test_a_weight_that_cannot_count_leaves_the_step_without_weight(bad, fast):
    x = jnp.array([[[1.0], [2.0]], [[4.0], [8.0]]])  # two ranks of two rows
    norm = BatchNorm(use_running_average=False, axis_name="data", use_fast_variance=fast)
    variables = jax.jit(norm.init)(jax.random.key(0), x[0])

    def kept(weights):
        def apply(x, weights):
            y, changed = norm.apply(variables, x, weights=weights, mutable="batch_stats")
            return y, changed["batch_stats"]["mean"]

        return jax.vmap(apply, axis_name="data")(x, jnp.array(weights))

    y, mean = kept([[1.0, bad], [1.0, 1.0]])
    assert mean.tolist() == [[0], [0]]  # as it was, and on the other rank too
    assert np.isfinite(y).all()
    assert kept([[1.0, 0.0], [1.0, 1.0]])[1].tolist() != [[0], [0]]
