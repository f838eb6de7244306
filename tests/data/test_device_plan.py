"""The ids that a device makes are numpy's, bit for bit, wherever they are made."""

import json
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from jax_ddp_weighting import (
    BudgetPlan,
    DevicePlan,
    EpochPlan,
    PackedPlan,
    data_mesh,
    mixture_order,
    weighted_order,
)
from jax_ddp_weighting.sampling.slots import Slots

RECORDED = json.loads((Path(__file__).parents[1] / "recorded" / "torch_sampler.json").read_text())


def rolled(epoch):
    return np.roll(np.arange(11), epoch)


def same(ours, theirs):
    """Whether the slots are equal to the last bit, and of the dtypes that they should be."""
    narrow = ours.ids.dtype == np.int32
    return (
        np.array_equal(ours.ids, theirs.ids)
        and np.array_equal(ours.weights, theirs.weights)
        and (narrow, ours.weights.dtype) == (True, theirs.weights.dtype)
    )


@jax.jit
def read_steps(plan, epoch, steps):
    return jax.vmap(lambda step: plan.batch(epoch, step))(steps)


def check_epoch(plan, epoch, epochs=3):
    """Every step of an epoch, against the plan's own."""
    if plan.only_epoch is not None or not plan.shuffle:
        epochs = None
    read = read_steps(DevicePlan.of(plan, epochs), epoch, jnp.arange(plan.steps_per_epoch))
    steps = [plan.batch(epoch, step) for step in range(plan.steps_per_epoch)]
    found = Slots(np.asarray(read.ids), np.asarray(read.weights))
    ids, weights = ([getattr(s, name) for s in steps] for name in ("ids", "weights"))
    assert same(found, Slots(np.stack(ids), np.stack(weights)))


@st.composite
def large_plans(draw):
    """Plans whose orders are ciphers, with a step and a rank of theirs."""
    n = draw(
        st.integers(4097, 2**31) | st.integers(12, 31).map(lambda bits: 2**bits + 1 - bits % 2)
    )
    n = min(max(n, 4097), 2**31)
    ranks = draw(st.integers(1, 65_536))
    seed = draw(st.integers(-(2**63), 2**64 - 1))
    tail = draw(st.sampled_from(["mask", "repeat", "drop"]))
    plan = EpochPlan(n, ranks, 3, seed=seed, tail=tail)
    epochs = draw(st.lists(st.integers(0, 2**31 - 1), min_size=3, max_size=3))
    if draw(st.booleans()):
        plan = plan.resumed(epochs[0], draw(st.integers(0, n - 1)))
        epochs = [epochs[0]] * 3
    if not plan.steps_per_epoch:
        plan = EpochPlan(n, ranks, 3, seed=seed)
        epochs = [*range(3)]
    last = plan.steps_per_epoch - 1
    step = draw(st.integers(0, last) | st.just(last))
    return plan, epochs, step, draw(st.integers(0, ranks - 1))


@settings(max_examples=150, deadline=None)
@given(large_plans(), st.integers(0, 2))
def test_ids_are_numpys_for_any_plan(drawn, which):
    plan, epochs, step, rank = drawn
    found = DevicePlan.of(plan, epochs).batch(epochs[which], step, rank)
    wanted = plan.batch(epochs[which], step, ranks=[rank])
    assert same(found, Slots(wanted.ids[0], wanted.weights[0]))


def test_the_comparison_tells_seeds_epochs_steps_and_ranks_apart():
    """The control: what differs in one number is found."""
    plan = EpochPlan(2**31, 4, 3)
    wanted = plan.batch(1, 5, ranks=[2])
    wanted = Slots(wanted.ids[0], wanted.weights[0])
    on_device = DevicePlan.of(plan, 3)
    assert same(on_device.batch(1, 5, 2), wanted)
    for numbers in ((0, 5, 2), (1, 4, 2), (1, 5, 3)):
        assert not same(on_device.batch(*numbers), wanted)
    other = DevicePlan.of(EpochPlan(2**31, 4, 3, seed=1), 3)
    assert not same(other.batch(1, 5, 2), wanted)


