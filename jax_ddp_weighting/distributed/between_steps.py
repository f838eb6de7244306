"""What is computed between the steps: each operation one program, and one under way."""

from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jax_ddp_weighting.distributed.under_way import wait_for_all

T = TypeVar("T")


def in_one_program(compute: Callable[..., T], *arguments: Any) -> T:
    """What `compute` makes of arrays; inside somebody's own transformation, a part of that.

    Outside of any, one program does all of it: a dozen of tiny ones for each addition would cost a
    launch each, and on faked CPU devices `sum(reports)` would starve the steps that it waits for.

    Args:
        compute: a function of a module, of arrays and pytrees of them.
        *arguments: what it is given.
    """
    leaves, structure = jax.tree.flatten(arguments)
    if any(isinstance(leaf, Tracer) for leaf in leaves):
        return compute(*arguments)
    wait_for_all(leaves)
    # `jit` would take a masked array for what lies under its mask, where `asarray` refuses it
    arrays = [jnp.asarray(leaf) if isinstance(leaf, np.ndarray) else leaf for leaf in leaves]
    return _compiled(compute)(*structure.unflatten(arrays))


@cache
def _compiled(compute: Callable[..., Any]) -> Any:
    return jax.jit(compute)
