"""What every plan deals out: ids and weights, in whatever shape they were asked for."""

from dataclasses import dataclass
from typing import Any

from jaxtyping import Integer, Real


@dataclass(frozen=True)
class Slots:
    """Some slots of an epoch: which example sits in each, and how much it counts.

    Args:
        ids: int64 example ids, any shape. Of a `DevicePlan` int32, on the device.
        weights: int32 of the same shape: 1 where the slot counts, 0 where it is padding. Integers,
            so that a sum of them counts exactly. float32 where the plan has weights of its own.
        length: what every row of a step is padded to, where the plan has a say in it.

    Example:
        >>> slots = EpochPlan(5, num_replicas=2, batch_size=1, shuffle=False).slots(0, rank=1)
        >>> slots.ids.tolist(), slots.weights.tolist()
        ([1, 3, 0], [1, 1, 0])
    """

    ids: Integer[Any, "*shape"]
    weights: Real[Any, "*shape"]
    length: int | None = None
