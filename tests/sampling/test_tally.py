import numpy as np
import pytest

from jax_ddp_weighting.sampling import tally as tallies
from jax_ddp_weighting.sampling.tally import Tally


def naive(n, parts):
    counts = dict.fromkeys(range(n), 0)
    for part in parts:
        for i in part.tolist():
            counts[i] += 1
    return counts


@pytest.mark.parametrize("n", [1, 5, 300, 20_000])
@pytest.mark.parametrize("pending", [1, 100, 1 << 20])
def test_a_tally_counts_within_blocks_and_over_them(n, pending, monkeypatch):
    monkeypatch.setattr(tallies, "_PENDING", pending)
    monkeypatch.setattr(tallies, "_BLOCK", 64)
    rng = np.random.default_rng(n)
    tally, parts = Tally(n), []
    for size in (0, 1, 63, 64, 65, 1000):
        parts.append(rng.integers(0, n, size))
        tally.add(parts[-1])
        counts = naive(n, parts)
        ids, times = tally.repeated()
        assert dict(zip(ids.tolist(), times.tolist(), strict=True)) == {
            i: count for i, count in counts.items() if count > 1
        }
        assert tally.unique == sum(count > 0 for count in counts.values())
        assert tally.unmet(7).tolist() == [i for i, count in counts.items() if not count][:7]
        twin = Tally.from_bytes(n, tally.to_bytes())
        assert twin.to_bytes() == tally.to_bytes()


def test_one_id_met_very_often_is_counted_exactly():
    tally = Tally(3)
    tally.add(np.ones(100_000, np.int64))
    ids, times = tally.repeated()
    assert (ids.tolist(), times.tolist(), tally.unique) == ([1], [100_000], 1)


def test_unmet_ids_are_found_far_into_a_large_range():
    tally = Tally(3_000_000)
    tally.add(np.arange(2_500_000))
    assert tally.unmet(2).tolist() == [2_500_000, 2_500_001]
    assert len(tally.unmet(10**9)) == 500_000
