"""Two gradients compared by the names of their leaves, and what a wrong leaf looks like."""

import itertools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from jax_ddp_weighting._arguments import check_rtol, list_some
from jax_ddp_weighting.testing.comparison import (
    RTOL,
    LeafDifference,
    ParityReport,
    choose_noise,
    find_ratio,
    measure,
    measure_gap,
)
from jax_ddp_weighting.testing.flax_layers import path_of
from jax_ddp_weighting.testing.torch_arrays import as_array

_MOST_AXES = 5  # of a kernel whose axes are tried in every order: 120 orders


def compare_gradients(ours: PyTree, theirs: PyTree, *, rtol: float | None = None) -> ParityReport:
    """Every leaf of one gradient beside the leaf of the same name in another.

    The rule: names decide, not places: leaves are found by their paths, in which `/`, `.` and
    brackets are one, and a collection `params` around all of them is left away. A leaf that differs
    is looked at once more: whether it is the other transposed, turned around, with rows in another
    order, or another leaf's gradient; `LeafDifference.note` says so.

    Args:
        ours: a tree of arrays, such as `jax.grad` returns; or a flat dict by path.
        theirs: the reference: the same leaves and shapes, such as `NameMap.gradients` returns.
        rtol: the difference allowed, relative to the largest entry of the leaf; by default that of
            `check_gradients` for the narrower of the two dtypes: 1e-12 for float64, 1e-5 for
            float32, 1e-2 for float16, 5e-2 for bfloat16. A leaf that cancels to nothing is
            measured by the rounding of the largest, whatever `rtol` is: of sums in float32 for
            float16 and bfloat16 too. One that was added up in those is listed among the wrong, with
            a note that it may be rounding.

    Returns:
        A `ParityReport`; `report.wrong` is empty where all leaves are equal. It is returned and not
        raised. Printed, a table of the leaves.

    Raises:
        ValueError: leaves are missing on either side or have other shapes; something is not
            finite; a tree is empty; or `rtol` is not in `[0, 1)`.
        TypeError: a leaf is no array of floating point numbers.

    Example:
        >>> theirs = {"fc1": {"kernel": np.eye(2) + [[0, 1], [0, 0]]}, "fc2": {"bias": np.ones(2)}}
        >>> ours = {"fc1": {"kernel": theirs["fc1"]["kernel"].T}, "fc2": {"bias": np.ones(2)}}
        >>> report = compare_gradients(ours, theirs, rtol=1e-6)
        >>> [(each.leaf, each.note) for each in report.wrong]
        [('fc1/kernel', 'is the other transposed')]
    """
    if rtol is not None:
        check_rtol("compare_gradients: rtol", rtol)
    one, two = _read("ours", ours), _read("theirs", theirs)
    one, two = _strip_collection(one, two)
    _check_names(one, two)
    size = max(measure(value) for value in two.values())
    found = []
    for name, reference in two.items():
        value = one[name]
        allowed, noise = _allow(value, reference)
        a, b = _widen(value), _widen(reference)
        allowed = allowed if rtol is None else rtol
        difference = measure_gap(a, b, allowed, noise, size)
        ratio = find_ratio(a, b, allowed)
        found.append(LeafDifference((), "theirs", name, a.shape, difference, ratio, allowed))
    wrong = {each.leaf: each for each in found if not each.equal}
    notes = _explain(wrong, one, two, size)
    return ParityReport(
        tuple(each if each.leaf not in notes else _with_note(each, notes) for each in found)
    )


def _with_note(each: LeafDifference, notes: Mapping[str, str]) -> LeafDifference:
    return LeafDifference(
        each.split,
        each.engine,
        each.leaf,
        each.shape,
        each.difference,
        each.ratio,
        each.rtol,
        note=notes[each.leaf],
    )


def _read(side: str, tree: PyTree) -> dict[str, np.ndarray]:
    """The leaves by their paths."""
    found: dict[str, np.ndarray] = {}
    for keys, value in jax.tree_util.tree_flatten_with_path(tree)[0]:
        words = "/".join(path_of(keys)).replace("][", "/").replace(".", "/")
        name = "/".join(word for word in words.translate(_BRACKETS).split("/") if word)
        array = as_array(value, f"compare_gradients: {side} at {name or 'its only leaf'}")
        if not jnp.issubdtype(array.dtype, jnp.inexact):
            raise TypeError(
                f"compare_gradients: {side} must hold floating point numbers, got {array.dtype} at "
                f"{name}. Give gradients, without counters and ids."
            )
        if name in found:
            raise ValueError(
                f"compare_gradients: {side} must name each leaf once, got {name} twice. '/', '.' "
                "and brackets are one in names."
            )
        if not np.isfinite(_widen(array)).all():
            raise ValueError(
                f"compare_gradients: {side} must be finite, got NaN or infinity at {name}. Look "
                "for a mean over no examples, or a loss of NaN at weight 0."
            )
        found[name] = array
    if not found:
        raise ValueError(
            f"compare_gradients: {side} must have leaves, got an empty tree. Give the gradient of "
            "every parameter."
        )
    return found


_BRACKETS = str.maketrans({"[": "/", "]": "/", "'": None, '"': None})


