"""What is asked of an epoch as a program: epochs, ensembles, nothing sent, nothing kept twice."""

import re

import fitting
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jax_ddp_weighting import (
    DevicePlan,
    EpochPlan,
    data_mesh,
    make_train_epoch,
    weighted_sum,
)
from jax_ddp_weighting.distributed import mesh as meshes

DATA = (fitting.X, fitting.Y)
TX = optax.adamw(0.1)
MEMBERS = 8
TO_HOST = re.compile(r" (infeed|outfeed|send|recv)\(|custom_call_target=\"[^\"]*(callback|Host)")


def noisy_loss(params, batch, keys):
    x, y = batch.data
    kept = jax.vmap(lambda key: jax.random.bernoulli(key, 0.7, (3,)))(keys)
    return weighted_sum(((x * kept) @ params["w"] + params["b"] - y) ** 2, batch.weights)


def started(seed=0):
    state = fitting.new_state(TX)
    return state.replace(params={"w": jnp.full(3, float(seed)), "b": jnp.float32(0.5)})


def same(ours, theirs):
    pairs = zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True)
    return all(np.array_equal(a, b) for a, b in pairs)


def stack(trees):
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def test_several_epochs_in_one_program_are_one_after_the_other():
    traced = []

    def counted(params, batch):
        traced.append(batch)
        return fitting.loss_fn(params, batch)

    plan, mesh = EpochPlan(47, 2, 6), data_mesh(2)
    run_epoch = make_train_epoch(counted, mesh, plan)
    state, each = started(), []
    for epoch in (3, 4, 5):
        state, reports = run_epoch(state, DATA, epoch)
        each.append(reports)
    before = len(traced)
    together, reports = run_epoch(started(), DATA, epochs=range(3, 6))
    assert same(together, state)
    assert same(reports, stack(each))
    assert reports.loss.value.shape == (3, plan.steps_per_epoch)
    compiled = len(traced) - before
    # others, and as many: nothing is compiled, and other rows are read
    other, _ = run_epoch(started(), DATA, epochs=[0, 9, 2])
    assert len(traced) == before + compiled
    assert not same(other, together)
    for options, error, match in (
        ({}, TypeError, "epoch must be given, or else epochs=, got neither"),
        ({"epoch": 1, "epochs": 2}, TypeError, "got both"),
        ({"epochs": 2, "start_step": 1}, ValueError, "start_step must be 0 with epochs=, got 1"),
        ({"epochs": []}, ValueError, "epochs must be at least one, got none"),
        ({"epochs": 0}, ValueError, "epochs must be an integer in .* from 0 on"),
        ({"epochs": [2**31]}, ValueError, "A traced epoch has 32 bits"),
        ({"epoch": 1, "rng": 3}, TypeError, "rng must be one key, got 3"),
    ):
        with pytest.raises(error, match=match):
            run_epoch(started(), DATA, **options)


def test_members_of_an_ensemble_are_their_own_runs():
    mesh = data_mesh(1)
    plans = [EpochPlan(47, 1, 16, seed=seed) for seed in range(MEMBERS)]
    run_epoch = make_train_epoch(noisy_loss, mesh, plans[0], rng_per="example", donate=False)
    states = [started(seed) for seed in range(MEMBERS)]
    rngs = jax.random.split(jax.random.key(1), MEMBERS)
    tables = [DevicePlan.of(plan, epochs=2) for plan in plans]

    def run(member):
        state, rng, on_device = member
        return run_epoch(state, DATA, 1, rng, on_device=on_device)[0].params

    together = (stack(states), rngs, stack(tables))
    own = stack([run(member) for member in zip(states, rngs, tables, strict=True)])
    in_turn = jax.jit(lambda members: jax.lax.map(run, members))(together)
    assert same(in_turn, own)
    at_once = jax.jit(jax.vmap(run))(together)
    for a, b in zip(jax.tree.leaves(at_once), jax.tree.leaves(own), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)
    # the control: a member that was given another's plan is elsewhere, by far more
    rolled = (*together[:2], jax.tree.map(lambda leaf: jnp.roll(leaf, 1, 0), together[2]))
    swapped = jax.jit(jax.vmap(run))(rolled)
    assert np.abs(swapped["w"] - own["w"]).max() > 1e-3
    # and a traced epoch is that epoch
    traced = jax.jit(
        lambda state, epoch: run_epoch(state, DATA, epoch, rngs[0], on_device=tables[0])
    )
    assert same(traced(states[0], 1)[0].params, jax.tree.map(lambda leaf: leaf[0], own))


def test_a_plan_that_is_handed_in_fits_the_epoch():
    mesh, plan = data_mesh(1), EpochPlan(47, 1, 16)
    run_epoch = make_train_epoch(fitting.loss_fn, mesh, plan)
    with pytest.raises(ValueError, match=r"on_device=DevicePlan.of\(plan, epochs=...\) is"):
        jax.jit(lambda epoch: run_epoch(started(), DATA, epoch))(1)
    with pytest.raises(TypeError, match="epoch must be an integer, got float32"):
        jax.jit(lambda epoch: run_epoch(started(), DATA, epoch))(1.0)
    other = DevicePlan.of(EpochPlan(47, 1, 12), 2)
    with pytest.raises(ValueError, match="got batch_size 12 where it has 16"):
        run_epoch(started(), DATA, 1, on_device=other)
    with pytest.raises(TypeError, match="on_device must be a DevicePlan, got EpochPlan"):
        run_epoch(started(), DATA, 1, on_device=plan)


