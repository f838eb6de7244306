"""Layers of two frameworks paired: by name, then by shape, then by the order that numbers give.

Nothing is guessed. What two layers could be is left open and listed, and so is what none is.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from jax_ddp_weighting.testing.layer_kinds import Fit
from jax_ddp_weighting.testing.layers import FlaxLayer, Step, TorchLayer, split_steps

Layer = TorchLayer | FlaxLayer
FitsOf = Callable[[TorchLayer, FlaxLayer], list[Fit]]

# Words that mean one thing; names in which only these differ are the same name.
_SYNONYMS = [
    {"linear", "dense", "fc", "lin", "densegeneral", "lineargeneral"},
    {"conv", "conv1d", "conv2d", "conv3d"},
    {"convtranspose", "convtranspose1d", "convtranspose2d", "convtranspose3d", "deconv"},
    {"norm", "layernorm", "ln", "batchnorm", "bn", "groupnorm", "gn", "rmsnorm"},
    {"embed", "emb", "embedding", "embeddings"},
    {"lstm", "lstmcell", "optimizedlstmcell"},
    {"gru", "grucell"},
    {"rnn", "simplecell", "rnncell"},
    {"attn", "attention", "selfattn", "selfattention", "mha"}
    | {"multiheaddotproductattention", "multiheadattention"},
    {"query", "q", "qproj", "queryproj", "wq", "toq"},
    {"key", "k", "kproj", "keyproj", "wk", "tok"},
    {"value", "v", "vproj", "valueproj", "wv", "tov"},
    {"out", "o", "oproj", "outproj", "wo", "toout"},
]
_MEANING = {word: min(words) for words in _SYNONYMS for word in words}


@dataclass
class _Node:
    """A layer, or the parts of a module."""

    step: Step
    layer: Layer | None = None
    parts: list["_Node"] = field(default_factory=list)
    classes: tuple[int, ...] = ()

    def layers(self) -> list[Layer]:
        """All layers in it."""
        own = [] if self.layer is None else [self.layer]
        return own + [layer for part in self.parts for layer in part.layers()]


@dataclass(frozen=True)
class Matched:
    """Two layers that are one: how they go together, and what told so.

    Attributes:
        torch: torch's.
        flax: flax's.
        fit: how they go together.
        by: what told: a rule, their name, shape or order.
        kind_told: whether a rule said how they lie.
    """

    torch: TorchLayer
    flax: FlaxLayer
    fit: Fit
    by: str
    kind_told: bool = False


@dataclass(frozen=True)
class Unclear:
    """Layers of which each could be several of the other side's."""

    torch: tuple[TorchLayer, ...]
    flax: tuple[FlaxLayer, ...]
    why: str


@dataclass
class Matching:
    """What came of it; layers that are in nothing are unmatched."""

    matched: list[Matched] = field(default_factory=list)
    unclear: list[Unclear] = field(default_factory=list)
    clashes: list[tuple[TorchLayer, FlaxLayer]] = field(default_factory=list)


def match_layers(
    torch: Sequence[TorchLayer],
    flax: Sequence[FlaxLayer],
    fits_of: FitsOf,
    *,
    skip: tuple[int, int] = (0, 0),
) -> Matching:
    """Pairs layers.

    The rule, at every level of the two trees of modules, for what is alike inside (the same
    layers, of the same shapes):

    1. the same name, up to case and underscores; numbers at the end are compared as numbers;
    2. names that mean the same (`fc` and `Dense`, `bn` and `BatchNorm`), where one on each side
       bears them, or all that bear them are numbered: then in the order of their numbers;
    3. the only one of its shapes on either side;
    4. several of the same shapes, where each side calls them by one word and a number: in the order
       of the numbers (`conv1`, `conv2` and `Conv_0`, `Conv_1`).

    Then modules without a counterpart are opened, and their parts tried with what is left. The
    order of a dict never counts: JAX sorts dicts by their keys.

    Args:
        torch: layers of one side.
        flax: layers of the other.
        fits_of: the ways in which two layers go together.
        skip: how many words of all paths of either side do not count.
    """
    found = Matching()
    classes = _Classes(torch, flax, fits_of)
    _align(_grow(torch, skip[0]), _grow(flax, skip[1]), classes, found)
    return found


class _Classes:
    """Layers by what they could be: those that may go together have one number."""

    def __init__(self, torch: Sequence[TorchLayer], flax: Sequence[FlaxLayer], fits_of: FitsOf):
        self._fits_of = fits_of
        self._numbers: dict[int, int] = {}
        kinds: dict[object, list[Layer]] = {}
        for layer in (*torch, *flax):
            kinds.setdefault(_shapes_of(layer), []).append(layer)
        parent = list(range(len(kinds)))

        def root(number: int) -> int:
            while parent[number] != number:
                number = parent[number]
            return number

        groups = list(kinds.values())
        for place, ours in enumerate(groups):
            for other, theirs in enumerate(groups):
                one, two = ours[0], theirs[0]
                if isinstance(one, TorchLayer) and isinstance(two, FlaxLayer) and fits_of(one, two):
                    parent[root(other)] = root(place)
        for place, group in enumerate(groups):
            for layer in group:
                self._numbers[id(layer)] = root(place)

    def of(self, node: _Node) -> tuple[int, ...]:
        if not node.classes:  # no node is without a layer
            node.classes = tuple(sorted(self._numbers[id(layer)] for layer in node.layers()))
        return node.classes

    def of_layer(self, layer: Layer) -> int:
        return self._numbers[id(layer)]

    def fits(self, torch: TorchLayer, flax: FlaxLayer) -> list[Fit]:
        return self._fits_of(torch, flax)


