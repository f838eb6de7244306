"""Batches by tokens and packed rows: padding, balance, steps and planning, beside other ways.

`python benchmarks/orders.py` runs these; the packer of the package `binpacking` is compared where
it is installed. Lengths are log-normal of sigma 0.8, clipped at 900. Padding is a share of all
tokens that steps pay for; a ratio that is kept is ours over what it stands beside.
"""

import importlib.util
import statistics
import time
from collections.abc import Callable

import numpy as np
from ratios import headed, keep

from jax_ddp_weighting import BudgetPlan, PackedPlan
from jax_ddp_weighting.sampling.shapes import find_least_padding

MEDIAN, LONGEST = 100, 900


def draw_lengths(n: int, seed: int = 0) -> np.ndarray:
    drawn = np.random.default_rng(seed).lognormal(np.log(MEDIAN), 0.8, n)
    return np.clip(drawn.astype(np.int64), 1, LONGEST)


def bucket(lengths: np.ndarray, rows: int, seed: int = 0) -> tuple[float, int, int]:
    """Padding, steps and shapes of the usual bucketing: shuffled, sorted within fifty batches.

    This is what trainers for torch call grouping by length: each batch is padded to its longest.
    """
    order = np.random.default_rng(seed).permutation(len(lengths))
    large = min(max(len(lengths) // (rows * 4), 1), 50) * rows
    paid, shapes = 0, set()
    for start in range(0, len(order), large):
        block = np.sort(lengths[order[start : start + large]])[::-1]
        for first in range(0, len(block), rows):
            paid += rows * int(block[first])
            shapes.add(int(block[first]))
    return 1 - lengths.sum() / paid, -(-len(lengths) // rows), len(shapes)


def pad_by_budget() -> None:
    headed("Padding by budget of tokens")
    form = "  {:<22}{:>9}{:>8}{:>8}{:>10}"
    for n, budget, ranks in ((500, 900, 8), (500, 9000, 8), (1000, 4000, 3), (3000, 9000, 8)):
        headed(f" n = {n:,}, budget {budget:,}, {ranks} ranks")
        print(form.format("", "padding", "steps", "shapes", "balance"))
        lengths = draw_lengths(n, seed=n)
        descending = np.sort(lengths)[::-1]
        for shapes in (8, 16):
            report = BudgetPlan(lengths, ranks, budget, shapes=shapes).padding()
            rows = [(f"ours, {shapes} shapes", report.plan)]
            if shapes == 16:
                rows += [("plain order", report.plain), ("in order of length", report.grouped)]
            for name, each in rows:
                balance = f"{each.balance:.2f}"
                print(form.format(name, f"{each.padding:.1%}", each.steps, each.shapes, balance))
            least = [find_least_padding(descending, shapes, r) for r in (1, ranks)]
            print(
                f"  the best {shapes} lengths leave {least[0]:.1%}; on {ranks} ranks {least[1]:.1%}"
            )
            keep(
                f"padding, {shapes} shapes, to that of the best lengths",
                report.plan.padding / least[0],
            )
        padding, steps, different = bucket(lengths, ranks * (budget // int(lengths.max())))
        print(form.format("usual bucketing", f"{padding:.1%}", steps, different, ""))


def time_of(call: Callable[[int], object], rounds: int = 5) -> list[float]:
    timings = []
    for number in range(rounds + 1):
        start = time.process_time()
        call(number)
        timings.append(time.process_time() - start)
    return timings[1:]


def line(what: str, timing: list[float], n: int) -> float:
    median, low, high = (f(timing) / n * 1e9 for f in (statistics.median, min, max))
    print(f"  {what:<58}{median:8.0f} ns an example ({low:.0f} to {high:.0f})")
    return median


def plan_a_million() -> None:
    n = 1_000_000
    lengths = draw_lengths(n)
    headed(f"Planning, n = {n:,}")
    sorting = line("numpy argsort of the lengths", time_of(lambda _: np.argsort(lengths)), n)
    for ranks, budget in ((8, 900), (8, 9000), (64, 65_536)):
        ours = line(
            f"BudgetPlan, {ranks} ranks, budget {budget:,}, first batch",
            time_of(
                lambda seed, r=ranks, b=budget: BudgetPlan(lengths, r, b, seed=seed).batch(0, 0)
            ),
            n,
        )
        keep(f"BudgetPlan, {ranks} ranks, budget {budget:,}, to argsort", ours / sorting)
    plan = BudgetPlan(lengths, 8, 9000)
    line("all ids of an epoch", time_of(plan.ids_in_order), n)
    steps = plan.steps_per_epoch
    every = time_of(lambda epoch: [plan.batch(epoch, step, [3]) for step in range(1000)])
    print(
        f"  a batch of one of 8 ranks, of {steps:,} steps: {statistics.median(every) * 1e3:.0f} us"
    )
    ours = line(
        "PackedPlan, windows of 1,024, rows of 2,048",
        time_of(lambda seed: PackedPlan(lengths, 8, 8, 2048, seed=seed).steps_per_epoch(0)),
        n,
    )
    keep("PackedPlan, to argsort", ours / sorting)


def pack() -> None:
    headed("Packing: the share of rows that is padding")
    installed = importlib.util.find_spec("binpacking") is not None
    if not installed:
        print("  binpacking is not installed, so not compared: pip install binpacking")
    for n in (500, 1000, 3000, 100_000):
        lengths = draw_lengths(n, seed=n)
        for length in (1024, 2048):
            headed(f" n = {n:,}, rows of {length:,}")
            plan = PackedPlan(lengths, 1, 1, length)
            found = [plan.padding(epoch) for epoch in range(3)]
            least = 1 - lengths.sum() / (-(-lengths.sum() // length) * length)
            print(f"  ours, new in every epoch          {max(found):8.2%}")
            print(f"  as few rows as the tokens fill    {least:8.2%}")
            keep("fill, to the fullest possible", (1 - max(found)) / (1 - least))
            if installed and n < 10_000:  # its time grows with the square
                import binpacking  # pyright: ignore[reportMissingImports]  # optional

                bins = binpacking.to_constant_volume(lengths.tolist(), length)
                theirs = 1 - lengths.sum() / (len(bins) * length)
                print(f"  binpacking, one packing for all   {theirs:8.2%}")
                keep("fill, to binpacking's", (1 - max(found)) / (1 - theirs))