def _strip_collection(
    one: dict[str, np.ndarray], two: dict[str, np.ndarray]
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    sides = []
    for side in (one, two):
        inside = all(name.startswith("params/") for name in side)
        sides.append({n.removeprefix("params/"): x for n, x in side.items()} if inside else side)
    return sides[0], sides[1]


def _check_names(one: dict[str, np.ndarray], two: dict[str, np.ndarray]) -> None:
    sides = (("ours", one, two), ("theirs", two, one))
    missing = {side: [name for name in other if name not in own] for side, own, other in sides}
    if any(missing.values()):
        said = " and ".join(
            f"{list_some(names)} missing in {side}" for side, names in missing.items() if names
        )
        raise ValueError(
            f"compare_gradients: ours and theirs must have the same leaves, got {said}. Bring "
            "torch's names to flax's first: torch_names(state_dict, params).gradients(...)."
        )
    for name, value in two.items():
        if one[name].shape != value.shape:
            hint = (
                "One is the other transposed: torch_names knows which layers are."
                if one[name].shape == value.shape[::-1]
                else "Compare gradients of the same model."
            )
            raise ValueError(
                "compare_gradients: ours and theirs must have the same shapes, got "
                f"{one[name].shape} and {value.shape} at {name}. {hint}"
            )


def _allow(value: np.ndarray, reference: np.ndarray) -> tuple[float, float]:
    """The tolerance of the narrower dtype, and what part of the largest leaf is rounding."""
    narrow = _find_narrower(value, reference)
    allowed = RTOL.get(str(narrow.dtype), float(narrow.eps) * 16)
    return allowed, choose_noise(float(narrow.eps))


def _find_narrower(value: np.ndarray, reference: np.ndarray) -> Any:
    infos = [jnp.finfo(each.dtype) for each in (value, reference)]
    return max(infos, key=lambda info: float(info.eps))


def _widen(value: np.ndarray) -> np.ndarray:
    return value.astype(np.complex128 if value.dtype.kind == "c" else np.float64)


def _explain(
    wrong: Mapping[str, LeafDifference],
    one: Mapping[str, np.ndarray],
    two: Mapping[str, np.ndarray],
    size: float,
) -> dict[str, str]:
    """What each wrong leaf is instead, where it is something."""
    notes: dict[str, str] = {}
    for name, each in wrong.items():
        a, b = _widen(one[name]), _widen(two[name])
        part = max(each.rtol, 1e-6)
        allowed = part * max(measure(b), np.finfo(float).tiny)
        if _near(a, b, allowed):
            continue  # too near for its layout to be what is wrong
        words = _name_rearrangement(a, b, allowed)
        others = [
            other
            for other, value in two.items()
            if other != name and _near(a, _widen(value), part * measure(value))
        ]
        if not words and others:
            swapped = [x for x in others if x in wrong and _near(_widen(one[x]), b, allowed)]
            words = f"is swapped with {swapped[0]}" if swapped else f"is the other's {others[0]}"
        narrow = _find_narrower(one[name], two[name])
        is_half = float(narrow.eps) > float(np.finfo(np.float32).eps)
        # a factor that is one throughout is no rounding; 0 is, of one side
        small = max(measure(a), measure(b)) <= float(narrow.eps) * size and not each.ratio
        if not words and is_half and small:
            words = f"may be {narrow.dtype}'s rounding of larger leaves: compare it in float32"
        if words:
            notes[name] = words
    return notes


def _near(a: np.ndarray, b: np.ndarray, allowed: float) -> bool:
    return bool(a.shape == b.shape and measure(b) and np.max(np.abs(a - b), initial=0.0) <= allowed)


def _name_rearrangement(a: np.ndarray, b: np.ndarray, allowed: float) -> str:
    """How the numbers of `b` must be laid out to be those of `a`; empty where they are others."""
    if a.ndim < 1 or a.size < 2:
        return ""
    if a.ndim > 1:
        for axes in itertools.permutations(range(a.ndim)) if a.ndim <= _MOST_AXES else ():
            if axes != tuple(range(a.ndim)) and _near(a, np.transpose(b, axes), allowed):
                return "is the other transposed" + (f" to axes {axes}" if a.ndim > 2 else "")
        window = tuple(range(a.ndim - 2))
        if window and _near(a, np.flip(b, window), allowed):
            return "is the other with its window turned around"
        if window:
            turned = np.flip(b, window)
            for axes in ((*window, a.ndim - 1, a.ndim - 2),):
                if _near(a, np.transpose(turned, axes), allowed):
                    return "is the other transposed, with its window turned around"
    for axis in range(a.ndim):
        if _is_reordered(a, b, axis, allowed):
            what = "has the other's numbers" if a.ndim == 1 else f"has axis {axis} of the other"
            return f"{what} in another order"
    return ""


def _is_reordered(a: np.ndarray, b: np.ndarray, axis: int, allowed: float) -> bool:
    rows = [np.moveaxis(x, axis, 0).reshape(x.shape[axis], -1) for x in (a, b)]
    # sorted by a mixture of their entries, in which no two different rows are alike
    mix = np.random.RandomState(0).uniform(1, 2, rows[0].shape[1])
    one, two = (x[np.argsort(x @ mix, kind="stable")] for x in rows)
    return _near(one, two, allowed)
