"""An order of one's own for each epoch: a function that is asked once, and checked."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Int64

from jax_ddp_weighting._arguments import list_some
from jax_ddp_weighting.sampling.draws import WeightedOrder
from jax_ddp_weighting.sampling.length_groups import GroupedOrder
from jax_ddp_weighting.sampling.mixtures import MixtureOrder
from jax_ddp_weighting.sampling.order import GivenOrder

OrderFunction = Callable[[int], Any]
"""`order(epoch)` returns the integer ids of an epoch, ``[entries]``, of as many in each."""

_READY = (WeightedOrder, GroupedOrder, MixtureOrder)
_KEPT = 2**22  # ids of epochs kept, 32 MB; two epochs always are


@dataclass(frozen=True, eq=False, repr=False)
class CalledOrder:
    """The orders that a function gives, each asked for once in a process and checked.

    The rule: what decides is the ids, not the function: they are compared over processes and with
    a saved state by their digest. Of an order that this library makes, the digest is of what makes
    it, and a few places are looked up alone where that is possible.

    Args:
        function: `function(epoch)` returns integer ids ``[entries]``, the same number in each
            epoch, and always the same for the same one.
        repeats: allow an id to come several times; what the function itself says besides.
        num_examples: length of the dataset that ids point into; what the function says, or the
            number of its ids, by default.
        caller: who speaks in errors.

    Raises:
        TypeError: ids are no integers, or come from something that can be read but once.
        ValueError: ids are out of range, come twice unasked, are of another number than before, or
            are others when asked for again; or the function is for another dataset.
    """

    function: OrderFunction
    repeats: bool = False
    num_examples: int | None = None
    caller: str = "EpochPlan.from_order"
    length: int = field(init=False)
    # a process's own, but for the digests, which go into pickles
    _digests: dict[int, str] = field(init=False)
    _held: dict[int, GivenOrder] = field(init=False)
    _lock: Any = field(init=False)

    def __post_init__(self) -> None:
        self.__setstate__({"_digests": {}})
        known = getattr(self.function, "num_examples", None)
        if known is not None and self.num_examples not in (None, known):
            raise ValueError(
                f"{self.caller}: num_examples must be those that the order is of, {known}, got"
                f" {self.num_examples}. Give a weight or a length for every example of the dataset."
            )
        repeats = bool(self.repeats or getattr(self.function, "repeats", False))
        object.__setattr__(self, "repeats", repeats)
        if isinstance(self.function, _READY):
            self._settle(self.function.num_samples, known)
            return
        # Epoch 0 says how long an epoch is, and is checked before anything hangs on it.
        first = self._ask(0)
        self._settle(len(first.ids), len(first.ids) if known is None else known)
        self._held[0] = self._check(0, first)

    def _settle(self, length: int, num_examples: int | None) -> None:
        object.__setattr__(self, "length", length)
        if self.num_examples is None:
            object.__setattr__(self, "num_examples", num_examples)

    @property
    def sources(self) -> MixtureOrder | None:
        """The mixture that it is, if it is one."""
        return self.function if isinstance(self.function, MixtureOrder) else None

    @property
    def by_place(self) -> bool:
        """Whether a few places of an epoch cost as little as they are."""
        return isinstance(self.function, _READY) and self.function.by_place

    def ids_of(self, epoch: int) -> Int64[np.ndarray, " entries"]:
        """The ids of an epoch, which cannot be written."""
        with self._lock:  # batches are fetched in other threads
            order = self._held.pop(epoch, None)
            if order is None:
                order = self._check(epoch, self._ask(epoch))
            self._held[epoch] = order  # the latest last
            while len(self._held) > 2 and len(self._held) * self.length > _KEPT:
                del self._held[next(iter(self._held))]
            return order.ids

    def take(self, epoch: int, places: Int64[np.ndarray, "*shape"]) -> Int64[np.ndarray, "*shape"]:
        """The ids at some places of an epoch."""
        if isinstance(self.function, _READY) and self.function.by_place:
            return self.function.take(epoch, places)
        return self.ids_of(epoch)[places]

    def describe(self, epoch: int) -> str:
        """What stands for the ids of an epoch where plans are compared."""
        if isinstance(self.function, _READY):
            return self.function.digest
        if epoch not in self._digests:
            self.ids_of(epoch)
        return f"given {self._digests[epoch]}"

    def _ask(self, epoch: int) -> GivenOrder:
        try:
            ids = self.function(epoch)
        except Exception as error:
            error.add_note(f"{self.caller}: the order's function failed at epoch {epoch}.")
            raise
        return GivenOrder(ids, self.repeats, f"{self.caller}: epoch {epoch}")

    def _check(self, epoch: int, order: GivenOrder) -> GivenOrder:
        where = f"{self.caller}: epoch {epoch}"
        if len(order.ids) != self.length:
            raise ValueError(
                f"{where}: an order's function must return as many ids as before, {self.length},"
                f" got {len(order.ids)}. Ranks count their steps by that number: cut, or draw on."
            )
        assert self.num_examples is not None
        beyond = order.ids[order.ids >= self.num_examples]
        if beyond.size:
            raise ValueError(
                f"{where}: ids must be in [0, {self.num_examples}), got {list_some(beyond)}. For"
                " an order that draws from a larger dataset, give num_examples."
            )
        if self._digests.setdefault(epoch, order.digest) != order.digest:
            raise ValueError(
                f"{where}: an order's function must return the same ids for the same epoch, got"
                " others when it was called again. Seed its random numbers by the epoch."
            )
        return order

    def __getstate__(self) -> dict[str, Any]:
        # Another process asks for itself: but it must be told the same ids.
        return {name: value for name, value in self.__dict__.items() if name not in _OWN}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _held={}, _lock=threading.RLock())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, CalledOrder):
            return NotImplemented
        mine, theirs = self.function, other.function
        rules = self.repeats, self.num_examples, self.length
        return rules == (other.repeats, other.num_examples, other.length) and (
            mine is theirs or bool(mine == theirs)
        )

    def __hash__(self) -> int:
        return hash((self.length, self.describe(0)))

    def __repr__(self) -> str:
        # somebody's own function, or sampler, has its address in its text: another everywhere
        made = f"{self.function!r}, " if isinstance(self.function, _READY) else ""
        return f"CalledOrder({made}{self.length} ids)"


_OWN = ("_held", "_lock")  # of one process
