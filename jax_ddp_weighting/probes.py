"""Weights so uneven that every convention counts their tokens differently."""

import numpy as np


def probes(ranks: int, microbatches: int) -> dict[str, np.ndarray]:
    """Weights on which the conventions differ, by what is particular about them.

    All are dyadic fractions, exact in float32. The number of tokens is a prime that divides neither
    ranks nor microbatches, so that counting slots looks like no other factor.
    """
    parts = ranks * microbatches
    tokens = next(prime for prime in (7, 11, 13, 17, 19, 23, 29, 31, 37) if parts % prime)
    part = np.arange(parts).reshape(ranks, microbatches, 1)
    place = (np.arange(tokens) + part) % tokens
    full = (place < 1 + (3 * part + 2) % tokens).astype(float)

    rank, step = np.indices((ranks, microbatches))
    scattered = full * ((rank + step) % 2 == 0)[..., None]
    busy = (rank < max(ranks - 1, 1)) & (step < max(microbatches - 1, 1))
    idle = full * busy[..., None]

    heavy = full * np.array([0.5, 1.5, 3.0])[(place + part) % 3]
    light = (place == 0) * (0.25 * (1 + part // 2 % 3))  # less than 1 in the whole microbatch
    fractional = np.where(part % 2 == 1, light, heavy)
    little = fractional / 2.0 ** np.ceil(np.log2(fractional.sum()) + 1)

    found: dict[str, np.ndarray] = {"every microbatch holds some weight": full}
    if ranks > 1 and microbatches > 1:
        found["some microbatches are empty"] = scattered
    if parts > 1:
        found["a whole rank or microbatch is empty"] = idle
    found["weights are fractions"] = fractional
    found["the step holds less weight than 1"] = little
    return found
