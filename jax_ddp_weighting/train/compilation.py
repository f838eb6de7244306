"""A step compiled once for a run: its state placed, pinned where it lies, and donated."""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding

from jax_ddp_weighting.data.batch import Batch
from jax_ddp_weighting.distributed import mesh as meshes
from jax_ddp_weighting.distributed.placement import check_tree_not_cut
from jax_ddp_weighting.distributed.under_way import hold_back
from jax_ddp_weighting.train.batch_layout import BatchLayout


class _Known(NamedTuple):
    """What has been looked at before: a compiled step, and the leaves that it is given."""

    jitted: Any
    carried: int  # how many of the leaves are carried: the first ones
    keys: tuple[int, ...]  # which leaves are typed keys


class CompiledStep:
    """`step(placement, carried, batch, *rest) -> (carried, report)`, compiled once for a run.

    The rule: what is carried is placed on the mesh when it first comes, comes back where it lay,
    and is donated. So every later call has the placement of the first, and compiles nothing. What
    is known to be good is not looked at again: `check(carried, batch, *rest)` is called for a new
    structure or placement before anything is placed, and for new shapes when they are traced.

    Args:
        step: what is compiled; first it is told the shardings of what is carried.
        mesh: where it runs.
        rows: where the rows of a batch are to lie on it; None where what comes in the batch's place
            is no batch, but data that lie whole on every device unless they lie on it otherwise.
        check: raises for what no step can be made of.
        donate: whether the step may write into the arrays that it was given.
    """

    def __init__(
        self,
        step: Callable[..., tuple[Any, Any]],
        mesh: Mesh,
        rows: BatchLayout | None,
        *,
        check: Callable[..., None],
        donate: bool = True,
    ) -> None:
        self._check, self._donate, self._mesh = check, donate, mesh
        self._replicated = meshes.replicated_sharding(mesh)
        self._rows = rows
        self._waits = mesh.size > 1 and mesh.devices.flat[0].platform == "cpu"
        # Two tables, because a step is compiled for where the state lies, but looked up for all
        # that it is given: a batch of another structure needs a check and a trace, not another
        # function.
        self._jitted: dict[Any, Any] = {}  # by structure and placement of what is carried
        self._known: dict[Any, _Known] = {}  # by those of all that a call is given

        def bind(placement: Any) -> Callable[..., tuple[Any, Any]]:
            @wraps(step)  # by its name it is found in logs of compilations and profiles
            def check_and_step(carried: Any, batch: Batch, *rest: Any) -> tuple[Any, Any]:
                # runs when traced only: what was placed before may still come with other shapes
                check(carried, batch, *rest)
                return step(placement, carried, batch, *rest)

            return check_and_step

        self.bind = bind
        """The step for one placement of what is carried, to be traced in a program around it."""

    def __call__(self, carried: Any, batch: Batch, *rest: Any) -> tuple[Any, Any]:
        """One step; what is carried must not be used again where it is donated."""
        ambient = jax.sharding.get_abstract_mesh()
        if not ambient.empty and ambient != self._mesh.abstract_mesh:
            # A mesh that was set for the program, of other axes or types than ours, would be taken
            # for the one that our arrays lie on.
            with jax.set_mesh(self._mesh):
                return self(carried, batch, *rest)
        leaves, structure = jax.tree.flatten((carried, batch, rest))
        known = self._known.get((structure, _shardings(leaves)))
        # An array that comes twice shows in no structure, so it is looked for on every call.
        if known is None or (self._donate and _shares_buffers(leaves, known)):
            self._check(carried, batch, *rest)
            jitted, carried, batch = self._place(carried, batch, rest)
        else:
            jitted = known.jitted
            if self._donate:
                _check_alive(leaves[: known.carried])
        carried, report = jitted(carried, batch, *rest)
        if self._waits:
            hold_back(jax.tree.leaves(report)[0])
        return carried, report

    def replicate(self, tree: Any) -> Any:
        """What is no row, on every device of the mesh; as it is, where it lies there already."""
        if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(tree)):
            return _place_shapes(tree, self._replicated)
        check_tree_not_cut(tree, "replicated", caller="train step")
        return meshes.place(tree, self._replicated)

    def lower(self, carried: Any, batch: Batch, *rest: Any) -> Any:
        """The step lowered for these arguments, arrays or their shapes; nothing is run."""
        carried = _place_shapes(carried, self._replicated)
        self._check(carried, batch, *rest)
        rows = self._rows
        batch = _place_shapes(batch, rows.shardings_of(batch) if rows else self._replicated)
        jitted, carried, batch = self._place(carried, batch, rest)
        return jitted.lower(carried, batch, *rest)

    def _place(self, carried: Any, batch: Batch, rest: Any) -> tuple[Any, Any, Batch]:
        leaves, structure = jax.tree.flatten(carried)
        if self._donate:
            _check_alive([leaf for leaf in leaves if _is_concrete(leaf)])
            leaves = _copy_repeated(leaves, jax.tree.leaves((batch, rest)))
        if not any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(batch)):
            if self._rows is None:
                batch = meshes.place(batch, self._replicated)
            else:
                batch = self._rows.place(batch)
        check_tree_not_cut(carried, "state", caller="train step")
        leaves = list(map(_strengthen_type, meshes.place(leaves, self._replicated)))
        carried, shardings = structure.unflatten(leaves), _shardings(leaves)
        if (structure, shardings) not in self._jitted:
            # Pinned, so that XLA cannot return it placed otherwise than it came: a second
            # compilation, and for sharded parameters a slow one-off reshuffle.
            placement = structure.unflatten(shardings)
            self._jitted[structure, shardings] = jax.jit(
                self.bind(placement),
                donate_argnums=(0,) if self._donate else (),
                out_shardings=(placement, None),
            )
        jitted = self._jitted[structure, shardings]
        everything, of_all = jax.tree.flatten((carried, batch, rest))
        if any(isinstance(leaf, Tracer) for leaf in everything):
            return jitted, carried, batch  # inside somebody's own jit or grad: nothing to look up
        keys = tuple(i for i, leaf in enumerate(everything) if _buffer_of(leaf) is not leaf)
        self._known[of_all, _shardings(everything)] = _Known(jitted, len(leaves), keys)
        return jitted, carried, batch


