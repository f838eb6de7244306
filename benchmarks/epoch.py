"""What an epoch as one program costs: beside the loop, a hand-written scan, a grain-fed loop.

`python benchmarks/epoch.py` takes some minutes on two faked CPU devices; `--ranks 1` does one case.
Each number of ranks is a process of its own. All ways train the same MLP of digits' size (64, 128,
64, 10) on 1,437 rows; they are timed in turns, and shown are the medians over the rounds of an
epoch's time by the clock and by the processor, which a busy machine disturbs less, and of their
ratio within a round, with its middle half.

- program: `make_train_epoch`, one call an epoch; `several`: the same, eight epochs a call
- loop: `batches` with prefetch and `make_train_step`
- scan: a hand-written `lax.scan` over `jax.random.permutation` that drops the short last step,
  knows no weights, skips nothing, and takes the mean over the global batch
- weighted scan: the same with a short last step filled up, weights, and the mean over them: the
  least that gives what the program gives where no step is empty
- grain: the step of the hand-written scan, compiled, fed by grain's batches
- one rank's ids beside numpy's, in the processor's time
"""

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from ratios import headed, keep

from jax_ddp_weighting import (
    DevicePlan,
    EpochPlan,
    batches,
    data_mesh,
    force_cpu_devices,
    make_train_epoch,
    make_train_step,
    weighted_sum,
)

N, TOGETHER = 1437, 8
TX = optax.adam(1e-3)
RNG = np.random.default_rng(0)
X, Y = RNG.random((N, 64), np.float32), RNG.integers(0, 10, N).astype(np.int32)


def new_params() -> Any:
    shapes = ((64, 128), (128, 64), (64, 10))
    rng = np.random.default_rng(1)
    return [
        (jnp.asarray(rng.normal(size=s) / s[0] ** 0.5, jnp.float32), jnp.zeros(s[1]))
        for s in shapes
    ]


def losses_of(params: Any, x: Any, y: Any) -> Any:
    for kernel, bias in params[:-1]:
        x = jax.nn.relu(x @ kernel + bias)
    logits = x @ params[-1][0] + params[-1][1]
    return optax.softmax_cross_entropy_with_integer_labels(logits, y)


def loss_fn(params: Any, batch: Any) -> Any:
    return weighted_sum(losses_of(params, *batch.data), batch.weights)


