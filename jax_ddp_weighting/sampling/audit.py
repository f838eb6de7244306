"""What was really read: slots counted by id."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Integer

from jax_ddp_weighting._arguments import check_length, check_limit, check_weights, list_some
from jax_ddp_weighting._errors import JdwError
from jax_ddp_weighting.sampling.names import STRINGS, IdNames, read_ids, read_names
from jax_ddp_weighting.sampling.tally import Tally

LISTED = 10_000
"""How many ids of a kind an audit lists, unless told otherwise; the rest it counts."""

_BLOCK = 1 << 16  # slots looked at at once: temporaries stay small beside a byte per example

Id = int | str
Rank = tuple[np.ndarray, np.ndarray | None]  # one rank's ids, and its weights if there are any


class CoverageError(JdwError):
    """An epoch that did not count every id exactly once; the message names ids."""


@dataclass(frozen=True)
class SourceAudit:
    """What an epoch held of one source of a mixture, and where that source is by then.

    Args:
        draws: accepted slots that hold an id of it.
        epochs: whole epochs of its own that it has been drawn for by the end of this one, since
            epoch 0. By its order: what a tail leaves out counts as drawn.
        unique: different ids of it in accepted slots.
        due: how many ids are left of its own epoch by then.

    Example:
        >>> from jax_ddp_weighting import EpochPlan, mixture_order
        >>> plan = EpochPlan.from_order(mixture_order([2, 5], [1, 1], 6), 2, 3)
        >>> plan.audit(0).sources[0]
        SourceAudit(draws=3, epochs=1, unique=2, due=1)
    """

    draws: int
    epochs: int
    unique: int
    due: int


@dataclass(frozen=True)
class EpochAudit:
    """What the slots of an epoch covered.

    Args:
        num_examples: how many ids there are.
        slots: slots looked at, padding included.
        accepted: slots of weight above 0.
        unique: different ids in accepted slots, of those in range.
        duplicated: id -> accepted slots, where there is more than one; in ascending order, up to
            the audit's limit.
        omitted: ids in no accepted slot, ascending, up to the audit's limit; none where ids are
            strings of which not all are known.
        out_of_range: different ids outside ``[0, num_examples)``, ascending, up to the limit.
        num_duplicated: how many ids are duplicated, listed or not.
        num_omitted: how many ids are omitted, listed or not.
        num_out_of_range: how many accepted slots hold an id out of range.
        per_rank: accepted slots of each rank.
        weight_range: smallest and largest accepted weight that an id received over all its slots;
            an omitted id received 0.
        epoch: the epoch, where it is known.
        remedy: what to do where ids are missing or come again, as the error ends; advice on tails
            where it is None. No part of the comparison of two audits.
        sources: of a mixture, what each source gave, from `EpochPlan.audit`. No part of the
            comparison of two audits.

    Example:
        >>> from jax_ddp_weighting import audit_ids
        >>> audit = audit_ids([0, 2, 2], 4, epoch=3)
        >>> audit.check_exactly_once()
        Traceback (most recent call last):
        ...
        jax_ddp_weighting.sampling.audit.CoverageError: epoch 3: 2 of 4 ids omitted (1, 3), 1 \
