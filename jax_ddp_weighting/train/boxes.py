"""flax's partitioning boxes inside a mapped function, where they cannot name the mapped axes."""

from typing import Any

import jax
from flax import linen as nn
from flax.linen.spmd import logical_to_mesh_axes
from jaxtyping import PyTree

from jax_ddp_weighting.distributed import mesh
from jax_ddp_weighting.distributed.mesh import AxisName


def free_boxes(tree: PyTree, axis_name: AxisName | None) -> PyTree:
    """The tree as a function over the axis may take its boxes apart.

    A box, as `nn.with_partitioning` and `nn.with_logical_partitioning` make them, constrains its
    value to lie as it is named wherever it is opened. Inside a function that maps an axis, each
    rank has the value whole along that axis, so this name, and what rules turn into it, is left
    out. In the global view the tree is the same.
    """
    if axis_name is None:
        return tree
    mapped = frozenset(mesh.names_of(axis_name))

    def free(node: Any) -> Any:
        if not _is_box(node):
            return node
        # a mesh of its own would be the whole one, with the mapped axes free
        return node.replace(
            names=tuple(_kept(name, node, mapped) for name in node.names), mesh=None
        )

    return jax.tree.map(free, tree, is_leaf=_is_box)


def box_as(tree: PyTree, model: PyTree) -> PyTree:
    """The tree with the boxes of `model`, if it is one of `free_boxes(model)`; else as it is."""
    boxed = [node for node in jax.tree.leaves(model, is_leaf=_is_box) if _is_box(node)]
    own = [node for node in jax.tree.leaves(tree, is_leaf=_is_box) if _is_box(node)]
    if not boxed or len(boxed) != len(own):
        return tree
    boxes = iter(boxed)

    def box(node: Any) -> Any:
        return next(boxes).replace(value=node.value) if _is_box(node) else node

    return jax.tree.map(box, tree, is_leaf=_is_box)


def _is_box(node: Any) -> bool:
    return isinstance(node, nn.Partitioned)


def _kept(name: Any, box: nn.Partitioned, mapped: frozenset[str]) -> Any:
    """The name, but for the mapped axes in it."""
    if isinstance(box, nn.LogicallyPartitioned):
        spec = logical_to_mesh_axes((name,), rules=box.rules)
        axes = () if spec is None else _axes_in(spec[0])
        return None if mapped.intersection(axes) else name
    axes = _axes_in(name)
    if not mapped.intersection(axes):
        return name
    kept = tuple(axis for axis in axes if axis not in mapped)
    return kept[0] if len(kept) == 1 else kept or None


def _axes_in(entry: Any) -> tuple[str, ...]:
    if isinstance(entry, str):
        return (entry,)
    return tuple(entry) if isinstance(entry, tuple | list) else ()
