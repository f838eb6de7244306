"""Runs that are killed at random, again and again, and go on with other processes and devices.

Simulated in one process: a kill is what is left of a run after it, the last checkpoint, and ranks
are faked devices. Where real processes are killed is `examples/resumable.py`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

from jax_ddp_weighting import (
    BudgetPlan,
    EpochPlan,
    Ledger,
    PackedPlan,
    RunPosition,
    batches,
    data_mesh,
    make_train_step,
    weighted_sum,
)

EXAMPLES, EPOCHS = 61, 3
LENGTHS = np.random.default_rng(1).integers(1, 40, EXAMPLES)


def make_plan(kind, ranks, rows):
    if kind == "budget":  # its order hangs on its ranks: made as it was, resumed on others
        return BudgetPlan(LENGTHS, 2, 80)
    if kind == "packed":
        return PackedPlan(LENGTHS, ranks, rows, 64)
    options = {"order": kind, "seed": 3} if kind in ("keyed", "torch") else {"shuffle": False}
    return EpochPlan(EXAMPLES, ranks, rows, **options)


def count_steps(plan, epoch):
    steps = plan.steps_per_epoch
    return steps(epoch) if callable(steps) else steps


@pytest.mark.parametrize("seed", range(300))
def test_no_id_is_lost_or_repeated_whenever_a_run_is_killed(seed):
    rng = np.random.default_rng(seed)
    kind = ("keyed", "torch", "as they come", "budget", "packed")[seed % 5]
    read = {epoch: [] for epoch in range(EPOCHS)}  # what the state at the end has seen
    saved, kills, finished = None, 0, False
    while not finished:
        ranks, rows = int(rng.integers(1, 9)), int(rng.integers(1, 6))
        plan = make_plan(kind, ranks, rows)
        position = RunPosition.of(plan, 0, 0, manifest_hash="m")
        seen, ledger = {epoch: [] for epoch in range(EPOCHS)}, None
        if saved is not None:
            text, kept, seen = saved
            position, ledger = RunPosition.from_json(text), Ledger.from_bytes(kept)
            seen = {epoch: list(ids) for epoch, ids in seen.items()}
            position.check(plan, manifest_hash="m", ledger=ledger)
        killed_after = int(rng.integers(1, 25)) if kills < 12 else 10**6
        taken = 0
        for epoch in range(position.epoch, EPOCHS):
            if ledger is None or ledger.epoch != epoch:
                ledger = Ledger(EXAMPLES, epoch=epoch)
            sizes = {"num_replicas": ranks} if epoch == position.epoch else {}
            rest = position.rest(plan, epoch, **sizes)
            for step in range(count_steps(rest, epoch)):
                slots = rest.batch(epoch, step)
                held = slots.weights > 0
                seen[epoch] += slots.ids[held].tolist()
                parts = [Ledger(EXAMPLES, epoch=epoch) for _ in range(2)]  # of two processes
                for part, ids in zip(parts, np.array_split(slots.ids[held], 2), strict=True):
                    part.add(ids)
                    ledger.merge(part)
                taken += 1
                if rng.random() < 0.4:
                    now = RunPosition.of(rest, epoch, step + 1, manifest_hash="m", ledger=ledger)
                    copied = {epoch: list(ids) for epoch, ids in seen.items()}
                    saved = now.to_json(), ledger.to_bytes(), copied
                if taken == killed_after:
                    break
            else:
                ledger.check_exactly_once()
                continue
            kills += 1
            break
        else:
            finished, read = True, seen
    for epoch, ids in read.items():
        assert sorted(ids) == list(range(EXAMPLES)), (kind, epoch)


PIXELS = np.random.default_rng(0).normal(size=(EXAMPLES, 5))
LABELS = PIXELS @ np.arange(5.0)
ROWS = 12  # of a step over all ranks, so that each step is the undisturbed run's


def loss_fn(params, batch):
    errors = (batch.data["x"] @ params["w"] - batch.data["y"]) ** 2
    return weighted_sum(errors, batch.weights)


def train(steps_of, ranks_of):
    """The parameters after all epochs, killed after each of `steps_of` on `ranks_of` ranks."""
    fetch = lambda ids: {"x": PIXELS[ids], "y": LABELS[ids]}  # noqa: E731
    steps = {ranks: make_train_step(loss_fn, data_mesh(ranks)) for ranks in set(ranks_of)}
    params = {"w": jnp.zeros(5)}
    tx = optax.adam(0.05)
    saved = TrainState.create(apply_fn=None, params=params, tx=tx), None
    for ranks, killed_after in zip(ranks_of, [*steps_of, 10**6], strict=True):
        state, text = jax.device_get(saved[0]), saved[1]
        plan = EpochPlan(EXAMPLES, ranks, ROWS // ranks)
        position = RunPosition.of(plan, 0, 0, manifest_hash="m")
        position = position if text is None else RunPosition.from_json(text)
        taken = 0
        for epoch in range(position.epoch, EPOCHS):
            rest = position.rest(plan, epoch)
            for step, batch in enumerate(batches(rest, epoch, fetch, data_mesh(ranks)), start=1):
                state, _ = steps[ranks](state, batch)
                taken += 1
                if taken % 2 == 0:  # every second step is saved, so some are taken again
                    now = RunPosition.of(rest, epoch, step, manifest_hash="m")
                    saved = jax.device_get(state), now.to_json()
                if taken == killed_after:
                    break
            if taken == killed_after:
                break
        else:
            return np.asarray(state.params["w"])
    raise AssertionError("it was killed more often than it had steps")


@pytest.mark.quick
@pytest.mark.parametrize("seed", range(6))
def test_the_parameters_are_those_of_a_run_that_nobody_disturbed(seed):
    with jax.enable_x64(True):  # so that only an example too many or too few could show
        rng = np.random.default_rng(seed)
        ranks = [int(each) for each in rng.choice([1, 2, 3, 4, 6], 4)]
        kills = [int(each) for each in rng.integers(1, 7, 3)]
        undisturbed = train([], [1])
        np.testing.assert_allclose(train(kills, ranks), undisturbed, rtol=1e-12)
        assert np.abs(undisturbed - train([], [4])).max() < 1e-12
