"""Gradients proved equal: every way of splitting a batch over ranks, in every regime.

The proof is made before any optimizer step, on every parameter's gradient. Losses can agree while
gradients do not, and an optimizer such as Adam hides a gradient that is wrong by a factor.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import PyTree

from jax_ddp_weighting._arguments import check_callable, check_microbatches, check_rtol
from jax_ddp_weighting.data.batch import Batch
from jax_ddp_weighting.distributed import mesh as meshes
from jax_ddp_weighting.testing.check_arguments import check_case, check_splits
from jax_ddp_weighting.testing.comparison import (
    LeafDifference,
    ParityError,
    ParityReport,
    as_float64,
    as_host,
    as_splits,
    compare,
)
from jax_ddp_weighting.testing.ratios import write_message
from jax_ddp_weighting.testing.reference import explain_axis, take_reference
from jax_ddp_weighting.testing.rounding import (
    find_largest,
    find_narrowest,
    measure_rows,
)
from jax_ddp_weighting.testing.sharded_ranks import ShardedRanks, check_axes
from jax_ddp_weighting.testing.whole_ranks import FAKE_PMAP, Given, OnRank, Ran, WholeRanks
from jax_ddp_weighting.weighting.divisors import Divisors, check_divisors
from jax_ddp_weighting.weighting.gradient import GlobalLoss, value_and_grad
from jax_ddp_weighting.weighting.loss_terms import LossFn, check_coefficients
from jax_ddp_weighting.weighting.loss_terms import describe as describe_value
from jax_ddp_weighting.weighting.microbatches import Rows
from jax_ddp_weighting.weighting.named_arguments import find_named
from jax_ddp_weighting.weighting.param_specs import ParamSpecs
from jax_ddp_weighting.weighting.statistics import Statistics, check_statistics, sum_statistics

MakeGradient = Callable[..., Callable[..., tuple[Any, PyTree]]]


def check_gradients(
    loss_fn: LossFn,
    params: PyTree,
    batch: Batch,
    splits: Sequence[Sequence[int]],
    *,
    engines: Sequence[str] | None = None,
    microbatches: int = 1,
    coefficients: Mapping[str, Any] | None = None,
    divisors: Divisors | None = None,
    statistics: Statistics | None = None,
    rtol: float | None = None,
    float64: bool = False,
    gradient: MakeGradient = value_and_grad,
    rng: Any = None,
    state: PyTree = None,
    has_aux: bool = False,
    reference: Callable[..., Any] | None = None,
    param_specs: ParamSpecs | None = None,
    axes: Mapping[str, int] | None = None,
) -> ParityReport:
    """Compares the loss and every gradient with one device that holds the whole batch.

    The rule: the batch's rows are dealt to the ranks as each split says, filled up with rows of
    weight 0, and the gradient must not change.

    Args:
        loss_fn: `loss_fn(params, batch)` returns a `WeightedSum` or a dict of them; it is called as
            `value_and_grad` calls it where `rng`, `state` or `has_aux` are given.
        params: the parameters, a pytree of floating point arrays.
        batch: the whole batch; rows may have any weight, 0 included, and hold keys.
        splits: one or more ways of dealing the rows, such as `[(3, 1), (4, 0), (2, 1, 1)]`: rows
            per rank, in order. `jit`, `shard_map` and `pmap` need a device per rank.
        engines: the regimes to compare in, of `ENGINES`, all of them by default (with `reference`
            those that map the axis: all but `"jit"`); and `"fake_pmap"`, which is `jax.pmap`
            under `chex.fake_pmap`: ranks of one device, whose results are compared one by one,
            where `pmap` itself hands out the first rank's for all of them.
        microbatches: how many microbatches each rank splits its rows into.
        coefficients: one factor per term, for loss functions that return a dict.
        divisors: what terms are divided by in place of their weights, as in `value_and_grad`.
        statistics: sums over the rows of the step that `loss_fn` is given, as in `value_and_grad`;
            `rng`, if it names it, comes as it does to `loss_fn`.
        rtol: the difference allowed, relative to the largest entry of the leaf; by default 1e-12
            for float64 leaves, 1e-5 for float32, 1e-2 for float16 and 5e-2 for bfloat16. Where rows
            cancel, as at an optimum, what is left is rounding: differences count from some units in
            the last place of what the rows contribute, added up without their signs, whatever
            `rtol` is. In float16 and bfloat16 those are two units of the leaf's own rows, or a
            quarter of one of the largest leaf's: a leaf that is smaller than that is not proved.
        float64: compute in float64, whatever JAX is set to and the data are; the setting is put
            back.
        gradient: what is on trial, called as `value_and_grad` is; the reference is always ours.
            Its loss may be a `GlobalLoss` or a plain scalar.
        rng: one key, handed to `loss_fn(params, batch, rng)` as it is on every rank and in every
            microbatch. What is drawn for a row must be drawn from the row's own id, such as
            `jax.vmap(jax.random.fold_in, (None, 0))(rng, batch.ids)`, or no two splits have one
            loss.
        state: what the model keeps beside its parameters, for `loss_fn(..., state=state)` that
            returns `(sums, state)`. The one that comes back is not compared.
        has_aux: `loss_fn` returns something more, last; it is not compared.
        reference: what is right, for a loss that needs all rows at once and so uses the axis
            itself, named `"data"`: negatives gathered from all ranks, a balance taken by `psum`.
            `reference(params, batch)` is the same on one device that holds the whole batch, in
            plain JAX and without the axis. It is given `rng` and `state` as `loss_fn` is, and
            returns a scalar, or what `loss_fn` returns. By default it is `loss_fn` itself.
        param_specs: which parameters are sharded over `"data"` or further axes, as in
            `value_and_grad`, which is given them: the loss is given each rank's shards, and
            gradients are put together of those that come back. A loss that gathers them needs a
            `reference`. (In `"jit"`, parameters lie so, and the loss sees them whole.)
        axes: the sizes of further axes of the mesh, by name, such as `{"model": 2}`: all are mapped
            beside `"data"`, and every rank of them has the same rows. Each split is tried on a mesh
            of so many devices as it has ranks, times these.

    Returns:
        A `ParityReport` of every comparison made; printed, a table of the leaves.

    Raises:
        ParityError: a leaf differs. An `AssertionError`, whose text names the worst leaves and says
            what a constant ratio means; `report` holds all of them.
        ValueError: no row has weight; a split does not deal all rows out, or needs more devices
            than there are; an engine is unknown, or cannot map further axes; `rtol` is not in
            `[0, 1)`; the reference is not finite; a gradient has another structure; specs do not
            fit the parameters, or split them unevenly.
        TypeError: `batch` is no `Batch`; a split is none of integers; a function is none; a
            parameter is no float; `reference` returns neither a scalar nor sums; `gradient` does
            not take what `value_and_grad` takes, or its function does not return
            `(loss, gradients)`.

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
    check_case(loss_fn, params, batch, caller="check_gradients")
    check_splits(splits, caller="check_gradients")
    functions = {"gradient": gradient} | ({} if reference is None else {"reference": reference})
    for name, given in functions.items():
        check_callable(f"check_gradients: {name}", given, "Leave it out for what is ours.")
    deals = _check_splits(splits, int(np.shape(batch.weights)[0]))
    check_axes(axes or {}, param_specs, params)
    axes = dict(axes or {})
    sharded = bool(axes) or param_specs is not None
    if engines is None:
        left_out = ["jit"] * (reference is not None) + ["pmap"] * bool(axes)
        engines = [each for each in meshes.ENGINES if each not in left_out]
    _check_engines(engines, axes)
    microbatches = check_microbatches("check_gradients: microbatches", microbatches)
    if rtol is not None:
        check_rtol("check_gradients: rtol", rtol)
    check_coefficients(coefficients, caller="check_gradients")
    check_divisors(divisors, coefficients, caller="check_gradients")
    check_statistics(statistics, caller="check_gradients")
    options: dict[str, Any] = {"microbatches": microbatches, "coefficients": coefficients}
    # only what is given: a gradient on trial need not take what is not used
    options |= {"has_aux": True} if has_aux else {}
    options |= {} if state is None else {"has_state": True}
    options |= {} if divisors is None else {"divisors": divisors}
    options |= {} if statistics is None else {"statistics": statistics}
    specs = param_specs or PartitionSpec()
    on_trial = options | {"param_specs": specs} if sharded else options
    _check_takes(gradient, {"axis_name": "data", **on_trial})
    cast = as_float64 if float64 else lambda tree: jax.tree.map(as_host, tree)
    batch, params, state = cast(batch), cast(params), cast(state)
    trial = _Trial(loss_fn, batch, params, rng, state, options)

    with jax.enable_x64(True) if float64 else nullcontext():
        right = trial.find_right(reference)
        found = []
        for split in deals:
            rows = _deal_rows(batch, split, microbatches)
            if sharded:
                ranks = ShardedRanks(len(split), axes, specs, params)
            else:
                ranks = WholeRanks(len(split))
            for engine in engines:
                axis_name = None if engine == "jit" else "data"
                on_rank = trial.take(gradient, axis_name=axis_name, **on_trial)
                ran = ranks.run(on_rank, trial.given, rows, engine)
                compared = trial.compare(ran, right, split=split, engine=engine, rtol=rtol)
                found += ParityReport(tuple(compared)).by_leaf()  # of several ranks the worst
    report = ParityReport(tuple(found))
    if report.wrong:
        raise ParityError(write_message(report, microbatches), report)
    return report


