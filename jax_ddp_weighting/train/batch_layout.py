"""How the rows of a step lie on its mesh: over the data axis, and over further ones."""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from jax_ddp_weighting.data.batch import Batch, place_batch
from jax_ddp_weighting.distributed import mesh as meshes
from jax_ddp_weighting.distributed.mesh import AxisName

BatchSpec = PyTree[Any]
"""`PartitionSpec`s, one for all leaves of a batch's data, or in the structure of its first levels.
"""


def find_axis_name(axis_name: AxisName | None, spec: BatchSpec | None, *, caller: str) -> AxisName:
    """The data axis: the one that was named, or those that the specs shard rows over, or `"data"`.

    Raises:
        TypeError: a spec is no `PartitionSpec`.
        ValueError: none was named, and the specs shard rows over none, or over several sets.
    """
    if axis_name is not None or spec is None:
        return "data" if axis_name is None else axis_name
    rows = {_row_axes(each) for each in _list_specs(spec, caller)}
    if len(rows) != 1 or not all(rows):
        raise ValueError(
            f"{caller}: axis_name must be given where batch_spec does not shard the rows of every "
            f"leaf over the same axes, got rows over {sorted(rows)}. Name the data axis."
        )
    names = rows.pop()
    return names[0] if len(names) == 1 else names


@dataclass(frozen=True)
class BatchLayout:
    """Where the rows of a batch are, and which part of them a rank of the data axis is given.

    Attributes:
        caller: the maker of the step, which speaks in errors.
        mesh: the mesh.
        axis_name: the axes that are mapped, of which each rank sees its own part; over others a
            function sees everything.
        spec: how each leaf of the data lies; None where rows lie over the mapped axes alone.
    """

    caller: str
    mesh: Mesh
    axis_name: AxisName
    spec: BatchSpec | None = None

    def __post_init__(self) -> None:
        named = meshes.names_of(self.axis_name)
        if self.spec is None:
            return
        used: set[str] = set()
        for each in _list_specs(self.spec, self.caller):
            _check_names(each, self.mesh, self.caller)
            used.update(_names_in(each))
        missing = [name for name in named if name not in used]
        if missing:
            raise ValueError(
                f"{self.caller}: batch_spec must name the data axis, got {self.spec} without "
                f"{missing[0]!r} of axis_name={self.axis_name!r}. Rows that are the same on every "
                "rank of an axis are counted once for each of them: leave it out of axis_name."
            )
        rows = {
            tuple(name for name in _row_axes(each) if name in named)
            for each in _list_specs(self.spec, self.caller)
        }
        if len(rows) > 1:
            raise ValueError(
                f"{self.caller}: batch_spec must shard the rows of every leaf over the same axes "
                f"of axis_name={self.axis_name!r}, got rows over {sorted(rows)}. Rows are the "
                "first dimension; what is no row, such as class weights, is given as replicated=."
            )

    @property
    def row_axes(self) -> tuple[str, ...]:
        """The mapped axes that rows lie over; over the other mapped ones lie parts of them."""
        named = meshes.names_of(self.axis_name)
        if self.spec is None:
            return named
        first = _list_specs(self.spec, self.caller)[0]
        return tuple(name for name in _row_axes(first) if name in named)

    @property
    def part_axes(self) -> tuple[str, ...]:
        """The mapped axes that parts of rows lie over, such as the tokens of a long one."""
        return tuple(n for n in meshes.names_of(self.axis_name) if n not in self.row_axes)

    @property
    def ranks(self) -> int:
        """How many parts the rows come in."""
        return math.prod(self.mesh.shape[name] for name in self.row_axes)

    def specs_of(self, batch: Batch) -> PyTree:
        """How each leaf lies on the mesh: a spec for all of them, or a `Batch` of specs."""
        if self.spec is None:
            return PartitionSpec(self.axis_name)
        given, caller = self.spec, self.caller
        if isinstance(given, Batch):
            given = given.data
        try:
            spread = jax.tree.broadcast(given, batch.data, is_leaf=_is_spec)
        except ValueError as error:  # JAX's own words say where they differ
            raise ValueError(
                f"{caller}: batch_spec must have the structure of the batch's data, or of its "
                f"first levels, got {jax.tree.structure(given, is_leaf=_is_spec)} for "
                f"{jax.tree.structure(batch.data)}. {str(error).splitlines()[0]}"
            ) from None
        leaves = jax.tree_util.tree_leaves_with_path(batch.data)
        specs = jax.tree.leaves(spread, is_leaf=_is_spec)
        for (path, leaf), spec in zip(leaves, specs, strict=True):
            self._check_fits(f"data{jax.tree_util.keystr(path)}", np.shape(leaf), spec)
        # as the rows lie of which they are; the data may lie over more
        rows = PartitionSpec(specs[0][0] if len(specs[0]) else None)
        self._check_fits("weights", np.shape(batch.weights), rows)
        missing = jax.tree.map(lambda _: rows, batch.missing)
        return Batch(spread, rows, rows, missing)

    def mapped_specs_of(self, batch: Batch) -> PyTree:
        """The same of the mapped axes alone."""
        named = meshes.names_of(self.axis_name)

        def keep(spec: PartitionSpec) -> PartitionSpec:
            return meshes.keep_names(spec, named)

        return jax.tree.map(keep, self.specs_of(batch), is_leaf=_is_spec)

    def shardings_of(self, batch: Batch) -> PyTree:
        """The same as shardings: one for all leaves, or a `Batch` of them."""
        return jax.tree.map(
            lambda spec: NamedSharding(self.mesh, spec), self.specs_of(batch), is_leaf=_is_spec
        )

    def place(self, batch: Batch) -> Batch:
        """The batch on the mesh; what lies there already stays where it is."""
        return place_batch(batch, self.shardings_of(batch), caller="train step")

    def constrain(self, batch: Batch) -> Batch:
        """Inside a compiled function the batch, wherever it was placed, as it is to lie."""
        if self.spec is None:
            return batch  # entering the mapped function moves what is not there
        return meshes.constrain(batch, self.shardings_of(batch))

    @contextmanager
    def explain_axes(self) -> Iterator[None]:
        """Says what to do about a loss that uses axes otherwise than it may.

        Raises:
            ValueError: in place of JAX's own error, for one that is not mapped.
            TypeError: JAX's own, with what helps, where a loop begins with a constant.
        """
        try:
            yield
        except NameError as error:
            if self.spec is None or "unbound axis" not in str(error):
                raise
            raise ValueError(
                f"{self.caller}: axis_name must name the axes that loss_fn uses, got "
                f"{self.axis_name!r} and {str(error).splitlines()[0]!r}. Over other axes of "
                "batch_spec it sees everything, and XLA splits the work: write it as for one "
                "device, or name them in axis_name=."
            ) from None
        except TypeError as error:
            if "{V:" in str(error):  # how JAX writes a type that varies, where one does not
                error.add_note(
                    f"{self.caller}: a loop or a branch in loss_fn begins with a constant and goes "
                    "on with a rank's rows, as those of flax's RNNs and optax.ctc_loss do. In a "
                    'checked shard_map these are two types: engine="jit" or "pmap" takes it as it '
                    "is; or let it begin with jax.lax.pcast(constant, axes, to='varying')."
                )
            raise

    def _check_fits(self, name: str, shape: tuple[int, ...], spec: PartitionSpec) -> None:
        if len(spec) > len(shape):
            raise ValueError(
                f"{self.caller}: batch_spec must have at most one entry for each dimension, got "
                f"{spec} at {name}, of shape {shape}. Give each leaf a spec of its own."
            )
        for dim, entry in enumerate(spec):
            parts = math.prod(self.mesh.shape[axis] for axis in meshes.names_of(entry))
            if shape[dim] % parts:
                remedy = (
                    "Fill up with rows of weight 0, as batches(plan, ...) does."
                    if dim == 0
                    else "Fill up with what weighs nothing."
                )
                raise ValueError(
                    f"train step: batch must divide by the {parts} parts that batch_spec splits "
                    f"dimension {dim} into, got shape {shape} at {name}. {remedy}"
                )


