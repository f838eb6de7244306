"""Ids, and weights, that a run wrote to files: one file for each rank."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from jaxtyping import Float64, Integer, Shaped

from jax_ddp_weighting._arguments import check_weights, list_some

JSON_LINES = (".jsonl", ".ndjson", ".json")
_PACKED = (".gz", ".bz2", ".xz", ".zst", ".zip", ".npz")


@dataclass(frozen=True)
class _Kind:
    """What files are read for: how errors call it, what belongs in them, and who names a column."""

    what: str
    numbers: str
    dtype: np.dtype[Any]
    types: type[int] | type[float]
    option: str

    def holds(self, value: object) -> bool:
        """Whether a JSON value is such a number: `true` is none, though Python says so."""
        if isinstance(value, bool) or not isinstance(value, int | self.types):
            return False
        return self.types is float or -(2**63) <= value < 2**63


@dataclass(frozen=True)
class _Slots:
    """What a file holds, flat, and how it lies there.

    Attributes:
        values: the numbers, or what else an array holds, of shape `[slots]`.
        part: what the file is made of: "line" or "row".
        parts: gives the number of each part and how many values it holds; asked for only where
            weights are to lie as ids do.
        folded: whether the parts are lines of text, which may be folded anywhere, where those of
            JSON lines and of arrays are batches.
    """

    values: Shaped[np.ndarray, " slots"]
    part: str
    parts: Callable[[], Sequence[tuple[int, int]]]
    folded: bool = False


_STRINGS = "Strings as ids are counted in Python, by audit_ids(ids, num_examples, names=...)."
_IDS = _Kind("ids", "integers of 64 bits", np.dtype(np.int64), int, "--column")
_WEIGHTS = _Kind("weights", "numbers", np.dtype(np.float64), float, "--weight-column")


def read_ids(path: Path, *, column: str | None = None) -> Integer[np.ndarray, " slots"]:
    """The ids of one rank, in the order in which they were read.

    The file's name decides: ``.npy`` is an integer array of any shape; ``.jsonl``, ``.ndjson`` and
    ``.json`` hold one object a line, whose `column` is an id or a list of ids (a logged batch);
    everything else is text, integers apart by white space or commas, ``#`` starting a remark.

    Args:
        path: the file.
        column: the name under which JSON lines keep the ids; only they have one.

    Returns:
        Integer ids of shape ``[slots]``.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file holds something else; the message names file, line and value.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "rank0.txt"
        >>> _ = path.write_text("0 4 8, 12  # the first batch")
        >>> read_ids(path)
        array([ 0,  4,  8, 12])
    """
    return _read_ids(path, column).values


def _read_ids(path: Path, column: str | None) -> _Slots:
    read = _read(_IDS, path, column)
    if read.values.dtype.kind not in "iu":
        remedy = "Save the indices of the examples, not the examples."
        if read.values.dtype.kind in "US":
            remedy = _STRINGS
        raise ValueError(
            f"{path}: ids must be integers, got an array of {read.values.dtype}. {remedy}"
        )
    return read


def read_weights(path: Path) -> Float64[np.ndarray, " slots"]:
    """Weights from a file of text or an array.

    Args:
        path: the file.

    Returns:
        float64 weights of shape ``[slots]``.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file holds something else, or a weight is negative, infinite or NaN; the
            message names file, line or row, and value.
    """
    return _read_weights(path, None).values


def _read_weights(path: Path, column: str | None) -> _Slots:
    if column is None and path.suffix in JSON_LINES:
        raise ValueError(
            f"{path}: weights must be text or an array where no column is named, got JSON lines."
            " Give a .txt or .npy file."
        )
    read = _read(_WEIGHTS, path, column)
    if read.values.dtype.kind not in "iufb":
        raise ValueError(
            f"{path}: weights must be numbers, got an array of {read.values.dtype}. Padding weighs"
            " 0, every other slot what it counts."
        )
    weights = read.values.astype(np.float64)
    remedy = "What is not to count weighs 0."
    check_weights(f"{path}: weights", weights, remedy, first=0, show="g")
    return replace(read, values=weights)


def read_ranks(
    files: Sequence[Path],
    *,
    column: str | None = None,
    weight_files: Sequence[Path] = (),
    weight_column: str | None = None,
    advance: Callable[[int], object] = lambda files: None,
) -> tuple[list[np.ndarray], list[np.ndarray] | None]:
    """The ids of every rank, and the weights if there are any.

    Args:
        files: one file of ids for each rank.
        column: the name under which JSON lines keep the ids.
        weight_files: one file of weights for each file of ids, or none.
        weight_column: the name under which JSON lines keep the weights, beside the ids.
        advance: is told of files as they are read, for a progress bar.

    Raises:
        OSError: a file cannot be read.
        ValueError: a file holds something else, or weights are not as many as ids.
    """
    if weight_files and weight_column:
        raise ValueError(
            "audit: give --weights or --weight-column, got both. Weights stand in files of their"
            " own, or beside the ids in JSON lines."
        )
    if weight_files and len(weight_files) != len(files):
        raise ValueError(
            f"audit: --weights must name one file for each of the {len(files)} files of ids, got"
            f" {len(weight_files)}. Repeat --weights in the order of the files of ids."
        )
    beside = files if weight_column else weight_files
    ids: list[np.ndarray] = []
    weights: list[np.ndarray] = []
    for rank, path in enumerate(files):
        read = _read_ids(path, column)
        ids.append(read.values)
        if beside:
            weighed = _read_weights(beside[rank], weight_column)
            _check_pairs(beside[rank], read, weighed, same_lines=beside is files)
            weights.append(weighed.values)
        advance(1)
    return ids, weights or None


def _check_pairs(path: Path, ids: _Slots, weights: _Slots, same_lines: bool) -> None:
    """Raises unless each id has a weight, and each batch of ids the weights of that batch.

    As many weights as ids are not enough: where a batch has one weight less and the next one more,
    every id after the gap would get another id's weight.
    """

    def refuse(where: str, wanted: int, got: int) -> NoReturn:
        raise ValueError(
            f"{path}: {where}weights must be as many as the ids, {wanted}, got {got}. Every slot"
            " has one weight."
        )

    if not same_lines and len(ids.values) != len(weights.values):
        refuse("", len(ids.values), len(weights.values))
    wanted, got = ids.parts(), weights.parts()
    if len(wanted) == len(got):
        for (_, ids_there), (number, weights_there) in zip(wanted, got, strict=True):
            if ids_there != weights_there:
                refuse(f"{weights.part} {number}: ", ids_there, weights_there)
    # one value a part is a plain list, as is one part: neither says anything of batches
    elif not (ids.folded or weights.folded) and all(
        len(parts) > 1 and any(count != 1 for _, count in parts) for parts in (wanted, got)
    ):
        raise ValueError(
            f"{path}: weights must lie in {weights.part}s as the ids do, {len(wanted)} of them, got"
            f" {len(got)}. Every slot has one weight: save both alike."
        )


def _read(kind: _Kind, path: Path, column: str | None) -> _Slots:
    if path.is_dir():
        raise ValueError(
            f"{path}: must be a file of {kind.what}, got a folder. Name the files in it, one a"
            " rank."
        )
    if path.suffix in _PACKED:
        raise ValueError(
            f"{path}: must be text, .npy or JSON lines, got a {path.suffix} file. Unpack it, and"
            " name what was in it."
        )
    if path.suffix in JSON_LINES:
        return _from_json_lines(kind, path, column)
    if column is not None:
        raise ValueError(
            f"{path}: a column is for JSON lines ({', '.join(JSON_LINES)}), got {column!r}."
            " Rename the file, or leave the column out."
        )
    return (_from_npy if path.suffix == ".npy" else _from_text)(kind, path)


def _from_npy(kind: _Kind, path: Path) -> _Slots:
    try:
        # mapped: numpy would make room for whatever the header promises, before it reads
        mapped = np.lib.format.open_memmap(path, mode="r")
        held = path.stat().st_size
        if mapped.offset + mapped.nbytes != held:
            raise ValueError(f"a header for {mapped.nbytes} bytes, and {held - mapped.offset}")
        array = np.array(mapped)
    except OSError:
        raise
    except Exception as error:  # numpy's parser of headers raises whatever it meets
        raise ValueError(
            f"{path}: must be an array of numbers that numpy.save wrote, got something else"
            f" ({_one_line(error)}). Write the {kind.what} with numpy.save."
        ) from None
    width = array.shape[-1] if array.ndim > 1 else array.size
    rows = array.size // width if width else 0
    return _Slots(array.ravel(), "row", lambda: [(row, width) for row in range(rows)])


def _from_text(kind: _Kind, path: Path) -> _Slots:
    try:
        text = path.read_text("utf-8-sig")  # editors of Windows start it with a byte order mark
    except UnicodeDecodeError:
        raise ValueError(
            f"{path}: must be text in UTF-8, got other bytes. Arrays are read from .npy files."
        ) from None
    try:
        values = _as_numbers(_words(text), kind.dtype)
    except (ValueError, OverflowError):
        number, word = _find_misfit(text, kind.dtype)
        remedy = f"JSON lines are read from files named {' or '.join(JSON_LINES)}."
        if "_" in word and _are_numbers([word.replace("_", "")], kind.dtype):
            remedy = "Write it without underscores."
        elif _is_header(text, number, kind.dtype):
            remedy = f"Remove the header: only {kind.what} belong in the file."
            if kind is _IDS:
                remedy += " Weights go in files of their own, named by --weights."
        elif kind is _IDS and word[0] not in "{[" and not _are_numbers([word], np.dtype(float)):
            remedy = _STRINGS
        raise ValueError(
            f"{path}: line {number}: {kind.what} must be {kind.numbers}, got {word!r}. {remedy}"
        ) from None

    def parts() -> list[tuple[int, int]]:
        lines = enumerate(map(_words, text.splitlines()), 1)
        return [(number, len(words)) for number, words in lines if words]

    return _Slots(values, "line", parts, folded=True)


def _words(text: str) -> list[str]:
    return re.sub("#.*", "", text).replace(",", " ").split()


def _as_numbers(words: list[str], dtype: np.dtype[Any]) -> np.ndarray:
    # numpy asks Python, to which 1_0 is ten; to whoever reads a log it is a name, or two numbers
    if any("_" in word for word in words):
        raise ValueError("underscores")
    return np.array(words, dtype)


def _are_numbers(words: list[str], dtype: np.dtype[Any]) -> bool:
    try:
        _as_numbers(words, dtype)
    except (ValueError, OverflowError):
        return False
    return True


def _is_header(text: str, number: int, dtype: np.dtype[Any]) -> bool:
    """Whether that line names columns, as in a CSV file: only names, and then only numbers."""
    lines = text.splitlines()
    names = [word.strip("\"'") for word in _words(lines[number - 1])]
    before, after = (_words("\n".join(part)) for part in (lines[: number - 1], lines[number:]))
    only_names = not before and all(map(str.isidentifier, names))
    return only_names and bool(after) and _are_numbers(after, dtype)


def _find_misfit(text: str, dtype: np.dtype[Any]) -> tuple[int, str]:
    """The first line and word that is no such number."""
    return next(
        (number, word)
        for number, line in enumerate(text.splitlines(), 1)
        for word in _words(line)
        if not _are_numbers([word], dtype)
    )


def _from_json_lines(kind: _Kind, path: Path, column: str | None) -> _Slots:
    values: list[Any] = []
    parts: list[tuple[int, int]] = []
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                held = _in_column(kind, f"{path}: line {number}", line, column)
                parts.append((number, len(held)))
                values += held
    return _Slots(np.array(values, kind.dtype), "line", lambda: parts)


def _in_column(kind: _Kind, where: str, line: bytes, column: str | None) -> list[Any]:
    try:
        entry = json.loads(line, object_pairs_hook=_once_each)
    except (ValueError, RecursionError) as error:  # the latter where it is nested too deeply
        raise ValueError(
            f"{where}: must be a JSON object, got {line[:40]!r} ({_one_line(error)}). JSON lines"
            " hold one object a line."
        ) from None
    if not isinstance(entry, dict):
        raise ValueError(
            f"{where}: must be a JSON object, got {list_some([entry])[:40]}. JSON lines hold one"
            " object a line."
        )
    if column is None or column not in entry:
        asked = "got no column to read" if column is None else f"got no column {column!r}"
        raise ValueError(
            f"{where}: {kind.what} must be in a named column, {asked}. This line has"
            f" {list_some([repr(key) for key in entry]) or 'none'}: name one by {kind.option}."
        )
    values = entry[column] if isinstance(entry[column], list) else [entry[column]]
    wrong = [value for value in values if not kind.holds(value)]
    if wrong:
        strings = kind is _IDS and isinstance(wrong[0], str)
        raise ValueError(
            f"{where}: {kind.what} must be {kind.numbers}, got {json.dumps(wrong[0])[:40]} in"
            f" {column!r}. {_STRINGS if strings else 'A batch is one list of them.'}"
        )
    return values


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object, of which Python would keep the last of several values under one name."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the name {twice!r} twice")
    return found


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
