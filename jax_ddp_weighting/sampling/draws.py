"""Weighted draws: ids as often as their weights say, new in every epoch."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from jaxtyping import Float, Float64, Int64

from jax_ddp_weighting._arguments import (
    check_at_least,
    check_epoch,
    check_seed,
    check_weights,
    read_numbers,
)
from jax_ddp_weighting.sampling.hashing import derive_digest, derive_key, draw_uniform

_BLOCK = 65_536  # draws looked up at once


@dataclass(frozen=True, eq=False, repr=False)
class WeightedOrder:
    """The ids that each epoch draws by weight; `weighted_order` makes one.

    Args:
        weights: float64 ``[num_examples]``, as they were given.
        num_samples: draws in an epoch.
        replacement: whether an id may be drawn several times in an epoch.
        seed: chooses the draws.

    Example:
        >>> order = weighted_order([1, 3], 4)
        >>> order.num_examples, order.num_samples, order.repeats
        (2, 4, True)
    """

    weights: Float64[np.ndarray, " num_examples"]
    num_samples: int
    replacement: bool = True
    seed: int = 0
    digest: str = field(init=False)

    def __post_init__(self) -> None:
        parts = (self.weights.astype("<f8"), self.num_samples, self.replacement, self.seed)
        object.__setattr__(self, "digest", derive_digest("weighted", *parts))

    @property
    def num_examples(self) -> int:
        """How many examples have a weight."""
        return len(self.weights)

    @property
    def repeats(self) -> bool:
        """Whether an id may come several times in an epoch."""
        return self.replacement

    @property
    def by_place(self) -> bool:
        """Whether a few places of an epoch cost as little as they are."""
        return self.replacement

    def __call__(self, epoch: int) -> Int64[np.ndarray, " num_samples"]:
        """The ids of an epoch."""
        epoch = check_epoch("weighted_order: epoch", epoch)
        if self.replacement:
            return self.take(epoch, np.arange(self.num_samples))
        return self._draw_without_replacement(epoch)

    def take(self, epoch: int, places: Int64[np.ndarray, "*shape"]) -> Int64[np.ndarray, "*shape"]:
        """The ids at some places of an epoch's order."""
        if not self.replacement:
            return self(epoch)[places]
        flat, key = np.ravel(places), self._derive_key(epoch)
        ids = np.empty(len(flat), np.int64)
        for start in range(0, len(flat), _BLOCK):
            block = slice(start, start + _BLOCK)
            ids[block] = _find(self._sums, draw_uniform(flat[block], key))
        return ids.reshape(np.shape(places))

    def _derive_key(self, epoch: int) -> int:
        return derive_key("weighted_order 1:", self.num_samples, self.seed, epoch)

    @cached_property
    def _sums(self) -> Float64[np.ndarray, " num_examples"]:
        return _sum_up(self.weights)

    def _draw_without_replacement(self, epoch: int) -> Int64[np.ndarray, " num_samples"]:
        # Draws with replacement of which each id's first counts are draws without: what is drawn
        # again is passed over. In rounds, from what is left, as numpy's own `choice` does it.
        key, drawn = self._derive_key(epoch), 0
        ids = np.flatnonzero(self.weights)
        weights = self.weights[ids]
        found: list[np.ndarray] = []
        left = self.num_samples
        while left:
            uniform = draw_uniform(np.arange(drawn, drawn + left), key)
            drawn += left
            picked = _find(_sum_up(weights), uniform)
            first = np.sort(np.unique(picked, return_index=True)[1])
            picked = picked[first]
            found.append(ids[picked])
            left -= len(picked)
            rest = np.ones(len(ids), bool)
            rest[picked] = False
            ids, weights = ids[rest], weights[rest]
        return np.concatenate(found)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_sums"}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, WeightedOrder) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return (
            f"weighted_order(<{self.num_examples} weights>, {self.num_samples},"
            f" replacement={self.replacement}, seed={self.seed})"
        )


def _sum_up(weights: Float64[np.ndarray, " ids"]) -> Float64[np.ndarray, " ids"]:
    # Scaled, so that huge weights do not overflow and small ones that are left do not vanish.
    return np.cumsum(weights / weights.max())


def _find(
    sums: Float64[np.ndarray, " ids"], uniform: Float64[np.ndarray, " draws"]
) -> Int64[np.ndarray, " draws"]:
    # The first id whose sum is above: never one of weight 0, whose sum is that of the id before.
    # A uniform below 1 times the total is below the total, in floating point too.
    return np.searchsorted(sums, uniform * sums[-1], side="right")


def weighted_order(
    weights: Float[np.ndarray, "..."] | Any,
    num_samples: int,
    *,
    replacement: bool = True,
    seed: int = 0,
) -> WeightedOrder:
    """An order of ids drawn by weight, anew in every epoch, the same on every rank and machine.

    The rule: each draw is id ``i`` with probability ``weights[i] / sum(weights)``; without
    replacement, of the ids that are left. Draws hang on (seed, epoch, place) alone, through integer
    hashing and sums of float64 in one order, not on numpy's generators. With replacement a batch
    costs what its rows cost, after one sum over the weights; without, the whole epoch is drawn
    once, in rounds.

    Args:
        weights: one for each example, ``[num_examples]``, finite and at least 0, not all 0; they
            need not add up to 1.
        num_samples: draws in an epoch, at least 1.
        replacement: whether an id may be drawn several times in an epoch.
        seed: an integer in ``[-2**63, 2**64)``.

    Returns:
        A function of the epoch, for `EpochPlan.from_order` and ``DistributedSampler(order=)``:
        frozen, picklable, equal where its arguments are. ``order(epoch)`` is int64 ids
        ``[num_samples]``.

    Raises:
        TypeError: weights are no numbers, or another argument is of another type.
        ValueError: weights are negative, NaN, infinite or all 0, or not in one row; or there are
            fewer above 0 than are to be drawn without replacement.

    Example:
        >>> order = weighted_order([1, 0, 2, 1], 6)
        >>> order(0), order(1)
        (array([3, 2, 3, 2, 0, 2]), array([2, 2, 2, 2, 0, 2]))
        >>> plan = EpochPlan.from_order(order, num_replicas=2, batch_size=3)
        >>> plan.batch(epoch=1, step=0).ids.tolist()
        [[2, 2, 0], [2, 2, 2]]
    """
    values = read_numbers("weighted_order: weights", weights)
    if values.ndim != 1:
        raise ValueError(
            f"weighted_order: weights must have one axis, got shape {values.shape}. Give one for"
            " each example."
        )
    values = values.astype(np.float64)  # a copy: the caller's array may change
    check_weights("weighted_order: weights", values, "An id of weight 0 is never drawn.", first=0)
    drawable = int(np.count_nonzero(values))
    if not drawable:
        raise ValueError(
            f"weighted_order: weights must not all be 0, got {len(values)} of them, none above 0."
            " There is nothing to draw."
        )
    if not isinstance(replacement, bool):
        raise TypeError(f"weighted_order: replacement must be True or False, got {replacement!r}.")
    num_samples = check_at_least("weighted_order: num_samples", num_samples, 1)
    if not replacement and num_samples > drawable:
        raise ValueError(
            f"weighted_order: num_samples must be at most {drawable}, the number of weights above"
            f" 0, without replacement, got {num_samples}. replacement=True draws ids again."
        )
    seed = check_seed("weighted_order: seed", seed)
    values.flags.writeable = False
    return WeightedOrder(values, num_samples, replacement, seed)
