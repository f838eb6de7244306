"""Somebody else's sampler as an order: its ids of each epoch, dealt out to ranks by a plan."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from jax_ddp_weighting._arguments import check_epoch, check_seed
from jax_ddp_weighting.sampling.hashing import derive_key

_UNCOUNTED = 2**24
"""So many ids are read of a sampler that has no `len`, or a wrong one: some never end."""


@dataclass(frozen=True)
class SamplerOrder:
    """The ids that a sampler yields in each epoch; `sampler_order` makes one.

    Args:
        sampler: the sampler.
        seed: seeds its generator, with the epoch, where it has one.

    Example:
        >>> sampler_order([2, 0, 1])(epoch=5)
        [2, 0, 1]
    """

    sampler: Any
    seed: int = 0

    @property
    def repeats(self) -> bool:
        """Whether it says that it draws with replacement."""
        return bool(getattr(self.sampler, "replacement", False))

    def __call__(self, epoch: int) -> list[int]:
        """The ids of an epoch."""
        epoch = check_epoch("sampler_order: epoch", epoch)
        sampler: Any = self.sampler
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
        elif hasattr(sampler, "generator"):
            self._seed_generator(epoch)
        most = max(len(sampler) if hasattr(sampler, "__len__") else 0, _UNCOUNTED)
        ids = list(islice(sampler, most + 1))
        if len(ids) > most:
            raise ValueError(
                f"sampler_order: sampler must come to the end of its epoch, got more than {most}"
                f" ids of a {type(sampler).__name__}. One that never ends has no epochs: give one"
                " that yields the ids of each, or has a len()."
            )
        return ids

    def _seed_generator(self, epoch: int) -> None:
        # Without one, torch's samplers draw from the process's own stream: others on each rank.
        if self.sampler.generator is None:
            import torch  # pyright: ignore[reportMissingImports]  # optional; it is torch's sampler

            self.sampler.generator = torch.Generator()
        self.sampler.generator.manual_seed(derive_key("sampler_order 1:", self.seed, epoch))


def sampler_order(sampler: Iterable[int], *, seed: int = 0) -> SamplerOrder:
    """The order that somebody else's sampler gives each epoch, so that a plan can deal it out.

    The rule: for each epoch the sampler is told it by `set_epoch`, if it has that; else its
    `generator` is seeded by (seed, epoch), as torch's samplers have one, and one is made where it
    is None; and then it is read, whole, on every process. A sampler that has neither must yield the
    same ids whenever it is read: others are refused when an epoch is asked for again, and found by
    `check_agreement` and `batches` where they differ over processes.

    Args:
        sampler: anything that yields integer ids of the whole dataset, again and again, as many in
            each epoch, and is not sharded: such as torch's `WeightedRandomSampler`,
            `SubsetRandomSampler`, or one of your own.
        seed: an integer in ``[-2**63, 2**64)``.

    Returns:
        A function of the epoch, for ``DistributedSampler(dataset, order=...)`` and
        ``EpochPlan.from_order(order, ..., num_examples=len(dataset))``; as picklable as the
        sampler.

    Raises:
        TypeError: the sampler cannot be iterated, or but once.
        ValueError: it yields one rank's share; or a seed is out of range. The function, when
            called: the sampler does not end, after more ids than its `len` and 2**24.

    Example:
        >>> class Rolled:
        ...     def set_epoch(self, epoch): self.epoch = epoch
        ...     def __iter__(self): return iter([(i + self.epoch) % 4 for i in range(4)])
        >>> sampler = DistributedSampler(4, 2, rank=1, order=sampler_order(Rolled()))
        >>> sampler.set_epoch(1)
        >>> list(sampler)
        [2, 0]
    """
    if not isinstance(sampler, Iterable) or isinstance(sampler, Iterator):
        what = "can be read but once" if isinstance(sampler, Iterator) else "cannot be read"
        raise TypeError(
            "sampler_order: sampler must yield ids, epoch after epoch, got"
            f" {type(sampler).__name__}, which {what}. Give the sampler itself, or a list."
        )
    replicas = getattr(sampler, "num_replicas", 1)
    if isinstance(replicas, int) and replicas > 1:
        raise ValueError(
            "sampler_order: sampler must not be sharded already, got a"
            f" {type(sampler).__name__} of {replicas} replicas. A share of a share loses the other"
            " ranks' ids: give a sampler of one replica."
        )
    return SamplerOrder(sampler, check_seed("sampler_order: seed", seed))