@dataclass(frozen=True, eq=False)
class _Trial:
    """A loss and all that it is given: its gradient on a rank, on one device, and by its rows.

    Attributes:
        loss_fn: the loss.
        batch: the whole batch, in numpy as all that follows.
        params: the parameters.
        rng: the key, or None.
        state: the model's state, or None.
        options: what `value_and_grad` is called with for it, beside the axis and specs.
    """

    loss_fn: LossFn
    batch: Batch
    params: PyTree
    rng: Any
    state: PyTree
    options: Mapping[str, Any]

    @property
    def given(self) -> Given:
        return self.params, self.rng, self.state

    @property
    def _keywords(self) -> dict[str, Any]:
        return {} if self.state is None else {"state": self.state}

    def take(self, make: MakeGradient, **options: Any) -> OnRank:
        """What a rank runs to take its gradient, made by `make` with these options."""

        def on_rank(given: Given, rows: Batch) -> dict[str, PyTree]:
            params, rng, state = given
            loss_fn, own = self.loss_fn, dict(options)
            # Closed over: an rng that were handed on would be folded with each microbatch's number.
            loss_of = loss_fn if rng is None else partial(_call_with_rng, loss_fn, rng)
            if "statistics" in own:
                own["statistics"] = _close_over_rng(own["statistics"], rng, state)
            keywords = {} if state is None else {"state": state}
            return _unpack(make(loss_of, **own)(params, rows, **keywords))

        return on_rank

    def find_right(self, reference: Callable[..., Any] | None) -> dict[str, PyTree]:
        """The loss and the gradient on one device: of the reference, or of the loss itself."""
        terms = {name: self.options.get(name) for name in ("coefficients", "divisors")}

        def right_of(given: Given, batch: Batch) -> dict[str, PyTree]:
            if reference is not None:
                return take_reference(reference, given, batch, **terms)
            whole = {**self.options, "microbatches": 1}
            return self.take(value_and_grad, axis_name=None, **whole)(given, batch)

        with explain_axis():
            return jax.jit(right_of)(self.given, self.batch)

    def compare(self, ran: Ran, right: dict[str, PyTree], **where: Any) -> Iterator[LeafDifference]:
        """Every leaf that ranks have found, compared with what is right.

        Args:
            ran: what runs them, its arguments, and what reads their results.
            right: the right loss and gradients.
            where: the split and the engine, for the report, and what difference is allowed.
        """
        run, args, read = ran
        with explain_axis():
            gots = read(run(*args))
        for got in gots:
            against = partial(compare, got, right, caller="check_gradients", **where)
            differences = against(sizes=jax.tree.map(find_largest, right))
            if not all(each.equal for each in differences):
                # What measuring costs is spent only where something seems to be wrong.
                narrowest = find_narrowest(run, *args)
                again = against(sizes=self._sizes, narrowest=narrowest)
                differences = list(map(_choose, differences, again))
            yield from differences

    @cached_property
    def _sizes(self) -> dict[str, PyTree]:
        """What the rows contribute to each leaf, added up without their signs."""
        coefficients, divisors, statistics = map(
            self.options.get, ("coefficients", "divisors", "statistics")
        )
        positional = () if self.rng is None else (self.rng,)
        found = {}
        if statistics is not None:
            own = _close_over_rng(statistics, self.rng, self.state)
            whole = {"microbatches": 1, "axis_name": None}
            rows = Rows(self.batch)
            found["statistics"] = sum_statistics(own, self.params, rows, self.state, **whole)

        def sums_of(params: PyTree, rows: Batch) -> Any:
            out = self.loss_fn(params, rows, *positional, **self._keywords, **found)
            return out[0] if isinstance(out, tuple) else out

        return measure_rows(sums_of, self.params, self.batch, coefficients, divisors)


