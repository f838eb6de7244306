"""Whether a loss is a sum over rows at all: without that, no weighting can help."""

import operator
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import reduce
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from jax_ddp_weighting._arguments import check_rtol
from jax_ddp_weighting.data.batch import Batch, check_batch
from jax_ddp_weighting.testing.comparison import (
    LeafDifference,
    ParityError,
    ParityReport,
    as_float64,
    as_host,
    as_splits,
    compare,
    describe,
)
from jax_ddp_weighting.testing.rounding import find_largest
from jax_ddp_weighting.weighting.loss_terms import LossFn, name_terms
from jax_ddp_weighting.weighting.sums import WeightedSum

_CAUSES = (
    "No weighting can mend a loss in which rows depend on each other. The usual causes: negatives "
    "taken from the batch (contrastive losses), BatchNorm that is not synchronised, Dice and other "
    "ratios of sums, load-balance terms, weights made from the data, and a mean inside loss_fn."
)


def check_additive(
    loss_fn: LossFn,
    params: PyTree,
    batch: Batch,
    splits: Sequence[Sequence[int]] | None = None,
    *,
    rtol: float | None = None,
    float64: bool = False,
) -> ParityReport:
    """Whether totals, weights and gradients of a batch's parts add up to those of the whole.

    The rule: `loss_fn` of the whole batch equals the sum of `loss_fn` over its parts, term by term,
    and rows of weight 0 add nothing. Only then does the gradient not depend on how rows are dealt
    to ranks and microbatches. A term that is counted once (`WeightedSum.once`) must have the same
    mean in every part.

    Args:
        loss_fn: `loss_fn(params, batch)` returns a `WeightedSum`, or a dict of them.
        params: the parameters, a pytree of floating point arrays. Untrained ones will do, but zeros
            may hide what rows have to do with each other.
        batch: a `Batch` of at least two rows.
        splits: rows per part, such as `[(3, 1), (2, 2)]`; by default halves, and one row apart.
        rtol: the difference allowed, relative to the largest entry; by default as for
            `check_gradients`.
        float64: compute in float64, whatever JAX is set to and the data are.

    Returns:
        A `ParityReport` of every comparison made.

    Raises:
        ParityError: something does not add up; names the terms and the usual causes.
        ValueError: a split does not deal all rows out, or leaves a part empty; `rtol` is not in
            `[0, 1)`.
        TypeError: `batch` is no `Batch`, or `loss_fn` returns no `WeightedSum`.

    Example:
        >>> def loss_fn(w, batch):
        ...     return weighted_sum((w - batch.data) ** 2, batch.weights)
        >>> def of_the_mean(w, batch):
        ...     return weighted_sum((w - batch.data.mean()) ** 2 * batch.data, batch.weights)
        >>> batch = Batch.of(np.float32([0.0, 1.0, 2.0, 5.0]))
        >>> check_additive(loss_fn, np.float32(3.0), batch).worst.equal
        True
        >>> check_additive(of_the_mean, np.float32(3.0), batch)
        Traceback (most recent call last):
        jax_ddp_weighting.testing.comparison.ParityError: check_additive: ... sums do not add up ...
    """
    check_batch("check_additive: batch must be a Batch", batch)
    rows = int(np.shape(batch.weights)[0])
    deals = _check_splits(splits, rows)
    if rtol is not None:
        check_rtol("check_additive: rtol", rtol)
    cast = as_float64 if float64 else lambda tree: jax.tree.map(as_host, tree)
    params, batch = cast(params), cast(batch)
    with jax.enable_x64(True) if float64 else nullcontext():
        sums_of = jax.jit(_take_gradients(loss_fn))
        whole = sums_of(params, batch)
        found = []
        for split in deals:
            edges = np.cumsum([0, *split])
            parts = [
                sums_of(params, jax.tree.map(lambda leaf, a=a, b=b: leaf[a:b], batch))
                for a, b in pairwise(edges)
            ]
            found += _compare_parts(parts, whole, split, "sum of parts", rtol)
        padded = sums_of(params, _add_padding(batch))
        found += _compare_parts([padded], whole, (rows,), "rows of weight 0 added", rtol)
    report = ParityReport(tuple(found))
    wrong = report.wrong
    if wrong:
        worst = wrong[0]
        raise ParityError(
            f"check_additive: {len(wrong)} of {len(report.differences)} sums do not add up at "
            f"rtol={worst.rtol:g}; worst {worst.leaf} {worst.shape}, {worst.engine} {worst.split}: "
            f"off by {worst.difference:.2g} of the whole. {_CAUSES}\n{describe(wrong)}",
            report,
        )
    return report


