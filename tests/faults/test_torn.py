"""Checkpoints that are torn, a file at a time: restored whole, or refused by name."""

import gc
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jax_ddp_weighting import EpochPlan, Ledger, RunPosition, data_mesh, restore_run, save_run

# Orbax leaves coroutines that nobody has waited for
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

PLAN = EpochPlan(12, num_replicas=2, batch_size=1)


def run_at(step):
    ledger = Ledger(12, epoch=0)
    for taken in range(step):
        ledger.add(PLAN.batch(0, taken).ids)
    return RunPosition.of(PLAN, 0, step, manifest_hash="m"), ledger


def tear(path, how, place=0.5):
    """A file as a broken disk, or a copy cut short, leaves it."""
    held = path.read_bytes()
    middle = int(place * len(held))
    torn = {
        "half": held[:middle],
        "empty": b"",
        "garbled": bytes(each ^ 0x5A for each in held),
        "one bit": held[:middle] + bytes([held[middle] ^ 0x40]) + held[middle + 1 :],
    }
    if how == "gone":
        path.unlink()
    else:
        path.write_bytes(torn[how])


@pytest.fixture(scope="module")
def two_saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    with ocp.CheckpointManager(folder) as manager:
        for step in (1, 2):
            save_run(manager, step, torn_state(step), *run_at(step))
    return folder


def torn_state(step):
    # of chance, so that Orbax cannot make it smaller: one bit is one bit of a number
    values = np.random.default_rng(step).normal(size=4000).astype(np.float32)
    return {"w": jax.device_put(values, NamedSharding(data_mesh(2), P("data"))), "step": step}


@pytest.mark.parametrize(
    "how",
    [
        pytest.param("one bit", marks=pytest.mark.quick),
        pytest.param("half", marks=pytest.mark.quick),
        "gone",
        "empty",
        "garbled",
    ],
)
def test_a_torn_checkpoint_is_restored_whole_or_refused(two_saved, tmp_path, how):
    refused = []
    files = [path for path in (two_saved / "2").rglob("*") if path.is_file()]
    for number, file in enumerate(files):
        shutil.copytree(two_saved, folder := tmp_path / str(number))
        tear(folder / file.relative_to(two_saved), how)
        with ocp.CheckpointManager(folder) as manager:
            try:
                run = restore_run(manager, torn_state(0))
            except ValueError as error:
                refused.append((file.relative_to(two_saved / "2").parts[0], str(error)))
                continue
            assert (run.step, run.position.position, run.consumed.num_due) == (2, 4, 8)
            assert run.state["step"] == 2
            np.testing.assert_array_equal(run.state["w"], torn_state(2)["w"])
    gc.collect()  # of the coroutines, before a test that minds them
    # what is not read may be torn; and each item has something that is read
    assert {"state", "ledger", "run"} <= {item for item, _ in refused}, refused
    assert all(text.startswith("restore_run: checkpoint 2 ") for _, text in refused), refused
    with ocp.CheckpointManager(folder) as manager:
        assert restore_run(manager, torn_state(0), step=1).step == 1  # as the error says


def test_other_numbers_than_were_saved_are_seen_by_their_sums_alone(two_saved, tmp_path):
    """The same file, of a checkpoint that kept no sums, is taken for what it is not."""
    with ocp.CheckpointManager(tmp_path / "without") as manager:
        save_run(manager, 2, torn_state(2), *run_at(2), sums=False)
    wrong = 0
    # where in its files Orbax puts the numbers is its own affair
    for file in (tmp_path / "without" / "2" / "state").rglob("*"):
        if not file.is_file() or file.stat().st_size < 2000:
            continue
        whole = file.read_bytes()
        for place in (0.3, 0.5, 0.7):
            tear(file, "one bit", place)
            with ocp.CheckpointManager(tmp_path / "without") as manager:
                try:
                    run = restore_run(manager, torn_state(0))
                except ValueError:  # what says how the numbers lie
                    continue
                finally:
                    file.write_bytes(whole)
            wrong += not np.array_equal(run.state["w"], torn_state(2)["w"])
    gc.collect()  # of the coroutines, before a test that minds them
    assert wrong


def test_what_is_read_in_another_dtype_is_taken_for_what_was_asked(two_saved):
    like = {"w": jnp.zeros(4000, jnp.bfloat16), "step": 0}
    with ocp.CheckpointManager(two_saved) as manager:
        run = restore_run(manager, like)
    np.testing.assert_array_equal(run.state["w"], torn_state(2)["w"].astype(jnp.bfloat16))