def test_an_order_function_is_asked_for_the_epochs_that_are_run():
    asked = []

    def order(epoch):
        asked.append(epoch)
        return np.roll(np.arange(47), epoch)

    mesh, plan = data_mesh(1), EpochPlan.from_order(order, 1, 16)
    given = EpochPlan.from_order(np.roll(np.arange(47), 2), 1, 16)
    asked.clear()
    state, _ = make_train_epoch(fitting.loss_fn, mesh, plan)(started(), DATA, 2)
    assert asked == [2]
    assert same(state, make_train_epoch(fitting.loss_fn, mesh, given)(started(), DATA, 0)[0])


def test_progress_is_told_once_a_step_and_not_once_a_rank():
    told = []

    def tell(epoch, step, loss):
        told.append((epoch, step, loss))

    plan, mesh = EpochPlan(47, 2, 4), data_mesh(2)
    run_epoch = make_train_epoch(fitting.loss_fn, mesh, plan, progress=tell, progress_every=4)
    state, reports = run_epoch(started(), DATA, epochs=[1, 6])
    jax.effects_barrier()
    assert plan.steps_per_epoch == 6
    losses = np.asarray(reports.loss.value)
    due = [(i, epoch, step) for i, epoch in enumerate((1, 6)) for step in (3, 5)]
    wanted = [(epoch, step, float(losses[i, step])) for i, epoch, step in due]
    assert sorted(told) == sorted(wanted)
    silent, _ = make_train_epoch(fitting.loss_fn, mesh, plan)(started(), DATA, epochs=[1, 6])
    assert same(silent, state)


def test_a_state_is_given_away_once():
    plan, mesh = EpochPlan(47, 2, 6), data_mesh(2)
    run_epoch = make_train_epoch(fitting.loss_fn, mesh, plan)
    first, _ = run_epoch(started(), DATA, 0)
    second, _ = run_epoch(first, DATA, 1)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"given away\. Use the state that the step returned"):
            run_epoch(first, DATA, 1)
    keeps = make_train_epoch(fitting.loss_fn, mesh, plan, donate=False)
    first, _ = keeps(started(), DATA, 0)
    assert same(keeps(first, DATA, 1)[0], keeps(first, DATA, 1)[0])
    assert same(keeps(first, DATA, 1)[0], second)


def collectives(text):
    kinds = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
    found = []
    for line in re.findall(rf"= (.*?) (?:{kinds})(?:-start)?\(", text):
        arrays = re.findall(r"([a-z]\d+)\[([\d,]*)\]", line)
        found.append(sum(4 * int(np.prod([int(k) for k in s.split(",") if k])) for _, s in arrays))
    return found


def test_nothing_goes_to_the_host_and_spread_rows_are_fetched_by_their_bytes():
    n, width, ranks, rows = 512, 5, 4, 6
    x, y = np.ones((n, width), np.float32), np.ones((n, 1), np.float32)

    def loss(params, batch):
        x, y = batch.data
        return weighted_sum((x.sum(1) * params["b"] - y[:, 0]) ** 2, batch.weights)

    mesh, plan = data_mesh(ranks), EpochPlan(n, ranks, rows)
    run_epoch = make_train_epoch(loss, mesh, plan)
    sent = {}
    for spec in (P(), P("data")):
        data = jax.device_put((x, y), NamedSharding(mesh, spec))
        text = run_epoch.lower(started(), data, 0).compile().as_text()
        assert not TO_HOST.search(text)
        sent[spec] = sum(collectives(text))
    # the step's own: its weights, and gradients of 3 + 1 with the loss
    assert sent[P()] < 60
    batch = ranks * rows * 4 * (width + 1)  # one global batch of rows,
    ids = ranks * rows * 4  # and its ids, once for each array or once for all
    assert batch <= sent[P("data")] - sent[P()] <= batch + 2 * ids
    # the control: of what does call the host it shows
    told = make_train_epoch(loss, mesh, plan, progress=lambda *_: None)
    text = told.lower(started(), (x, y), 0).compile().as_text()
    assert TO_HOST.search(text)


def test_data_that_do_not_fit_are_refused_before_they_are_copied(monkeypatch):
    plan, mesh = EpochPlan(47, 2, 6), data_mesh(2)
    run_epoch = make_train_epoch(fitting.loss_fn, mesh, plan)
    assert meshes.free_bytes(mesh) is None  # which a CPU does not tell
    monkeypatch.setattr(meshes, "free_bytes", lambda mesh: 700)
    with pytest.raises(ValueError, match=r"must fit on every device, got 752 bytes for 700 free\."):
        run_epoch(started(), DATA, 0)
    monkeypatch.undo()

    class Device:
        used = iter([100, 300])

        def memory_stats(self):
            return {"bytes_limit": 1000, "bytes_in_use": next(self.used)}

    class Two:
        local_devices = (Device(), Device())

    assert meshes.free_bytes(Two()) == 700
