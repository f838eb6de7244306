"""What orders, plans by tokens and packing cost and give: ours beside others', in the same run.

`python benchmarks/orders.py` needs torch. What is compared is timed in turns, as processor time;
shown are the median of the rounds, their range, and the ratio of the medians.
"""

import sys

import numpy as np
import torch
from budget import pack, pad_by_budget, plan_a_million
from ratios import headed
from sampler import line, timed
from torch.utils.data import WeightedRandomSampler

from jax_ddp_weighting import EpochPlan, grouped_order, mixture_order, weighted_order

DRAWS = 1_000_000


def draws() -> None:
    headed(f"A weighted draw of {DRAWS:,} ids, with replacement")
    for n in (1_000, 1_000_000):
        weights = np.random.default_rng(0).random(n)
        order, share = weighted_order(weights, DRAWS), weights / weights.sum()
        theirs, torchs, ours = timed(
            7,
            lambda epoch, n=n, p=share: np.random.default_rng(epoch).choice(n, DRAWS, p=p),
            lambda epoch, w=weights: list(WeightedRandomSampler(torch.from_numpy(w), DRAWS)),
            lambda epoch, order=order: order(epoch),
        )
        headed(f" n = {n:,}")
        line("numpy Generator.choice", theirs)
        line("torch WeightedRandomSampler, as a list", torchs, theirs)
        line("weighted_order", ours, theirs)


def draws_without_replacement() -> None:
    n = 1_000_000
    weights = np.random.default_rng(0).random(n)
    share = weights / weights.sum()
    headed(f"A weighted draw from {n:,} ids, without replacement")
    for count in (10_000, n):
        order = weighted_order(weights, count, replacement=False)
        theirs, ours = timed(
            5,
            lambda epoch, count=count: np.random.default_rng(epoch).choice(
                n, count, replace=False, p=share
            ),
            lambda epoch, order=order: order(epoch),
        )
        headed(f" {count:,} ids")
        line("numpy Generator.choice", theirs)
        line("weighted_order", ours, theirs)


def batches() -> None:
    n, ranks, rows = 1_000_000, 8, 128
    headed(f"One rank's 100 batches of {rows}, n = {n:,}, {ranks} ranks")
    orders = {
        "mixture_order of three": mixture_order([n - 110_000, 100_000, 10_000], [6, 3, 1], n),
        "weighted_order": weighted_order(np.random.default_rng(0).random(n), n),
    }
    plans = [
        EpochPlan(n, ranks, rows),
        *(EpochPlan.from_order(order, ranks, rows) for order in orders.values()),
    ]

    def read(epoch: int, plan: EpochPlan) -> None:
        for step in range(100):
            plan.batch(epoch, step, ranks=[3])

    timings = timed(7, *(lambda epoch, plan=plan: read(epoch, plan) for plan in plans))
    line("keyed order", timings[0])
    for name, timing in zip(orders, timings[1:], strict=True):
        line(name, timing, timings[0])


def groups() -> None:
    n = 1_000_000
    lengths = np.random.default_rng(0).integers(1, 900, n)
    order = grouped_order(lengths, 1024)
    headed(f"Blocks of similar length, n = {n:,}")
    theirs, ours = timed(
        5,
        lambda epoch: np.argsort(lengths + np.random.default_rng(epoch).random(n)),
        lambda epoch: order(epoch),
    )
    line("numpy argsort of jittered lengths", theirs)
    line("grouped_order, blocks shuffled too", ours, theirs)


def main() -> None:
    print(f"torch {torch.__version__}, numpy {np.__version__}")
    of_orders = (draws, draws_without_replacement, batches, groups)
    parts = {f.__name__: f for f in (*of_orders, pad_by_budget, pack, plan_a_million)}
    for name in sys.argv[1:] or parts:
        parts[name]()


if __name__ == "__main__":
    main()