def test_all_of_a_cipher_is_a_permutation():
    plan = EpochPlan(5000, 1, 5000)
    ids = np.asarray(DevicePlan.of(plan, 1).batch(0, 0, 0).ids)
    assert np.array_equal(np.sort(ids), np.arange(5000))


def test_torch_orders_are_what_torch_recorded():
    cases = [(seed, order) for seed, n, order in RECORDED["randperm"] if n == 33]
    assert len(cases) > 2
    for seed, order in cases:
        plan = EpochPlan(33, 1, 33, order="torch", seed=seed)
        assert DevicePlan.of(plan, 1).batch(0, 0, 0).ids.tolist() == order
        other = EpochPlan(33, 1, 33, order="torch", seed=seed + 1)  # the control
        assert DevicePlan.of(other, 1).batch(0, 0, 0).ids.tolist() != order


ORDERS = {
    "unshuffled": partial(EpochPlan, 11, shuffle=False),
    "keyed": partial(EpochPlan, 11, seed=3),
    "torch": partial(EpochPlan, 11, order="torch", seed=3),
    "given": partial(EpochPlan.from_order, [9, 0, 4, 4, 7], num_examples=12, repeats=True),
    "function": partial(EpochPlan.from_order, rolled),
    "weighted": partial(EpochPlan.from_order, weighted_order(np.arange(9.0), 11)),
    "mixture": partial(EpochPlan.from_order, mixture_order([2, 5], [1, 1], 11)),
}


@pytest.mark.parametrize(
    ("order", "ranks", "rows", "tail"),
    [
        ("unshuffled", 2, 2, "mask"),
        ("unshuffled", 3, 1, "drop"),
        ("keyed", 3, 2, "repeat"),
        ("keyed", 4, 4, "mask"),  # more rows in a step than there are examples
        ("torch", 2, 2, "drop"),
        ("torch", 4, 1, "repeat"),
        ("given", 3, 3, "repeat"),
        ("given", 2, 1, "mask"),
        ("function", 2, 3, "repeat"),
        ("weighted", 2, 2, "mask"),
        ("mixture", 1, 4, "drop"),
    ],
)
def test_every_order_and_tail(order, ranks, rows, tail):
    plan = ORDERS[order](num_replicas=ranks, batch_size=rows, tail=tail)
    check_epoch(plan, 0)
    check_epoch(plan, 2)


def test_plans_of_weights_and_rests_of_epochs():
    weights = np.linspace(0, 2, 11)
    check_epoch(EpochPlan(11, 2, 2, weights=weights, tail="repeat"), 1)
    rest = EpochPlan(11, 2, 2, seed=5).resumed(2, 4, num_replicas=3)
    check_epoch(rest, 2)
    check_epoch(EpochPlan.from_order([3, 1, 2], 2, 1, weights=[0, 1, 0.25, 3], num_examples=4), 0)


def regimes(plan):
    """One step of all ranks, `[ranks, rows]`, in every way in which JAX maps an axis."""
    mesh = data_mesh(4)

    def of_rank(plan, epoch, step):
        slots = plan.batch(epoch, step, jax.lax.axis_index("data"))
        return jax.tree.map(lambda leaf: leaf[None], slots)

    for checked in (True, False):
        name = f"shard_map, check_vma={checked}"
        specs = {"in_specs": (P(), P(), P()), "out_specs": P("data"), "check_vma": checked}
        yield name, jax.jit(jax.shard_map(of_rank, mesh=mesh, **specs))

    def of_own_rank(rank, plan, epoch, step):
        del rank  # pmap needs something to map
        return plan.batch(epoch, step, jax.lax.axis_index("data"))

    axes = {"axis_name": "data", "in_axes": (0, None, None, None)}
    for name, mapped in (("pmap", jax.pmap), ("vmap", jax.vmap)):
        yield name, partial(mapped(of_own_rank, **axes), jnp.arange(4))
    yield "all ranks", jax.jit(lambda plan, epoch, step: plan.batch(epoch, step))