duplicated (2). tail="drop" cuts the tail; tail="mask" keeps every id once.
    """

    num_examples: int
    slots: int
    accepted: int
    unique: int
    duplicated: Mapping[Id, int]
    omitted: tuple[Id, ...]
    out_of_range: tuple[Id, ...] = ()
    num_duplicated: int = 0
    num_omitted: int = 0
    num_out_of_range: int = 0
    per_rank: tuple[int, ...] = ()
    weight_range: tuple[float, float] = (0, 0)
    epoch: int | None = None
    remedy: str | None = field(default=None, compare=False, repr=False)
    sources: tuple[SourceAudit, ...] = field(default=(), compare=False, repr=False)

    @property
    def exactly_once(self) -> bool:
        """Whether every id sits in one accepted slot, and nothing else does."""
        return not (self.num_duplicated or self.num_omitted or self.num_out_of_range)

    def check_exactly_once(self) -> None:
        """Raise unless every id was accepted exactly once.

        Raises:
            CoverageError: ids were omitted, duplicated or out of range. It names them.
        """
        if self.exactly_once:
            return
        where = "" if self.epoch is None else f"epoch {self.epoch}: "
        parts = [
            f"{self.num_omitted} of {self.num_examples} ids omitted"
            + _list_in_brackets(self.omitted, self.num_omitted),
            f"{self.num_duplicated} duplicated"
            + _list_in_brackets(tuple(self.duplicated), self.num_duplicated),
        ]
        if self.num_out_of_range:
            parts.append(
                f"{self.num_out_of_range} slots out of range" + _list_in_brackets(self.out_of_range)
            )
            remedy = "Ids count from zero, below num_examples."
        elif self.remedy is not None:
            remedy = self.remedy
        elif self.num_omitted:
            remedy = 'tail="drop" cuts the tail; tail="mask" keeps every id once.'
        else:
            remedy = 'tail="repeat" repeats ids; tail="mask" keeps every id once.'
        raise CoverageError(f"{where}{', '.join(parts)}. {remedy}")


def _list_in_brackets(ids: Sequence[Id], count: int | None = None) -> str:
    return f" ({list_some(ids, count)})" if ids else ""


def audit_ids(
    ids: Any,
    num_examples: int,
    *,
    weights: Any = None,
    epoch: int | None = None,
    limit: int = LISTED,
    names: Iterable[str] | None = None,
) -> EpochAudit:
    """What some slots covered, counted by id.

    A slot is accepted where its weight is above 0. One pass, about one byte per example; a second
    pass where weights differ and ids come several times.

    Args:
        ids: integer ids, or strings: one array; an array ``[ranks, slots]``; or a sequence, one
            entry for each rank, of arrays or of lists of batches of any lengths.
        num_examples: how many ids there are. More different strings are out of range.
        weights: weights of the same form and shape, at least 0; all 1 by default.
        epoch: the epoch to name in errors.
        limit: how many ids of a kind to list; the rest are counted.
        names: where ids are strings, all that there are: without them, omitted ones can be counted
            but not named.

    Returns:
        An `EpochAudit`.

    Raises:
        TypeError: ids are neither integers nor strings, or some of each.
        ValueError: weights are negative, NaN, infinite, or of another shape; or names are not as
            many different ones as there are ids.

    Example:
        >>> audit = audit_ids([[0, 2, 4], [1, 3, 0]], 6)
        >>> audit.slots, audit.unique, audit.duplicated, audit.omitted
        (6, 5, {0: 2}, (5,))
        >>> audit_ids([[0, 2, 4], [1, 3, 0]], 5, weights=[[1, 1, 1], [1, 1, 0]]).exactly_once
        True
        >>> audit_ids(["cat", "dog", "dog"], 3, names=["cat", "cow", "dog"]).omitted
        ('cow',)
    """
    n = check_length("audit_ids: num_examples", num_examples)
    limit = check_limit("audit_ids: limit", limit)
    rank_weights = None if weights is None else _split_by_rank("weights", weights)
    ranks = check_entries("audit_ids", _split_by_rank("ids", ids), rank_weights)
    _check_batches(ids, weights)
    known = None if names is None else read_names("audit_ids", names, n)
    ranks, known = _number_strings(ranks, known)
    tally, strays, per_rank = Tally(n), [], []
    for rank in ranks:
        accepted = 0
        # A tally indexes by id, so an id out of range would be another's (-1) or an error.
        for block, _ in _take_accepted(*rank):
            accepted += len(block)
            if block.size and (block.min() < 0 or block.max() >= n):
                inside = (block >= 0) & (block < n)
                strays.append(block[~inside])
                block = block[inside]
            tally.add(block)
        per_rank.append(accepted)
    return audit_tally(
        tally,
        slots=sum(len(rank_ids) for rank_ids, _ in ranks),
        strays=strays,
        per_rank=tuple(per_rank),
        weight_range=_find_weight_range(ranks, tally),
        epoch=epoch,
        limit=limit,
        names=known,
    )


def _number_strings(ranks: list[Rank], names: IdNames | None) -> tuple[list[Rank], IdNames | None]:
    """Ranks whose ids are numbers, and the names of these; strings of padding get no number."""
    if names is None and not any(ids.dtype.kind in STRINGS for ids, _ in ranks):
        return ranks, None
    names = IdNames() if names is None else names
    numbered = []
    for ids, weights in ranks:
        accepted = slice(None) if weights is None else weights > 0
        numbers = np.zeros(len(ids), np.int64)
        if ids.size:
            numbers[accepted] = names.number(ids[accepted])
        numbered.append((numbers, weights))
    return numbered, names


def _split_by_rank(name: str, values: Any) -> list[np.ndarray]:
    """One array for each rank."""
    # A plain list of ids is one rank's, and is made an array as a whole; of a list of arrays each
    # is a rank, whatever its length, where `np.asarray` would ask for equal ones.
    if isinstance(values, Sequence) and not all(isinstance(value, int) for value in values):
        arrays = [_flatten(name, value) for value in values]
        if all(array.ndim for array in arrays):
            return arrays
    try:
        array = read_ids(f"audit_ids: {name}", values)
    except ValueError:
        shape = "lists beside single ones"
    else:
        if array.ndim <= 2:
            return list(array) if array.ndim == 2 else [array]
        shape = f"shape {array.shape}"
    raise ValueError(
        f"audit_ids: {name} must be [slots] or [ranks, slots], got {shape}."
        " Reshape them so that each rank has one row."
    )


def _flatten(name: str, values: Any) -> np.ndarray:
    """One rank's values as one array, be they batches of unequal length."""
    try:
        return read_ids(f"audit_ids: {name}", values)
    except ValueError:  # numpy's word for lists of unequal length
        parts = [np.ravel(_flatten(name, value)) for value in values]
    return np.concatenate([part for part in parts if part.size])


