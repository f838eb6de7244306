"""Whether a loss is a sum over rows at all: without that, no weighting can help."""

import operator
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial, reduce
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from jax_ddp_weighting._arguments import check_rtol
from jax_ddp_weighting.data.batch import Batch
from jax_ddp_weighting.testing.check_arguments import check_case, check_splits
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
from jax_ddp_weighting.weighting.microbatches import Rows
from jax_ddp_weighting.weighting.statistics import Statistics, check_statistics, sum_statistics
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
    statistics: Statistics | None = None,
) -> ParityReport:
    """Whether totals, weights and gradients of a batch's parts add up to those of the whole.

    The rule: `loss_fn` of the whole batch equals the sum of `loss_fn` over its parts, term by term,
    and rows of weight 0 add nothing. Only then does the gradient not depend on how rows are dealt
    to ranks and microbatches. A term that is counted once (`WeightedSum.once`) must have the same
    mean in every part.

    A weight alone that does not add up, a constant or one that is clamped to 1, is no weight of
    rows: `divisors=` of `value_and_grad` takes it. A batch of nothing but padding is tried too, of
    which such a weight is not 0.

    Args:
        loss_fn: `loss_fn(params, batch)` returns a `WeightedSum`, or a dict of them.
        params: the parameters, a pytree of floating point arrays. Untrained ones will do, but zeros
            may hide what rows have to do with each other.
        batch: a `Batch` of at least two rows.
        splits: rows per part, such as `[(3, 1), (2, 2)]`; by default halves, and one row apart.
        rtol: the difference allowed, relative to the largest entry; by default as for
            `check_gradients`.
        float64: compute in float64, whatever JAX is set to and the data are.
        statistics: `statistics(params, batch)` of a loss that takes `statistics=`, as in
            `value_and_grad`. They must add up too; every part is given those of the whole.

    Returns:
        A `ParityReport` of every comparison made.

    Raises:
        ParityError: something does not add up; names the terms and the usual causes, or the weight
            that belongs into a divisor.
        ValueError: no row has weight; a split does not deal all rows out, or leaves a part empty;
            `rtol` is not in `[0, 1)`.
        TypeError: `batch` is no `Batch`; a split is none of integers; a parameter is no float; or
            `loss_fn` returns no `WeightedSum`.

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
    check_case(loss_fn, params, batch, caller="check_additive")
    if splits is not None:
        check_splits(splits, caller="check_additive")
    rows = int(np.shape(batch.weights)[0])
    deals = _check_splits(splits, rows)
    if rtol is not None:
        check_rtol("check_additive: rtol", rtol)
    cast = as_float64 if float64 else lambda tree: jax.tree.map(as_host, tree)
    params, batch = cast(params), cast(batch)
    check_statistics(statistics, caller="check_additive")
    with jax.enable_x64(True) if float64 else nullcontext():
        statistics_of = jax.jit(partial(_take_statistics, statistics))
        sums_of = jax.jit(_take_gradients(loss_fn))
        given = statistics_of(params, batch)
        whole, found = sums_of(params, batch, given), []

        def compare_parts(parts: list[Batch], split: tuple[int, ...], engine: str) -> None:
            sums = [sums_of(params, part, given) for part in parts]
            found.extend(_compare_parts(sums, whole, split, engine, rtol))
            if given:
                of_parts = [statistics_of(params, part)["statistics"] for part in parts]
                right = given["statistics"]
                found.extend(_compare_statistics(of_parts, right, split, engine, rtol))

        for split in deals:
            edges = np.cumsum([0, *split])
            parts = [
                jax.tree.map(lambda leaf, a=a, b=b: leaf[a:b], batch) for a, b in pairwise(edges)
            ]
            compare_parts(parts, split, "sum of parts")
        compare_parts([_add_padding(batch)], (rows,), "rows of weight 0 added")
        if all(each.equal for each in found):
            # what is clamped shows where nothing has weight, however the rows were split before
            padding = replace(batch, weights=np.zeros_like(batch.weights))
            compare_parts([batch, padding], (rows, rows), "rows of weight 0 alone")
    report = ParityReport(tuple(found))
    wrong = report.wrong
    if wrong:
        worst = wrong[0]
        raise ParityError(
            f"check_additive: {len(wrong)} of {len(report.differences)} sums do not add up at "
            f"rtol={worst.rtol:g}; worst {worst.leaf} {worst.shape}, {worst.engine} {worst.split}: "
            f"off by {worst.difference:.2g} of the whole. {_explain(wrong)}\n{describe(wrong)}",
            report,
        )
    return report


def _take_statistics(
    statistics: Statistics | None, params: PyTree, batch: Batch
) -> dict[str, PyTree]:
    """Those of some rows by the name that a loss takes them by; or nothing."""
    if statistics is None:
        return {}
    whole = {"microbatches": 1, "axis_name": None}
    return {"statistics": sum_statistics(statistics, params, Rows(batch), None, **whole)}


def _explain(wrong: list[LeafDifference]) -> str:
    leaves = list(dict.fromkeys(each.leaf for each in wrong))
    weights = [leaf.removesuffix(".weight") for leaf in leaves if leaf.endswith(".weight")]
    others = [leaf for leaf in leaves if not leaf.endswith(".weight")]
    # those of which the total and the gradient are right
    alone = [name for name in weights if not any(x.startswith(f"{name}.") for x in others)]
    if not alone:
        return _CAUSES
    named = " and ".join(map(repr, alone))
    remedy = (
        f"Term {named} has a weight that does not add: give it as a divisor, such as divisors="
        f"{{{alone[0]!r}: 50.0}} or a function of the weight like jnp.maximum(weight, 1), and "
        "return the rows' own weight."
    )
    return remedy if len(alone) == len(leaves) else f"{remedy} {_CAUSES}"


Sums = dict[str, tuple[WeightedSum, PyTree]]
"""Each term's sum, and the gradient of its total."""


