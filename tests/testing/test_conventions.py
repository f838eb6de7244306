"""The names, the functions behind them, and the probes that tell them apart."""

import tracemalloc
from fractions import Fraction

import numpy as np
import pytest
from reductions import CASES, KNOWN
from scipy.spatial.distance import cdist

from jax_ddp_weighting.testing import conventions
from jax_ddp_weighting.testing.conventions import (
    WEIGHTS,
    candidates,
    deviation,
    measure_candidates,
    probes,
)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("key", KNOWN)
def test_the_reductions_are_those_of_the_recorded_cases(key, case):
    recorded = CASES[case]["values"]
    totals = [[Fraction(each) for each in rank] for rank in recorded["sums"]]
    weights = [[Fraction(each) for each in rank] for rank in recorded["counts"]]
    assert KNOWN[key][2](totals, weights) == Fraction(recorded[key])


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("microbatches", [1, 2, 3, 4])
@pytest.mark.parametrize("weights", WEIGHTS)
def test_candidates_of_different_names_are_equal_or_far_apart(ranks, microbatches, weights):
    # so that a tolerance of 1e-5 leaves no doubt
    laid_out = list(probes(ranks, microbatches, weights).values())
    found = candidates(ranks, microbatches)
    seen = np.array(
        [
            np.concatenate([(each.factor * each.scheme.counted(w)).reshape(-1) for w in laid_out])
            for each in found
        ]
    )
    seen = seen.reshape(len(found), len(laid_out), -1)
    gaps = np.zeros((len(found), len(found)))
    for probe in seen.swapaxes(0, 1):
        sizes = np.abs(probe).max(axis=-1)
        apart = cdist(probe, probe, "chebyshev") / np.where(sizes, sizes, 1.0)
        gaps = np.maximum(gaps, apart)
    names = np.array([each.convention for each in found])
    gaps = gaps[names[:, None] != names[None]]
    # masks of few tokens on many ranks part some of them by a little less
    assert gaps[gaps > 1e-9].min(initial=1.0) > {"any": 0.05, "binary": 0.03}[weights]


@pytest.mark.parametrize("block", [5, 4096])
def test_all_candidates_are_measured_as_one_is(block, monkeypatch):
    monkeypatch.setattr(conventions, "_BLOCK", block)
    laid_out = probes(3, 2).values()
    seen = [(weights, weights * np.linspace(0.5, 2, weights.size).reshape(weights.shape))
            for weights in laid_out]  # fmt: skip
    for match, off in measure_candidates(seen):
        alone = max(
            deviation(counted, match.factor * match.scheme.counted(w)) for w, counted in seen
        )
        assert off == alone


def test_a_large_batch_is_measured_in_little_memory():
    weights = np.random.default_rng(0).integers(0, 2, (8, 2, 8192)).astype(float)
    tracemalloc.start()
    measure_candidates([(weights, weights / weights.sum())])
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 250 * weights.nbytes  # some 35 schemes, and not all 315 candidates at once
