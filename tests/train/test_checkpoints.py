"""Runs in Orbax's checkpoints: all of a run is there or nothing, and comes back on any mesh."""

import shutil
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jax_ddp_weighting import (
    EpochPlan,
    Ledger,
    RunPosition,
    data_mesh,
    restore_run,
    save_run,
)

PLAN = EpochPlan(12, num_replicas=2, batch_size=1)


def state_on(mesh, value):
    params = {"w": jax.device_put(value * jnp.arange(12.0), NamedSharding(mesh, P("data")))}
    return TrainState.create(apply_fn=None, params=params, tx=optax.adam(0.1))


def run_at(step):
    ledger = Ledger(12, epoch=0)
    for taken in range(step):
        ledger.add(PLAN.batch(0, taken).ids)
    return RunPosition.of(PLAN, 0, step, manifest_hash="m", rng=jax.random.key(4)), ledger


@pytest.fixture
def manager(tmp_path):
    with ocp.CheckpointManager(tmp_path, options=ocp.CheckpointManagerOptions()) as manager:
        yield manager


def test_a_sharded_run_comes_back_on_another_mesh(manager):
    position, ledger = run_at(2)
    assert restore_run(manager, {}) is None  # nothing is there yet
    assert save_run(manager, 2, state_on(data_mesh(4), 3.0), position, ledger)
    ledger.add(PLAN.batch(0, 2).ids)  # what comes after does not belong to it
    manager.wait_until_finished()
    run = restore_run(manager, state_on(data_mesh(3), 0.0))
    assert run.step == 2
    np.testing.assert_array_equal(run.state.params["w"], 3 * np.arange(12.0))
    assert run.state.params["w"].sharding.mesh.shape == {"data": 3}
    assert run.state.params["w"].addressable_shards[0].data.shape == (4,)
    assert run.consumed.num_due == run.ledger.num_due == 8
    run.position.check(PLAN, manifest_hash="m", ledger=run.consumed)
    assert replace(run.position, ledger="") == position
    assert jax.random.bits(run.position.key) == jax.random.bits(jax.random.key(4))
    rest = run.position.rest(PLAN, 0, num_replicas=3)
    assert run.ledger.due(rest).tolist()[:3] == rest.batch(0, 0).ids.reshape(-1).tolist()


def test_shapes_say_where_a_run_is_to_lie(manager):
    position, _ = run_at(1)
    save_run(manager, 1, state_on(data_mesh(2), 1.0), position)
    manager.wait_until_finished()
    there = NamedSharding(data_mesh(6), P())
    arrays = jax.tree.map(jnp.asarray, state_on(data_mesh(1), 0.0))
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=there), arrays)
    run = restore_run(manager, like)
    assert len(run.state.params["w"].sharding.device_set) == 6
    assert run.ledger is None
    assert run.position == position


def test_checkpoints_that_the_manager_leaves_out_merge_no_ledgers(tmp_path):
    options = ocp.CheckpointManagerOptions(save_interval_steps=2, max_to_keep=1)
    with ocp.CheckpointManager(tmp_path, options=options) as manager:
        state = {"w": jnp.ones(2)}
        saved = [save_run(manager, step, state, *run_at(step)) for step in (2, 3, 4)]
        assert saved == [True, False, True]
        assert save_run(manager, 5, state, *run_at(5), force=True)
        manager.wait_until_finished()
        assert manager.all_steps() == [5]
        assert restore_run(manager, state).position.position == 10
        with pytest.raises(FileNotFoundError):
            restore_run(manager, state, step=4)


def test_what_is_no_run_or_not_one_run_is_refused(tmp_path):
    state = {"w": jnp.ones(2)}
    with ocp.CheckpointManager(tmp_path / "a") as manager:
        manager.save(1, args=ocp.args.Composite(state=ocp.args.StandardSave(state)))
        manager.wait_until_finished()
        with pytest.raises(ValueError, match="checkpoint 1 must hold a run, got none"):
            restore_run(manager, state)
    for name, step in (("b", 2), ("c", 3)):
        with ocp.CheckpointManager(tmp_path / name) as manager:
            save_run(manager, 1, state, *run_at(step))
            manager.wait_until_finished()
            with pytest.raises(ValueError, match=r"ledger must be of the position's epoch, 0, got"):
                save_run(manager, 2, state, run_at(1)[0], Ledger(12, epoch=1))
    shutil.rmtree(tmp_path / "b" / "1" / "ledger")
    shutil.copytree(tmp_path / "c" / "1" / "ledger", tmp_path / "b" / "1" / "ledger")
    with (
        ocp.CheckpointManager(tmp_path / "b") as manager,
        pytest.raises(ValueError, match="must hold the ledger of its position"),
    ):
        restore_run(manager, state)


def test_a_checkpoint_that_is_not_finished_does_not_count(tmp_path):
    state = {"w": jnp.ones(2)}
    with ocp.CheckpointManager(tmp_path) as manager:
        save_run(manager, 1, state, *run_at(1))
        save_run(manager, 2, {"w": jnp.zeros(2)}, *run_at(2))
        manager.wait_until_finished()
    # as a kill leaves it: under its unfinished name
    (tmp_path / "2").rename(tmp_path / "2.orbax-checkpoint-tmp")
    with ocp.CheckpointManager(tmp_path) as manager:
        run = restore_run(manager, state)
        assert (run.step, run.consumed.num_due) == (1, 10)
        np.testing.assert_array_equal(run.state["w"], 1)
