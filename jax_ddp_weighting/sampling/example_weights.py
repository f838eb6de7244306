"""A weight for each example of a data set, carried by a plan to its slots."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Float32

from jax_ddp_weighting._arguments import check_weights, read_numbers
from jax_ddp_weighting.sampling.hashing import derive_digest


@dataclass(frozen=True, eq=False, repr=False)
class ExampleWeights:
    """Weights by id: two are equal where their values are.

    Args:
        values: float32 ``[num_examples]``, which cannot be written.
    """

    values: Float32[np.ndarray, " num_examples"]
    digest: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "digest", derive_digest("weights", self.values.astype("<f4")))

    @classmethod
    def of(cls, weights: Any, num_examples: int, argument: str) -> "ExampleWeights":
        """Weights of one's own, checked, in float32: those of a plan, as they are.

        Raises:
            TypeError: they are no numbers.
            ValueError: there is not one for each example; or one is negative, NaN, infinite, or
                would be so, or 0, in float32.
        """
        values = read_numbers(argument, weights.values if isinstance(weights, cls) else weights)
        if values.shape != (num_examples,):
            raise ValueError(
                f"{argument} must be one for each example, [{num_examples}], got shape"
                f" {values.shape}. They are by id, not by place in an order."
            )
        if isinstance(weights, cls):
            return weights
        check_weights(argument, values, "An example of weight 0 counts for nothing.", first=0)
        with np.errstate(over="ignore", under="ignore"):
            narrow = values.astype(np.float32)
        lost = np.flatnonzero(~np.isfinite(narrow) | ((narrow == 0) & (values != 0)))
        if lost.size:
            raise ValueError(
                f"{argument} must stay finite, and above 0, in float32, got {values[lost[0]]} at"
                f" row {lost[0]}. Scale them."
            )
        narrow.flags.writeable = False
        return cls(narrow)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ExampleWeights) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.values, dtype, copy=copy)

    def __repr__(self) -> str:
        return f"<weights of {len(self.values)} examples>"
