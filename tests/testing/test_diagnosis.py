"""Counts named, and the name, the table and the remedy as they are printed."""

import itertools
import json

import numpy as np
import pytest
from reductions import CASES, KNOWN, PROBE, on_trial, right

from jax_ddp_weighting import diagnose, diagnose_weights


@pytest.mark.parametrize("key", KNOWN)
def test_the_recorded_probe_alone_is_enough_to_name_them(key):
    name, factor, reduction = KNOWN[key]
    ranks = CASES[PROBE]["ranks"]
    width = max(len(micro) for rank in ranks for micro in rank)
    weights = np.zeros((2, 3, width))
    for r, k in itertools.product(range(2), range(3)):
        weights[r, k, : len(ranks[r][k])] = [weight for _, weight in ranks[r][k]]
    # each token has a coordinate of its own
    own = np.eye(weights.size).reshape(*weights.shape, -1) * weights[..., None]
    counted = reduction(list(own.sum(axis=2)), weights.sum(axis=2).tolist())
    found = diagnose_weights(counted.reshape(weights.shape), weights)
    assert (found.convention, found.factor) == (name, factor(2, 3))


def test_a_diagnosis_prints_name_table_and_remedy():
    found = diagnose(on_trial(KNOWN["mean_of_all_local_means"][2]), num_replicas=2, microbatches=3)
    lines = str(found).splitlines()
    assert lines[0].startswith("mean_of_means, factor 1: the step takes the mean of the means of")
    n = found.weights.sum(axis=-1)
    for r in range(2):
        numbers = lines[3 + r].split("(weight")
        ratios = [float(each.split()[-1]) for each in numbers[:-1]]
        np.testing.assert_allclose(ratios, n.sum() / 6 / n[r], atol=5e-4)
    assert lines[5].startswith("Fix: Add sums and weights over ranks and microbatches and divide")
    assert json.loads(json.dumps(found.as_dict()))["convention"] == "mean_of_means"


def test_a_table_shows_empty_parts_and_padding_that_counts():
    weights = np.array([[[1.0, 1.0], [0.0, 0.0]], [[2.0, 0.0], [0.0, 0.0]]])
    table = str(diagnose_weights(np.full((2, 2, 2), 1 / 8), weights)).splitlines()[2:5]
    assert table[1].split("  ")[-1].strip() == "padding counts"
    assert "0.500 (weight 2)" in table[1]
    assert "0.250 (weight 2, padding)" in table[2]
    right_counts = weights / 4
    assert "empty" in str(diagnose_weights(right_counts, weights))


def test_a_large_table_is_cut():
    found = diagnose(on_trial(right), num_replicas=10, microbatches=8)
    text = str(found)
    assert "and 2 more" in text.splitlines()[2]
    assert "and 2 more ranks" in text


@pytest.mark.parametrize(
    ("counted", "weights", "message"),
    [
        (np.ones((2, 3)), np.ones((2, 3)), r"must have one shape \[ranks, .* got \(2, 3\)"),
        (np.ones((1, 1, 2)), np.zeros((1, 1, 2)), "must be finite, at least 0, and not all 0"),
        (np.ones((1, 1, 2)), np.array([[[1, -1]]]), "must be finite, at least 0, and not all 0"),
    ],
)
def test_counts_that_cannot_be_named_are_refused(counted, weights, message):
    with pytest.raises(ValueError, match=message):
        diagnose_weights(counted, weights)
