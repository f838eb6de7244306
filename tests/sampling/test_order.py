import json
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from jax_ddp_weighting import keyed_order, torch_order
from jax_ddp_weighting.sampling import order

RECORDED = json.loads((Path(__file__).parents[1] / "recorded" / "torch_sampler.json").read_text())


def swaps_in_plain_python(n, seed):
    """torch's rule, literally."""
    words = np.random.RandomState(seed % 2**32).randint(0, 2**32, max(n - 1, 0), dtype=np.uint32)
    order = list(range(n))
    for i, word in enumerate(words.tolist()):
        j = i + word % (n - i)
        order[i], order[j] = order[j], order[i]
    return order


def whole(n, seed=0, epoch=0):
    return keyed_order(np.arange(n), n, seed=seed, epoch=epoch)


@pytest.mark.parametrize(("seed", "n", "order"), RECORDED["randperm"])
def test_torch_order_is_what_torch_recorded(n, seed, order):
    assert torch_order(n, seed).tolist() == order


def test_torch_order_needs_its_seed():
    """The control: the recorded orders tell seeds apart."""
    long = [(n, seed, order) for seed, n, order in RECORDED["randperm"] if n > 10]
    assert long
    assert all(torch_order(n, seed + 1).tolist() != order for n, seed, order in long)


@pytest.mark.parametrize("seed", [0, 7, -1, -(2**63), 2**32 + 5, 2**64 - 1])
@pytest.mark.parametrize("n", [0, 1, 2, 3, 1000, 65_537, 70_000])
def test_torch_order_is_the_chain_of_swaps(n, seed):
    order = torch_order(n, seed)
    assert order.dtype == np.int64
    assert order.tolist() == swaps_in_plain_python(n, seed)


@pytest.mark.parametrize("n", [*range(1, 70), 4095, 4096, 4097, 5000, 65_536, 65_537, 2**17 + 1])
def test_keyed_order_is_a_permutation(n):
    assert np.array_equal(np.sort(whole(n, seed=3, epoch=5)), np.arange(n))


