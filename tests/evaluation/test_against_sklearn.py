"""Twenty and more of scikit-learn's metrics, of sums over batches and ranks, weighted and not."""

import jax.numpy as jnp
import numpy as np
import pytest
from sklearn import metrics as sk

from jax_ddp_weighting import EpochPlan, WeightedSum, batches, data_mesh, evaluate, weighted_sum

ROWS, CLASSES, BINS, TAGS = 53, 5, 16, 4
DRAW = np.random.default_rng(7)

LABEL = DRAW.integers(0, CLASSES, ROWS).astype(np.int32)
PROBABILITIES = DRAW.dirichlet(np.ones(CLASSES), ROWS)
PROBABILITIES += 1.5 * np.eye(CLASSES)[LABEL] * (DRAW.random((ROWS, 1)) < 0.6)
PROBABILITIES = (PROBABILITIES / PROBABILITIES.sum(1, keepdims=True)).astype(np.float32)
PROBABILITIES = PROBABILITIES.astype(np.float64)
PROBABILITIES /= PROBABILITIES.sum(1, keepdims=True)
GUESS = PROBABILITIES.argmax(1).astype(np.int32)
POSITIVE = DRAW.integers(0, 2, ROWS).astype(np.int32)
SCORE = np.clip(DRAW.integers(0, 12, ROWS) + 4 * POSITIVE, 0, BINS - 1).astype(np.int32)
TRUE = DRAW.integers(8, 64, ROWS) / 8  # eighths, so that float32 sums are exact
PREDICTED = TRUE + DRAW.integers(-7, 9, ROWS) / 8
TAG = DRAW.integers(0, 2, (ROWS, TAGS)).astype(np.int32)
TAG_GUESS = np.where(DRAW.random((ROWS, TAGS)) < 0.7, TAG, 1 - TAG)
WEIGHTS = {
    "unweighted": np.ones(ROWS, np.int32),
    "weighted": (DRAW.integers(0, 9, ROWS) / 4).astype(np.float32),  # some are 0
}


def metric_fn(batch):
    data = batch.data
    weights = batch.weights * data["weight"]

    def per_element(hits):
        over = weights.reshape(-1, *[1] * (hits.ndim - 1))
        return weighted_sum(hits, jnp.broadcast_to(over, hits.shape), axis=0)

    classes, bins = jnp.arange(CLASSES), jnp.arange(BINS)
    is_label = data["label"][:, None] == classes[None]
    is_guess = data["guess"][:, None] == classes[None]
    is_bin = data["score"][:, None] == bins[None]
    is_side = data["positive"][:, None] == jnp.arange(2)[None]
    mine = jnp.sum(jnp.where(is_label, data["probabilities"], 0), axis=1)
    above = jnp.sum(data["probabilities"] > mine[:, None], axis=1)
    true, error = data["true"], data["true"] - data["predicted"]
    hit = (data["tag"] == 1) & (data["tag_guess"] == 1)
    either = (data["tag"] == 1) | (data["tag_guess"] == 1)
    return {
        "confusion": per_element(is_label[:, :, None] & is_guess[:, None, :]),
        "histogram": per_element(is_side[:, :, None] & is_bin[:, None, :]),
        "tags": per_element(data["tag"] != data["tag_guess"]),
        "tag jaccard": WeightedSum(per_element(hit).total, per_element(either).total),
        "right": weighted_sum(data["label"] == data["guess"], weights),
        "top 2": weighted_sum(above < 2, weights),
        "log loss": weighted_sum(-jnp.log(mine), weights),
        "brier": weighted_sum((data["positive"] - data["score"] / BINS) ** 2, weights),
        "absolute": weighted_sum(jnp.abs(error), weights),
        "squared": weighted_sum(error**2, weights),
        "error": weighted_sum(error, weights),
        "true": weighted_sum(true, weights),
        "true squared": weighted_sum(true**2, weights),
        "percentage": weighted_sum(jnp.abs(error) / true, weights),
        "pinball": weighted_sum(jnp.maximum(0.75 * error, -0.25 * error), weights),
    }


def fetch(weight):
    columns = {
        "label": LABEL,
        "guess": GUESS,
        "probabilities": PROBABILITIES.astype(np.float32),
        "positive": POSITIVE,
        "score": SCORE,
        "true": TRUE.astype(np.float32),
        "predicted": PREDICTED.astype(np.float32),
        "tag": TAG,
        "tag_guess": TAG_GUESS,
        "weight": weight,
    }
    return lambda ids: {name: column[ids] for name, column in columns.items()}


def of_counts(matrix):
    """What scikit-learn makes of labels, of the confusion matrix alone."""
    hits, actual, guessed, n = np.diag(matrix), matrix.sum(1), matrix.sum(0), matrix.sum()
    precision, recall = hits / guessed, hits / actual
    f1, share = 2 * hits / (guessed + actual), actual / n
    expected = (actual * guessed).sum()
    return {
        "accuracy": hits.sum() / n,
        "zero one": 1 - hits.sum() / n,
        "balanced accuracy": recall.mean(),
        "precision macro": precision.mean(),
        "precision weighted": (precision * share).sum(),
        "precision micro": hits.sum() / guessed.sum(),
        "recall macro": recall.mean(),
        "recall weighted": (recall * share).sum(),
        "f1 macro": f1.mean(),
        "f1 weighted": (f1 * share).sum(),
        "f1 micro": 2 * hits.sum() / (guessed.sum() + actual.sum()),
        "kappa": (hits.sum() * n - expected) / (n**2 - expected),
        "matthews": (hits.sum() * n - expected)
        / np.sqrt((n**2 - (guessed**2).sum()) * (n**2 - (actual**2).sum())),
        "jaccard macro": (hits / (actual + guessed - hits)).mean(),
    }


