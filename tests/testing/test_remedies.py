"""Each remedy, followed literally in the code that it is given for, makes the gradient right."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from reductions import everything, mean, mean_of_nonempty_means, on_trial, over, parts, right

from jax_ddp_weighting import CONVENTIONS, data_mesh, diagnose, value_and_grad, weighted_sum


def add(values):
    values = list(values)
    return sum(values[1:], start=values[0])


def weight_of(w):
    return sum(map(sum, w))


def by_rank(totals, weights):
    return [(add(t), sum(w)) for t, w in zip(totals, weights, strict=True)]


def by_step(totals, weights):
    columns = zip(zip(*totals, strict=True), zip(*weights, strict=True), strict=True)
    return [(add(t), sum(w)) for t, w in columns]


def guarded(weight):
    return weight if weight > 0 else 1.0


# convention -> words of the remedy, code that has it, the same code with the remedy followed
REMEDIES = {
    "mean_of_means": (
        "Add sums and weights over ranks and microbatches and divide once, last",
        lambda t, w: mean(over(*each) for each in parts(t, w)),
        lambda t, w: over(*everything(t, w)),
    ),
    "mean_of_nonempty_means": (
        "Add sums and weights over ranks and microbatches and divide once",
        mean_of_nonempty_means,
        lambda t, w: over(*everything(t, w)),
    ),
    "rank_token_mean": (
        "Divide by the weight summed over all ranks (psum), not by the rank's own, and add",
        lambda t, w: mean(over(*each) for each in by_rank(t, w)),
        lambda t, w: add(total / guarded(weight_of(w)) for total, _ in by_rank(t, w)),
    ),
    "step_token_mean": (
        "Sum the weights of all microbatches before anything is divided, and add",
        lambda t, w: mean(over(*each) for each in by_step(t, w)),
        lambda t, w: add(total / guarded(weight_of(w)) for total, _ in by_step(t, w)),
    ),
    "sum": (
        "Divide by the weight summed over all ranks and microbatches",
        lambda t, w: everything(t, w)[0],
        lambda t, w: everything(t, w)[0] / guarded(weight_of(w)),
    ),
    "sum, averaged over ranks": (
        "And add the ranks' gradients instead of averaging them",
        lambda t, w: mean(total for total, _ in by_rank(t, w)),
        lambda t, w: add(total for total, _ in by_rank(t, w)) / guarded(weight_of(w)),
    ),
    "sum, averaged over microbatches": (
        "And add the microbatches' gradients instead of averaging them",
        lambda t, w: mean(total for total, _ in by_step(t, w)),
        lambda t, w: add(total for total, _ in by_step(t, w)) / guarded(weight_of(w)),
    ),
    "mean_of_means, added up over microbatches": (
        "divide once, last, as value_and_grad does: a mean of means gives every microbatch one "
        "vote. And leave out the factor of the number of microbatches",
        lambda t, w: add(over(*each) for each in parts(t, w)) / len(t),
        lambda t, w: over(*everything(t, w)),
    ),
    "divided_by_ranks": (
        "Sum over the ranks what was divided by the global weight already",
        lambda t, w: mean(total / guarded(weight_of(w)) for total, _ in by_rank(t, w)),
        lambda t, w: add(total / guarded(weight_of(w)) for total, _ in by_rank(t, w)),
    ),
    "divided_by_ranks, the other way": (
        "or multiply it by their number before pmean",
        lambda t, w: mean(total / guarded(weight_of(w)) for total, _ in by_rank(t, w)),
        lambda t, w: mean(len(t) * total / guarded(weight_of(w)) for total, _ in by_rank(t, w)),
    ),
    "times_microbatches": (
        "Leave out the factor of the number of microbatches",
        lambda t, w: len(t[0]) * over(*everything(t, w)),
        lambda t, w: over(*everything(t, w)),
    ),
    "divided_by_microbatches": (
        "Add the microbatches' gradients instead of averaging them",
        lambda t, w: mean(total / guarded(weight_of(w)) for total, _ in by_step(t, w)),
        lambda t, w: add(total / guarded(weight_of(w)) for total, _ in by_step(t, w)),
    ),
    "clamped_weight": (
        "Divide by the weight as it is, and guard only against exactly 0",
        lambda t, w: everything(t, w)[0] / max(weight_of(w), 1),
        lambda t, w: everything(t, w)[0] / guarded(weight_of(w)),
    ),
    "clamped_weight, averaged over ranks first": (
        "Divide by the weight as it is, and guard only against exactly 0",
        lambda t, w: mean(a / max(weight_of(w) / len(w), 1) for a, _ in by_rank(t, w)),
        lambda t, w: mean(a / guarded(weight_of(w) / len(w)) for a, _ in by_rank(t, w)),
    ),
}


@pytest.mark.parametrize("name", REMEDIES)
def test_a_remedy_followed_literally_is_right(name):
    words, wrong, mended = REMEDIES[name]
    found = diagnose(on_trial(wrong), num_replicas=2, microbatches=3)
    assert found.convention == name.split(",")[0]
    assert words in found.advice
    assert diagnose(on_trial(mended), num_replicas=2, microbatches=3).right


def in_shard_map(of_rank):
    compiled = {}

    def gradient_of(token_loss, *arrays):
        if token_loss not in compiled:
            specs = {"in_specs": (P(), P("data"), P("data")), "out_specs": P()}
            fn = jax.shard_map(
                lambda p, t, w: of_rank(lambda q: (token_loss(q, t) * w).sum(), p, w),
                mesh=data_mesh(2),
                **specs,
            )
            compiled[token_loss] = jax.jit(fn)
        return compiled[token_loss](*arrays)

    return gradient_of


def nonzero(weight):
    return jnp.where(weight > 0, weight, 1.0)


def test_ranks_that_were_summed_twice_are_summed_once():
    def twice(total_of, params, weights):
        return lax.psum(jax.grad(total_of)(params), "data") / nonzero(
            lax.psum(weights.sum(), "data")
        )

    def once(total_of, params, weights):  # default shard_map sums by itself
        return jax.grad(total_of)(params) / nonzero(lax.psum(weights.sum(), "data"))

    found = diagnose(in_shard_map(twice), num_replicas=2)
    assert found.convention == "times_ranks"
    assert "Sum over the ranks once: default shard_map sums" in found.advice
    assert diagnose(in_shard_map(once), num_replicas=2).right


def test_local_means_that_were_summed_over_ranks_twice():
    def wrong(total_of, params, weights):
        mean_of = jax.grad(lambda p: total_of(p) / nonzero(weights.sum()))
        return lax.pmean(mean_of(params), "data")

    def mended(total_of, params, weights):
        return jax.grad(total_of)(params) / nonzero(lax.psum(weights.sum(), "data"))

    found = diagnose(in_shard_map(wrong), num_replicas=2)
    assert (found.convention, found.factor) == ("mean_of_means", 2.0)
    assert "And sum over the ranks once: default shard_map sums the gradient" in found.advice
    assert diagnose(in_shard_map(mended), num_replicas=2).right


def slots(loss_of):
    def gradient_of(token_loss, params, tokens, weights):
        def rank(tokens, weights):  # the ranks' gradients are averaged, as always
            own = jax.grad(lambda p: loss_of(token_loss(p, tokens), weights))(params)
            return lax.pmean(own, "data")

        return jax.vmap(rank, axis_name="data")(tokens, weights)[0]

    return gradient_of


def test_padding_that_counted_counts_no_more():
    found = diagnose(slots(lambda losses, w: (losses * w).mean()), num_replicas=2)
    assert found.convention == "padding_counted"
    assert "divide by the sum of the weights over all ranks and microbatches, once" in found.advice
    unweighted = diagnose(slots(lambda losses, w: losses.mean()), num_replicas=2)
    assert unweighted.advice == found.advice

    def mended(token_loss, params, tokens, weights):
        total = jax.grad(lambda p: (token_loss(p, tokens) * weights).sum())(params)
        return total / nonzero(weights.sum())

    assert diagnose(mended, num_replicas=2).right


def test_what_has_no_name_is_right_by_our_own_gradient():
    def nameless(t, w):
        return 0.7 * right(t, w) + 0.3 * mean(over(*each) for each in parts(t, w))

    found = diagnose(on_trial(nameless), num_replicas=2, microbatches=2)
    either = diagnose(  # takes no other numbers, so that one factor has two names
        only_two(lambda t, w: 2.0 * right(t, w)), num_replicas=2, microbatches=2
    )
    assert "weighted_sum(losses, weights)" in found.advice
    assert "weighted_sum(losses, weights)" in either.advice

    def ours(token_loss, params, tokens, weights):
        def loss_fn(params, rows):
            return weighted_sum(token_loss(params, rows[0]), rows[1])

        rows = tokens.reshape(-1), weights.reshape(-1)
        return value_and_grad(loss_fn)(params, rows)[1]

    assert diagnose(ours, num_replicas=2, microbatches=2).right


def only_two(reduction):
    def gradient_of(token_loss, params, tokens, weights):
        assert tokens.shape[:2] == (2, 2)
        return on_trial(reduction)(token_loss, params, tokens, weights)

    return gradient_of


def test_every_name_has_a_remedy_that_was_followed():
    followed = {name.split(",")[0] for name in REMEDIES}
    assert followed | {"times_ranks", "padding_counted", "unknown", "global_mean"} == set(
        CONVENTIONS
    )
