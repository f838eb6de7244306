"""What a training step costs: ours beside the ones that everybody writes, in the same run.

`python benchmarks/step.py` takes a quarter of an hour on four faked CPU devices; `--quick` does one
small case, `--real` takes the devices that are there. Steps are timed in turns, several a round,
and both are made anew several times, since where its buffers lie makes a step one or two percent
slower or faster. Shown are the median over all rounds of the ratio within a round, and the middle
half of the ratios, for the time by the clock and for the processor's, which a busy machine disturbs
less. Flops, all-reduces and their bytes are read from the compiled programs (XLA counts a loop's
flops once); `n + m in loops` are `n` all-reduces once a step and `m` at every turn of a loop.

Ours has one all-reduce more than the naive step, that of the weights.

On the CPU, XLA's scheduler for several threads tells in the loop over microbatches: the naive loop
ran with 40 switches of threads a step, ours with 55 and 5 to 10 % slower (mlp, 4 microbatches), and
changes behind the loop alone moved ours to 40. `--plain-schedule` leaves that scheduler out; both
loops then run with 55.

- naive: `pmean` of the gradient of each rank's own mean, in `shard_map`
- itself: the naive step against another of its kind, which shows what the clock can tell
- global: the mean over all rows, in the global view of `jit`
- scan: the naive step over microbatches by `lax.scan`, reduced once, after it
- MultiSteps: `optax.MultiSteps` over the naive step, one call a microbatch
"""

import argparse
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import hlo
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from ratios import keep

from jax_ddp_weighting import Batch, data_mesh, force_cpu_devices, make_train_step, weighted_sum
from jax_ddp_weighting.distributed import mesh as meshes

Step = Callable[[Any, Any], Any]
INSTANCES = 3  # of every step that is timed


@dataclass(frozen=True)
class Model:
    """Something to train.

    Attributes:
        name: for the table.
        params: its parameters.
        losses: `(params, batch)` to losses and weights of one shape.
        data: `rows` to a batch.
    """

    name: str
    params: Any
    losses: Callable[..., tuple[Any, Any]]
    data: Callable[[int], Batch]


def mlp(width: int = 512) -> Model:
    rng = np.random.default_rng(0)
    shapes = [(64, width), (width, width), (width, 16)]
    params = [jnp.asarray(rng.normal(size=s) / s[0] ** 0.5, jnp.float32) for s in shapes]

    def losses(params: Any, batch: Batch) -> tuple[Any, Any]:
        h, y = batch.data
        for w in params[:-1]:
            h = jax.nn.relu(h @ w)
        return jnp.mean((h @ params[-1] - y) ** 2, axis=-1), batch.weights

    def data(rows: int) -> Batch:
        x = rng.normal(size=(rows, 64)).astype(np.float32)
        return Batch.of((x, x[:, :16]), weights=(np.arange(rows) % 8 > 0).astype(np.int32))

    return Model("mlp", params, losses, data)


def transformer(width: int = 128, layers: int = 2, length: int = 64) -> Model:
    rng = np.random.default_rng(0)
    vocabulary, heads = 256, 4

    def made(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape) / shape[0] ** 0.5, jnp.float32)

    blocks = [
        {
            "qkv": made(width, 3, heads, width // heads),
            "out": made(width, width),
            "up": made(width, 4 * width),
            "down": made(4 * width, width),
        }
        for _ in range(layers)
    ]
    params = {"embed": made(vocabulary, width), "place": made(length, width), "blocks": blocks}

    def normed(h: jax.Array) -> jax.Array:
        return h * lax.rsqrt(jnp.mean(h**2, axis=-1, keepdims=True) + 1e-6)

    def losses(params: Any, batch: Batch) -> tuple[Any, Any]:
        tokens = batch.data
        h = params["embed"][tokens] + params["place"]
        for block in params["blocks"]:
            q, k, v = jnp.moveaxis(jnp.einsum("btd,dnhe->btnhe", normed(h), block["qkv"]), 2, 0)
            mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
            h = h + mixed.reshape(h.shape) @ block["out"]
            h = h + jax.nn.gelu(normed(h) @ block["up"]) @ block["down"]
        logits = normed(h) @ params["embed"].T
        targets = jnp.roll(tokens, -1, axis=1)
        weights = batch.weights[:, None] * (targets % 5 > 0)
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets), weights

    def data(rows: int) -> Batch:
        return Batch.of(rng.integers(0, vocabulary, size=(rows, length), dtype=np.int32))

    return Model("transformer", params, losses, data)


# --- the steps ------------------------------------------------------------------------------------


