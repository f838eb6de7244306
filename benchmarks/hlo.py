"""What a compiled program sends over the network: its collectives, read from XLA's own text."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "f64": 8}
BYTES |= {"s64": 8, "u64": 8, "c64": 8, "c128": 16}


@dataclass(frozen=True)
class Collective:
    """One collective operation of a compiled program.

    Attributes:
        kind: one of `KINDS`.
        shapes: dtype and shape of each array that it carries; XLA combines several into one.
        in_loop: whether it stands in a loop, and so runs many times a step.
    """

    kind: str
    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    in_loop: bool

    @property
    def sizes(self) -> list[int]:
        """The number of entries of each array."""
        return [_size(shape) for _, shape in self.shapes]

    @property
    def bytes(self) -> int:
        """What one rank hands in."""
        return sum(BYTES[dtype] * _size(shape) for dtype, shape in self.shapes)


def collectives(text: str) -> list[Collective]:
    """Every collective of a compiled program, `compiled.as_text()`, in the order of the text."""
    computations = dict(_computations(text))
    loops = {name for lines in computations.values() for name in _named(lines, "body")}
    inside, waiting = set(), list(loops)
    while waiting:
        name = waiting.pop()
        if name not in inside:
            inside.add(name)
            waiting += _called(computations[name])
    return [
        Collective(kind, shapes, name in inside)
        for name, lines in computations.items()
        for kind, shapes in _operations(lines)
    ]


@contextmanager
def recorded() -> Iterator[list[Any]]:
    """The lowered program of every call to a function that is given to `jax.jit` meanwhile."""
    programs: list[Any] = []
    jit = jax.jit

    def recording(*options: Any, **more: Any) -> Any:
        jitted = jit(*options, **more)

        def call(*args: Any) -> Any:
            programs.append(jitted.lower(*args))  # before the call, which may take its arguments
            return jitted(*args)

        return call

    jax.jit = recording
    try:
        yield programs
    finally:
        jax.jit = jit


def _operations(lines: list[str]) -> Iterator[tuple[str, tuple[tuple[str, tuple[int, ...]], ...]]]:
    pattern = re.compile(rf"= (.*?) ({'|'.join(KINDS)})(?:-start)?\(")
    for line in lines:
        if found := pattern.search(line):
            arrays = re.findall(r"([a-z]+\d*)\[([\d,]*)\]", found[1])
            yield (
                found[2],
                tuple((t, tuple(map(int, filter(None, s.split(","))))) for t, s in arrays),
            )


def _computations(text: str) -> Iterator[tuple[str, list[str]]]:
    name, lines = None, []
    for line in text.splitlines():
        if head := re.match(r"(?:ENTRY )?%?([\w.\-]+) \(.*\{$", line):
            name, lines = head[1], []
        elif line.startswith("}") and name is not None:
            yield name, lines
            name = None
        elif name is not None:
            lines.append(line)


def _named(lines: list[str], attribute: str) -> list[str]:
    return re.findall(rf"\b{attribute}=%?([\w.\-]+)", "\n".join(lines))


def _called(lines: list[str]) -> list[str]:
    called = [name for a in ("body", "condition", "calls", "to_apply") for name in _named(lines, a)]
    for group in re.findall(
        r"(?:branch_computations|called_computations)=\{([^}]*)\}", "\n".join(lines)
    ):
        called += [name.strip().lstrip("%") for name in group.split(",")]
    return called


def _lengths(text: str) -> tuple[int, ...]:
    return tuple(int(length) for length in text.split(",") if length)


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for length in shape:
        size *= length
    return size
