"""What people have run into with tails, epochs and resuming: each report's input, its right value.

Beside the right value stands the wrong one, where it can be had from a plan or a plain list: the
same check must tell them apart.
"""

import tracemalloc

import numpy as np
import pytest

from jax_ddp_weighting import CoverageError, DistributedSampler, EpochPlan, audit_ids


def read(n, ranks, epoch=0, **options):
    """What every rank's sampler yields."""
    samplers = [DistributedSampler(n, ranks, rank, **options) for rank in range(ranks)]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    return [list(sampler) for sampler in samplers]


def interleaved(ranks):
    """The global order again, as far as every rank has read."""
    return [rank[j] for j in range(max(map(len, ranks))) for rank in ranks if j < len(rank)]


def flat(ranks):
    return [i for rank in ranks for i in rank]


def batched(plan, epoch=0):
    """All of an epoch's ids and weights, as [ranks, slots]."""
    steps = [plan.batch(epoch, step) for step in range(plan.steps_per_epoch)]
    return np.hstack([s.ids for s in steps]), np.hstack([s.weights for s in steps])


# Tails: who is read, who twice, who never


def share_of_even_labels(ids):
    return sum(i % 2 == 0 for i in ids) / len(ids)


def test_pytorch_25162_an_accuracy_over_13_examples_and_2_ranks():
    assert share_of_even_labels(flat(read(13, 2, shuffle=False, tail="mask"))) == 7 / 13
    copied = share_of_even_labels(flat(read(13, 2, shuffle=False, tail="repeat")))
    assert round(copied, 4) == 0.5714  # as reported, with the copy


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8, 13, 20])
def test_pytorch_22584_a_metric_is_the_same_for_every_number_of_ranks(ranks):
    values = np.random.default_rng(0).integers(0, 1000, 101)  # whole, so that sums are exact
    ids, weights = batched(EpochPlan(101, ranks, 4))
    assert (values[ids] * weights).sum() / weights.sum() == values.sum() / 101
    wrong_ids, wrong = batched(EpochPlan(101, ranks, 4, tail="repeat"))
    repeated = (values[wrong_ids] * wrong).sum() / wrong.sum()
    assert (repeated == values.sum() / 101) == (101 % ranks == 0)


@pytest.mark.parametrize(
    ("n", "ranks", "order"),
    [
        (4, 9, [0, 1, 2, 3, 0, 1, 2, 3, 0]),  # pytorch 45324: an assertion
        (3, 8, [0, 1, 2, 0, 1, 2, 0, 1]),  # PaddlePaddle 50954, 59390: an assertion
    ],
)
def test_more_ranks_than_twice_the_examples(n, ranks, order):
    assert read(n, ranks, shuffle=False) == [[i] for i in order]
    assert flat(read(n, ranks, shuffle=False, tail="mask")) == list(range(n))


def test_pytorch_12474_sharding_leaves_out_the_tail_at_most():
    ids, weights = batched(EpochPlan(9, 4, 2, shuffle=False, tail="drop"))
    audit = audit_ids(ids, 9, weights=weights)
    assert (audit.omitted, audit.duplicated) == ((8,), {})
    # contiguous shards of the report: 3, 6 and 9 left out, 1 and 2 twice
    contiguous = [[1, 2], [4, 5], [7, 8], [1, 2]]
    wrong = audit_ids([np.array(shard) - 1 for shard in contiguous], 9)
    assert (wrong.omitted, wrong.duplicated) == ((2, 5, 8), {0: 2, 1: 2})


@pytest.mark.parametrize(("ranks", "evaluated"), [(3, 50001), (6, 50004), (7, 50001)])
def test_torchvision_4559_50000_examples_are_evaluated_as_50000(ranks, evaluated):
    assert EpochPlan(50_000, ranks, 32).accepted_per_epoch == 50_000
    assert EpochPlan(50_000, ranks, 32, tail="repeat").accepted_per_epoch == evaluated


def test_pytorch_examples_980_50000_over_3_ranks():
    samplers = [DistributedSampler(50_000, 3, r, tail="mask") for r in range(3)]
    assert [len(s) for s in samplers] == [16667, 16667, 16666]  # 16666 x 3 + 2
    assert [len(DistributedSampler(50_000, 3, r)) for r in range(3)] == [16667] * 3


def test_deepspeed_5118_a_rank_without_examples_has_a_batch_of_weight_0():
    batch = EpochPlan(3, 4, 2).batch(0, 0)
    assert batch.ids.shape == (4, 2)
    assert batch.weights.tolist() == [[1, 0], [1, 0], [1, 0], [0, 0]]


def test_fairseq_1726_far_fewer_examples_than_a_step_has_rows():
    plan = EpochPlan(5, 8, 16)
    assert plan.steps_per_epoch == 1
    assert plan.accepted(0) == plan.batch(0, 0).weights.sum() == 5


def test_fairseq_5036_a_tail_of_less_than_8_rows_is_kept():
    plan = EpochPlan(13, 1, 8)
    assert [plan.accepted(step) for step in range(plan.steps_per_epoch)] == [8, 5]


