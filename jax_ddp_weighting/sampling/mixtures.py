"""Mixtures of data sets: each source in its share, and each in epochs of its own."""

import heapq
import math
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int64

from jax_ddp_weighting._arguments import (
    MAX_EXAMPLES,
    check_at_least,
    check_epoch,
    check_integer,
    check_seed,
    check_weights,
    list_some,
    read_numbers,
)
from jax_ddp_weighting.sampling.audit import SourceAudit
from jax_ddp_weighting.sampling.hashing import derive_digest, derive_key
from jax_ddp_weighting.sampling.order import keyed_order

_PARTS = 2**16  # into which shares without a common denominator are rounded
_MOST_PARTS = 2**20  # up to which a common denominator is kept exactly: a schedule is made of it
_LEAST = 16  # parts that a small share should have, so that rounding keeps it nearly


class _Schedule(NamedTuple):
    """Which source is drawn from at each place of a period, and how often it was before."""

    sources: np.ndarray
    before: np.ndarray


@dataclass(frozen=True, eq=False, repr=False)
class MixtureOrder:
    """The ids that each epoch draws from several sources; `mixture_order` makes one.

    Args:
        lengths: examples of each source.
        parts: draws from each source in a period; their sum is the period.
        num_samples: draws in an epoch.
        seed: chooses the orders of the sources.

    Example:
        >>> order = mixture_order([4, 100], [0.25, 0.75], 8)
        >>> order.parts, order.period, order.count_draws(10)
        ((1, 3), 4, (2, 8))
    """

    lengths: tuple[int, ...]
    parts: tuple[int, ...]
    num_samples: int
    seed: int = 0
    digest: str = field(init=False)

    def __post_init__(self) -> None:
        parts = (self.lengths, self.parts, self.num_samples, self.seed)
        object.__setattr__(self, "digest", derive_digest("mixture", *parts))

    by_place = True

    @property
    def num_examples(self) -> int:
        """Examples of all sources."""
        return sum(self.lengths)

    @property
    def repeats(self) -> bool:
        """Whether an id may come several times in an epoch: where a source begins again in it."""
        # It does not where each epoch takes one and the same whole part of the source's own.
        for length, parts in zip(self.lengths, self.parts, strict=True):
            draws, broken = divmod(self.num_samples * parts, self.period)
            if parts and (broken or length % draws):
                return True
        return False

    @property
    def period(self) -> int:
        """Draws after which each source was drawn from exactly in its share."""
        return sum(self.parts)

    def __call__(self, epoch: int) -> Int64[np.ndarray, " num_samples"]:
        """The ids of an epoch."""
        return self.take(epoch, np.arange(self.num_samples))

    def take(self, epoch: int, places: Int64[np.ndarray, "*shape"]) -> Int64[np.ndarray, "*shape"]:
        """The ids at some places of an epoch's order."""
        cycle, slot = divmod(self._count_before(epoch), self.period)
        flat = slot + np.ravel(places)
        slots = flat % self.period
        sources, before = self._schedule.sources[slots], self._schedule.before[slots]
        ids = np.empty(len(flat), np.int64)
        first = 0
        for source, (length, parts) in enumerate(zip(self.lengths, self.parts, strict=True)):
            mine = np.flatnonzero(sources == source)
            if mine.size:
                # this source's draws are numbered through all epochs: so it keeps its own epochs
                done, place = divmod(cycle * parts, length)
                draws = place + flat[mine] // self.period * parts + before[mine]
                ids[mine] = first + self._read(source, length, done, draws)
            first += length
        return ids.reshape(np.shape(places))

    def _read(
        self, source: int, length: int, done: int, draws: Int64[np.ndarray, " draws"]
    ) -> Int64[np.ndarray, " draws"]:
        """The ids, within a source, of some draws from it, counted from its epoch `done` on."""
        seed = derive_key("mixture_order 1:", self.seed, source)
        found = np.empty(len(draws), np.int64)
        epochs, places = np.divmod(draws, length)
        by_epoch = np.argsort(epochs, kind="stable")
        cuts = np.flatnonzero(np.diff(epochs[by_epoch])) + 1
        for run in np.split(by_epoch, cuts):
            epoch = done + int(epochs[run[0]])
            found[run] = keyed_order(places[run], length, seed=seed, epoch=epoch)
        return found

    def _count_before(self, epoch: int) -> int:
        """Draws before an epoch."""
        epoch = check_epoch("mixture_order: epoch", epoch)
        if (epoch + 1) * self.num_samples > MAX_EXAMPLES:
            raise ValueError(
                "mixture_order: draws of all epochs must be at most 2**62, got"
                f" {self.num_samples} in each and epoch {epoch}. Take a smaller epoch."
            )
        return epoch * self.num_samples

    def count_draws(self, draws: int) -> tuple[int, ...]:
        """How many of so many draws, from the first of epoch 0 on, are from each source."""
        cycles, slot = divmod(draws, self.period)
        begun = np.bincount(self._schedule.sources[:slot], minlength=len(self.parts)).tolist()
        return tuple(cycles * p + more for p, more in zip(self.parts, begun, strict=True))

    def audit_sources(self, epoch: int, ids: np.ndarray) -> tuple[SourceAudit, ...]:
        """What some slots of an epoch hold of each source, and where each is at the epoch's end."""
        starts = np.cumsum((0, *self.lengths))
        drawn = self.count_draws(self._count_before(epoch) + self.num_samples)
        found = []
        for source, length in enumerate(self.lengths):
            own = ids[(ids >= starts[source]) & (ids < starts[source + 1])]
            found.append(
                SourceAudit(
                    draws=len(own),
                    epochs=drawn[source] // length if length else 0,
                    unique=len(np.unique(own)),
                    due=-drawn[source] % length if length else 0,
                )
            )
        return tuple(found)

    @cached_property
    def _schedule(self) -> _Schedule:
        return _schedule_draws(self.parts)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_schedule"}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MixtureOrder) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        shares = ", ".join(f"{parts}/{self.period}" for parts in self.parts)
        return (
            f"mixture_order({list(self.lengths)}, [{shares}], {self.num_samples}, seed={self.seed})"
        )


