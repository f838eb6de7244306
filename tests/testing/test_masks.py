"""Code that takes masks of 0 and 1, named by what it does with them; floors and other divisors."""

import sys
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reductions import KNOWN, everything, mean, on_trial, over, parts, rank_token_mean, right

from jax_ddp_weighting import CONVENTIONS, diagnose
from jax_ddp_weighting.testing.conventions import WEIGHTS


def slots_counted(token_loss, params, tokens, weights):
    return jax.grad(lambda p: (token_loss(p, tokens) * weights).mean())(params)


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 3), (3, 2), (4, 3)])
def test_all_conventions_are_named_whatever_weights_the_code_takes(ranks, microbatches, weights):
    numbers = {"num_replicas": ranks, "microbatches": microbatches, "weights": weights}
    named = {diagnose(slots_counted, **numbers).convention}
    for name, factor, reduction in KNOWN.values():
        found = diagnose(on_trial(reduction), **numbers)
        assert found.convention == name
        assert found.factor == pytest.approx(factor(ranks, microbatches))
        assert found.alternatives == ()
        named.add(name)
    assert named == set(CONVENTIONS) - {"unknown"}


def of_masks(reduction):
    """What many scripts do: a token is there, or it is not."""

    def gradient_of(token_loss, params, tokens, weights):
        return on_trial(reduction)(token_loss, params, tokens, jnp.where(weights > 0, 1.0, 0.0))

    return gradient_of


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("key", ["mean_of_all_local_means", "xGA", "clamp1 before reduce"])
def test_code_that_knows_masks_alone_is_named_by_what_it_does(key, weights):
    name, factor, reduction = KNOWN[key]
    found = diagnose(of_masks(reduction), num_replicas=2, microbatches=3, weights=weights)
    assert (found.convention, found.factor) == (name, factor(2, 3))
    assert found.words.endswith("of weights turned into 0 and 1") == (weights == "any")


def test_code_that_refuses_fractions_is_probed_with_masks():
    def strict(token_loss, params, tokens, weights):
        if not np.isin(np.asarray(weights), (0, 1)).all():
            raise ValueError("a mask holds 0 and 1")
        return on_trial(right)(token_loss, params, tokens, weights)

    assert diagnose(strict, num_replicas=2, microbatches=3, weights="binary").right
    with pytest.raises(ValueError, match="a mask holds 0 and 1"):
        diagnose(strict, num_replicas=2, microbatches=3)


def test_masks_that_are_right_of_masks_are_right_and_of_weights_are_not():
    numbers = {"num_replicas": 2, "microbatches": 3}
    assert diagnose(of_masks(right), **numbers, weights="binary").right
    found = diagnose(of_masks(right), **numbers)
    assert (found.convention, found.words) == ("unknown", "every weight above 0 for 1")


def test_an_unknown_kind_of_weights_is_refused():
    with pytest.raises(ValueError, match=r"weights must be one of any, binary, got 'mask'"):
        diagnose(on_trial(right), num_replicas=2, weights="mask")


# --- what a right verdict leaves open -------------------------------------------------------------


@pytest.mark.parametrize("weights", WEIGHTS)
def test_a_right_verdict_does_not_list_what_cannot_differ(weights):
    assert diagnose(on_trial(right), num_replicas=2, weights=weights).alternatives == ()
    assert diagnose(on_trial(right), num_replicas=2, microbatches=2).alternatives == ()
    clamped = on_trial(lambda t, w: everything(t, w)[0] / max(everything(t, w)[1], 1))
    found = diagnose(clamped, num_replicas=2, weights=weights)
    # masks hold 1 at least, or nothing
    assert found.convention == {"any": "clamped_weight", "binary": "global_mean"}[weights]
    assert found.right <= (found.alternatives == ())


# --- one number for ranks and microbatches --------------------------------------------------------


def times(number_of):
    return lambda t, w: right(t, w) * number_of(t)


RANKS, MICROBATCHES = len, lambda totals: len(totals[0])
FACTORS = {
    "times_ranks": times(RANKS),
    "times_microbatches": times(MICROBATCHES),
    "divided_by_ranks": times(lambda t: 1 / RANKS(t)),
    "divided_by_microbatches": times(lambda t: 1 / MICROBATCHES(t)),
}


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", FACTORS)
def test_equal_numbers_are_told_apart_by_trying_others(name, size):
    found = diagnose(on_trial(FACTORS[name]), num_replicas=size, microbatches=size)
    assert (found.convention, found.alternatives) == (name, ())
    assert found.factor == pytest.approx(size if name.startswith("times") else 1 / size)


def with_numbers(reduction, allowed):
    def gradient_of(token_loss, params, tokens, weights):
        if tokens.shape[:2] not in allowed:
            raise ValueError(f"made for {allowed}")
        return on_trial(reduction)(token_loss, params, tokens, weights)

    return gradient_of


@pytest.mark.parametrize("name", FACTORS)
def test_where_code_takes_no_other_numbers_both_names_are_left_and_the_remedy_fits_both(name):
    start = name.rsplit("_", 1)[0]
    for reduction in (FACTORS[name], times(lambda t: 2.0 if "times" in name else 0.5)):
        # the second is a number that stands in the code, and moves with none
        allowed = [(2, 2)] if reduction is FACTORS[name] else [(2, 2), (2, 3), (3, 2)]
        gradient_of = with_numbers(reduction, allowed)
        found = diagnose(gradient_of, num_replicas=2, microbatches=2)
        left = {found.convention, *found.alternatives}
        assert left == {f"{start}_ranks", f"{start}_microbatches"}
        assert "over the ranks" in found.advice
        assert "over the microbatches" in found.advice
        assert "value_and_grad mends either" in found.advice


