"""Batches on the mesh: the plan's rows, each on its rank's device, errors at their own step."""

import dataclasses
import threading
from collections import UserDict
from types import MappingProxyType

import jax
import numpy as np
import pytest
import regimes

from jax_ddp_weighting import (
    Batch,
    DistributedSampler,
    EpochPlan,
    batches,
    data_mesh,
    weighted_order,
)

PIXELS = np.arange(47, dtype=np.float32) * 10


def fetch(ids):
    return {"pixels": PIXELS[ids], "id": ids.astype(np.int32)}


@pytest.mark.parametrize("prefetch", [0, 1, 2, 7])
@pytest.mark.parametrize("tail", ["mask", "repeat", "drop"])
def test_batches_are_the_plans_slots_with_their_data(tail, prefetch):
    plan = EpochPlan(47, num_replicas=3, batch_size=4, seed=5, tail=tail)
    found = list(batches(plan, 2, fetch, data_mesh(3), prefetch=prefetch))
    assert len(found) == plan.steps_per_epoch
    for step, batch in enumerate(found):
        slots = plan.batch(2, step)
        np.testing.assert_array_equal(np.asarray(batch.ids).reshape(3, 4), slots.ids)
        np.testing.assert_array_equal(np.asarray(batch.weights).reshape(3, 4), slots.weights)
        np.testing.assert_array_equal(batch.data["id"], batch.ids)
        np.testing.assert_array_equal(batch.data["pixels"], PIXELS[np.asarray(batch.ids)])


def test_rank_r_reads_on_the_rth_device_of_the_axis():
    plan = EpochPlan(47, num_replicas=4, batch_size=2)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4])[::-1], ("data",))
    batch = next(batches(plan, 0, fetch, mesh))
    for shard in batch.ids.addressable_shards:
        rank = list(mesh.devices).index(shard.device)
        np.testing.assert_array_equal(shard.data, plan.batch(0, 0).ids[rank])


def test_over_a_second_axis_the_rows_are_replicated():
    plan = EpochPlan(47, num_replicas=2, batch_size=2)
    mesh = jax.make_mesh((2, 2), ("data", "model"), devices=jax.devices()[:4])
    batch = next(batches(plan, 0, fetch, mesh))
    assert len(batch.ids.addressable_shards) == 4
    np.testing.assert_array_equal(np.asarray(batch.ids).reshape(2, 2), plan.batch(0, 0).ids)


def test_a_resumed_epoch_goes_on_where_it_stopped():
    plan = EpochPlan(47, num_replicas=3, batch_size=4)
    whole = [np.asarray(b.ids) for b in batches(plan, 1, fetch, data_mesh(3))]
    rest = [np.asarray(b.ids) for b in batches(plan, 1, fetch, data_mesh(3), start_step=2)]
    np.testing.assert_array_equal(whole[2:], rest)


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("error", [OSError, StopIteration])
def test_an_error_in_fetch_surfaces_at_its_own_step(error, prefetch):
    plan = EpochPlan(48, num_replicas=2, batch_size=4, shuffle=False)

    def failing(ids):
        if 24 in ids:  # the first id of step 3
            raise error("disk")
        return fetch(ids)

    stream = batches(plan, 0, failing, data_mesh(2), prefetch=prefetch)
    for _ in range(3):
        next(stream)
    # StopIteration must not pass for the end of the epoch
    with pytest.raises((OSError, RuntimeError), match=r"disk|StopIteration") as caught:
        next(stream)
    cause = caught.value if error is OSError else caught.value.__cause__
    assert cause.__notes__ == ["batches: fetch failed at epoch 0, step 3."]


