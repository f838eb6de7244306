"""What devices count of the ids that they read is what the host counts."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jax_ddp_weighting import CoverageError, DevicePlan, EpochPlan, IdCounts, audit_ids, data_mesh


@jax.jit
def add(counts, ids, weights):
    return counts.add(ids, weights)


@partial(jax.jit, static_argnums=(4,))
def count_epoch(counts, plan, epoch, shift, checked):
    """An epoch counted rank by rank, the counts of each id on one of them."""

    def of_rank(counts, plan, epoch):
        def read(counts, step):
            slots = plan.batch(epoch, step, jax.lax.axis_index("data"))
            return counts.add(slots.ids + shift, slots.weights, "data"), None

        return jax.lax.scan(read, counts, jnp.arange(plan.steps_per_epoch))[0]

    specs = {"in_specs": (P("data"), P(), P()), "out_specs": P("data"), "check_vma": checked}
    return jax.shard_map(of_rank, mesh=data_mesh(4), **specs)(counts, plan, epoch)


@pytest.mark.parametrize(
    ("n", "tail", "checked"), [(11, "mask", True), (11, "repeat", False), (27, "drop", True)]
)
def test_an_epoch_on_four_ranks_is_audited_as_on_the_host(n, tail, checked):
    plan = EpochPlan(n, 4, 3, tail=tail)
    zeros, on_device = IdCounts.zeros(n, 4), DevicePlan.of(plan, 3)
    steps = [plan.batch(2, step) for step in range(plan.steps_per_epoch)]
    ids, weights = (
        np.concatenate([getattr(s, name) for s in steps], axis=1) for name in ("ids", "weights")
    )
    counts = count_epoch(zeros, on_device, 2, 0, checked)
    assert counts.audit(epoch=2) == audit_ids(ids, n, weights=weights, epoch=2)
    assert counts.audit(epoch=2, limit=1) == audit_ids(ids, n, weights=weights, epoch=2, limit=1)
    # the control: ids that are not the plan's are counted as they are
    shifted = count_epoch(zeros, on_device, 2, 1, checked).audit(epoch=2)
    wanted = audit_ids(ids + 1, n, weights=weights, epoch=2)
    assert shifted == replace(wanted, out_of_range=())
    assert shifted != counts.audit(epoch=2)


def test_all_ranks_at_once_are_counted_as_on_the_host():
    ids = np.array([[0, 4, 4, 9], [3, -1, 2**31 - 1, 0], [10, 1, 0, 0]], np.int32)
    weights = np.array([[1, 1, 1, 0], [1, 1, 1, 1], [1, 0, 0, 1]])
    wanted = audit_ids(np.tile(ids, 2), 10, weights=np.tile(weights, 2))
    counts = IdCounts.zeros(10, 3)
    counts = add(add(counts, ids, weights), ids.reshape(-1), weights.reshape(-1))
    assert wanted.num_out_of_range == 6
    assert counts.audit() == replace(wanted, out_of_range=())
    with pytest.raises(CoverageError, match="6 slots out of range"):
        counts.audit().check_exactly_once()


def test_ids_of_any_integer_dtype():
    wanted = audit_ids([[5, 250]], 300)
    for dtype in (np.uint8, np.uint32):
        counts = IdCounts.zeros(300, 1).add(np.array([5, 250], dtype), np.ones(2, bool))
        assert counts.audit() == wanted
    with jax.enable_x64(True):
        counts = IdCounts.zeros(300, 1).add(np.array([5, 2**32 + 5]), np.ones(2))
    assert (counts.audit().unique, counts.audit().num_out_of_range) == (1, 1)


def test_no_examples():
    counts = IdCounts.zeros(0, 2).add(np.zeros((2, 1), np.int32), np.zeros((2, 1)))
    assert counts.audit() == audit_ids([[0], [0]], 0, weights=[[0], [0]])


def test_what_cannot_be_counted_is_refused():
    counts = IdCounts.zeros(10, 2)
    ids = np.zeros((2, 2), np.int32)
    for weight in (0.5, 2.0, -1.0, np.nan):
        with pytest.raises(ValueError, match="weights must be 0 or 1, got others"):
            counts.add(ids, np.full((2, 2), weight)).audit()
    with pytest.raises(ValueError, match="weights must be 0 or 1, got others"):
        counts.add(ids, np.full((2, 2), 1e-60)).audit()
    with pytest.raises(ValueError, match="ids must"):
        counts.add(np.full((2, 2), 2**32 + 5), ids)
    full = replace(counts, _slots=jnp.full(2, 2**32 - 2, jnp.uint32)).add(ids, ids)
    with pytest.raises(ValueError, match=r"slots must be fewer than 2\*\*32 - 1"):
        full.audit()
    with pytest.raises(TypeError, match="ids must be integers, got float32"):
        counts.add(np.zeros((2, 2), np.float32), ids)
    for shape in ((2, 1), (3,)):
        with pytest.raises(ValueError, match="ids must have the shape of weights"):
            counts.add(np.zeros(shape, np.int32), np.ones((3,) if shape == (3,) else (2, 2)))
    with pytest.raises(ValueError, match=r"num_examples must .*audit_ids, on the host"):
        IdCounts.zeros(2**31, 2)
    with pytest.raises(ValueError, match="axis_name must be an axis mapped here"):
        counts.add(ids, ids, "data")
    with pytest.raises(ValueError, match=r"must be an axis of 2 ranks.*got 3"):
        jax.vmap(lambda i: counts.add(i, i, "data"), axis_name="data")(np.zeros((3, 2), np.int32))
    with pytest.raises(ValueError, match="counts must be those of 1 ranks here, got 2"):
        jax.vmap(lambda i: counts.add(i, i, "data"), axis_name="data")(ids)


@pytest.mark.parametrize("name", ["ids", "weights"])
def test_masked_slots_are_refused(name):
    given = {"ids": np.arange(4), "weights": np.ones(4, np.int32)}
    assert IdCounts.zeros(4, 2).add(**given).audit().exactly_once
    given[name] = np.ma.array(given[name], mask=[False, False, False, True])
    with pytest.raises(TypeError, match=rf"IdCounts\.add: {name} must not be masked"):
        IdCounts.zeros(4, 2).add(**given)