def _close_over_rng(statistics: Statistics, rng: Any, state: PyTree) -> Statistics:
    """The statistics with their key, if they name it, as it is given to the loss."""
    offered = {"rng": rng, "state": state}
    argument = "check_gradients: statistics"
    named = find_named(statistics, "params, batch", offered, argument=argument)
    return partial(statistics, rng=rng) if "rng" in named else statistics


def _call_with_rng(loss_fn: LossFn, rng: Any, params: PyTree, batch: Any, **state: PyTree) -> Any:
    return loss_fn(params, batch, rng, **state)


def _choose(plain: LeafDifference, measured: LeafDifference) -> LeafDifference:
    """The measured difference where it explains; else the plain one, which is easier to read."""
    return measured if measured.equal or measured.rounded_by else plain


def _check_takes(gradient: MakeGradient, options: Mapping[str, Any]) -> None:
    try:
        signature = inspect.signature(gradient)
    except ValueError:  # a builtin that has none: it may take them or not
        return
    try:
        signature.bind(None, **options)
    except TypeError:
        wanted = ", ".join(options)
        raise TypeError(
            f"check_gradients: gradient must take (loss_fn, {wanted}) and return a function of "
            f"(params, batch), as value_and_grad does, got {signature}. Wrap yours: lambda "
            f"loss_fn, **options: lambda params, batch: (loss, gradients)."
        ) from None