def test_an_epoch_left_early_leaves_no_thread_behind():
    plan = EpochPlan(47, num_replicas=2, batch_size=2)
    stream = batches(plan, 0, fetch, data_mesh(2))
    next(stream)
    stream.close()
    for thread in threading.enumerate():
        if thread.name.startswith("batches"):
            thread.join(timeout=10)
            assert not thread.is_alive()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"plan": EpochPlan(9, 2, 2)}, r"plan must have as many ranks as the mesh's 'data' axis"),
        ({"start_step": 5}, r"start_step must be in \[0, 4\], got 5"),
        ({"prefetch": -1}, r"prefetch must be an integer of at least 0, got -1"),
        ({"axis_name": "batch"}, r"mesh must have the axis 'batch', got axes \('data',\)"),
        ({"plan": EpochPlan(2**31 + 1, 3, 4)}, r"ids of at most 32 bits while x64 is off"),
    ],
)
def test_bad_arguments_are_refused_before_the_first_batch(change, message):
    arguments = {"plan": EpochPlan(47, 3, 4), "start_step": 0, "prefetch": 2, "axis_name": "data"}
    arguments |= change
    with pytest.raises(ValueError, match=message):
        batches(arguments.pop("plan"), 0, fetch, data_mesh(3), **arguments)


def test_a_fetch_that_returns_too_few_rows_is_refused():
    plan = EpochPlan(47, num_replicas=3, batch_size=4)
    with pytest.raises(ValueError, match=r"one row per id, got shape \(11,\) at data for 12 ids"):
        next(batches(plan, 0, lambda ids: PIXELS[ids[1:]], data_mesh(3)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"weights": np.ones(2)}, r"weights must have one entry per row, got shape \(2,\) for 3"),
        ({"weights": np.array([1, -0.5, 1])}, r"finite and at least 0, got -0.5 at row 1"),
        ({"weights": np.array([1, 1, np.nan])}, r"finite and at least 0, got nan at row 2"),
        ({"ids": np.arange(4)}, r"ids must have one entry per row, got shape \(4,\) for 3"),
    ],
)
def test_a_batch_by_hand_is_checked(arguments, message):
    with pytest.raises(ValueError, match=message):
        Batch.of(np.zeros((3, 2)), **arguments)


def test_leaves_of_different_lengths_are_no_batch():
    with pytest.raises(ValueError, match=r"one leading axis of rows, got shapes"):
        Batch.of({"x": np.zeros(3), "y": np.zeros(2)})


@pytest.mark.parametrize("regime", ["shard_map", "shard_map_explicit"])
def test_batches_lie_on_meshes_of_both_axis_types(regime):
    plan = EpochPlan(47, num_replicas=2, batch_size=2)
    mesh = regimes.make_mesh(regime, 2)
    batch = next(batches(plan, 0, fetch, mesh))
    assert batch.ids.sharding.mesh == mesh


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_local_enable_x64_holds_for_batches_that_are_fetched_ahead(prefetch):
    # the setting belongs to a thread, and another one fetches ahead
    plan = EpochPlan(5, 2, 2)
    with jax.enable_x64(True):
        stream = batches(plan, 0, lambda ids: ids / 7, data_mesh(2), prefetch=prefetch)
    for batch in stream:
        assert (batch.data.dtype, batch.ids.dtype) == (np.float64, np.int64)
        np.testing.assert_array_equal(np.asarray(batch.data), np.asarray(batch.ids) / 7)
    (batch,) = batches(EpochPlan(2, 2, 1), 0, lambda ids: ids / 7, data_mesh(2), prefetch=prefetch)
    assert (batch.data.dtype, batch.ids.dtype) == (np.float32, np.int32)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"epoch": -1}, ValueError, r"batches: epoch must be an integer in .* got -1"),
        ({"start_step": 0.5}, TypeError, r"batches: start_step must be in \[0, 1\], got 0\.5"),
        ({"prefetch": "a"}, TypeError, "batches: prefetch must be an integer .* got 'a'"),
    ],
)
def test_numbers_are_checked_at_once(change, error, message):
    arguments = {"epoch": 0, "fetch": fetch, "mesh": data_mesh(2), **change}
    with pytest.raises(error, match=message):
        batches(EpochPlan(4, 2, 2), **arguments)


