"""A step compiled once for a run: its state placed, pinned where it lies, and donated."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jax_ddp_weighting.data.batch import Batch, place_batch
from jax_ddp_weighting.distributed import mesh as meshes
from jax_ddp_weighting.distributed.mesh import AxisName

Step = Callable[..., tuple[Any, Any]]


def compile_once(
    step: Step, mesh: Mesh, axis_name: AxisName, *, check: Callable[..., None]
) -> Step:
    """`step(carried, batch, *rest) -> (carried, report)`, compiled once for a run.

    The rule: what is carried is placed on the mesh when it first comes, comes back where it lay,
    and is donated. So every later call has the placement of the first, and compiles nothing. What
    is known to be good is not looked at again: `check(carried, batch, *rest)` is called for a new
    structure or placement before anything is placed, and for new shapes when they are traced.
    """
    replicated = meshes.replicated_sharding(mesh)
    rows = meshes.row_sharding(mesh, axis_name)
    # Two tables, because a step is compiled for where the state lies, but looked up for all that it
    # is given: a batch of another structure needs a check and a trace, not another function.
    jitted: dict[Any, Step] = {}  # by structure and placement of what is carried
    known: dict[Any, tuple[Step, int]] = {}  # by those of all that a call is given

    @wraps(step)  # by its name it is found in logs of compilations and profiles
    def check_and_step(carried: Any, batch: Batch, *rest: Any) -> tuple[Any, Any]:
        # runs when traced only: what has been placed before may still come with other shapes
        check(carried, batch, *rest)
        return step(carried, batch, *rest)

    def run(carried: Any, batch: Batch, *rest: Any) -> tuple[Any, Any]:
        leaves, structure = jax.tree.flatten((carried, batch, rest))
        found, count = known.get((structure, _shardings(leaves)), (None, 0))
        # An array that comes twice shows in no structure, so it is looked for on every call.
        if found is None or len(set(map(id, leaves[:count]))) < count:
            check(carried, batch, *rest)
            found, carried, batch = place(carried, batch, rest)
        return found(carried, batch, *rest)

    def place(carried: Any, batch: Batch, rest: Any) -> tuple[Step, Any, Batch]:
        batch = place_batch(batch, rows, caller="train step")
        leaves, structure = jax.tree.flatten(carried)
        leaves = meshes.place(list(map(_strengthen_type, _copy_repeated(leaves))), replicated)
        carried, shardings = structure.unflatten(leaves), _shardings(leaves)
        if (structure, shardings) not in jitted:
            # Pinned, so that XLA cannot return it placed otherwise than it came: a second
            # compilation, and for sharded parameters a slow one-off reshuffle.
            placement = structure.unflatten(shardings)
            jitted[structure, shardings] = jax.jit(
                check_and_step, donate_argnums=0, out_shardings=(placement, None)
            )
        found = jitted[structure, shardings]
        everything, of_all = jax.tree.flatten((carried, batch, rest))
        known[of_all, _shardings(everything)] = found, len(leaves)
        return found, carried, batch

    return run


def _shardings(leaves: list[Any]) -> tuple[Any, ...]:
    # of a list, which is faster than of a generator: this runs on every step
    return tuple([getattr(leaf, "sharding", None) for leaf in leaves])


def _strengthen_type(leaf: Any) -> Any:
    """The leaf, if its type is weak made as strong as the step returns it: that compiles once."""
    weak = getattr(leaf, "weak_type", False)
    return jax.lax.convert_element_type(leaf, leaf.dtype) if weak else leaf


def _copy_repeated(leaves: list[Any]) -> list[Any]:
    """The leaves, an array that comes twice copied, since one buffer cannot be donated twice."""
    seen: set[int] = set()
    distinct = []
    for leaf in leaves:
        again = isinstance(leaf, jax.Array) and id(leaf) in seen
        distinct.append(jnp.copy(leaf) if again else leaf)
        seen.add(id(leaf))
    return distinct
