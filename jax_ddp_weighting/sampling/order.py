"""Epoch orders: torch's, exactly; one that can be asked for a part alone; one's own."""

import hashlib
import threading
from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
from jaxtyping import Int64, Integer

from jax_ddp_weighting._arguments import (
    MAX_EXAMPLES,
    check_epoch,
    check_integer,
    check_length,
    check_seed,
    list_some,
)

_TORCH_MAX_EXAMPLES = 2**31 - 1  # LAPACK's pivots are int32
_TORCH_WIDE = (2**32 - 1) // 20  # from this length on, torch swaps by 64-bit words
RANKED = 4096  # up to this length positions are ranked by hash; a cipher of few bits mixes badly
ROUNDS = 8  # four for either half; six pass the same statistics, eight cost 3 ns more
_BLOCK = 16_384  # ids ciphered at once: the working set stays in the second-level cache
_WORDS = 65_536  # random words drawn at once, for the same reason
MIX = np.uint32(0x2C1B3C6D)  # an odd multiplier without short patterns


def torch_order(num_examples: int, seed: int) -> Int64[np.ndarray, " num_examples"]:
    """The order that ``torch.randperm`` gives, without torch.

    The 32-bit words of MT19937, seeded with the low 32 bits of `seed`, drive a chain of swaps:
    entry ``i`` with entry ``i + word % (n - i)``; from n = 214,748,364 on, where 32 bits would show
    a bias, entry ``i`` with entry ``word % (i + 1)``, two words for one.

    Args:
        num_examples: the length, at most ``2**31 - 1``.
        seed: any seed that torch takes, in ``[-2**63, 2**64)``. torch's `DistributedSampler` uses
            its seed plus the epoch.

    Returns:
        int64 ids of shape ``[num_examples]``, a permutation.

    Raises:
        TypeError: an argument is no integer.
        ValueError: an argument is out of range.

    Matches:
        ``torch.randperm(n, generator=torch.Generator().manual_seed(seed))`` on the CPU, bit for
        bit: torch 2.13.0, compared live and with its recorded output.

    Example:
        >>> torch_order(10, seed=0)
        array([4, 1, 7, 5, 3, 9, 0, 8, 6, 2])
    """
    remedy = 'order="keyed" takes up to 2**62 examples.'
    n = check_integer("torch_order: num_examples", num_examples, 0, _TORCH_MAX_EXAMPLES, remedy)
    seed = check_seed("torch_order: seed", seed)
    if n == 0:
        return np.zeros(0, np.int64)
    from scipy.linalg import get_lapack_funcs  # 0.2 s to import, so only where it is used

    # RandomState's stream is frozen by numpy's compatibility policy; Generator's is not.
    words = _seed_words(seed & 0xFFFF_FFFF)
    pivots = np.empty(n, np.int32)
    wide = n >= _TORCH_WIDE
    stop = n if wide else n - 1
    pivots[stop:] = n - 1
    for start in range(0, stop, _WORDS):
        entries = np.arange(
            start, min(start + _WORDS, stop), dtype=np.uint64 if wide else np.uint32
        )
        count = len(entries) * (2 if wide else 1)
        drawn = words.randint(0, 2**32, size=count, dtype=np.uint32)
        if wide:
            high, low = drawn[0::2].astype(np.uint64), drawn[1::2]
            swap = ((high << np.uint64(32)) | low) % (entries + np.uint64(1))
        else:
            swap = np.subtract(np.uint32(n), entries)  # in place: a small order is all calls
            np.remainder(drawn, swap, out=swap)
            np.add(swap, entries, out=swap)
        pivots[start : start + len(entries)] = swap
    # LAPACK's row interchanges are that chain of swaps; it moves floats, which hold ids exactly.
    dtype = np.float32 if n <= 2**24 else np.float64
    (swap_rows,) = get_lapack_funcs(("laswp",), dtype=dtype)
    column = swap_rows(np.arange(n, dtype=dtype).reshape(n, 1), pivots, overwrite_a=1)
    return column.reshape(n).astype(np.int64)


_words = threading.local()


def _seed_words(seed: int) -> np.random.RandomState:
    """Numpy's Mersenne Twister, seeded as torch's: this thread's own, to be used at once.

    A new one reads so much from the operating system, only to be seeded anew, that it would cost
    more than the whole order of some thousand examples.
    """
    if not hasattr(_words, "state"):
        _words.state = np.random.RandomState(0)
    _words.state.seed(seed)
    return _words.state


