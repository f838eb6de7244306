"""Metrics that are arrays: classes, bins, confusion matrices, with classes that are absent."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import regimes

from jax_ddp_weighting import (
    Batch,
    EpochPlan,
    WeightedSum,
    batches,
    data_mesh,
    evaluate,
    weighted_sum,
)

CLASSES = 4  # of which 3 has no row, as a label or as a guess
LABELS = np.random.default_rng(0).integers(0, 3, 29).astype(np.int32)
GUESSES = np.where(np.random.default_rng(1).random(29) < 0.6, LABELS, (LABELS + 1) % 3)
VALUES = np.random.default_rng(2).integers(0, 64, 29).astype(np.float32) / 8
NAN = np.nan


def fetch(ids):
    return {"label": LABELS[ids], "guess": GUESSES[ids], "value": VALUES[ids]}


def metrics(batch):
    data, classes = batch.data, jnp.arange(CLASSES)
    is_label = data["label"][:, None] == classes[None]
    is_guess = data["guess"][:, None] == classes[None]
    weights = jnp.broadcast_to(batch.weights[:, None], is_label.shape)
    pairs = is_label[:, :, None] & is_guess[:, None, :]
    values = jnp.broadcast_to(data["value"][:, None], is_label.shape)
    matrix = jnp.sum(pairs * batch.weights[:, None, None], axis=0)
    bins = jnp.zeros(8, jnp.int32).at[data["value"].astype(jnp.int32)].add(batch.weights)
    return {
        "iou": WeightedSum(
            weighted_sum(is_label & is_guess, weights, axis=0).total,
            weighted_sum(is_label | is_guess, weights, axis=0).total,
        ),
        "value": weighted_sum(values, is_label * weights, axis=0),
        "confusion": WeightedSum(matrix, batch.weights.sum()),
        "histogram": WeightedSum(bins, batch.weights.sum()),
        "accuracy": weighted_sum(data["label"] == data["guess"], batch.weights),
    }


MATRIX = np.zeros((CLASSES, CLASSES), int)
np.add.at(MATRIX, (LABELS, GUESSES), 1)


def by_hand():
    both, either = np.diag(MATRIX), MATRIX.sum(0) + MATRIX.sum(1) - np.diag(MATRIX)
    with np.errstate(invalid="ignore"):
        iou = both / either
        value = np.bincount(LABELS, VALUES, CLASSES) / np.bincount(LABELS, minlength=CLASSES)
    return iou, value, np.bincount(VALUES.astype(int), minlength=8) / 29


def check(found):
    iou, value, histogram = by_hand()
    np.testing.assert_array_equal(found["iou"], iou)
    np.testing.assert_array_equal(found["value"], value)
    np.testing.assert_array_equal(found["histogram"], histogram)
    np.testing.assert_array_equal(found["confusion"], MATRIX / 29)
    np.testing.assert_array_equal(found.sums["confusion"].total, MATRIX)
    assert found.sums["confusion"].total.dtype == np.int64
    assert (found.sums["confusion"].weight, found.accepted) == (29, 29)
    assert found["accuracy"] == np.trace(MATRIX) / 29
    # a class that is absent is no result, and is not in the mean over classes
    there = found.sums["iou"].weight > 0
    assert there.tolist() == [True, True, True, False]
    assert math.isnan(found["iou"][3])
    assert found["iou"][there].mean() == iou[:3].mean()
    assert found.sums["iou"].mean()[3] == 0


@pytest.mark.parametrize(("ranks", "rows"), [(1, 29), (2, 4), (8, 1)])
def test_each_class_is_the_same_whatever_the_ranks_and_rows(ranks, rows):
    mesh = data_mesh(ranks)
    plan = EpochPlan(29, ranks, rows, tail="mask", seed=rows)
    check(evaluate(metrics, batches(plan, 0, fetch, mesh), mesh))


def test_a_shorter_last_batch_is_filled_up():
    steps = [Batch.of(fetch(np.arange(i, min(i + 8, 29)))) for i in range(0, 29, 8)]
    check(evaluate(metrics, steps, data_mesh(4)))
    # the check can fail: copies that count
    plan = EpochPlan(29, 4, 2, tail="repeat")
    copied = evaluate(metrics, batches(plan, 0, fetch, data_mesh(4)), data_mesh(4))
    with pytest.raises(AssertionError):
        check(copied)
    # and the mean of the batches' means
    each = [evaluate(metrics, [step], data_mesh(4))["iou"][:3] for step in steps]
    assert np.nanmean(each, axis=0).tolist() != by_hand()[0][:3].tolist()


def test_explicit_axes_and_two_axes():
    def sums(batch):
        is_label = batch.data["label"][:, None] == jnp.arange(CLASSES)[None]
        weights = jnp.where(is_label, batch.weights[:, None], 0)
        return weighted_sum(is_label, weights, axis=0), weighted_sum(is_label, axis=0)

    def metric_fn(batch):
        return dict(zip(("label", "share"), sums(batch), strict=True))

    right = np.bincount(LABELS[:28], minlength=CLASSES)
    for mesh in (
        regimes.make_mesh("jit_explicit", 4),
        jax.make_mesh((2, 2), ("data", "model"), devices=jax.devices()[:4]),
    ):
        # as many rows as classes: nothing is wrong with that
        steps = [Batch.of(fetch(np.arange(i, i + 4))) for i in range(0, 28, 4)]
        found = evaluate(metric_fn, steps, mesh)
        np.testing.assert_array_equal(found.sums["label"].weight, right)
        np.testing.assert_array_equal(found["share"], right / 28)


def test_parts_of_a_data_set_add_up():
    parts = [
        evaluate(metrics, [Batch.of(fetch(ids))], data_mesh(1)).sums
        for ids in (np.arange(8), np.arange(8, 16), np.arange(16, 29))
    ]
    summed = {name: sum(part[name] for part in parts) for name in parts[0]}
    np.testing.assert_array_equal(summed["confusion"].total, MATRIX)
    np.testing.assert_allclose(summed["iou"].mean()[:3], by_hand()[0][:3], rtol=1e-6)


def given(batch):
    return {"given": WeightedSum(batch.data["v"].sum(0), batch.data["w"].sum(0))}


def evaluate_given(values, weights, **kwargs):
    steps = [
        Batch.of({"v": np.asarray(v)[None], "w": np.asarray(w)[None]})
        for v, w in zip(values, weights, strict=True)
    ]
    return evaluate(given, steps, data_mesh(1), **kwargs)


def test_counts_pass_int32_over_the_steps():
    most = np.array([2**31 - 1, 0, 5], np.int32)
    found = evaluate_given([most] * 40, [most] * 40)
    assert found.sums["given"].weight.tolist() == [40 * (2**31 - 1), 0, 200]
    np.testing.assert_array_equal(found["given"], [1, NAN, 1])
    np.testing.assert_array_equal(found.sums["given"].mean(), [1, 0, 1])


def test_narrow_sums_are_widened():
    small = np.full(2, 100, np.int8)
    found = evaluate(
        lambda batch: WeightedSum(jnp.asarray(small), jnp.asarray(small)),
        [Batch.of(np.ones(1))] * 4,
        data_mesh(1),
    )
    assert found.sums["loss"].weight.tolist() == [400, 400]
    half = evaluate(
        lambda batch: WeightedSum(jnp.full(2, 0.1, jnp.bfloat16), jnp.float16(60_000)),
        [Batch.of(np.ones(1))] * 4,
        data_mesh(1),
    )
    assert half.sums["loss"].weight == 4 * float(np.float16(60_000))
    assert half.sums["loss"].total.tolist() == [4 * float(jnp.bfloat16(0.1))] * 2


def test_floats_over_the_steps_are_not_rounded():
    tenths = np.full(2, 0.1, np.float32)
    found = evaluate_given([tenths] * 30, [tenths] * 30)
    assert found["given"].tolist() == [1.0, 1.0]
    assert found.sums["given"].total.tolist() == [float(tenths[0]) * 30] * 2
    assert np.sum([tenths] * 30, axis=0, dtype=np.float32)[0] != float(tenths[0]) * 30


def test_a_bad_weight_is_named_or_stays_in_its_element():
    with pytest.raises(ValueError, match=r"must be at least 0, got -3 at \[1\] for 'given' i"):
        evaluate_given([np.ones(3)], [np.array([1, -3, 1])])
    with pytest.raises(ValueError, match=r"got -0\.5 at \[1, 0\] for 'given' in step 1"):
        evaluate_given(
            [np.ones((2, 2))] * 2, [np.ones((2, 2)), np.array([[1, 1], [-0.5, 1]], np.float32)]
        )
    found = evaluate_given([np.ones(4)] * 2, [np.ones(4), np.array([1, NAN, np.inf, 0])])
    np.testing.assert_array_equal(found["given"], [1, NAN, NAN, 2])
    # a total that is no number is not hidden, and not taken for a class that is absent
    found = evaluate_given([np.array([NAN, 1, 0])], [np.array([1, 1, 0])])
    np.testing.assert_array_equal(found["given"], [NAN, 1, NAN])
    assert math.isnan(found["given"][found.sums["given"].weight > 0].mean())
    assert np.nanmean(found["given"]) == 1  # which hides it


def test_no_weight_at_all_is_an_error_or_nan():
    nothing = [np.zeros(3)], [np.zeros(3, np.int32)]
    with pytest.raises(ValueError, match="weight for every metric, got none for 'given'"):
        evaluate_given(*nothing)
    found = evaluate_given(*nothing, empty="nan")
    np.testing.assert_array_equal(found["given"], [NAN] * 3)
    with pytest.raises(ValueError, match="got none for 'given'"):
        evaluate_given([np.ones(3)], [np.int32(0)])  # one weight for all
    assert evaluate_given([np.zeros(3)], [np.array([0, 1, 0])])["given"][1] == 0


def test_a_weight_of_another_shape_is_refused():
    for total, weight in (((2, 3), (3,)), ((2, 3), (2,)), ((), (3,)), ((3,), (1,))):
        with pytest.raises(
            ValueError,
            match=r"metric_fn: weight must have the shape of total, or be a scalar, .* for 'given'",
        ):
            evaluate_given([np.ones(total)], [np.ones(weight)])


def test_shapes_that_change_are_refused():
    ones = [np.ones(2), np.ones(3)]
    with pytest.raises(
        ValueError,
        match=r"one shape in every step, got total \(3,\) for 'given' in step 1, and \(2,\) before",
    ):
        evaluate_given(ones, ones)
    with pytest.raises(ValueError, match=r"weight \(\) for 'given' in step 1, and \(2,\) before"):
        evaluate_given([np.ones(2)] * 2, [np.ones(2), np.ones(())])
    with pytest.raises(ValueError, match=r"total \(1,\) for 'given' in step 1, and \(\) before"):
        evaluate_given([np.ones(()), np.ones(1)], [np.ones(()), np.ones(1)])


def test_rows_that_nobody_has_summed_are_refused():
    def metric_fn(batch):
        return {"unsummed": WeightedSum(batch.data, batch.weights)}

    message = (
        r"must sum over rows.* total \(4,\) .* for 'unsummed' of 4 rows, and total \(8,\) of 8"
    )
    for mesh in (data_mesh(2), regimes.make_mesh("jit_explicit", 2)):
        with pytest.raises(ValueError, match=message):
            evaluate(metric_fn, [Batch.of(np.ones(4, np.float32))], mesh)

    def of_four_rows(batch):  # which cannot be asked about eight
        assert len(batch.data) == 4
        bins = jnp.reshape(batch.data, (2, 2)).sum(axis=0)
        return WeightedSum(jnp.concatenate([bins, bins]), jnp.ones(4))

    found = evaluate(of_four_rows, [Batch.of(np.ones(4, np.float32))], data_mesh(2))
    assert found["loss"].tolist() == [2.0] * 4


def test_what_is_no_real_number_is_refused():
    with pytest.raises(TypeError, match=r"sums of real numbers, got total complex64\[2\] and weig"):
        evaluate_given([np.ones(2, complex)], [np.ones(2)])
    with pytest.raises(TypeError, match="got total list and weight list for 'loss'"):
        evaluate(
            lambda b: WeightedSum([b.weights.sum()], [1]), [Batch.of(np.ones(2))], data_mesh(1)
        )
