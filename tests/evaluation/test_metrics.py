"""Metrics that do not move with the number of ranks, the rows per batch, or the order."""

import dataclasses
import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import regimes
from flax import nnx
from flax.training.train_state import TrainState
from sklearn.datasets import load_digits

from jax_ddp_weighting import (
    Batch,
    EpochPlan,
    WeightedSum,
    batches,
    data_mesh,
    evaluate,
    gather_by_id,
    make_train_step,
    weighted_sum,
)

DIGITS = load_digits()
PIXELS = DIGITS.data.astype(np.float32)[1437:]  # whole numbers, so that float32 is exact
LABELS = DIGITS.target.astype(np.int32)[1437:]
CENTROIDS = np.stack([DIGITS.data[:1437][DIGITS.target[:1437] == k].mean(0) for k in range(10)])
CENTROIDS = CENTROIDS.round().astype(np.float32)
LOGITS = 2 * PIXELS @ CENTROIDS.T - (CENTROIDS**2).sum(1)
RIGHT = int((LOGITS.argmax(1) == LABELS).sum())
ROWS = len(LABELS)


def fetch(ids):
    return {"pixels": PIXELS[ids], "label": LABELS[ids]}


def predict(centroids, data):
    return jnp.argmax(2 * data["pixels"] @ centroids.T - jnp.sum(centroids**2, 1)[None], axis=1)


def accuracy(centroids, batch):
    return {
        "accuracy": weighted_sum(
            predict(centroids, batch.data) == batch.data["label"], batch.weights
        )
    }


predict_jitted = jax.jit(predict)


@pytest.mark.parametrize("order", ["keyed", "torch"])
@pytest.mark.parametrize("ranks", range(1, 9))
def test_one_accuracy_on_digits_whatever_the_devices_and_batches(ranks, order):
    for rows in (1, 7, 64) if ranks in (1, 3, 8) else (16,):
        mesh = data_mesh(ranks)
        plan = EpochPlan(ROWS, ranks, rows, order=order, seed=rows)
        found = evaluate(accuracy, batches(plan, 1, fetch, mesh), mesh, params=CENTROIDS)
        assert found.sums["accuracy"] == WeightedSum(RIGHT, ROWS)
        assert found["accuracy"] == RIGHT / ROWS
        assert (found.accepted, found.steps) == (ROWS, plan.steps_per_epoch)


@pytest.mark.parametrize("tail", ["mask", "repeat"])
@pytest.mark.parametrize(("ranks", "rows"), [(1, 64), (3, 7), (7, 16), (8, 64)])
def test_one_accuracy_from_gathered_predictions_whatever_tail_keeps_every_id(ranks, rows, tail):
    mesh = data_mesh(ranks)
    plan = EpochPlan(ROWS, ranks, rows, tail=tail)
    ids, weights, predictions = [], [], []
    for batch in batches(plan, 0, fetch, mesh):
        ids.append(batch.ids)
        weights.append(batch.weights)
        predictions.append(predict_jitted(CENTROIDS, batch.data))
    found = gather_by_id(ids, weights, predictions, num_examples=ROWS)
    assert int((found.predictions == LABELS[found.ids]).sum()) == RIGHT
    copies = ranks * plan.num_samples - ROWS if tail == "repeat" else 0
    assert found.num_duplicated == copies


def test_the_digits_check_can_fail():
    # copies that count move the rate; so does a mean of the batches' means
    ranks, rows = 7, 64
    mesh = data_mesh(ranks)
    counted = evaluate(
        accuracy,
        batches(EpochPlan(ROWS, ranks, rows, tail="repeat"), 0, fetch, mesh),
        mesh,
        params=CENTROIDS,
    )
    assert counted.accepted == 364
    assert counted.sums["accuracy"] != WeightedSum(RIGHT, ROWS)
    seen = [LOGITS[i : i + 64].argmax(1) == LABELS[i : i + 64] for i in range(0, ROWS, 64)]
    assert np.mean([each.mean() for each in seen]) != RIGHT / ROWS


def losses(batch):
    return {
        "loss": weighted_sum(batch.data["loss"], batch.data["tokens"]),
        "hits": weighted_sum(batch.data["loss"] < 1, batch.weights),
    }


