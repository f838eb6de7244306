"""Trees of numbers compared leaf by leaf, and the report of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from jax_ddp_weighting._errors import JdwError

# The largest difference allowed, relative to the largest entry of the same leaf. Sums over other
# splits round in another order: some tens of units in the last place. The mistakes this is to find
# (a rank's vote in place of a row's, a factor of W) are thousands of times larger.
RTOL = {"float64": 1e-12, "float32": 1e-5, "float16": 1e-2, "bfloat16": 5e-2}

# A leaf whose gradient cancels to nothing is made of rounding alone: units in the last place, of
# the largest gradient in the tree, below which differences do not count.
_NOISE = 16
_FLOAT32 = float(np.finfo(np.float32).eps)

# Half precision adds up few numbers, mostly in float32: units of what the leaf's own rows pull by.
# A leaf that cancels within each row, as a bias in front of a normalisation, has no such size. Its
# rounding was a tenth of a unit of the largest leaf (attention's key bias, a shift before a
# LayerNorm, both in bfloat16): a quarter is allowed, which is two units of an eighth.
_HALF_NOISE, _HALF_PART = 2, 1 / 8


class ParityError(JdwError, AssertionError):
    """Parts of a batch do not give what the whole batch gives.

    Attributes:
        report: the `ParityReport` of every comparison made.
    """

    def __init__(self, message: str, report: "ParityReport") -> None:
        super().__init__(message)
        self.report = report


@dataclass(frozen=True)
class LeafDifference:
    """How far one leaf is from what it is on one device that holds the whole batch.

    What `ParityReport.differences` is made of: one for each split, engine and leaf.

    Attributes:
        split: rows per rank, or per part, such as `(3, 1)`.
        engine: the regime, one of `mesh.ENGINES`; or `"sum of parts"`.
        leaf: the leaf's path, such as `params['dense']['kernel']`; `loss` for the loss itself.
        shape: the leaf's shape.
        difference: the largest absolute difference over the largest absolute reference; of a leaf
            that cancels to rounding, over the size of which that rounding is as much as `rtol`.
        ratio: value over reference where it is one number throughout the leaf, else None.
        rtol: what was allowed.
        rounded_by: the dtype narrower than the leaf's whose rounding explains the difference; empty
            where none does.
        note: what the leaf is instead, such as the reference transposed; empty where nothing says.

    Example:
        >>> twice = LeafDifference((3, 1), "shard_map", "params['w']", (64, 10), 1.0, 2.0, 1e-5)
        >>> twice.equal, round(twice.excess)
        (False, 100000)
    """

    split: tuple[int, ...]
    engine: str
    leaf: str
    shape: tuple[int, ...]
    difference: float
    ratio: float | None
    rtol: float
    rounded_by: str = ""
    note: str = ""

    @property
    def equal(self) -> bool:
        """Whether the difference is within the tolerance."""
        return self.difference <= self.rtol

    @property
    def excess(self) -> float:
        """The difference as a multiple of the tolerance; infinite where it is NaN."""
        if np.isnan(self.difference):
            return np.inf
        if not self.rtol:
            return np.inf if self.difference else 0.0
        return self.difference / self.rtol


@dataclass(frozen=True)
class ParityReport:
    """Every comparison that was made, in order; printed, the worst one of each leaf.

    Attributes:
        differences: one entry per split, engine and leaf, in the order in which they were made.

    Example:
        >>> def loss_fn(w, batch):
        ...     return weighted_sum((w - batch.data) ** 2, batch.weights)
        >>> batch = Batch.of(np.float32([0.0, 1.0, 2.0, 5.0]))
        >>> report = check_gradients(loss_fn, np.float32(3.0), batch, [(3, 1)], engines=["vmap"])
        >>> [(each.leaf, each.equal) for each in report.differences], report.wrong
        ([('loss', True), ('params', True)], [])
    """

    differences: tuple[LeafDifference, ...]

    @property
    def worst(self) -> LeafDifference:
        """The largest difference, relative to its tolerance."""
        return max(self.differences, key=lambda each: each.excess)

    @property
    def wrong(self) -> list[LeafDifference]:
        """The differences beyond their tolerance, the largest first."""
        return sorted(
            (each for each in self.differences if not each.equal), key=lambda each: -each.excess
        )

    def by_leaf(self) -> list[LeafDifference]:
        """The worst difference of each leaf, in the order of the tree."""
        found: dict[str, LeafDifference] = {}
        for each in self.differences:
            if each.leaf not in found or each.excess > found[each.leaf].excess:
                found[each.leaf] = each
        return list(found.values())

    def by_run(self) -> list[LeafDifference]:
        """The worst difference of each split and engine, in the order they were run."""
        found: dict[Any, LeafDifference] = {}
        for each in self.differences:
            run = each.split, each.engine
            if run not in found or each.excess > found[run].excess:
                found[run] = each
        return list(found.values())

    def __str__(self) -> str:
        leaves = self.by_leaf()
        width = max(len(each.leaf) for each in leaves)
        lines = [f"{'leaf':{width}}  difference  allowed  ratio    where"]
        for each in leaves:
            ratio = "-" if each.ratio is None else f"{each.ratio:.4f}"
            where = f"{each.engine}, split {each.split}" if each.split else each.engine
            note = f"; {each.note}" if each.note else ""
            lines.append(
                f"{each.leaf:{width}}  {each.difference:10.1e}  {each.rtol:7.0e}  {ratio:7}  "
                f"{where}{note}"
            )
        return "\n".join(lines)


def describe(wrong: list[LeafDifference]) -> str:
    """At most ten differences, a line each."""
    lines = []
    for each in wrong[:10]:
        ratio = "" if each.ratio is None else f"  ratio {each.ratio:.4f}"
        lines.append(
            f"  {each.engine:20} split {each.split}  {each.leaf}: {each.difference:.3e}{ratio}"
        )
    if len(wrong) > 10:
        lines.append(f"  and {len(wrong) - 10} more")
    return "\n".join(lines)


def compare(
    got: dict[str, PyTree],
    right: dict[str, PyTree],
    *,
    split: tuple[int, ...],
    engine: str,
    rtol: float | None,
    caller: str,
    sizes: Mapping[str, PyTree],
    narrowest: Any = None,
) -> list[LeafDifference]:
    """The differences of every leaf of two dicts of trees.

    Args:
        got: what is on trial.
        right: the reference.
        split: rows per rank or part, for the report.
        engine: the regime, for the report.
        rtol: the tolerance; by dtype when None.
        caller: who speaks in errors.
        sizes: by entry, for each leaf, the size of numbers that it is a sum of, which rounding is
            measured by.
        narrowest: the narrowest dtype that the numbers were computed in, where that is known.

    Raises:
        ValueError: the trees have different structures or shapes, or `right` is not finite.
    """
    found = []
    for entry, reference_tree in right.items():
        structure = jax.tree.structure(reference_tree)
        own_sizes = jax.tree.leaves(sizes[entry])
        largest = max(own_sizes, default=0.0)
        if jax.tree.structure(got[entry]) != structure:
            raise ValueError(
                f"{caller}: gradient must return trees of one structure however the rows are "
                f"split, got {jax.tree.structure(got[entry])} for {structure} at {entry}. Return "
                "the loss and the gradient of every parameter, as value_and_grad does."
            )
        paths = jax.tree_util.tree_leaves_with_path(reference_tree)
        values = jax.tree.leaves(got[entry])
        for (path, reference), value, size in zip(paths, values, own_sizes, strict=True):
            name = entry + jax.tree_util.keystr(path)
            dtype = jnp.asarray(reference).dtype
            wide = np.complex128 if jnp.issubdtype(dtype, jnp.complexfloating) else np.float64
            a, b = (np.asarray(each).astype(wide) for each in (value, reference))
            if a.shape != b.shape:
                raise ValueError(
                    f"{caller}: gradient must return leaves of one shape however the rows are "
                    f"split, got {a.shape} for {b.shape} at {name}. One rank's gradient is meant."
                )
            if not np.isfinite(b).all():
                raise ValueError(
                    f"{caller}: loss_fn must be finite on one device that holds the whole batch, "
                    f"got NaN or infinity at {name}. Mend the loss before its splits: give "
                    "padding rows finite data."
                )
            allowed, own_eps = RTOL["float64"], 0.0
            if jnp.issubdtype(dtype, jnp.inexact):
                allowed = RTOL[jnp.finfo(dtype).dtype.name]
                own_eps = float(jnp.finfo(dtype).eps)
            allowed = allowed if rtol is None else rtol
            eps = max(own_eps, 0.0 if narrowest is None else float(jnp.finfo(narrowest).eps))
            difference = measure_gap(a, b, allowed, *_measure_noise(eps, size, largest))
            ratio = find_ratio(a, b, allowed)
            rounded = eps > own_eps and allowed < difference <= _HALF_NOISE * eps
            rounded_by = jnp.dtype(narrowest).name if rounded else ""
            found.append(
                LeafDifference(split, engine, name, a.shape, difference, ratio, allowed, rounded_by)
            )
    return found


def measure_gap(a: np.ndarray, b: np.ndarray, rtol: float, noise: float, size: float) -> float:
    """The largest difference over the largest entry of `b`, the reference.

    The rule: a difference is within `rtol` if it is within `rtol` times that entry, or within the
    rounding of numbers of some size, which no `rtol` makes wider.

    Args:
        a: what is on trial.
        b: the reference.
        rtol: what is allowed.
        noise: how much of the size is rounding.
        size: the size of the numbers that were added up.
    """
    gap = float(np.max(np.abs(a - b), initial=0.0))
    scale = max(measure(b), size * noise / max(rtol, noise) if noise else 0.0)
    return gap / scale if scale else gap


def choose_noise(eps: float) -> float:
    """What part of the largest gradient is rounding, added up in float32 at least."""
    return _NOISE * min(eps, _FLOAT32)


def _measure_noise(eps: float, size: float, largest: float) -> tuple[float, float]:
    """What part is rounding, and of what, where sums are of a leaf's size or the largest leaf's."""
    if eps <= _FLOAT32:
        return choose_noise(eps), largest
    return _HALF_NOISE * eps, max(size, _HALF_PART * largest)


def as_splits(splits: Sequence[Any]) -> list[tuple[int, ...]]:
    """One split, or several, as tuples of rows per part."""
    one = len(splits) and isinstance(splits[0], int | np.integer)
    return [tuple(split) for split in ([splits] if one else splits)]


def as_float64(tree: PyTree) -> PyTree:
    """The tree on the host, its floating point leaves in float64."""

    def cast(leaf: Any) -> Any:
        leaf = as_host(leaf)
        return leaf.astype(np.float64) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf

    return jax.tree.map(cast, tree)


def as_host(leaf: Any) -> Any:
    """The array on the host, where keys cannot go: those stay as they are."""
    is_key = isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return leaf if is_key else np.asarray(leaf)


def find_ratio(a: np.ndarray, b: np.ndarray, rtol: float) -> float | None:
    """`a` over `b` where that is one number throughout."""
    scale = np.vdot(b, b).real  # least squares: the factor by which b comes closest to a
    if not np.isfinite(a).all() or not scale:
        return None
    ratio = float(np.vdot(b, a).real / scale)
    same = np.max(np.abs(a - ratio * b)) <= rtol * np.max(np.abs(a), initial=0.0)
    return ratio if same else None


def measure(leaf: Any) -> float:
    """The largest entry, without its sign."""
    return float(np.max(np.abs(np.asarray(leaf)).astype(np.float64), initial=0.0))
