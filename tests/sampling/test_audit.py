import os
import tracemalloc
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from jax_ddp_weighting import CoverageError, EpochPlan, Ledger, audit_ids


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


def test_ids_out_of_range_are_named_exactly_beyond_int64_too():
    ranks = [np.array([0, -3]), np.array([2**63 + 5, 1], np.uint64)]
    assert audit_ids(ranks, 2).out_of_range == (-3, 2**63 + 5)


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


@pytest.mark.parametrize(
    ("ids", "weights", "least", "most"),
    [
        ([0, 1, 2], [0.5, 0.25, 2.0], 0.25, 2),
        ([0, 1, 2, 0], [0.5, 0.25, 2.0, 0.125], 0.25, 2),  # 0 has .625 in all
        ([0, 1, 2, 1], [0.5, 0.25, 2.0, 2.0], 0.5, 2.25),
        ([0, 1, 1], [0.5, 0.25, 2.0], 0, 2.25),  # 2 has nothing
        ([0, 1, 2, 2], [1, 1, 1, 0], 1, 1),
        ([0, 1, 2, 2], [2, 2, 2, 2], 2, 4),
        ([0, 1, 2, 7], [1.0, 1.0, 1.0, 9.0], 1, 1),  # 7 is no id of 3
        ([], [], 0, 0),
    ],
)
def test_the_weight_range_is_over_ids_and_not_over_slots(ids, weights, least, most):
    assert audit_ids(ids, 3, weights=weights).weight_range == (least, most)


def test_an_audit_takes_what_a_loader_gives():
    for ids in ([0, 1, 2, 2], (0, 1, 2, 2), np.array([0, 1, 2, 2], np.uint8), range(3)):
        assert audit_ids(ids, 3).unique == 3
    ranks = audit_ids([range(3), np.array([3]), []], 5)
    assert ranks.per_rank == (3, 1, 0)
    assert ranks.omitted == (4,)
    assert audit_ids([], 0).exactly_once
    with pytest.raises(
        ValueError, match=r"ids must be \[slots\] or \[ranks, slots\], got shape \("
    ):
        audit_ids(np.zeros((2, 2, 2), int), 1)


def test_an_audit_lists_up_to_its_limit_and_counts_the_rest():
    audit = audit_ids([0, 0, 1, 1, 2, 2, 98, 99], 50, limit=2)
    assert (audit.duplicated, audit.num_duplicated) == ({0: 2, 1: 2}, 3)
    assert (audit.omitted, audit.num_omitted) == ((3, 4), 47)
    assert (audit.out_of_range, audit.num_out_of_range) == ((98, 99), 2)


def test_an_audit_takes_about_a_byte_per_example():
    ids = np.random.default_rng(0).permutation(1_000_000)
    tracemalloc.start()
    audit = audit_ids(ids, 1_000_000)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert audit.exactly_once
    assert peak < 1.6e6


# The ledger


def test_a_ledger_fills_up_batch_by_batch():
    plan = EpochPlan(47, 3, 4)
    ledger = Ledger(47, epoch=2)
    for step in range(plan.steps_per_epoch):
        with pytest.raises(CoverageError, match=r"epoch 2: \d+ of 47 ids omitted"):
            ledger.check_exactly_once()
        batch = plan.batch(2, step)
        ledger.add(batch.ids, batch.weights)
        later = [plan.batch(2, later) for later in range(step + 1, plan.steps_per_epoch)]
        due = sorted(i for b in later for i in b.ids[b.weights > 0].tolist())
        assert ledger.due().tolist() == due
        assert ledger.num_due == 47 - ledger.accepted == len(due)
    ledger.check_exactly_once()
    assert ledger.audit() == replace(plan.audit(2), slots=47, per_rank=(47,))


def test_ledgers_of_ranks_merge_to_that_of_the_run():
    rng = np.random.default_rng(0)
    ranks = [rng.integers(0, 1000, 700) for _ in range(3)]
    ledgers = [Ledger(1000) for _ in ranks]
    whole = Ledger(1000)
    for ledger, ids in zip(ledgers, ranks, strict=True):
        ledger.add(ids)
        whole.add(ids)
    for other in ledgers[1:]:
        ledgers[0].merge(other)
    assert ledgers[0].audit() == whole.audit()
    assert ledgers[0].audit().duplicated == audit_ids(ranks, 1000).duplicated


