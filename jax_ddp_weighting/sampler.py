"""torch's face of a plan: a drop-in DistributedSampler that says what it does and can resume."""

import operator
import warnings
from collections.abc import Iterator, Sized
from itertools import chain

from jax_ddp_weighting.order import check_integer
from jax_ddp_weighting.plan import EpochPlan, Order, Tail

_CHUNK = 8192  # ids made at once while iterating: small beside an epoch, large beside a call


class DistributedSampler:
    """The ids of one rank's share of an epoch, as torch's sampler of this name gives them.

    Same arguments, same order, same `set_epoch`; over an `EpochPlan`, so that `tail="mask"` reads
    every id exactly once, and `order="keyed"` costs only the share that is read.

    Args:
        dataset: anything with a length, or the length itself.
        num_replicas: number of ranks; JAX's process count by default.
        rank: this rank; JAX's process index by default.
        shuffle: whether each epoch has an order of its own.
        seed: chooses the orders; the same on every rank.
        drop_last: torch's word for ``tail="drop"``.
        tail: "repeat" (torch's padding; the default), "drop" (torch's ``drop_last=True``) or
            "mask": every id exactly once, so some ranks may yield one id less than others.
        order: "torch", bit for bit, or "keyed".

    Raises:
        TypeError: an argument is of another type.
        ValueError: an argument is out of range, unknown, or contradicts another.

    Matches:
        ``torch.utils.data.DistributedSampler`` of torch 2.13.0, compared live and with its recorded
        output, for every `drop_last`, `shuffle`, seed and epoch.

    Example:
        >>> sampler = DistributedSampler(10, num_replicas=4, rank=1, tail="mask", shuffle=False)
        >>> list(sampler)
        [1, 5, 9]
    """

    def __init__(
        self,
        dataset: Sized | int,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        *,
        tail: Tail | None = None,
        order: Order = "torch",
    ) -> None:
        if num_replicas is None or rank is None:
            import jax  # only who asks for JAX's ranks pays for it

            num_replicas = jax.process_count() if num_replicas is None else num_replicas
            rank = jax.process_index() if rank is None else rank
        if drop_last and tail not in (None, "drop"):
            raise ValueError(
                "DistributedSampler: drop_last must agree with tail, got drop_last=True and"
                f' tail="{tail}". Leave drop_last out.'
            )
        self.dataset = dataset
        self.plan = EpochPlan(
            _length(dataset),
            check_integer(
                "DistributedSampler: num_replicas",
                num_replicas,
                1,
                2**31,
                "be an integer of at least 1",
                "It is the number of data-parallel ranks.",
            ),
            1,
            shuffle=shuffle,
            seed=seed,
            tail=tail or ("drop" if drop_last else "repeat"),
            order=order,
        )
        ranks = self.plan.num_replicas
        self.rank = check_integer(
            "DistributedSampler: rank",
            rank,
            0,
            ranks - 1,
            f"be in [0, {ranks})",
            f"Ranks count from zero; the last of {ranks} replicas is rank {ranks - 1}.",
        )
        self.epoch = 0
        self._pass: _Pass | None = None
        self._completed: int | None = None
        self._warned = False

    @property
    def num_replicas(self) -> int:
        """Number of ranks."""
        return self.plan.num_replicas

    @property
    def num_samples(self) -> int:
        """Slots per rank and epoch; under ``tail="mask"`` a rank may accept one less."""
        return self.plan.num_samples

    @property
    def total_size(self) -> int:
        """Slots of all ranks in an epoch."""
        return self.plan.num_samples * self.plan.num_replicas

    def __len__(self) -> int:
        """Ids that a whole pass yields on this rank."""
        last_place = (self.num_samples - 1) * self.num_replicas + self.rank
        return self.num_samples - (last_place >= self.plan.accepted_per_epoch)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next pass reads.

        Raises:
            TypeError: the epoch is no integer.
            ValueError: the epoch is negative.
        """
        self.epoch = check_integer(
            "DistributedSampler.set_epoch: epoch",
            epoch,
            0,
            2**63,
            "be an integer of at least 0",
            "Epochs count from 0.",
        )

    def __iter__(self) -> Iterator[int]:
        length = _length(self.dataset)
        if length != self.plan.num_examples:
            raise ValueError(
                f"DistributedSampler: len(dataset) must stay {self.plan.num_examples}, got"
                f" {length}. Every rank planned for the old length; make a new sampler on all."
            )
        if self._pass is not None and self._pass.finished:
            self._completed = self._pass.epoch
        if self._completed == self.epoch and self.plan.shuffle and not self._warned:
            self._warned = True
            warnings.warn(
                f"DistributedSampler: epoch {self.epoch} is read again, in the same order."
                " Call set_epoch(epoch) before each pass.",
                stacklevel=2,
            )
        self._pass = _Pass(self.plan, self.rank, self.epoch, len(self))
        return chain.from_iterable(self._pass.chunks())


class _Pass:
    """One pass over an epoch, chunk by chunk, that knows how far its reader has come."""

    def __init__(self, plan: EpochPlan, rank: int, epoch: int, stop: int) -> None:
        self.plan, self.rank, self.epoch, self.stop = plan, rank, epoch, stop
        self.made = 0
        self.chunk: Iterator[int] = iter(())

    def chunks(self) -> Iterator[Iterator[int]]:
        while self.made < self.stop:
            until = min(self.made + _CHUNK, self.stop)
            slots = self.plan.slots(self.epoch, self.rank, start=self.made, stop=until)
            self.made, self.chunk = until, iter(slots.ids.tolist())
            yield self.chunk

    @property
    def read(self) -> int:
        """Ids that have left the iterator."""
        return self.made - operator.length_hint(self.chunk)

    @property
    def finished(self) -> bool:
        return self.stop > 0 and self.read == self.stop


def _length(dataset: Sized | int) -> int:
    """The length that a dataset has now."""
    if isinstance(dataset, Sized):
        return len(dataset)
    return check_integer(
        "DistributedSampler: dataset",
        dataset,
        0,
        2**62,
        "have a length in [0, 2**62], or be one",
    )
