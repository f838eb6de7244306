"""Parameters that are sharded over mapped axes: whose gradient is summed over which of them.

Pulled back from the totals of all ranks, a collective turns into its transpose: that of an
`all_gather` is a reduce-scatter, so the gradient of a parameter that the loss gathers arrives
summed over the ranks, and cut to the rank's own shard. It is then summed over the other axes alone.
Which axes those are only the user knows: a replicated parameter that was made varying by `pcast`
has the type of a sharded one, and without the varying-axes check no type tells anything.

The gradient is that of the sum of all ranks' totals. Over an axis that no rows lie over, the ranks
compute the same total: in a checked `shard_map` its type says so, and JAX counts it once; elsewhere
it is counted once for each of them, in the gradient of all that is upstream of a collective.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, PyTree

from jax_ddp_weighting.distributed import mesh
from jax_ddp_weighting.distributed.collectives import Collective, Program, trace
from jax_ddp_weighting.distributed.mesh import AxisName

ParamSpecs = PyTree[Any]
"""`PartitionSpec`s, in the structure of the parameters or a prefix of it."""

# Collectives that hand parts of one rank's operand to another: nobody does that with a value that
# is the same on every rank. (A psum of such a value is only scaled, and may be meant.)
_MOVES = ("all_gather", "all_to_all", "ppermute", "reduce_scatter", "psum_scatter")


class Layout(NamedTuple):
    """Over which axes the gradient of each parameter is still to be summed.

    Attributes:
        axes: for each leaf the axes, those over which it is not sharded.
        copies: how many ranks hold the same rows and total, where types do not tell it: by so much
            the sum is too large.
    """

    axes: tuple[tuple[str, ...], ...]
    copies: int

    def sum_gradients(self, gradients: PyTree) -> PyTree:
        """The gradients, each summed once; one all-reduce for all that share their axes."""
        leaves, structure = jax.tree.flatten(gradients)
        for axes in dict.fromkeys(self.axes):
            places = [i for i, own in enumerate(self.axes) if own == axes]
            summed = [leaves[i] for i in places]
            if axes:
                summed = lax.psum(summed, axes)
            for i, leaf in zip(places, summed, strict=True):
                leaves[i] = leaf if self.copies == 1 else leaf / self.copies
        return structure.unflatten(leaves)


def gather_whole(params: PyTree, specs: ParamSpecs) -> PyTree:
    """The parameters whole, of the ranks' shards."""

    def gather(leaf: Array, spec: PartitionSpec) -> Array:
        for dim, names in _split_dims(spec):
            leaf = lax.all_gather(leaf, names, axis=dim, tiled=True)
        return leaf

    return _map_with_specs(gather, params, specs)


def scatter_sum(gradients: PyTree, specs: ParamSpecs) -> PyTree:
    """Of the ranks' gradients of whole parameters their sum over the ranks that share a parameter.

    Each rank has it of its own shard alone.
    """

    def scatter(leaf: Array, spec: PartitionSpec) -> Array:
        for dim, names in _split_dims(spec):
            leaf = lax.psum_scatter(leaf, names, scatter_dimension=dim, tiled=True)
        return leaf

    return _map_with_specs(scatter, gradients, specs)


def type_as_shared(params: PyTree, specs: ParamSpecs) -> PyTree:
    """Whole parameters, typed as the same on every rank, as they are.

    It costs an all-reduce where it is used, which is for states alone that are made of parameters.
    """

    def share(leaf: Array, spec: PartitionSpec) -> Array:
        names = tuple(name for _, each in _split_dims(spec) for name in each)
        return lax.pmax(leaf, names) if names else leaf

    return _map_with_specs(share, params, specs)


def _split_dims(spec: PartitionSpec) -> list[tuple[int, tuple[str, ...]]]:
    entries = [(dim, mesh.names_of(entry)) for dim, entry in enumerate(spec)]
    return [(dim, names) for dim, names in entries if names]


def _map_with_specs(
    fn: Callable[[Array, PartitionSpec], Array], tree: PyTree, specs: ParamSpecs
) -> PyTree:
    leaves, structure = jax.tree.flatten(tree)
    spread = jax.tree.leaves(jax.tree.broadcast(specs, tree, is_leaf=_is_spec), is_leaf=_is_spec)
    return structure.unflatten(list(map(fn, leaves, spread)))