def ours(model: Model, mesh: Mesh, microbatches: int) -> Step:
    def loss_fn(params: Any, batch: Batch) -> Any:
        return weighted_sum(*model.losses(params, batch))

    step = make_train_step(loss_fn, mesh, microbatches=microbatches)
    return lambda state, batch: step(state, batch)[0]


def naive(model: Model, mesh: Mesh, microbatches: int) -> Step:
    def gradient(params: Any, batch: Batch) -> Any:
        params = meshes.vary(params, "data")

        def at(params: Any, k: Any) -> Any:
            part = batch
            if microbatches > 1:
                split = (-1, microbatches)
                part = jax.tree.map(lambda x: x.reshape(*split, *x.shape[1:])[:, k], batch)
            return _mean(model, params, part)

        if microbatches == 1:
            found = jax.value_and_grad(at)(params, 0)
        else:
            zeros = meshes.vary((jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)), "data")

            def added(carry: Any, k: Any) -> Any:
                return jax.tree.map(jnp.add, carry, jax.value_and_grad(at)(params, k)), None

            found, _ = lax.scan(added, zeros, jnp.arange(microbatches))
            found = jax.tree.map(lambda x: x / microbatches, found)
        return lax.pmean(found, "data")

    return _applied(_over(gradient, mesh))


def global_view(model: Model, mesh: Mesh, microbatches: int) -> Step:
    return _applied(lambda params, batch: jax.value_and_grad(_mean, 1)(model, params, batch))


def _mean(model: Model, params: Any, batch: Batch) -> Any:
    losses, weights = model.losses(params, batch)
    return jnp.sum(losses * weights) / jnp.sum(weights)


def _over(fn: Callable[..., Any], mesh: Mesh) -> Callable[..., Any]:
    specs = (PartitionSpec(), PartitionSpec("data"))
    return jax.shard_map(fn, mesh=mesh, in_specs=specs, out_specs=PartitionSpec())


def _applied(gradient: Callable[..., Any]) -> Step:
    def step(state: Any, batch: Batch) -> Any:
        loss, gradients = gradient(state.params, batch)
        return state.apply_gradients(grads=gradients), loss

    jitted = jax.jit(step, donate_argnums=0)
    return lambda state, batch: jitted(state, batch)[0]


# --- running them ---------------------------------------------------------------------------------


class Run:
    """A step with its state and its batch, called again and again."""

    def __init__(self, step: Step, model: Model, mesh: Mesh, batches: list[Batch], tx: Any) -> None:
        state = TrainState.create(apply_fn=None, params=model.params, tx=tx)
        self.step, self.batches = step, batches
        self.state = meshes.place(state, meshes.replicated_sharding(mesh))

    def __call__(self) -> None:
        for batch in self.batches:
            self.state = self.step(self.state, batch)
            if len(self.batches) > 1:  # dozens under way can starve XLA's CPU threads, which abort
                jax.block_until_ready(self.state)

    def timed(self, calls: int) -> np.ndarray:
        """Seconds by the clock, and of all processors together."""
        start = time.perf_counter(), time.process_time()
        for _ in range(calls):
            self()
        jax.block_until_ready(self.state)
        return np.subtract((time.perf_counter(), time.process_time()), start)


def ratios(run: Run, other: Run, rounds: int, calls: int) -> list[np.ndarray]:
    """A run's times over another's, by clock and processor; who goes first alternates."""
    found = []
    for number in range(rounds):
        pair = (run, other) if number % 2 else (other, run)
        seconds = {id(each): each.timed(calls) for each in pair}
        found.append(seconds[id(run)] / seconds[id(other)])
    return found


@contextmanager
def compilations() -> Iterator[list[str]]:
    """Each compilation by XLA meanwhile."""
    events: list[str] = []
    recording = [True]

    def listener(event: str, *_: Any, **__: Any) -> None:
        if recording[0] and event.endswith("backend_compile_duration"):
            events.append(event)

    jax.monitoring.register_event_duration_secs_listener(listener)
    yield events
    recording[0] = False


@dataclass(frozen=True)
class Program:
    """What a compiled step is made of, and how many times XLA compiled on the way."""

    flops: float
    reductions: list[hlo.Collective]
    compiled: int

    @property
    def network(self) -> str:
        once = sum(not each.in_loop for each in self.reductions)
        looped = len(self.reductions) - once
        size = sum(each.bytes for each in self.reductions) / 1024
        return f"{once}{f' + {looped} in loops' if looped else ''}, {size:,.0f} KiB"