def _shardings(leaves: list[Any]) -> tuple[Any, ...]:
    # of a list, which is faster than of a generator: this runs on every step
    return tuple([getattr(leaf, "sharding", None) for leaf in leaves])


def _buffer_of(leaf: Any) -> Any:
    """The array that a typed key is made of, which `jax.random.key_data` hands out as it is."""
    return getattr(leaf, "_base_array", leaf)


def _shares_buffers(leaves: list[Any], known: _Known) -> bool:
    """Whether something that is to be donated is given a second time."""
    ids = list(map(id, leaves))
    for i in known.keys:
        ids[i] = id(_buffer_of(leaves[i]))
    carried = set(ids[: known.carried])
    return len(carried) < known.carried or not carried.isdisjoint(ids[known.carried :])


def _copy_repeated(leaves: list[Any], others: list[Any]) -> list[Any]:
    """The leaves, with a copy of each that comes again, since one buffer cannot be donated twice.

    Nor can it be read where it is donated: what is among `others` too is copied as well.
    """
    seen = {id(_buffer_of(leaf)) for leaf in others}
    distinct = []
    for leaf in leaves:
        again = isinstance(leaf, jax.Array) and id(_buffer_of(leaf)) in seen
        distinct.append(jnp.copy(leaf) if again else leaf)
        seen.add(id(_buffer_of(leaf)))
    return distinct


def _is_concrete(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer)


def _check_alive(leaves: Sequence[jax.Array]) -> None:
    # On two or more CPU devices JAX does not find out by itself, and the process dies.
    if True in [leaf.is_deleted() for leaf in leaves]:  # a list is faster: this runs on every step
        raise ValueError(
            "train step: state must be one that no step was given before, got one that was given "
            "away. Use the state that the step returned, or make the step with donate=False."
        )


def _strengthen_type(leaf: Any) -> Any:
    """The leaf, if its type is weak made as strong as the step returns it: that compiles once."""
    weak = getattr(leaf, "weak_type", False)
    return jax.lax.convert_element_type(leaf, leaf.dtype) if weak else leaf


def _place_shapes(tree: Any, sharding: Any) -> Any:
    """The tree, in which each shape that lies nowhere is to lie as arrays will be placed."""

    def place(leaf: Any, wanted: NamedSharding) -> Any:
        if not isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding or wanted)

    if isinstance(sharding, NamedSharding):
        return jax.tree.map(lambda leaf: place(leaf, sharding), tree)
    return jax.tree.map(place, tree, sharding)