def sklearn_of_counts(weight):
    given = {"sample_weight": weight}
    pair = LABEL, GUESS
    return {
        "accuracy": sk.accuracy_score(*pair, **given),
        "zero one": sk.zero_one_loss(*pair, **given),
        "balanced accuracy": sk.balanced_accuracy_score(*pair, **given),
        "precision macro": sk.precision_score(*pair, average="macro", **given),
        "precision weighted": sk.precision_score(*pair, average="weighted", **given),
        "precision micro": sk.precision_score(*pair, average="micro", **given),
        "recall macro": sk.recall_score(*pair, average="macro", **given),
        "recall weighted": sk.recall_score(*pair, average="weighted", **given),
        "f1 macro": sk.f1_score(*pair, average="macro", **given),
        "f1 weighted": sk.f1_score(*pair, average="weighted", **given),
        "f1 micro": sk.f1_score(*pair, average="micro", **given),
        "kappa": sk.cohen_kappa_score(*pair, **given),
        "matthews": sk.matthews_corrcoef(*pair, **given),
        "jaccard macro": sk.jaccard_score(*pair, average="macro", **given),
    }


def of_sums(found):
    negatives, positives = found.sums["histogram"].total
    below = np.cumsum(negatives) - negatives / 2
    at_least = np.cumsum(positives[::-1])[::-1]
    precision = at_least / np.maximum(at_least + np.cumsum(negatives[::-1])[::-1], 1e-9)
    variance = found["true squared"] - found["true"] ** 2
    return {
        "auc": (positives * below).sum() / (positives.sum() * negatives.sum()),
        "average precision": (precision * positives).sum() / positives.sum(),
        "hamming": found["tags"].mean(),
        "jaccard of tags": found["tag jaccard"].mean(),
        "top 2": found["top 2"],
        "log loss": found["log loss"],
        "brier": found["brier"],
        "mae": found["absolute"],
        "mse": found["squared"],
        "rmse": found["squared"] ** 0.5,
        "r2": 1 - found["squared"] / variance,
        "explained variance": 1 - (found["squared"] - found["error"] ** 2) / variance,
        "mape": found["percentage"],
        "pinball": found["pinball"],
    }


def sklearn_of_sums(weight):
    given = {"sample_weight": weight}
    numbers = TRUE, PREDICTED
    return {
        "auc": sk.roc_auc_score(POSITIVE, SCORE, **given),
        "average precision": sk.average_precision_score(POSITIVE, SCORE, **given),
        "hamming": sk.hamming_loss(TAG, TAG_GUESS, **given),
        "jaccard of tags": sk.jaccard_score(TAG, TAG_GUESS, average="macro", **given),
        "top 2": sk.top_k_accuracy_score(LABEL, PROBABILITIES, k=2, **given),
        "log loss": sk.log_loss(LABEL, PROBABILITIES, **given),
        "brier": sk.brier_score_loss(POSITIVE, SCORE / BINS, **given),
        "mae": sk.mean_absolute_error(*numbers, **given),
        "mse": sk.mean_squared_error(*numbers, **given),
        "rmse": sk.root_mean_squared_error(*numbers, **given),
        "r2": sk.r2_score(*numbers, **given),
        "explained variance": sk.explained_variance_score(*numbers, **given),
        "mape": sk.mean_absolute_percentage_error(*numbers, **given),
        "pinball": sk.mean_pinball_loss(*numbers, alpha=0.75, **given),
    }


def evaluate_on(ranks, weight, tail="mask"):
    mesh, plan = data_mesh(ranks), EpochPlan(ROWS, ranks, 8 // ranks, tail=tail)
    return evaluate(metric_fn, batches(plan, 0, fetch(weight), mesh), mesh)


@pytest.mark.parametrize(
    ("ranks", "weights"),  # batches of 8 rows, the last of 5
    [(1, "unweighted"), (2, "weighted"), (4, "unweighted"), (4, "weighted")],
)
def test_metrics_are_scikit_learns(ranks, weights):
    weight = WEIGHTS[weights]
    found = evaluate_on(ranks, weight)
    assert (found.steps, found.accepted) == (7, ROWS)
    matrix = found.sums["confusion"].total
    np.testing.assert_array_equal(matrix, sk.confusion_matrix(LABEL, GUESS, sample_weight=weight))
    np.testing.assert_array_equal(found["confusion"], matrix / weight.sum())
    assert found["right"] == np.trace(matrix) / matrix.sum()
    right = sklearn_of_counts(weight)
    assert of_counts(matrix) == pytest.approx(right, rel=1e-12)
    right_sums = sklearn_of_sums(weight)
    assert of_sums(found) == pytest.approx(right_sums, rel=1e-6)
    assert len(right | right_sums) >= 20


def test_that_check_can_fail():
    weight, right = WEIGHTS["weighted"], sklearn_of_counts(WEIGHTS["weighted"])
    # rows of a tail that are read twice; weights that are not given; the mean over batches
    copied = of_counts(evaluate_on(4, weight, tail="repeat").sums["confusion"].total)
    unweighted = sklearn_of_counts(None)
    parts = np.array_split(np.arange(ROWS), 2)
    halves = [sk.confusion_matrix(LABEL[p], GUESS[p], sample_weight=weight[p]) for p in parts]
    each = [of_counts(matrix) for matrix in halves]
    means = {name: np.mean([one[name] for one in each]) for name in right}
    for wrong in (copied, unweighted, means):
        assert all(abs(wrong[name] / right[name] - 1) > 1e-5 for name in right), wrong
