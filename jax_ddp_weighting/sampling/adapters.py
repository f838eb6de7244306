"""One rank's share of a plan in the form that other loaders want it in."""

import sys
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from jax_ddp_weighting._arguments import check_epoch, check_integer, check_rank
from jax_ddp_weighting.sampling.plan import EpochPlan

if TYPE_CHECKING:
    from grain.python import RecordMetadata  # pyright: ignore[reportMissingImports]  # optional

_RUN = 1024  # slots looked up at once where a loader asks for one
_EPOCHS = 2**63  # as many as can be numbered


@dataclass(frozen=True, repr=False)
class RankIndices:
    """The ids that one rank accepts, epoch after epoch, each to be had alone.

    A random-access source of ids, which can be pickled to a loader's workers. The accepted slots of
    all epochs, one epoch after the other, are dealt out to the ranks in turn: index ``i`` of rank
    ``r`` is slot ``i * num_replicas + r`` of them. So in every epoch each id comes as often as the
    plan says, and over all epochs no rank has more than one id more than another: where an epoch
    under ``tail="mask"`` ends in the middle of a round, the next ranks begin the next epoch, and
    ranks that make steps together stay together. One epoch alone, and any number of epochs whose
    rounds are full, are what the samplers of these epochs yield.

    Args:
        plan: who reads what; of the rest of an epoch, that rest comes first, then whole epochs.
        rank: a rank of the plan.
        num_epochs: how many epochs it is long; without end where it is None.
        first_epoch: the epoch that it starts with.

    Raises:
        TypeError: an argument is no integer.
        ValueError: an argument is out of range.

    Example:
        >>> plan = EpochPlan(10, num_replicas=4, batch_size=1, shuffle=False)
        >>> list(RankIndices(plan, rank=1)), list(RankIndices(plan, rank=2))
        ([1, 5, 9], [2, 6])
        >>> [list(RankIndices(plan, rank, num_epochs=2)) for rank in (1, 2)]
        [[1, 5, 9, 3, 7], [2, 6, 0, 4, 8]]
    """

    plan: EpochPlan
    rank: int
    num_epochs: int | None = 1
    first_epoch: int = 0

    def __post_init__(self) -> None:
        check_rank("RankIndices: rank", self.rank, self.plan.num_replicas)
        check_epoch("RankIndices: first_epoch", self.first_epoch)
        self.plan.check_epoch("RankIndices: first_epoch", self.first_epoch)
        if self.num_epochs is not None:
            rule, remedy = "be an integer of at least 1, or None", "None reads on without end."
            check_integer("RankIndices: num_epochs", self.num_epochs, 1, 2**62, remedy, rule=rule)

    @property
    def num_replicas(self) -> int:
        """How many ranks share the plan: what is read here is one share of so many."""
        return self.plan.num_replicas

    @property
    def slots_per_epoch(self) -> int:
        """Slots of all ranks in a whole epoch, padding included."""
        return self._whole.num_samples * self.num_replicas

    @cached_property
    def _whole(self) -> EpochPlan:
        """The plan of all epochs but the first."""
        return replace(self.plan, start=0, only_epoch=None)

    def __len__(self) -> int:
        epochs = _EPOCHS - self.first_epoch
        if self.num_epochs is not None:
            epochs = min(epochs, self.num_epochs)
        later = (epochs - 1) * self._whole.accepted_per_epoch
        dealt = self.plan.accepted_per_epoch + later
        if self.num_epochs is None:  # an end that nobody reaches, but the same for all
            dealt -= dealt % self.num_replicas
        return min(-((self.rank - dealt) // self.num_replicas), sys.maxsize)  # Python's longest

    def __getitem__(self, index: int) -> int:
        low, high = -sys.maxsize - 1, sys.maxsize
        index = check_integer("RankIndices: index", index, low, high, rule="be an integer")
        length = len(self)
        if not -length <= index < length:
            raise IndexError(f"RankIndices: index must be in [0, {length}), got {index}.")
        plan, epoch, place = self.locate(index % length)
        slot, rank = divmod(place, self.num_replicas)  # whose slot it is in an epoch by itself
        run, offset = divmod(slot, _RUN)
        return int(_look_up_run(plan, rank, epoch, run)[offset])

    def locate(self, index: int) -> tuple[EpochPlan, int, int]:
        """Where an index lies: the plan of its epoch, the epoch, and the place among its slots."""
        first = self.plan.accepted_per_epoch
        place = index * self.num_replicas + self.rank
        if place < first:
            return self.plan, self.first_epoch, place
        later, place = divmod(place - first, self._whole.accepted_per_epoch)
        return self._whole, self.first_epoch + 1 + later, place

    def __repr__(self) -> str:
        # grain compares it, over processes too, and a plan names "keyed" and "torch" alone: of
        # other orders its text does not say which ids they have
        order = self.plan.order
        ids = "" if isinstance(order, str) else f", ids={order.describe(self.first_epoch)!r}"
        return (
            f"RankIndices(plan={self.plan!r}, rank={self.rank}, num_epochs={self.num_epochs},"
            f" first_epoch={self.first_epoch}{ids})"
        )


@lru_cache(maxsize=64)  # loaders read nearly in order, from several threads
def _look_up_run(plan: EpochPlan, rank: int, epoch: int, run: int) -> np.ndarray:
    start, stop = run * _RUN, min((run + 1) * _RUN, plan.num_samples)
    return plan.slots(epoch, rank, start=start, stop=stop).ids


class GrainSampler:
    """One rank's ids as a sampler of a `grain` DataLoader, which must not shard them again.

    Give the loader ``shard_options=grain.sharding.NoSharding()``, or none: the sampler brings it.
    Its text names everything that decides the ids, the rank and the number of ranks too, so grain
    refuses to load the state of an iterator over other ones. Of a function of your own it is a
    digest of the ids of the first epoch, the same in every process.

    Args:
        indices: the ids, in order.

    Matches:
        The `Sampler` protocol of grain 0.2.18, used by its DataLoader with and without workers.
    """

    def __init__(self, indices: RankIndices) -> None:
        from grain.sharding import (  # pyright: ignore[reportMissingImports]  # optional
            NoSharding,
        )

        self._indices = indices
        self._shard_options = NoSharding()  # where grain looks for it

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> "RecordMetadata":
        from grain.python import (  # pyright: ignore[reportMissingImports]  # optional
            RecordMetadata,
        )

        record_key = self._indices[index]
        # A stream for every record that is read: Philox has 128 bits of key, grain's own adds. It
        # hangs on the place in the epoch's order, so that a resumed epoch goes on with its own.
        plan, epoch, place = self._indices.locate(index % len(self))
        whole = self._indices.slots_per_epoch
        key = (plan.seed % 2**64) << 64 | (epoch * whole + plan.start + place) % 2**64
        rng = np.random.Generator(np.random.Philox(key=key))
        return RecordMetadata(index=index, record_key=record_key, rng=rng)

    def __repr__(self) -> str:
        return f"GrainSampler({self._indices!r})"


def torch_sampler(sampler: Any) -> Any:
    """A `DistributedSampler` of ours as one that torch's own class knows as its kind.

    Some trainers put a sampler of their own in the place of any that is no
    ``torch.utils.data.DistributedSampler``, and so shard what is sharded. This one they leave.

    Args:
        sampler: the sampler; everything is asked of it and set on it, its state too.

    Returns:
        A ``torch.utils.data.DistributedSampler`` with everything that `sampler` has. A pickle or a
        deep copy of it has a sampler of its own.
    """
    view = _make_view_class()()
    object.__setattr__(view, _VIEWED, sampler)
    return view


_VIEWED = "_viewed"  # the one attribute that is the view's own


@cache
def _make_view_class() -> type:
    """The class, made when it is first asked for: torch is no dependency."""
    from torch.utils.data import (  # pyright: ignore[reportMissingImports]  # optional
        DistributedSampler,
    )

    class TorchSampler(DistributedSampler):
        # What protocols look for stands here as methods: from Python 3.12 on they see no
        # `__getattr__`, and would take the view for a sampler without state.
        def __init__(self) -> None:
            pass  # torch's own attributes would shadow the sampler's

        def __iter__(self):
            return iter(self._viewed)

        def __len__(self) -> int:
            return len(self._viewed)

        def set_epoch(self, epoch: int) -> None:
            self._viewed.set_epoch(epoch)

        def state_dict(self, **options: Any) -> dict[str, Any]:
            return self._viewed.state_dict(**options)

        def load_state_dict(self, state_dict: Any) -> None:
            self._viewed.load_state_dict(state_dict)

        def __getattr__(self, name: str) -> Any:
            if name == _VIEWED or name.startswith("__"):  # a view in the making has nothing yet
                raise AttributeError(name)
            return getattr(self._viewed, name)

        def __setattr__(self, name: str, value: Any) -> None:
            setattr(self._viewed, name, value)

        def __reduce__(self) -> tuple[Any, ...]:
            return torch_sampler, (self._viewed,)  # the class is no module's: it is made again

        def __repr__(self) -> str:
            return f"torch_sampler({self._viewed!r})"

    return TorchSampler
