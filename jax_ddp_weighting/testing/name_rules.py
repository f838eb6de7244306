"""Rules of one's own for which layer of torch is which of flax, put before all else."""

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from jax_ddp_weighting._arguments import list_some
from jax_ddp_weighting.testing.flax_layers import name_cell
from jax_ddp_weighting.testing.layer_kinds import KINDS, Fit, Link, fits_as
from jax_ddp_weighting.testing.layer_matching import Matched, Matching, match_layers
from jax_ddp_weighting.testing.layers import (
    FlaxLayer,
    Leaf,
    Path,
    Piece,
    Shape,
    TorchLayer,
    split_steps,
)
from jax_ddp_weighting.testing.torch_layers import strip_wrappers

Rules = Mapping[str, Any]
"""Torch's names, of a tensor, a layer or a module, to flax's: `None`, a path, `(path, kind)` or
`(path, "flattened", channels)`."""

FitsOf = Callable[..., list[Fit]]


@dataclass(frozen=True)
class Rule:
    """One rule, read."""

    key: str
    target: str | None
    kind: str = ""
    channels: Shape = ()


@dataclass
class Ruled:
    """What rules have settled, and the layers that they leave; and which rule has what, by name."""

    torch: list[TorchLayer]
    flax: list[FlaxLayer]
    taken: dict[str, str] = field(default_factory=dict)
    matching: Matching = field(default_factory=Matching)
    links: list[tuple[Link, str]] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)


def read_rules(rules: Rules | None) -> list[Rule]:
    """The rules, the most special first: whole names before stars, long ones before short."""
    found = []
    if rules is not None and not isinstance(rules, Mapping):
        raise TypeError(
            "torch_names: rules must be a dict of torch's names to flax's, got "
            f"{type(rules).__name__}. For instance: {{'head': 'Dense_3', 'aux': None}}."
        )
    for key, value in (rules or {}).items():
        parts = tuple(value) if isinstance(value, tuple | list) else (value,)
        target = parts[0] if parts else ""
        kind: str = parts[1] if len(parts) > 1 else ""
        channels = parts[2] if len(parts) > 2 else None
        known = kind in ("", *KINDS) and 0 < len(parts) < 4
        to_nothing = target is None and len(parts) == 1
        if not (isinstance(key, str) and known and (to_nothing or isinstance(target, str))):
            raise ValueError(
                "torch_names: rules must map torch's names to paths of flax, to (path, kind) with "
                f"a kind of {', '.join(KINDS)}, to (path, 'flattened', channels), or to None, got "
                f"{value!r} for {key!r}. For instance: {{'head': 'Dense_3', 'aux': None}}."
            )
        needed = kind == "flattened"
        if needed != (channels is not None) or (needed and not _is_shape(channels)):
            raise ValueError(
                "torch_names: rules must say which axes were flattened, in torch's order, got "
                f"{value!r} for {key!r}. For instance: ('Dense_0', 'flattened', (16, 5, 5))."
            )
        found.append(Rule(strip_wrappers(key), target, kind, tuple(channels or ())))
    return sorted(found, key=lambda rule: (rule.key.count("*"), -rule.key.count(".")))


def _is_shape(value: Any) -> bool:
    sizes = value if isinstance(value, tuple | list) else ()
    whole = (isinstance(x, int | np.integer) and not isinstance(x, bool) and x > 0 for x in sizes)
    return bool(sizes) and all(whole)


def apply_rules(
    rules: list[Rule],
    torch: list[TorchLayer],
    flax: list[FlaxLayer],
    fits_of: FitsOf,
    *,
    collections: bool,
) -> Ruled:
    """Settles what rules say.

    Raises:
        ValueError: a rule names what is not there, or pairs what does not fit.
    """
    ruled = Ruled(list(torch), list(flax))
    for rule in rules:
        if _rule_array(rule, ruled, flax, collections):
            continue
        used = False
        for place in _find_places(rule, ruled.torch):
            used = True
            _rule_layers(rule, place, ruled, flax, fits_of, collections)
        if not used:
            _check_untaken(rule, ruled, torch)
            known = [name for layer in torch for name in (layer.name, *_names(layer))]
            raise ValueError(
                f"torch_names: rules must name what the state dict holds, got {rule.key!r}. "
                f"{_suggest(rule.key, known)}"
            )
    return ruled


