"""Rows with their identities and their weights: what a loss function is given."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, is_dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import PyTree

from jax_ddp_weighting._arguments import (
    as_native,
    check_at_least,
    check_not_masked,
    check_weights,
)
from jax_ddp_weighting.distributed import mesh as meshes
from jax_ddp_weighting.distributed.placement import (
    check_device_values,
    check_not_cut,
    check_not_lost,
    device_ids,
)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Batch:
    """Rows with their identities and their weights: what a loss function is given.

    Attributes:
        data: a pytree of arrays `[rows, ...]`.
        ids: integers `[rows]`, which example each row is; `[rows, most]` where a `PackedPlan` puts
            several into one, with -1 where there is no further one.
        weights: of the shape of ids, how much each counts; 0 is padding.
        missing: `[rows]`, weight that counts in the denominator alone; None, but in batches of
            `join_batches` whose convention divides by ranks that are not there any more. Where
            they sum to `M` and the weights to `V` over all ranks, each term of a loss in
            `value_and_grad` or a training step is divided by `1 + M / V` times its own weight.
    """

    data: Any
    ids: Any
    weights: Any
    missing: Any = None

    @classmethod
    def of(cls, data: PyTree, weights: Any = None, ids: Any = None) -> "Batch":
        """A batch made by hand, of data that no plan has laid out.

        Args:
            data: a pytree of arrays `[rows, ...]`.
            weights: `[rows]`, each finite and at least 0; all 1 when None.
            ids: integers `[rows]`; 0, 1, 2, ... when None.

        Returns:
            A `Batch` of the arrays as they are, on the host or on devices; of those that files
            hold in another machine's byte order, copies in this one's.

        Raises:
            TypeError: ids are no integers, or weights no numbers; or data hold a mapping or a
                dataclass that is no pytree.
            ValueError: the leaves have different numbers of rows, a weight on the host is
                negative or NaN, or a device would cut data or weights, such as integers of more
                than 32 bits while x64 is off. (What is on a device is not read back.)

        Example:
            >>> batch = Batch.of({"x": np.zeros((3, 2))}, weights=np.array([1, 1, 0]))
            >>> batch.ids.tolist(), batch.weights.tolist()
            ([0, 1, 2], [1, 1, 0])
        """
        for path, leaf in jax.tree_util.tree_leaves_with_path(data):
            check_is_leaf(leaf, f"data{jax.tree_util.keystr(path)}", caller="Batch.of")
        # what JAX would not take as it is: a step of one's own is given it without a look
        data = jax.tree.map(lambda x: as_native(x) if isinstance(x, np.ndarray) else x, data)
        shapes = [np.shape(leaf) for leaf in jax.tree.leaves(data)]
        if not shapes or any(not shape or shape[0] != shapes[0][0] for shape in shapes):
            raise ValueError(
                "Batch.of: data must be arrays with one leading axis of rows, got shapes "
                f"{shapes}. Give every leaf the same number of rows."
            )
        rows = shapes[0][0]
        weights = np.ones(rows, np.int32) if weights is None else _as_array("weights", weights)
        ids = np.arange(rows, dtype=np.int32) if ids is None else _as_array("ids", ids)
        for name, array in (("weights", weights), ("ids", ids)):
            if array.shape != (rows,):
                raise ValueError(
                    f"Batch.of: {name} must have one entry per row, got shape {array.shape} for "
                    f"{rows} rows. Token weights belong in data, beside the tokens."
                )
        if not jnp.issubdtype(ids.dtype, jnp.integer):
            raise TypeError(
                f"Batch.of: ids must be integers, got {ids.dtype}. They say which example each row "
                "is; other names of examples belong in data."
            )
        real = jnp.issubdtype(weights.dtype, jnp.floating)
        if not (real or jnp.issubdtype(weights.dtype, jnp.integer) or weights.dtype == bool):
            raise TypeError(
                f"Batch.of: weights must be real numbers, got {weights.dtype}. A row that is not "
                "to count weighs 0."
            )
        if isinstance(weights, np.ndarray):
            remedy = "A row that is not to count weighs 0."
            check_weights("Batch.of: weights", weights, remedy, first=0)
        batch = cls(data, ids, weights)
        # that data are numbers is asked where they go to a device: names may be kept beside them
        check_batch_values(batch, check_not_cut, caller="Batch.of")
        return batch

    def padded(self, multiple: int) -> "Batch":
        """The batch, filled up with rows of weight 0 until its rows divide by `multiple`.

        The rule: a row of padding repeats the first row, id included, at weight 0. So its data are
        as finite as that row's, and it counts for nothing.

        Args:
            multiple: what the number of rows is to divide by, such as microbatches times ranks;
                inside a mapped function, where a batch holds one rank's rows, the microbatches.

        Returns:
            A `Batch` of host arrays where they were on the host, else of device arrays; the same
            batch where the rows divide already.

        Raises:
            TypeError: `multiple` is no integer.
            ValueError: `multiple` is below 1.

        Example:
            >>> batch = Batch.of(np.array([7.0, 8.0, 9.0])).padded(4)
            >>> batch.data.tolist(), batch.ids.tolist(), batch.weights.tolist()
            ([7.0, 8.0, 9.0, 7.0], [0, 1, 2, 0], [1, 1, 1, 0])
        """
        check_at_least("Batch.padded: multiple", multiple, 1, "1 adds no rows.", kind="")
        rows = self.weights.shape[0]
        return pad_rows(self, rows + -rows % multiple)


def check_is_leaf(leaf: Any, name: str, *, caller: str) -> None:
    """Refuses a container that JAX does not look into, such as the dict of a tokenizer.

    numpy would make one element of it, or its keys, and so rows that nobody has.

    Raises:
        TypeError: it is a mapping or a dataclass that is no pytree, or a masked array.
    """
    check_not_masked(f"{caller}: {name}", leaf)
    if isinstance(leaf, Mapping) or is_dataclass(leaf):
        remedy = "dict(rows)" if isinstance(leaf, Mapping) else "a dict of its fields"
        raise TypeError(
            f"{caller}: {name} must be arrays, or a pytree of them, got {type(leaf).__name__}, "
            f"into which JAX does not look. Give {remedy}."
        )


def pad_rows(batch: Batch, rows: int) -> Batch:
    """The batch, filled up to so many rows with copies of its first one that weigh nothing.

    Copies rather than zeros: what is finite of a real row is finite of padding too, and 0 times an
    infinite derivative would be NaN. A batch without rows is filled up with zeros.
    """
    found = batch.weights.shape[0]
    if found >= rows:
        return batch

    def repeat_first(leaf: Any) -> Any:
        numpy = jnp if isinstance(leaf, jax.Array) else np
        if not found:
            return numpy.zeros((rows, *leaf.shape[1:]), leaf.dtype)
        return numpy.concatenate([leaf, numpy.repeat(leaf[:1], rows - found, axis=0)])

    real = np.arange(rows) < found

    def weigh_real_rows(weights: Any) -> Any:
        weights = repeat_first(weights)
        # of a packed plan a row has several weights
        return weights * real.astype(weights.dtype).reshape(-1, *[1] * (weights.ndim - 1))

    return Batch(
        jax.tree.map(repeat_first, batch.data),
        repeat_first(batch.ids),
        weigh_real_rows(batch.weights),
        jax.tree.map(weigh_real_rows, batch.missing),
    )


MAKE_OR_READ_BATCHES = "Batch.of(data, weights) makes one; batches(plan, ...) yields them."
"""What to do about something that is no `Batch`, where a plan could have yielded it."""


def check_batch(
    rule: str, batch: object, remedy: str = "Batch.of(data, weights) makes one."
) -> None:
    """Refuses what is no `Batch`.

    Args:
        rule: who asks for what: ``"train step: batch must be a Batch"``.
        batch: what the caller was given.
        remedy: a closing sentence for the error.

    Raises:
        TypeError: it is none.
    """
    if not isinstance(batch, Batch):
        raise TypeError(f"{rule}, got {type(batch).__name__}. {remedy}")


def check_batch_values(
    batch: Batch, check: Callable[..., None] = check_device_values, *, caller: str
) -> None:
    """Refuses a batch on the host whose data or weights a device would cut.

    Args:
        batch: a batch, on the host or on devices.
        check: what each leaf of data and weights on the host must pass.
        caller: who speaks in errors.

    Raises:
        TypeError: a leaf holds no numbers.
        ValueError: a value would be cut; names the leaf.
    """
    fields = {"data": batch.data, "weights": batch.weights, "missing": batch.missing}
    for name, values in fields.items():
        for path, leaf in jax.tree_util.tree_leaves_with_path(values):
            if not isinstance(leaf, jax.Array):  # what is on a device is as it is
                where = f"{name}{jax.tree_util.keystr(path)}"
                check_not_masked(f"{caller}: {where}", leaf)
                check(np.asarray(leaf), where, caller=caller)
    if isinstance(batch.weights, np.ndarray):
        check_not_lost(batch.weights, caller=caller)


def check_is_global(batch: Batch, mesh: Mesh | AbstractMesh, *, caller: str) -> None:
    """Refuses a process's own rows where a batch of all processes' rows is needed.

    JAX would take them for the whole batch, the same on every process, and compare them by a
    collective, which ends processes of unequal shapes. So this comes before.

    Raises:
        ValueError: a leaf lies on this process alone, while the mesh has more.
    """
    if isinstance(mesh, AbstractMesh) or not mesh.is_multi_process:
        return
    for leaf in jax.tree.leaves(batch):
        traced = isinstance(leaf, Tracer)
        if not traced and getattr(leaf, "is_fully_addressable", True):
            raise ValueError(
                f"{caller}: batch must be a global one on a mesh of several processes, got "
                f"{np.shape(batch.weights)[0]} rows of process {jax.process_index()} alone. "
                "global_batch(batch, mesh) makes one of each process's rows; batches(plan, ...) "
                "and join_batches(stream, mesh) yield them."
            )


def place_batch(batch: Batch, sharding: PyTree, *, caller: str) -> Batch:
    """A batch with its rows on the mesh, as `mesh.place` places them, and nothing of it cut.

    Args:
        batch: a batch, on the host or on devices.
        sharding: a `NamedSharding` for all leaves, or a `Batch` of them.
        caller: who speaks in errors.

    Raises:
        TypeError: a leaf holds no numbers.
        ValueError: a value would be cut, or the rows are one process's while the mesh has several.
    """
    check_is_global(batch, jax.tree.leaves(sharding)[0].mesh, caller=caller)
    check_batch_values(batch, caller=caller)
    if isinstance(batch.ids, np.ndarray):
        batch = replace(batch, ids=device_ids(batch.ids, caller=caller))
    return meshes.place(batch, sharding)


def _as_array(name: str, values: Any) -> Any:
    check_not_masked(f"Batch.of: {name}", values)
    return values if isinstance(values, jax.Array) else as_native(np.asarray(values))
