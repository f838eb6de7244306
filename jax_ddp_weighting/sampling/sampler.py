"""torch's face of a plan: a drop-in DistributedSampler that says what it does and can resume."""

import operator
import warnings
from collections.abc import Iterator, Mapping, Sequence, Sized
from itertools import chain
from typing import Any

import numpy as np
from jaxtyping import Int64, Integer

from jax_ddp_weighting._arguments import (
    check_epoch,
    check_length,
    check_num_replicas,
    check_rank,
    check_up_to,
)
from jax_ddp_weighting.sampling import adapters
from jax_ddp_weighting.sampling.plan import EpochPlan, Order, Tail

_CHUNK = 8192  # ids made at once while iterating: small beside an epoch, large beside a call
_STATE_VERSION = 1


class DistributedSampler:
    """The ids of one rank's share of an epoch, as torch's sampler of this name gives them.

    Same arguments, same order, same `set_epoch`; over an `EpochPlan`, so that ``tail="mask"`` reads
    every id exactly once, and ``order="keyed"`` costs only the share that is read. Nothing of an
    epoch is made before it is read, and its state can be saved and loaded at any id.

    Args:
        dataset: anything with a length, or the length itself.
        num_replicas: number of ranks; JAX's process count by default.
        rank: this rank; JAX's process index by default.
        shuffle: whether each epoch has an order of its own.
        seed: chooses the orders; the same on every rank.
        drop_last: torch's word for ``tail="drop"``.
        tail: "repeat" (torch's padding; the default), "drop" (torch's ``drop_last=True``) or
            "mask": every id exactly once, so some ranks may yield one id less than others.
        order: "torch", bit for bit; "keyed"; or integer ids of your own, kept as given, with
            ``shuffle=False``.
        repeats: allow an order of your own to hold an id several times.

    Raises:
        TypeError: an argument is of another type.
        ValueError: an argument is out of range, unknown, or contradicts another; or `dataset` is
            one rank's share already.

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
        order: Order | Integer[np.ndarray, "..."] | Sequence[int] = "torch",
        repeats: bool = False,
    ) -> None:
        _refuse_sharded(dataset)
        if num_replicas is None or rank is None:
            import jax  # only who asks for JAX's ranks pays for it

            num_replicas = jax.process_count() if num_replicas is None else num_replicas
            rank = jax.process_index() if rank is None else rank
        if drop_last and tail not in (None, "drop"):
            raise ValueError(
                "DistributedSampler: drop_last must agree with tail, got drop_last=True and"
                f' tail="{tail}". Leave drop_last out.'
            )
        if tail is None:
            tail = "drop" if drop_last else "repeat"
        ranks = check_num_replicas("DistributedSampler: num_replicas", num_replicas)
        length = _find_length(dataset)
        if isinstance(order, str):
            self.plan = EpochPlan(
                length, ranks, 1, shuffle=shuffle, seed=seed, tail=tail, order=order
            )
        elif shuffle:
            raise ValueError(
                "DistributedSampler: shuffle must be False with an order of your own, got True."
                " It is kept as given."
            )
        else:
            self.plan = EpochPlan.from_order(
                order, ranks, 1, num_examples=length, tail=tail, repeats=repeats
            )
        self.dataset = dataset
        self.rank = check_rank("DistributedSampler: rank", rank, ranks)
        self.epoch = 0
        self._pass: _Pass | None = None  # the last that was begun
        self._resume = (0, 0)  # an epoch, and how many slots of it were read before
        self._warned = False

    @property
    def num_replicas(self) -> int:
        """Number of ranks."""
        return self.plan.num_replicas

    @property
    def shuffle(self) -> bool:
        """Whether each epoch has an order of its own."""
        return self.plan.shuffle

    @property
    def seed(self) -> int:
        """What chooses the orders."""
        return self.plan.seed

    @property
    def drop_last(self) -> bool:
        """Whether the tail is cut."""
        return self.plan.tail == "drop"

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
        return self.plan.accepted_by(self.rank)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next pass reads; from its start, unless it was resumed.

        Raises:
            TypeError: the epoch is no integer.
            ValueError: the epoch is negative.
        """
        self.epoch = check_epoch("DistributedSampler.set_epoch: epoch", epoch)

    def __iter__(self) -> Iterator[int]:
        length = _find_length(self.dataset)
        if length != self.plan.num_examples:
            raise ValueError(
                f"DistributedSampler: len(dataset) must stay {self.plan.num_examples}, got"
                f" {length}. Every rank planned for the old length; make a new sampler on all."
            )
        last = self._pass
        if last is not None and last.complete and last.epoch == self.epoch and self.shuffle:
            self._warn()
        start = self._find_resumed()
        self._resume = (0, 0)
        self._pass = _Pass(self.plan, self.rank, self.epoch, start)
        return chain.from_iterable(self._pass.make_chunks())

    def _warn(self) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"DistributedSampler: epoch {self.epoch} is read again, in the same order."
                " Call set_epoch(epoch) before each pass.",
                stacklevel=3,
            )

    def _find_resumed(self) -> int:
        epoch, slots = self._resume
        return slots if epoch == self.epoch else 0

    def state_dict(self, *, consumed: int | None = None) -> dict[str, Any]:
        """Where the sampler is, for every rank and any number of ranks, as plain JSON-able values.

        Between passes it is the start of the epoch that `set_epoch` chose. Ranks that are equally
        far have the same state.

        Args:
            consumed: slots per rank of this epoch that training has really used. Needed where a
                loader reads ahead; otherwise the ids yielded so far are meant.

        Returns:
            A dict of the epoch, the position in its order, and what decides order and tail.

        Raises:
            ValueError: `consumed` is more than an epoch has.
        """
        slots = self.num_samples
        if consumed is not None:
            remedy = "It counts this rank's slots of one epoch."
            read = check_up_to("DistributedSampler.state_dict: consumed", consumed, slots, remedy)
        elif self._pass is not None and self._pass.epoch == self.epoch:
            read = self._pass.read
        else:
            read = self._find_resumed()
        # A complete epoch has no rest, for whatever number of ranks.
        position = self.plan.epoch_length if read >= slots else read * self.num_replicas
        return {
            "version": _STATE_VERSION,
            "epoch": self.epoch,
            "position": position,
            **self.plan.fingerprint,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to where a state was saved: the next pass reads the rest of that epoch.

        Any rank's state serves every rank. The number of ranks may be another one where it divides
        the position: no id is lost, and none comes twice.

        Args:
            state: what `state_dict` gave.

        Raises:
            TypeError: the state is no mapping, or a number in it is none.
            ValueError: the state is of another plan; the message names the field and both values.
                Or the position lies between two rounds of this number of ranks. Nothing was
                changed then.
        """
        function = "DistributedSampler.load_state_dict"
        if not isinstance(state, Mapping):
            raise TypeError(
                f"{function}: state must be a mapping, got {type(state).__name__}."
                " state_dict gives one."
            )
        wanted = {"version": _STATE_VERSION, **self.plan.fingerprint}
        missing = [name for name in (*wanted, "epoch", "position") if name not in state]
        if missing:
            raise ValueError(
                f"{function}: state must hold {', '.join(missing)}, got {sorted(state)}."
                " It is incomplete, or no state of this sampler."
            )
        for name, value in wanted.items():
            if state[name] != value:
                raise ValueError(
                    f"{function}: {name} must be this sampler's, {value!r}, got {state[name]!r}."
                    " The state belongs to another order of ids; make the sampler as it was."
                )
        epoch = check_epoch(f"{function}: epoch", state["epoch"])
        length = self.plan.epoch_length
        position = check_up_to(f"{function}: position", state["position"], length)
        if position != length and position % self.num_replicas:
            raise ValueError(
                f"{function}: position must be a multiple of num_replicas, {self.num_replicas},"
                f" got {position}. Resume on a number of ranks that divides it."
            )
        slots = self.num_samples
        read = slots if position == length else min(position // self.num_replicas, slots)
        self.epoch, self._resume, self._pass = epoch, (epoch, read), None

    def indices(self) -> Int64[np.ndarray, " ids"]:
        """The ids that a whole pass over this epoch yields, as one int64 array."""
        return self.plan.slots(self.epoch, self.rank, stop=len(self)).ids

    def source(self, num_epochs: int | None = 1) -> adapters.RankIndices:
        """The ids of this and the following epochs as a source: ``grain.MapDataset.source(...)``.

        Args:
            num_epochs: how many epochs; without end where it is None.
        """
        return adapters.RankIndices(self.plan, self.rank, num_epochs, self.epoch)

    def grain_sampler(self, num_epochs: int | None = 1) -> adapters.GrainSampler:
        """The ids of this and the following epochs as the `sampler=` of a grain DataLoader.

        Args:
            num_epochs: how many epochs; without end where it is None.
        """
        return adapters.GrainSampler(self.source(num_epochs))

    def torch_sampler(self) -> Any:
        """This sampler as an instance of ``torch.utils.data.DistributedSampler``.

        torch's DataLoader takes the sampler as it is. Trainers that shard everything that is not of
        torch's class need the view.
        """
        return adapters.torch_sampler(self)

    def __repr__(self) -> str:
        plan = ", ".join(f"{name}={value!r}" for name, value in self.plan.fingerprint.items())
        return (
            f"DistributedSampler({plan}, num_replicas={self.num_replicas}, rank={self.rank},"
            f" epoch={self.epoch})"
        )


class _Pass:
    """One pass over an epoch, chunk by chunk, that knows how far its reader has come."""

    def __init__(self, plan: EpochPlan, rank: int, epoch: int, start: int) -> None:
        self.plan, self.rank, self.epoch = plan, rank, epoch
        self.stop = plan.accepted_by(rank)
        self.made = start
        self.chunk: Iterator[int] = iter(())
        self.ended = False

    def make_chunks(self) -> Iterator[Iterator[int]]:
        # torch's order is there as a whole anyway; one look at it, lest another pass displaces it.
        run = _CHUNK if self.plan.order == "keyed" else max(self.stop, 1)
        while self.made < self.stop:
            until = min(self.made + run, self.stop)
            ids = self.plan.slots(self.epoch, self.rank, start=self.made, stop=until).ids
            for begin in range(0, len(ids), _CHUNK):
                chunk = ids[begin : begin + _CHUNK].tolist()
                self.made, self.chunk = self.made + len(chunk), iter(chunk)
                yield self.chunk
        self.ended = True

    @property
    def read(self) -> int:
        """Slots that have left the iterator; all of them once it has ended.

        A rank whose last slot is padding has read it when it finds that there is no more: until
        then the other ranks are still in that last round.
        """
        left = operator.length_hint(self.chunk)
        return self.plan.num_samples if self.ended else self.made - left

    @property
    def complete(self) -> bool:
        return self.stop > 0 and self.read >= self.stop


def _find_length(dataset: Sized | int) -> int:
    """The length that a dataset has now."""
    length = len(dataset) if isinstance(dataset, Sized) else dataset
    return check_length("DistributedSampler: len(dataset)", length)


def _refuse_sharded(dataset: object) -> None:
    """Raise if a dataset is one rank's share of ids, or a loader over one."""
    for part in (dataset, getattr(dataset, "sampler", None)):
        replicas, rank = getattr(part, "num_replicas", 1), getattr(part, "rank", None)
        if rank is not None and isinstance(replicas, int) and replicas > 1:
            raise ValueError(
                "DistributedSampler: dataset must not be sharded already, got a"
                f" {type(part).__name__} of rank {rank} of {replicas}. Give the dataset itself; a"
                " share of a share loses the other ranks' ids."
            )