def _take_gradients(loss_fn: LossFn) -> Callable[[PyTree, Batch, dict[str, PyTree]], Sums]:
    def sums_of(params: PyTree, batch: Batch, given: dict[str, PyTree]) -> Sums:
        def totals(params: PyTree) -> Any:
            sums = loss_fn(params, batch, **given)
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
        # What the parts are, not what they add up to: at an optimum that is rounding alone.
        total = sum(find_largest(each.total) for each in sums)
        sizes = {
            "total": total,
            "mean": total,
            "weight": sum(find_largest(each.weight) for each in sums),
            "gradient": _add_sizes(gradients),
        }
        against = partial(
            compare, split=split, engine=engine, rtol=rtol, caller="check_additive", sizes=sizes
        )
        added = reduce(operator.add, sums)
        of_parts = jax.tree.map(lambda *leaves: sum(leaves), *gradients)
        compared = against(
            {"total": added.total, "weight": added.weight, "gradient": of_parts},
            {"total": term.total, "weight": term.weight, "gradient": gradient},
        )
        if _are_counted_once([*sums, term]) and added.weight != term.weight:
            means = [
                each
                for part, own in zip(sums, gradients, strict=True)
                if part.weight  # then it must say what the whole says
                for each in against(
                    {"mean": part.total, "gradient": own},
                    {"mean": term.total, "gradient": gradient},
                )
            ]
            # a constant of 1 looks like a term that is counted once, but its total adds up
            adds = all(each.equal for each in compared if each.leaf != "weight")
            if not adds or all(each.equal for each in means):
                compared = means
        found += [replace(each, leaf=f"{name}.{each.leaf}") for each in compared]
    return found


def _compare_statistics(
    parts: list[PyTree], whole: PyTree, split: tuple[int, ...], engine: str, rtol: float | None
) -> list[LeafDifference]:
    return compare(
        {"statistics": jax.tree.map(lambda *leaves: sum(leaves), *parts)},
        {"statistics": whole},
        split=split,
        engine=engine,
        rtol=rtol,
        caller="check_additive",
        sizes={"statistics": _add_sizes(parts)},
    )


def _add_sizes(parts: Sequence[PyTree]) -> PyTree:
    """For each leaf the parts' largest entries, added up."""
    return jax.tree.map(lambda *leaves: sum(map(find_largest, leaves)), *parts)


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
