"""Which arrays of a layer of torch are which of a layer of flax, and how they lie there.

How an array lies follows from the kind of layer, which the names of flax's leaves tell: a `kernel`
is transposed though it be square, an `embedding` never is.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from jax_ddp_weighting.testing.layers import (
    FlaxLayer,
    Leaf,
    Piece,
    Rows,
    Shape,
    TorchLayer,
    split_steps,
)

KINDS = ("linear", "conv", "conv_transpose", "as_is", "flattened")
"""The ways in which one array may lie: see `lay_out`."""


@dataclass(frozen=True)
class Link:
    """One leaf of flax, or some of its rows, and what of torch's belongs there.

    Attributes:
        leaf: flax's.
        pieces: torch's; where there are several, their sum.
        kind: how the array lies, one of `KINDS`.
        rows: the rows of the leaf, None for all of it.
        channels: of `"flattened"`, torch's axes before they were flattened.
    """

    leaf: Leaf
    pieces: tuple[Piece, ...]
    kind: str
    rows: Rows | None = None
    channels: Shape = ()


@dataclass(frozen=True)
class Fit:
    """How two layers go together.

    Attributes:
        kind: how the layer's largest array lies.
        links: leaf by leaf.
        zeros: pieces of torch's that flax has no place for, and that must be 0.
        no_place: pieces that are left out because the tree holds nothing of their kind.
    """

    kind: str
    links: tuple[Link, ...]
    zeros: tuple[Piece, ...] = ()
    no_place: tuple[Piece, ...] = ()


def lay_out(value: np.ndarray, link: Link) -> np.ndarray:
    """A piece of torch's as it lies in flax.

    The rule, for torch's shapes: `linear` `(out, in)` is transposed and its axes are split as
    flax's are; `conv` `(a, b, *window)` becomes `(*window, b, a)`, of a convolution and of a
    transposed one with `transpose_kernel=True`; `conv_transpose`, flax's default, becomes
    `(*window, a, b)` with the window turned around; `flattened` is `linear` whose inputs were
    channels before positions, and come positions before channels; `as_is` stays.
    """
    shape = link.leaf.shape if link.rows is None else value.shape
    if link.kind == "linear":
        return value.T.reshape(shape)
    if link.kind == "conv":
        return np.transpose(value, (*range(2, value.ndim), 1, 0))
    if link.kind == "conv_transpose":
        return np.flip(np.transpose(value, (*range(2, value.ndim), 0, 1)), _window(value))
    if link.kind == "flattened":
        apart = value.reshape(value.shape[0], *link.channels)
        return np.transpose(apart, (*range(2, apart.ndim), 1, 0)).reshape(shape)
    return value.reshape(shape)


def lay_back(value: np.ndarray, link: Link) -> np.ndarray:
    """The inverse of `lay_out`: what lies in flax as torch has it."""
    shape = link.pieces[0].shape
    if link.kind == "linear":
        return value.reshape(shape[1], shape[0]).T
    if link.kind == "conv":
        return np.transpose(value, (value.ndim - 1, value.ndim - 2, *range(value.ndim - 2)))
    if link.kind == "conv_transpose":
        turned = np.flip(value, tuple(range(value.ndim - 2)))
        return np.transpose(turned, (value.ndim - 2, value.ndim - 1, *range(value.ndim - 2)))
    if link.kind == "flattened":
        apart = value.reshape(*link.channels[1:], link.channels[0], shape[0])
        order = apart.ndim - 1, apart.ndim - 2, *range(apart.ndim - 2)
        return np.transpose(apart, order).reshape(shape)
    return value.reshape(shape)


def _window(value: np.ndarray) -> tuple[int, ...]:
    return tuple(range(value.ndim - 2))


def fits_as(kind: str, torch: Shape, flax: Shape, *, channels: Shape = ()) -> bool:
    """Whether an array of torch's shape, laid out as this kind, has flax's shape."""
    if kind == "as_is":
        flat = min(len(torch), len(flax)) < 2  # a bias of several heads; one number
        return torch == flax or (flat and math.prod(torch) == math.prod(flax))
    if kind in ("linear", "flattened"):
        if len(torch) != 2 or len(flax) < 2:
            return False
        splits = range(1, len(flax))
        fits = any(
            math.prod(flax[:k]) == torch[1] and math.prod(flax[k:]) == torch[0] for k in splits
        )
        return fits and (kind == "linear" or math.prod(channels) == torch[1])
    if len(torch) < 3 or len(torch) != len(flax):
        return False
    ends = (torch[1], torch[0]) if kind == "conv" else torch[:2]
    return flax == (*torch[2:], *ends)


def find_fits(
    torch: TorchLayer, flax: FlaxLayer, *, statistics: bool, kind: str = "", channels: Shape = ()
) -> list[Fit]:
    """The ways in which two layers go together: none, one, or several that shapes cannot tell.

    Args:
        torch: torch's layer.
        flax: flax's layer.
        statistics: whether the tree of flax holds statistics anywhere, and torch's state dict too.
        kind: the kind that was told, of the layer's weight.
        channels: of `"flattened"`.
    """
    if torch.kind == "cell" or flax.kind == "cell":
        both = torch.kind == flax.kind
        return _fit_cells(torch.pieces, flax.leaves) if both else []
    if flax.kind == "own" or torch.kind == "own":
        return _fit_own(torch, flax, kind)
    if flax.kind == "norm":
        return _fit_norms(torch, flax, statistics)
    if "running_mean" in torch.pieces:
        return []
    if torch.pieces.keys() == flax.leaves.keys() == {"bias"}:  # a rule took what was beside it
        link = Link(flax.leaves["bias"], (torch.pieces["bias"],), "as_is")
        same = fits_as("as_is", link.pieces[0].shape, link.leaf.shape)
        return [Fit("as_is", (link,))] if same else []
    (part, leaf), *_ = flax.leaves.items()
    weight, bias = torch.pieces.get("weight"), torch.pieces.get("bias")
    if weight is None or (bias is None) != ("bias" not in flax.leaves):
        return []
    if flax.kind == "kernel":
        # as it is: Conv1D of transformers, which only the number of its outputs can show
        wanted = [kind] if kind else ["linear", "conv", "conv_transpose"]
        wanted += ["as_is"] if not kind and bias is not None and len(leaf.shape) == 2 else []
        wanted = ["as_is"] if not kind and torch.type_name == "Conv1D" else wanted
    elif kind not in ("", "as_is"):
        return []
    else:
        wanted = ["as_is"]
    found = []
    for each in wanted:
        link = Link(leaf, (weight,), each, channels=channels)
        same = each != "as_is" or flax.kind == "slope" or weight.shape == leaf.shape
        if not same or not fits_as(each, weight.shape, leaf.shape, channels=channels):
            continue
        if each == "linear" and not kind and not _is_linear(weight.shape, flax):
            continue
        links = (link,)
        if bias is not None:
            own = flax.leaves["bias"]
            # in the axes of the outputs, of which a transposed convolution has others
            outputs = _outputs(each, weight.shape, leaf.shape)
            size = math.prod(bias.shape)
            if size not in outputs or size != math.prod(own.shape):
                continue
            links += (Link(own, (bias,), "as_is"),)
        found.append(Fit(each, links))
    return _choose_by_type(found, torch.type_name, flax.type_name) if part == "kernel" else found


def _is_linear(torch: Shape, flax: FlaxLayer) -> bool:
    """Whether a kernel of three or more axes is that of a linear layer, and no window's.

    A convolution that sees all of its input is one too, but its inputs lie in another order:
    positions come before channels. So several input axes are taken for a linear layer's only where
    attention is known to have them, where outputs have several too, or where windows are of one.
    """
    shape, bias = flax.leaves["kernel"].shape, flax.leaves.get("bias")
    if len(shape) == 2 or shape[0] == torch[1] or math.prod(shape[:-2]) == 1:
        return True
    return split_steps(flax.path[-1:])[-1:] == split_steps(("out",)) or (
        bias is not None and len(bias.shape) > 1
    )


def _outputs(kind: str, torch: Shape, flax: Shape) -> tuple[int, ...]:
    if kind in ("linear", "flattened"):
        return (torch[0],)
    if kind == "as_is":
        return (flax[-1],)
    # of a transposed convolution the outputs are torch's second axis, in flax's either of two
    return (torch[0], torch[1]) if kind == "conv" else (torch[1],)


def _choose_by_type(found: list[Fit], torch_type: str, flax_type: str) -> list[Fit]:
    """Those that the classes of both modules leave, where they are known."""
    if torch_type == "Embedding":  # which looks rows up: a kernel is multiplied by
        return []
    if re.fullmatch(r"Conv\dd", torch_type) and torch_type != "Conv1D":
        found = [fit for fit in found if fit.kind == "conv"]
    if torch_type == "Linear":
        found = [fit for fit in found if fit.kind in ("linear", "flattened")]
    return [fit for fit in found if not flax_type or fit.kind == flax_type]


def _fit_own(torch: TorchLayer, flax: FlaxLayer, kind: str) -> list[Fit]:
    if torch.kind != flax.kind or kind not in ("", *KINDS):
        return []
    piece, leaf = torch.pieces["own"], flax.leaves["own"]
    told = kind or "as_is"
    fits = piece.shape == leaf.shape if told == "as_is" else fits_as(told, piece.shape, leaf.shape)
    return [Fit(told, (Link(leaf, (piece,), told),))] if fits else []


_NORM = {"weight": "scale", "bias": "bias", "running_mean": "mean", "running_var": "var"}


def _fit_norms(torch: TorchLayer, flax: FlaxLayer, statistics: bool) -> list[Fit]:
    links, no_place = [], []
    for part, name in _NORM.items():
        piece, leaf = torch.pieces.get(part), flax.leaves.get(name)
        if piece is None and leaf is None:
            continue
        if piece is not None and leaf is not None:
            # of several axes: torch's channels come first and flax's last, though sizes be equal
            if piece.shape != leaf.shape or len(piece.shape) > 1:
                return []
            links.append(Link(leaf, (piece,), "as_is"))
        elif statistics or not part.startswith("running"):
            return []
        elif piece is not None:
            no_place.append(piece)
    return [Fit("norm", tuple(links), no_place=tuple(no_place))] if links else []


# --- recurrent cells ------------------------------------------------------------------------------

# In torch's order of rows. Of a GRU torch adds the state's bias inside the reset gate, so that the
# biases of `n` are two in flax too; the others add up, and flax has one where torch has two.
_GATES = {4: "ifgo", 3: "rzn", 1: " "}


def _fit_cells(pieces: Mapping[str, Piece], leaves: Mapping[str, Leaf]) -> list[Fit]:
    if "weight_hr" in pieces or not {"weight_ih", "weight_hh"} <= pieces.keys():
        return []
    inputs, state = pieces["weight_ih"], pieces["weight_hh"]
    width = state.shape[1]
    gates = _GATES.get(state.shape[0] // max(width, 1))
    if gates is None:
        return []
    fused = "dense_i/kernel" in leaves
    links: list[Link] = []
    zeros: list[Piece] = []
    used = set()

    def take(name: str) -> Leaf | None:
        if name in leaves:
            used.add(name)
        return leaves.get(name)

    def cut(piece: Piece, place: int) -> Piece:
        if gates == " ":
            return piece
        rows = place * width, (place + 1) * width
        return Piece(piece.name, (width, *piece.shape[1:]), rows)

    for side, whole in (("i", inputs), ("h", state)):
        if fused:
            leaf = take(f"dense_{side}/kernel")
            if leaf is None or not fits_as("linear", whole.shape, leaf.shape):
                return []
            links.append(Link(leaf, (whole,), "linear"))
            continue
        for place, gate in enumerate(gates):
            piece, leaf = cut(whole, place), take(f"{side}{gate.strip()}/kernel")
            if leaf is None or not fits_as("linear", piece.shape, leaf.shape):
                return []
            links.append(Link(leaf, (piece,), "linear"))
    for place, gate in enumerate(gates):
        rows = (place * width, (place + 1) * width) if fused and gates != " " else None
        names = [f"dense_{side}/bias" if fused else f"{side}{gate.strip()}/bias" for side in "ih"]
        own = [take(name) for name in names]
        if ("bias_ih" in pieces) != any(leaf is not None for leaf in own):
            return []
        if "bias_ih" not in pieces:
            continue
        parts = [cut(pieces[name], place) for name in ("bias_ih", "bias_hh")]
        if all(leaf is not None for leaf in own) or gate == "n":
            for leaf, piece in zip(own, parts, strict=True):
                if leaf is None:
                    zeros.append(piece)
                else:
                    links.append(Link(leaf, (piece,), "as_is", rows))
        else:
            (leaf,) = (leaf for leaf in own if leaf is not None)
            links.append(Link(leaf, tuple(parts), "as_is", rows))
    for link in links:
        size = link.pieces[0].shape[0]
        if link.kind == "as_is" and link.leaf.shape not in ((size,), (size * len(gates),)):
            return []
    if used != leaves.keys():
        return []
    kind = {4: "lstm", 3: "gru", 1: "rnn"}[len(gates)]
    return [Fit(kind, tuple(links), tuple(zeros))]