def sharded_axes(
    specs: ParamSpecs | None, params: PyTree, *, caller: str, noun: str = "params"
) -> list[frozenset[str]]:
    """For each leaf of the parameters the axes that its spec names; none where there are no specs.

    Raises:
        TypeError: a spec is no `PartitionSpec`.
        ValueError: the specs have another structure, or more entries than a parameter has
            dimensions, or name an axis twice.
    """
    paths, structure = jax.tree_util.tree_flatten_with_path(params)
    if specs is None:
        return [frozenset()] * len(paths)
    for spec in jax.tree.leaves(specs, is_leaf=_is_spec):
        if not isinstance(spec, PartitionSpec):
            remedy = "P() is for what is replicated, P('data') for what is sharded over data."
            raise TypeError(
                f"{caller}: param_specs must be PartitionSpecs, got {type(spec).__name__}. "
                f"{'Take its .spec.' if isinstance(spec, NamedSharding) else remedy}"
            )
    try:
        spread = jax.tree.leaves(
            jax.tree.broadcast(specs, params, is_leaf=_is_spec), is_leaf=_is_spec
        )
    except ValueError as error:  # JAX's own words say where they differ
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"{caller}: param_specs must have the structure of {noun}, or of its first levels, got "
            f"{jax.tree.structure(specs, is_leaf=_is_spec)} for {structure}. {reason}"
        ) from None
    pairs = zip(paths, spread, strict=True)
    return [_check_spec(path, leaf, spec, caller, noun) for (path, leaf), spec in pairs]


def _is_spec(node: Any) -> bool:
    return isinstance(node, PartitionSpec)


def _check_spec(
    path: Any, leaf: Any, spec: PartitionSpec, caller: str, noun: str
) -> frozenset[str]:
    at = f"{spec} at {noun}{jax.tree_util.keystr(path)}"
    names: list[str] = []
    for entry in spec:
        each = entry if isinstance(entry, tuple) else () if entry is None else (entry,)
        if not all(isinstance(name, str) for name in each):
            raise TypeError(
                f"{caller}: param_specs must say of every dimension which axes it is sharded over, "
                f"got {at}. Give names of axes, or None."
            )
        names.extend(each)
    if len(set(names)) < len(names):
        raise ValueError(
            f"{caller}: param_specs must name each axis once, got {at}. A parameter has one "
            "dimension that is sharded over an axis."
        )
    if len(spec) > leaf.ndim:
        raise ValueError(
            f"{caller}: param_specs must have at most one entry for each dimension, got {at}, of "
            f"shape {leaf.shape}. P() is for what is replicated."
        )
    return frozenset(names)


def find_layout(
    specs: ParamSpecs | None,
    axis_name: AxisName | None,
    params: PyTree,
    totals_of: Callable[..., PyTree],
    *others: PyTree,
    varied: PyTree,
    caller: str,
) -> Layout:
    """How gradients are to be summed, of what the user, types and the loss function say.

    Args:
        specs: the user's, or None.
        axis_name: the axes over which rows lie.
        params: parameters as they were given.
        totals_of: `totals_of(params, *others)`, the totals to pull back.
        others: what else they are computed from.
        varied: the parameters, local to the rank, that it is called with.
        caller: who speaks in errors.
    """
    own = sharded_axes(specs, params, caller=caller)
    named, paths = mesh.names_of(axis_name), name_leaves(params, "params")
    check_types(own, named, params, paths, caller=caller)
    around = dict.fromkeys([*named, *mesh.manual_axes(), *sorted(frozenset().union(*own))])
    untyped = any(mesh.is_mapped(axis) and _has_no_types(axis) for axis in around)
    alone = _axes_of_all(params) - set(named)
    if not (untyped or alone):  # nearly always: the loss is not traced once more
        return Layout(tuple(tuple(a for a in named if a not in each) for each in own), 1)

    varying: set[str] = set()

    def watch(params: PyTree, *others: PyTree) -> PyTree:
        totals = totals_of(params, *others)
        varying.update(*map(mesh.varying_axes, jax.tree.leaves(totals)))
        return totals

    program = trace(watch, varied, *others)
    used, _ = program.find_collectives(own)
    _check_alone(used, alone & varying, named, caller)
    _check_moves(used, own, paths, caller)
    over = _find_copies(used, named, specs, caller)
    _check_copies(program, own, over, named, caller)
    copies = math.prod(mesh.axis_size(axis, caller=caller) for axis in over)
    every = (*named, *over)
    return Layout(tuple(tuple(a for a in every if a not in each) for each in own), copies)


def name_leaves(tree: PyTree, noun: str) -> list[str]:
    """What each leaf is called in an error."""
    found = jax.tree_util.tree_flatten_with_path(tree)[0]
    return [f"{noun}{jax.tree_util.keystr(path)}" for path, _ in found]


def _axes_of_all(params: PyTree) -> frozenset[str]:
    """The axes over which every parameter varies by its type, as in an ensemble."""
    leaves = jax.tree.leaves(params)
    return frozenset.intersection(*map(mesh.varying_axes, leaves)) if leaves else frozenset()


