"""Which id an epoch has at which place of its order: an order of ours, torch's, or the user's."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, get_args

import numpy as np
from jaxtyping import Int64

from jax_ddp_weighting._arguments import list_some
from jax_ddp_weighting.sampling.order import GivenOrder, keyed_order, torch_order
from jax_ddp_weighting.sampling.order_functions import CalledOrder

Order = Literal["keyed", "torch"]


@dataclass(frozen=True)
class EpochOrder:
    """The ids of every epoch by their place in its order, each at the cost of itself where it can.

    Attributes:
        num_examples: length of the dataset.
        shuffle: whether an epoch has an order of its own.
        seed: chooses the orders.
        order: one of `Order`, or an order of the user's.
    """

    num_examples: int
    shuffle: bool
    seed: int
    order: Order | GivenOrder | CalledOrder

    def __post_init__(self) -> None:
        if isinstance(self.order, GivenOrder):
            self._check_given(self.order)
        elif isinstance(self.order, CalledOrder):
            self._check_called(self.order)
        elif not isinstance(self.order, str) or self.order not in get_args(Order):
            raise ValueError(
                f'EpochPlan: order must be "keyed" or "torch", got {self.order!r}.'
                " For an order of your own, see EpochPlan.from_order."
            )
        elif self.order == "torch" and self.shuffle and self.num_examples >= 2**31:
            raise ValueError(
                'EpochPlan: num_examples must be below 2**31 with order="torch", got'
                f' {self.num_examples}. order="keyed" takes up to 2**62.'
            )

    def _check_given(self, order: GivenOrder) -> None:
        if self.shuffle:
            raise ValueError(
                "EpochPlan: shuffle must be False with an order of your own, got True."
                " It is kept as given."
            )
        beyond = order.ids[order.ids >= self.num_examples]
        if beyond.size:
            raise ValueError(
                f"EpochPlan: ids of an order must be in [0, {self.num_examples}), got"
                f" {list_some(beyond)}. For a part of a larger dataset, give num_examples; what a"
                " sharded sampler yields is sharded already."
            )

    def _check_called(self, order: CalledOrder) -> None:
        if order.num_examples != self.num_examples:
            raise ValueError(
                f"EpochPlan: num_examples must be those of its order, {order.num_examples}, got"
                f" {self.num_examples}. Make the plan with EpochPlan.from_order."
            )

    @property
    def length(self) -> int:
        """Places of the order: the number of examples, unless it is the user's."""
        return self.num_examples if isinstance(self.order, str) else self.order.length

    def describe(self, epoch: int) -> str:
        """What the order is, in an epoch, as a string that tells it from others."""
        return self.order if isinstance(self.order, str) else self.order.describe(epoch)

    def check_epoch(self, function: str, epoch: int) -> None:
        """Raises `ValueError` for an epoch that the order cannot have; `function` is who asks."""
        if self.order == "torch" and self.shuffle and self.seed + epoch >= 2**64:
            raise ValueError(
                f'{function}: seed + epoch must be below 2**64 with order="torch", got'
                f" {self.seed} + {epoch}. torch adds the two; take a smaller seed."
            )

    def look_up(
        self, epoch: int, places: Int64[np.ndarray, "*shape"]
    ) -> Int64[np.ndarray, "*shape"]:
        """The ids at some places, all of them below `length`."""
        if not isinstance(self.order, str):
            return self.order.take(epoch, places)
        if not self.shuffle:
            return places
        if self.order == "torch":
            return _make_torch_order(self.num_examples, self.seed + epoch)[places]
        return keyed_order(places, self.num_examples, seed=self.seed, epoch=epoch)


@lru_cache(maxsize=2)  # one for training, one for evaluation: an order is 8 bytes an example
def _make_torch_order(num_examples: int, seed: int) -> Int64[np.ndarray, " num_examples"]:
    order = torch_order(num_examples, seed)
    order.flags.writeable = False
    return order
