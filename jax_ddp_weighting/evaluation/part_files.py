"""Predictions on disk, a part at a time: for more than memory holds, and runs that are cut short.

A part is one `.npz` file that is there whole or not at all. Its name is made of the ids in it, so a
step that is run again replaces its own part, and nothing is ever appended to.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from jax_ddp_weighting._arguments import check_epoch, check_length
from jax_ddp_weighting._files import open_whole
from jax_ddp_weighting.distributed.allgather import allgather_messages
from jax_ddp_weighting.evaluation.id_index import common_id_dtype, index_ids
from jax_ddp_weighting.evaluation.local_rows import LocalRows
from jax_ddp_weighting.evaluation.predictions import (
    Allocate,
    Predictions,
    Table,
    agree_leaves,
    columns_of,
    conflict_error,
    dtype_name,
    dtype_of,
    fill_tree,
    spell_tree,
)
from jax_ddp_weighting.sampling.kinds import Plan, count_steps

_FORMAT = 1
_Folder = str | os.PathLike[str]


def write_part(folder: _Folder, ids: Any, weights: Any, predictions: PyTree) -> Path | None:
    """Writes this process's accepted rows as one file, whole or not at all.

    The rule: one call a step. The file is named after the process and the ids, so a step that runs
    again after a failure replaces what it wrote before. Keep one folder per model and data set.

    Args:
        folder: where parts are kept, made if it is not there; one that all processes share.
        ids: as `gather_by_id` takes them.
        weights: as `gather_by_id` takes them.
        predictions: as `gather_by_id` takes them, in dicts with string keys, lists and tuples.

    Returns:
        The file, or None where no row was accepted.

    Raises:
        TypeError, ValueError: as `gather_by_id` has them.

    Example:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> for ids, weights in ([4, 0], [1, 1]), ([2, 1], [1, 1]), ([3, 3], [1, 0]):
        ...     path = write_part(folder, ids, weights, np.array(ids) * 10)
        >>> read_parts(folder, num_examples=5).predictions.tolist()
        [0, 10, 20, 30, 40]
    """
    local = LocalRows(ids, weights, predictions, caller="write_part")
    about_rows, facts = local.describe(), local.read()
    count = facts.pop("count")
    if not count:
        return None
    leaves = agree_leaves([("", about_rows["leaves"])], None, caller="write_part")
    dtype = common_id_dtype([facts], caller="write_part")
    held = np.concatenate([ids.astype(dtype) for ids in local.ids(count)])
    rows = [np.concatenate(leaf) for leaf in zip(*local.leaves(count), strict=True)]
    about = {
        "format": _FORMAT,
        "ids": facts,
        "leaves": [
            {"name": leaf.name, "dtypes": [dtype_name(leaf.dtype)], "shapes": [leaf.shape]}
            for leaf in leaves
        ],
        "tree": spell_tree(local.unflatten(list(range(len(rows)))), caller="write_part"),
    }
    # The same ids make the same name, so a step that is run again writes over its own part; and
    # processes never share a file, even if they hold copies of one row.
    name = hashlib.blake2b(held.tobytes(), digest_size=8).hexdigest()
    target = Path(folder, f"part-{jax.process_index():05d}-{name}.npz")
    target.parent.mkdir(parents=True, exist_ok=True)
    columns: dict[str, Any] = {"about": np.array(json.dumps(about)), "ids": held}
    columns |= {f"leaf{j}": _as_storable(leaf) for j, leaf in enumerate(rows)}
    with open_whole(target) as file:
        np.savez(file, **columns)
    return target


def held_ids(folder: _Folder) -> np.ndarray:
    """The ids that a folder's parts hold, ascending, each once.

    Args:
        folder: where parts are kept; one that is not there holds nothing.

    Returns:
        int64 or uint64 ids, or strings, ``[ids]``; int64 ``[0]`` where there are none.

    Example:
        >>> held_ids("/not/there").tolist()
        []
    """
    return index_ids(_read_ids(folder, "held_ids"), None, caller="held_ids").ids


def due_step(folder: _Folder, plan: Plan, epoch: int = 0) -> int:
    """The first step of an epoch that the parts do not hold whole, to go on from.

    The rule: the same step on every process, the earliest that any of them finds, so every process
    must call it.

    Args:
        folder: where parts are kept; the folder that all processes share.
        plan: the plan whose steps are written, with ids of the data set.
        epoch: the plan's epoch.

    Returns:
        A step for `batches(plan, epoch, fetch, mesh, start_step=...)`; their number where
        nothing is due.

    Example:
        >>> due_step("/not/there", EpochPlan(9, num_replicas=2, batch_size=3))
        0
    """
    epoch = check_epoch("due_step: epoch", epoch)
    held = held_ids(folder)
    steps = count_steps(plan, epoch)
    step = 0
    while step < steps:
        slots = plan.batch(epoch, step)
        if not np.isin(slots.ids[slots.weights > 0], held).all():
            break
        step += 1
    return min(allgather_messages(step))


def read_parts(
    folder: _Folder,
    *,
    num_examples: int | None = None,
    pad: Any = None,
    into: _Folder | None = None,
) -> Predictions:
    """What all parts hold, in the order of the ids: what `gather_by_id` would have given.

    The rule: the same as for `gather_by_id`, and the same errors. It reads a part at a time; with
    `into` the result lies in files too, so that memory holds the ids and one part. One process
    calls it, after all have written.

    Args:
        folder: where parts are kept.
        num_examples: how many examples there are; when given, integer ids must be exactly
            ``[0, num_examples)``.
        pad: what to fill narrower rows with, where parts differ in width.
        into: a folder for one `.npy` file per leaf, and `ids.npy`. Files that are there already
            are overwritten.

    Returns:
        `Predictions`; with `into` the leaves are memory maps.

    Raises:
        CoverageError: an id is missing or out of range, where `num_examples` is known.
        ValueError: no part is there; parts disagree about an id, a structure, or a shape.
        TypeError: a leaf has several dtypes.

    Example:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> path = write_part(folder, [7, 5], None, {"text": ["seven", "five"]})
        >>> read_parts(folder).predictions["text"].tolist()
        ['five', 'seven']
    """
    if num_examples is not None:
        num_examples = check_length("read_parts: num_examples", num_examples)
    found, trees = [], {}
    for path, _, about in _open_parts(folder):
        found.append((f" in {path.name}", about["leaves"]))
        trees.setdefault(json.dumps(about["tree"]), path.name)
    if not found:
        raise ValueError(
            f"read_parts: folder must hold parts, got none in {os.fspath(folder)}. "
            "write_part writes them."
        )
    if len(trees) > 1:
        (_, first), (_, second), *_ = trees.items()
        raise ValueError(
            f"read_parts: parts must hold one structure of predictions, got different ones in "
            f"{first} and {second}. Keep one folder per model."
        )
    (tree,) = map(json.loads, trees)
    leaves = agree_leaves(found, pad, caller="read_parts")
    index = index_ids(_read_ids(folder, "read_parts"), num_examples, caller="read_parts")
    table = Table(index, leaves, None if into is None else _allocate_files(Path(into)))
    first = 0
    for _, part, about in _open_parts(folder):
        rows = [
            part[f"leaf{j}"].view(dtype_of(leaf["dtypes"][0]))
            for j, leaf in enumerate(about["leaves"])
        ]
        table.put(first, columns_of(rows, leaves))
        first += len(rows[0])
    if conflicts := table.conflicts():
        raise conflict_error(
            "read_parts", conflicts[0], _find_claims(folder, conflicts[0]), len(conflicts)
        )
    if into is not None:
        np.save(Path(into, "ids.npy"), index.ids)
    return table.result(lambda filled: fill_tree(tree, filled))


def _open_parts(folder: _Folder) -> Iterator[tuple[Path, Any, dict[str, Any]]]:
    for path in sorted(Path(folder).glob("part-*.npz")):
        with np.load(path) as part:
            about = json.loads(str(part["about"]))
            if about["format"] != _FORMAT:
                raise ValueError(
                    f"read_parts: parts must be of format {_FORMAT}, got {about['format']} in "
                    f"{path.name}. Read them with the version that wrote them."
                )
            yield path, part, about


def _read_ids(folder: _Folder, caller: str) -> np.ndarray:
    """The ids of all parts, in the order of the parts."""
    dtype = common_id_dtype([about["ids"] for _, _, about in _open_parts(folder)], caller=caller)
    found = [part["ids"].astype(dtype) for _, part, _ in _open_parts(folder)]
    return np.concatenate([np.zeros(0, dtype), *found])


def _find_claims(folder: _Folder, claimed: Any) -> list[str]:
    return [
        f"row {row} of {path.name}"
        for path, part, _ in _open_parts(folder)
        for row in np.flatnonzero(part["ids"] == claimed)
    ]


def _as_storable(leaf: np.ndarray) -> np.ndarray:
    """A leaf as numpy's own formats know it: they have no bfloat16 or its kin."""
    return leaf.view(f"u{leaf.dtype.itemsize}") if leaf.dtype.kind == "V" else leaf


def _allocate_files(folder: Path) -> Allocate:
    folder.mkdir(parents=True, exist_ok=True)

    def allocate(name: str, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        if 0 in shape:  # an empty file cannot be mapped
            return np.empty(shape, dtype)
        plain = _as_storable(np.empty(0, dtype)).dtype
        words = re.findall(r"[\w.-]+", name)
        path = folder / f"{'_'.join(['predictions', *words])}.npy"
        return np.lib.format.open_memmap(path, "w+", plain, shape).view(dtype)

    return allocate
