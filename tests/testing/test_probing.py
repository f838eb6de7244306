"""Every convention named by its gradient, no right one misnamed, and what has no name described."""

import re
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import regimes
from jax import lax
from reductions import (
    KNOWN,
    SHAPES,
    everything,
    mean,
    mean_of_nonempty_means,
    on_trial,
    over,
    own_gradients,
    parts,
    rank_token_mean,
    right,
)

from jax_ddp_weighting import (
    diagnose,
    diagnose_weights,
    rank_share,
    value_and_grad,
    weighted_sum,
)
from jax_ddp_weighting.testing.conventions import CONVENTIONS


@pytest.mark.parametrize("key", KNOWN)
def test_each_convention_of_the_recorded_probe_is_named(key):
    name, factor, reduction = KNOWN[key]
    found = diagnose(on_trial(reduction), num_replicas=2, microbatches=3)
    assert (found.convention, found.factor) == (name, factor(2, 3))
    assert found.alternatives == ()
    assert found.right == (name == "global_mean")


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


NEEDS_MICROBATCHES = {"times_microbatches", "divided_by_microbatches", "step_token_mean"}


@pytest.mark.parametrize(("ranks", "microbatches"), SHAPES)
def test_where_names_coincide_the_plainest_is_given_and_the_others_listed(ranks, microbatches):
    for name, factor, reduction in KNOWN.values():
        found = diagnose(on_trial(reduction), num_replicas=ranks, microbatches=microbatches)
        if found.right and microbatches == 1 and name in NEEDS_MICROBATCHES:
            assert name not in found.alternatives  # it could not differ, however many ranks
        else:
            assert name == found.convention or name in found.alternatives
        assert found.factor == pytest.approx(factor(ranks, microbatches))
        if ranks > 1 and microbatches > 1 and ranks != microbatches:
            assert found.convention == name
    for key in ("right", "clamp1 before reduce", "sum_then_rank_mean(no count)"):
        found = diagnose(on_trial(KNOWN[key][2]), num_replicas=ranks, microbatches=microbatches)
        assert found.convention == KNOWN[key][0]


SCHEMES = {
    "mean_of_means": KNOWN["mean_of_all_local_means"][2],
    "rank_token_mean": rank_token_mean,
    "step_token_mean": KNOWN["global_mean_per_microstep_then_mean"][2],
    "sum": lambda t, w: everything(t, w)[0],
}
FACTORS = {  # of totals [ranks][microbatches] -> the factor, its words, its remedy
    "ranks": (lambda t: len(t), "the number of ranks times", "And sum over the ranks once"),
    "microbatches": (
        lambda t: len(t[0]),
        "the number of microbatches times",
        "And leave out the factor of the number of microbatches.",
    ),
    "one over ranks": (
        lambda t: 1 / len(t),
        "1 over the number of ranks times",
        "And add the ranks' gradients instead of averaging them.",
    ),
    "one over microbatches": (
        lambda t: 1 / len(t[0]),
        "1 over the number of microbatches times",
        "And add the microbatches' gradients instead of averaging them.",
    ),
}


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("name", SCHEMES)
def test_equal_numbers_of_ranks_and_microbatches_do_not_make_a_reason_up(name, factor):
    factor_of, words, remedy = FACTORS[factor]

    def reduction(totals, weights):
        return factor_of(totals) * SCHEMES[name](totals, weights)

    whole = on_trial(reduction)
    for number in (2, 3):
        found = diagnose(whole, num_replicas=number, microbatches=number)
        expected = factor_of([[0] * number] * number)
        assert (found.convention, found.factor) == (name, pytest.approx(expected))
        assert found.words.startswith(words)
        assert remedy in found.advice

    def only_two(token_loss, params, tokens, weights):
        assert tokens.shape[:2] == (2, 2)
        return whole(token_loss, params, tokens, weights)

    found = diagnose(only_two, num_replicas=2, microbatches=2)
    either = factor.removeprefix("one over ")
    both = [FACTORS[factor.replace(either, each)] for each in ("ranks", "microbatches")]
    first, second = (each.removesuffix(" times") for _, each, _ in both)
    assert found.words.startswith(f"{first}, or {second}, times the ")
    assert both[0][2] in found.advice
    assert both[1][2].replace("And", "Or") in found.advice
    assert "Other numbers of ranks and microbatches tell which it is." in found.advice


def test_a_batch_of_equal_numbers_leaves_both_reasons():
    weights = np.float64([[[1, 1, 1], [1, 0, 0]], [[1, 1, 0], [1, 1, 1]]])
    counted = 2 * weights / weights.sum(axis=2, keepdims=True) / 4
    found = diagnose_weights(counted, weights)
    assert (found.convention, found.factor) == ("mean_of_means", 2.0)
    assert found.words.startswith("the number of ranks, or the number of microbatches, times the")
    uneven = diagnose_weights(counted[:, :1] * 2, weights[:, :1])
    assert uneven.words.startswith("the number of ranks times the")


def test_what_one_rank_cannot_show_is_said():
    found = diagnose(on_trial(right), num_replicas=1, microbatches=3)
    assert found.alternatives == ("times_ranks", "divided_by_ranks", "rank_token_mean")
    assert "Cannot be told apart here from: times_ranks, divided_by_ranks" in str(found)


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


# --- what looks right and is not ------------------------------------------------------------------


def unguarded(token_loss, params, tokens, weights):
    return jax.grad(lambda p: (token_loss(p, tokens) * weights).sum() / weights.sum())(params)