def _check_untaken(rule: Rule, ruled: Ruled, torch: list[TorchLayer]) -> None:
    """Raises where other rules have all that this one names."""
    named = [x for place in _find_places(rule, torch) for x in place.layers]
    pieces = [str(piece) for layer in named for piece in layer.pieces.values()]
    pieces += [rule.key] * (rule.key in ruled.taken)
    owners = list(dict.fromkeys(ruled.taken[each] for each in pieces if each in ruled.taken))
    if owners:
        raise ValueError(
            "torch_names: rules must name each part of the state dict in one rule, got "
            f"{rule.key!r}, all of which {_quote(owners)}. Leave one of them out."
        )


def _check_free(rule: Rule, target: str, ruled: Ruled, leaves: list[Leaf]) -> None:
    """Raises where another rule has some of what this one names in flax's tree."""
    named = (leaf.name for leaf in leaves)
    owners = dict.fromkeys(ruled.taken[name] for name in named if name in ruled.taken)
    owners.pop(rule.key, None)
    if owners:
        raise ValueError(
            "torch_names: rules must name each part of flax's tree in one rule, got "
            f"{target!r} for {rule.key!r}, which {_quote(list(owners))}. Leave one of them out: "
            "one layer of torch is one of flax."
        )


def _miss(rule: Rule, target: str, known: list[str]) -> ValueError:
    return ValueError(
        f"torch_names: rules must name what flax's tree holds, got {target!r} for {rule.key!r}. "
        f"{_suggest(target, known)}"
    )


def _quote(owners: list[str]) -> str:
    return f"{list_some([repr(each) for each in owners])} {'has' if len(owners) == 1 else 'have'}"


def _names(layer: TorchLayer) -> list[str]:
    return [piece.name for piece in layer.pieces.values()]