@pytest.mark.parametrize("n", [10, 4096, 5000, 100_000])
def test_keyed_order_gives_any_positions_alone(n):
    positions = np.array([[n - 1, 0, 3], [3, n // 2, n - 2]])
    order = whole(n)
    ids = keyed_order(positions, n, seed=0, epoch=0)
    assert ids.shape == positions.shape
    assert ids.dtype == np.int64
    assert np.array_equal(ids, order[positions])
    assert keyed_order([n - 1], n, seed=0, epoch=0).tolist() == [order[n - 1]]


def test_keyed_order_is_the_same_on_every_machine():
    assert whole(10, seed=1, epoch=2).tolist() == GOLDEN_SMALL
    assert keyed_order(range(5), 100_000, seed=1, epoch=2).tolist() == GOLDEN_MIDDLE
    assert keyed_order([0, 1, 2**62 - 1], 2**62, seed=-1, epoch=2**40).tolist() == GOLDEN_LARGE


GOLDEN_SMALL = [6, 4, 0, 2, 5, 9, 1, 3, 7, 8]
GOLDEN_MIDDLE = [82710, 85204, 34773, 46295, 47804]
GOLDEN_LARGE = [3930561902806413199, 1184669147418814793, 4292876315057299095]


def wide_swaps_in_plain_python(n, seed):
    """torch's rule for long orders, literally."""
    words = np.random.RandomState(seed % 2**32).randint(0, 2**32, 2 * n, dtype=np.uint32).tolist()
    order = list(range(n))
    for i in range(n):
        j = (words[2 * i] * 2**32 + words[2 * i + 1]) % (i + 1)
        order[i], order[j] = order[j], order[i]
    return order


@pytest.mark.parametrize("n", [1, 2, 3, 1000, 65_537, 70_000])
def test_a_long_torch_order_draws_two_words_for_one(n, monkeypatch):
    """With the limit lowered: that it lies at 214,748,364 is compared with torch itself."""
    assert order._TORCH_WIDE == 214_748_364
    monkeypatch.setattr(order, "_TORCH_WIDE", n)
    assert torch_order(n, 7).tolist() == wide_swaps_in_plain_python(n, 7)
    monkeypatch.setattr(order, "_TORCH_WIDE", n + 1)
    assert torch_order(n, 7).tolist() == swaps_in_plain_python(n, 7)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (
            lambda: torch_order(2**31, 0),
            ValueError,
            r"torch_order: num_examples must be an integer in \[0, 2\*\*31\), got 2147483648\. "
            'order="keyed" takes up to 2',
        ),
        (lambda: torch_order(-1, 0), ValueError, "torch_order: num_examples .* got -1"),
        (
            lambda: torch_order(5, 2**64),
            ValueError,
            "torch_order: seed .* got 18446744073709551616",
        ),
        (lambda: torch_order(5, -(2**63) - 1), ValueError, "torch_order: seed must be an integer"),
        (lambda: torch_order(5, True), TypeError, r"torch_order: seed .* got True \(bool\)"),
        (lambda: keyed(2**62 + 1, [0]), ValueError, "keyed_order: num_examples .* got 46116860"),
        (lambda: keyed(5, [5]), ValueError, r"keyed_order: positions must be in \[0, 5\), got 5"),
        (lambda: keyed(5, [0, -1]), ValueError, r"positions must be in \[0, 5\), got -1"),
        (lambda: keyed(0, [0]), ValueError, r"positions must be in \[0, 0\), got 0"),
        (lambda: keyed(5, [0.5]), TypeError, "positions must be integers, got float64"),
        (lambda: keyed(5, [0], epoch=-1), ValueError, "keyed_order: epoch .* got -1. Epochs count"),
        (lambda: keyed(5, [0], seed=1.5), TypeError, r"keyed_order: seed .* got 1.5 \(float\)"),
    ],
)
def test_a_bad_argument_is_one_clear_error(call, error, text):
    with pytest.raises(error, match=text):
        call()


def keyed(n, positions, seed=0, epoch=0):
    return keyed_order(positions, n, seed=seed, epoch=epoch)


def test_no_positions_have_no_ids():
    assert keyed(0, []).tolist() == []
    assert keyed(10, np.zeros((2, 0), np.int64)).shape == (2, 0)


def test_seed_and_epoch_are_hashed_and_not_added():
    assert not np.array_equal(whole(100, seed=0, epoch=1), whole(100, seed=1, epoch=0))
    assert np.array_equal(torch_order(100, 0 + 1), torch_order(100, 1 + 0))


# Statistics: a keyed order is as random as numpy's, and the same tests find a weak cipher out.
# All seeds are fixed, so that nothing here fails by chance.


def by_numpy(n, seed, epoch):
    return np.random.default_rng([n, seed, epoch]).permutation(n)


def by_key(n, seed, epoch):
    return whole(n, seed, epoch)


def by_an_affine_cipher(n, seed, epoch):
    """A weak cipher: i -> a * i + b mod n, with random a and b."""
    rng = np.random.default_rng([n, seed, epoch])
    while np.gcd(a := int(rng.integers(2, n)), n) > 1:
        pass
    return (a * np.arange(n) + int(rng.integers(n))) % n


def by_two_rounds(n, seed, epoch):
    """A weak cipher: our own network, stopped after two of its rounds."""
    keys = order.derive_round_keys(n, seed, epoch)[:2]
    ids = order._cipher(np.arange(n, dtype=np.uint64), n, keys).astype(np.int64)
    while (outside := np.flatnonzero(ids >= n)).size:
        ids[outside] = order._cipher(ids[outside].astype(np.uint64), n, keys).astype(np.int64)
    return ids


def table(rows, columns, bins):
    """How often each pair of bins occurs."""
    return np.bincount(rows * bins + columns, minlength=bins**2).reshape(bins, bins)


def p_values(permutation, n, epochs, bins=8):
    """What chance a random permutation has to look at least this odd, by several measures."""
    at = np.arange(n) * bins // n
    size = np.bincount(at, minlength=bins)
    places, pairs, between = np.zeros((3, bins, bins))
    steps, fixed, kept = np.zeros(bins), 0, 0
    before = None
    for epoch in range(epochs):
        ids = permutation(n, epoch // 8, epoch % 8)
        places += table(at, at[ids], bins)
        pairs += table(at[ids[:-1]], at[ids[1:]], bins)
        steps += np.bincount(((ids[1:] - ids[:-1]) % n - 1) * bins // (n - 1), minlength=bins)
        fixed += (ids == np.arange(n)).sum()
        if before is not None:
            between += table(at[before], at[ids], bins)
            kept += (ids == before).sum()
        before = ids
    square, free = np.outer(size, size), (bins - 1) ** 2
    apart = square - np.diag(size)  # an id is not its own neighbour
    step = np.bincount(np.arange(n - 1) * bins // (n - 1), minlength=bins)
    return {
        "id by position": chi_square(places, square, free),
        "neighbours": chi_square(pairs, apart, free),
        "difference of neighbours": chi_square(steps, step, bins - 1),
        "between epochs": chi_square(between, square, free),
        "fixed points": poisson(fixed, epochs),
        "kept between epochs": poisson(kept, epochs - 1),
    }


def chi_square(counts, shares, freedom):
    expected = shares * (counts.sum() / shares.sum())
    return stats.chi2.sf(((counts - expected) ** 2 / expected).sum(), freedom)


def poisson(count, mean):
    return min(1, 2 * min(stats.poisson.cdf(count, mean), stats.poisson.sf(count - 1, mean)))


LENGTHS = [(100, 4000), (4096, 400), (4097, 400), (10_007, 200), (65_537, 60)]


@pytest.mark.parametrize(("n", "epochs"), LENGTHS)
@pytest.mark.parametrize("permutation", [by_numpy, by_key])
def test_a_keyed_order_is_as_random_as_numpys(permutation, n, epochs):
    odd = {name: p for name, p in p_values(permutation, n, epochs).items() if p < 1e-4}
    assert odd == {}


@pytest.mark.parametrize(("n", "epochs"), LENGTHS)
@pytest.mark.parametrize("permutation", [by_an_affine_cipher, by_two_rounds])
def test_the_same_statistics_find_a_weak_cipher_out(permutation, n, epochs):
    assert min(p_values(permutation, n, epochs).values()) < 1e-9


@pytest.mark.parametrize("n", [2**20, 10**9, 2**40 + 1, 2**62])
@pytest.mark.parametrize("stride", [1, 8, 1024, 2**16])
def test_what_a_rank_reads_of_a_huge_order_is_spread_evenly(n, stride):
    positions = np.arange(min(50_000, n // stride)) * stride
    ids = keyed(n, positions, seed=3, epoch=4)
    bins = 16
    high = np.bincount((ids // (n // bins)).clip(max=bins - 1), minlength=bins)
    low = np.bincount(ids % bins, minlength=bins)
    assert chi_square(high, np.ones(bins), bins - 1) > 1e-4
    assert chi_square(low, np.ones(bins), bins - 1) > 1e-4
    other = keyed(n, positions, seed=3, epoch=5)
    together = table(ids % bins, other % bins, bins)
    assert chi_square(together, np.ones((bins, bins)), (bins - 1) ** 2) > 1e-4
    # the control: unshuffled positions are not spread
    plain = np.bincount((positions // (n // bins)).clip(max=bins - 1), minlength=bins)
    if stride * 50_000 < n:
        assert chi_square(plain, np.ones(bins), bins - 1) < 1e-9
