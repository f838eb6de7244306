"""What two frameworks call a layer: its arrays by their part in it, under its path."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

Path = tuple[str, ...]
Shape = tuple[int, ...]
Rows = tuple[int, int]


@dataclass(frozen=True)
class Piece:
    """Some rows of one of torch's tensors, or all of it.

    Attributes:
        name: the tensor's name in the state dict.
        shape: of the piece.
        rows: the first row and the one behind the last; None for the whole tensor.
    """

    name: str
    shape: Shape
    rows: Rows | None = None

    def __str__(self) -> str:
        return self.name if self.rows is None else f"{self.name}[{self.rows[0]}:{self.rows[1]}]"


@dataclass(frozen=True)
class TorchLayer:
    """A module of torch, or the part of one that is a layer in flax.

    Attributes:
        path: its name, split at the dots.
        kind: `"weights"` of most layers, `"cell"` of a recurrent one, `"own"` of a parameter that
            belongs to no known layer.
        pieces: by part: `weight`, `bias`, `running_mean`, `running_var`; of cells `weight_ih` and
            so on; `own`.
        type_name: the class of the module where that is known, else empty.
        alias: how torch itself would name it, where that is another name: `lstm.l0_reverse`.
    """

    path: Path
    kind: str
    pieces: Mapping[str, Piece]
    type_name: str = ""
    alias: str = ""

    @property
    def name(self) -> str:
        """Its path as torch writes it."""
        return ".".join(self.path)


@dataclass(frozen=True)
class Leaf:
    """One array of flax.

    Attributes:
        name: its path, joined by slashes.
        index: its place among the leaves of the tree.
        shape: its shape.
        trained: whether a gradient belongs to it: statistics have none.
    """

    name: str
    index: int
    shape: Shape
    trained: bool = True


@dataclass(frozen=True)
class FlaxLayer:
    """A module of flax.

    Attributes:
        path: its path, without the collection.
        kind: `"kernel"`, `"norm"`, `"embedding"`, `"slope"`, `"cell"`, or `"own"`.
        leaves: by part: `kernel`, `scale`, `bias`, `mean`, `var`, `embedding`; of cells
            `ii/kernel` or `dense_i/kernel` and so on; `own`.
        type_name: what is known of its class: `"conv"` or `"conv_transpose"`, else empty.
    """

    path: Path
    kind: str
    leaves: Mapping[str, Leaf]
    type_name: str = ""

    @property
    def name(self) -> str:
        """Its path as flax writes it."""
        return "/".join(self.path)


@dataclass(frozen=True)
class Step:
    """One step of a path, so that both frameworks' habits come out the same.

    `Conv_0`, `conv1`, `layers.0` and `layers_0` are a word and numbers.
    """

    word: str
    numbers: tuple[int, ...]
    spelled: str


def split_steps(path: Iterable[str]) -> tuple[Step, ...]:
    """A path as words and numbers; a number alone belongs to the word before it."""
    steps: list[Step] = []
    for spelled in path:
        rest, numbers = spelled.strip("_"), ()
        while found := re.fullmatch(r"(.*?)_?(\d+)", rest):
            rest, numbers = found[1], (int(found[2]), *numbers)
        word = rest.replace("_", "").lower()
        if not word and steps:
            before = steps.pop()
            word, numbers = before.word, (*before.numbers, *numbers)
            spelled = f"{before.spelled}.{spelled}"
        steps.append(Step(word, numbers, spelled))
    return tuple(steps)