def _check_batches(ids: Any, weights: Any) -> None:
    """Refuses weights whose batches are of other lengths than those of the ids.

    Flat they might be as many, and each weight would go to another id than its own.
    """
    if not all(isinstance(each, list | tuple) for each in (ids, weights)):
        return
    for rank, (of_ids, of_weights) in enumerate(zip(ids, weights, strict=False)):
        if not all(isinstance(each, list | tuple) for each in (of_ids, of_weights)):
            continue
        shapes = [list(map(np.shape, batches)) for batches in (of_ids, of_weights)]
        if shapes[0] == shapes[1] or not all(map(any, shapes)):  # scalars have no shape
            continue
        # flat they are as many, so that they differ before either ends
        step = next(i for i, (a, b) in enumerate(zip(*shapes, strict=False)) if a != b)
        got = [each[step] for each in shapes]
        raise ValueError(
            f"audit_ids: weights must have the shape of ids, got {got[1]} and {got[0]} in batch"
            f" {step} of rank {rank}. Every slot has one weight."
        )


def check_entries(
    function: str, ids: list[np.ndarray], weights: list[np.ndarray] | None
) -> list[Rank]:
    """Every rank's ids and weights, flat, of one length, and such as they must be."""
    ids = [_read_strings(rank_ids) for rank_ids in ids]
    for rank_ids in ids:
        if rank_ids.dtype.kind == "O" and not rank_ids.ndim:  # numpy wraps what it cannot read
            raise TypeError(
                f"{function}: ids must be an array or a sequence, got a"
                f" {type(rank_ids.item()).__name__}. Make a list of it."
            )
        if rank_ids.size and rank_ids.dtype.kind not in "iu" + STRINGS:
            raise TypeError(
                f"{function}: ids must be integers, got {rank_ids.dtype}. Give them in an integer"
                " dtype, which holds 64 bits at most, or as strings."
            )
    if len({rank_ids.dtype.kind in STRINGS for rank_ids in ids if rank_ids.size}) > 1:
        raise TypeError(
            f"{function}: ids must be all integers or all strings, got some of each. One kind names"
            " an example."
        )
    # numpy makes floats of an empty list; no ids at all are ids of any type
    flat = [np.ravel(r) if r.size else np.zeros(0, np.int64) for r in ids]
    if weights is None:
        return [(rank_ids, None) for rank_ids in flat]
    shapes, wanted = [[array.shape for array in part] for part in (weights, ids)]
    if shapes != wanted:
        raise ValueError(
            f"{function}: weights must have the shape of ids, got {_show_shape(shapes)} and"
            f" {_show_shape(wanted)}. Every slot has one weight."
        )
    for values in weights:
        if values.dtype.kind not in "iufbV":  # V: bfloat16 and its kin, which compare as numbers
            raise TypeError(f"{function}: weights must be numbers, got {values.dtype}.")
        check_weights(f"{function}: weights", values, "Padding has weight 0.")
    return list(zip(flat, map(np.ravel, weights), strict=True))


def _read_strings(ids: np.ndarray) -> np.ndarray:
    """Python's strings in an array of objects as numpy's; everything else as it is."""
    if ids.dtype.kind == "O" and ids.size and all(isinstance(each, str) for each in ids.flat):
        return ids.astype(str)
    return ids


def _show_shape(shapes: list[tuple[int, ...]]) -> str:
    return str(shapes[0]) if len(shapes) == 1 else f"by rank {list_some(shapes)}"