class Ways:
    """The same training, each way a function of the epoch that waits for its end."""

    def __init__(self, ranks: int, size: int) -> None:
        self.mesh = data_mesh(ranks)
        self.plan = EpochPlan(N, ranks, size)
        self.rows = NamedSharding(self.mesh, PartitionSpec("data"))
        self.everywhere = NamedSharding(self.mesh, PartitionSpec())
        self.data = jax.device_put((X, Y), self.everywhere)
        self.batch = ranks * size
        self.compile_s: dict[str, float] = {}
        self.memory: dict[str, int] = {}
        self.ways: dict[str, Callable[[int], None]] = {
            "program": self._program("program", lambda epoch: {"epoch": epoch}),
            "several": self._program("several", lambda epoch: {"epochs": range(TOGETHER)}),
            "progress": self._program(
                "progress",
                lambda epoch: {"epoch": epoch},
                progress=lambda *_: None,
                progress_every=10,
            ),
            "loop": self._loop(),
            "scan": self._scan(weighted=False),
            "weighted scan": self._scan(weighted=True),
            "grain": self._grain(),
        }

    def _state(self) -> TrainState:
        return TrainState.create(apply_fn=None, params=new_params(), tx=TX)

    def _program(self, name: str, which: Callable[[int], Any], **options: Any) -> Any:
        run_epoch = make_train_epoch(loss_fn, self.mesh, self.plan, **options)
        held = [self._state()]
        self._measure(name, run_epoch.lower(held[0], self.data, **which(0)))

        def run(epoch: int) -> None:
            held[0], _ = run_epoch(held[0], self.data, **which(epoch))
            jax.block_until_ready(held[0])

        return run

    def _loop(self) -> Any:
        step, held = make_train_step(loss_fn, self.mesh), [self._state()]

        def run(epoch: int) -> None:
            for batch in batches(self.plan, epoch, lambda ids: (X[ids], Y[ids]), self.mesh):
                held[0], _ = step(held[0], batch)
            jax.block_until_ready(held[0])

        return run

    def _update(self, carried: Any, x: Any, y: Any, weights: Any = None) -> tuple[Any, Any]:
        params, opt_state = carried

        def mean(params: Any) -> Any:
            losses = losses_of(params, x, y)
            if weights is None:
                return losses.mean()
            return (losses * weights).sum() / weights.sum()

        value, gradient = jax.value_and_grad(mean)(params)
        updates, opt_state = TX.update(gradient, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), value

    def _scan(self, *, weighted: bool) -> Any:
        steps = -(-N // self.batch) if weighted else N // self.batch
        size = steps * self.batch

        def epoch(carried: Any, key: Any, x: Any, y: Any) -> Any:
            order = jax.random.permutation(key, N)
            order = jnp.resize(order, size) if weighted else order[:size]
            counts = (jnp.arange(size) < N).astype(jnp.int32)
            grid = (order.reshape(steps, -1), counts.reshape(steps, -1))

            def body(carried: Any, turn: Any) -> Any:
                ids, weights = lax.with_sharding_constraint(turn, self.rows)
                return self._update(carried, x[ids], y[ids], weights if weighted else None)

            return lax.scan(body, carried, grid)

        jitted = jax.jit(epoch, donate_argnums=0)
        params = new_params()
        held = [jax.device_put((params, TX.init(params)), self.everywhere)]
        name = "weighted scan" if weighted else "scan"
        self._measure(name, jitted.lower(held[0], jax.random.key(0), *self.data))

        def run(epoch: int) -> None:
            held[0], _ = jitted(held[0], jax.random.key(epoch), *self.data)
            jax.block_until_ready(held[0])

        return run

    def _grain(self) -> Any:
        step = jax.jit(self._update, donate_argnums=0)
        params = new_params()
        held = [jax.device_put((params, TX.init(params)), self.everywhere)]

        def run(epoch: int) -> None:
            source = grain.MapDataset.range(N).shuffle(seed=epoch)
            fed = source.map(lambda i: (X[i], Y[i])).batch(self.batch, drop_remainder=True)
            for rows in fed.to_iter_dataset():
                held[0], _ = step(held[0], *jax.device_put(rows, self.rows))
            jax.block_until_ready(held[0])

        return run

    def _measure(self, name: str, lowered: Any) -> None:
        start = time.process_time()
        compiled = lowered.compile()
        self.compile_s[name] = time.process_time() - start
        sizes = compiled.memory_analysis()
        self.memory[name] = sizes.temp_size_in_bytes + sizes.output_size_in_bytes


def compare(ranks: int, size: int, rounds: int) -> None:
    ways = Ways(ranks, size)
    headed(f" {size} rows a rank, {ways.plan.steps_per_epoch} steps")
    clock: dict[str, list[float]] = {name: [] for name in ways.ways}
    processor: dict[str, list[float]] = {name: [] for name in ways.ways}
    for number in range(rounds + 1):
        for name, run in ways.ways.items():
            times = time.perf_counter(), time.process_time()
            run(number)
            if number:  # the first compiles
                per = TOGETHER if name == "several" else 1
                clock[name].append((time.perf_counter() - times[0]) / per)
                processor[name].append((time.process_time() - times[1]) / per)
    for name in ways.ways:
        told = ""
        if name in ways.compile_s:
            told = f"   compiled in {ways.compile_s[name]:.1f} s, {ways.memory[name]:,} bytes"
        middle = [1e3 * statistics.median(each[name]) for each in (clock, processor)]
        print(f"  {name:<16}{middle[0]:9.2f} ms, of the processor {middle[1]:9.2f} ms{told}")
    for ours, theirs in (
        ("program", "loop"),
        ("several", "loop"),
        ("program", "grain"),
        ("program", "scan"),
        ("several", "scan"),
        ("program", "weighted scan"),
        ("several", "weighted scan"),
        ("progress", "program"),
    ):
        for what, times in (("", clock), (", processor", processor)):
            each = [a / b for a, b in zip(times[ours], times[theirs], strict=True)]
            low, middle, high = statistics.quantiles(each, n=4)
            faster = f", {1 / middle:.1f} times as fast" if middle < 0.5 else ""
            print(f"  {ours} over {theirs}{what}: {middle:.3f} ({low:.3f} to {high:.3f}){faster}")
            keep(f"{ours} over {theirs}{what}", middle)
    sys.stdout.flush()


def ids() -> None:
    for rows in (128, 1024):
        compare_ids(rows, 2**20 // rows)


def compare_ids(rows: int, steps: int) -> None:
    headed(f"Ids of {steps} steps of {rows} rows, n = 10,000,000, in keyed order")
    plan = EpochPlan(10_000_000, 1, rows)
    on_device = DevicePlan.of(plan, epochs=4)

    @jax.jit
    def read(on_device: DevicePlan, epoch: Any) -> Any:
        numbers = jnp.arange(steps, dtype=jnp.uint32)
        return lax.map(lambda step: on_device.batch(epoch, step, 0).ids, numbers)

    def numpys(epoch: int) -> None:
        plan.slots(epoch, 0, stop=rows * steps)

    def devices(epoch: int) -> None:
        read(on_device, np.int32(epoch)).block_until_ready()

    times: dict[Any, list[float]] = {numpys: [], devices: []}
    for number in range(9):
        for way, found in times.items():
            start = time.process_time()
            way(number % 4)
            if number:
                found.append((time.process_time() - start) / (rows * steps))
    each = [a / b for a, b in zip(times[devices], times[numpys], strict=True)]
    low, middle, high = statistics.quantiles(each, n=4)
    for name, way in (("numpy", numpys), ("device", devices)):
        nanoseconds = 1e9 * statistics.median(times[way])
        print(f"  {name:<10}{nanoseconds:6.1f} ns an id, {1e3 / nanoseconds:6.1f} million a second")
    print(f"  device over numpy: {middle:.2f} ({low:.2f} to {high:.2f})")
    keep("device over numpy", middle)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--ranks", type=int, help="one case, in this process")
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    if arguments.ranks is None:
        for ranks in (1, 2):
            command = [sys.executable, __file__, "--ranks", str(ranks)]
            subprocess.run([*command, "--rounds", str(arguments.rounds)], check=True)
        return
    force_cpu_devices(arguments.ranks)
    headed(f"The digits MLP, {arguments.ranks} ranks")
    for size in (8, 32):
        compare(arguments.ranks, size // arguments.ranks, arguments.rounds)
    if arguments.ranks == 1:
        ids()


if __name__ == "__main__":
    main()