def _unpack(out: Any) -> dict[str, PyTree]:
    """The loss and the gradients of what `gradient`'s function returned, without all else."""
    if not (isinstance(out, tuple) and len(out) == 2):
        raise TypeError(
            f"check_gradients: gradient must return a function that returns (loss, gradients), got "
            f"{describe_value(out)}. Return both, as value_and_grad does."
        )
    loss, gradients = out
    if isinstance(loss, tuple):  # beside a state or auxiliary output
        loss = loss[0]
    return {"loss": loss.value if isinstance(loss, GlobalLoss) else loss, "params": gradients}


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


def _check_engines(engines: Sequence[str], axes: Mapping[str, int]) -> None:
    is_list = isinstance(engines, Iterable) and not isinstance(engines, str)
    wanted = list(engines) if is_list else [engines]
    known = (*meshes.ENGINES, FAKE_PMAP)
    unknown = [each for each in wanted if each not in known]
    if not is_list or unknown or not wanted:
        raise ValueError(
            f"check_gradients: engines must be a list of some of {', '.join(known)}, got "
            f"{engines!r}. Leave it out for all of ENGINES."
        )
    one_axis = [each for each in wanted if each in ("pmap", FAKE_PMAP)]
    if axes and one_axis:
        raise ValueError(
            f"check_gradients: engines must map several axes where axes= are given, got "
            f"{one_axis[0]!r}. shard_map and vmap do."
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
