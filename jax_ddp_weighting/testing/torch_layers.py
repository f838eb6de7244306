"""A state dict of torch, read as layers."""

import re
from collections.abc import Mapping

from jax_ddp_weighting.testing.layers import Path, Piece, Shape, TorchLayer

_CELL = re.compile(r"(weight_ih|weight_hh|weight_hr|bias_ih|bias_hh)(?:_l(\d+)(_reverse)?)?")
_WEIGHTS = ("weight", "bias", "running_mean", "running_var")
COUNTER = "num_batches_tracked"
"""How many batches torch's BatchNorm has seen: flax keeps no such number."""
_WRAPPERS = ("module", "_orig_mod")


def strip_wrappers(name: str) -> str:
    """The name without what DistributedDataParallel and torch.compile put before it."""
    while (parts := name.split(".", 1))[0] in _WRAPPERS and len(parts) > 1:
        name = parts[1]
    return name


def read_torch_layers(shapes: Mapping[str, Shape], types: Mapping[str, str]) -> list[TorchLayer]:
    """The layers of a state dict, in its order; counters are in none.

    Packed projections of attention come as four layers, `query`, `key`, `value` and `out`, and
    each direction of each layer of a recurrent module as one cell.

    Args:
        shapes: the shape of every tensor by its name.
        types: class names of modules by their names, where known.
    """
    modules: dict[str, dict[str, Shape]] = {}
    for name, shape in shapes.items():
        module, _, part = name.rpartition(".")
        modules.setdefault(module, {})[part] = shape
    attention = {name for name, parts in modules.items() if _is_attention(parts)}
    layers: list[TorchLayer] = []
    for name, parts in modules.items():
        path = tuple(name.split(".")) if name else ()
        prefix = f"{name}." if name else ""
        left = {part: shape for part, shape in parts.items() if part != COUNTER}
        if name in attention:
            layers += _read_attention(path, prefix, left)
        layers += _read_cells(path, prefix, left)
        known = {part: left.pop(part) for part in _WEIGHTS if part in left}
        if known.keys() == {"bias"}:  # a parameter of its own that happens to bear the name
            left |= known
        elif known:
            pieces = {part: Piece(prefix + part, shape) for part, shape in known.items()}
            parent, _, last = name.rpartition(".")
            packed = last == "out_proj" and parent in attention
            own = (*path[:-1], "out") if packed else path
            layers.append(TorchLayer(own, "weights", pieces, types.get(name, "")))
        for part, shape in left.items():
            layers.append(TorchLayer((*path, part), "own", {"own": Piece(prefix + part, shape)}))
    return layers


def _is_attention(parts: Mapping[str, Shape]) -> bool:
    return "in_proj_weight" in parts or {"q_proj_weight", "k_proj_weight", "v_proj_weight"} <= {
        *parts
    }


def _read_attention(path: Path, prefix: str, left: dict[str, Shape]) -> list[TorchLayer]:
    packed = left.pop("in_proj_weight", None)
    bias = left.pop("in_proj_bias", None)
    layers = []
    for place, (one, letter) in enumerate((("query", "q"), ("key", "k"), ("value", "v"))):
        if packed is not None:
            width = packed[0] // 3
            rows = width * place, width * (place + 1)
            weight = Piece(f"{prefix}in_proj_weight", (width, *packed[1:]), rows)
        else:
            shape = left.pop(f"{letter}_proj_weight")
            weight = Piece(f"{prefix}{letter}_proj_weight", shape)
        pieces = {"weight": weight}
        if bias is not None:
            width = bias[0] // 3
            rows = width * place, width * (place + 1)
            pieces["bias"] = Piece(f"{prefix}in_proj_bias", (width,), rows)
        layers.append(TorchLayer((*path, one), "weights", pieces, "Linear"))
    return layers


def _read_cells(path: Path, prefix: str, left: dict[str, Shape]) -> list[TorchLayer]:
    """The cells among a module's tensors, which are taken out of `left`."""
    found: dict[tuple[str, str], dict[str, Piece]] = {}
    for part in list(left):
        match = _CELL.fullmatch(part)
        if match:
            place = match[2] or "", match[3] or ""
            found.setdefault(place, {})[match[1]] = Piece(prefix + part, left.pop(part))
    both = any(reverse for _, reverse in found)
    several = len({number for number, _ in found}) > 1
    layers = []
    for (number, reverse), pieces in found.items():
        own = (*path, *((f"l{number}",) if several else ()))
        if both:
            own += ("backward" if reverse else "forward",)
        alias = ".".join([*path, f"l{number}{reverse}"]) if number else ""
        layers.append(TorchLayer(own, "cell", pieces, alias=alias))
    return layers
