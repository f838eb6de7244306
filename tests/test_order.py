import json
from pathlib import Path

import numpy as np
import pytest

from jax_ddp_weighting import keyed_order, torch_order

RECORDED = json.loads((Path(__file__).parent / "data" / "torch_sampler.json").read_text())


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