def by_hand(loss, tokens=None, weights=None):
    loss = np.array(loss, np.float32)
    tokens = np.ones(len(loss), np.int32) if tokens is None else np.array(tokens)
    return Batch.of({"loss": loss, "tokens": tokens}, weights=weights)


def test_each_metric_is_divided_by_its_own_weight():
    found = evaluate(losses, [by_hand([2, 0.5], [3, 1]), by_hand([4, 0], [0, 4])], data_mesh(2))
    assert dict(found) == {"loss": 6.5 / 8, "hits": 0.5}
    assert found.sums == {"loss": WeightedSum(6.5, 8), "hits": WeightedSum(2, 4)}


@pytest.mark.parametrize(
    ("values", "weights", "mean"),
    [
        ([2.0, 4.0], [0.25, 0.25], 3.0),  # a clamp to 1 gives 1.5
        ([1.0, 3.0], [1.0, 0.25], 1.4),  # bools give 2.0
        ([5.0, np.nan], [1, 0], 5.0),
        ([5.0, np.inf], [2, 0], 5.0),
        ([np.nan, 1.0], [1, 1], math.nan),  # a NaN that counts is not hidden
    ],
)
def test_fractional_weights_and_nan_under_weight_0(values, weights, mean):
    batch = by_hand(values, weights, weights=np.array(weights))
    found = evaluate(losses, [batch, batch], data_mesh(2))
    assert found["loss"] == pytest.approx(mean, rel=1e-7, nan_ok=True)
    assert found.accepted == 2 * np.count_nonzero(weights)


def nnx_average(values, mask):
    metric = nnx.metrics.Average()
    metric.update(values=jnp.array(values), mask=jnp.array(mask))
    return float(metric.compute())


def test_masks_of_flax_metrics_are_no_weights_but_gathered_rows_need_none():
    # the mean of 1 and 3 that weigh 1 and 1/4 is 1.4; nnx's Average counts in integers
    assert nnx_average([1.0, 3.0], [1.0, 0.25]) == 1.75
    assert math.isnan(nnx_average([1.0, np.nan], [True, False]))
    # so gather, and give such metrics accepted rows alone (examples/evaluation.py)
    found = gather_by_id([0, 1, 2], [1, 0, 1], [1.0, np.nan, 3.0])
    metric = nnx.metrics.Average()
    metric.update(values=jnp.asarray(found.predictions, jnp.float32))
    assert float(metric.compute()) == 2.0
    # what they hold is a numerator and a denominator, so their sums can be handed on
    handed = WeightedSum(metric.total[...], metric.count[...])
    assert evaluate(lambda batch: handed, [by_hand([0.0])], data_mesh(1))["loss"] == 2.0


def test_nothing_accepted_is_an_error_or_nan_by_choice():
    nothing = by_hand([1, 2], [0, 0], weights=np.array([0, 0]))
    with pytest.raises(ValueError, match=r"got none for 'hits', 'loss' \(0 accepted rows\)"):
        evaluate(losses, [nothing], data_mesh(2))
    found = evaluate(losses, [nothing], data_mesh(2), empty="nan")
    assert math.isnan(found["loss"])
    assert found.accepted == 0
    # one metric of several may be empty
    with pytest.raises(ValueError, match=r"got none for 'loss' \(2 accepted rows\)"):
        evaluate(losses, [by_hand([1, 2], [0, 0])], data_mesh(2))
    with pytest.raises(ValueError, match="got no batches"):
        evaluate(losses, [], data_mesh(2))
    assert dict(evaluate(losses, [], data_mesh(2), empty="nan")) == {}


def test_sums_are_exact_past_the_places_where_floats_and_int32_stop():
    def huge(batch):
        return {
            "count": WeightedSum(jnp.int32(2**31 - 1), jnp.int32(2**31 - 1)),
            "tenth": WeightedSum(jnp.float32(0.1), jnp.int32(1)),
        }

    steps = 40
    found = evaluate(huge, [by_hand([0.0])] * steps, data_mesh(1))
    assert found.sums["count"] == WeightedSum(steps * (2**31 - 1), steps * (2**31 - 1))
    tenth = Fraction(float(np.float32(0.1)))
    assert found["tenth"] == float(tenth)  # the mean of equal numbers is that number
    assert found.sums["tenth"].total == float(tenth * steps)
    total = np.float32(0)
    for _ in range(steps):
        total += np.float32(0.1)
    assert float(total) != found.sums["tenth"].total  # float32 over the steps would drift


