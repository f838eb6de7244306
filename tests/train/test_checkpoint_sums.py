"""Sums of arrays' bits: the same however an array lies, others for any other array."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_ddp_weighting.train import array_sums
from jax_ddp_weighting.train.array_sums import add_sums, find_changed, sum_arrays

WORDS = np.random.default_rng(0).integers(0, 2**32, (8, 12, 2), dtype=np.uint32)


def naive(words):
    return sum(int(word) * (2 * i + 1) for i, word in enumerate(words.reshape(-1))) % 2**64


@pytest.mark.parametrize("block", [1 << 18, 5])
@pytest.mark.parametrize(
    "spec", [P(), P("a"), P("b", "a"), P(None, ("a", "b")), P(("b", "a")), P(None, "a", "b")]
)
def test_a_sum_is_the_same_however_the_array_lies(spec, block, monkeypatch):
    monkeypatch.setattr(array_sums, "_BLOCK", block)
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("a", "b"))
    laid = jax.device_put(WORDS, NamedSharding(mesh, spec))
    assert sum_arrays({"x": laid}) == {'["x"]': ["uint32", naive(WORDS)]}


@pytest.mark.parametrize(
    "value",
    [
        np.float32([1.5, -0.0, np.nan]),
        np.array([[2 + 1j]], np.complex64),
        np.array([True, False]),
        np.float16(3),
        np.zeros((0, 3)),
        np.arange(3, dtype=np.int8),
    ],
    ids=lambda value: f"{value.dtype} {value.shape}",
)
def test_numbers_of_every_size_are_words_of_their_bits(value):
    size = min(value.dtype.itemsize, 8)
    words = np.ascontiguousarray(value).reshape(-1).view(f"u{size}")
    assert sum_arrays([value]) == {'["0"]': [str(value.dtype), naive(words)]}


def test_a_number_that_changes_or_moves_is_seen():
    right = sum_arrays({"a": {"w": WORDS}, "b": np.ones(3)})
    assert find_changed(right, sum_arrays({"a": {"w": WORDS.copy()}, "b": np.ones(3)})) == []
    for change in ("one bit", "two that change places"):
        other = WORDS.copy()
        if change == "one bit":
            other[3, 4, 1] ^= 1 << 31
        else:
            other[[0, 1]] = other[[1, 0]]
        assert find_changed(right, sum_arrays({"a": {"w": other}, "b": np.ones(3)})) == ["a/w"]
    # what was asked for in another dtype is not what was saved, and is not held against it
    assert find_changed(right, sum_arrays({"b": jnp.ones(3, jnp.bfloat16)})) == []


def test_parts_of_several_processes_add_up_and_attributes_are_entries():
    half = {'["w"]': ["float32", 2**63 + 1]}
    assert add_sums([half, half]) == {'["w"]': ["float32", 2]}
    key = jax.random.key(3)
    assert sum_arrays({"k": key}) == sum_arrays({"k": jax.random.key_data(key)})
