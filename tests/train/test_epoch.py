"""An epoch as one program ends with the bits of the loop over its batches."""

from dataclasses import replace

import fitting
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jax_ddp_weighting import (
    EpochPlan,
    batches,
    data_mesh,
    make_train_epoch,
    make_train_step,
    weighted_sum,
)

DATA = (fitting.X, fitting.Y)


def noisy_loss(params, batch, keys):
    x, y = batch.data
    kept = jax.vmap(lambda key: jax.random.bernoulli(key, 0.7, (3,)))(keys)
    return weighted_sum(((x * kept) @ params["w"] + params["b"] - y) ** 2, batch.weights)


def loop(plan, mesh, epochs, rng=None, loss_fn=fitting.loss_fn, start_step=0, **options):
    """The same training by the loop."""
    step = make_train_step(loss_fn, mesh, **options)
    state, reports = fitting.new_state(optax.adamw(0.1)), []
    for epoch in epochs:
        read = batches(plan, epoch, fitting.fetch, mesh, start_step=start_step, prefetch=0)
        for number, batch in enumerate(read, start_step):
            key = rng
            if rng is not None:
                key = jax.random.fold_in(jax.random.fold_in(rng, epoch), number)
            state, report = step(state, batch, key)
            reports.append(report)
    return state, [np.stack(leaves) for leaves in zip(*map(jax.tree.leaves, reports), strict=True)]


def same(ours, theirs):
    ours, theirs = jax.tree.leaves(ours), jax.tree.leaves(theirs)
    assert len(ours) == len(theirs)
    return all(
        np.array_equal(a, b) and np.asarray(a).dtype == np.asarray(b).dtype
        for a, b in zip(ours, theirs, strict=True)
    )


@pytest.mark.parametrize(
    ("ranks", "rows", "tail", "noisy", "options"),
    [
        (1, 8, "mask", False, {}),
        (2, 6, "repeat", True, {"microbatches": 2, "rng_per": "example"}),
        (4, 4, "mask", False, {"engine": "jit", "grad_norm": True}),
    ],
)
def test_the_state_is_that_of_the_loop(ranks, rows, tail, noisy, options):
    plan, mesh = EpochPlan(47, ranks, rows, tail=tail, seed=ranks), data_mesh(ranks)
    loss_fn = noisy_loss if noisy else fitting.loss_fn
    rng = jax.random.key(3) if noisy else None
    run_epoch = make_train_epoch(loss_fn, mesh, plan, **options)
    state, stacked = fitting.new_state(optax.adamw(0.1)), []
    for epoch in range(2):
        state, reports = run_epoch(state, DATA, epoch, rng)
        stacked.append(reports)
    wanted, of_loop = loop(plan, mesh, range(2), rng, loss_fn, **options)
    assert same(state, wanted)
    assert same(jax.tree.map(lambda *leaves: np.concatenate(leaves), *stacked), of_loop)
    # the control: another epoch is found
    other, _ = run_epoch(fitting.new_state(optax.adamw(0.1)), DATA, 1, rng)
    first, _ = run_epoch(fitting.new_state(optax.adamw(0.1)), DATA, 0, rng)
    assert not same(other, first)


def test_one_compilation_for_all_epochs_and_data_that_are_sharded():
    traced = []

    def counted(params, batch):
        traced.append(batch)
        x, y = batch.data
        return fitting.loss_fn(params, replace(batch, data=(jnp.where(jnp.signbit(x), -1, x), y)))

    plan, mesh = EpochPlan(46, 2, 8), data_mesh(2)
    x, y = (leaf[:46].copy() for leaf in DATA)
    x[:5] = -0.0  # which adding up what devices have would make 0
    whole = jax.device_put((x, y), NamedSharding(mesh, P()))
    cut = jax.device_put((x, y), NamedSharding(mesh, P("data")))
    run_epoch = make_train_epoch(counted, mesh, plan)
    states = {}
    for name, data in (("whole", whole), ("cut", cut)):
        state = fitting.new_state(optax.adamw(0.1))
        before = None
        for epoch in range(5):
            state, _ = run_epoch(state, data, epoch)
            before = before or len(traced)
        assert len(traced) == before
        states[name] = state
    assert same(states["whole"], states["cut"])


def test_a_start_step_runs_the_rest_of_an_epoch():
    plan, mesh = EpochPlan(47, 2, 6), data_mesh(2)
    run_epoch = make_train_epoch(fitting.loss_fn, mesh, plan)
    state, reports = run_epoch(fitting.new_state(optax.adamw(0.1)), DATA, 1, start_step=2)
    wanted, of_loop = loop(plan, mesh, [1], start_step=2)
    assert same(state, wanted)
    assert same(reports, of_loop)
    with pytest.raises(ValueError, match=r"start_step must be .* A later step belongs"):
        run_epoch(state, DATA, 1, start_step=5)


def test_what_cannot_be_one_program_is_refused():
    mesh, plan = data_mesh(2), EpochPlan(47, 2, 6)
    for other, match in (
        (EpochPlan(47, 4, 6), "plan must have as many ranks as the mesh's 'data' axis, got 4 and"),
        (EpochPlan(5, 2, 6, tail="drop"), "plan must have a step, got 5 examples"),
    ):
        with pytest.raises(ValueError, match=match):
            make_train_epoch(fitting.loss_fn, mesh, other)
    with pytest.raises(ValueError, match='engine must be "shard_map" or "jit", got \'pmap\''):
        make_train_epoch(fitting.loss_fn, mesh, plan, engine="pmap")
    with pytest.raises(TypeError, match="progress must be a function"):
        make_train_epoch(fitting.loss_fn, mesh, plan, progress=True)
    with pytest.raises(ValueError, match="progress_every must be an integer of at least 1"):
        make_train_epoch(fitting.loss_fn, mesh, plan, progress=print, progress_every=0)
    with pytest.raises(TypeError, match="must be an EpochPlan, got list"):
        make_train_epoch(fitting.loss_fn, mesh, [])
    run_epoch = make_train_epoch(fitting.loss_fn, mesh, plan)
    state = fitting.new_state(optax.sgd(0.1))
    for data, match in (
        ((fitting.X[:46], fitting.Y), r"a row for each of the plan's 47 examples, .* at data\[0\]"),
        (jnp.float32(1), "a row for each of the plan's 47"),
        ({}, "data must be arrays, got none"),
        (np.full(47, 2**40), "data"),
    ):
        with pytest.raises(ValueError, match=match):
            run_epoch(state, data, 0)
    with pytest.raises(ValueError, match="epoch must be an integer"):
        run_epoch(state, DATA, -1)