def _shapes_of(layer: Layer) -> object:
    arrays = layer.pieces if isinstance(layer, TorchLayer) else layer.leaves
    shapes = tuple((part, each.shape) for part, each in arrays.items())
    return type(layer), layer.kind, layer.type_name, shapes


def _grow(layers: Iterable[Layer], skip: int) -> list[_Node]:
    """The tree of modules that the paths describe."""
    top = _Node(Step("", (), ""))
    for layer in layers:
        node = top
        steps = split_steps(layer.path[skip:])
        for step in steps:
            inside = [
                each
                for each in node.parts
                if (each.step.word, each.step.numbers) == (step.word, step.numbers)
            ]
            if not inside:
                inside = [_Node(step)]
                node.parts += inside
            node = inside[0]
        if node.layer is None and not node.parts and steps:
            node.layer = layer
        else:
            node.parts.append(_Node(Step("", (), ""), layer))
    for node in _walk(top):
        if node.layer is not None and node.parts:
            node.parts.append(_Node(Step("", (), ""), node.layer))
            node.layer = None
    return top.parts


def _walk(node: _Node) -> Iterable[_Node]:
    yield node
    for part in list(node.parts):
        yield from _walk(part)


def _align(torch: list[_Node], flax: list[_Node], classes: _Classes, found: Matching) -> None:
    torch, flax = list(torch), list(flax)
    while torch and flax:
        pairs = (
            _pair_by_name(torch, flax, classes, found)
            or _pair_by_meaning(torch, flax, classes)
            or _pair_by_shape(torch, flax, classes)
        )
        for ours, theirs, by in pairs:
            torch.remove(ours)
            flax.remove(theirs)
            _join(ours, theirs, by, classes, found)
        if not pairs and not (_open(torch, flax, classes)):
            break
    _report_unclear(torch, flax, classes, found)


def _join(torch: _Node, flax: _Node, by: str, classes: _Classes, found: Matching) -> None:
    ours, theirs = torch.layers(), flax.layers()
    if len(ours) == len(theirs) == 1:
        (one,), (two,) = ours, theirs
        assert isinstance(one, TorchLayer)
        assert isinstance(two, FlaxLayer)
        fits = classes.fits(one, two)
        if not fits:
            found.clashes.append((one, two))
        for fit in fits[:1]:
            found.matched.append(Matched(one, two, fit, by))
        return
    _align(torch.parts or [torch], flax.parts or [flax], classes, found)


Pair = tuple[_Node, _Node, str]


def _by_word(nodes: Iterable[_Node], meaning: bool) -> dict[str, list[_Node]]:
    groups: dict[str, list[_Node]] = {}
    for node in nodes:
        word = node.step.word
        groups.setdefault(_MEANING.get(word, word) if meaning else word, []).append(node)
    return groups


def _pair_by_name(
    torch: list[_Node], flax: list[_Node], classes: _Classes, found: Matching
) -> list[Pair]:
    theirs = _by_word(flax, meaning=False)
    pairs: list[Pair] = []
    for word, group in _by_word(torch, meaning=False).items():
        others = theirs.get(word, [])
        ours = {node.step.numbers: node for node in group}
        counterparts = {node.step.numbers: node for node in others}
        if len(ours) < len(group) or len(counterparts) < len(others) or not word:
            continue  # opened modules may bring one name twice
        if ours.keys() == counterparts.keys():
            pairs += [(node, counterparts[numbers], "name") for numbers, node in ours.items()]
        else:
            pairs += _pair_in_order(group, others, classes)
    return pairs


def _pair_by_meaning(torch: list[_Node], flax: list[_Node], classes: _Classes) -> list[Pair]:
    theirs = _by_word(flax, meaning=True)
    pairs: list[Pair] = []
    for word, group in _by_word(torch, meaning=True).items():
        others = theirs.get(word, [])
        if not word or not others:
            continue
        if len(group) == len(others) == 1 and classes.of(group[0]) == classes.of(others[0]):
            pairs.append((group[0], others[0], "name"))
        else:
            pairs += _pair_in_order(group, others, classes)
    return pairs


def _pair_by_shape(torch: list[_Node], flax: list[_Node], classes: _Classes) -> list[Pair]:
    theirs: dict[tuple[int, ...], list[_Node]] = {}
    for node in flax:
        theirs.setdefault(classes.of(node), []).append(node)
    ours: dict[tuple[int, ...], list[_Node]] = {}
    for node in torch:
        ours.setdefault(classes.of(node), []).append(node)
    pairs: list[Pair] = []
    for shapes, group in ours.items():
        others = theirs.get(shapes, [])
        if len(group) == len(others) == 1:
            pairs.append((group[0], others[0], "shape"))
        else:
            pairs += _pair_in_order(group, others, classes)
    return pairs


