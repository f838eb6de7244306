"""Predictions brought together from every process, by id."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, overload

import jax
import numpy as np
from jaxtyping import PyTree

from jax_ddp_weighting._arguments import check_length
from jax_ddp_weighting.distributed import allgather
from jax_ddp_weighting.distributed.coordination import WAIT_S, check_timeout
from jax_ddp_weighting.distributed.waiting import Waiting
from jax_ddp_weighting.evaluation.id_index import common_id_dtype, index_ids
from jax_ddp_weighting.evaluation.local_rows import LocalRows
from jax_ddp_weighting.evaluation.predictions import (
    Leaf,
    Predictions,
    Table,
    agree_leaves,
    columns_like,
    columns_of,
    conflict_error,
)
from jax_ddp_weighting.sampling.audit import CoverageError


@overload
def gather_by_id(
    ids: Any,
    weights: Any,
    predictions: PyTree,
    *,
    num_examples: int | None = None,
    to: Literal["all"] = "all",
    pad: Any = None,
    timeout_s: float = WAIT_S,
) -> Predictions: ...
@overload
def gather_by_id(
    ids: Any,
    weights: Any,
    predictions: PyTree,
    *,
    num_examples: int | None = None,
    to: Literal["first"],
    pad: Any = None,
    timeout_s: float = WAIT_S,
) -> Predictions | None: ...
def gather_by_id(
    ids: Any,
    weights: Any,
    predictions: PyTree,
    *,
    num_examples: int | None = None,
    to: str = "all",
    pad: Any = None,
    timeout_s: float = WAIT_S,
) -> Predictions | None:
    """Every accepted row's prediction, from all processes, in the order of the ids.

    The rule: rows of weight 0 are gone, every other row is found by its id and never by its
    position, and each id comes out once. Equal copies are dropped and reported; copies that differ
    are an error, since neither can be believed. Nothing is rounded on the way: the bytes travel.

    Every process must call it, an empty-handed one too, and an error on one is an error on all. One
    that does not come, or is gone, is named on the others after `timeout_s`, and at most a quarter
    of that or 10 s more. Beside the result a process holds one chunk of about 1 MiB from each
    process.

    Args:
        ids: integers of up to 64 bits, or strings, ``[rows]``: this process's rows, on the host or
            on its devices; or a global array, as a `Batch` has. Or a list of such, one a step, with
            `weights` and `predictions` as lists of the same length.
        weights: ``[rows]``, each finite and at least 0; None where every row counts.
        predictions: a pytree of arrays ``[rows, ...]`` (numbers or strings) that lie as `ids` do. A
            process without rows may give an empty list for whatever the others have.
        num_examples: how many examples there are. When given, integer ids must be exactly
            ``[0, num_examples)``, and no sorting is needed.
        to: ``"all"`` gives every process the result; ``"first"`` gives it to process 0 and None to
            the others.
        pad: where rows differ in their first axis between steps or processes, as generated tokens
            do: the value to fill narrower rows with. They are refused when None.
        timeout_s: how many seconds to wait for other processes at each exchange.

    Returns:
        `Predictions`, the leaves on the host.

    Raises:
        CoverageError: an id is missing or out of range, where `num_examples` is known. It names
            ids.
        TypeError: ids are neither integers nor strings; a leaf has several dtypes.
        ValueError: two rows claim one id with different predictions (it names both rows); lengths,
            structures or shapes differ; a weight is negative or NaN.
        RuntimeError: another process failed, or is absent; it names it.

    Example:
        >>> ids, weights = np.array([2, 0, 1, 0]), np.array([1, 1, 1, 0])  # the last is padding
        >>> found = gather_by_id(ids, weights, {"class": np.array([7, 5, 6, 9])}, num_examples=3)
        >>> found.ids.tolist(), found.predictions["class"].tolist()
        ([0, 1, 2], [5, 6, 7])
    """
    timeout_s = check_timeout("gather_by_id: timeout_s", timeout_s)
    waiting = Waiting("gather_by_id", timeout_s)
    # Whatever fails on one process alone is told to all before any rows travel: a process that
    # raised by itself would leave the others waiting in a collective.
    with allgather.together(waiting, CoverageError) as looks:
        if to not in ("all", "first"):
            raise ValueError(
                f'gather_by_id: to must be "all" or "first", got {to!r}. '
                '"first" is process 0, where a result is to be written, say.'
            )
        if num_examples is not None:
            num_examples = check_length("gather_by_id: num_examples", num_examples)
        local = LocalRows(ids, weights, predictions, caller="gather_by_id")
        looks.tell({**local.describe(), "arguments": repr((num_examples, to, pad))})
    leaves = _agree_on_leaves(looks.heard, pad)
    local.take_structure(_agree_on_structure(looks.heard))
    keeps = to == "all" or jax.process_index() == 0
    with allgather.together(waiting, CoverageError) as read:
        read.tell(waiting.wait(local.lay, lambda _: local.read()))
    counts = [each["count"] for each in read.heard]
    id_dtype = common_id_dtype(read.heard, caller="gather_by_id")

    with allgather.together(waiting):  # memory may run out on one process, as everywhere below
        gathered = np.empty(sum(counts) if keeps else 0, id_dtype)
    size = allgather.rows_per_chunk(id_dtype.itemsize)

    def put_ids(first: int, columns: allgather.Columns) -> None:
        if keeps:
            gathered[first : first + len(columns[0])] = columns[0]

    # Ids travel first and alone: once all are here, every later row can go straight to where it
    # belongs, and no second copy of the predictions is ever made to sort them.
    with allgather.together(waiting):
        own = ([chunk.astype(id_dtype, copy=False)] for chunk in local.ids(size))
        allgather.allgather_rows(own, counts, [(id_dtype, ())], put_ids, waiting)
    table = None
    # Together, since an id that is missing is found where the result is kept, perhaps on process 0
    # alone, and the others would wait for its rows.
    with allgather.together(waiting, CoverageError):
        if keeps:
            index = index_ids(gathered, num_examples, caller="gather_by_id")
            del gathered  # the index holds what is needed of them, often in the same memory
            table = Table(index, leaves)

    def put_rows(first: int, columns: allgather.Columns) -> None:
        if table is not None:
            table.put(first, columns)

    like = columns_like(leaves)
    size = allgather.rows_per_chunk(allgather.row_bytes(like))
    with allgather.together(waiting) as ended:
        own = (columns_of(rows, leaves) for rows in local.leaves(size))
        allgather.allgather_rows(own, counts, like, put_rows, waiting)
        conflicts = [] if table is None else table.conflicts()
        ended.tell([len(conflicts), list(conflicts[:1])])
    _refuse_conflicts(ended.heard, local, waiting)
    return None if table is None else table.result(local.unflatten)


def _agree_on_leaves(everyone: Sequence[Mapping[str, Any]], pad: Any) -> list[Leaf]:
    """What the leaves are, once it is clear that all processes gather the same thing."""
    for key, noun, remedy in (
        ("arguments", "num_examples, to and pad", "They are no matter of the process."),
        ("global", "global arrays", "Gather batches everywhere, or host arrays everywhere."),
        (
            "structure",
            "the structure of predictions",
            "A process without rows gives arrays [0, ...] of the same structure.",
        ),
    ):
        said = [
            (process, each[key]) for process, each in enumerate(everyone) if each[key] is not None
        ]
        for process, value in said:
            if value != said[0][1]:
                raise ValueError(
                    f"gather_by_id: {noun} must be the same on every process, got "
                    f"{said[0][1]} on process {said[0][0]} and {value} on process {process}. "
                    f"{remedy}"
                )
    # Processes without rows have no say in dtypes and shapes: what they give is made up.
    filled = [
        (f" on process {process}" if len(everyone) > 1 else "", each["leaves"])
        for process, each in enumerate(everyone)
        if each["rows"]
    ]
    said = [each for each in everyone if each["structure"] is not None] or everyone
    return agree_leaves(filled or [("", said[0]["leaves"])], pad, caller="gather_by_id")


def _agree_on_structure(everyone: Sequence[Mapping[str, Any]]) -> Any:
    """The structure of those who have one, as JSON holds it, for those who have none."""
    said = [each for each in everyone if each["structure"] is not None]
    if len(said) in (0, len(everyone)):
        return everyone[0]["spelled"]
    if said[0]["spelled"] is None:
        raise ValueError(
            "gather_by_id: predictions must be dicts with string keys, lists, tuples and arrays "
            f"where a process gives an empty list, got {said[0]['structure']}. A process without "
            "rows gives arrays [0, ...] of the same structure."
        )
    return said[0]["spelled"]


def _refuse_conflicts(found: Sequence[Any], local: LocalRows, waiting: Waiting) -> None:
    """Names the ids, and where the rows that claim the first of them sit, on every process."""
    number, shown = max(found, key=lambda x: x[0])
    if not number:
        return
    with allgather.together(waiting) as looked:
        looked.tell(local.claims(shown[0]))
    rows = [
        f"{row} on process {process}" if len(looked.heard) > 1 else row
        for process, claims in enumerate(looked.heard)
        for row in claims
    ]
    raise conflict_error("gather_by_id", shown[0], rows, number)