def _suggest(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
    return f"Near it: {', '.join(near)}." if near else f"It holds {', '.join(known[:10])}."


def _split(target: str, collections: bool) -> Path:
    path = tuple(target.replace("/", ".").split("."))
    return path[1:] if collections and path[0] in ("params", "batch_stats") else path


def _rule_array(rule: Rule, ruled: Ruled, flax: list[FlaxLayer], collections: bool) -> bool:
    """Settles a rule of one tensor; whether it was one."""
    home = next(
        (
            (layer, part)
            for layer in ruled.torch
            for part, piece in layer.pieces.items()
            if piece.name == rule.key and piece.rows is None and layer.kind != "cell"
        ),
        None,
    )
    if home is None:
        return False
    layer, part = home
    piece = layer.pieces[part]
    if rule.target is None:
        ruled.left_out[piece.name] = "left out by rules"
    else:
        wanted = ".".join(_split(rule.target, collections))
        owner = next(
            (
                (other, name)
                for other in ruled.flax
                for name, leaf in other.leaves.items()
                if ".".join(_split(leaf.name, collections)) == wanted
            ),
            None,
        )
        if owner is None:
            leaves = [leaf for other in flax for leaf in other.leaves.values()]
            same = [x for x in leaves if ".".join(_split(x.name, collections)) == wanted]
            _check_free(rule, rule.target, ruled, same)
            raise _miss(rule, rule.target, [leaf.name for leaf in leaves])
        other, name = owner
        leaf = other.leaves[name]
        kind = rule.kind or _kind_of(name, piece)
        if not fits_as(kind, piece.shape, leaf.shape, channels=rule.channels):
            raise _misfit(rule, piece, leaf, kind)
        ruled.links.append((Link(leaf, (piece,), kind, channels=rule.channels), "rule"))
        ruled.taken[leaf.name] = rule.key
        rest = {each: own for each, own in other.leaves.items() if each != name}
        _replace(ruled.flax, other, replace(other, leaves=rest) if rest else None)
    ruled.taken[piece.name] = rule.key
    left = {each: own for each, own in layer.pieces.items() if each != part}
    _replace(ruled.torch, layer, replace(layer, pieces=left) if left else None)
    return True


def _kind_of(leaf: str, piece: Piece) -> str:
    if leaf != "kernel":
        return "as_is"
    return "linear" if len(piece.shape) == 2 else "conv"


def _misfit(rule: Rule, piece: Piece, leaf: Leaf, kind: str) -> ValueError:
    return ValueError(
        f"torch_names: rules must pair arrays that fit, got {piece} {piece.shape} for {leaf.name} "
        f"{leaf.shape}, laid out as {kind}. Name its kind if it is another: "
        f"({rule.target!r}, kind)."
    )


def _replace(layers: list[Any], old: Any, new: Any) -> None:
    place = next(i for i, each in enumerate(layers) if each is old)
    layers[place : place + 1] = [] if new is None else [new]


@dataclass(frozen=True)
class _Place:
    """Where a rule applies: how many words of the path it covers, what stars stood for, whom."""

    words: int
    stars: tuple[str, ...]
    layers: tuple[TorchLayer, ...]


def _find_places(rule: Rule, torch: list[TorchLayer]) -> list[_Place]:
    pattern = rule.key.split(".")
    found: dict[tuple[str, ...], list[TorchLayer]] = {}
    exactly = [layer for layer in torch if layer.alias == rule.key]
    for layer in exactly or torch:
        alias = layer.alias.split(".") if layer.alias else []
        for path in (alias, list(layer.path)):
            head = path[: len(pattern)]
            if len(head) == len(pattern) and all(
                want in ("*", got) for want, got in zip(pattern, head, strict=True)
            ):
                stars = tuple(g for want, g in zip(pattern, head, strict=True) if want == "*")
                found.setdefault(stars, []).append(layer)
                break
    return [_Place(len(pattern), stars, tuple(layers)) for stars, layers in found.items()]


def _rule_layers(
    rule: Rule,
    place: _Place,
    ruled: Ruled,
    flax: list[FlaxLayer],
    fits_of: FitsOf,
    collections: bool,
) -> None:
    torch = place.layers
    for layer in torch:
        _replace(ruled.torch, layer, None)
        ruled.taken |= dict.fromkeys(map(str, layer.pieces.values()), rule.key)
    if rule.target is None:
        ruled.left_out |= {str(p): "left out by rules" for x in torch for p in x.pieces.values()}
        return
    target = rule.target
    for star in place.stars:
        target = target.replace("*", star, 1)
    path = name_cell(_split(target, collections))
    wanted = _spell(path)

    def find_inside(layers: list[FlaxLayer]) -> list[FlaxLayer]:
        return [x for x in layers if _spell(x.path[: len(path)]) == wanted]

    inside = find_inside(ruled.flax)
    leaves = [leaf for layer in find_inside(flax) for leaf in layer.leaves.values()]
    if not inside:
        _check_free(rule, target, ruled, leaves)
        raise _miss(rule, target, [layer.name for layer in flax])
    for layer in inside:
        _replace(ruled.flax, layer, None)
        ruled.taken |= dict.fromkeys((leaf.name for leaf in layer.leaves.values()), rule.key)
    if len(torch) == len(inside) == 1:
        fits = fits_of(torch[0], inside[0], kind=rule.kind, channels=rule.channels)
        if not fits:
            _check_free(rule, target, ruled, leaves)
            (piece, *_), (leaf, *_) = torch[0].pieces.values(), inside[0].leaves.values()
            raise _misfit(rule, piece, leaf, rule.kind or "its layer's kind")
        told = bool(rule.kind)
        ruled.matching.matched.append(Matched(torch[0], inside[0], fits[0], "rule", told))
        return
    found = match_layers(torch, inside, fits_of, skip=(place.words, len(path)))
    ruled.matching.matched += found.matched
    ruled.matching.unclear += found.unclear
    ruled.matching.clashes += found.clashes


def _spell(path: Path) -> tuple[Any, ...]:
    return tuple((step.word, step.numbers) for step in split_steps(path))