def test_an_id_consumed_again_is_named():
    ledger = Ledger(5, epoch=0)
    ledger.add([0, 1, 2, 3, 4])
    ledger.add([[3], [4]], weights=[[1], [0]])
    with pytest.raises(CoverageError, match=r"epoch 0: 0 of 5 ids omitted, 1 duplicated \(3\)"):
        ledger.check_exactly_once()


@pytest.mark.parametrize("n", [0, 1, 8, 1001])
def test_a_ledger_survives_saving(n, tmp_path):
    ledger = Ledger(n, epoch=3)
    ledger.add(np.arange(0, n, 2))
    ledger.add(np.arange(0, n, 4))
    ledger.save(tmp_path / "ledger")
    loaded = Ledger.load(tmp_path / "ledger")
    assert repr(loaded) == repr(ledger)
    assert loaded.audit() == ledger.audit()
    loaded.add(np.arange(1, n, 2))
    ledger.add(np.arange(1, n, 2))
    assert loaded.audit() == ledger.audit()
    assert [path.name for path in tmp_path.iterdir()] == ["ledger"]


def saved(tmp_path):
    ledger = Ledger(1000, epoch=3)
    ledger.add(range(0, 1000, 3))
    path = tmp_path / "ledger"
    ledger.save(path)
    return path, path.read_bytes()


def test_a_ledger_cut_short_anywhere_is_refused(tmp_path):
    path, data = saved(tmp_path)
    for length in range(len(data)):
        path.write_bytes(data[:length])
        with pytest.raises(ValueError, match=r"Ledger.load: path must hold a.* ledger"):
            Ledger.load(path)


def test_a_ledger_altered_anywhere_is_refused(tmp_path):
    path, data = saved(tmp_path)
    for at in range(len(data)):
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        with pytest.raises(ValueError, match=r"Ledger.load: path must hold a.* ledger"):
            Ledger.load(path)


def test_a_save_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    path, data = saved(tmp_path)

    def full(descriptor):
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space left"):
        Ledger(1000).save(path)
    assert path.read_bytes() == data
    assert [each.name for each in tmp_path.iterdir()] == ["ledger"]


def test_no_file_is_the_systems_own_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        Ledger.load(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("ids", "weights", "error", "text"),
    [
        ([0, 10], None, ValueError, r"Ledger.add: ids must be in \[0, 10\), got 10\."),
        ([0, -1], None, ValueError, r"Ledger.add: ids must be in \[0, 10\), got -1\."),
        (range(5, 40), None, ValueError, "got 10, 11, 12, 13, 14, 15, 16, 17, 18, 19 and 20 more"),
        ([0.5], None, TypeError, "Ledger.add: ids must be integers, got float64"),
        ([0, 1], [1], ValueError, r"Ledger.add: weights must have the shape of ids, got \(1,\)"),
        (
            [[0, 1]],
            [1, 1],
            ValueError,
            r"weights must have the shape of ids, got \(2,\) and \(1, 2",
        ),
        ([0, 1], [1, -1], ValueError, "weights must be finite and at least 0, got -1"),
        ([0, 1], [1, np.nan], ValueError, "weights must be finite and at least 0, got nan"),
    ],
)
def test_bad_slots_are_refused_and_nothing_is_entered(ids, weights, error, text):
    ledger = Ledger(10)
    with pytest.raises(error, match=text):
        ledger.add(ids, weights)
    assert (ledger.accepted, ledger.num_due) == (0, 10)


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (Ledger(11, epoch=0), "num_examples must be that of this ledger, 10, got 11"),
        (Ledger(10, epoch=1), "epoch must be that of this ledger, 0, got 1"),
    ],
)
def test_ledgers_of_other_epochs_or_data_do_not_merge(other, text):
    with pytest.raises(ValueError, match=f"Ledger.merge: {text}"):
        Ledger(10, epoch=0).merge(other)


@pytest.mark.parametrize("limit", [-1, 1.5])
def test_a_limit_that_lists_nothing_is_refused(limit):
    ledger, plan = Ledger(4), EpochPlan(4, 2, 1)
    for call in (ledger.audit, ledger.due, partial(plan.audit, 0), partial(audit_ids, [0], 4)):
        with pytest.raises(
            (TypeError, ValueError), match=f"limit must be an integer .* got {limit}"
        ):
            call(limit=limit)