def test_an_overflow_of_a_steps_integers_is_said():
    def overflow(batch):
        return weighted_sum(batch.data["loss"], batch.data["tokens"])

    batch = by_hand([1, 1], np.array([2**31 - 1, 5], np.int32))
    with pytest.raises(ValueError, match=r"weight must be at least 0, got -\d+ for 'loss' in step"):
        evaluate(overflow, [batch], data_mesh(1))


def test_smaller_batches_are_filled_up_and_compile_nothing_new():
    traced = []

    def metric(batch):
        traced.append(batch.weights.shape)
        return weighted_sum(batch.data["loss"], batch.weights)

    steps = [by_hand(np.arange(5.0)), by_hand([7.0]), by_hand([1.0, 2.0])]
    found = evaluate(metric, steps, data_mesh(4))
    assert traced == [(8,)]  # the first is filled up to the ranks
    assert (found["loss"], found.accepted) == (20 / 8, 8)
    assert found["loss"] != np.mean([2.0, 7.0, 1.5])  # the mean of batch means, flax 262


@pytest.mark.parametrize("regime", ["jit", "jit_explicit"])
def test_meshes_of_both_axis_types_and_of_two_axes(regime):
    mesh = regimes.make_mesh(regime, 4)
    plan = EpochPlan(ROWS, 4, 16)
    found = evaluate(accuracy, batches(plan, 0, fetch, mesh), mesh, params=CENTROIDS)
    assert found.sums["accuracy"].total == RIGHT
    mesh = jax.make_mesh((2, 2), ("data", "model"), devices=jax.devices()[:4])
    plan = EpochPlan(ROWS, 2, 32)
    found = evaluate(accuracy, batches(plan, 0, fetch, mesh), mesh, params=CENTROIDS)
    assert found.sums["accuracy"].total == RIGHT


def test_inside_training_each_is_compiled_once():
    traced = {"loss": 0, "metric": 0}

    def loss_fn(params, batch):
        traced["loss"] += 1
        logits = batch.data["pixels"] @ params["kernel"] / 16
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.data["label"])
        return weighted_sum(losses, batch.weights)

    def metric_fn(params, batch):
        traced["metric"] += 1
        right = (batch.data["pixels"] @ params["kernel"]).argmax(-1) == batch.data["label"]
        return {"accuracy": weighted_sum(right, batch.weights)}

    mesh = data_mesh(3)
    plan = EpochPlan(ROWS, 3, 50)
    step = make_train_step(loss_fn, mesh)
    params = {"kernel": jnp.zeros((64, 10))}
    state = TrainState.create(apply_fn=None, params=params, tx=optax.adam(0.1))
    found = []
    for epoch in range(3):
        for batch in batches(plan, epoch, fetch, mesh):
            state, _ = step(state, batch)
        trained = traced["loss"]
        seen = batches(plan, epoch, fetch, mesh)
        found.append(evaluate(metric_fn, seen, mesh, params=state.params))
        assert traced["metric"] == 1
        assert traced["loss"] == trained
    assert found[-1]["accuracy"] > found[0]["accuracy"] / 2 > 0
    # the check can fail: a function made anew is compiled anew
    for _ in range(2):
        again = batches(plan, 0, fetch, mesh)
        evaluate(lambda batch: metric_fn(state.params, batch), again, mesh)
    assert traced["metric"] == 3


@pytest.mark.parametrize(
    ("returned", "error", "message"),
    [
        (lambda b: jnp.mean(b.data["loss"]), TypeError, r"a dict of WeightedSums, got float32\[\]"),
        (
            lambda b: {"a": jnp.ones(3)},
            TypeError,
            r"got a dict of float32\[3\]. Return weighted_su",
        ),
        (lambda b: {}, TypeError, "got a dict of "),
        (
            lambda b: WeightedSum(b.data["loss"], b.weights),
            ValueError,
            r"scalar sums, got total \(2,\) and weight \(2,\) for 'loss'",
        ),
    ],
)
def test_what_is_no_sum_is_refused(returned, error, message):
    with pytest.raises(error, match=message):
        evaluate(returned, [by_hand([1, 2])], data_mesh(1))


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match='empty must be "raise" or "nan", got \'zero\''):
        evaluate(losses, [], data_mesh(1), empty="zero")
    with pytest.raises(ValueError, match="evaluate: mesh must have the axis 'batch'"):
        evaluate(losses, [], data_mesh(1), axis_name="batch")
    with pytest.raises(TypeError, match="batches must be Batches, got tuple"):
        evaluate(losses, [(1, 2)], data_mesh(1))


