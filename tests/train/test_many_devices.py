"""A sharded step compiled for many devices: what is sent does not become more with them."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

# compiled and not run, of shapes alone; in a process of its own, which has 256 devices
PROGRAM = """
import json, re
from collections import Counter
import jax, jax.numpy as jnp, optax
from flax.training.train_state import TrainState
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
import jax_ddp_weighting as jdw

jdw.force_cpu_devices(256)
SPECS = {"w1": P(None, "data"), "w2": P("data"), "scale": P()}
SHAPES = {"w1": (4, 64), "w2": (64, 4), "scale": ()}


def loss_fn(params, batch):
    out = jnp.tanh(batch.data["x"] @ params["w1"]) @ params["w2"] * params["scale"]
    return jdw.weighted_sum(jnp.mean(out**2, axis=(1, 2)), batch.weights)


def around_the_ring(params, batch):  # the control: as many turns as there are eighths of ranks
    sums = loss_fn(params, batch)
    total, ranks = sums.total, jax.lax.axis_size("data")
    ring = [(i, (i + 1) % ranks) for i in range(ranks)]
    for _ in range(ranks // 8):
        total = jnp.tanh(jax.lax.ppermute(total, "data", ring))
    return jdw.WeightedSum(total, sums.weight)


def kinds(devices, loss_fn, **options):
    mesh = jax.make_mesh(
        (devices // 4, 4), ("data", "seq"), axis_types=(AxisType.Auto,) * 2,
        devices=jax.devices()[:devices],
    )

    def shape(spec, *shape, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    params = {name: shape(SPECS[name], *SHAPES[name]) for name in SHAPES}
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))
    state = TrainState(shape(P(), dtype=jnp.int32), None, params, tx, tx.init(params))
    rows = 2 * mesh.shape["data"]
    one = shape(P("data"), rows, dtype=jnp.int32)
    batch = jdw.Batch({"x": shape(P("data", "seq"), rows, 4, 4)}, one, one)
    step = jdw.make_train_step(loss_fn, mesh, batch_spec=P("data", "seq"), **options)
    text = step.lower(state, batch).compile().as_text()
    names = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
    return Counter(re.findall(rf" ({names})(?:-start)?\\(", text))


found = {
    "step": [kinds(n, loss_fn, microbatches=2) for n in (64, 256)],
    "microbatch": [kinds(n, loss_fn, microbatches=2, gather_per="microbatch") for n in (64, 256)],
    "ring": [kinds(n, around_the_ring) for n in (64, 256)],
}
print(json.dumps(found))
"""


def test_collectives_do_not_grow_with_the_devices():
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    for gather_per in ("step", "microbatch"):
        few, many = found[gather_per]
        assert few == many
        assert many["all-gather"] == many["reduce-scatter"] == 2  # for each sharded parameter one
    few, many = found["ring"]
    assert many["collective-permute"] > few["collective-permute"]
