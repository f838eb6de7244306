"""What an epoch's ids cost: ours beside torch's, grain's and plain Python's, in the same run.

`python benchmarks/sampler.py` needs torch and grain; it takes some minutes. What is compared is
timed in turns; shown are the median of the rounds, their range, and the ratio of the medians. The
time is that of the processor, which a busy machine disturbs less; all of it is one thread's.
"""

import resource
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from itertools import count

import grain
import numpy as np
import torch
from ratios import headed, keep
from torch.utils.data import BatchSampler
from torch.utils.data import DistributedSampler as TorchSampler

from jax_ddp_weighting import DistributedSampler, EpochPlan, audit_ids, torch_order

RANKS = 8
EPOCHS = count(1)  # a new one for every call: nothing may come from a cache

Timing = list[float]


def timed(rounds: int, *calls: Callable[[int], object]) -> list[Timing]:
    """Seconds of each call in each round; the calls take turns, and the first round warms up."""
    timings: list[Timing] = [[] for _ in calls]
    for number in range(rounds + 1):
        for call, timing in zip(calls, timings, strict=True):
            epoch = next(EPOCHS)
            start = time.process_time()
            call(epoch)
            if number:
                timing.append(time.process_time() - start)
    return timings


def shown(timing: Timing, per: int = 1, unit: float = 1e-3, name: str = "ms") -> str:
    median, low, high = (f(timing) / per / unit for f in (statistics.median, min, max))
    return f"{median:10.3f} {name} ({low:.3f} to {high:.3f})"


def line(what: str, timing: Timing, reference: Timing | None = None, **unit) -> None:
    ratio = ""
    if reference is not None:
        value = statistics.median(timing) / statistics.median(reference)
        keep(what, value)
        ratio = (
            f"   {value:8.4f} of the first"
            if value > 1e-3
            else f"   1/{1 / value:.0f} of the first"
        )
    print(f"  {what:<46}{shown(timing, **unit)}{ratio}")


def epochs() -> None:
    headed(f"One rank's ids of one epoch as Python ints, {RANKS} ranks")
    for n, rounds in ((10_000, 50), (1_000_000, 9), (10_000_000, 5)):
        samplers = [
            TorchSampler(range(n), RANKS, 3),
            DistributedSampler(n, RANKS, 3),
            DistributedSampler(n, RANKS, 3, order="keyed"),
        ]

        def read(epoch: int, sampler) -> None:
            sampler.set_epoch(epoch)
            list(sampler)

        timings = timed(rounds, *(lambda epoch, s=sampler: read(epoch, s) for sampler in samplers))
        headed(f" n = {n:,}")
        line("torch DistributedSampler", timings[0])
        line("ours, torch order", timings[1], timings[0])
        line("ours, keyed order", timings[2], timings[0])


def orders() -> None:
    headed("The whole order")
    for n, rounds in ((1_000_000, 9), (10_000_000, 5)):
        theirs, ours = timed(
            rounds,
            lambda epoch, n=n: torch.randperm(
                n, generator=torch.Generator().manual_seed(epoch)
            ).tolist(),
            lambda epoch, n=n: torch_order(n, epoch),
        )
        headed(f" n = {n:,}")
        line("torch randperm, tolist", theirs)
        line("torch_order", ours, theirs)


def per_id() -> None:
    n, size, few = 10_000_000, 1_000_000, 3000
    plan = EpochPlan(n, RANKS, 1024)
    dataset = grain.MapDataset.range(n)

    def keyed(epoch: int) -> None:
        plan.slots(epoch, 3, stop=size)

    def sliced(epoch: int) -> None:
        part = dataset[3::RANKS]
        for i in range(few):
            part[i]

    def shuffled(epoch: int) -> None:
        part = dataset[3::RANKS].shuffle(seed=epoch)
        for i in range(few):
            part[i]

    def by_ones(epoch: int) -> None:
        source = DistributedSampler(n, RANKS, 3, seed=epoch, order="keyed").source()
        for i in range(few):
            source[i]

    slicing, shuffling, ours, single = timed(9, sliced, shuffled, keyed, by_ones)
    headed(f"One id, n = {n:,}, {RANKS} ranks")
    nanoseconds = {"unit": 1e-9, "name": "ns"}
    per = {"per": few, **nanoseconds}
    line("grain MapDataset slice", slicing, **per)
    line("grain MapDataset slice and shuffle", shuffling, **per)
    line("ours, keyed order, as arrays", ours, per=size, **nanoseconds)
    line("ours, one by one, as a source for grain", single, **per)
    medians = [
        statistics.median(t) / k for t, k in ((slicing, few), (shuffling, few), (ours, size))
    ]
    keep("ours, keyed order, as arrays, to grain's slice", medians[2] / medians[0])
    keep("ours, keyed order, as arrays, to grain's slice and shuffle", medians[2] / medians[1])
    print(f"  per id, ours is {medians[0] / medians[2]:.0f} times as fast as grain's slice,")
    print(f"  and {medians[1] / medians[2]:.0f} times as fast as its slice and shuffle")


