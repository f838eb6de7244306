"""Blocks of examples of similar length, shuffled anew in every epoch."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Float64, Int64, Num

from jax_ddp_weighting._arguments import (
    check_at_least,
    check_epoch,
    check_seed,
    check_weights,
    read_numbers,
)
from jax_ddp_weighting.sampling.hashing import derive_digest, derive_key
from jax_ddp_weighting.sampling.order import keyed_order


@dataclass(frozen=True, eq=False, repr=False)
class GroupedOrder:
    """The ids of each epoch in blocks of similar length; `grouped_order` makes one.

    Args:
        lengths: float64 ``[num_examples]``.
        group: ids in a block.
        seed: chooses the orders.

    Example:
        >>> order = grouped_order([3, 1, 2], 2)
        >>> order.num_examples, order.num_samples, order.repeats
        (3, 3, False)
    """

    lengths: Float64[np.ndarray, " num_examples"]
    group: int
    seed: int = 0
    digest: str = field(init=False)

    def __post_init__(self) -> None:
        parts = (self.lengths.astype("<f8"), self.group, self.seed)
        object.__setattr__(self, "digest", derive_digest("grouped", *parts))

    repeats = by_place = False

    @property
    def num_examples(self) -> int:
        """How many examples have a length."""
        return len(self.lengths)

    @property
    def num_samples(self) -> int:
        """Ids in an epoch: every one."""
        return len(self.lengths)

    def __call__(self, epoch: int) -> Int64[np.ndarray, " num_examples"]:
        """The ids of an epoch."""
        epoch = check_epoch("grouped_order: epoch", epoch)
        n, group = self.num_examples, self.group

        def shuffle(count: int, what: str) -> Int64[np.ndarray, " count"]:
            seed = derive_key("grouped_order 1:", what, group, self.seed)
            return keyed_order(np.arange(count), count, seed=seed, epoch=epoch)

        shuffled = shuffle(n, "ids")
        ordered = shuffled[np.argsort(self.lengths[shuffled], kind="stable")]
        whole = n // group
        if not whole:
            return shuffled
        # The short block, if there is one, is read last, so that all others stay aligned with
        # batches; which lengths it holds changes, and with it where the other blocks begin.
        short = int(shuffle(whole + 1, "short block")[0]) * group
        last = ordered[short : short + n % group]
        blocks = np.delete(ordered, slice(short, short + n % group)).reshape(whole, group)
        blocks = blocks[shuffle(whole, "blocks")]
        place = np.empty(n, np.int64)
        place[shuffled] = np.arange(n)
        mixed = np.take_along_axis(blocks, np.argsort(place[blocks], axis=1), axis=1)
        return np.concatenate([mixed.ravel(), last[np.argsort(place[last])]])

    def take(self, epoch: int, places: Int64[np.ndarray, "*shape"]) -> Int64[np.ndarray, "*shape"]:
        """The ids at some places of an epoch's order, which is made whole."""
        return self(epoch)[places]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, GroupedOrder) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"grouped_order(<{self.num_examples} lengths>, {self.group}, seed={self.seed})"


def grouped_order(
    lengths: Num[np.ndarray, "..."] | Any, group: int, *, seed: int = 0
) -> GroupedOrder:
    """An order of blocks of similar length: every id once, shuffled anew in every epoch.

    The rule: ids are sorted by length, those of equal length in an order of the epoch's own, cut
    into blocks of `group`, and the blocks shuffled, and the ids within each. A step whose rows over
    all ranks are `group`, or divide it, holds ids of one block. Where ids do not fill the last
    block, the short one is read last: which lengths it holds, and so where other blocks begin, is
    the epoch's own too. (Where all lengths differ and all blocks are full, a block holds the same
    ids in every epoch, in another order.) It costs a sort of the whole epoch.

    Args:
        lengths: one for each example, ``[num_examples]``, finite and at least 0.
        group: ids in a block, at least 1, such as ``num_replicas * batch_size``.
        seed: an integer in ``[-2**63, 2**64)``.

    Returns:
        A function of the epoch, for `EpochPlan.from_order` and ``DistributedSampler(order=)``:
        frozen, picklable, equal where its arguments are. ``order(epoch)`` is int64 ids
        ``[num_examples]``.

    Raises:
        TypeError: lengths are no numbers, or another argument is of another type.
        ValueError: lengths are negative, NaN or infinite, or not in one row; or a number is out of
            range.

    Example:
        >>> lengths = np.array([9, 1, 8, 2, 3, 7, 1])
        >>> order = grouped_order(lengths, 2, seed=1)
        >>> lengths[order(0)], lengths[order(1)]
        (array([3, 7, 9, 8, 1, 1, 2]), array([8, 9, 3, 7, 2, 1, 1]))
    """
    values = read_numbers("grouped_order: lengths", lengths)
    if values.dtype.kind == "b":
        raise TypeError("grouped_order: lengths must be numbers, got bool.")
    if values.ndim != 1:
        raise ValueError(
            f"grouped_order: lengths must have one axis, got shape {values.shape}. Give one for"
            " each example."
        )
    values = values.astype(np.float64)  # a copy: the caller's array may change
    check_weights("grouped_order: lengths", values, "Give the length of each example.", first=0)
    remedy = "The rows of a step over all ranks are a good one."
    group = check_at_least("grouped_order: group", group, 1, remedy)
    seed = check_seed("grouped_order: seed", seed)
    values.flags.writeable = False
    return GroupedOrder(values, group, seed)
