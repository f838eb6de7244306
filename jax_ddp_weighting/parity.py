"""Gradients proved equal: every way of splitting a batch over ranks, in every regime.

The proof is made before any optimizer step, on every parameter's gradient. Losses can agree while
gradients do not, and an optimizer such as Adam hides a gradient that is wrong by a factor.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh
from jaxtyping import PyTree

from jax_ddp_weighting import mesh as meshes
from jax_ddp_weighting.feed import Batch
from jax_ddp_weighting.weighting import LossFn, value_and_grad

ALL = meshes.ENGINES

# Largest difference allowed, relative to the largest entry of the same leaf. Sums over other
# splits round in another order: some tens of units in the last place. The mistakes this is to find
# (a rank's vote in place of a row's, a factor of W) are thousands of times larger.
_RTOL = {"float64": 1e-12, "float32": 1e-5, "float16": 1e-2, "bfloat16": 5e-2}


class ParityError(AssertionError):
    """A gradient over several ranks differs from that of one device that holds the whole batch.

    Attributes:
        report: the `ParityReport` of every comparison made.
    """

    def __init__(self, message: str, report: "ParityReport") -> None:
        super().__init__(message)
        self.report = report


@dataclass(frozen=True)
class LeafDifference:
    """How far one leaf's gradient is from the one-device gradient.

    Attributes:
        split: accepted rows per rank, such as `(3, 1)`.
        engine: the regime, one of `ALL`.
        leaf: the leaf's path, such as `params['dense']['kernel']`; `loss` for the loss itself.
        shape: the leaf's shape.
        difference: the largest absolute difference over the largest absolute reference.
        ratio: gradient over reference where it is one number throughout the leaf, else None.
        rtol: what was allowed.
    """

    split: tuple[int, ...]
    engine: str
    leaf: str
    shape: tuple[int, ...]
    difference: float
    ratio: float | None
    rtol: float

    @property
    def equal(self) -> bool:
        """Whether the difference is within the tolerance."""
        return self.difference <= self.rtol


@dataclass(frozen=True)
class ParityReport:
    """Every comparison that was made, in order.

    Attributes:
        differences: one entry per split, engine and leaf.
    """

    differences: tuple[LeafDifference, ...]

    @property
    def worst(self) -> LeafDifference:
        """The largest difference, relative to its tolerance."""
        return max(self.differences, key=lambda each: _order(each.difference / each.rtol))

    def check(self) -> None:
        """Raises `ParityError` if any leaf differs."""
        wrong = [each for each in self.differences if not each.equal]
        if not wrong:
            return
        worst, ranks = self.worst, len(self.worst.split)
        ratio = "no constant ratio" if worst.ratio is None else f"ratio {worst.ratio:.3f}"
        lines = [
            f"{len(wrong)} of {len(self.differences)} gradient leaves differ at rtol="
            f"{worst.rtol:g}; worst {worst.leaf} {worst.shape}: {ratio} on {ranks} ranks. "
            f"{_meaning(worst.ratio, ranks)}"
        ]
        for each in sorted(wrong, key=lambda each: -_order(each.difference))[:10]:
            lines.append(
                f"  {each.engine:20} split {each.split}  {each.leaf}: {each.difference:.3e}"
            )
        if len(wrong) > 10:
            lines.append(f"  and {len(wrong) - 10} more")
        raise ParityError("\n".join(lines), self)


MakeGradient = Callable[..., Callable[..., tuple[Any, PyTree]]]


def check_gradients(
    loss_fn: LossFn,
    params: PyTree,
    batch: Batch,
    splits: Sequence[Sequence[int]],
    *,
    engines: Sequence[str] = ALL,
    microbatches: int = 1,
    coefficients: Mapping[str, Any] | None = None,
    rtol: float | None = None,
    gradient: MakeGradient = value_and_grad,
) -> ParityReport:
    """Compares the loss and every gradient with one device that holds the whole batch.

    The rule: the batch's rows are dealt to the ranks as each split says, filled up with rows of
    weight 0, and the gradient must not change.

    Args:
        loss_fn: `loss_fn(params, batch)` returns a `WeightedSum` or a dict of them.
        params: the parameters, a pytree of floating point arrays.
        batch: the whole batch; rows may have any weight, 0 included.
        splits: one or more ways of dealing the rows, such as `[(3, 1), (4, 0), (2, 1, 1)]`: rows
            per rank, in order. `shard_map` and `pmap` need a device per rank.
        engines: the regimes to compare in.
        microbatches: how many microbatches each rank splits its rows into.
        coefficients: one factor per term, for loss functions that return a dict.
        rtol: the difference allowed, relative to the largest entry of the leaf; by default 1e-12
            for float64 leaves, 1e-5 for float32, 1e-2 for float16 and 5e-2 for bfloat16.
        gradient: what is on trial, called as `value_and_grad` is; the reference is always ours.

    Returns:
        A `ParityReport` of every comparison made.

    Raises:
        ParityError: a leaf differs; names the worst leaves, and what a constant ratio means.
        ValueError: a split does not deal all rows out, or needs more devices than there are.

    Example:
        >>> def loss_fn(w, batch):
        ...     return weighted_sum((w - batch.data) ** 2, batch.weights)
        >>> batch = Batch.of(np.float32([0.0, 1.0, 2.0, 5.0]))
        >>> report = check_gradients(
        ...     loss_fn, np.float32(3.0), batch, [(3, 1), (4, 0)], engines=["jit", "vmap"]
        ... )
        >>> report.worst.difference < 1e-6
        True
    """
    if not isinstance(batch, Batch):
        raise TypeError(
            f"check_gradients: batch must be a Batch, got {type(batch).__name__}. "
            "Batch.of(data, weights) makes one."
        )
    deals = _as_splits(splits)
    for split in deals:
        _check_split(split, batch.weights.shape[0])
    batch = jax.tree.map(np.asarray, batch)
    params = jax.tree.map(np.asarray, params)
    reference = jax.jit(value_and_grad(loss_fn, coefficients=coefficients))(params, batch)
    found = []
    for split in deals:
        rows = _dealt(batch, split, microbatches)
        for engine in engines:
            loss, gradients = _run(
                gradient, loss_fn, params, rows, len(split), engine, microbatches, coefficients
            )
            pairs = {"loss": loss.value, "params": gradients}
            right = {"loss": reference[0].value, "params": reference[1]}
            found += _differences(pairs, right, split, engine, rtol)
    report = ParityReport(tuple(found))
    report.check()
    return report


def _run(
    gradient: MakeGradient,
    loss_fn: LossFn,
    params: PyTree,
    rows: Batch,
    ranks: int,
    engine: str,
    microbatches: int,
    coefficients: Mapping[str, Any] | None,
) -> tuple[Any, PyTree]:
    if engine == "vmap":  # one device holds all ranks
        mesh = AbstractMesh((ranks,), ("data",))
    else:
        mesh = meshes.data_mesh(ranks)
        params = meshes.placed(params, meshes.replicated_sharding(mesh))
        rows = meshes.placed(rows, meshes.row_sharding(mesh, "data"))
    fn = gradient(
        loss_fn,
        axis_name=None if engine == "jit" else "data",
        microbatches=microbatches,
        coefficients=coefficients,
    )
    return jax.jit(meshes.over_ranks(fn, mesh, engine=engine))(params, rows)


def _as_splits(splits: Sequence[Any]) -> list[tuple[int, ...]]:
    if splits and isinstance(splits[0], int):
        splits = [splits]
    return [tuple(split) for split in splits]


def _check_split(split: tuple[int, ...], rows: int) -> None:
    if not split or min(split) < 0 or sum(split) != rows:
        raise ValueError(
            f"check_gradients: splits must deal out all {rows} rows, got {split}, which deals out "
            f"{sum(split)}. Give rows per rank, such as {(rows - 1, 1)}."
        )


def _dealt(batch: Batch, split: tuple[int, ...], microbatches: int) -> Batch:
    """The rows in rank order, each rank filled up to one width with rows of weight 0."""
    width = -(-max(split) // microbatches) * microbatches
    starts = np.cumsum([0, *split[:-1]])
    places = [np.arange(width) + start for start in starts]
    real = np.concatenate([np.arange(width) < size for size in split])
    rows = np.where(real, np.concatenate(places), 0)  # filled with copies of the first row
    dealt = jax.tree.map(lambda leaf: leaf[rows], batch)
    return replace(dealt, weights=np.where(real, dealt.weights, np.zeros_like(dealt.weights)))


def _differences(
    got: PyTree, right: PyTree, split: tuple[int, ...], engine: str, rtol: float | None
) -> list[LeafDifference]:
    found = []
    pairs = zip(
        jax.tree_util.tree_leaves_with_path(got),
        jax.tree_util.tree_leaves_with_path(right),
        strict=True,
    )
    for (path, value), (_, reference) in pairs:
        name = str(path[0].key) + jax.tree_util.keystr(path[1:])
        allowed = _RTOL[str(reference.dtype)] if rtol is None else rtol
        a, b = (np.asarray(x, np.float64) for x in (value, reference))
        scale = np.max(np.abs(b), initial=0.0)
        gap = np.max(np.abs(a - b), initial=0.0)
        difference = float(gap / scale) if scale else float(gap)
        ratio = _constant_ratio(a, b, allowed)
        found.append(LeafDifference(split, engine, name, a.shape, difference, ratio, allowed))
    return found


def _constant_ratio(a: np.ndarray, b: np.ndarray, rtol: float) -> float | None:
    scale = np.vdot(b, b)
    if not np.isfinite(a).all() or not scale:
        return None
    ratio = np.vdot(a, b) / scale
    same = np.max(np.abs(a - ratio * b)) <= rtol * np.max(np.abs(a), initial=0.0)
    return float(ratio) if same else None


def _meaning(ratio: float | None, ranks: int) -> str:
    if ratio is None:
        return (
            "Rows count by other weights than their own: look for a mean taken on one rank or "
            "microbatch before the sums met."
        )
    if ranks > 1 and np.isclose(ratio, ranks, rtol=1e-3):
        return "A ratio equal to the number of ranks means the gradient was summed twice."
    if ranks > 1 and np.isclose(ratio, 1 / ranks, rtol=1e-3):
        return "A ratio of one over the number of ranks means it was averaged after being divided."
    return "A constant ratio means that the denominator is wrong and the rows' weights are right."


def _order(difference: float) -> float:
    return np.inf if np.isnan(difference) else difference
