"""What it costs to bring predictions together: ours beside accelerate's, and beside np.unique.

`python benchmarks/evaluation.py` needs torch and accelerate; it takes some minutes. Two processes
are started on this machine. They gather the same rows, in turns, with `gather_by_id` over JAX's
gloo and with `gather_for_metrics` over torch's. Shown are the median of the rounds, their range,
and the ratio of the medians.

accelerate gathers each batch as it comes, as its documentation has it; the time is that of its
gathers and of joining them at the end, without that of its loader. Ours is one call at the end.
accelerate's rows come in the order of the ranks; ours are by id, each id once, and checked.
"""

import ctypes
import gc
import os
import re
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from ratios import headed, keep

PROCESSES = 2
SIZES = {100_000: 7, 1_000_000: 5, 10_000_000: 3}  # rows, and rounds
ROWS = 1024  # per process and batch


def shown(seconds: list[float]) -> str:
    median, low, high = (f(seconds) * 1e3 for f in (statistics.median, min, max))
    return f"{median:9.1f} ms ({low:.1f} to {high:.1f})"


def line(what: str, seconds: list[float], reference: list[float] | None = None) -> None:
    ratio = ""
    if reference is not None:
        value = statistics.median(reference) / statistics.median(seconds)
        ratio = f"   {value:.1f} times as fast as the first"
        keep(what, 1 / value)
    print(f"  {what:<44}{shown(seconds)}{ratio}", flush=True)


def peak(call) -> int:
    """The most bytes that a call took beside what was there before it."""

    def status(field: str) -> int:
        found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
        return int(found.group(1)) * 1024

    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # or memory that was freed before would be used unseen
    Path("/proc/self/clear_refs").write_text("5")  # forget the highest so far
    before = status("VmRSS")
    call()
    return status("VmHWM") - before


def one_process(rank: int, jax_port: int, torch_port: int) -> None:
    import jax

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_num_cpu_devices", 1)
    jax.distributed.initialize(f"127.0.0.1:{jax_port}", PROCESSES, rank)
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(torch_port),
        "WORLD_SIZE": str(PROCESSES),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "ACCELERATE_USE_CPU": "true",
    }
    import torch
    from accelerate import Accelerator
    from torch.utils.data import DataLoader

    from jax_ddp_weighting import EpochPlan, gather_by_id

    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == PROCESSES

    def theirs(loader, predictions) -> float:
        parts, seconds = [], 0.0
        for ids in loader:
            local = predictions[ids]
            start = time.perf_counter()
            parts.append(accelerator.gather_for_metrics((ids, local)))
            seconds += time.perf_counter() - start
        start = time.perf_counter()
        ids, gathered = (torch.cat(each) for each in zip(*parts, strict=True))
        seconds += time.perf_counter() - start
        assert len(ids) == len(gathered) == len(predictions)
        return seconds

    def ours(steps, num_examples, rows) -> float:
        start = time.perf_counter()
        found = gather_by_id(*steps, num_examples=num_examples)
        seconds = time.perf_counter() - start
        assert len(found) == rows
        return seconds

    def both(n: int, shape: tuple[int, ...], what: str, rounds: int) -> None:
        predictions = np.random.default_rng(0).standard_normal((n, *shape), np.float32)
        plan = EpochPlan(n, PROCESSES, ROWS)
        slots = [plan.batch(0, step, ranks=[rank]) for step in range(plan.steps_per_epoch)]
        steps = (
            [each.ids[0] for each in slots],
            [each.weights[0] for each in slots],
            [predictions[each.ids[0]] for each in slots],
        )
        torch_predictions = torch.from_numpy(predictions)
        loader = accelerator.prepare(DataLoader(range(n), batch_size=ROWS))
        cold = ours(steps, n, n)
        peaks = [peak(lambda: ours(steps, n, n)), peak(lambda: ours(steps, None, n))]
        timings = [[], [], []]
        for _ in range(rounds):
            gc.collect()
            timings[0].append(theirs(loader, torch_predictions))
            timings[1].append(ours(steps, n, n))
            timings[2].append(ours(steps, None, n))
        if rank == 0:
            result = n * (8 + 4 * int(np.prod(shape)))
            headed(f" n = {n:,}, {what} a row, {ROWS} rows per process and batch")
            line("accelerate, gather_for_metrics", timings[0])
            line("gather_by_id, num_examples known", timings[1], timings[0])
            line("gather_by_id, num_examples unknown", timings[2], timings[0])
            known, unknown = (f"{each / result:.2f}" for each in peaks)
            print(f"  the first call took {cold * 1e3:.1f} ms; later ones, beside the inputs,")
            print(f"  {known} and {unknown} times the result's memory", flush=True)

    for n, rounds in SIZES.items():
        both(n, (), "one float32", rounds)
        if n < 10_000_000:  # or the inputs alone fill 2 GB
            both(n, (10,), "ten float32", rounds)
    accelerator.end_training()


def two_processes() -> None:
    headed(f"{PROCESSES} processes gather")
    ports = []
    for _ in range(2):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            ports.append(str(probe.getsockname()[1]))
    running = [
        subprocess.Popen([sys.executable, __file__, str(rank), *ports]) for rank in range(PROCESSES)
    ]
    if max([process.wait() for process in running]):
        sys.exit("benchmarks/evaluation.py: a process failed; its error is above.")


def by_unique(ids, weights, predictions):
    kept = weights > 0
    unique, index = np.unique(ids[kept], return_index=True)
    return unique, predictions[kept][index]


def one_alone() -> None:
    headed("One process puts rows in the order of their ids, one in a hundred of them padding")
    for n, rounds in SIZES.items():
        order = np.random.default_rng(0).permutation(n)
        ids = np.concatenate([order, order[: n // 100]])
        weights = (np.arange(len(ids)) < n).astype(np.int32)
        rows = ids, weights, ids.astype(np.float32)
        timings = alone(rows, n, rounds)
        headed(f" n = {n:,}")
        line("np.unique with return_index, and a take", timings[0])
        line("gather_by_id, num_examples known", timings[1], timings[0])
        line("gather_by_id, num_examples unknown", timings[2], timings[0])


def alone(rows, n: int, rounds: int) -> list[list[float]]:
    from jax_ddp_weighting import gather_by_id

    calls = [
        lambda: by_unique(*rows),
        lambda: gather_by_id(*rows, num_examples=n),
        lambda: gather_by_id(*rows),
    ]
    timings: list[list[float]] = [[] for _ in calls]
    for number in range(rounds + 1):  # the first warms up
        for call, timing in zip(calls, timings, strict=True):
            start = time.perf_counter()
            call()
            if number:
                timing.append(time.perf_counter() - start)
    return timings


if __name__ == "__main__":
    if len(sys.argv) > 1:
        one_process(*map(int, sys.argv[1:]))
    else:
        two_processes()
        one_alone()
