"""Every convention named, no right step misnamed, and what has no name described."""

import itertools
import json
from fractions import Fraction
from functools import cache, partial
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import regimes
from flax.training.train_state import TrainState
from jax import lax

from jax_ddp_weighting import (
    Batch,
    data_mesh,
    diagnose,
    diagnose_step,
    diagnose_weights,
    make_train_step,
    rank_share,
    value_and_grad,
    weighted_sum,
)
from jax_ddp_weighting.testing.conventions import CONVENTIONS, candidates, probes

RECORDED = Path(__file__).parents[1] / "recorded"
CASES = json.loads((RECORDED / "denominators.json").read_text())["cases"]
PROBE = "probe W=2 GA=3 (separates xW from xGA)"


# Naive oracles. `totals` and `weights` are nested lists [ranks][microbatches]; an entry may be a
# number, a Fraction, or an array: only +, * and / are used.
def mean(values):
    values = list(values)
    return sum(values[1:], start=values[0]) / len(values)


def over(total, weight):
    return total / weight if weight else total * 0


def parts(totals, weights):
    return [
        (t, w) for ts, ws in zip(totals, weights, strict=True) for t, w in zip(ts, ws, strict=True)
    ]


def everything(totals, weights):
    pairs = parts(totals, weights)
    return sum((t for t, _ in pairs[1:]), start=pairs[0][0]), sum(w for _, w in pairs)


def right(totals, weights):
    return over(*everything(totals, weights))


def rank_token_mean(totals, weights):
    return mean(right([ts], [ws]) for ts, ws in zip(totals, weights, strict=True))


def transposed(rows):
    return [list(column) for column in zip(*rows, strict=True)]


def mean_of_nonempty_means(totals, weights):
    held = [over(t, w) for t, w in parts(totals, weights) if w]
    return mean(held) if held else right(totals, weights)


def clamped_before_sum(totals, weights):
    total, _ = everything(totals, weights)
    return total / sum(max(w, 1) for _, w in parts(totals, weights))


# name in denominators.json -> (convention, factor for (ranks, microbatches), reduction)
KNOWN = {
    "right": ("global_mean", lambda W, K: 1, right),
    "mean_of_all_local_means": (
        "mean_of_means",
        lambda W, K: 1,
        lambda t, w: mean(over(*pair) for pair in parts(t, w)),
    ),
    "rank_token_mean_then_rank_mean": ("rank_token_mean", lambda W, K: 1, rank_token_mean),
    "global_mean_per_microstep_then_mean": (
        "step_token_mean",
        lambda W, K: 1,
        lambda t, w: rank_token_mean(transposed(t), transposed(w)),
    ),
    "sum_then_rank_mean(no count)": (
        "sum",
        lambda W, K: 1 / W,
        lambda t, w: everything(t, w)[0] / len(t),
    ),
    "sum/local_count_clamped1 (skip empty: mean over nonempty only)": (
        "mean_of_nonempty_means",
        lambda W, K: 1,
        mean_of_nonempty_means,
    ),
    "forgot_W (local_sum/N then rank mean)": (
        "divided_by_ranks",
        lambda W, K: 1 / W,
        lambda t, w: right(t, w) / len(t),
    ),
    "double_W (x W twice)": ("times_ranks", lambda W, K: W, lambda t, w: right(t, w) * len(t)),
    "xGA": ("times_microbatches", lambda W, K: K, lambda t, w: right(t, w) * len(t[0])),
    "divGA": ("divided_by_microbatches", lambda W, K: 1 / K, lambda t, w: right(t, w) / len(t[0])),
    "clamp1 before reduce": ("clamped_weight", lambda W, K: 1, clamped_before_sum),
}


def on_trial(reduction):
    """A reduction of totals and weights as `diagnose` wants it: JAX makes the totals' gradients."""

    def gradient_of(token_loss, params, tokens, weights):
        own = np.asarray(own_gradients(token_loss, params, tokens, weights))
        return reduction(list(own.sum(axis=2)), np.asarray(weights).sum(axis=2).tolist())

    return gradient_of


@partial(jax.jit, static_argnums=0)
def own_gradients(token_loss, params, tokens, weights):
    """`[ranks, microbatches, tokens, parameters]`: each token's own gradient times its weight."""
    return jax.jacrev(lambda params: token_loss(params, tokens) * weights)(params)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("key", KNOWN)
