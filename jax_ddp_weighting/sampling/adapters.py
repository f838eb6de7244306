"""One rank's share of a plan in the form that other loaders want it in."""

import sys
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from jax_ddp_weighting._arguments import check_epoch, check_integer, check_rank
from jax_ddp_weighting.sampling.plan import EpochPlan

if TYPE_CHECKING:
    from grain.python import RecordMetadata  # pyright: ignore[reportMissingImports]  # optional

_RUN = 1024  # slots looked up at once where a loader asks for one


@dataclass(frozen=True)
class RankIndices:
    """The ids that one rank accepts, epoch after epoch, each to be had alone.

    A random-access source of ids: index ``i`` is the rank's accepted slot ``i % per_epoch`` of
    epoch ``first_epoch + i // per_epoch``. It can be pickled to a loader's workers.

    Args:
        plan: who reads what.
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
    """

    plan: EpochPlan
    rank: int
    num_epochs: int | None = 1
    first_epoch: int = 0

    def __post_init__(self) -> None:
        check_rank("RankIndices: rank", self.rank, self.plan.num_replicas)
        check_epoch("RankIndices: first_epoch", self.first_epoch)
        if self.num_epochs is not None:
            rule, remedy = "be an integer of at least 1, or None", "None reads on without end."
            check_integer("RankIndices: num_epochs", self.num_epochs, 1, 2**62, remedy, rule=rule)

    @property
    def num_replicas(self) -> int:
        """How many ranks share the plan: what is read here is one share of so many."""
        return self.plan.num_replicas

    def __len__(self) -> int:
        per_epoch = self.plan.accepted_by(self.rank)
        most = sys.maxsize // per_epoch if per_epoch else 0  # what Python allows
        return per_epoch * (most if self.num_epochs is None else min(self.num_epochs, most))

    def __getitem__(self, index: int) -> int:
        low, high = -sys.maxsize - 1, sys.maxsize
        index = check_integer("RankIndices: index", index, low, high, rule="be an integer")
        length = len(self)
        if not -length <= index < length:
            raise IndexError(f"RankIndices: index must be in [0, {length}), got {index}.")
        later, slot = divmod(index % length, self.plan.accepted_by(self.rank))
        run, offset = divmod(slot, _RUN)
        return int(_look_up_run(self.plan, self.rank, self.first_epoch + later, run)[offset])


@lru_cache(maxsize=64)  # loaders read nearly in order, from several threads
def _look_up_run(plan: EpochPlan, rank: int, epoch: int, run: int) -> np.ndarray:
    start, stop = run * _RUN, min((run + 1) * _RUN, plan.num_samples)
    return plan.slots(epoch, rank, start=start, stop=stop).ids


class GrainSampler:
    """One rank's ids as a sampler of a `grain` DataLoader, which must not shard them again.

    Give the loader ``shard_options=grain.sharding.NoSharding()``, or none: the sampler brings it.
    Its text names everything that decides the ids, the rank and the number of ranks too, so grain
    refuses to load the state of an iterator over other ones.

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
        # A stream for every record that is read: Philox has 128 bits of key, grain's own adds.
        read = self._indices
        later, slot = divmod(index, read.plan.accepted_by(read.rank))
        before = (read.first_epoch + later) * read.plan.num_samples
        place = (before + slot) * read.num_replicas + read.rank
        key = (read.plan.seed % 2**64) << 64 | place % 2**64
        rng = np.random.Generator(np.random.Philox(key=key))
        return RecordMetadata(index=index, record_key=record_key, rng=rng)

    def __repr__(self) -> str:
        return f"GrainSampler({self._indices!r})"


def torch_sampler(sampler: Any) -> Any:
    """A `DistributedSampler` of ours as one that torch's own class knows as its kind.

    Some trainers put a sampler of their own in the place of any that is no
    ``torch.utils.data.DistributedSampler``, and so shard what is sharded. This one they leave.

    Args:
        sampler: the sampler; it is read, and keeps its state, through the view.

    Returns:
        A ``torch.utils.data.DistributedSampler`` with everything that `sampler` has.
    """
    from torch.utils.data import (  # pyright: ignore[reportMissingImports]  # optional
        DistributedSampler,
    )

    class TorchSampler(DistributedSampler):
        def __init__(self) -> None:
            pass  # everything is asked of the sampler

        def __iter__(self):
            return iter(sampler)

        def __len__(self) -> int:
            return len(sampler)

        def set_epoch(self, epoch: int) -> None:
            sampler.set_epoch(epoch)

        def __getattr__(self, name: str) -> Any:
            return getattr(sampler, name)

        def __repr__(self) -> str:
            return f"torch_sampler({sampler!r})"

    return TorchSampler()