@pytest.mark.parametrize("seeds", [(0, 1)])
def test_lightning_17713_mlcommons_625_ranks_with_seeds_of_their_own_overlap(seeds):
    wrong = audit_ids([read(16, 2, seed=s)[r] for r, s in enumerate(seeds)], 16)
    assert wrong.unique == 12  # as reported
    with pytest.raises(CoverageError, match=r"4 of 16 ids omitted .* 4 duplicated"):
        wrong.check_exactly_once()
    audit_ids(read(16, 2, seed=0), 16).check_exactly_once()


@pytest.mark.parametrize("tail", ["mask", "repeat", "drop"])
def test_lightning_21447_an_order_of_ones_own_is_kept(tail):
    own = [7, 3, 9, 1, 5, 0, 8, 2, 6, 4]  # by length, say
    shards = read(10, 2, shuffle=False, order=own, tail=tail)
    assert interleaved(shards) == own
    assert interleaved(read(10, 2, epoch=5, shuffle=False, order=own, tail=tail)) == own
    plan = EpochPlan.from_order(own, 2, 5, tail=tail)
    assert plan.batch(0, 0).ids.T.reshape(-1).tolist() == own


def test_tensorflow_datasets_3119_12500_over_2():
    assert [len(ids) for ids in read(12_500, 2, tail="mask")] == [6250, 6250]


def test_pytorch_45427_50201_a_rank_needs_the_memory_of_its_share():
    n, ranks = 20_000_000, 1000
    tracemalloc.start()
    plan = EpochPlan(n, ranks, 1)
    slots = plan.slots(0, 7)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(slots.ids) == 20_000
    assert peak < 100 * len(slots.ids)  # bytes; torch's list of the whole is 920 MB more