def unguarded_on_a_rank(token_loss, params, tokens, weights):
    """Every rank's mean times its share: right, but for 0 over 0 on a rank without weight."""
    shares = weights.sum(axis=(1, 2)) / jnp.maximum(weights.sum(), 1e-9)

    def mean_of(params, rank):
        return (token_loss(params, tokens[rank]) * weights[rank]).sum() / weights[rank].sum()

    return sum(shares[r] * jax.grad(mean_of)(params, r) for r in range(len(weights)))


@pytest.mark.parametrize(
    ("gradient_of", "where"),
    [
        (unguarded, "the whole step is empty"),
        (unguarded_on_a_rank, "a whole rank or microbatch is empty"),
    ],
)
def test_a_right_mean_that_is_nan_where_something_is_empty_is_not_right(gradient_of, where):
    found = diagnose(gradient_of, num_replicas=2, microbatches=3)
    assert not found.right
    assert (
        found.words == f"the mean over all weight, but a gradient that is not finite where {where}"
    )
    assert "Guard each division" in found.advice


def test_a_refusal_of_an_empty_step_is_noted_and_no_mistake():
    def refusing(token_loss, params, tokens, weights):
        if not weights.any():
            raise ZeroDivisionError
        return unguarded(token_loss, params, tokens, weights)

    found = diagnose(refusing, num_replicas=2, microbatches=3)
    assert found.right
    assert found.notes == ("it raises ZeroDivisionError where the whole step is empty.",)


@pytest.mark.parametrize("bound", [0.125, 1.0, 20.0])
def test_clipping_of_each_example_depends_on_the_losses(bound):
    def clipped(token_loss, params, tokens, weights):
        own = jax.jacrev(token_loss)(params, tokens)
        own = own / jnp.maximum(jnp.linalg.norm(own, axis=-1, keepdims=True) / bound, 1.0)
        return (own * weights[..., None]).sum(axis=(0, 1, 2)) / jnp.maximum(weights.sum(), 1e-9)

    found = diagnose(clipped, num_replicas=2, microbatches=3)
    assert not found.right
    assert found.words == "counts that depend on the losses"
    assert "of each example" in found.advice


def test_a_gradient_that_ignores_the_loss_it_is_given_is_not_right():
    def own_loss(token_loss, params, tokens, weights):
        del token_loss
        losses = params[tokens]  # what the probes' loss happens to be
        weighted = jax.grad(lambda p: (p[tokens] * weights).sum())(params)
        return weighted / jnp.maximum(weights.sum(), 1e-9) + 0.0 * losses.sum()

    found = diagnose(own_loss, num_replicas=2, microbatches=3)
    assert not found.right
    assert "ignores the loss" in found.words
    assert "Call token_loss" in found.advice


def in_bfloat16(token_loss, params, tokens, weights):
    return on_trial(right)(token_loss, params, tokens, weights).astype(jnp.bfloat16)


def test_a_right_bfloat16_reduction_is_right_at_the_tolerance_that_is_advised():
    found = diagnose(in_bfloat16, num_replicas=2, microbatches=3)
    rtol = float(re.search(r"rtol=([\d.]+)", found.advice)[1])
    assert 0 < rtol < 0.02
    assert diagnose(in_bfloat16, num_replicas=2, microbatches=3, rtol=rtol).right


@pytest.mark.parametrize("key", KNOWN)
def test_bfloat16_hides_no_convention(key):
    name, factor, reduction = KNOWN[key]

    def rounded(*arguments):
        return on_trial(reduction)(*arguments).astype(jnp.bfloat16)

    found = diagnose(rounded, num_replicas=2, microbatches=3, rtol=0.01)
    assert (found.convention, found.factor) == (name, factor(2, 3))


def test_a_tolerance_that_takes_in_several_names_gives_none():
    found = diagnose(on_trial(rank_token_mean), num_replicas=2, microbatches=3, rtol=0.9)
    assert found.convention == "unknown"
    assert found.words == "what a tolerance of 0.9 is too wide to tell"
    assert len(found.alternatives) > 1
    assert "rank_token_mean" in found.alternatives


@pytest.mark.parametrize("rtol", [-0.1, 1.0, float("nan")])
def test_a_tolerance_that_is_none_is_refused(rtol):
    with pytest.raises(ValueError, match=r"diagnose: rtol must be in \[0, 1\)"):
        diagnose(on_trial(right), num_replicas=2, rtol=rtol)


def test_noise_is_told_from_losses_that_matter_by_calling_twice():
    rng = np.random.default_rng(0)

    def noisy(*arguments):
        gradient = on_trial(right)(*arguments)
        return gradient * (1 + 1e-3 * rng.normal(size=gradient.shape))

    found = diagnose(noisy, num_replicas=2, microbatches=3)
    assert "another gradient each time" in found.words
    assert "noise" in found.advice
    assert diagnose(noisy, num_replicas=2, microbatches=3, rtol=0.02).right


def test_a_state_that_is_kept_between_calls_is_told_by_calling_twice():
    kept = {"momentum": 0.0}

    def with_momentum(*arguments):
        kept["momentum"] = 0.9 * kept["momentum"] + on_trial(right)(*arguments)
        return kept["momentum"]

    found = diagnose(with_momentum, num_replicas=2, microbatches=3)
    assert "keeps a state" in found.words


def test_a_state_that_shows_only_in_later_calls_is_no_dependence_on_the_losses():
    calls = []

    def warmed_up(*arguments):  # another gradient from the seventh call on
        calls.append(1)
        return on_trial(right)(*arguments) * (1.0 if len(calls) <= 6 else 2.0)

    assert "keeps a state" in diagnose(warmed_up, num_replicas=2, microbatches=3).words