def _pair_in_order(torch: list[_Node], flax: list[_Node], classes: _Classes) -> list[Pair]:
    """As many on either side, each side one word with numbers, alike in the numbers' order."""
    if len(torch) != len(flax) or len(torch) < 2:
        return []
    sides = []
    for nodes in (torch, flax):
        numbers = [node.step.numbers for node in nodes]
        words = {node.step.word for node in nodes}
        if len(words) > 1 or not all(numbers) or len(set(numbers)) < len(numbers):
            return []
        if len(set(map(len, numbers))) > 1:
            return []
        sides.append(sorted(nodes, key=lambda node: node.step.numbers))
    # fc1, fc2 beside fc2, fc3: names that contradict the order
    spelled = [{node.step.spelled for node in nodes} for nodes in sides]
    if spelled[0] & spelled[1] and spelled[0] != spelled[1]:
        return []
    pairs = list(zip(*sides, strict=True))
    if any(classes.of(ours) != classes.of(theirs) for ours, theirs in pairs):
        return []
    return [(ours, theirs, "order") for ours, theirs in pairs]


def _open(torch: list[_Node], flax: list[_Node], classes: _Classes) -> bool:
    """Puts the parts of a module without a counterpart in its place; whether there was one.

    The largest, and its likes: what holds most is around what holds less.
    """
    counts = [Counter(map(classes.of, nodes)) for nodes in (torch, flax)]
    sides = (torch, counts[1]), (flax, counts[0])
    alone = [
        classes.of(node)
        for nodes, others in sides
        for node in nodes
        if node.parts and classes.of(node) not in others
    ]
    if not alone:
        return False
    largest = max(alone, key=len)
    for nodes, _ in sides:
        for node in list(nodes):
            if node.parts and classes.of(node) == largest:
                nodes.remove(node)
                nodes += [_inside(node, part) for part in node.parts]
    return True


def _inside(node: _Node, part: _Node) -> _Node:
    """A part of a module that was opened; of a numbered one it bears the number too."""
    outer, inner = node.step, part.step
    if not outer.numbers:
        return part
    step = Step(
        f"{outer.word}/{inner.word}",
        (*outer.numbers, *inner.numbers),
        f"{outer.spelled}/{inner.spelled}",
    )
    return _Node(step, part.layer, part.parts)


def _report_unclear(
    torch: list[_Node], flax: list[_Node], classes: _Classes, found: Matching
) -> None:
    ours = [layer for node in torch for layer in node.layers()]
    theirs = [layer for node in flax for layer in node.layers()]
    for number in dict.fromkeys(map(classes.of_layer, ours)):
        some = tuple(x for x in ours if classes.of_layer(x) == number and isinstance(x, TorchLayer))
        others = tuple(
            x for x in theirs if classes.of_layer(x) == number and isinstance(x, FlaxLayer)
        )
        if others:
            why = "equal shapes, and names that do not tell which is which"
            found.unclear.append(Unclear(some, others, why))


_TRANSPOSED = re.compile(r"transpos|deconv|upconv|convt|tconv|(^|[./_])up|upsampl", re.IGNORECASE)
_OTHER_WAY = {
    "conv_transpose": "flax's ConvTranspose turns its kernel around unless transpose_kernel=True",
    "as_is": "transformers' Conv1D lies as flax's Dense does, and torch's Linear does not",
}


def settle_kinds(found: Matching, fits_of: FitsOf) -> Matching:
    """The matching without those pairs whose shapes fit in two ways that nothing tells apart.

    A square kernel fits a convolution, and a transposed one of flax's default, which lies turned
    around; and a square matrix fits torch's Linear, and one that lies as flax's does. The rule: it
    is the plain one, unless a name on either side, the class of a module, or another pair of the
    same model says that there are others.
    """
    fits = [[fit.kind for fit in fits_of(each.torch, each.flax)] for each in found.matched]
    kernels = ["kernel" in each.flax.leaves for each in found.matched]
    certain = {
        kinds[0] for kinds, kernel in zip(fits, kernels, strict=True) if kernel and len(kinds) == 1
    }
    settled = Matching(unclear=list(found.unclear), clashes=list(found.clashes))
    for each, kinds in zip(found.matched, fits, strict=True):
        other = kinds[-1] if len(kinds) > 1 else ""
        doubted = other in certain
        if other == "conv_transpose":
            names = each.torch.name, each.flax.name
            doubted |= each.torch.type_name.startswith("ConvTranspose")
            doubted |= any(map(_TRANSPOSED.search, names))
        if doubted and not each.kind_told:
            words = f"equal sizes fit as {' and as '.join(kinds)}: {_OTHER_WAY[other]}; say which"
            settled.unclear.append(Unclear((each.torch,), (each.flax,), words))
        else:
            settled.matched.append(each)
    return settled
