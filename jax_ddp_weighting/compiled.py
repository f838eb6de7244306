"""A step compiled once for a run: its state placed, pinned where it lies, and donated."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jax_ddp_weighting import mesh as meshes
from jax_ddp_weighting.batch import Batch
from jax_ddp_weighting.layout import placed_batch
from jax_ddp_weighting.mesh import AxisName

Step = Callable[..., tuple[Any, Any]]


def compiled_once(step: Step, mesh: Mesh, axis_name: AxisName) -> Step:
    """`step(carried, batch, *rest) -> (carried, report)`, compiled once for a run.

    The rule: what is carried is placed on the mesh when it first comes, comes back where it lay,
    and is donated. So every later call has the placement of the first, and compiles nothing.
    """
    replicated = meshes.replicated_sharding(mesh)
    rows = meshes.row_sharding(mesh, axis_name)
    runs: dict[Any, Step] = {}  # by structure and placement of what is carried

    def run(carried: Any, batch: Batch, *rest: Any) -> tuple[Any, Any]:
        batch = placed_batch(batch, rows, caller="train step")
        leaves, structure = jax.tree.flatten(carried)
        key = structure, _shardings(leaves)
        if key not in runs or len(set(map(id, leaves))) < len(leaves):
            leaves = meshes.placed(list(map(_strong, _each_once(leaves))), replicated)
            carried, key = structure.unflatten(leaves), (structure, _shardings(leaves))
            if key not in runs:
                # Pinned, so that XLA cannot return it placed otherwise than it came: a second
                # compilation, and for sharded parameters a slow one-off reshuffle.
                placement = structure.unflatten(key[1])
                runs[key] = jax.jit(step, donate_argnums=0, out_shardings=(placement, None))
        return runs[key](carried, batch, *rest)

    return run


def _shardings(leaves: list[Any]) -> tuple[Any, ...]:
    # of a list, which is faster than of a generator: this runs on every step
    return tuple([getattr(leaf, "sharding", None) for leaf in leaves])


def _strong(leaf: Any) -> Any:
    """The leaf, if its type is weak made as strong as the step returns it: that compiles once."""
    weak = getattr(leaf, "weak_type", False)
    return jax.lax.convert_element_type(leaf, leaf.dtype) if weak else leaf


def _each_once(leaves: list[Any]) -> list[Any]:
    """The leaves, an array that comes twice copied, since one buffer cannot be donated twice."""
    seen: set[int] = set()
    once = []
    for leaf in leaves:
        again = isinstance(leaf, jax.Array) and id(leaf) in seen
        once.append(jnp.copy(leaf) if again else leaf)
        seen.add(id(leaf))
    return once
