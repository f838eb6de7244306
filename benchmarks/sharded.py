"""What a step with parameters in shards costs: beside the plain one, and beside jit's own view.

`python benchmarks/sharded.py` takes some minutes on four faked CPU devices; `--quick` does one
small case. Parameters, and the two moments of Adam, lie over the data axis: each device holds a
quarter. Steps are timed in turns; shown are the median of the ratios within a round, and the middle
half of them. Collectives and bytes are read from the compiled programs: `n + m in loops`, and what
one rank hands in once a step; the state is what a device holds of parameters and moments.

- plain: our step, with the same on every device
- global: `jax.value_and_grad` of the mean over all rows in the global view of `jit`, with the same
  shardings, of which XLA decides what is gathered when
- jit: our step under `engine="jit"`
- per microbatch: our step that gathers once per microbatch, and accumulates shards alone
"""

import argparse
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import hlo
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from ratios import headed, keep
from step import Model, mlp, transformer

from jax_ddp_weighting import Batch, data_mesh, force_cpu_devices, make_train_step, weighted_sum
from jax_ddp_weighting.distributed import mesh as meshes

DEVICES, TX = 4, optax.adam(1e-4)


@dataclass(frozen=True)
class Step:
    """A step to time.

    Attributes:
        name: for the table.
        call: `(state, batch) -> (state, report)`.
        lower: the same arguments to JAX's `Lowered`.
        sharded: whether its state lies in shards.
    """

    name: str
    call: Callable[..., Any]
    lower: Callable[..., Any]
    sharded: bool


def ours(name: str, model: Model, mesh: Mesh, *, sharded: bool = True, **options: Any) -> Step:
    def loss_fn(params: Any, batch: Batch) -> Any:
        return weighted_sum(*model.losses(params, batch))

    step = make_train_step(loss_fn, mesh, **options)
    return Step(name, step, step.lower, sharded)


def global_view(model: Model, mesh: Mesh, microbatches: int) -> Step:
    def mean(params: Any, batch: Batch, weight: Any) -> Any:
        losses, weights = model.losses(params, batch)
        return jnp.sum(losses * weights) / weight

    def step(state: Any, batch: Batch) -> Any:
        weight = jnp.sum(model.losses(state.params, batch)[1])
        if microbatches == 1:
            value, gradients = jax.value_and_grad(mean)(state.params, batch, weight)
        else:

            def add(carry: Any, k: Any) -> Any:
                split = (-1, microbatches)
                part = jax.tree.map(lambda x: x.reshape(*split, *x.shape[1:])[:, k], batch)
                found = jax.value_and_grad(mean)(state.params, part, weight)
                return jax.tree.map(jnp.add, carry, found), None

            zeros = jnp.zeros(()), jax.tree.map(jnp.zeros_like, state.params)
            (value, gradients), _ = jax.lax.scan(add, zeros, jnp.arange(microbatches))
        return state.apply_gradients(grads=gradients), value

    state = new_state(model, mesh, sharded=True)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
    jitted = jax.jit(step, donate_argnums=0, out_shardings=(shardings, None))
    return Step("global", jitted, jitted.lower, True)


def new_state(model: Model, mesh: Mesh, *, sharded: bool) -> Any:
    """The state on the mesh, each parameter over its largest dimension that divides, or whole."""

    def lie(leaf: Any) -> Any:
        spec = [None] * leaf.ndim
        sizes = [size if size % mesh.size == 0 else 0 for size in leaf.shape]
        if sharded and max(sizes, default=0):
            spec[int(np.argmax(sizes))] = "data"
        return jax.device_put(jnp.copy(leaf), NamedSharding(mesh, PartitionSpec(*spec)))

    state = TrainState.create(apply_fn=None, params=jax.tree.map(lie, model.params), tx=TX)
    return meshes.place(
        state.replace(step=jnp.zeros((), jnp.int32)), meshes.replicated_sharding(mesh)
    )


def describe(step: Step, state: Any, batch: Batch) -> str:
    """What a step sends, and what a device holds."""
    program = step.lower(state, batch).compile()
    found = hlo.collectives(program.as_text())
    once = Counter(each.kind for each in found if not each.in_loop)
    looped = Counter(each.kind for each in found if each.in_loop)
    kinds = ", ".join(
        f"{once[kind]}{f' + {looped[kind]} in loops' * bool(looped[kind])} {kind}"
        for kind in hlo.KINDS
        if once[kind] + looped[kind]
    )
    size = sum(each.bytes for each in found) / 1024
    shards = [leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(state)]
    temporary = program.memory_analysis().temp_size_in_bytes / 1024
    held = f"state {sum(shards) / 1024:6,.0f} KiB, temporary {temporary:7,.0f}"
    return f"{held}; {kinds}, {size:,.0f} KiB"


def compare(model: Model, rows: int, microbatches: int, rounds: int, calls: int) -> None:
    mesh = data_mesh(DEVICES)
    batch = meshes.place(model.data(mesh.size * rows), meshes.row_sharding(mesh, "data"))
    options: dict[str, Any] = {"microbatches": microbatches}
    mine = ours("sharded", model, mesh, **options)
    others = [
        ours("plain", model, mesh, sharded=False, **options),
        global_view(model, mesh, microbatches),
        ours("jit", model, mesh, engine="jit", **options),
    ]
    if microbatches > 1:
        others.append(ours("per microbatch", model, mesh, gather_per="microbatch", **options))
    headed(f"{model.name}, {DEVICES} devices of {rows} rows, {microbatches} microbatches")
    steps = [mine, *others]
    states = {each.name: new_state(model, mesh, sharded=each.sharded) for each in steps}
    for each in steps:
        print(f"  {each.name:15} {describe(each, states[each.name], batch)}", flush=True)

    def timed(step: Step) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            states[step.name], report = step.call(states[step.name], batch)
        jax.block_until_ready((states[step.name], report))
        return time.perf_counter() - start

    for each in steps:  # compiles
        timed(each)
    for other in others:
        found = []
        for number in range(rounds):
            pair = (mine, other) if number % 2 else (other, mine)
            seconds = {each.name: timed(each) for each in pair}
            found.append(seconds[mine.name] / seconds[other.name])
        low, middle, high = np.percentile(found, [25, 50, 75])
        print(f"  sharded to {other.name:15} {middle:5.3f} [{low:.3f}, {high:.3f}]", flush=True)
        keep(f"sharded to {other.name}", float(middle))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one small case")
    parser.add_argument("--rounds", type=int, default=30)
    arguments = parser.parse_args()
    force_cpu_devices(DEVICES)
    if arguments.quick:
        compare(mlp(64), 16, 2, rounds=4, calls=2)
        return
    for model, rows in ((mlp(), 64), (transformer(), 8)):
        for microbatches in (1, 4):
            compare(model, rows, microbatches, arguments.rounds, calls=4)


if __name__ == "__main__":
    main()
