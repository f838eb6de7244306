"""Reductions of totals and weights that people write, as naive functions, and what each is called.

`totals` and `weights` are nested lists [ranks][microbatches]; an entry may be a number, a Fraction
or an array: only +, * and / are used.
"""

import json
from functools import partial
from pathlib import Path

import jax
import numpy as np

CASES = json.loads((Path(__file__).parent / "recorded" / "denominators.json").read_text())["cases"]
PROBE = "probe W=2 GA=3 (separates xW from xGA)"


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


SHAPES = [(1, 1), (1, 3), (2, 1), (2, 2), (3, 2), (1, 2), (4, 2), (5, 3)]
