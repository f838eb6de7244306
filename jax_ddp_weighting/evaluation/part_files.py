"""Predictions on disk, a part at a time: for more than memory holds, and runs that are cut short.

A part is one `.npz` file that is there whole or not at all. Its name is made of the ids in it, so a
step that is run again replaces its own part, and nothing is ever appended to.
"""

import hashlib
import json
import os
import struct
import warnings
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import BadZipFile

import jax
import numpy as np
from jaxtyping import PyTree

from jax_ddp_weighting._arguments import check_epoch, check_length
from jax_ddp_weighting._files import open_whole
from jax_ddp_weighting.distributed.allgather import together
from jax_ddp_weighting.distributed.coordination import WAIT_S, check_timeout
from jax_ddp_weighting.distributed.waiting import Waiting
from jax_ddp_weighting.evaluation.id_index import common_id_dtype, index_ids
from jax_ddp_weighting.evaluation.local_rows import LocalRows
from jax_ddp_weighting.evaluation.predictions import (
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
from jax_ddp_weighting.evaluation.result_files import ResultFiles, as_storable
from jax_ddp_weighting.sampling.kinds import Plan, check_any_plan, count_steps

_FORMAT = 1
_Folder = str | os.PathLike[str]


class _TornError(ValueError):
    """A part that is not whole; the message names the file."""


class _Part(NamedTuple):
    """What a file holds, but for the predictions, which are read when they are needed."""

    path: Path
    ids: np.ndarray
    about: dict[str, Any]


def write_part(
    folder: _Folder, ids: Any, weights: Any, predictions: PyTree, *, run: str = ""
) -> Path | None:
    """Writes this process's accepted rows as one file, whole or not at all.

    The rule: one call a step. The file is named after the process and the ids, so a step that runs
    again after a failure replaces what it wrote before. Keep one folder per model and data set, or
    name the run, such as by the checkpoint that is evaluated: whoever reads the folder for another
    run is refused, where else the rows of one model would pass for those of the other.

    Args:
        folder: where parts are kept, made if it is not there; one that all processes share.
        ids: as `gather_by_id` takes them.
        weights: as `gather_by_id` takes them.
        predictions: as `gather_by_id` takes them, in dicts with string keys, lists and tuples.
        run: whose predictions they are: a name of the model, or of its checkpoint.

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
    run = _check_run("write_part", run)
    local = LocalRows(ids, weights, predictions, caller="write_part")
    local.lay()
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
        "run": run,
        "ids": facts,
        "leaves": [
            {"name": leaf.name, "dtypes": [dtype_name(leaf.dtype)], "shapes": [leaf.shape]}
            for leaf in leaves
        ],
        "tree": spell_tree(local.unflatten(list(range(len(rows)))), caller="write_part"),
    }
    # The same ids make the same name, so a step that is run again writes over its own part; and
    # processes never share a file, even if they hold copies of one row; nor do runs, so that one
    # that is to be refused has not overwritten the other's before.
    target = Path(folder, f"part-{jax.process_index():05d}-{_digest_ids(held, run)}.npz")
    target.parent.mkdir(parents=True, exist_ok=True)
    columns: dict[str, Any] = {"about": np.array(json.dumps(about)), "ids": held}
    columns |= {f"leaf{j}": as_storable(leaf) for j, leaf in enumerate(rows)}
    with open_whole(target) as file:
        np.savez(file, **columns)
    return target


def _digest_ids(ids: np.ndarray, run: str) -> str:
    """16 hexadecimal digits for some ids of a run: the same whatever array they came in."""
    if ids.dtype.kind == "U":  # as wide as they are: an array may be wider
        ids = ids.astype(f"<U{np.strings.str_len(ids).max(initial=1)}")
    # With the dtype, which says where an id ends and what it is: of bytes alone, ["1", "2"] would
    # be ["12"]. JSON says where the run ends.
    head = json.dumps([run, ids.dtype.str])
    return hashlib.blake2b(head.encode() + ids.tobytes(), digest_size=8).hexdigest()


def held_ids(folder: _Folder, *, run: str = "") -> np.ndarray:
    """The ids that a folder's parts hold, ascending, each once.

    The rule: a part that is torn, as a broken disk or a copy cut short leaves it, holds nothing; a
    warning names the file. The step that is run again writes it anew.

    Args:
        folder: where parts are kept; one that is not there holds nothing.
        run: whose predictions they are, as `write_part` was told.

    Returns:
        int64 or uint64 ids, or strings, ``[ids]``; int64 ``[0]`` where there are none.

    Raises:
        OSError: a file cannot be read.
        ValueError: a part is another run's, or of another format.

    Example:
        >>> held_ids("/not/there").tolist()
        []
    """
    return _find_held(folder, _check_run("held_ids", run), "held_ids")


def _find_held(folder: _Folder, run: str, caller: str) -> np.ndarray:
    whole = []
    for path in _list_parts(folder):
        try:
            whole.append(_read_part(path, run, caller))
        except _TornError as error:
            warnings.warn(f"{error} Until then its rows are not held.", stacklevel=3)
    return index_ids(_join_ids(whole, caller), None, caller=caller).ids


def due_step(
    folder: _Folder, plan: Plan, epoch: int = 0, *, run: str = "", timeout_s: float = WAIT_S
) -> int:
    """The first step of an epoch that the parts do not hold whole, to go on from.

    The rule: the same step on every process, the earliest that any of them finds, so every process
    must call it. An error on one is an error on all, at once; a process that does not come is named
    after `timeout_s`. A part that is torn holds nothing, as `held_ids` has it.

    Args:
        folder: where parts are kept; the folder that all processes share.
        plan: the plan whose steps are written, with ids of the data set.
        epoch: the plan's epoch.
        run: whose predictions they are, as `write_part` was told.
        timeout_s: how many seconds to wait for other processes.

    Returns:
        A step for `batches(plan, epoch, fetch, mesh, start_step=...)`; their number where
        nothing is due.

    Raises:
        TypeError: `plan` is no plan, or a number is none.
        ValueError: there is no such epoch, or a part is another run's.
        RuntimeError: another process failed, or is absent; it names it.

    Example:
        >>> due_step("/not/there", EpochPlan(9, num_replicas=2, batch_size=3))
        0
    """
    waiting = Waiting("due_step", check_timeout("due_step: timeout_s", timeout_s))
    with together(waiting) as looked:
        looked.tell(_find_due_step(folder, plan, epoch, run))
    return min(looked.heard)


def _find_due_step(folder: _Folder, plan: Plan, epoch: int, run: str) -> int:
    check_any_plan("due_step: plan", plan)
    epoch = check_epoch("due_step: epoch", epoch)
    held = _find_held(folder, _check_run("due_step", run), "due_step")
    steps = count_steps(plan, epoch)
    for step in range(steps):
        slots = plan.batch(epoch, step)
        if not np.isin(slots.ids[slots.weights > 0], held).all():
            return step
    return steps


def read_parts(
    folder: _Folder,
    *,
    num_examples: int | None = None,
    pad: Any = None,
    into: _Folder | None = None,
    run: str = "",
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
        into: a folder for one `.npy` file per leaf, and `ids.npy`, which is there when all of them
            are there and whole: it is written last, and taken away first where an older result is
            replaced. A file is named after its leaf's path, and where two leaves would have one
            name, or a name is too long for a file, by a digest of it too; its map's `filename`
            says how. Their space on the disk is taken before anything is written.
        run: whose predictions they are, as `write_part` was told.

    Returns:
        `Predictions`; with `into` the leaves are memory maps.

    Raises:
        CoverageError: an id is missing or out of range, where `num_examples` is known.
        OSError: a file cannot be read, or there is no space for the result.
        ValueError: no part is there, or one is torn or another run's (it names the file); parts
            disagree about an id, a structure, or a shape.
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
    run = _check_run("read_parts", run)
    parts = [_read_part(path, run, "read_parts") for path in _list_parts(folder)]
    if not parts:
        raise ValueError(
            f"read_parts: folder must hold parts, got none in {os.fspath(folder)}. "
            "write_part writes them."
        )
    trees = {json.dumps(part.about["tree"]): part.path.name for part in reversed(parts)}
    if len(trees) > 1:
        (_, first), (_, second), *_ = reversed(trees.items())
        raise ValueError(
            f"read_parts: parts must hold one structure of predictions, got different ones in "
            f"{first} and {second}. Keep one folder per model."
        )
    (tree,) = map(json.loads, trees)
    found = [(f" in {part.path.name}", part.about["leaves"]) for part in parts]
    leaves = agree_leaves(found, pad, caller="read_parts")
    index = index_ids(_join_ids(parts, "read_parts"), num_examples, caller="read_parts")

    def fill(table: Table) -> None:
        first = 0
        for part in parts:
            rows = _read_leaves(part)
            table.put(first, columns_of(rows, leaves))
            first += len(part.ids)
        if conflicts := table.conflicts():
            claims = _find_claims(parts, conflicts[0])
            raise conflict_error("read_parts", conflicts[0], claims, len(conflicts))

    def unflatten(filled: list[Any]) -> PyTree:
        return fill_tree(tree, filled)

    if into is None:
        table = Table(index, leaves)
        fill(table)
        return table.result(unflatten)
    with ResultFiles(Path(into)) as files:
        table = Table(index, leaves, files.allocate)
        fill(table)
        return table.result(unflatten, partial(files.finish, ids=index.ids))


def _read_leaves(part: _Part) -> list[np.ndarray]:
    with _open_part(part.path, "read_parts") as file:
        return [
            file[f"leaf{j}"].view(dtype_of(leaf["dtypes"][0]))
            for j, leaf in enumerate(part.about["leaves"])
        ]


def _find_claims(parts: Sequence[_Part], claimed: Any) -> list[str]:
    return [
        f"row {row} of {part.path.name}"
        for part in parts
        for row in np.flatnonzero(part.ids == claimed)
    ]


def _check_run(function: str, run: object) -> str:
    if not isinstance(run, str):
        raise TypeError(
            f"{function}: run must be a string, got {run!r} ({type(run).__name__}). It names the"
            " model, or its checkpoint."
        )
    return run


def _list_parts(folder: _Folder) -> list[Path]:
    return sorted(Path(folder).glob("part-*.npz"))


# What numpy and zipfile raise of a file that is cut short, overwritten in part, or all zeros.
_TORN = (BadZipFile, EOFError, KeyError, NotImplementedError, ValueError, struct.error, zlib.error)


@contextmanager
def _open_part(path: Path, caller: str) -> Iterator[Any]:
    with path.open("rb") as file:  # a file that cannot be opened is not torn
        try:
            # a file that starts as nothing that numpy knows would be taken for a pickle
            if file.read(4) != b"PK\x03\x04":
                raise BadZipFile(f"{path.stat().st_size} bytes that are no zip file")
            file.seek(0)
            with np.load(file) as part:
                yield part
        except _TORN as error:
            raise _TornError(
                f"{caller}: a part must be whole, got {type(error).__name__}: {error} in "
                f"{path.name}. Its step writes it anew when it is run again; else delete it."
            ) from error


def _read_part(path: Path, run: str, caller: str) -> _Part:
    """What a part is of.

    Raises:
        _TornError: it is not whole.
        ValueError: it is of another format, or another run's.
    """
    with _open_part(path, caller) as part:
        about = json.loads(str(part["about"]))
        found = about["format"], about.get("run", "")
        ids = part["ids"]
    if found[0] != _FORMAT:
        raise ValueError(
            f"{caller}: parts must be of format {_FORMAT}, got {found[0]} in {path.name}. Read "
            "them with the version that wrote them."
        )
    if found[1] != run:
        raise ValueError(
            f"{caller}: parts must be of run {run!r}, got one of {found[1]!r} in {path.name}. Keep "
            "one folder for each run, or name the run that is meant: run=..."
        )
    return _Part(path, ids, about)


def _join_ids(parts: Sequence[_Part], caller: str) -> np.ndarray:
    """The ids of parts, in their order."""
    dtype = common_id_dtype([part.about["ids"] for part in parts], caller=caller)
    return np.concatenate([np.zeros(0, dtype), *(part.ids.astype(dtype) for part in parts)])
