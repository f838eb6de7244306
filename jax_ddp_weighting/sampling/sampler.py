"""torch's face of a plan: a drop-in DistributedSampler that says what it does and can resume."""

import operator
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from itertools import chain
from typing import Any

import numpy as np
from jaxtyping import Int64, Integer

from jax_ddp_weighting._arguments import (
    check_epoch,
    check_length,
    check_num_replicas,
    check_rank,
    check_seed,
    check_up_to,
)
from jax_ddp_weighting.sampling import adapters
from jax_ddp_weighting.sampling.epoch_order import Order
from jax_ddp_weighting.sampling.order import GivenOrder
from jax_ddp_weighting.sampling.order_functions import CalledOrder, OrderFunction
from jax_ddp_weighting.sampling.plan import EpochPlan
from jax_ddp_weighting.sampling.plan_options import Tail, check_shuffle, check_tail
from jax_ddp_weighting.sampling.reading import Reader
from jax_ddp_weighting.sampling.resuming import make_state, read_state

_CHUNK = 8192  # ids made at once while iterating: small beside an epoch, large beside a call


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
        order: "torch", bit for bit; "keyed"; a function of the epoch that returns integer ids, as
            `EpochPlan.from_order` takes it; or integer ids, one order for all epochs, with
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
        order: Order | Integer[np.ndarray, "..."] | Sequence[int] | OrderFunction = "torch",
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
        seed = check_seed("DistributedSampler: seed", seed)  # or the plan would speak in the error
        check_shuffle("DistributedSampler", shuffle)
        check_tail("DistributedSampler", tail)
        length = _find_length(dataset)
        if callable(order):
            called = CalledOrder(order, repeats, length, "DistributedSampler: order")
            self.plan = EpochPlan(length, ranks, 1, shuffle=True, tail=tail, order=called)
        elif isinstance(order, str):
            self.plan = EpochPlan(
                length, ranks, 1, shuffle=shuffle, seed=seed, tail=tail, order=order
            )
        elif shuffle:
            raise ValueError(
                "DistributedSampler: shuffle must be False with an order of your own, got True."
                " It is kept as given. A function of the epoch gives each epoch its own."
            )
        else:
            given = GivenOrder(order, repeats, "DistributedSampler: order")
            self.plan = EpochPlan(length, ranks, 1, shuffle=False, tail=tail, order=given)
        self.dataset = dataset
        self.rank = check_rank("DistributedSampler: rank", rank, ranks)
        self.epoch = 0
        self._pass: _Pass | None = None  # the last that was read from
        self._rest: EpochPlan | None = None  # what was loaded, until it is read
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
        """Ids that the next pass yields on this rank: of a loaded position, those that are left."""
        return self._find_plan().accepted_by(self.rank)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next pass reads; from its start, unless it was resumed.

        Raises:
            TypeError: the epoch is no integer.
            ValueError: the epoch is negative.
        """
        self.epoch = check_epoch("DistributedSampler.set_epoch: epoch", epoch)
        order = self.plan.order
        if epoch and isinstance(order, GivenOrder) and order.repeats:
            self._warn_of_one_order(0)

    @property
    def _has_one_order(self) -> bool:
        return isinstance(self.plan.order, GivenOrder)

    def __iter__(self) -> Iterator[int]:
        length = _find_length(self.dataset)
        if length != self.plan.num_examples:
            raise ValueError(
                f"DistributedSampler: len(dataset) must stay {self.plan.num_examples}, got"
                f" {length}. Every rank planned for the old length; make a new sampler on all."
            )
        last = self._pass
        if last is not None and last.complete and last.epoch == self.epoch and self.shuffle:
            self._warn(
                f"DistributedSampler: epoch {self.epoch} is read again, in the same order."
                " Call set_epoch(epoch) before each pass."
            )
        if last is not None and last.epoch != self.epoch and self._has_one_order:
            self._warn_of_one_order(last.epoch)
        # What a pass yields is settled here, as with torch's; a loaded position is used up only
        # when it is read from: some loaders call `iter` and throw the iterator away.
        begun = _Pass(self._find_plan(), self.rank, self.epoch)
        return chain.from_iterable(begun.make_chunks(self._note_reading))

    def _note_reading(self, begun: "_Pass") -> None:
        self._pass, self._rest = begun, None

    def _find_plan(self) -> EpochPlan:
        """What the next pass reads: the rest of an epoch if it was loaded, else a whole one."""
        rest = self._rest
        return self.plan if rest is None or rest.only_epoch != self.epoch else rest

    def _warn_of_one_order(self, before: int) -> None:
        self._warn(
            f"DistributedSampler: epoch {self.epoch} reads the ids of epoch {before} again: order="
            " holds one order, for all epochs. Give a function of the epoch, such as"
            " weighted_order(weights, num_samples), for an order of each epoch's own."
        )

    def _warn(self, text: str) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(text, stacklevel=3)

    def state_dict(self, *, consumed: int | None = None) -> dict[str, Any]:
        """Where the sampler is, for every rank and any number of ranks, as plain JSON-able values.

        Between passes it is the start of the epoch that `set_epoch` chose. Ranks that are equally
        far have the same state.

        Args:
            consumed: slots per rank that training has really used since the pass began: at the
                epoch's start, or at the position that was loaded. Needed where ids are read ahead,
                as by a loader with workers or by `join_batches`; otherwise the ids yielded so far
                are meant.

        Returns:
            A dict of the epoch, the position in its order, and what decides order and tail.

        Raises:
            ValueError: `consumed` is more than there are or were read; or it is not given where ids
                were read ahead, and so would be lost.
        """
        begun = self._pass if self._pass is not None and self._pass.epoch == self.epoch else None
        if self._rest is not None and self._rest.only_epoch == self.epoch:
            begun = None  # what was loaded is still to be read
        plan = self._find_plan() if begun is None else begun.plan
        argument = "DistributedSampler.state_dict: consumed"
        if consumed is None:
            read = 0 if begun is None else begun.read
            ahead = None if begun is None else begun.reader.find_ahead()
            if ahead is not None:
                raise ValueError(
                    f"{argument} must be given where ids are read ahead of training, here by"
                    f" {ahead}, got None. It counts the slots per rank that were used since the"
                    " pass began: batches times batch_size. Between epochs, call set_epoch first."
                )
        else:
            remedy = (
                "It counts this rank's slots since the pass began, and of a short last batch those"
                " that it has."
            )
            read = check_up_to(argument, consumed, plan.num_samples, remedy)
            # Who counts from the epoch's start after a resume is found out here, before ids are
            # lost. A rank whose last slot is padding has no more to read than the others.
            if begun is not None and read > begun.read and not begun.complete:
                raise ValueError(
                    f"{argument} must be at most what was read, {begun.read}, got {read}. {remedy}"
                )
        # Past its last slot an epoch has no rest, for whatever number of ranks.
        return make_state(self.plan, self.epoch, plan.position(read))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to where a state was saved: the next pass reads the rest of that epoch.

        Any rank's state serves every rank and any number of ranks: what is left of the order is
        dealt out anew. It holds in `len`, `indices`, `source` and `grain_sampler` too, in pickles
        and copies, until the rest is read, or another epoch.

        Args:
            state: what `state_dict` gave.

        Raises:
            TypeError: the state is no mapping, or a number in it is none.
            ValueError: the state is of another plan; the message names the field and both values.
                Nothing was changed then.
        """
        epoch, position = read_state("DistributedSampler", self.plan, state)
        rest = self.plan.resumed(epoch, position) if position else None
        self.epoch, self._rest, self._pass = epoch, rest, None

    def indices(self) -> Int64[np.ndarray, " ids"]:
        """The ids that the next pass yields, as one int64 array."""
        return self._find_plan().slots(self.epoch, self.rank, stop=len(self)).ids

    def source(self, num_epochs: int | None = 1) -> adapters.RankIndices:
        """The ids of this and the following epochs as a source: ``grain.MapDataset.source(...)``.

        Args:
            num_epochs: how many epochs, the rest of one that was loaded among them; without end
                where it is None.
        """
        order = self.plan.order
        if num_epochs != 1 and isinstance(order, GivenOrder) and order.repeats:
            self._warn(
                "DistributedSampler: all epochs of this source read the same ids again: order="
                " holds one order. Give a function of the epoch for an order of each epoch's own."
            )
        return adapters.RankIndices(self._find_plan(), self.rank, num_epochs, self.epoch)

    def grain_sampler(self, num_epochs: int | None = 1) -> adapters.GrainSampler:
        """The ids of this and the following epochs as the `sampler=` of a grain DataLoader.

        Args:
            num_epochs: how many epochs, the rest of one that was loaded among them; without end
                where it is None.
        """
        return adapters.GrainSampler(self.source(num_epochs))

    def torch_sampler(self) -> Any:
        """This sampler as an instance of ``torch.utils.data.DistributedSampler``.

        torch's DataLoader takes the sampler as it is. Trainers that shard everything that is not of
        torch's class need the view.
        """
        return adapters.torch_sampler(self)

    def __repr__(self) -> str:
        plan = self.plan.fingerprint_of(self.epoch)
        plan = ", ".join(f"{name}={value!r}" for name, value in plan.items())
        return (
            f"DistributedSampler({plan}, num_replicas={self.num_replicas}, rank={self.rank},"
            f" epoch={self.epoch})"
        )


class _Pass:
    """One pass over an epoch or its rest, that knows how far its reader has come."""

    def __init__(self, plan: EpochPlan, rank: int, epoch: int) -> None:
        self.plan, self.rank, self.epoch = plan, rank, epoch
        self.stop = plan.accepted_by(rank)
        self.made = 0
        self.chunk: Iterator[int] = iter(())
        self.ended = False
        self.reader = Reader()

    def make_chunks(self, note_reading: Callable[["_Pass"], None]) -> Iterator[Iterator[int]]:
        note_reading(self)
        self.reader.note()
        # Other orders are there as a whole anyway; one look, lest another pass displaces them.
        order = self.plan.order
        by_place = order.by_place if isinstance(order, CalledOrder) else order == "keyed"
        run = _CHUNK if by_place else max(self.stop, 1)
        while self.made < self.stop:
            until = min(self.made + run, self.stop)
            ids = self.plan.slots(self.epoch, self.rank, start=self.made, stop=until).ids
            for begin in range(0, len(ids), _CHUNK):
                chunk = ids[begin : begin + _CHUNK].tolist()
                self.made, self.chunk = self.made + len(chunk), iter(chunk)
                yield self.chunk
        self.reader.note_end()
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