# --- rates, empty batches, and votes of ranks that have ended -------------------------------------


def errors_per_word(batch):
    errors, words = batch.data
    return {
        "rate": WeightedSum(jnp.sum(errors * batch.weights), jnp.sum(words * batch.weights)),
        "lossy": weighted_sum(errors / words, words * batch.weights),
    }


@pytest.mark.parametrize(("ranks", "rows"), [(1, 4), (1, 3), (2, 2), (4, 4)])
def test_a_rate_of_two_sums_keeps_the_errors_of_rows_without_words(ranks, rows):
    errors, words = np.int32([1, 2, 0, 5]), np.int32([4, 0, 6, 10])
    plan = EpochPlan(4, num_replicas=ranks, batch_size=-(-rows // ranks), shuffle=False)
    mesh = data_mesh(ranks)
    steps = batches(plan, 0, lambda ids: (errors[ids], words[ids]), mesh)
    found = evaluate(errors_per_word, steps, mesh)
    assert found["rate"] == 0.4
    assert found.sums["rate"] == WeightedSum(8, 20)
    assert found["lossy"] == pytest.approx(0.3)  # what is documented: the row of no words is gone


def total(batch):
    return weighted_sum(batch.data.sum(axis=-1), batch.weights)


@pytest.mark.parametrize("nothing", [np.zeros((0, 3), np.float32), np.zeros(0)])
@pytest.mark.parametrize("ranks", [1, 4])
def test_a_batch_of_no_rows_counts_nothing(nothing, ranks):
    full = Batch.of(np.arange(12, dtype=np.float32).reshape(4, 3))
    found = evaluate(total, [full, Batch.of(nothing), full], data_mesh(ranks))
    assert (found["loss"], found.accepted, found.steps) == (16.5, 8, 3)


def test_a_first_batch_of_no_rows_counts_nothing():
    full = Batch.of(np.arange(12, dtype=np.float32).reshape(4, 3))
    empty = Batch.of(np.zeros((0, 3), np.float32))
    found = evaluate(total, [empty, full], data_mesh(4))
    assert (found["loss"], found.accepted, found.steps) == (16.5, 4, 2)


def test_votes_of_ranks_that_have_ended_are_refused():
    batch = Batch(np.ones((2, 3)), np.arange(2), np.ones(2), np.array([2.0, 0.0]))
    with pytest.raises(ValueError, match=r"evaluate: batches must count .* got Batch\.missing"):
        evaluate(total, [batch], data_mesh(1))


@dataclasses.dataclass  # with a value, and so without a hash
class Scaled:
    scale: float

    def __call__(self, batch):
        return {"mean": weighted_sum(self.scale * batch.data, batch.weights)}


def test_a_metric_without_a_hash_is_taken_as_it_is_now():
    metric, rows = Scaled(2.0), [Batch.of(np.float32([1, 2]))]
    assert evaluate(metric, rows, data_mesh(2))["mean"] == 3
    metric.scale = 4.0
    assert evaluate(metric, rows, data_mesh(2))["mean"] == 6


def test_one_batch_is_no_iterable_of_batches():
    with pytest.raises(TypeError, match=r"evaluate: batches must be .* got one Batch\. Write \[ba"):
        evaluate(Scaled(1.0), Batch.of(np.float32([1, 2])), data_mesh(2))


def test_a_negative_weight_is_named_beside_those_that_wrap_round():
    batch = Batch.of(np.float32([1, 2]), jnp.array([1, -1]))
    with pytest.raises(ValueError, match=r"weight must be at least 0.*A row of negative weight"):
        evaluate(lambda batch: weighted_sum(batch.data, batch.weights), [batch], data_mesh(2))