def _is_spec(node: Any) -> bool:
    return isinstance(node, PartitionSpec)


def _list_specs(spec: BatchSpec, caller: str) -> list[PartitionSpec]:
    specs = jax.tree.leaves(spec.data if isinstance(spec, Batch) else spec, is_leaf=_is_spec)
    for each in specs:
        if not _is_spec(each):
            remedy = "P('data') is for rows that lie over the axis 'data'."
            raise TypeError(
                f"{caller}: batch_spec must be PartitionSpecs, got {type(each).__name__}. "
                f"{'Take its .spec.' if isinstance(each, NamedSharding) else remedy}"
            )
    if not specs:
        raise ValueError(
            f"{caller}: batch_spec must hold a PartitionSpec, got {spec!r}. Leave it out for rows "
            "over axis_name."
        )
    return specs


def _row_axes(spec: PartitionSpec) -> tuple[str, ...]:
    return meshes.names_of(spec[0]) if len(spec) else ()


def _names_in(spec: PartitionSpec) -> Iterable[str]:
    return [name for entry in spec for name in meshes.names_of(entry)]


def _check_names(spec: PartitionSpec, mesh: Mesh, caller: str) -> None:
    for entry in spec:
        if not (entry is None or isinstance(entry, str | tuple)):
            raise TypeError(
                f"{caller}: batch_spec must say of every dimension which axes it lies over, got "
                f"{spec}. Give names of axes, or None."
            )
    names = list(_names_in(spec))
    for name in names:
        if name not in mesh.shape:
            raise ValueError(
                f"{caller}: batch_spec must name axes of the mesh, got {name!r} in {spec} and axes "
                f"{tuple(mesh.axis_names)}."
            )
    if len(set(names)) < len(names):
        raise ValueError(
            f"{caller}: batch_spec must name each axis once, got {spec}. One dimension lies over "
            "an axis."
        )