Sums = dict[str, tuple[WeightedSum, PyTree]]
"""Each term's sum, and the gradient of its total."""


def _take_gradients(loss_fn: LossFn) -> Callable[[PyTree, Batch], Sums]:
    def sums_of(params: PyTree, batch: Batch) -> Sums:
        def totals(params: PyTree) -> Any:
            sums = loss_fn(params, batch)
            factors = dict.fromkeys(sums, 1.0) if isinstance(sums, Mapping) else None
            terms = name_terms(sums, factors, caller="check_additive")
            floating = {name: jnp.asarray(term.total, float) for name, term in terms.items()}
            return floating, terms

        gradients, terms = jax.jacrev(totals, has_aux=True)(params)
        return {name: (term, gradients[name]) for name, term in terms.items()}

    return sums_of


def _compare_parts(
    parts: list[Sums], whole: Sums, split: tuple[int, ...], engine: str, rtol: float | None
) -> list[LeafDifference]:
    found = []
    for name, (term, gradient) in whole.items():
        sums, gradients = zip(*(part[name] for part in parts), strict=True)
        once = _are_counted_once([*sums, term]) and sum(each.weight for each in sums) != term.weight
        if once:  # then every part must say what the whole says
            pairs = [
                ({"mean": each.total, "gradient": own}, {"mean": term.total, "gradient": gradient})
                for each, own in zip(sums, gradients, strict=True)
                if each.weight
            ]
        else:
            added = reduce(operator.add, sums)
            of_parts = jax.tree.map(lambda *leaves: sum(leaves), *gradients)
            pairs = [
                (
                    {"total": added.total, "weight": added.weight, "gradient": of_parts},
                    {"total": term.total, "weight": term.weight, "gradient": gradient},
                )
            ]
        # What the parts are, not what they add up to: at an optimum that is rounding alone.
        sizes = {
            "total": sum(find_largest(each.total) for each in sums),
            "gradient": sum(find_largest(own) for own in gradients),
        }
        for got, right in pairs:
            compared = compare(
                got,
                right,
                split=split,
                engine=engine,
                rtol=rtol,
                caller="check_additive",
                sizes=sizes,
            )
            found += [replace(each, leaf=f"{name}.{each.leaf}") for each in compared]
    return found


def _are_counted_once(sums: list[WeightedSum]) -> bool:
    weights = [np.asarray(each.weight) for each in sums]
    return all(each.dtype.kind in "iu" and each <= 1 for each in weights)


def _add_padding(batch: Batch) -> Batch:
    """The batch with copies of its first rows at weight 0 behind it."""
    rows = len(batch.weights)
    order = np.concatenate([np.arange(rows), np.arange(-(-rows // 2))])
    padded = jax.tree.map(lambda leaf: leaf[order], batch)
    real = np.arange(len(order)) < rows
    weights, missing = jax.tree.map(
        lambda leaf: np.where(real, leaf, np.zeros_like(leaf)), (padded.weights, padded.missing)
    )
    return replace(padded, weights=weights, missing=missing)


def _check_splits(splits: Sequence[Sequence[int]] | None, rows: int) -> list[tuple[int, ...]]:
    if splits is None:
        if rows < 2:
            raise ValueError(
                f"check_additive: batch must have at least 2 rows, got {rows}. "
                "One row has no parts that could add up."
            )
        splits = [(rows // 2, rows - rows // 2), (1, rows - 1)]
    deals = list(dict.fromkeys(as_splits(splits)))
    for split in deals:
        if len(split) < 2 or min(split) < 1 or sum(split) != rows:
            raise ValueError(
                f"check_additive: splits must deal all {rows} rows out to two or more parts that "
                f"are not empty, got {split}. Give rows per part, such as {(1, rows - 1)}."
            )
    if not deals:
        raise ValueError(
            "check_additive: splits must name at least one split, got none. Leave them out for "
            "halves, and one row apart."
        )
    return deals
