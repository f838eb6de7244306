"""A sampler's state: plain values, refused where they are another plan's, and never half loaded."""

import json

import numpy as np
import orbax.checkpoint as ocp
import pytest

from jax_ddp_weighting import DistributedSampler


def sampler_of(n=47, ranks=3, rank=0, **options):
    return DistributedSampler(n, ranks, rank, **options)


def read(sampler, count):
    reader = iter(sampler)
    return [next(reader) for _ in range(count)]


def state_after(count, **options):
    sampler = sampler_of(**options)
    read(sampler, count)
    return sampler.state_dict()


def test_a_state_is_plain_and_says_all_that_decides_the_ids():
    state = state_after(5, seed=2**64 - 1, tail="mask", order="keyed")
    assert json.loads(json.dumps(state)) == state
    assert state == {
        "version": 1,
        "epoch": 0,
        "position": 15,
        "num_examples": 47,
        "shuffle": True,
        "seed": 2**64 - 1,
        "order": "keyed",
        "tail": "mask",
    }


@pytest.mark.parametrize("count", [0, 1, 7, 15, 16])
@pytest.mark.parametrize("order", ["torch", "keyed"])
def test_a_resumed_pass_is_the_rest(count, order):
    whole = list(sampler_of(order=order))
    resumed = sampler_of(order=order)
    resumed.load_state_dict(state_after(count, order=order))
    assert resumed.state_dict() == state_after(count, order=order)
    assert list(resumed) == whole[count:]


def test_the_state_of_any_chunk_is_exact():
    sampler = DistributedSampler(100_000, 2, 1, order="keyed")
    reader = iter(sampler)
    for count in range(1, 20_000):
        next(reader)
        if count % 997 == 0 or count % 8192 < 2:
            assert sampler.state_dict()["position"] == 2 * count


def test_a_loader_that_reads_ahead_says_what_was_consumed():
    sampler = sampler_of()
    read(sampler, 10)  # of which training has used 4
    resumed = sampler_of()
    resumed.load_state_dict(sampler.state_dict(consumed=4))
    assert list(resumed) == list(sampler_of())[4:]
    with pytest.raises(ValueError, match=r"consumed must be in \[0, 16\], got 17"):
        sampler.state_dict(consumed=17)


def test_every_rank_has_the_same_state_after_the_same_rounds():
    """Under `mask` rank 2 has 15 ids and the others 16."""
    states = [state_after(15, rank=rank, tail="mask") for rank in range(3)]
    assert states == [states[0]] * 3
    assert states[0]["position"] == 45  # the last round is still to come
    ended = []
    for rank in range(3):
        sampler = sampler_of(rank=rank, tail="mask")
        list(sampler)
        ended.append(sampler.state_dict())
    assert ended == [ended[0]] * 3
    assert ended[0]["position"] == 47


def test_set_epoch_keeps_the_place_in_its_own_epoch_and_leaves_it_for_another():
    state = state_after(5)
    same, other = sampler_of(), sampler_of()
    for sampler in (same, other):
        sampler.load_state_dict(state)
    same.set_epoch(0)
    assert len(list(same)) == 11
    other.set_epoch(1)
    assert other.state_dict()["position"] == 0
    assert len(list(other)) == 16


def test_the_state_between_passes_is_the_start_of_the_chosen_epoch():
    sampler = sampler_of()
    list(sampler)
    assert sampler.state_dict()["position"] == 47
    sampler.set_epoch(1)
    assert (sampler.state_dict()["epoch"], sampler.state_dict()["position"]) == (1, 0)


def test_an_order_of_ones_own_resumes_too():
    own = list(range(46, -1, -1))
    options = {"shuffle": False, "order": own}
    resumed = sampler_of(**options)
    resumed.load_state_dict(state_after(5, **options))
    assert list(resumed) == own[15::3]


