"""What users compute of reports between the steps: one program each, and one of them under way."""

from threading import Event
from types import SimpleNamespace

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jax_ddp_weighting import GlobalLoss, IdCounts, WeightedSum, data_mesh
from jax_ddp_weighting.distributed import between_steps, under_way

OPERATIONS = {
    "add": lambda one, more: one + more,
    "mean": lambda one, more: one.mean(),
    "whole": lambda one, more: one.whole(),
    "means": lambda one, more: GlobalLoss(0.0, {"a": one, "b": more}, divisors={"b": 2.0}).means,
}


@pytest.fixture
def programs():
    """How long each program took that was compiled since: one entry a program."""
    found = []

    def note(event, duration, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            found.append(duration)

    jax.monitoring.register_event_duration_secs_listener(note)
    yield found
    jax.monitoring.unregister_event_duration_listener(note)


def replicated(value):
    return jax.device_put(value, jax.NamedSharding(data_mesh(4), PartitionSpec()))


def sums(shape, dtype=np.float32):
    return [
        WeightedSum(replicated(np.full(shape, k, dtype)), replicated(np.full(shape, 2, np.int32)))
        for k in (3, 5)
    ]


@pytest.mark.parametrize("name", OPERATIONS)
def test_each_operation_is_one_program(name, programs):
    jax.clear_caches()
    operation, (one, more) = OPERATIONS[name], sums((7, 3))
    made = len(programs)
    operation(one, more)
    assert len(programs) == made + 1
    operation(one, more)
    assert len(programs) == made + 1
    jax.tree.map(lambda leaf: leaf + 1, one)  # that others are counted
    assert len(programs) > made + 1


def test_ids_of_a_step_are_counted_in_one_program(programs):
    jax.clear_caches()
    counts = jax.tree.map(replicated, IdCounts.zeros(11, 4))
    held = jax.NamedSharding(data_mesh(4), PartitionSpec("data"))
    made, seen = len(programs), []
    for first in range(0, 12, 4):
        ids = np.arange(first, first + 4)
        weights = (ids < 11).astype(np.int32)
        seen.append(jax.device_put((ids.astype(np.int32), weights), held))
    counts = counts.add(*seen[0])
    assert len(programs) == made + 1
    for ids, weights in seen[1:]:
        counts = counts.add(ids, weights)
    assert counts.audit().exactly_once
    assert not counts.add(*seen[0]).audit().exactly_once


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("dtype", [np.int32, np.float32, jnp.bfloat16])
def test_one_program_gives_what_a_transformation_gives(name, dtype):
    one, more = sums((), dtype)
    rest = WeightedSum(jnp.float32(4), jnp.float32(2.0**31))
    one = WeightedSum(one.total, one.weight, None if name == "add" else rest)
    operation = OPERATIONS[name]
    alone, inside = operation(one, more), jax.jit(operation)(one, more)
    assert jax.tree.structure(alone) == jax.tree.structure(inside)
    for a, b in zip(jax.tree.leaves(alone), jax.tree.leaves(inside), strict=True):
        assert (a.dtype, a.weak_type) == (b.dtype, b.weak_type)
        np.testing.assert_array_equal(a, b)


class Late:
    """A sum over four devices, of which the last comes when somebody has begun to wait for it."""

    def __init__(self, monkeypatch):
        self.may_come = Event()
        waiting = SimpleNamespace(sleep=lambda seconds: self.may_come.set())  # nobody else's sleep
        monkeypatch.setattr(under_way, "time", waiting)
        shape = jax.ShapeDtypeStruct((1,), np.float32)

        def on_rank(x):
            rank = jax.lax.axis_index("data")
            return jax.lax.psum(jax.pure_callback(self.hand_out, shape, rank, x), "data")

        held = PartitionSpec("data")
        program = jax.shard_map(
            on_rank, mesh=data_mesh(4), in_specs=held, out_specs=PartitionSpec(), check_vma=False
        )
        rows = jax.device_put(np.ones(4, np.float32), jax.NamedSharding(data_mesh(4), held))
        self.total = jax.jit(program)(rows)

    def hand_out(self, rank, x):
        if rank == 3:
            assert self.may_come.wait(30), "nobody waits"
        return x

    def sums(self):
        weight = replicated(np.ones(1, np.int32))
        return WeightedSum(self.total, weight), WeightedSum(self.total, weight)


@pytest.fixture
def late(monkeypatch):
    found = Late(monkeypatch)
    yield found
    found.may_come.set()
    found.total.block_until_ready()


@pytest.mark.parametrize("name", OPERATIONS)
def test_what_it_needs_is_waited_for_where_more_would_starve_it(name, late):
    """XLA lets 32 computations of a CPU device be in flight; of more, none ends."""
    assert not late.total.is_ready()
    OPERATIONS[name](*late.sums())
    assert late.total.is_ready()


def test_without_a_wait_it_is_under_way_still(late, monkeypatch):
    monkeypatch.setattr(between_steps, "wait_for_all", lambda arrays: None)
    first, second = late.sums()
    total = first + second
    assert not late.total.is_ready()
    late.may_come.set()
    np.testing.assert_array_equal(total.total, [8.0])


def test_many_sums_of_an_unfinished_step_add_up(late):
    whole = sum(50 * late.sums())
    assert float(whole.mean()[0]) == 4.0
    np.testing.assert_array_equal(whole.weight, [100])


def test_a_term_with_a_divisor_has_a_mean_whatever_its_weights_shape():
    term = WeightedSum(jnp.float32(6), jnp.ones(2, jnp.int32))
    assert float(GlobalLoss(0.0, {"a": term}, divisors={"a": 3.0}).means["a"]) == 2.0
    with pytest.raises(ValueError, match=r"WeightedSum\.mean: weight must have the shape of total"):
        GlobalLoss(0.0, {"a": term}).means


def test_one_device_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(under_way, "_wait_until_ready", lambda array: pytest.fail("waited"))
    one = WeightedSum(jnp.float32(3), jnp.int32(2))
    assert float((one + one).mean()) == 1.5
    host = WeightedSum(3.0, 2)
    assert float((host + one).mean()) == 1.5


@pytest.mark.parametrize("name", OPERATIONS)
def test_masked_numbers_are_refused_and_not_read(name):
    masked = WeightedSum(np.ma.array([1.0, 9.0], mask=[False, True]), jnp.ones(2))
    with pytest.raises(ValueError, match="masked arrays are not supported"):
        OPERATIONS[name](masked, masked)
    held = WeightedSum(np.array([1.0, 9.0]), jnp.ones(2))
    OPERATIONS[name](held, held)


def test_integers_that_jax_would_cut_are_refused_or_divided_as_floats():
    large = WeightedSum(2**40, 2**40)
    with pytest.raises(
        OverflowError, match=r"must fit into 32 bits, got 1099511627776\. Add up on"
    ):
        large + WeightedSum(jnp.int32(1), jnp.int32(1))
    assert float(large.mean()) == 1.0
    assert float(GlobalLoss(0.0, {"a": large}).means["a"]) == 1.0
