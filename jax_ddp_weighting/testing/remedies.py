"""What mends each convention: words that make a wrong gradient right where they are followed."""

from collections.abc import Sequence

from jax_ddp_weighting.testing.conventions import RIGHT, Match

BY_NAME = {
    "global_mean": "Nothing to mend: every token counts as its weight, once.",
    "mean_of_means": "Add sums and weights over ranks and microbatches and divide once, last, as "
    "value_and_grad does: a mean of means gives every microbatch one vote.",
    "mean_of_nonempty_means": "Add sums and weights over ranks and microbatches and divide once, "
    "last, as value_and_grad does: now every microbatch that is not empty has one vote.",
    "rank_token_mean": "Divide by the weight summed over all ranks (psum), not by the rank's own, "
    "and add the ranks' gradients: now every rank has one vote.",
    "step_token_mean": "Sum the weights of all microbatches before anything is divided, and add "
    "the microbatches' gradients: now every microbatch has one vote.",
    "sum": "Divide by the weight summed over all ranks and microbatches: now the gradient grows "
    "with the batch.",
    "divided_by_ranks": "Sum over the ranks what was divided by the global weight already, or "
    "multiply it by their number before pmean.",
    "times_ranks": "Sum over the ranks once: default shard_map sums the gradient of replicated "
    "parameters by itself, so leave the factor W to rank_share, or use value_and_grad.",
    "times_microbatches": "Leave out the factor of the number of microbatches: the weight of all "
    "of them divides already.",
    "divided_by_microbatches": "Add the microbatches' gradients instead of averaging them: the "
    "weight of all of them divides already.",
    "padding_counted": "Multiply the losses by the weights and divide by the sum of the weights "
    "over all ranks and microbatches, once, not by the number of slots.",
    "clamped_weight": "Divide by the weight as it is, and guard only against exactly 0: now less "
    "weight than the floor divides as the floor.",
    "unknown": "Return weighted_sum(losses, weights) from the loss function and take the gradient "
    "with value_and_grad; then look again.",
}

# With one number for both nobody can say which of them it was.
_EITHER = {
    frozenset({"times_ranks", "times_microbatches"}): "Find where gradients are added that were "
    "divided by the weight of fewer than all, or multiplied by a number: over the ranks (default "
    "shard_map sums the gradient of replicated parameters by itself) or over the microbatches, and "
    "leave that factor out. Returning weighted_sum(losses, weights) and taking the gradient with "
    "value_and_grad mends either; other numbers of ranks and microbatches tell which it is.",
    frozenset({"divided_by_ranks", "divided_by_microbatches"}): "Find where gradients are averaged "
    "that were divided by the weight of all already, over the ranks or over the microbatches, and "
    "add them instead. Returning weighted_sum(losses, weights) and taking the gradient with "
    "value_and_grad mends either; other numbers of ranks and microbatches tell which it is.",
}

# What is to be mended beside the convention itself, by the powers of ranks and of microbatches.
_FACTORS = {
    (1, 0): "And sum over the ranks once: default shard_map sums the gradient of replicated "
    "parameters by itself.",
    (-1, 0): "And add the ranks' gradients instead of averaging them.",
    (0, 1): "And leave out the factor of the number of microbatches.",
    (0, -1): "And add the microbatches' gradients instead of averaging them.",
}


def advise(match: Match, others: Sequence[str] = (), *, reasons: Sequence[Match] = ()) -> str:
    """What mends this convention, and each of the others that it cannot be told apart from.

    Args:
        match: what was found.
        others: the other names that say the same of all that was seen.
        reasons: where its factor may have several, the match by each of them.
    """
    left = {match.convention, *others}
    for names, words in _EITHER.items():
        if names <= left:
            return words
    words = BY_NAME[match.convention]
    if match.scheme is RIGHT or match.convention == "unknown" or match.factor == 1:
        return words
    first, *more = [
        " ".join(_FACTORS[part] for part in _split(each.powers)) for each in reasons or [match]
    ]
    either = [f"Or {each.removeprefix('And ')}" for each in more]
    tell = ["Other numbers of ranks and microbatches tell which it is."] if more else []
    return " ".join([words, first, *either, *tell])


def _split(powers: tuple[int, int]) -> list[tuple[int, int]]:
    ranks, microbatches = powers
    return [part for part in ((ranks, 0), (0, microbatches)) if part != (0, 0)]
