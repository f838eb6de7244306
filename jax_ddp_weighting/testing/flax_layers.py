"""Parameters of flax, linen's or nnx's, read as layers."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import DictKey, FlattenedIndexKey, GetAttrKey, SequenceKey
from jaxtyping import PyTree

from jax_ddp_weighting.testing.layers import FlaxLayer, Leaf, Path

_STATISTICS = ("mean", "var")
# the children of LSTM, GRU and simple cells; nnx spells Python's own words `if_` and `in_`
_CELLS = [{f"{side}{gate}" for side in "ih" for gate in gates} for gates in ("ifgo", "rzn", " ")]
_CELLS = [{part.strip() for part in parts} for parts in _CELLS] + [{"dense_i", "dense_h"}]


@dataclass(frozen=True)
class FlaxTree:
    """A tree of parameters taken apart.

    Attributes:
        structure: how to put it together again.
        names: every leaf's path, joined by slashes.
        shapes: every leaf's shape.
        kept: leaves that are no parameters, such as keys, by their place.
        trained: the places of the leaves that a gradient has, in its own order.
        trained_structure: the structure of a gradient.
        layers: the leaves, as layers.
    """

    structure: Any
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    kept: Mapping[int, Any]
    trained: tuple[int, ...]
    trained_structure: Any
    layers: tuple[FlaxLayer, ...]


def path_of(keys: tuple[Any, ...]) -> Path:
    """A leaf's path in words; the boxes that hold values are no part of it."""
    words = []
    for place, key in enumerate(keys):
        match key:
            case DictKey(key=word) | FlattenedIndexKey(key=word) | SequenceKey(idx=word):
                words.append(str(word))
            case GetAttrKey(name="value") if place == len(keys) - 1:
                pass
            case GetAttrKey(name=word):
                words.append(word)
            case _:
                words.append(str(key))
    return tuple(words)


def has_collections(tree: Any) -> bool:
    """Whether it is a dict of linen's collections rather than the parameters alone."""
    return isinstance(tree, Mapping) and isinstance(tree.get("params"), Mapping)


def plain_tree(params: PyTree) -> tuple[PyTree, dict[Path, str]]:
    """The tree of an nnx model without its random streams, and what is known of its modules."""
    nnx = sys.modules.get("flax.nnx")
    types: dict[Path, str] = {}
    if nnx is None:
        return params, types
    if isinstance(params, nnx.Module):
        for path, module in nnx.iter_modules(params):
            if isinstance(module, nnx.Conv):
                types[tuple(map(str, path))] = "conv"
            elif isinstance(module, nnx.ConvTranspose):
                kind = "conv" if module.transpose_kernel else "conv_transpose"
                types[tuple(map(str, path))] = kind
        params = nnx.state(params)
    if isinstance(params, nnx.State):
        params = nnx.filter_state(params, nnx.Not(nnx.RngState))
    return params, types


def read_flax_tree(params: PyTree) -> FlaxTree:
    """The tree taken apart.

    Args:
        params: linen's parameters, or variables with their collections; an `nnx.State`, or an nnx
            model itself, whose modules then say what they are.
    """
    params, types = plain_tree(params)
    collections = has_collections(params)
    found, structure = jax.tree_util.tree_flatten_with_path(params)
    names, shapes, kept, leaves = [], [], {}, []
    for index, (keys, value) in enumerate(found):
        path = path_of(keys)
        names.append("/".join(path))
        shapes.append(tuple(np.shape(value)))
        if hasattr(value, "dtype") and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            kept[index] = value
            continue
        own = path[1:] if collections else path
        statistic = (collections and path[0] != "params") or not _is_param(params, keys)
        leaves.append((own, Leaf(names[-1], index, shapes[-1], not statistic)))
    layers = _read_layers(leaves, types)
    trained = {leaf.index for layer in layers for leaf in layer.leaves.values() if leaf.trained}
    pruned = _prune(params, trained) if len(trained) < len(found) else params
    return FlaxTree(
        structure,
        tuple(names),
        tuple(shapes),
        kept,
        tuple(sorted(trained)),
        jax.tree.structure(pruned),
        tuple(layers),
    )