def test_a_loader_that_drops_over_a_sampler_that_pads_is_found_after_batching():
    padded = read(101, 4, shuffle=False)  # 26 each
    loaded = [rank[: len(rank) // 8 * 8] for rank in padded]  # whole batches of 8
    audit = audit_ids(loaded, 101)
    assert (audit.duplicated, audit.omitted) == ({}, (96, 97, 98, 99, 100))
    with pytest.raises(CoverageError, match=r"5 of 101 ids omitted \(96, 97, 98, 99, 100\)"):
        audit.check_exactly_once()
    # the sampler alone, before batching, shows only its copies
    assert audit_ids(padded, 101).omitted == ()
    # a plan knows its batches
    ids, weights = batched(EpochPlan(101, 4, 8))
    audit_ids(ids, 101, weights=weights).check_exactly_once()


@pytest.mark.parametrize("epochs", [1, 2])
def test_grain_10_ids_over_4_shards_come_once_an_epoch(epochs):
    shares = [
        list(DistributedSampler(10, 4, rank, tail="mask").source(epochs)) for rank in range(4)
    ]
    assert np.bincount(flat(shares)).tolist() == [epochs] * 10


@pytest.mark.parametrize("n", [22, 5097, 25_000])
@pytest.mark.parametrize("ranks", [2, 8])
def test_accelerate_350_295_125_as_many_are_accepted_as_there_are(n, ranks):
    plan = EpochPlan(n, ranks, 16)
    assert sum(plan.accepted(step) for step in range(plan.steps_per_epoch)) == n


def test_accelerate_a_sampler_of_7_ids_over_a_dataset_of_20():
    chosen = [3, 19, 8, 11, 0, 5, 14]
    ids, weights = batched(EpochPlan.from_order(chosen, 2, 4, num_examples=20))
    assert sorted(ids[weights > 0].tolist()) == sorted(chosen)  # 7 rows, not 4


# Epochs and seeds


@pytest.mark.parametrize("order", ["torch", "keyed"])
def test_pytorch_31771_11324_areal_632_every_epoch_has_its_order_or_one_is_told(order):
    assert len({tuple(interleaved(read(20, 2, epoch, order=order))) for epoch in range(10)}) == 10
    sampler = DistributedSampler(20, 2, 0, order=order)
    first = list(sampler)
    with pytest.warns(UserWarning, match="epoch 0 is read again, in the same order.*set_epoch"):
        second = list(sampler)
    assert second == first


def test_transformers_11389_torchtune_2339_what_a_sampler_reads_by_is_in_its_text():
    sampler = DistributedSampler(20, 2, 0, seed=42)
    sampler.set_epoch(3)
    assert "seed=42" in repr(sampler)
    assert "epoch=3" in repr(sampler)


def test_a_seed_and_an_epoch_are_not_added():
    by_torch = [read(50, 2, epoch, seed=seed) for seed, epoch in ((0, 1), (1, 0))]
    assert by_torch[0] == by_torch[1]  # torch's rule, exactly
    keyed = [read(50, 2, epoch, seed=seed, order="keyed") for seed, epoch in ((0, 1), (1, 0))]
    assert keyed[0] != keyed[1]


def test_torch_a_dataset_that_shrinks_after_construction_is_an_error():
    dataset = list(range(10))
    sampler = DistributedSampler(dataset, 2, 0)
    del dataset[6:]
    with pytest.raises(ValueError, match=r"len\(dataset\) must stay 10, got 6"):
        iter(sampler)


# Resume


def sampler_at(state=None, n=24, ranks=2, rank=0, **options):
    sampler = DistributedSampler(n, ranks, rank, **options)
    if state is not None:
        sampler.load_state_dict(state)
    return sampler


def take(iterator, count):
    return [next(iterator) for _ in range(count)]


def test_torchdata_1513_1437_saving_and_loading_again_and_again():
    whole = list(sampler_at())
    sampler = sampler_at()
    take(iter(sampler), 5)
    for _ in range(3):  # save, load, save, load, save, load
        sampler = sampler_at(sampler.state_dict())
    assert take(iter(sampler), 2) == whole[5:7]
    sampler = sampler_at(sampler.state_dict())
    assert list(sampler) == whole[7:]


def test_accelerate_2016_2823_4195_resuming_in_a_later_epoch_has_its_order():
    later = sampler_at()
    later.set_epoch(3)
    whole = list(later)
    interrupted = sampler_at()
    interrupted.set_epoch(3)
    take(iter(interrupted), 5)
    resumed = sampler_at(interrupted.state_dict())
    assert resumed.epoch == 3
    assert list(resumed) == whole[5:]
    assert whole[5:] != list(sampler_at())[5:]  # epoch 0's, as reported


def test_accelerate_1451_what_was_read_is_skipped_once():
    interrupted = sampler_at()
    take(iter(interrupted), 5)
    resumed = sampler_at(interrupted.state_dict())
    lengths = []
    for epoch in range(3):
        resumed.set_epoch(epoch)
        lengths.append(len(list(resumed)))
    assert lengths == [7, 12, 12]


def test_pytorch_147967_the_order_is_the_original_one_from_there():
    for read_before in range(13):
        interrupted = sampler_at()
        take(iter(interrupted), read_before)
        assert list(sampler_at(interrupted.state_dict())) == list(sampler_at())[read_before:]


def test_simpletuner_2986_12_examples_over_4_ranks_each_once_over_a_stop():
    before, after = [], []
    for rank in range(4):
        sampler = sampler_at(n=12, ranks=4, rank=rank, tail="mask")
        before += take(iter(sampler), 1)
        after += list(sampler_at(sampler.state_dict(), n=12, ranks=4, rank=rank, tail="mask"))
    audit_ids(before + after, 12).check_exactly_once()


@pytest.mark.parametrize("n", [2, 500])
@pytest.mark.parametrize("ranks", [3, 64, 640])
def test_mosaicml_streaming_460_706_copies_weigh_0_or_are_reported(n, ranks):
    masked = EpochPlan(n, ranks, 1)
    masked.audit(0).check_exactly_once()
    assert masked.num_samples * ranks - n == (masked.slots(0, ranks - 1).weights == 0).sum() + sum(
        (masked.slots(0, rank).weights == 0).sum() for rank in range(ranks - 1)
    )
    audit = EpochPlan(n, ranks, 1, tail="repeat").audit(0)
    assert sum(audit.duplicated.values()) - audit.num_duplicated == -n % ranks


def test_torchdata_a_state_of_an_epochs_end_and_then_the_next_epoch():
    sampler = sampler_at()
    first = list(sampler)
    resumed = sampler_at(sampler.state_dict())
    resumed.set_epoch(1)
    second = list(resumed)
    assert len(second) == 12
    assert second != first
    # of the epoch that had ended there is no rest
    assert list(sampler_at(sampler.state_dict())) == []


@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 2), (4, 1), (2, 3)])
def test_torchdata_maxtext_1760_grain_other_ranks_lose_and_repeat_nothing(before, after):
    ids, states = [], []
    for rank in range(before):
        sampler = sampler_at(ranks=before, rank=rank, tail="mask")
        ids += take(iter(sampler), 12 // before)
        states.append(sampler.state_dict())
    assert states == [states[0]] * before
    rest = [list(sampler_at(states[0], ranks=after, rank=r, tail="mask")) for r in range(after)]
    audit_ids(ids + flat(rest), 24).check_exactly_once()
    # every rank's own count carried over, as reported: ids lost from 2 to 4, repeated from 4 to 2
    wrong = ids + [
        i for rank in range(after) for i in list(sampler_at(ranks=after, rank=rank))[12 // before :]
    ]
    audit = audit_ids(wrong, 24)
    assert (audit.num_omitted > 0) == (after > before)
    assert (audit.num_duplicated > 0) == (after < before)


@pytest.mark.parametrize("after", [1, 2, 3, 5, 6, 7, 30])
def test_other_ranks_that_do_not_divide_the_position_read_the_rest(after):
    before = [sampler_at(ranks=4, rank=rank, tail="mask") for rank in range(4)]
    ids = [i for sampler in before for i in take(iter(sampler), 1)]
    state = before[0].state_dict()
    rest = [list(sampler_at(state, ranks=after, rank=r, tail="mask")) for r in range(after)]
    audit_ids(ids + flat(rest), 24).check_exactly_once()
    assert interleaved(rest) == interleaved(read(24, 4, tail="mask"))[4:]
