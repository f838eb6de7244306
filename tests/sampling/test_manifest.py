"""A data set's hash: order and boundaries count, the width of an array and the machine do not."""

import hashlib
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_ddp_weighting import manifest_hash

ITEMS = st.lists(st.one_of(st.integers(-(2**63), 2**63 - 1), st.text(), st.binary()), max_size=6)


def oracle(items) -> str:
    """The same hash, item by item, from its definition."""
    text = b"jax_ddp_weighting manifest 1\n"
    for item in items:
        if isinstance(item, int):
            text += b"i" + item.to_bytes(8, "little", signed=True)
        else:
            kind, value = (b"s", item.encode()) if isinstance(item, str) else (b"b", item)
            text += kind + len(value).to_bytes(8, "little") + value
    return hashlib.sha256(text).hexdigest()


@given(ITEMS)
def test_the_hash_is_what_its_definition_says(items):
    assert manifest_hash(items) == manifest_hash(iter(items)) == oracle(items)


@given(ITEMS, ITEMS)
def test_two_lists_hash_alike_only_if_they_are_alike(first, second):
    assert (manifest_hash(first) == manifest_hash(second)) == (first == second)


def test_the_hash_never_changes_between_releases():
    ids = np.arange(100_000)  # more than one block
    assert manifest_hash(ids).startswith("e5d3bec2")
    assert manifest_hash([]).startswith("1eea8ef5")


@pytest.mark.parametrize("dtype", [">i8", "<i4", np.uint16, np.uint64])
def test_ids_hash_by_value_in_any_array_and_in_parts(dtype):
    ids = np.array([5, 0, 60_000, 7], dtype)
    whole = manifest_hash([5, 0, 60_000, 7])
    assert manifest_hash(ids) == manifest_hash(np.repeat(ids, 2)[::2]) == whole
    assert manifest_hash([ids[:1], ids[1:]]) == whole
    assert manifest_hash(iter(ids)) == whole


def test_other_arrays_hash_as_the_items_they_hold():
    assert manifest_hash(jnp.arange(4)) == manifest_hash(range(4))
    assert manifest_hash(np.array(["b", "a"])) == manifest_hash(["b", "a"])
    assert manifest_hash(np.array([b"b", b"a"])) == manifest_hash([b"b", b"a"])


def test_boundaries_kinds_and_order_count():
    alike = [["ab", "c"], ["a", "bc"], ["abc"], ["c", "ab"], [b"ab", b"c"], [], [""], ["", ""]]
    assert len({manifest_hash(items) for items in alike}) == len(alike)


def test_files_hash_by_content_and_not_by_name(tmp_path):
    for name, content in {"a": b"cat", "b": b"dog", "c": b"cat"}.items():
        (tmp_path / name).write_bytes(content)
    a, b, c = (tmp_path / name for name in "abc")
    assert manifest_hash([a, b]) == manifest_hash([c, b])
    assert manifest_hash([a, b]) != manifest_hash([b, a])
    assert manifest_hash(a) == manifest_hash([a])
    assert manifest_hash([a]) != manifest_hash([b"cat"])
    with pytest.raises(FileNotFoundError, match="missing"):
        manifest_hash([tmp_path / "missing"])


@pytest.mark.parametrize(
    ("items", "error", "message"),
    [
        ("train.csv", TypeError, r"items must be an iterable of items, got one str"),
        (b"train", TypeError, r"got one bytes"),
        ({"b", "a"}, TypeError, r"items must have an order of their own, got a set"),
        ({"a": 1}, TypeError, r"got a dict"),
        ([1.0], TypeError, r"items must be integers, strings, .* got 1.0 \(float\)"),
        ([True], TypeError, r"got True \(bool\)"),
        ([[1, 2]], TypeError, r"got \[1, 2\] \(list\)"),
        (np.arange(3.0), TypeError, r"an array must hold integer ids, got float64"),
        (np.zeros((2, 2), int), ValueError, r"one axis of ids, got shape \(2, 2\)"),
        ([2**63], ValueError, r"fit into 64 bits with its sign, got 9223372036854775808"),
        (np.array([2**63], np.uint64), ValueError, r"got 9223372036854775808"),
    ],
)
def test_what_has_no_identity_is_refused(items, error, message):
    with pytest.raises(error, match=message):
        manifest_hash(items)


def test_a_str_is_never_taken_for_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a").write_text("content")
    assert manifest_hash(["a"]) != manifest_hash([Path("a")])