def _check_alone(
    used: Sequence[Collective], alone: frozenset[str], named: tuple[str, ...], caller: str
) -> None:
    """Raises `ValueError` for what looks like an ensemble, and is none: its members talk."""
    for each in used:
        axes = each.axes & alone
        if axes and each.leaves:
            every = (*named, *sorted(axes))
            raise ValueError(
                f"{caller}: axis_name must name every mapped axis that rows lie over, got "
                f"{named or None} for a total that varies over {tuple(sorted(axes))} too, which "
                f"loss_fn communicates over by {each.name}. Pass axis_name="
                f"{every[0] if len(every) == 1 else every!r}, and param_specs= for what is sharded."
            )


def check_types(
    own: Sequence[frozenset[str]],
    named: tuple[str, ...],
    leaves: PyTree,
    paths: Sequence[str],
    *,
    caller: str,
) -> None:
    """Raises `ValueError` where types, or what is mapped, contradict what the specs say.

    Args:
        own: for each leaf the axes that its spec names.
        named: the axes over which rows lie; where there are none, as in the global view, specs may
            name axes that are not mapped, and say nothing then.
        leaves: parameters, or gradients of the type of theirs.
        paths: the names of the leaves.
        caller: who speaks in errors.
    """
    for path, leaf, axes in zip(paths, jax.tree.leaves(leaves), own, strict=True):
        varying = mesh.varying_axes(leaf)
        for axis in sorted(axes):
            if not mesh.is_mapped(axis):
                if not named:
                    continue
                raise ValueError(
                    f"{caller}: param_specs must name axes that are mapped here, got {axis!r} at "
                    f"{path}. Leave out of the spec the axes that a partial shard_map does not map."
                )
            if mesh.is_checked(axis) and axis not in varying:
                raise ValueError(
                    f"{caller}: param_specs must name axes over which the parameter varies, got "
                    f"{axis!r} at {path}, which is the same on every rank of it. Give shard_map "
                    "the same specs as in_specs."
                )
        for axis in named:
            if axis in varying and axis not in axes:
                raise ValueError(
                    f"{caller}: param_specs must name every axis that a parameter is sharded over, "
                    f"got none with {axis!r} at {path}, whose type varies over it. If it is a "
                    f"shard, pass param_specs=, with {axis!r} in its PartitionSpec: its gradient "
                    "is not summed over that axis again. If it is replicated and was made varying "
                    "by pcast, which gives the same type, pass it as it was before the pcast."
                )


def _has_no_types(axis: str) -> bool:
    return not mesh.is_checked(axis)


def _check_moves(
    used: Sequence[Collective],
    own: Sequence[frozenset[str]],
    paths: Sequence[str],
    caller: str,
) -> None:
    """Raises `ValueError` for a parameter that is gathered over an axis its spec does not name."""
    for each in used:
        if each.others or not each.name.startswith(_MOVES):
            continue
        for i in sorted(each.leaves):
            for axis in filter(_has_no_types, sorted(each.axes - own[i])):
                raise ValueError(
                    f"{caller}: param_specs must name every axis that a parameter is sharded over, "
                    f"got none with {axis!r} at {paths[i]}, which loss_fn hands from rank to rank "
                    f"of it by {each.name}. Pass param_specs=, with {axis!r} in its PartitionSpec, "
                    "or leave the collective out where the parameter is the same on every rank."
                )


def _find_copies(
    used: Sequence[Collective], named: tuple[str, ...], specs: ParamSpecs | None, caller: str
) -> tuple[str, ...]:
    """The axes that the loss communicates over, and over which no rows lie."""
    over: dict[str, None] = {}
    for each in used:
        if not each.leaves:
            continue  # no gradient flows through it
        over.update(dict.fromkeys(filter(_has_no_types, sorted(each.axes - set(named)))))
    if over and specs is None:
        every = (*named, *over)
        raise ValueError(
            f"{caller}: param_specs must be given where loss_fn communicates over an axis that is "
            f"not in axis_name and types do not tell what varies, got none and {tuple(over)}. Pass "
            f"param_specs=, P() for what is replicated, if the total is the same on every rank of "
            f"the axis; and axis_name={every!r} if rows or tokens are spread over it too."
        )
    return tuple(over)


def _check_copies(
    program: Program,
    own: Sequence[frozenset[str]],
    over: tuple[str, ...],
    named: tuple[str, ...],
    caller: str,
) -> None:
    """Raises `ValueError` where the total differs over an axis that no rows are said to lie over.

    Where types do not tell it, the loss does: what no parameter makes different from rank to rank,
    and is communicated all the same, must come from rows that are.
    """
    used, _ = program.find_collectives(own)
    spread = [each.axes - each.varying for each in used if each.others]
    _, varying = program.find_collectives(own, frozenset(over) & frozenset().union(*spread))
    wrong = tuple(axis for axis in over if axis in varying)
    if wrong:
        every = (*named, *wrong)
        raise ValueError(
            f"{caller}: axis_name must name every mapped axis that rows or tokens are spread over, "
            f"got {named or None}, and loss_fn returns a total that may differ from rank to rank "
            f"of {wrong}. Pass axis_name={every!r}, or sum the total over the axis."
        )