@dataclass(frozen=True)
class Contender:
    """A step to time, and the batches and the optimizer that make one step of it."""

    name: str
    make: Callable[..., Step]
    microbatches: int
    batches: list[Batch]
    tx: Any


def contests(
    model: Model, mesh: Mesh, rows: int, microbatches: int
) -> list[tuple[Contender, Contender]]:
    """Who is timed against whom, on one batch."""
    tx, sharding = optax.adam(1e-4), meshes.row_sharding(mesh, "data")
    whole = model.data(mesh.size * rows)
    batch = meshes.place(whole, sharding)
    mine = Contender("ours", ours, microbatches, [batch], tx)
    if microbatches == 1:
        plain = Contender("naive", naive, 1, [batch], tx)
        over_all = Contender("global", global_view, 1, [batch], tx)
        return [(mine, plain), (plain, replace(plain, name="itself")), (mine, over_all)]
    parts = [
        meshes.place(jax.tree.map(lambda x, k=k: x[k::microbatches], whole), sharding)
        for k in range(microbatches)
    ]
    scanned = Contender("scan", naive, microbatches, [batch], tx)
    stepped = Contender("MultiSteps", naive, 1, parts, optax.MultiSteps(tx, microbatches))
    return [(mine, scanned), (mine, stepped)]


def made(contender: Contender, model: Model, mesh: Mesh, batches: int | None = None) -> Run:
    step = contender.make(model, mesh, contender.microbatches)
    return Run(step, model, mesh, contender.batches[:batches], contender.tx)


def program_of(contender: Contender, model: Model, mesh: Mesh) -> Program:
    with hlo.recorded() as programs:
        made(contender, model, mesh, batches=1)()
    program = programs[-1].compile()
    found = [each for each in hlo.collectives(program.as_text()) if each.kind == "all-reduce"]
    run = made(contender, model, mesh)
    with compilations() as events:
        for _ in range(3):
            run()
    return Program(program.cost_analysis()["flops"], found, len(events))


def compare(
    model: Model, ranks: int, rows: int, microbatches: int, rounds: int, calls: int
) -> None:
    mesh = data_mesh(ranks)
    for contender, other in contests(model, mesh, rows, microbatches):
        program, theirs = (program_of(each, model, mesh) for each in (contender, other))
        found = []
        for _ in range(INSTANCES):
            pair = [made(each, model, mesh) for each in (contender, other)]
            for run in pair:  # compiles
                run.timed(1)
            found += ratios(*pair, rounds // INSTANCES, calls)
        low, middle, high = np.percentile(found, [25, 50, 75], axis=0)
        shown = [f"{m:5.3f} [{a:.3f}, {b:.3f}]" for a, m, b in zip(low, middle, high, strict=True)]
        times = f" x {len(other.batches)}" if len(other.batches) > 1 else ""
        keep(
            f"{model.name}, {ranks} ranks, {microbatches} microbatches, "
            f"{contender.name} to {other.name}",
            float(middle[0]),
        )
        flops = "" if times else f"{program.flops / theirs.flops:.4f}"
        print(
            f"{model.name:11} {ranks:2} {microbatches:3}  {contender.name:5} {other.name:10} "
            f"{'  '.join(shown)}  {flops:>7}  {program.network:>12}  "
            f"{theirs.network + times:>17}  {program.compiled:2} {theirs.compiled:2}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one small case")
    parser.add_argument("--real", action="store_true", help="the devices that are there")
    parser.add_argument("--rounds", type=int, default=90)
    parser.add_argument("--plain-schedule", action="store_true", help="one order for all threads")
    arguments = parser.parse_args()
    if arguments.plain_schedule:  # read when JAX starts, at the first operation
        flags = os.environ.get("XLA_FLAGS", "")
        os.environ["XLA_FLAGS"] = f"{flags} --xla_cpu_enable_concurrency_optimized_scheduler=false"
    if not arguments.real:
        force_cpu_devices(4)
    print(
        "model    ranks   K  step  against         clock                 processor             "
        "flops  its all-reduces        theirs  compilations"
    )
    if arguments.quick:
        compare(mlp(64), 2, 16, 4, rounds=8, calls=2)
        return
    for ranks in [n for n in (1, 2, 4) if n <= len(jax.devices())]:
        for model, rows, calls in ((mlp(), 256, 3), (transformer(), 16, 1)):
            for microbatches in (1, 4, 16):
                # the step that everybody writes is the one to be level with: it is timed longest
                rounds = arguments.rounds if microbatches == 1 else arguments.rounds // 4
                compare(model, ranks, rows, microbatches, rounds, calls)


if __name__ == "__main__":
    main()