@pytest.mark.parametrize("n", [4097, 11])
def test_every_regime_reads_the_same(n):
    plan = EpochPlan(n, 4, 2, weights=np.arange(n) % 3)
    on_device = DevicePlan.of(plan, range(1, 4))
    last = plan.steps_per_epoch - 1
    names = []
    for name, read in regimes(on_device):
        assert same(read(on_device, 2, last), plan.batch(2, last)), name
        names.append(name)
    assert len(names) == 5


def test_a_scan_over_epochs_and_steps_compiles_once_for_all_epochs_and_seeds():
    traced = []

    @jax.jit
    def read_epoch(plan, epoch):
        traced.append(epoch)

        def read(total, step):
            slots = plan.batch(epoch, step)
            return total + slots.weights.sum(), slots.ids

        return jax.lax.scan(read, 0, jnp.arange(plan.steps_per_epoch))

    for seed, epochs in ((0, range(5)), (7, range(10, 15))):
        plan = EpochPlan(5003, 2, 1000, seed=seed)
        on_device = DevicePlan.of(plan, epochs)
        for epoch in epochs:
            total, ids = read_epoch(on_device, epoch)
            assert total == 5003
            steps = range(plan.steps_per_epoch)
            assert np.array_equal(ids, [plan.batch(epoch, step).ids for step in steps])
    assert len(traced) == 1


def test_several_seeds_are_one_program_under_vmap():
    plans = [EpochPlan(4099, 2, 3, seed=seed) for seed in range(3)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *[DevicePlan.of(p, 2) for p in plans])
    read = jax.jit(jax.vmap(lambda plan, epoch: plan.batch(epoch, 682), in_axes=(0, None)))
    found = read(stacked, 1)
    for i, plan in enumerate(plans):
        assert same(jax.tree.map(lambda leaf, i=i: leaf[i], found), plan.batch(1, 682))


@pytest.mark.parametrize("n", [5, 5000])
def test_traced_numbers_that_are_not_the_plans_give_nothing(n):
    plan = EpochPlan(n, 2, 2)
    on_device = DevicePlan.of(plan, range(1, 3))

    @jax.jit
    @jax.vmap
    def read(epoch, step, rank):
        return on_device.batch(epoch, step, rank)

    steps = plan.steps_per_epoch
    outside = [(0, 0, 0), (3, 0, 0), (-1, 0, 0), (1, steps, 0), (1, -1, 0), (1, 0, 2), (1, 0, -1)]
    slots = read(*map(jnp.array, zip(*outside, (1, 0, 1), strict=True)))
    assert (slots.ids[:-1] == -1).all()
    assert (slots.weights[:-1] == 0).all()
    wanted = plan.batch(1, 0, ranks=[1])
    assert np.array_equal(slots.ids[-1:], wanted.ids)
    assert np.array_equal(slots.weights[-1:], wanted.weights)


def test_traced_numbers_may_be_of_any_integer_dtype():
    plan = EpochPlan(5000, 2, 4)
    on_device = DevicePlan.of(plan, 2)
    wanted = plan.batch(1, 100, ranks=[1]).ids[0]
    for dtype in (jnp.int8, jnp.uint32):
        read = jax.jit(lambda *numbers: on_device.batch(*numbers).ids)
        assert np.array_equal(read(*(jnp.array(x, dtype) for x in (1, 100, 1))), wanted)
    with jax.enable_x64(True):  # what a cast to 32 bits would make a number of the plan's
        for numbers in ((2**32 + 1, 100, 1), (1, 2**32 + 100, 1), (1, 100, 2**32 + 1)):
            found = jax.jit(on_device.batch)(*(jnp.array(x, jnp.int64) for x in numbers))
            assert (found.ids == -1).all()
            assert (found.weights == 0).all()
        found = jax.jit(on_device.batch)(*(jnp.array(x, jnp.int64) for x in (1, 100, 1)))
        assert np.array_equal(found.ids, wanted)


def test_a_plan_without_steps_gives_nothing():
    for plan in (EpochPlan(0, 2, 2, shuffle=False), EpochPlan(3, 2, 2, tail="drop")):
        slots = jax.jit(DevicePlan.of(plan, 1).batch)(0, 0)
        assert slots.ids.tolist() == [[-1, -1]] * 2
        assert slots.weights.tolist() == [[0, 0]] * 2