def test_the_reductions_are_those_of_the_recorded_cases(key, case):
    recorded = CASES[case]["values"]
    totals = [[Fraction(each) for each in rank] for rank in recorded["sums"]]
    weights = [[Fraction(each) for each in rank] for rank in recorded["counts"]]
    assert KNOWN[key][2](totals, weights) == Fraction(recorded[key])


@pytest.mark.parametrize("key", KNOWN)
def test_each_convention_of_the_recorded_probe_is_named(key):
    name, factor, reduction = KNOWN[key]
    found = diagnose(on_trial(reduction), num_replicas=2, microbatches=3)
    assert (found.convention, found.factor) == (name, factor(2, 3))
    assert found.alternatives == ()
    assert found.right == (name == "global_mean")


@pytest.mark.parametrize("key", KNOWN)
def test_the_recorded_probe_alone_is_enough_to_name_them(key):
    name, factor, reduction = KNOWN[key]
    ranks = CASES[PROBE]["ranks"]
    width = max(len(micro) for rank in ranks for micro in rank)
    weights = np.zeros((2, 3, width))
    for r, k in itertools.product(range(2), range(3)):
        weights[r, k, : len(ranks[r][k])] = [weight for _, weight in ranks[r][k]]
    # each token has a coordinate of its own
    own = np.eye(weights.size).reshape(*weights.shape, -1) * weights[..., None]
    counted = reduction(list(own.sum(axis=2)), weights.sum(axis=2).tolist())
    found = diagnose_weights(counted.reshape(weights.shape), weights)
    assert (found.convention, found.factor) == (name, factor(2, 3))


def test_every_name_is_given_to_something():
    def padded(token_loss, params, tokens, weights):
        return jax.grad(lambda p: (token_loss(p, tokens) * weights).mean())(params)

    def unweighted(token_loss, params, tokens, weights):
        return jax.grad(lambda p: token_loss(p, tokens).mean())(params)

    for gradient_of in (padded, unweighted):
        found = diagnose(gradient_of, num_replicas=2, microbatches=3)
        assert (found.convention, found.factor) == ("padding_counted", 1.0)
    named = {name for name, _, _ in KNOWN.values()} | {"padding_counted", "unknown"}
    assert named == set(CONVENTIONS)


