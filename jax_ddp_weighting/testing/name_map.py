"""Which parameter of torch is which leaf of flax, and the values of one in the other's place."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from jax_ddp_weighting._arguments import list_some
from jax_ddp_weighting.testing.flax_layers import FlaxTree, path_of, plain_tree
from jax_ddp_weighting.testing.layer_kinds import Link, lay_back, lay_out
from jax_ddp_weighting.testing.layers import Piece, Shape
from jax_ddp_weighting.testing.torch_arrays import as_array, as_tensor, import_torch
from jax_ddp_weighting.testing.torch_layers import strip_wrappers

# How far the gradients of two biases that are added may lie apart, of the larger: they are one sum
# taken twice. Wide enough for bfloat16, and far below a gradient that is another one.
_SAME_GRADIENT = 0.05


@dataclass(frozen=True)
class NamePair:
    """One leaf of flax, and the parameters of torch that it is.

    Attributes:
        torch: torch's names; with rows in brackets where a part of a tensor is meant. Several are
            added up: the two biases of a recurrent layer.
        flax: flax's path, joined by slashes.
        kind: how the array lies: `"linear"` is transposed, `"conv"` has its window first,
            `"conv_transpose"` is turned around, `"flattened"` has other inputs first, `"as_is"`.
        by: what told so: `"rule"`, `"name"`, `"shape"` or `"order"`.
    """

    torch: tuple[str, ...]
    flax: str
    kind: str
    by: str


@dataclass(frozen=True, eq=False)
class NameMap:
    """Which parameter of torch is which leaf of flax, and how it lies there.

    What `torch_names` returns. Printed, a table of the pairs and a list of what is left.

    Attributes:
        pairs: leaf by leaf, in the order of torch's names.
        unmatched_torch: torch's names that no leaf of flax is, and why where that is known.
        unmatched_flax: paths of flax that no name of torch is, and why.
        ambiguous_torch: torch's names that could be several leaves, and which.
        ambiguous_flax: paths of flax that could be several names, and which.
        left_out: torch's names that are left out on purpose, and why: counters, statistics where
            the tree of flax holds none, biases that flax has no place for, names that a rule maps
            to `None`.
        shared: torch's other names of tensors that have two, and the name that stands in `pairs`.
        notes: what fits, and may be wrong all the same: Linear layers behind a flattened image.
    """

    pairs: tuple[NamePair, ...]
    unmatched_torch: Mapping[str, str]
    unmatched_flax: Mapping[str, str]
    ambiguous_torch: Mapping[str, str]
    ambiguous_flax: Mapping[str, str]
    left_out: Mapping[str, str]
    shared: Mapping[str, str]
    notes: tuple[str, ...]
    _links: tuple[Link, ...] = field(repr=False)
    _tree: FlaxTree = field(repr=False)
    _shapes: Mapping[str, Shape] = field(repr=False)
    _zeros: tuple[Piece, ...] = field(repr=False)
    _seen: Mapping[str, np.ndarray] = field(repr=False)
    _tied_apart: tuple[tuple[str, ...], ...] = field(repr=False)
    _from_tensors: bool = field(repr=False)

    @property
    def complete(self) -> bool:
        """Whether every name of either side is in a pair, shared, or left out on purpose."""
        left = (self.unmatched_torch, self.unmatched_flax, self.ambiguous_torch)
        return not any(left) and not self.ambiguous_flax

    def to_flax(self, state_dict: Mapping[str, Any]) -> PyTree:
        """The values of a state dict as a tree of flax.

        Args:
            state_dict: names and shapes as `torch_names` was given; tensors or arrays.

        Returns:
            The structure of `params`, without the random streams of an nnx model; leaves are
            arrays of numpy of torch's own dtypes, bit for bit, but for the biases of recurrent
            layers that flax has one of where torch has two: those are added. `nnx.update(model,
            ...)` and `model.apply({"params": ...})` take it.

        Raises:
            ValueError: the map is not complete; names are missing or others are there; shapes
                differ; names that share one tensor hold different values; a bias that flax has no
                place for is not 0.
            TypeError: a value is no array of numbers.
        """
        self._check_complete("to_flax", gradients=False)
        values = self._read("to_flax", state_dict, set(self._shapes), "state_dict")
        for alias, name in self.shared.items():
            if alias in values and not np.array_equal(values[alias], values[name], equal_nan=True):
                raise ValueError(
                    f"to_flax: state_dict must hold one value under {alias} and {name}, which were "
                    "one tensor when torch_names saw them, got two. Take it from the same model, "
                    "or map the one that does not count to None in rules."
                )
        for piece in self._zeros:
            if np.any(_take(values, piece)):
                raise ValueError(
                    f"to_flax: state_dict must hold 0 in {piece}, for which flax's cell has no "
                    "place, got other numbers. Set it to 0 in torch and keep it there, or take a "
                    "cell with that bias, such as linen's GRUCell."
                )
        by_leaf: dict[int, list[Link]] = {}
        for link in self._links:
            by_leaf.setdefault(link.leaf.index, []).append(link)
        leaves = [
            self._tree.kept[index] if index in self._tree.kept else _fill(by_leaf[index], values)
            for index in range(len(self._tree.names))
        ]
        return jax.tree.unflatten(self._tree.structure, leaves)

    def to_torch(self, params: PyTree) -> dict[str, Any]:
        """The values of a tree of flax as a state dict: the inverse of `to_flax`, exactly.

        The rule: where flax has one bias and torch two, the two that `torch_names` saw, if they
        add up to flax's; else flax's, and 0. Counters are those that it saw.

        Args:
            params: a tree of the structure and shapes that `torch_names` was given.

        Returns:
            Tensors by name where `torch_names` was given tensors, else arrays of numpy. Names that
            a rule left out are not in it.

        Raises:
            ValueError: the map is not complete, or the tree is another.
        """
        self._check_complete("to_torch", gradients=False)
        given = self._read_tree("to_torch", params)
        found: dict[str, np.ndarray] = {}
        for name, shape in self._shapes.items():
            pieces = [(link, p) for link in self._links for p in link.pieces if p.name == name]
            zeros = [piece for piece in self._zeros if piece.name == name]
            if not pieces and not zeros:
                if name in self._seen and name in self.left_out:
                    found[name] = self._seen[name]
                continue
            parts = {p.rows: self._give_back(link, p, given[link.leaf.name]) for link, p in pieces}
            dtype = next(iter(parts.values())).dtype if parts else np.float32
            parts |= {piece.rows: np.zeros(piece.shape, dtype) for piece in zeros}
            ordered = [parts[rows] for rows in sorted(parts, key=lambda rows: rows or (0, 0))]
            found[name] = np.concatenate(ordered) if len(ordered) > 1 else np.array(ordered[0])
            assert found[name].shape == shape
        for alias, name in self.shared.items():
            found[alias] = found[name]
        found = {name: found[name] for name in self._shapes if name in found}
        if not self._from_tensors:
            return found
        import_torch("to_torch")
        return {name: as_tensor(value) for name, value in found.items()}

    def gradients(self, named_gradients: Mapping[str, Any]) -> PyTree:
        """Torch's gradients as a tree of flax, to compare with `jax.grad`'s.

        The rule: as for `to_flax`, but for what is added there: the two biases that flax adds up
        have one gradient, which is flax's; and two parameters that are one leaf of flax add up.
        Statistics have no gradient.

        Args:
            named_gradients: by torch's name, such as `{name: p.grad for name, p in
                model.named_parameters()}`; tensors or arrays.

        Returns:
            The structure that the gradient has: `params` without its statistics.

        Raises:
            ValueError: the map is not complete; a gradient is missing, is of no parameter, or has
                another shape; torch shares a tensor that flax does not, so that there is only the
                sum of two gradients.
            TypeError: a value is no array of numbers, or a parameter in place of its gradient.
        """
        self._check_complete("gradients", gradients=True)
        trained = [link for link in self._links if link.leaf.trained]
        wanted = {piece.name for link in trained for piece in link.pieces}
        named = _strip("gradients", named_gradients, "named_gradients")
        for alias, name in self.shared.items():  # torch names one of them, and it is either
            if alias in named and name not in named:
                named[name] = named.pop(alias)
        for names in self._tied_apart:
            raise ValueError(
                f"gradients: params must share what torch shares, got leaves of their own for "
                f"{' and '.join(names)}, which are one tensor: its gradient is the sum of theirs. "
                "Share the leaf in flax, or compare with a model of torch that does not."
            )
        values = self._read("gradients", named, wanted, "named_gradients")
        for alias, name in self.shared.items():
            if alias in values and not np.array_equal(values[alias], values[name]):
                values[name] = values[name] + values[alias]  # two parameters that had one value
        by_leaf: dict[int, list[Link]] = {}
        for link in trained:
            _check_sums(link, values)
            first = Link(link.leaf, link.pieces[:1], link.kind, link.rows, link.channels)
            by_leaf.setdefault(link.leaf.index, []).append(first)
        leaves = [_fill(by_leaf[index], values) for index in self._tree.trained]
        return jax.tree.unflatten(self._tree.trained_structure, leaves)

    def __str__(self) -> str:
        rows = [(" + ".join(each.torch), each.flax, each.kind, each.by) for each in self.pairs]
        rows = [("torch", "flax", "lies", "told by"), *rows]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
        for title, names in (
            ("unmatched in torch", self.unmatched_torch),
            ("unmatched in flax", self.unmatched_flax),
            ("ambiguous in torch", self.ambiguous_torch),
            ("ambiguous in flax", self.ambiguous_flax),
            ("left out", self.left_out),
            ("shared", {alias: f"is {name}" for alias, name in self.shared.items()}),
        ):
            lines += [f"{title}: {name}{f': {why}' if why else ''}" for name, why in names.items()]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    def _check_complete(self, caller: str, *, gradients: bool) -> None:
        statistics = {
            self._tree.names[index]
            for index in range(len(self._tree.names))
            if gradients and index not in self._tree.trained
        }
        left = {
            "unmatched in torch": self.unmatched_torch,
            "unmatched in flax": set(self.unmatched_flax) - statistics,
            "ambiguous in torch": self.ambiguous_torch,
            "ambiguous in flax": set(self.ambiguous_flax) - statistics,
        }
        if any(left.values()):
            said = "; ".join(
                f"{title}: {list_some(sorted(names))}" for title, names in left.items() if names
            )
            raise ValueError(
                f"{caller}: the map must hold every name of both sides, got {said}. Tell which is "
                "which in torch_names(rules={torch's name: flax's path}), or map a name to None to "
                "leave it out; print the map to see why."
            )

    def _read(
        self, caller: str, given: Mapping[str, Any], wanted: set[str], argument: str
    ) -> dict[str, np.ndarray]:
        """The arrays that are wanted, of the shapes that were seen."""
        named = _strip(caller, given, argument)
        optional = {*self.shared, *self.left_out}
        missing = [name for name in self._shapes if name in wanted - optional and name not in named]
        strange = [name for name in named if name not in self._shapes]
        if missing or strange:
            got = f"{list_some(missing or strange)} {'missing' if missing else 'beside them'}"
            raise ValueError(
                f"{caller}: {argument} must have the names that torch_names was given, got {got}. "
                "Make the map from this model's own state dict."
            )
        values = {}
        for name, value in named.items():
            if name in self.left_out and name not in wanted:
                continue
            what = f"{caller}: {argument}[{name!r}]"
            if value is None:
                if name in optional:
                    continue
                raise ValueError(
                    f"{what} must be an array, got None: that parameter has no gradient. Call "
                    "backward() first; of a frozen one, map its name to None in rules."
                )
            if caller == "gradients" and type(value).__name__ == "Parameter":
                raise TypeError(
                    f"{what} must be a gradient, got the parameter itself. Give its .grad."
                )
            values[name] = as_array(value, what)
            if values[name].shape != self._shapes[name]:
                raise ValueError(
                    f"{what} must have the shape {self._shapes[name]} that torch_names saw, got "
                    f"{values[name].shape}. Make the map from this model's own state dict."
                )
        return values

    def _read_tree(self, caller: str, params: PyTree) -> dict[str, np.ndarray]:
        found = jax.tree_util.tree_flatten_with_path(plain_tree(params)[0])[0]
        named = {"/".join(path_of(keys)): value for keys, value in found}
        shapes = dict(zip(self._tree.names, self._tree.shapes, strict=True))
        kept = {self._tree.names[index] for index in self._tree.kept}
        given = {
            name: as_array(value, f"{caller}: {name}")
            for name, value in named.items()
            if name in shapes and name not in kept
        }
        wrong = [name for name in shapes if name not in named]
        wrong += [name for name, value in given.items() if value.shape != shapes[name]]
        if wrong or len(named) != len(shapes):
            raise ValueError(
                f"{caller}: params must have the leaves and shapes that torch_names was given, got "
                f"another tree at {list_some(wrong or sorted(set(named) - set(shapes)))}. Give the "
                "same tree with other values."
            )
        return given

    def _give_back(self, link: Link, piece: Piece, leaf: np.ndarray) -> np.ndarray:
        """A piece of torch's from flax's leaf."""
        value = leaf if link.rows is None else leaf[slice(*link.rows)]
        value = np.asarray(lay_back(value, link))
        if len(link.pieces) == 1:
            return value
        if all(each.name in self._seen for each in link.pieces):
            seen = [_take(self._seen, each) for each in link.pieces]
            if np.array_equal(sum(seen[1:], start=seen[0]), value):
                return seen[link.pieces.index(piece)]
        return value if piece == link.pieces[0] else np.zeros_like(value)


def _strip(caller: str, given: Mapping[str, Any], argument: str) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        raise TypeError(
            f"{caller}: {argument} must be a dict by torch's names, got {type(given).__name__}. "
            "For instance: dict(model.state_dict())."
        )
    return {strip_wrappers(name): value for name, value in given.items()}


def _take(values: Mapping[str, np.ndarray], piece: Piece) -> np.ndarray:
    value = values[piece.name]
    return value if piece.rows is None else value[slice(*piece.rows)]


def _fill(links: list[Link], values: Mapping[str, np.ndarray]) -> np.ndarray:
    """A leaf of flax from the pieces of torch's that it is made of."""
    parts = []
    for link in sorted(links, key=lambda link: link.rows or (0, 0)):
        first, *others = (_take(values, piece) for piece in link.pieces)
        parts.append(lay_out(sum(others, start=first), link))
    whole = np.concatenate(parts) if len(parts) > 1 else parts[0]
    # a copy, in whatever case: torch trains on in the memory that its tensors lie in
    return np.array(whole, order="C").reshape(links[0].leaf.shape)


def _check_sums(link: Link, values: Mapping[str, np.ndarray]) -> None:
    """Refuses two biases that are added up and have different gradients: one of them is wrong."""
    first, *others = (_take(values, piece).astype(np.float64) for piece in link.pieces)
    for piece, other in zip(link.pieces[1:], others, strict=True):
        apart, size = np.max(np.abs(first - other)), np.max(np.abs(first))
        if not apart <= _SAME_GRADIENT * size and not (np.isnan(first) & np.isnan(other)).any():
            raise ValueError(
                f"gradients: named_gradients must hold one gradient for {link.pieces[0]} and "
                f"{piece}, which are added before anything else happens to them, got "
                f"{apart:.2g} between them. Take both from one backward()."
            )