def batching() -> None:
    n, size = 1_000_000, 128
    theirs = TorchSampler(range(n), RANKS, 3)
    plans = [EpochPlan(n, RANKS, size, order=order) for order in ("torch", "keyed")]

    def torchs(epoch: int) -> None:
        theirs.set_epoch(epoch)
        list(BatchSampler(theirs, size, drop_last=False))

    def ours(epoch: int, plan: EpochPlan) -> None:
        for step in range(plan.steps_per_epoch):
            plan.batch(epoch, step, ranks=[3])

    timings = timed(7, torchs, *(lambda epoch, p=plan: ours(epoch, p) for plan in plans))
    headed(f"One rank's batches of {size} of one epoch, n = {n:,}, {RANKS} ranks")
    line("torch BatchSampler over DistributedSampler", timings[0])
    line("EpochPlan.batch, torch order", timings[1], timings[0])
    line("EpochPlan.batch, keyed order", timings[2], timings[0])


def audit_by_hand(ids: list[int], n: int) -> tuple[dict[int, int], list[int]]:
    counts = Counter(ids)
    return {i: c for i, c in counts.items() if c > 1}, [i for i in range(n) if i not in counts]


def auditing() -> None:
    headed("The audit of an epoch in torch's padded order, by slot")
    for n, rounds in ((1_000_001, 7), (10_000_001, 3)):
        plan = EpochPlan(n, RANKS, 1, tail="repeat")
        slots = [plan.slots(0, rank) for rank in range(RANKS)]
        ids, weights = [each.ids for each in slots], [each.weights for each in slots]
        listed = [i for each in ids for i in each.tolist()]
        timings = timed(
            rounds,
            lambda _, ids=listed, n=n: audit_by_hand(ids, n),
            lambda _, ids=ids, n=n: audit_ids(ids, n),
            lambda _, ids=ids, n=n, weights=weights: audit_ids(ids, n, weights=weights),
        )
        headed(f" n = {n:,}")
        unit = {"per": len(listed), "unit": 1e-9, "name": "ns"}
        line("collections.Counter", timings[0], **unit)
        line("audit_ids", timings[1], timings[0], **unit)
        line("audit_ids, with weights", timings[2], timings[0], **unit)


FIRST_BATCH = """
import resource, statistics, time
import numpy as np
from jax_ddp_weighting.sampling.plan import EpochPlan
def used():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
before, times = used(), []
for epoch in range(31):
    start = time.process_time()
    plan = EpochPlan({n}, {ranks}, 1024, seed=epoch)
    plan.batch(epoch, plan.steps_per_epoch // 2, ranks=[{ranks} // 3])
    times.append((time.process_time() - start) * 1e3)
    if epoch == 0:
        memory = used() - before
print(times[0], statistics.median(times[1:]), min(times[1:]), max(times[1:]), memory)
"""


def first_batches() -> None:
    print(
        "The first batch of 1,024 in the middle of an epoch, keyed order, in a process of its own"
    )
    for n, ranks in ((10**9, 1024), (10**12, 65_536)):
        runs = []
        for _ in range(5):
            program = FIRST_BATCH.format(n=n, ranks=ranks)
            out = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
            runs.append([float(number) for number in out.stdout.split()])
        cold, median, low, high, memory = (
            statistics.median(column) for column in zip(*runs, strict=True)
        )
        print(f" n = {n:,}, {ranks:,} ranks")
        print(f"  {'plan and batch, the first of the process':<46}{cold:10.3f} ms")
        print(f"  {'plan and batch, any other':<46}{median:10.3f} ms ({low:.3f} to {high:.3f})")
        print(f"  {'peak memory over the import':<46}{memory:10.1f} MB")


def main() -> None:
    print(f"torch {torch.__version__}, grain {grain.__version__}, numpy {np.__version__}")
    parts = {f.__name__: f for f in (orders, epochs, per_id, batching, auditing, first_batches)}
    for name in sys.argv[1:] or parts:
        parts[name]()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"peak memory of this run {peak:.0f} MB")


if __name__ == "__main__":
    main()