@pytest.mark.parametrize("allowed", [(2, 3), (3, 2)])
def test_one_other_number_is_enough_where_the_factor_moves_with_it(allowed):
    name = "times_microbatches" if allowed == (2, 3) else "times_ranks"
    gradient_of = with_numbers(FACTORS[name], [(2, 2), allowed])
    found = diagnose(gradient_of, num_replicas=2, microbatches=2)
    assert (found.convention, found.alternatives) == (name, ())


def test_a_factor_that_equal_numbers_hide_is_found():
    hidden = times(lambda t: RANKS(t) / MICROBATCHES(t))
    found = diagnose(on_trial(hidden), num_replicas=2, microbatches=2)
    assert not found.right
    assert found.words.startswith("the number of ranks over the number of microbatches times")
    assert "value_and_grad" in found.advice


# --- floors and other divisors --------------------------------------------------------------------


def floored(floor_of, sizes_of=lambda w: [sum(map(sum, w))]):
    """The total over the sum of weights, each of which is raised to a floor."""

    def reduction(totals, weights):
        total, _ = everything(totals, weights)
        return total / sum(max(size, floor_of(weights)) for size in sizes_of(weights))

    return reduction


def of_steps(weights):
    return [sum(column) for column in zip(*weights, strict=True)]


def boxes_of_a_detector(totals, weights):
    """Each rank's total over the boxes of the step averaged over ranks, 1 at least; then a mean."""
    boxes = max(everything(totals, weights)[1] / len(weights), 1)
    return mean(sum(rank[1:], start=rank[0]) / boxes for rank in totals)


def mean_of_floored_microbatches(totals, weights):
    sums = [sum(column[1:], start=column[0]) for column in zip(*totals, strict=True)]
    held = [max(size / len(weights), 1) for size in of_steps(weights)]
    return mean(a / b for a, b in zip(sums, held, strict=True)) / len(weights)


FLOORS = {
    "boxes averaged over ranks": ("clamped_weight", boxes_of_a_detector),
    "ranks": ("clamped_weight", floored(len)),
    "microbatches": ("clamped_weight", floored(lambda w: len(w[0]))),
    "ranks and microbatches": ("clamped_weight", floored(lambda w: len(w) * len(w[0]))),
    "each microbatch over ranks": ("clamped_weight", floored(len, of_steps)),
    "each rank": ("clamped_weight", floored(lambda w: len(w[0]), lambda w: list(map(sum, w)))),
    "means of microbatches": ("step_token_mean", mean_of_floored_microbatches),
}


@pytest.mark.parametrize("floor", FLOORS)
@pytest.mark.parametrize("weights", WEIGHTS)
def test_averages_that_are_raised_to_1_are_named(floor, weights):
    name, reduction = FLOORS[floor]
    found = diagnose(on_trial(reduction), num_replicas=2, microbatches=3, weights=weights)
    assert (found.convention, found.factor) == (name, 1.0)


DIVISORS = {
    "a floor of 8": (floored(lambda w: 8), "clamped_weight", 1.0, "less than 8 divides as that"),
    "a constant": (lambda t, w: everything(t, w)[0] / 50, "sum", 1 / 50, "over 50, whatever"),
    "something added": (
        lambda t, w: everything(t, w)[0] / (everything(t, w)[1] + 0.5),
        "unknown",
        None,
        "their weight and 0.5 more",
    ),
}


@pytest.mark.parametrize("divisor", DIVISORS)
@pytest.mark.parametrize("weights", WEIGHTS)
def test_other_divisors_are_said(divisor, weights):
    reduction, name, factor, words = DIVISORS[divisor]
    found = diagnose(on_trial(reduction), num_replicas=2, microbatches=3, weights=weights)
    assert found.convention == name
    assert found.factor == (factor and pytest.approx(factor, rel=1e-4))
    assert words in found.words


# --- torch ----------------------------------------------------------------------------------------


class Tensor:
    """Stands in for torch's, which the base suite does without."""

    __module__ = "torch"


def calls_the_loss_on_tensors(token_loss, params, tokens, weights):
    return token_loss(Tensor(), Tensor())


def gives_arrays_to_torch(token_loss, params, tokens, weights):
    raise TypeError("sum(): argument 'input' (position 1) must be Tensor, not ArrayImpl")


def goes_backward(token_loss, params, tokens, weights):
    return token_loss(params, tokens).sum().backward()


@pytest.mark.parametrize(
    "gradient_of", [calls_the_loss_on_tensors, gives_arrays_to_torch, goes_backward]
)
def test_a_reduction_in_torch_is_told_of_its_twin(gradient_of, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", ModuleType("torch"))
    with pytest.raises(TypeError, match=r"got a reduction in torch.* diagnose_torch gives it"):
        diagnose(gradient_of, num_replicas=2)


def test_errors_of_other_code_stay_as_they_are(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", ModuleType("torch"))

    def wrong(token_loss, params, tokens, weights):
        return params.missing

    with pytest.raises(AttributeError, match="missing"):
        diagnose(wrong, num_replicas=2)


def test_the_controls_can_fail():
    assert diagnose(on_trial(rank_token_mean), num_replicas=2, weights="binary").right is False
    assert mean(over(*each) for each in parts([[1.0]], [[2.0]])) == 0.5