def _is_param(params: PyTree, keys: tuple[Any, ...]) -> bool:
    """Whether a leaf of an nnx state is a parameter, as the kind of variable says."""
    nnx = sys.modules.get("flax.nnx")
    if nnx is None or not isinstance(params, nnx.State):
        return True
    value = params
    for key in keys:
        if isinstance(value, nnx.Variable):
            return isinstance(value, nnx.Param)
        value = value[key.key] if isinstance(key, DictKey | FlattenedIndexKey) else value[key.idx]
    return not isinstance(value, nnx.Variable) or isinstance(value, nnx.Param)


def _prune(params: PyTree, trained: set[int]) -> PyTree:
    """The tree without the leaves that have no gradient."""
    places = iter(range(len(jax.tree.leaves(params))))
    nnx = sys.modules.get("flax.nnx")
    if nnx is not None and isinstance(params, nnx.State):
        return nnx.filter_state(params, nnx.Param)
    if not isinstance(params, Mapping):
        return params
    numbered = jax.tree.map(lambda _: next(places), params)

    def without(tree: Any) -> Any:
        if not isinstance(tree, Mapping):
            return tree if set(jax.tree.leaves(tree)) & trained else None
        kept = {key: without(value) for key, value in tree.items()}
        return {key: value for key, value in kept.items() if value is not None and value != {}}

    return without(numbered)


def _read_layers(leaves: list[tuple[Path, Leaf]], types: Mapping[Path, str]) -> list[FlaxLayer]:
    modules: dict[Path, dict[str, Leaf]] = {}
    for path, leaf in leaves:
        modules.setdefault(path[:-1], {})[path[-1] if path else ""] = leaf
    cells = _find_cells(modules)
    layers = []
    for path, parts in modules.items():
        cell = path[:-1] if path else ()
        if path and cell in cells:
            continue
        if path in cells and not parts:
            continue
        layers += _read_module(path, parts, types.get(path, ""))
    for path, parts in cells.items():
        layers.append(FlaxLayer(name_cell(path), "cell", parts))
    return layers


_DIRECTIONS = {"forward_rnn": "forward", "backward_rnn": "backward"}


def name_cell(path: Path) -> Path:
    """A cell's path as its layer bears it: without `cell`, and directions in torch's words."""
    own = path[:-1] if path and path[-1] == "cell" else path
    return tuple(_DIRECTIONS.get(word, word) for word in own)


def _find_cells(modules: Mapping[Path, Mapping[str, Leaf]]) -> dict[Path, dict[str, Leaf]]:
    """Recurrent cells: modules whose children are gates, for the input and for the state."""
    children: dict[Path, dict[str, Mapping[str, Leaf]]] = {}
    for path, parts in modules.items():
        if path:
            children.setdefault(path[:-1], {})[path[-1]] = parts
    found = {}
    for path, gates in children.items():
        known = {gate.rstrip("_") for gate in gates} in _CELLS
        if known and all("kernel" in each for each in gates.values()):
            found[path] = {
                f"{gate.rstrip('_')}/{part}": leaf
                for gate, parts in gates.items()
                for part, leaf in parts.items()
            }
    return found


def _read_module(path: Path, parts: Mapping[str, Leaf], type_name: str) -> list[FlaxLayer]:
    left = dict(parts)
    layers = []

    def take(kind: str, *names: str) -> None:
        leaves = {name: left.pop(name) for name in names if name in left}
        for name in _STATISTICS:
            if name in leaves:
                leaves[name] = replace(leaves[name], trained=False)
        layers.append(FlaxLayer(path, kind, leaves, type_name))

    if "kernel" in left:
        take("kernel", "kernel", "bias")
    elif "embedding" in left:
        take("embedding", "embedding")
    elif "negative_slope" in left:
        take("slope", "negative_slope")
    elif "scale" in left or {*_STATISTICS} <= left.keys():
        take("norm", "scale", "bias", *_STATISTICS)
    for name, leaf in left.items():
        layers.append(FlaxLayer((*path, name) if name else path, "own", {"own": leaf}))
    return layers