@pytest.mark.parametrize("plan", [DistributedSampler(8, 1, 0), [0, 1, 2], 8])
def test_what_is_no_plan_is_refused_in_words(plan):
    name = type(plan).__name__
    with pytest.raises(TypeError, match=f"batches: plan must be an EpochPlan, .* got {name}. Make"):
        batches(plan, 0, lambda ids: ids, data_mesh(1))


@pytest.mark.parametrize(
    ("before", "after"), [((4, 1), (3, 2)), ((1, 4), (5, 1)), ((2, 3), (6, 2))]
)
def test_an_epoch_goes_on_with_other_ranks_and_rows(before, after):
    plan = EpochPlan(23, *before)
    first = [*batches(plan, 1, lambda ids: ids, data_mesh(before[0]))][:2]
    rest = plan.resumed(1, plan.position(2), num_replicas=after[0], batch_size=after[1])
    later = list(batches(rest, 1, lambda ids: ids, data_mesh(after[0])))
    read = [
        i
        for batch in (*first, *later)
        for i, weight in zip(batch.ids.tolist(), batch.weights.tolist(), strict=True)
        if weight
    ]
    assert sorted(read) == list(range(23))
    with pytest.raises(ValueError, match="epoch must be 1, the one that this plan is the rest of"):
        list(batches(rest, 2, lambda ids: ids, data_mesh(after[0])))


def test_a_second_epoch_over_one_draw_is_said_and_a_function_draws_anew():
    mesh, fetch = data_mesh(1), lambda ids: ids
    plan = EpochPlan.from_order([2, 2, 0], 1, 3, num_examples=3, repeats=True)
    with pytest.warns(UserWarning, match=r"epoch 1 reads the ids of epoch 0 again.* a function of"):
        next(batches(plan, 1, fetch, mesh))
    plan = EpochPlan.from_order(weighted_order([1, 2, 3], 9), 1, 9)
    drawn = [next(batches(plan, epoch, fetch, mesh)).ids.tolist() for epoch in (0, 1, 1)]
    assert drawn[0] != drawn[1] == drawn[2]


@pytest.mark.parametrize("rows", [PIXELS, {"x": PIXELS}, [1.0] * 47])
def test_rows_are_no_function_of_ids(rows):
    name = type(rows).__name__
    with pytest.raises(TypeError, match=rf"batches: fetch must be a function of ids, got {name}\."):
        batches(EpochPlan(47, 3, 4), 0, rows, data_mesh(3))


def test_an_array_that_numpy_cannot_read_is_named():
    class Elsewhere:
        def __array__(self, dtype=None, copy=None):
            raise TypeError("on another device")

    with pytest.raises(TypeError, match="on another device") as caught:
        list(batches(EpochPlan(47, 3, 4), 0, lambda ids: {"x": Elsewhere()}, data_mesh(3)))
    notes = caught.value.__notes__
    assert notes[0] == "batches: fetch must return arrays, got Elsewhere at data['x']."


def test_complex_weights_of_a_batch_are_refused():
    with pytest.raises(TypeError, match=r"Batch.of: weights must be real numbers, got complex128"):
        Batch.of(np.ones(2), np.array([1j, 1]))


@dataclasses.dataclass
class Rows:
    x: np.ndarray


@pytest.mark.parametrize("wrap", [UserDict, MappingProxyType, lambda rows: Rows(**rows)])
def test_containers_that_jax_does_not_look_into_are_named(wrap):
    rows = wrap({"x": np.ones(4)})
    match = rf"data must be arrays, or a pytree of them, got {type(rows).__name__}, into which JAX"
    with pytest.raises(TypeError, match=f"^Batch.of: {match}"):
        Batch.of(rows)
    with pytest.raises(TypeError, match=f"^batches: {match}"):
        next(batches(EpochPlan(12, 3, 4), 0, lambda ids: wrap({"x": ids}), data_mesh(3)))