def keyed_order(
    positions: Integer[np.ndarray, "*shape"] | Sequence[int],
    num_examples: int,
    *,
    seed: int,
    epoch: int,
) -> Int64[np.ndarray, "*shape"]:
    """The ids at some positions of a shuffled epoch, without the rest of the epoch.

    A permutation of ``[0, num_examples)`` chosen by (seed, epoch, num_examples), hashed together:
    (seed 0, epoch 1) and (seed 1, epoch 0) differ. It is a Feistel network over a domain barely
    larger than the data, walked until it lands inside; time and memory are those of `positions`,
    whatever `num_examples`. It depends on neither the machine nor numpy's version. It is made to
    mix, not to keep secrets.

    Args:
        positions: integer places in the epoch's order, each in ``[0, num_examples)``, any shape.
        num_examples: the length of the order, at most ``2**62``.
        seed: an integer in ``[-2**63, 2**64)``.
        epoch: an integer in ``[0, 2**63)``.

    Returns:
        int64 ids of the shape of `positions`. All positions give every id once.

    Raises:
        TypeError: an argument is no integer.
        ValueError: an argument, or a position, is out of range.

    Example:
        >>> keyed_order([0, 999_999_999_999], 10**12, seed=0, epoch=3)
        array([870854403323, 233563889225])
    """
    n = check_length("keyed_order: num_examples", num_examples)
    seed = check_seed("keyed_order: seed", seed)
    epoch = check_epoch("keyed_order: epoch", epoch)
    places = np.asarray(positions)
    if places.size == 0:
        return np.zeros(places.shape, np.int64)
    if places.dtype.kind not in "iu":
        raise TypeError(f"keyed_order: positions must be integers, got {places.dtype}.")
    low, high = int(places.min()), int(places.max())
    if low < 0 or high >= n:
        raise ValueError(
            f"keyed_order: positions must be in [0, {n}), got {low if low < 0 else high}."
            " A position is a place in the order of one epoch."
        )
    if n <= RANKED:
        return _rank_by_hash(n, seed, epoch)[places]
    return _encipher(places.reshape(-1), n, seed, epoch).reshape(places.shape)


def _derive_bytes(n: int, seed: int, epoch: int, size: int) -> bytes:
    """`size` bytes that depend on all three, the same on every machine."""
    return hashlib.shake_256(f"keyed_order 1: {n} {seed} {epoch}".encode()).digest(size)


@lru_cache(maxsize=16)
def _rank_by_hash(n: int, seed: int, epoch: int) -> Int64[np.ndarray, " n"]:
    """A whole small order: positions ranked by 64 hashed bits each (a tie keeps its order)."""
    hashes = np.frombuffer(_derive_bytes(n, seed, epoch, 8 * n), "<u8")
    order = np.argsort(hashes, kind="stable").astype(np.int64)
    order.flags.writeable = False
    return order


@lru_cache(maxsize=16)
def derive_round_keys(n: int, seed: int, epoch: int) -> tuple[tuple[np.uint32, np.uint32], ...]:
    """An odd multiplier and an offset for every round."""
    words = np.frombuffer(_derive_bytes(n, seed, epoch, 8 * ROUNDS), "<u4").reshape(ROUNDS, 2)
    return tuple((np.uint32(multiplier | 1), np.uint32(offset)) for multiplier, offset in words)


def _encipher(
    positions: Integer[np.ndarray, " count"], n: int, seed: int, epoch: int
) -> Int64[np.ndarray, " count"]:
    """The permutation of a large order, block by block, then the few that must walk on."""
    keys = derive_round_keys(n, seed, epoch)
    ids = np.empty(len(positions), np.int64)
    for start in range(0, len(positions), _BLOCK):
        block = slice(start, start + _BLOCK)
        ids[block] = _cipher(positions[block].astype(np.uint64), n, keys)
    # A permutation of the larger domain, repeated until it lands below n, is one of [0, n).
    outside = np.flatnonzero(ids >= n)
    while outside.size:
        walked = _cipher(ids[outside].astype(np.uint64), n, keys).astype(np.int64)
        ids[outside] = walked
        outside = outside[walked >= n]
    return ids