# Several ways to write one wrong convention -> its name.
VARIANTS = {
    "local counts clamped to 1": (
        "mean_of_means",
        lambda t, w: mean(total / max(weight, 1) for total, weight in parts(t, w)),
    ),
    "local means summed over ranks": (
        "mean_of_means",
        lambda t, w: mean(over(*pair) for pair in parts(t, w)) * len(t),
    ),
    "each rank's nonempty means, then the ranks": (
        "mean_of_nonempty_means",
        lambda t, w: mean(mean_of_nonempty_means([a], [b]) for a, b in zip(t, w, strict=True)),
    ),
    "ranks' means over ranks that hold any weight": (
        "rank_token_mean",
        lambda t, w: mean(
            [right([a], [b]) for a, b in zip(t, w, strict=True) if sum(b)] or [t[0][0] * 0]
        ),
    ),
    "a plain sum": ("sum", lambda t, w: everything(t, w)[0]),
    "the global weight clamped to 1": (
        "clamped_weight",
        lambda t, w: everything(t, w)[0] / max(everything(t, w)[1], 1),
    ),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_of_a_convention_have_its_name(variant):
    name, reduction = VARIANTS[variant]
    assert diagnose(on_trial(reduction), num_replicas=2, microbatches=3).convention == name


SHAPES = [(1, 1), (1, 3), (2, 1), (2, 2), (3, 2), (1, 2), (4, 2), (5, 3)]


@pytest.mark.parametrize(("ranks", "microbatches"), SHAPES)
def test_where_names_coincide_the_plainest_is_given_and_the_others_listed(ranks, microbatches):
    for name, factor, reduction in KNOWN.values():
        found = diagnose(on_trial(reduction), num_replicas=ranks, microbatches=microbatches)
        assert name == found.convention or name in found.alternatives
        assert found.factor == pytest.approx(factor(ranks, microbatches))
        if ranks > 1 and microbatches > 1 and ranks != microbatches:
            assert found.convention == name
    for key in ("right", "clamp1 before reduce", "sum_then_rank_mean(no count)"):
        found = diagnose(on_trial(KNOWN[key][2]), num_replicas=ranks, microbatches=microbatches)
        assert found.convention == KNOWN[key][0]


def test_what_one_rank_cannot_show_is_said():
    found = diagnose(on_trial(right), num_replicas=1, microbatches=3)
    assert found.alternatives == ("times_ranks", "divided_by_ranks", "rank_token_mean")
    assert "Cannot be told apart here from: times_ranks, divided_by_ranks" in str(found)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("microbatches", [1, 2, 3, 4])
def test_candidates_of_different_names_are_equal_or_far_apart(ranks, microbatches):
    # so that a tolerance of 1e-5 leaves no doubt
    laid_out = list(probes(ranks, microbatches).values())
    found = candidates(ranks, microbatches)
    seen = np.array(
        [
            np.concatenate([(each.factor * each.scheme.counted(w)).reshape(-1) for w in laid_out])
            for each in found
        ]
    )
    seen = seen.reshape(len(found), len(laid_out), -1)
    sizes = np.abs(seen).max(axis=-1)[None]
    gaps = np.abs(seen[:, None] - seen[None]).max(axis=-1) / np.where(sizes, sizes, 1.0)
    gaps = gaps.max(axis=-1)
    names = np.array([each.convention for each in found])
    gaps = gaps[names[:, None] != names[None]]
    assert gaps[gaps > 1e-9].min(initial=1.0) > 0.05


# --- right steps ----------------------------------------------------------------------------------


def random_right(seed):
    """A right reduction, written in a way that the seed chooses."""
    rng = np.random.default_rng(seed)
    chunks = int(rng.integers(1, 6))
    scale = 2.0 ** rng.integers(-8, 8)
    style = rng.integers(4)
    dtype = [np.float32, np.float64][rng.integers(2)]

    def gradient_of(token_loss, params, tokens, weights):
        ranks = tokens.shape[0]
        own = np.asarray(own_gradients(token_loss, params, tokens, weights)) * scale
        own = own.reshape(tokens.size, -1).astype(dtype)
        weights = np.asarray(weights).reshape(-1).astype(dtype)
        home = rng.integers(chunks, size=tokens.size)  # another way of cutting the batch up
        held = np.array([weights[home == each].sum() for each in range(chunks)])
        own = np.array([own[home == each].sum(axis=0) for each in range(chunks)])
        if style == 0:  # divided last
            return own.sum(axis=0) / held.sum() / scale
        if style == 1:  # every chunk divided by the global weight, then added in some order
            return sum(own[c] / held.sum() / scale for c in rng.permutation(chunks))
        if style == 2:  # the rank's share, averaged
            return (own / held.sum() * ranks).sum(axis=0) / scale / ranks
        # chunk means, each weighed by what the chunk holds
        share = held / held.sum()
        safe = np.where(held > 0, held, 1.0)
        return sum(own[c] / safe[c] * share[c] for c in range(chunks)) / scale

    return gradient_of


def test_no_right_reduction_of_200_is_misnamed():
    for seed in range(200):
        ranks, microbatches = SHAPES[seed % len(SHAPES)]
        found = diagnose(random_right(seed), num_replicas=ranks, microbatches=microbatches)
        assert (found.convention, found.factor) == ("global_mean", 1.0), seed


@cache
def compiled(regime, ranks, make, token_loss):
    return regimes.prepared(regime, ranks, lambda axis: make(axis)(token_loss))


def in_regime(regime, make):
    """`make(axis_name)(token_loss)` is a gradient function of (params, (tokens, weights) rows)."""

    def gradient_of(token_loss, params, tokens, weights):
        # rows such that the library's microbatch k of a rank is microbatch k of the probe
        rows = tuple(jnp.swapaxes(each, 1, 2).reshape(-1) for each in (tokens, weights))
        return compiled(regime, tokens.shape[0], make, token_loss)(params, rows)

    return gradient_of


def local_sum(token_loss, params, rows):
    return weighted_sum(token_loss(params, rows[0]), rows[1])


def ours(axis_name):
    def make(token_loss):
        fn = value_and_grad(
            lambda params, rows: local_sum(token_loss, params, rows),
            axis_name=axis_name,
            microbatches=3,
        )
        return lambda params, rows: fn(params, rows)[1]

    return make


@pytest.mark.parametrize("regime", regimes.REGIMES)
def test_our_gradient_is_right_in_every_regime(regime):
    found = diagnose(in_regime(regime, ours), num_replicas=2, microbatches=3)
    assert (found.convention, found.factor) == ("global_mean", 1.0)


def then_pmean(share_of):
    """The gradient of a rank's scalar, averaged over the ranks as `pmap` code has always done."""

    def make(axis_name):
        def with_loss(token_loss):
            def fn(params, rows):
                def share(params):
                    return share_of(local_sum(token_loss, params, rows), axis_name)

                return lax.pmean(jax.grad(share)(params), axis_name)

            return fn

        return with_loss

    return make


def textbook(local, axis):
    return local.total * lax.axis_size(axis) / lax.psum(local.weight, axis)


SPELLINGS = {
    "rank_share": (rank_share, "global_mean", "global_mean", 1.0),
    "the textbook rule": (textbook, "times_ranks", "global_mean", 2.0),
    "the mean of local means": (
        lambda local, axis: local.mean(),
        "mean_of_means",
        "mean_of_means",
        2.0,
    ),
    "local totals over the global weight": (
        lambda local, axis: local.total / lax.psum(local.weight, axis),
        "global_mean",
        "divided_by_ranks",
        1.0,
    ),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_one_spelling_has_another_name_under_the_varying_axes_check(spelling):
    share, checked, unchecked, factor = SPELLINGS[spelling]
    found = diagnose(in_regime("shard_map", then_pmean(share)), num_replicas=2)
    assert (found.convention, found.factor) == (checked, factor)
    for regime in ("shard_map_unchecked", "pmap"):
        found = diagnose(in_regime(regime, then_pmean(share)), num_replicas=2)
        assert found.convention == unchecked


# --- what has no name -----------------------------------------------------------------------------


def test_mixtures_of_two_conventions_are_unknown():
    rng = np.random.default_rng(0)
    reductions = [reduction for _, _, reduction in KNOWN.values()]
    for _ in range(40):
        first, second = rng.choice(len(reductions), size=2, replace=False)
        part = rng.uniform(0.05, 0.95)

        def mixture(totals, weights, a=reductions[first], b=reductions[second], part=part):
            return part * a(totals, weights) + (1 - part) * b(totals, weights)

        found = diagnose(on_trial(mixture), num_replicas=2, microbatches=3)
        assert found.convention == "unknown"
        wanted = mixture(
            list(
                (np.eye(found.weights.size).reshape(2, 3, 7, -1) * found.weights[..., None]).sum(2)
            ),
            found.weights.sum(axis=2).tolist(),
        )
        np.testing.assert_allclose(found.counted.reshape(-1), wanted, atol=1e-5 * wanted.max())


def test_a_mixture_names_what_lies_nearest():
    def mixture(totals, weights):
        return 0.99 * right(totals, weights) + 0.01 * rank_token_mean(totals, weights)

    found = diagnose(on_trial(mixture), num_replicas=2, microbatches=3)
    assert found.words == "none of the known conventions, or a mixture"
    assert found.factor is None
    assert any("the nearest is global_mean" in note for note in found.notes)


def test_a_constant_factor_without_a_reason_is_unknown_and_given():
    found = diagnose(on_trial(lambda t, w: right(t, w) * 2.5), num_replicas=2, microbatches=3)
    assert (found.convention, found.factor) == ("unknown", pytest.approx(2.5))
    assert "2.5 times the mean over all weight" in found.words
    both = diagnose(on_trial(lambda t, w: right(t, w) * 6), num_replicas=2, microbatches=3)
    assert (both.convention, both.factor) == ("unknown", 6.0)
    assert both.words.startswith("the number of ranks times the number of microbatches times")


def whole(loss_of):
    def gradient_of(token_loss, params, tokens, weights):
        return jax.grad(lambda p: loss_of(token_loss(p, tokens), weights))(params)

    return gradient_of


UNNAMED = {
    "weights turned into 0 and 1": (
        lambda losses, w: (losses * (w > 0)).sum() / (w > 0).sum(),
        "every weight above 0 for 1",
    ),
    "weights cut to integers": (
        lambda losses, w: (losses * jnp.floor(w)).sum() / jnp.maximum(jnp.floor(w).sum(), 1e-9),
        "weights cut to whole numbers",
    ),
    "divided by the number of weighing tokens": (
        lambda losses, w: (losses * w).sum() / (w > 0).sum(),
        "the weighted losses over the number of tokens that weigh anything",
    ),
    "weighed by the losses themselves": (
        lambda losses, w: (lax.stop_gradient(losses) * losses * w).sum() / w.sum(),
        "counts that depend on the losses",
    ),
    "a log of summed exponentials": (
        lambda losses, w: jnp.log((jnp.exp(losses / 8) * w).sum()),
        "counts that depend on the losses",
    ),
    "a constant": (lambda losses, w: 0.0 * losses.sum(), "a gradient of 0: it ignores its batch"),
}


@pytest.mark.parametrize("name", UNNAMED)
def test_what_has_no_name_is_described(name):
    loss_of, words = UNNAMED[name]
    found = diagnose(whole(loss_of), num_replicas=2, microbatches=3)
    assert (found.convention, found.words) == ("unknown", words)


def test_a_step_that_ignores_its_batch_is_unknown():
    def gradient_of(token_loss, params, tokens, weights):
        return jnp.linspace(0.0, 1.0, params.size)

    found = diagnose(gradient_of, num_replicas=2)
    assert found.convention == "unknown"
    assert found.words == "the same gradient whatever the weights: it ignores its batch"


def test_clipping_is_found_though_small_gradients_pass_it():
    def gradient_of(token_loss, params, tokens, weights):
        gradient = on_trial(right)(token_loss, params, tokens, weights)
        return gradient / jnp.maximum(jnp.linalg.norm(gradient), 1.0)

    found = diagnose(gradient_of, num_replicas=2, microbatches=3)
    assert (found.convention, found.words) == ("unknown", "counts that depend on the losses")
    assert any("it takes the mean over all weight" in note for note in found.notes)
    assert "clipping" in found.advice


def test_a_gradient_of_nan_is_unknown_or_noted():
    never = diagnose(on_trial(lambda t, w: t[0][0] * np.nan), num_replicas=2)
    assert (never.convention, never.words) == ("unknown", "a gradient that is not finite")
    with np.errstate(invalid="ignore"):
        sometimes = diagnose(
            on_trial(lambda t, w: mean(a / np.float32(b) for a, b in parts(t, w))),
            num_replicas=2,
            microbatches=3,
        )
    assert sometimes.convention == "mean_of_means"
    assert sometimes.alternatives == ("mean_of_nonempty_means",)
    assert "the gradient is not finite where some microbatches are empty." in sometimes.notes


def test_bfloat16_is_described_and_not_misnamed():
    def gradient_of(token_loss, params, tokens, weights):
        return on_trial(right)(token_loss, params, tokens, weights).astype(jnp.bfloat16)

    found = diagnose(gradient_of, num_replicas=2, microbatches=3)
    assert found.convention == "unknown"
    assert any("the nearest is global_mean, off by 0.00" in note for note in found.notes)


# --- input ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_replicas": 0}, r"num_replicas must be an integer in \[1, 2\*\*31\], got 0"),
        ({"num_replicas": 2.5}, r"num_replicas must be .* got 2.5 \(float\)"),
        ({"num_replicas": 2, "microbatches": -1}, "microbatches must be .* got -1"),
    ],
)
def test_numbers_below_one_are_refused(options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        diagnose(on_trial(right), **options)


def test_a_gradient_of_another_structure_is_refused():
    def with_loss(token_loss, params, tokens, weights):
        return 1.0, jnp.zeros_like(params)

    def per_rank(token_loss, params, tokens, weights):
        return jnp.zeros((2, params.size))

    with pytest.raises(ValueError, match=r"of shape \(14,\), got tuple of shapes"):
        diagnose(with_loss, num_replicas=2)
    with pytest.raises(ValueError, match=r"got \w+ of shapes \[\(2, 14\)\]"):
        diagnose(per_rank, num_replicas=2)


def test_an_error_in_the_code_on_trial_says_on_which_probe():
    def gradient_of(token_loss, params, tokens, weights):
        if (weights.sum(axis=-1) == 0).any():
            raise ZeroDivisionError("no tokens")
        return on_trial(right)(token_loss, params, tokens, weights)

    with pytest.raises(ZeroDivisionError, match="no tokens") as caught:
        diagnose(gradient_of, num_replicas=2)
    assert caught.value.__notes__ == [
        "diagnose: gradient_of failed on the probe where a whole rank or microbatch is empty."
    ]


# --- what is printed ------------------------------------------------------------------------------


def test_a_diagnosis_prints_name_table_and_remedy():
    found = diagnose(on_trial(KNOWN["mean_of_all_local_means"][2]), num_replicas=2, microbatches=3)
    lines = str(found).splitlines()
    assert lines[0].startswith("mean_of_means, factor 1: the step takes the mean of the means of")
    n = found.weights.sum(axis=-1)
    for r in range(2):
        numbers = lines[3 + r].split("(weight")
        ratios = [float(each.split()[-1]) for each in numbers[:-1]]
        np.testing.assert_allclose(ratios, n.sum() / 6 / n[r], atol=5e-4)
    assert lines[5].startswith("Fix: Add sums and weights over ranks and microbatches and divide")
    assert json.loads(json.dumps(found.as_dict()))["convention"] == "mean_of_means"


def test_a_table_shows_empty_parts_and_padding_that_counts():
    weights = np.array([[[1.0, 1.0], [0.0, 0.0]], [[2.0, 0.0], [0.0, 0.0]]])
    table = str(diagnose_weights(np.full((2, 2, 2), 1 / 8), weights)).splitlines()[2:5]
    assert table[1].split("  ")[-1].strip() == "padding counts"
    assert "0.500 (weight 2)" in table[1]
    assert "0.250 (weight 2, padding)" in table[2]
    right_counts = weights / 4
    assert "empty" in str(diagnose_weights(right_counts, weights))


def test_a_large_table_is_cut():
    found = diagnose(on_trial(right), num_replicas=10, microbatches=8)
    text = str(found)
    assert "and 2 more" in text.splitlines()[2]
    assert "and 2 more ranks" in text


# --- a whole step on its own model and batch ------------------------------------------------------

ROWS = np.random.default_rng(5).normal(size=(12, 40)).astype(np.float32)
ROW_WEIGHTS = np.array([1, 1, 1, 1, 1, 0, 1, 1, 0, 0, 0, 0])
MODEL = {"w": np.linspace(-1, 1, 40, dtype=np.float32), "b": np.float32(0.3)}


def loss_of_example(params, x):
    return jnp.tanh((x @ params["w"]) / 8 + params["b"])


def sgd_step(reduction, *, ranks, microbatches=1, learning_rate=1.0):
    """Somebody's step: each rank's microbatches are runs of its rows."""

    def step(params, batch):
        def totals(params):
            losses = jax.vmap(loss_of_example, (None, 0))(params, batch.data)
            return (losses * batch.weights).reshape(ranks, microbatches, -1).sum(axis=-1)

        own = jax.jacrev(totals)(params)
        held = batch.weights.reshape(ranks, microbatches, -1).sum(axis=-1).tolist()
        gradient = jax.tree.map(lambda leaf: reduction(list(leaf), held), own)
        return jax.tree.map(lambda p, g: p - learning_rate * g, params, gradient)

    return step


def diagnosed(step, weights=ROW_WEIGHTS, **options):
    options = {"ranks": 2, "learning_rate": 1.0, "loss_of_example": loss_of_example} | options
    return diagnose_step(step, MODEL, Batch.of(ROWS, weights), **options)


@pytest.mark.parametrize("key", KNOWN)
def test_a_black_box_step_is_named_by_what_its_rows_counted(key):
    name, factor, reduction = KNOWN[key]
    weights = np.array([1, 1, 0, 0, 0.25, 0, 3, 1, 2, 0, 1, 0.5])
    found = diagnosed(sgd_step(reduction, ranks=2, microbatches=3), weights, microbatches=3)
    assert (found.convention, found.factor) == (name, pytest.approx(factor(2, 3)))


class Network(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(1)(nn.tanh(nn.Dense(6)(x)))[..., 0]


def test_our_own_step_is_right_as_a_black_box_in_a_train_state():
    network = Network()
    params = network.init(jax.random.key(0), ROWS[:1, :8])

    def loss_fn(params, batch):
        return weighted_sum(network.apply(params, batch.data) ** 2, batch.weights)

    train_step = make_train_step(loss_fn, data_mesh(4))

    def step(params, batch):
        fresh = jax.tree.map(jnp.copy, params)  # the step takes its state's arrays away
        state = TrainState.create(apply_fn=None, params=fresh, tx=optax.sgd(1.0))
        return train_step(state, batch)[0].params

    found = diagnose_step(
        step,
        params,
        Batch.of(ROWS[:, :8], ROW_WEIGHTS),
        loss_of_example=lambda params, x: network.apply(params, x[None])[0] ** 2,
        ranks=4,
        learning_rate=1.0,
    )
    assert (found.convention, found.factor) == ("global_mean", 1.0)
    np.testing.assert_allclose(found.counted.reshape(-1), ROW_WEIGHTS / 7, atol=1e-4)


def test_a_gradient_hook_serves_as_well_as_sgd():
    def hook(params, batch):
        after = sgd_step(rank_token_mean, ranks=2)(params, batch)
        return jax.tree.map(lambda p, q: p - q, params, after)

    found = diagnosed(hook, learning_rate=None)
    assert found.convention == "mean_of_means"
    np.testing.assert_allclose(found.counted[0, 0, :5], 1 / 10, atol=1e-5)
    np.testing.assert_allclose(found.counted[1, 0, :2], 1 / 4, atol=1e-5)
    np.testing.assert_allclose(found.counted[1, 0, 2:], 0, atol=1e-5)


def test_rows_are_placed_as_told():
    interleaved = np.arange(12) % 2
    found = diagnosed(sgd_step(right, ranks=2), ranks=interleaved, microbatches=np.zeros(12, int))
    assert found.convention == "global_mean"
    np.testing.assert_array_equal(found.weights[1, 0], ROW_WEIGHTS[1::2])
    found = diagnosed(sgd_step(rank_token_mean, ranks=2), ranks=interleaved)
    assert found.convention == "unknown"  # its ranks are runs of rows


def test_an_even_batch_cannot_tell_and_says_so():
    found = diagnosed(sgd_step(right, ranks=2), np.ones(12, int))
    assert found.convention == "unknown"
    assert found.words == "what this batch is too even to tell"
    assert {"global_mean", "mean_of_means", "padding_counted"} <= set(found.alternatives)
    assert "unequal weights" in found.advice


def test_a_step_that_does_nothing_ignores_its_batch():
    found = diagnosed(lambda params, batch: params)
    assert (found.convention, found.words) == ("unknown", "a gradient of 0: it ignores its batch")


def test_a_step_of_another_optimizer_is_refused():
    def adam_like(params, batch):
        after = sgd_step(right, ranks=2)(params, batch)
        return jax.tree.map(lambda p, q: p - 0.1 * jnp.sign(p - q), params, after)

    with pytest.raises(ValueError, match="Something else is in it: a regulariser, momentum"):
        diagnosed(adam_like)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ranks": 5}, r"ranks must divide the rows \[12\] into equal runs, got 5"),
        ({"microbatches": 4}, r"microbatches must divide the rows \[6, 6\] into equal runs, got 4"),
        ({"ranks": [0, 1]}, r"ranks must be one integer of at least 0 per row, got \[0, 1\]"),
        ({"ranks": [-1] * 12}, "ranks must be one integer of at least 0 per row"),
    ],
)
def test_rows_that_cannot_be_placed_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        diagnosed(sgd_step(right, ranks=2), **options)


def test_a_step_on_bare_arrays_is_refused():
    with pytest.raises(TypeError, match="diagnose_step: batch must be a Batch, got ndarray"):
        diagnose_step(sgd_step(right, ranks=2), MODEL, ROWS, loss_of_example=None, ranks=2)


@pytest.mark.parametrize(
    ("counted", "weights", "message"),
    [
        (np.ones((2, 3)), np.ones((2, 3)), r"must have one shape \[ranks, .* got \(2, 3\)"),
        (np.ones((1, 1, 2)), np.zeros((1, 1, 2)), "must be finite, at least 0, and not all 0"),
        (np.ones((1, 1, 2)), np.array([[[1, -1]]]), "must be finite, at least 0, and not all 0"),
    ],
)
def test_counts_that_cannot_be_named_are_refused(counted, weights, message):
    with pytest.raises(ValueError, match=message):
        diagnose_weights(counted, weights)
