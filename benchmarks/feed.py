"""What it costs to feed a step: `batches` beside a grain loader and a torch DataLoader.

`python benchmarks/feed.py` needs torch and grain; it takes some minutes. All feed one compiled step
on one CPU device with the same rows, in shuffled order and in turns; an epoch is timed, and ratios
are taken within a round. Shown are the median time per batch, the median of the ratios and the
middle half of them, and the bytes that were copied on the way to the device, over those of the
batch.

- batches: rows are copied once more than they are gathered, so that their owner may write into its
  memory again. On the CPU that copy is the device's memory.
- without its copy: the memory that `fetch` returned is given to JAX as it is. Where JAX can take it
  nothing is copied, and what its owner writes later shows in the batch; where it cannot, it copies.
- refilled: `fetch` gathers into one buffer, over and over. (Without the copy that is wrong; it is
  timed all the same.)
"""

import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import grain
import jax
import jax.numpy as jnp
import numpy as np
import torch
from ratios import headed, keep
from torch.utils.data import DataLoader, TensorDataset

from jax_ddp_weighting import EpochPlan, batches, data_mesh, force_cpu_devices
from jax_ddp_weighting.distributed import placement

ROUNDS = 9
SIZES = {"1 KB": (1 << 10, 1024, 65_536), "1 MB": (1 << 20, 16, 384)}  # a row, a batch, all rows
BOUNDARY = 64


def on_boundary(shape: tuple[int, ...]) -> np.ndarray:
    """Memory that JAX takes as it is."""
    size = int(np.prod(shape)) * 4
    memory = np.zeros(size + BOUNDARY, np.uint8)
    start = -memory.ctypes.data % BOUNDARY
    return memory[start : start + size].view(np.float32).reshape(shape)


@contextmanager
def without_copy() -> Iterator[None]:
    own = placement.copy_aligned
    placement.copy_aligned = lambda rows: np.asarray(rows, placement.device_dtype(rows.dtype))
    try:
        yield
    finally:
        placement.copy_aligned = own


class Feeds:
    """The same rows, by each loader as rows on the device."""

    def __init__(self, rows: np.ndarray, size: int) -> None:
        self.rows, self.size = rows, size
        self.mesh = data_mesh(1)
        self.plan = EpochPlan(len(rows), 1, size)
        self.buffer = on_boundary((size, rows.shape[1]))
        self.device = jax.devices()[0]
        dataset = TensorDataset(torch.from_numpy(rows))
        self.torch = DataLoader(dataset, batch_size=size, shuffle=True)
        source = grain.MapDataset.source(cast(Any, rows))
        self.grain = source.shuffle(seed=0).batch(size, drop_remainder=True)

    def gathered(self, ids: np.ndarray) -> np.ndarray:
        return self.rows[ids]

    def refilled(self, ids: np.ndarray) -> np.ndarray:
        return np.take(self.rows, ids, axis=0, out=self.buffer, mode="clip")

    def ours(self, fetch: Callable[..., Any]) -> Iterator[Any]:
        return (batch.data for batch in batches(self.plan, 0, fetch, self.mesh))

    def of_torch(self) -> Iterator[Any]:
        return (jax.device_put(rows.numpy(), self.device) for (rows,) in self.torch)

    def of_grain(self) -> Iterator[Any]:
        return (jax.device_put(rows, self.device) for rows in self.grain.to_iter_dataset())


def copied(feeds: Feeds, fetch: Callable[..., np.ndarray], *, copies: bool) -> float:
    """The bytes copied on the way to the device, over those of the batch."""
    count, own, handed = [0], placement.copy_aligned, []

    def counting(rows: np.ndarray) -> np.ndarray:
        if rows.ndim == 2:
            count[0] += rows.nbytes
        return own(rows)

    def keeping(ids: np.ndarray) -> np.ndarray:
        handed.append(fetch(ids))
        return handed[-1]

    placement.copy_aligned = counting
    try:
        stream = batches(feeds.plan, 0, keeping, feeds.mesh, prefetch=0)
        if copies:
            batch = next(stream)
        else:
            with without_copy():
                batch = next(stream)
    finally:
        placement.copy_aligned = own
    size = handed[0].nbytes
    taken = batch.data.addressable_data(0).unsafe_buffer_pointer() == handed[0].ctypes.data
    return (count[0] + (0 if copies or taken else size)) / size


def seconds_per_batch(step: Callable[..., Any], stream: Iterable[Any]) -> float:
    state = jnp.zeros(())
    count, start = 0, time.perf_counter()
    for rows in stream:
        state = step(state, rows)
        count += 1
    state.block_until_ready()
    return (time.perf_counter() - start) / count


def compare(row: str, row_bytes: int, size: int, number: int) -> None:
    rng = np.random.default_rng(0)
    feeds = Feeds(rng.random((number, row_bytes // 4), np.float32), size)
    step = jax.jit(lambda state, rows: state + jnp.square(rows).sum())

    def unchecked(fetch: Callable[..., Any]) -> float:
        with without_copy():
            return seconds_per_batch(step, feeds.ours(fetch))

    ways: dict[str, Callable[[], float]] = {
        "batches": lambda: seconds_per_batch(step, feeds.ours(feeds.gathered)),
        "batches without its copy": lambda: unchecked(feeds.gathered),
        "batches, refilled": lambda: seconds_per_batch(step, feeds.ours(feeds.refilled)),
        "batches, refilled, without its copy": lambda: unchecked(feeds.refilled),
        "torch DataLoader": lambda: seconds_per_batch(step, feeds.of_torch()),
        "grain": lambda: seconds_per_batch(step, feeds.of_grain()),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number_of_round in range(ROUNDS + 1):
        for name, way in ways.items():
            seconds = way()
            if number_of_round:  # the first compiles and warms up
                times[name].append(seconds)

    headed(f"Rows of {row}, {size} a batch")
    for name, found in times.items():
        rate = 1 / statistics.median(found)
        print(f"  {name:<40}{statistics.median(found) * 1e3:9.3f} ms{rate:10.1f} batches/s")
    for fetch in (feeds.gathered, feeds.refilled):
        before, after = (copied(feeds, fetch, copies=copies) for copies in (False, True))
        print(f"  copied of a batch, {fetch.__name__}: {before:g} before, {after:g} after")
    for ours, theirs in (
        ("batches", "batches without its copy"),
        ("batches, refilled", "batches, refilled, without its copy"),
        ("batches", "torch DataLoader"),
        ("batches", "grain"),
    ):
        each = [a / b for a, b in zip(times[ours], times[theirs], strict=True)]
        low, middle, high = statistics.quantiles(each, n=4)
        print(f"  {ours} over {theirs}: {middle:.2f} ({low:.2f} to {high:.2f})", flush=True)
        keep(f"{ours} over {theirs}", middle)


def main() -> None:
    force_cpu_devices(1)
    torch.set_num_threads(1)
    for row, (row_bytes, size, number) in SIZES.items():
        compare(row, row_bytes, size, number)


if __name__ == "__main__":
    main()