def test_beyond_32_bits_x64_is_needed():
    for n, ranks in ((2**31 + 1, 2), (2**62, 65_536)):
        plan = EpochPlan(n, ranks, 2, tail="repeat")
        with pytest.raises(ValueError, match=r"at most 2\*\*31 examples.*jax_enable_x64"):
            DevicePlan.of(plan, 2)
        with jax.enable_x64(True):
            on_device = DevicePlan.of(plan, 2)
            for step in (0, plan.steps_per_epoch - 1):
                wanted = plan.batch(1, step, ranks=[1])
                found = on_device.batch(1, step, 1)
                assert found.ids.dtype == np.int64
                assert np.array_equal(found.ids, wanted.ids[0])
                assert np.array_equal(found.weights, wanted.weights[0])
        with pytest.raises(ValueError, match=r"DevicePlan.batch: plan must have at most 2\*\*31"):
            on_device.batch(1, 0, 1)
    with pytest.raises(ValueError, match="as many rows in a step"):
        DevicePlan.of(EpochPlan(2**31, 2**31, 2), 1)


def test_what_no_plan_on_the_device_can_be_made_of_is_refused():
    lengths = np.arange(1, 9)
    for plan in (BudgetPlan(lengths, 2, 16), PackedPlan(lengths, 2, 2, 16)):
        with pytest.raises(TypeError, match=r"must be an EpochPlan, got a \w+Plan, whose steps"):
            DevicePlan.of(plan, 1)
    with pytest.raises(TypeError, match="must be an EpochPlan, got int"):
        DevicePlan.of(3, 1)
    for plan in (EpochPlan(5, 2, 2), EpochPlan.from_order(rolled, 2, 2)):
        with pytest.raises(ValueError, match=r"epochs must be given .* DevicePlan.of\(plan, epoc"):
            DevicePlan.of(plan)
    plan = EpochPlan(5, 2, 2)
    for epochs, error, match in (
        (0, ValueError, "epochs must be an integer in"),
        ([], ValueError, "epochs must be at least one, got none"),
        ([-1], ValueError, "epochs must be an integer in"),
        ([2**31], ValueError, "A traced epoch has 32 bits"),
        (1.5, TypeError, "epochs must be an integer in"),
        (True, TypeError, "epochs must be an integer in"),
        ("12", TypeError, "epochs must be an integer in"),
    ):
        with pytest.raises(error, match=match):
            DevicePlan.of(plan, epochs)
    with pytest.raises(ValueError, match="epoch must be 2, the one that this plan is the rest of"):
        DevicePlan.of(plan.resumed(2, 1), 3)


def test_numbers_that_are_known_are_checked():
    on_device = DevicePlan.of(EpochPlan(5, 2, 2), range(2, 5))
    for numbers, error, match in (
        ((1, 0), ValueError, "epoch must be one that .* was made for, 2, 3, 4, got 1"),
        ((2, 2), ValueError, r"step must be in \[0, 2\), got 2"),
        ((2, 0, 2), ValueError, r"rank must be in \[0, 2\), got 2. The last of 2 replicas"),
        ((2, 0, -1), ValueError, r"rank must be in \[0, 2\)"),
        ((2.0, 0), TypeError, "epoch must be an integer"),
        ((2, jnp.array([0, 1])), TypeError, r"step must be in \[0, 2\)"),
        ((2, 0, True), TypeError, r"rank must be in \[0, 2\)"),
    ):
        with pytest.raises(error, match=match):
            on_device.batch(*numbers)
    for bad in (jnp.float32(2), jnp.array([2]), jnp.array(True)):
        with pytest.raises(TypeError, match=r"step must be an integer, got .* jax.vmap it"):
            jax.jit(lambda step: on_device.batch(2, step))(bad)
    anywhere = DevicePlan.of(EpochPlan(5, 2, 2, shuffle=False))
    assert anywhere.batch(2**40, 0).ids.tolist() == [[0, 2], [1, 3]]
    with pytest.raises(ValueError, match="epoch must be an integer"):
        anywhere.batch(-1, 0)