def cut_in_halves(n: int) -> tuple[int, int]:
    """The bits of a place that are its column, and how many rows there are then."""
    bits = (n - 1).bit_length() // 2
    return bits, -(-n // 2**bits)


def _cipher(places, n: int, keys):
    """One pass of the network over ``[0, rows * 2**bits)``, which is less than ``n + sqrt(n)``.

    A place is (row, column), `rows` high and ``2**bits`` wide. In turn, a hash of the row is added
    to the column (xor) and a hash of the column to the row (mod `rows`): each step can be undone,
    so the whole is a bijection whatever the hash. All in uint32, at most 31 bits a half.
    """
    bits, number = cut_in_halves(n)
    rows = np.uint32(number)
    row = (places >> np.uint64(bits)).astype(np.uint32)
    column = (places & np.uint64(2**bits - 1)).astype(np.uint32)
    mixed, spare = np.empty_like(row), np.empty_like(row)
    product = np.empty_like(places)
    for turn, (multiplier, offset) in enumerate(keys):
        np.multiply(column if turn % 2 else row, multiplier, out=mixed)
        np.add(mixed, offset, out=mixed)
        np.right_shift(mixed, np.uint32(15), out=spare)
        np.bitwise_xor(mixed, spare, out=mixed)
        np.multiply(mixed, MIX, out=mixed)  # the best bits are the high ones
        if turn % 2 == 0:
            np.right_shift(mixed, np.uint32(32 - bits), out=mixed)
            np.bitwise_xor(column, mixed, out=column)
        else:
            product[...] = mixed
            np.multiply(product, np.uint64(rows), out=product)
            np.right_shift(product, np.uint64(32), out=product)
            mixed[...] = product  # uniform in [0, rows)
            np.add(row, mixed, out=row)
            np.subtract(row, rows, out=spare)  # wraps to a huge number where row < rows
            np.minimum(row, spare, out=row)
    product[...] = row
    np.left_shift(product, np.uint64(bits), out=product)
    return np.bitwise_or(product, column, out=product)


@dataclass(frozen=True, eq=False, repr=False)
class GivenOrder:
    """An order of one's own, kept as given: two are equal where their ids are.

    Args:
        ids: integer ids of shape ``[entries]``, at least 0: a permutation, or a part of one.
        repeats: allow an id to come several times, as where one draws with replacement.
        caller: who speaks in errors: this class is nobody's own.

    Raises:
        TypeError: ids are no integers, or come from something that can be read but once.
        ValueError: ids are negative, not in one row, or come twice unasked.
    """

    ids: Any  # whatever is given; int64[entries] once it is checked
    repeats: bool = False
    digest: str = field(init=False)
    caller: InitVar[str] = "EpochPlan.from_order"

    def __post_init__(self, caller: str) -> None:
        ids = np.asarray(self.ids)
        if ids.dtype == object and not ids.ndim:  # numpy wraps whatever it cannot read
            raise TypeError(
                f"{caller}: ids must be an array or a sequence, got a"
                f" {type(self.ids).__name__}. Make a list of it: an order is read many times."
            )
        if ids.ndim != 1:
            raise ValueError(f"{caller}: ids must have one axis, got shape {ids.shape}.")
        if ids.size and ids.dtype.kind not in "iu":
            raise TypeError(f"{caller}: ids must be integers, got {ids.dtype}.")
        if ids.size and not 0 <= ids.min() <= ids.max() < MAX_EXAMPLES:
            worst = ids.min() if ids.min() < 0 else ids.max()
            rule = "at least 0" if worst < 0 else "below 2**62"
            raise ValueError(f"{caller}: ids must be {rule}, got {worst}. Ids count from zero.")
        ids = ids.astype(np.int64)  # a copy: the caller's array may change
        if not self.repeats:
            ascending = np.sort(ids)
            again = np.unique(ascending[1:][ascending[1:] == ascending[:-1]])
            if again.size:
                raise ValueError(
                    f"{caller}: ids must name every example once, got"
                    f" {list_some(again)} more than once. Pass repeats=True for an order drawn with"
                    " replacement."
                )
        ids.flags.writeable = False
        digest = hashlib.blake2b(ids.astype("<i8").tobytes(), digest_size=8).hexdigest()
        object.__setattr__(self, "ids", ids)
        object.__setattr__(self, "digest", digest)

    @property
    def length(self) -> int:
        """Ids in every epoch."""
        return len(self.ids)

    def ids_of(self, epoch: int) -> Int64[np.ndarray, " entries"]:
        """The ids of an epoch: the same in each."""
        return self.ids

    def take(self, epoch: int, places: Int64[np.ndarray, "*shape"]) -> Int64[np.ndarray, "*shape"]:
        """The ids at some places of an epoch."""
        return self.ids[places]

    def describe(self, epoch: int) -> str:
        """What stands for the ids of an epoch where plans are compared."""
        return f"given {self.digest}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, GivenOrder) and np.array_equal(self.ids, other.ids)

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"GivenOrder({len(self.ids)} ids, digest {self.digest})"
