"""Torch's names beside flax's: which is which, by rules, by names, by shapes and by order."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
from jaxtyping import PyTree

from jax_ddp_weighting.testing.flax_layers import FlaxTree, has_collections, read_flax_tree
from jax_ddp_weighting.testing.layer_kinds import Link, find_fits
from jax_ddp_weighting.testing.layer_matching import Matching, match_layers, settle_kinds
from jax_ddp_weighting.testing.layers import Piece, Shape, TorchLayer
from jax_ddp_weighting.testing.name_map import NameMap, NamePair
from jax_ddp_weighting.testing.name_rules import Ruled, Rules, apply_rules, read_rules
from jax_ddp_weighting.testing.torch_arrays import as_array, find_memory, is_tensor
from jax_ddp_weighting.testing.torch_layers import COUNTER, read_torch_layers, strip_wrappers


def torch_names(
    state_dict: Mapping[str, Any], params: PyTree, *, rules: Rules | None = None
) -> NameMap:
    """Which parameter of torch is which leaf of flax, with the transposition that belongs to it.

    The rule: how an array lies follows from the kind of its layer and never from its shape: a
    `kernel` of flax is torch's transposed, though it be square. Which layer is which is told by
    `rules`; then, module by module among layers of the same shapes, by equal names (`fc_1` and
    `fc1`, `Dense` and `fc` too), by being the only one of its shapes on both sides, or by numbers
    that both sides have in their names (`conv1`, `conv2` and `Conv_0`, `Conv_1`). The order of a
    dict tells nothing. What is left is listed and never guessed.

    It knows Linear, Conv and ConvTranspose of one to three dimensions, Embedding, LayerNorm,
    GroupNorm, RMSNorm, BatchNorm with its statistics, PReLU, MultiheadAttention (its packed
    projection is split), RNN, LSTM and GRU in one or two directions, and parameters of one's own
    that have one name and shape on both sides.

    Args:
        state_dict: torch's, tensors or arrays by name; or the `torch.nn.Module` itself, whose
            classes then say what its layers are. What DDP and `torch.compile` put before names is
            left away. Read once: shapes, which names share a tensor, and the biases of
            recurrent layers.
        params: flax's: linen's parameters, or variables with their collections
            (`{"params": ..., "batch_stats": ...}`); an `nnx.State`, or an nnx model itself. Shapes
            are enough (`jax.eval_shape`).
        rules: torch's names to flax's paths, put before all else. A key names a tensor, a layer
            or a module, `*` for any one word of it and of the path; a value is a path
            (`"block_0/Dense_1"`), a path and how it lies (`("up", "conv_transpose")`: `linear`,
            `conv`, `conv_transpose`, `as_is`), `(path, "flattened", (channels, height, width))` for
            a Linear behind a flattened image, or None to leave a name out.

    Returns:
        A `NameMap`: what was paired and what was not; `to_flax`, `to_torch`, `gradients`.

    Raises:
        ValueError: the state dict or the tree is empty; two names differ by a wrapper alone; a
            rule names what is not there, or pairs what does not fit.
        TypeError: a value is no array of numbers, or `rules` no dict.

    Example:
        >>> state_dict = {"fc1.weight": np.ones((4, 3)), "fc1.bias": np.zeros(4)}
        >>> params = {"Dense_0": {"kernel": np.zeros((3, 4)), "bias": np.zeros(4)}}
        >>> names = torch_names(state_dict, params)
        >>> print(names)
        torch       flax            lies    told by
        fc1.weight  Dense_0/kernel  linear  name
        fc1.bias    Dense_0/bias    as_is   name
        >>> names.to_flax(state_dict)["Dense_0"]["kernel"].shape
        (3, 4)
    """
    values, types = _read_state_dict(state_dict)
    shapes = {name: tuple(np.shape(value)) for name, value in values.items()}
    tree = read_flax_tree(params)
    if not tree.layers:
        raise ValueError(
            "torch_names: params must hold arrays, got an empty tree. Give what model.init "
            "returns, or an nnx.State."
        )
    torch = read_torch_layers(shapes, types)
    leaves = [leaf for layer in tree.layers for leaf in layer.leaves.values()]
    pieces = [name for layer in torch for name in layer.pieces]
    statistics = any(not leaf.trained for leaf in leaves) and "running_mean" in pieces
    fits_of = partial(find_fits, statistics=statistics)
    ruled = apply_rules(
        read_rules(rules), torch, list(tree.layers), fits_of, collections=has_collections(params)
    )
    found, shared = _match(ruled, fits_of, values)
    found.matched += ruled.matching.matched
    found.unclear += ruled.matching.unclear
    found.clashes += ruled.matching.clashes
    found = settle_kinds(found, fits_of)
    return _write_map(found, ruled, shared, torch, tree, values, shapes)


def _read_state_dict(given: Any) -> tuple[dict[str, Any], dict[str, str]]:
    """The tensors by name, and the classes of modules where they can be had."""
    types: dict[str, str] = {}
    if hasattr(given, "state_dict") and hasattr(given, "named_modules"):
        types = {
            strip_wrappers(name): type(module).__name__ for name, module in given.named_modules()
        }
        given = given.state_dict()
    if not isinstance(given, Mapping) or not given:
        raise ValueError(
            "torch_names: state_dict must be a dict of tensors by name, got "
            f"{'an empty one' if isinstance(given, Mapping) else type(given).__name__}. Give "
            "model.state_dict()."
        )
    values: dict[str, Any] = {}
    for full, value in given.items():
        if not isinstance(full, str):
            raise TypeError(
                f"torch_names: state_dict must have names as keys, got {full!r}. Give "
                "model.state_dict()."
            )
        name = strip_wrappers(full)
        if name in values:
            raise ValueError(
                f"torch_names: state_dict must name a tensor once, got {name!r} with and without "
                "what DDP or torch.compile puts before it. Take the state dict of one of the two."
            )
        tensor = is_tensor(value)
        values[name] = value if tensor else as_array(value, f"torch_names: state_dict[{name!r}]")
    return values, types


def _match(
    ruled: Ruled, fits_of: Any, values: Mapping[str, Any]
) -> tuple[Matching, dict[str, str]]:
    """The matching of what rules left, in which tensors of two names come once if flax has one.

    If flax has two leaves for them, each name finds its own. So names are dropped only where they
    find none, one at a time, and what is dropped is another name of what stays.
    """
    torch, shared = list(ruled.torch), {}
    marks = _Marks(values)
    while True:
        found = match_layers(torch, ruled.flax, fits_of)
        matched = {id(each.torch) for each in found.matched}
        left = [layer for layer in torch if id(layer) not in matched]
        settled = [layer for layer in torch if id(layer) in matched]
        settled += [each.torch for each in ruled.matching.matched]
        copies = marks.find_copies(left, settled)
        if not copies:  # or one of several that found none, the last first
            by_layer = (marks.find_copies([layer], left) for layer in reversed(left))
            copies = next(filter(None, by_layer), [])
        if not copies:
            return found, shared
        for layer, twin in copies:
            for part, piece in layer.pieces.items():
                shared[piece.name] = twin.pieces[part].name
        dropped = {id(layer) for layer, _ in copies}
        torch = [each for each in torch if id(each) not in dropped]


class _Marks:
    """What tells tensors that are one: where they lie, or the random numbers that they hold."""

    def __init__(self, values: Mapping[str, Any]):
        self._values = values
        self._marks: dict[str, bytes] = {}

    def find_copies(
        self, layers: list[TorchLayer], of: list[TorchLayer]
    ) -> list[tuple[TorchLayer, TorchLayer]]:
        """The layers that are others under a second name, each with one that it is."""
        found = []
        for layer in layers:
            twin = next((each for each in of if self._is_twin(layer, each)), None)
            found += [] if twin is None else [(layer, twin)]
        return found

    def _is_twin(self, layer: TorchLayer, twin: TorchLayer) -> bool:
        if layer is twin or layer.kind == "cell" or layer.pieces.keys() != twin.pieces.keys():
            return False
        pairs = [(part, piece, twin.pieces[part]) for part, piece in layer.pieces.items()]
        if any(one.shape != two.shape or one.rows != two.rows for _, one, two in pairs):
            return False
        return all(
            self._is_one(one.name, two.name)
            # zeros and ones are equal everywhere
            or (part in ("weight", "own") and len(one.shape) > 1 and self._is_equal(one, two))
            for part, one, two in pairs
        )

    def _is_one(self, one: str, two: str) -> bool:
        memory = find_memory(self._values[one])
        return memory is not None and memory == find_memory(self._values[two])

    def _is_equal(self, one: Piece, two: Piece) -> bool:
        if self._mark(one.name) != self._mark(two.name):
            return False
        a, b = (as_array(self._values[p.name], "torch_names: state_dict") for p in (one, two))
        return np.array_equal(a, b) and not np.all(a == a.reshape(-1)[:1])

    def _mark(self, name: str) -> bytes:
        """Some of a tensor's numbers, by which most others are told without reading all."""
        if name not in self._marks:
            flat = self._values[name].reshape(-1)
            some = flat[:: max(1, len(flat) // 16)][:17]
            self._marks[name] = as_array(some, "torch_names: state_dict").tobytes()
        return self._marks[name]


def _write_map(
    found: Matching,
    ruled: Ruled,
    shared: dict[str, str],
    torch: list[TorchLayer],
    tree: FlaxTree,
    values: Mapping[str, Any],
    shapes: Mapping[str, Shape],
) -> NameMap:
    linked: list[tuple[Link, str]] = list(ruled.links)
    zeros: list[Piece] = []
    left_out = dict(ruled.left_out)
    for each in found.matched:
        linked += [(link, each.by) for link in each.fit.links]
        zeros += each.fit.zeros
        left_out |= {str(p): "params holds no statistics for it" for p in each.fit.no_place}
    left_out |= {str(p): "flax's cell has no place for it: it must be 0" for p in zeros}
    counters = [name for name in shapes if name.rpartition(".")[2] == COUNTER]
    left_out |= dict.fromkeys(counters, "flax counts no batches")
    place = {name: number for number, name in enumerate(shapes)}
    linked.sort(key=lambda each: (place[each[0].pieces[0].name], each[0].pieces[0].rows or (0, 0)))
    done = {str(piece) for link, _ in linked for piece in link.pieces}
    done |= {str(piece) for each in found.matched for piece in each.torch.pieces.values()}
    done |= {*left_out, *shared}
    used = {link.leaf.index for link, _ in linked}

    shared |= _find_shared_tensors(torch, done, values)
    done |= {*shared}
    open_torch = [p for layer in torch for p in layer.pieces.values() if str(p) not in done]
    open_flax = [
        leaf for layer in tree.layers for leaf in layer.leaves.values() if leaf.index not in used
    ]
    ambiguous_torch, ambiguous_flax = _list_unclear(found)
    why_torch, why_flax = _list_clashes(found)
    return NameMap(
        tuple(
            NamePair(tuple(map(str, link.pieces)), link.leaf.name, link.kind, by)
            for link, by in linked
        ),
        {str(p): why_torch.get(str(p), "") for p in open_torch if str(p) not in ambiguous_torch},
        {x.name: why_flax.get(x.name, "") for x in open_flax if x.name not in ambiguous_flax},
        ambiguous_torch,
        ambiguous_flax,
        left_out,
        shared,
        _note_flattened([link for link, _ in linked]),
        tuple(link for link, _ in linked),
        tree,
        shapes,
        tuple(zeros),
        _keep_small(linked, counters, values),
        _find_tied_apart(linked, values),
        any(is_tensor(value) for value in values.values()),
    )


def _note_flattened(links: list[Link]) -> tuple[str, ...]:
    """What shapes cannot show: whose inputs may be the channels of an image, and its positions."""
    notes = []
    channels = 0  # of the last convolution before, in the order of the state dict
    for link in links:
        shape = link.pieces[0].shape
        outputs, *inputs = shape or (0,)
        if len(shape) > 2 and link.kind.startswith("conv"):
            channels = inputs[0] if link.kind == "conv_transpose" else outputs
        elif link.kind in ("linear", "flattened") and channels:
            (count,) = inputs
            if link.kind == "linear" and count > channels and count % channels == 0:
                notes.append(
                    f"{link.pieces[0].name} takes {count} inputs behind {channels} channels: "
                    "where these are a flattened image, torch has channels before positions and "
                    f"flax after them; then rules={{...: ({link.leaf.name.rpartition('/')[0]!r}, "
                    f"'flattened', ({channels}, height, width))}}, unless flax's code turns them."
                )
            channels = 0
    return tuple(notes)


def _find_shared_tensors(
    torch: list[TorchLayer], done: set[str], values: Mapping[str, Any]
) -> dict[str, str]:
    """Tensors of layers that found no counterpart, but that lie where one lies that did."""
    homes = {find_memory(values[name]): name for name in values if name in done}
    homes.pop(None, None)
    return {
        piece.name: homes[memory]
        for layer in torch
        for piece in layer.pieces.values()
        if str(piece) not in done
        and piece.rows is None
        and (memory := find_memory(values[piece.name])) in homes
    }


def _find_tied_apart(
    linked: list[tuple[Link, str]], values: Mapping[str, Any]
) -> tuple[tuple[str, ...], ...]:
    """Names of one tensor that are leaves of their own in flax."""
    homes: dict[Any, set[str]] = {}
    for link, _ in linked:
        for piece in link.pieces:
            memory = find_memory(values[piece.name])
            if memory is not None:
                homes.setdefault(memory, set()).add(piece.name)
    return tuple(tuple(sorted(names)) for names in homes.values() if len(names) > 1)


def _keep_small(
    linked: list[tuple[Link, str]], counters: list[str], values: Mapping[str, Any]
) -> dict[str, np.ndarray]:
    """Copies of what flax does not hold apart: counters, and biases that are added up."""
    added = [piece.name for link, _ in linked if len(link.pieces) > 1 for piece in link.pieces]
    names = dict.fromkeys([*counters, *added])
    return {name: np.array(as_array(values[name], f"torch_names: {name}")) for name in names}


def _list_unclear(found: Matching) -> tuple[dict[str, str], dict[str, str]]:
    torch: dict[str, str] = {}
    flax: dict[str, str] = {}
    for each in found.unclear:
        ours = " or ".join(layer.name for layer in each.torch)
        theirs = " or ".join(layer.name for layer in each.flax)
        for layer in each.torch:
            torch |= {str(p): f"{theirs}: {each.why}" for p in layer.pieces.values()}
        for layer in each.flax:
            flax |= {leaf.name: f"{ours}: {each.why}" for leaf in layer.leaves.values()}
    return torch, flax


def _list_clashes(found: Matching) -> tuple[dict[str, str], dict[str, str]]:
    torch: dict[str, str] = {}
    flax: dict[str, str] = {}
    for one, two in found.clashes:
        shapes = ", ".join(f"{part} {p.shape}" for part, p in one.pieces.items())
        others = ", ".join(f"{part} {leaf.shape}" for part, leaf in two.leaves.items())
        words = f"does not fit its namesake: torch's {shapes}; flax's {others}"
        torch |= {str(p): words for p in one.pieces.values()}
        flax |= {leaf.name: words for leaf in two.leaves.values()}
    return torch, flax
