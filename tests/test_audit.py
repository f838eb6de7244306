import numpy as np
import pytest

from jax_ddp_weighting import CoverageError, audit_ids


def naive_counts(ranks, weights, n):
    """id -> number of accepted slots, in plain Python."""
    counts = dict.fromkeys(range(n), 0)
    for rank, rank_weights in zip(ranks, weights, strict=True):
        for i, weight in zip(rank, rank_weights, strict=True):
            if weight > 0:
                counts[i] += 1
    return counts


@pytest.mark.parametrize("n", [1, 7, 1000, 40_000])
@pytest.mark.parametrize("slots", [0, 1, 50, 30_000, 50_000])
def test_an_audit_counts_as_plain_python_does(n, slots):
    rng = np.random.default_rng(n + slots)
    ranks = [rng.integers(0, n, slots), rng.integers(0, n, slots // 2)]
    weights = [rng.integers(0, 2, len(rank)) for rank in ranks]
    audit = audit_ids(ranks, n, weights=weights, limit=n)
    counts = naive_counts(ranks, weights, n)
    assert audit.slots == sum(map(len, ranks))
    assert audit.accepted == sum(counts.values())
    assert audit.per_rank == tuple(int(weight.sum()) for weight in weights)
    assert audit.duplicated == {i: count for i, count in counts.items() if count > 1}
    assert audit.omitted == tuple(i for i, count in counts.items() if count == 0)
    assert audit.unique == sum(count > 0 for count in counts.values())
    assert audit.weight_range == (min(counts.values()), max(counts.values()))


def test_a_lost_id_and_a_copy_are_named():
    audit = audit_ids([[0, 2, 4, 6], [1, 3, 5, 0]], 10, epoch=3)
    with pytest.raises(
        CoverageError,
        match=r"epoch 3: 3 of 10 ids omitted \(7, 8, 9\), 1 duplicated \(0\)\. .*mask",
    ):
        audit.check_exactly_once()


def test_at_most_ten_ids_are_named():
    with pytest.raises(CoverageError, match=r"\(0, 1, 2, 3, 4, 5, 6, 7, 8, 9 and 32 more\)"):
        audit_ids([], 42).check_exactly_once()


def test_a_complete_epoch_passes():
    audit_ids(np.arange(12).reshape(3, 4), 12).check_exactly_once()


def test_ids_out_of_range_are_named():
    audit = audit_ids([0, 1, 2, 7, -1, 7], 3)
    assert audit.out_of_range == (-1, 7)
    assert audit.num_out_of_range == 3
    with pytest.raises(CoverageError, match=r"3 slots out of range \(-1, 7\)"):
        audit.check_exactly_once()


@pytest.mark.parametrize(
    ("weights", "text"),
    [
        ([1, 1], r"weights must have the shape of ids, got \(2,\) and \(3,\)"),
        ([1, -1, 1], "weights must be finite and at least 0, got -1"),
        ([1, float("nan"), 1], "weights must be finite and at least 0, got nan"),
        ([1, float("inf"), 1], "weights must be finite and at least 0, got inf"),
    ],
)
def test_bad_weights_are_one_clear_error(weights, text):
    with pytest.raises(ValueError, match=f"audit_ids: {text}"):
        audit_ids([0, 1, 2], 3, weights=weights)


def test_ids_that_are_no_integers_are_refused():
    with pytest.raises(TypeError, match="audit_ids: ids must be integers, got float64"):
        audit_ids([0.0, 1.0], 2)
