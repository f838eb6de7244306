"""Random words that hang on a key and a place alone: the same on every machine, in any order."""

import hashlib

import numpy as np
from jaxtyping import Float64, Int64, UInt64

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_BLOCK = 16_384  # words made at once: the working set stays in the second-level cache


def derive_key(*parts: object) -> int:
    """64 bits that depend on all parts, the same on every machine."""
    text = " ".join(map(str, parts))
    return int.from_bytes(hashlib.shake_256(text.encode()).digest(8), "little")


def derive_digest(kind: str, *parts: object) -> str:
    """`kind` and 16 hexadecimal digits that stand for all parts: arrays by their bytes."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        data = part.tobytes() if isinstance(part, np.ndarray) else str(part).encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return f"{kind} {digest.hexdigest()}"


def hash_places(places: Int64[np.ndarray, " places"], key: int) -> UInt64[np.ndarray, " places"]:
    """64 random bits for each place.

    SplitMix64's output function over a counter: integer arithmetic alone, where numpy's own
    `Generator` may draw otherwise in another version, and draws in sequence.
    """
    words = np.empty(len(places), np.uint64)
    start = np.array([(key + int(_GOLDEN)) % 2**64], np.uint64)
    spare = np.empty(min(_BLOCK, len(places)), np.uint64)
    for first in range(0, len(places), _BLOCK):
        word = words[first : first + _BLOCK]
        shifted = spare[: len(word)]
        word[...] = places[first : first + _BLOCK].astype(np.uint64, copy=False)
        np.multiply(word, _GOLDEN, out=word)
        np.add(word, start, out=word)
        for shift, multiplier in ((30, _FIRST), (27, _SECOND), (31, None)):
            np.right_shift(word, np.uint64(shift), out=shifted)
            np.bitwise_xor(word, shifted, out=word)
            if multiplier is not None:
                np.multiply(word, multiplier, out=word)
    return words


def draw_uniform(places: Int64[np.ndarray, " places"], key: int) -> Float64[np.ndarray, " places"]:
    """A number in ``[0, 1)`` for each place: a multiple of ``2**-53``, so that it is exact."""
    words = hash_places(places, key)
    np.right_shift(words, np.uint64(11), out=words)
    numbers = words.astype(np.float64)
    return np.multiply(numbers, 2.0**-53, out=numbers)
