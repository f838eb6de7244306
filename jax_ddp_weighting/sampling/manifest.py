"""One hash for what a data set holds, in order: the same bytes on every machine."""

import hashlib
import os
from collections.abc import Iterable, Mapping, Set
from pathlib import Path
from typing import Any

import numpy as np

_ID = np.dtype([("kind", "u1"), ("id", "<i8")])  # packed: nine bytes an id, on every machine
_BLOCK = 65_536  # ids, or bytes of a file, held at once


def manifest_hash(items: Iterable[Any] | os.PathLike[str]) -> str:
    """A hash of a data set's identity: of its items and their order.

    The rule: each item is hashed with its kind and its length, one after another, so that no two
    lists of items look alike, whatever their boundaries; items may come from a generator, and only
    one is held at a time. An id is hashed by its value, whatever the width of its array.

    Args:
        items: an array of integer ids `[num_examples]`; or an iterable of ids, arrays of ids (the
            parts of one long list), strings (hashed as UTF-8), bytes, and paths; or one path. A
            `pathlib.Path` stands for the content of its file, not for its name; a `str` stands for
            itself.

    Returns:
        64 hexadecimal digits (SHA-256).

    Raises:
        TypeError: the items have no order of their own (a set, a mapping), are one string or one
            bytes object, or an item is of another type, such as a float.
        ValueError: an array has more than one axis, or an id leaves int64.
        OSError: a file cannot be read.

    Example:
        >>> manifest_hash(np.arange(3)) == manifest_hash([0, 1, 2])
        True
        >>> manifest_hash([0, 2, 1]) == manifest_hash([0, 1, 2])
        False
        >>> manifest_hash(["cat.png", "dog.png"])[:16]
        'ab8a54eb374569fc'
    """
    if isinstance(items, str | bytes | bytearray):
        raise TypeError(
            f"manifest_hash: items must be an iterable of items, got one {type(items).__name__}. "
            "Give a list of them; for the content of a file give a pathlib.Path."
        )
    if isinstance(items, Set | Mapping):
        raise TypeError(
            f"manifest_hash: items must have an order of their own, got a {type(items).__name__}. "
            "Give a sorted list."
        )
    digest = hashlib.sha256(b"jax_ddp_weighting manifest 1\n")
    if isinstance(items, os.PathLike) or hasattr(items, "dtype"):
        items = [items]
    for item in items:
        _add(digest, item)
    return digest.hexdigest()


def _add(digest: Any, item: Any) -> None:
    if isinstance(item, str):
        _add_bytes(digest, b"s", item.encode())
    elif isinstance(item, bytes | bytearray | memoryview):
        _add_bytes(digest, b"b", bytes(item))
    elif isinstance(item, os.PathLike):
        with Path(item).open("rb") as file:
            content = hashlib.file_digest(file, "sha256")
        _add_bytes(digest, b"f", content.digest())
    elif isinstance(item, int) and not isinstance(item, bool):
        if not -(2**63) <= item < 2**63:
            raise ValueError(
                f"manifest_hash: an id must fit into 64 bits with its sign, got {item}. "
                "Hash larger ones as strings."
            )
        _add_ids(digest, np.array([item], np.int64))
    elif hasattr(item, "dtype"):
        _add_array(digest, np.asarray(item))
    else:
        raise TypeError(
            "manifest_hash: items must be integers, strings, bytes, paths or arrays of integers, "
            f"got {item!r} ({type(item).__name__}). Hash the ids of a record, not its values."
        )


def _add_array(digest: Any, array: np.ndarray) -> None:
    if array.ndim > 1:
        raise ValueError(
            f"manifest_hash: an array must have one axis of ids, got shape {array.shape}. "
            "Flatten it in the order in which it is read."
        )
    if array.dtype.kind in "US":
        for item in array.reshape(-1).tolist():
            _add(digest, item)
        return
    if array.dtype.kind not in "iu":
        raise TypeError(
            f"manifest_hash: an array must hold integer ids, got {array.dtype}. "
            "Hash the ids of a record, not its values."
        )
    array = array.reshape(-1)
    if array.dtype == np.uint64 and array.size and array.max() >= 2**63:
        raise ValueError(
            f"manifest_hash: an id must fit into 64 bits with its sign, got {array.max()}. "
            "Hash larger ones as strings."
        )
    for start in range(0, array.size, _BLOCK):
        _add_ids(digest, array[start : start + _BLOCK])


def _add_ids(digest: Any, ids: np.ndarray) -> None:
    packed = np.empty(ids.size, _ID)
    packed["kind"] = ord("i")
    packed["id"] = ids
    digest.update(packed.tobytes())


def _add_bytes(digest: Any, kind: bytes, value: bytes) -> None:
    digest.update(kind + len(value).to_bytes(8, "little"))
    digest.update(value)