@pytest.mark.parametrize(
    ("other", "text"),
    [
        ({"seed": 1}, "seed must be this sampler's, 1, got 0"),
        ({"n": 48}, "num_examples must be this sampler's, 48, got 47"),
        ({"order": "keyed"}, "order must be this sampler's, 'keyed', got 'torch'"),
        ({"tail": "mask"}, "tail must be this sampler's, 'mask', got 'repeat'"),
        ({"shuffle": False}, "shuffle must be this sampler's, False, got True"),
        ({"shuffle": False, "order": range(47)}, "shuffle must be this sampler's, False, got True"),
    ],
)
def test_a_state_of_another_plan_is_refused_by_name(other, text):
    sampler = sampler_of(**other)
    before = sampler.state_dict()
    with pytest.raises(ValueError, match=f"DistributedSampler.load_state_dict: {text}"):
        sampler.load_state_dict(state_after(5))
    assert sampler.state_dict() == before  # nothing was loaded


def test_a_state_of_another_order_of_ones_own_is_refused():
    options = {"shuffle": False, "order": range(47)}
    sampler = sampler_of(shuffle=False, order=range(46, -1, -1))
    with pytest.raises(ValueError, match=r"order must be this sampler's, 'given \w+', got 'given"):
        sampler.load_state_dict(state_after(5, **options))


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"version": 2}, ValueError, "version must be this sampler's, 1, got 2"),
        ({"epoch": -1}, ValueError, r"epoch must be an integer in \[0, 2\*\*63\), got -1"),
        ({"epoch": "0"}, TypeError, r"epoch must be an integer .* got '0' \(str\)"),
        ({"position": 48}, ValueError, r"position must be in \[0, 47\], got 48"),
        ({"position": -3}, ValueError, r"position must be in \[0, 47\], got -3"),
        ({"position": 1.5}, TypeError, r"position must be in \[0, 47\], got 1.5 \(float\)"),
        ({"seed": None}, ValueError, "seed must be this sampler's, 0, got None"),
    ],
)
def test_a_damaged_state_is_refused_and_nothing_is_loaded(change, error, text):
    sampler = sampler_of()
    sampler.set_epoch(7)
    before = sampler.state_dict()
    with pytest.raises(error, match=text):
        sampler.load_state_dict({**state_after(5), **change})
    assert sampler.state_dict() == before
    assert len(list(sampler)) == 16


@pytest.mark.parametrize("name", list(state_after(0)))
def test_a_state_that_lacks_a_field_is_refused(name):
    state = state_after(5)
    del state[name]
    with pytest.raises(ValueError, match=f"state must hold {name}, got"):
        sampler_of().load_state_dict(state)


def test_what_is_no_state_is_refused():
    with pytest.raises(TypeError, match="state must be a mapping, got list"):
        sampler_of().load_state_dict([1, 2])


@pytest.mark.parametrize("arrays", [False, True])
def test_a_state_survives_orbax(tmp_path, arrays):
    """As JSON beside the model, and as leaves of the model's own tree."""
    sampler = sampler_of()
    sampler.set_epoch(2)
    read(sampler, 5)
    state = sampler.state_dict()
    with ocp.Checkpointer(
        ocp.StandardCheckpointHandler() if arrays else ocp.JsonCheckpointHandler()
    ) as checkpointer:
        if arrays:
            numbers = {name: np.int64(state[name]) for name in ("epoch", "position")}
            checkpointer.save(tmp_path / "state", args=ocp.args.StandardSave(numbers))
            loaded = {
                **state,
                **checkpointer.restore(
                    tmp_path / "state", args=ocp.args.StandardRestore(dict.fromkeys(numbers, 0))
                ),
            }
        else:
            checkpointer.save(tmp_path / "state", args=ocp.args.JsonSave(state))
            loaded = checkpointer.restore(tmp_path / "state", args=ocp.args.JsonRestore())
    resumed = sampler_of()
    resumed.load_state_dict(loaded)
    assert resumed.state_dict() == state
    assert list(resumed) == resumed.plan.slots(2, 0).ids.tolist()[5:]