def audit_tally(
    tally: Tally,
    *,
    slots: int,
    per_rank: tuple[int, ...],
    epoch: int | None,
    limit: int,
    weight_range: tuple[float, float] | None = None,
    strays: Sequence[Integer[np.ndarray, " slots"]] = (),
    names: IdNames | None = None,
    remedy: str | None = None,
) -> EpochAudit:
    """What a tally has met, and ids that it could not meet; each meeting weighs 1 by default."""
    repeated, counts = tally.repeated()
    # Numbers are ascending, so that the first few can be listed without the rest. Names are
    # ascending when they are sorted, and only then cut.
    first = limit if names is None else None
    times: dict[Id, int] = dict(
        zip(repeated[:first].tolist(), counts[:first].tolist(), strict=True)
    )
    # as Python's integers: numpy makes floats of int64 beside uint64
    beyond: set[Id] = {stray for block in strays for stray in np.unique(block)[:first].tolist()}
    omitted: list[Id] = []
    if names is None or len(names) >= tally.num_examples:  # or nobody knows what is missing
        omitted = tally.unmet(limit).tolist()
    if names is not None:
        text: Any = names.list_all()
        times = {text[number]: count for number, count in times.items()}
        beyond, omitted = {text[each] for each in beyond}, [text[each] for each in omitted]
    return EpochAudit(
        num_examples=tally.num_examples,
        slots=slots,
        accepted=sum(per_rank),
        unique=tally.unique,
        duplicated={each: times[each] for each in sorted(times)[:limit]},
        omitted=tuple(sorted(omitted)),
        out_of_range=tuple(sorted(beyond)[:limit]),
        num_duplicated=len(repeated),
        num_omitted=tally.num_examples - tally.unique,
        num_out_of_range=sum(map(len, strays)),
        per_rank=per_rank,
        weight_range=_find_meetings_range(tally) if weight_range is None else weight_range,
        epoch=epoch,
        remedy=remedy,
    )


def _find_meetings_range(tally: Tally) -> tuple[int, int]:
    """How often the ids were met that were met the least and the most."""
    if not tally.meetings:
        return 0, 0
    # Closed form: 0 where an id is omitted, 1 where one came once, and only then the counts.
    repeated, counts = tally.repeated()
    omitted, once = tally.unique < tally.num_examples, len(repeated) < tally.unique
    return 0 if omitted else 1 if once else int(counts.min()), int(counts.max(initial=1))


def _take_accepted(ids: np.ndarray, weights: np.ndarray | None) -> Iterator[Rank]:
    """The ids and weights of accepted slots, block by block."""
    for start in range(0, len(ids), _BLOCK):
        block = slice(start, start + _BLOCK)
        if weights is None:
            yield ids[block], None
            continue
        accepted = weights[block] > 0
        if accepted.all():
            yield ids[block], weights[block]
        else:
            yield ids[block][accepted], weights[block][accepted]


def _find_weight_range(ranks: Sequence[Rank], tally: Tally) -> tuple[float, float] | None:
    """The smallest and the largest accepted weight that an id received over all its slots.

    None where weights only say whether a slot counts.
    """
    if not tally.meetings or all(weights is None or _is_plain(weights) for _, weights in ranks):
        return None
    # Only ids that came several times need a sum of their own, and they are few; the others' range
    # is that of their single weights.
    repeated, _ = tally.repeated()
    sums = np.zeros(len(repeated))
    lightest, heaviest = np.inf, 0.0
    for rank in ranks:
        for ids, weights in _take_accepted(*rank):
            assert weights is not None  # one rank's weights are there where another's are
            several = np.zeros(len(ids), bool)
            if repeated.size:
                index = np.searchsorted(repeated, ids).clip(max=len(repeated) - 1)
                several = repeated[index] == ids
                np.add.at(sums, index[several], weights[several])
            inside = (ids >= 0) & (ids < tally.num_examples)
            single = weights[inside & ~several].astype(np.float64)
            lightest = min(lightest, single.min(initial=np.inf))
            heaviest = max(heaviest, single.max(initial=0))
    lightest, heaviest = min(lightest, sums.min(initial=np.inf)), max(heaviest, sums.max(initial=0))
    return 0 if tally.unique < tally.num_examples else _as_number(lightest), _as_number(heaviest)


def _is_plain(weights: np.ndarray) -> bool:
    """Whether weights only say whether a slot counts."""
    return weights.dtype.kind in "iub" and weights.max(initial=0) <= 1


def _as_number(value: float) -> float:
    """A Python number, whole where it is whole."""
    return int(value) if float(value).is_integer() else float(value)