def _schedule_draws(parts: tuple[int, ...]) -> _Schedule:
    """A period in which, after any number of draws, each source is within one of its share.

    Draw ``j`` of a source with ``p`` of `period` parts has a window: from ``floor((j - 1) period /
    p)``, before which it would be one ahead, to ``ceil(j period / p)``, after which it would be one
    behind. Such windows can always all be kept, and the earliest deadline first keeps them: Baruah
    and others, "Proportionate progress", 1996.
    """
    period = sum(parts)
    sources, before = np.empty(period, np.int32), np.empty(period, np.int64)
    to_come = [(0, source, 1) for source, p in enumerate(parts) if p]
    ready: list[tuple[int, int, int]] = []
    for slot in range(period):
        while to_come and to_come[0][0] <= slot:
            _, source, draw = heapq.heappop(to_come)
            heapq.heappush(ready, (-(-draw * period // parts[source]), source, draw))
        _, source, draw = heapq.heappop(ready)
        sources[slot], before[slot] = source, draw - 1
        if draw < parts[source]:
            heapq.heappush(to_come, (draw * period // parts[source], source, draw + 1))
    return _Schedule(sources, before)


def mixture_order(
    lengths: Any, proportions: Any, num_samples: int, *, seed: int = 0
) -> MixtureOrder:
    """An order that mixes several data sets in given proportions, new in every epoch.

    The rule: ids are those of the concatenation, source after source. Which source is drawn from is
    a fixed schedule that goes on through all epochs: after any number of draws, counted from the
    first of epoch 0, each source is within one draw of its share. Each source has epochs of its
    own: it is read in a shuffled order, whole, before any of its ids comes again, and then in
    another. So an epoch of `num_samples` draws may end in the middle of a source's, and the next
    goes on from there. A batch costs what its rows cost, and one look-up for each epoch of a source
    that it touches; the schedule is made once, a microsecond or so for each part of its period.

    Proportions that have a common denominator up to ``2**20``, such as 0.7, 0.2, 0.1 or 3, 1, are
    kept exactly, others rounded to parts of ``2**16``, or up to ``2**20`` where one is small.

    Args:
        lengths: examples of each source, ``[sources]`` integers.
        proportions: how often to draw from each, ``[sources]``, at least 0: fractions that add up
            to 1, or whole numbers in any ratio.
        num_samples: draws in an epoch, at least 1.
        seed: an integer in ``[-2**63, 2**64)``: chooses the orders of the sources.

    Returns:
        A function of the epoch, for `EpochPlan.from_order` and ``DistributedSampler(order=)``:
        frozen, picklable, equal where its arguments are. ``order(epoch)`` is int64 ids
        ``[num_samples]``. `EpochPlan.audit` says what each source gave.

    Raises:
        TypeError: lengths are no integers, proportions no numbers, or another argument is of
            another type.
        ValueError: there is not one proportion for each length; proportions are negative, NaN, all
            0, or fractions that do not add up to 1; or a source without examples is to be drawn
            from.

    Example:
        >>> order = mixture_order([4, 100], [1, 3], 8)
        >>> order(0), order(1)
        (array([52, 47,  1,  4, 92, 89,  2, 62]), array([82, 15,  3, 42, 76, 85,  0, 28]))
        >>> EpochPlan.from_order(order, num_replicas=2, batch_size=4).audit(1).sources
        (SourceAudit(draws=2, epochs=1, unique=2, due=0), \
SourceAudit(draws=6, epochs=0, unique=6, due=88))
    """
    remedy = "It counts the examples of a source."
    try:
        given = list(lengths)
    except TypeError:
        raise TypeError(
            f"mixture_order: lengths must be a sequence, got {lengths!r}. Give one for each source."
        ) from None
    counts = tuple(
        check_integer("mixture_order: lengths", n, 0, MAX_EXAMPLES, remedy) for n in given
    )
    if sum(counts) > MAX_EXAMPLES:
        raise ValueError(
            f"mixture_order: lengths must add up to at most 2**62, got {sum(counts)}. Ids are those"
            " of the concatenation."
        )
    shares = read_numbers("mixture_order: proportions", proportions, "Give one for each source.")
    if shares.dtype.kind == "b":
        raise TypeError("mixture_order: proportions must be numbers, got bool.")
    if shares.shape != (len(counts),) or not counts:
        raise ValueError(
            f"mixture_order: proportions must be one for each source, got shape {shares.shape} for"
            f" {len(counts)} lengths. 0 draws nothing from a source."
        )
    check_weights("mixture_order: proportions", shares, "0 draws nothing from a source.", first=0)
    parts = _find_parts([Fraction(share) for share in shares.tolist()])
    empty = [i for i, n in enumerate(counts) if not n and parts[i]]
    if empty:
        raise ValueError(
            "mixture_order: lengths must be above 0 where a proportion is, got 0 for source"
            f" {list_some(empty)}. Leave the source out."
        )
    num_samples = check_at_least("mixture_order: num_samples", num_samples, 1)
    return MixtureOrder(counts, parts, num_samples, check_seed("mixture_order: seed", seed))


def _find_parts(shares: list[Fraction]) -> tuple[int, ...]:
    """Whole numbers in the proportions that were given, their greatest common divisor 1."""
    total = sum(shares)
    if not total:
        raise ValueError(
            f"mixture_order: proportions must not all be 0, got {len(shares)} of them, none above"
            " 0. There is nothing to draw."
        )
    if any(share.denominator > 1 for share in shares):
        if abs(total - 1) > Fraction(1, 10**6):
            raise ValueError(
                "mixture_order: proportions must add up to 1, or be whole numbers, got"
                f" {float(total):g} in all. Divide them by their sum."
            )
        # the fractions that were meant: 0.1 is no tenth in binary, but nearly
        simple = [share.limit_denominator(_PARTS) for share in shares]
        near = all(
            abs(share - simpler) <= Fraction(1, 2**50)
            for share, simpler in zip(shares, simple, strict=True)
        )
        if near and sum(simple) == 1:
            shares, total = simple, Fraction(1)
    shares = [share / total for share in shares]
    common = math.lcm(*(share.denominator for share in shares))
    if common > _MOST_PARTS:
        common, least = _PARTS, min(share for share in shares if share)
        while common < _MOST_PARTS and least * common < _LEAST:
            common *= 2
    whole = [math.floor(share * common) for share in shares]
    rest = [share * common - floor for share, floor in zip(shares, whole, strict=True)]
    largest = sorted(range(len(shares)), key=lambda i: (-rest[i], i))
    for i in largest[: common - sum(whole)]:
        whole[i] += 1
    lost = [i for i, share in enumerate(shares) if share and not whole[i]]
    if lost:
        raise ValueError(
            "mixture_order: proportions must be at least about a millionth, or 0, got"
            f" {float(shares[lost[0]]):.2g} for source {lost[0]}. Merge sources so small, or draw"
            " them by weighted_order."
        )
    divisor = math.gcd(*whole)
    return tuple(parts // divisor for parts in whole)
