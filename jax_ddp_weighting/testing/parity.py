"""Gradients proved equal: every way of splitting a batch over ranks, in every regime.

The proof is made before any optimizer step, on every parameter's gradient. Losses can agree while
gradients do not, and an optimizer such as Adam hides a gradient that is wrong by a factor.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import chex
import jax
import numpy as np
from jax.sharding import AbstractMesh
from jaxtyping import PyTree

from jax_ddp_weighting._arguments import check_microbatches, check_rtol
from jax_ddp_weighting.data.batch import Batch, check_batch, place_batch
from jax_ddp_weighting.distributed import mesh as meshes
from jax_ddp_weighting.testing.comparison import (
    LeafDifference,
    ParityError,
    ParityReport,
    as_float64,
    as_splits,
    compare,
    describe,
)
from jax_ddp_weighting.weighting.gradient import value_and_grad
from jax_ddp_weighting.weighting.loss_terms import LossFn

# Beside the regimes proper: what `jax.pmap` becomes under `chex.fake_pmap`.
_FAKE_PMAP = "fake_pmap"

MakeGradient = Callable[..., Callable[..., tuple[Any, PyTree]]]


def check_gradients(
    loss_fn: LossFn,
    params: PyTree,
    batch: Batch,
    splits: Sequence[Sequence[int]],
    *,
    engines: Sequence[str] = meshes.ENGINES,
    microbatches: int = 1,
    coefficients: Mapping[str, Any] | None = None,
    rtol: float | None = None,
    float64: bool = False,
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
            per rank, in order. `jit`, `shard_map` and `pmap` need a device per rank.
        engines: the regimes to compare in, of `ENGINES`; and `"fake_pmap"`, which is `jax.pmap`
            under `chex.fake_pmap`: ranks of one device, whose results are compared one by one,
            where `pmap` itself hands out the first rank's for all of them.
        microbatches: how many microbatches each rank splits its rows into.
        coefficients: one factor per term, for loss functions that return a dict.
        rtol: the difference allowed, relative to the largest entry of the leaf; by default 1e-12
            for float64 leaves, 1e-5 for float32, 1e-2 for float16 and 5e-2 for bfloat16. Leaves
            that cancel to rounding, units in the last place of the largest gradient, are equal.
        float64: compute in float64, whatever JAX is set to and the data are; the setting is put
            back.
        gradient: what is on trial, called as `value_and_grad` is; the reference is always ours.

    Returns:
        A `ParityReport` of every comparison made; printed, a table of the leaves.

    Raises:
        ParityError: a leaf differs. An `AssertionError`, whose text names the worst leaves and says
            what a constant ratio means; `report` holds all of them.
        ValueError: a split does not deal all rows out, or needs more devices than there are; an
            engine is unknown; `rtol` is not in `[0, 1)`; the reference is not finite; a gradient
            has another structure.

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
    check_batch("check_gradients: batch must be a Batch", batch)
    deals = _check_splits(splits, int(np.shape(batch.weights)[0]))
    _check_engines(engines)
    microbatches = check_microbatches("check_gradients: microbatches", microbatches)
    if rtol is not None:
        check_rtol("check_gradients: rtol", rtol)
    cast = as_float64 if float64 else lambda tree: jax.tree.map(np.asarray, tree)
    batch, params = cast(batch), cast(params)
    with jax.enable_x64(True) if float64 else nullcontext():
        right = jax.jit(value_and_grad(loss_fn, coefficients=coefficients))(params, batch)
        found = []
        for split in deals:
            rows = _deal_rows(batch, split, microbatches)
            for engine in engines:
                fn = gradient(
                    loss_fn,
                    axis_name=None if engine == "jit" else "data",
                    microbatches=microbatches,
                    coefficients=coefficients,
                )
                compared: list[LeafDifference] = []
                for loss, gradients in _run(fn, params, rows, len(split), engine):
                    compared += compare(
                        {"loss": loss.value, "params": gradients},
                        {"loss": right[0].value, "params": right[1]},
                        split=split,
                        engine=engine,
                        rtol=rtol,
                        caller="check_gradients",
                        scaled_by="params",
                    )
                found += ParityReport(tuple(compared)).by_leaf()  # of several ranks the worst
    report = ParityReport(tuple(found))
    if report.wrong:
        raise ParityError(_write_message(report, microbatches), report)
    return report


def _run(
    fn: Callable[..., Any], params: PyTree, rows: Batch, ranks: int, engine: str
) -> list[tuple[Any, PyTree]]:
    """What `fn` gives in one regime: once, or once per rank where ranks can be seen apart."""
    if engine == _FAKE_PMAP:
        return _run_fake_pmap(fn, params, rows, ranks)
    if engine == "vmap":  # one device holds all ranks
        mesh = AbstractMesh((ranks,), ("data",))
    else:
        mesh = meshes.data_mesh(ranks)
        params = meshes.place(params, meshes.replicated_sharding(mesh))
        rows = place_batch(rows, meshes.row_sharding(mesh, "data"), caller="check_gradients")
    return [jax.jit(meshes.over_ranks(fn, mesh, engine=engine))(params, rows)]


def _run_fake_pmap(
    fn: Callable[..., Any], params: PyTree, rows: Batch, ranks: int
) -> list[tuple[Any, PyTree]]:
    by_rank = jax.tree.map(
        lambda leaf: np.reshape(leaf, (ranks, leaf.shape[0] // ranks, *leaf.shape[1:])), rows
    )
    # It drops whatever it doesn't know, `out_axes` and `devices` among it, without a word, so
    # results come stacked over the ranks. And it patches `jax.pmap` where that is looked up, so the
    # call must stand inside the block, and code that says `from jax import pmap` is not faked.
    with chex.fake_pmap(jit_result=True):
        stacked = jax.pmap(fn, "data", in_axes=(None, 0))(params, by_rank)
    return [jax.tree.map(lambda leaf, rank=rank: leaf[rank], stacked) for rank in range(ranks)]


def _check_splits(splits: Sequence[Any], rows: int) -> list[tuple[int, ...]]:
    deals = as_splits(splits)
    if not deals:
        raise ValueError(
            "check_gradients: splits must name at least one split, got none. Give rows per rank, "
            f"such as [{(rows - 1, 1)}]."
        )
    for split in deals:
        if not split or min(split) < 0 or sum(split) != rows:
            raise ValueError(
                f"check_gradients: splits must deal out all {rows} rows, got {split}, which deals "
                f"out {sum(split)}. Give rows per rank, such as {(rows - 1, 1)}."
            )
    return deals


def _check_engines(engines: Sequence[str]) -> None:
    wanted = [engines] if isinstance(engines, str) else list(engines)
    known = (*meshes.ENGINES, _FAKE_PMAP)
    unknown = [each for each in wanted if each not in known]
    if isinstance(engines, str) or unknown or not wanted:
        raise ValueError(
            f"check_gradients: engines must be a list of some of {', '.join(known)}, got "
            f"{engines!r}. Leave it out for all of ENGINES."
        )


def _deal_rows(batch: Batch, split: tuple[int, ...], microbatches: int) -> Batch:
    """The rows in rank order, each rank filled up to one width with rows of weight 0.

    Not `pad_rows`, which fills up behind the last row: here every rank ends in its own padding.
    """
    width = -(-max(split) // microbatches) * microbatches
    starts = np.cumsum([0, *split[:-1]])
    wanted = [np.arange(width) + start for start in starts]
    real = np.concatenate([np.arange(width) < size for size in split])
    rows = np.where(real, np.concatenate(wanted), 0)  # filled with copies of the first row
    dealt = jax.tree.map(lambda leaf: leaf[rows], batch)
    # what fills a rank up weighs nothing, in no denominator
    kept = jax.tree.map(
        lambda leaf: np.where(real, leaf, np.zeros_like(leaf)), (dealt.weights, dealt.missing)
    )
    return replace(dealt, weights=kept[0], missing=kept[1])


def _write_message(report: ParityReport, microbatches: int) -> str:
    wrong, worst = report.wrong, report.worst
    ranks = len(worst.split)
    ratio = "no constant ratio" if worst.ratio is None else f"ratio {worst.ratio:.3f}"
    where = f"{ranks} ranks" + (f" of {microbatches} microbatches" if microbatches > 1 else "")
    return (
        f"{len(wrong)} of {len(report.differences)} gradient leaves differ at rtol="
        f"{worst.rtol:g}; worst {worst.leaf} {worst.shape}: {ratio} on {where}. "
        f"{_explain(worst, ranks, microbatches)}\n{describe(wrong)}"
    )


def _explain(worst: LeafDifference, ranks: int, microbatches: int) -> str:
    if worst.rtol < 1e-7 and worst.difference < 1e-5:
        return (
            "A difference this small is float32's rounding: something in loss_fn computes in "
            "float32. Allow rtol=1e-5, or let it keep the dtype of its input."
        )
    if worst.ratio is None:
        return (
            "Rows count by other weights than their own: look for a mean taken on one rank or "
            "microbatch before the sums met, or ask diagnose for its name."
        )
    for factor, meaning in (
        (ranks, "equal to the number of ranks means the gradient was summed twice"),
        (1 / ranks, "of one over the number of ranks means it was averaged after being divided"),
        (
            microbatches,
            "equal to the number of microbatches means that they were added where the loss had "
            "been scaled for a mean",
        ),
        (
            1 / microbatches,
            "of one over the number of microbatches means that they were averaged after being "
            "divided",
        ),
        (ranks * microbatches, "equal to ranks times microbatches means that nothing was averaged"),
        (1 / (ranks * microbatches), "of one over ranks times microbatches means two averages"),
    ):
        if factor != 1 and np.isclose(worst.ratio, factor, rtol=1e-3):
            return f"A ratio {meaning}."
    return "A constant ratio means that the denominator is wrong and the rows' weights are right."
