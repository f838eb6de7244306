"""What people have run into when they evaluated on several ranks, each with its wrong value.

Rows that need several processes are in test_evaluation_processes.py: predictions of different width
by rank (accelerate 3614), and the id 2**40 + 1 (JAX).
"""

import jax.numpy as jnp
import numpy as np
import pytest

from jax_ddp_weighting import (
    Batch,
    CoverageError,
    EpochPlan,
    batches,
    data_mesh,
    evaluate,
    gather_by_id,
    weighted_sum,
)


def hits(batch):
    return {"accuracy": weighted_sum(batch.data == 1, batch.weights)}


def gathered(plan, fetch=lambda ids: ids * 2, id_of=lambda ids: ids, **kwargs):
    seen = list(batches(plan, 0, fetch, data_mesh(plan.num_replicas)))
    ids = [id_of(np.asarray(each.ids)) for each in seen]
    return gather_by_id(ids, [each.weights for each in seen], [b.data for b in seen], **kwargs)


@pytest.mark.parametrize(
    ("n", "ranks", "rows", "with_copies"),
    [
        (22, 2, 4, 24),  # accelerate 350
        (5097, 8, 16, 5104 + 16),  # accelerate 295; it gathered 5104
        (25000, 8, 100, 25600),  # accelerate 125
        (512, 3, 16, 528),  # accelerate 952: the last batch was lost
        (50000, 7, 512, 50176),  # flax 263, 264, HF 17863; torchvision 4559 counted 50001
        (8, 2, 5, 10),  # torchmetrics 2170: crash
        (3, 8, 1, 8),  # PaddlePaddle 50954, 59390: assertion
        (4097, 8, 64, 4608),  # t5x 741, flax's full_eval guide: hang
    ],
)
def test_every_example_is_gathered_once(n, ranks, rows, with_copies):
    plan = EpochPlan(n, ranks, rows)
    found = gathered(plan, num_examples=n)
    np.testing.assert_array_equal(found.ids, np.arange(n))
    np.testing.assert_array_equal(found.predictions, np.arange(n) * 2)
    assert not found.duplicated
    # what a gather by position returns
    assert plan.steps_per_epoch * ranks * rows == with_copies
    # and every rank takes the same steps, whatever it holds
    found = evaluate(
        hits,
        batches(plan, 0, lambda ids: (ids % 2).astype(np.int8), data_mesh(ranks)),
        data_mesh(ranks),
    )
    assert found.sums["accuracy"].total == n // 2
    assert found.accepted == n


def test_a_dropped_tail_leaves_what_was_read_and_says_so():  # accelerate 2007
    plan = EpochPlan(9, 1, 5, tail="drop", shuffle=False)
    assert gathered(plan).predictions.tolist() == [0, 2, 4, 6, 8]  # accelerate kept 4 of them
    with pytest.raises(CoverageError, match=r"4 of 9 ids omitted \(5, 6, 7, 8\)"):
        gathered(plan, num_examples=9)


def test_a_subset_is_gathered_whole():  # accelerate: 4 rows of 7, by the length of the dataset
    chosen = np.array([19, 2, 3, 5, 7, 11, 13])  # of a dataset of 20
    found = gathered(EpochPlan(7, 2, 4), lambda places: chosen[places] * 2, chosen.__getitem__)
    assert found.ids.tolist() == sorted(chosen)
    assert found.predictions.tolist() == [2 * i for i in sorted(chosen)]
    assert 7 - 20 % 8 != 7  # what len(dataset) % batch would have kept


def test_an_accuracy_is_that_of_the_data_set():  # pytorch 25162 and 22584
    def fetch(ids):
        return (ids % 2 == 0).astype(np.int8)

    found = {}
    for tail in ("mask", "repeat"):
        for ranks in (1, 2, 3, 4, 8):
            plan = EpochPlan(13, ranks, 7, tail=tail, shuffle=False)
            mesh = data_mesh(ranks)
            found[tail, ranks] = evaluate(hits, batches(plan, 0, fetch, mesh), mesh)["accuracy"]
    assert {found["mask", ranks] for ranks in (1, 2, 3, 4, 8)} == {7 / 13}
    assert found["repeat", 2] == 8 / 14  # .5714 with the copy
    assert len({found["repeat", ranks] for ranks in (1, 2, 3, 4, 8)}) > 1


def test_records_are_those_of_the_ids():  # DEIMv2 170: 4 records for 3 ids
    ids, boxes = [np.array([2, 1]), np.array([1, 3])], [np.eye(4)[[2, 1]], np.eye(4)[[1, 3]]]
    found = gather_by_id(ids, None, boxes)
    assert (len(found), found.duplicated) == (3, {1: 2})
    assert len(np.concatenate(ids)) == 4


def test_two_answers_to_one_question_are_refused():  # sgl-eval 39: accuracy 1.0, true .5
    ids, answers, key = [0, 1, 1], ["a", "b", "c"], {0: "a", 1: "c"}
    with pytest.raises(ValueError, match="different ones for id 1: row 1, row 2"):
        gather_by_id(ids, None, answers)
    last_wins = dict(zip(ids, answers, strict=True))
    assert np.mean([last_wins[i] == key[i] for i in key]) == 1.0
    found = gather_by_id(ids, [1, 1, 0], answers)
    assert np.mean([p == key[i] for i, p in zip(found.ids, found.predictions, strict=True)]) == 0.5


def test_a_smaller_last_batch_weighs_its_rows():  # flax 262 and 527
    steps = [Batch.of(np.array([1, 1, 1, 1])), Batch.of(np.array([0]))]
    assert evaluate(hits, steps, data_mesh(2))["accuracy"] == 4 / 5
    assert np.mean([np.mean(step.data == 1) for step in steps]) == 1 / 2  # the mean of means


def test_a_rate_is_at_most_1():  # keras 19280, 19340: 1.6 and 3.6, summed over replicas
    values = np.array([1, 1, 1, 0, 1, 1, 1, 1])
    for ranks in (2, 4):
        found = evaluate(hits, [Batch.of(values)], data_mesh(ranks))["accuracy"]
        assert found == 7 / 8
        assert values.reshape(ranks, -1).mean(1).sum() > 1


def test_a_rank_without_rows_is_a_rank_of_weight_0():  # DeepSpeed 5118, fairseq 1726, 5036
    mesh = data_mesh(8)
    plan = EpochPlan(3, 8, 16)
    found = evaluate(hits, batches(plan, 0, lambda ids: np.ones(len(ids), int), mesh), mesh)
    assert (found["accuracy"], found.accepted, found.steps) == (1.0, 3, 1)
    assert jnp.isnan(jnp.mean(jnp.zeros(0)))  # what the mean of an empty rank is
