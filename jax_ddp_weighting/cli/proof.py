"""The parity proof as a command runs it: ours in every regime, and a control that must fail."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from jax_ddp_weighting._arguments import check_integer
from jax_ddp_weighting.data.batch import Batch, check_batch
from jax_ddp_weighting.testing.comparison import ParityError, ParityReport
from jax_ddp_weighting.testing.parity import check_gradients
from jax_ddp_weighting.weighting.gradient import value_and_grad
from jax_ddp_weighting.weighting.loss_terms import describe
from jax_ddp_weighting.weighting.named_arguments import find_named
from jax_ddp_weighting.weighting.sums import WeightedSum, weighted_sum

_CASE = ("loss_fn", "params", "batch")
_CONTROL_ENGINE = "shard_map_unchecked"


@dataclass(frozen=True)
class Proof:
    """What a parity proof found.

    Attributes:
        report: every comparison of the gradient on trial.
        control: the same comparisons of the mean of local means, in one regime; None where it
            cannot be taken.
        failure: what `ParityError` says of the gradient on trial; None where all are equal.
        no_control: why the control cannot be taken; None where it was.
    """

    report: ParityReport
    control: ParityReport | None
    failure: str | None
    no_control: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """Everything, in types that JSON knows."""
        return {
            "equal": self.failure is None,
            "failure": self.failure,
            "differences": [asdict(each) for each in self.report.differences],
            "control": [asdict(each) for each in self.control.differences] if self.control else [],
            "no_control": self.no_control,
        }


def tiny_case() -> dict[str, Any]:
    """A case that needs nothing of the user's: six rows of unequal weight, a two-layer network.

    The rule: a case is a dict of the arguments of `check_gradients`: `loss_fn`, `params`, `batch`,
    and any further ones. A tuple of the first three will do.

    Example:
        >>> case = tiny_case()
        >>> sorted(case)
        ['batch', 'loss_fn', 'params']
    """
    rng = np.random.default_rng(0)
    params = {
        "hidden": rng.normal(size=(3, 8)).astype(np.float32),
        "out": rng.normal(size=8).astype(np.float32),
    }
    data = {
        "x": rng.normal(size=(6, 3)).astype(np.float32),
        "y": rng.normal(size=6).astype(np.float32),
    }

    def loss_fn(params: PyTree, batch: Batch) -> WeightedSum:
        predicted = jnp.tanh(batch.data["x"] @ params["hidden"]) @ params["out"]
        return weighted_sum((predicted - batch.data["y"]) ** 2, batch.weights)

    weights = np.array([1, 0.5, 1, 2, 0.25, 1], np.float32)
    return {"loss_fn": loss_fn, "params": params, "batch": Batch.of(data, weights=weights)}


def check_case(case: Any) -> dict[str, Any]:
    """What a user's function returned, as arguments of `check_gradients`.

    Raises:
        ValueError: it is no case, or one whose gradients are 0 whatever is done wrong.
    """
    if isinstance(case, tuple) and len(case) == len(_CASE):
        case = dict(zip(_CASE, case, strict=True))
    if not isinstance(case, Mapping) or not set(_CASE) <= set(case):
        got = f"keys {sorted(map(str, case))}" if isinstance(case, Mapping) else type(case).__name__
        raise ValueError(
            "parity: target must return loss_fn, params and batch, as a tuple or a dict, got"
            f" {got}. Further keys are arguments of check_gradients."
        )
    check_batch("parity: batch of the target must be a Batch", case["batch"])
    weights = np.asarray(case["batch"].weights)
    if not (weights > 0).any():
        raise ValueError(
            "parity: batch of the target must have a row of weight above 0, got"
            f" {weights.size} rows without weight. Their gradient is 0 however it is reduced."
        )
    return dict(case)


def default_splits(rows: int) -> list[tuple[int, ...]]:
    """Ways to deal rows out that are as unkind as they can be: nearly all, all, and uneven fours.

    Example:
        >>> default_splits(6)
        [(5, 1), (6, 0), (4, 1, 1), (2, 2, 1, 1)]
    """
    fours = tuple(rows // 4 + (rank < rows % 4) for rank in range(4))
    splits = [(rows - 1, 1), (rows, 0), (rows - 2, 1, 1), fours]
    return list(dict.fromkeys(split for split in splits if min(split) >= 0))


def prove(
    case: Mapping[str, Any],
    splits: Sequence[tuple[int, ...]] | None = None,
    *,
    engines: Sequence[str] | None = None,
    microbatches: int | None = None,
    rtol: float | None = None,
) -> Proof:
    """Every comparison of `check_gradients`, and the same for a gradient that is wrong.

    The rule: an argument that is given wins over the case's own of that name.

    Args:
        case: arguments of `check_gradients`.
        splits: ways of dealing the rows to ranks; those of `default_splits` by default.
        engines: the regimes to compare in; all by default.
        microbatches: microbatches of each rank; 1 by default.
        rtol: the difference allowed; by dtype by default.

    Returns:
        A `Proof`.

    Raises:
        ValueError: what `check_gradients` refuses.

    Example:
        >>> proof = prove(tiny_case(), [(4, 2)], engines=["vmap"])
        >>> proof.failure is None, proof.control.worst.difference > 0.01
        (True, True)
    """
    options = {"splits": splits, "engines": engines, "microbatches": microbatches, "rtol": rtol}
    given = {name: value for name, value in options.items() if value is not None}
    rows = len(case["batch"].weights)
    case = {"splits": default_splits(rows), **case, **given}
    # beyond the rows every further microbatch is empty, and costs as much as a full one
    remedy = "The batch has no more rows to deal out."
    check_integer("parity: microbatches", case.get("microbatches", 1), 1, rows, remedy)
    report, failure = _compare(case)
    wrong = {"gradient": mean_of_local_means, "engines": [_choose_engine(report)]}
    try:
        control, _ = _compare({**case, **wrong})
    except (TypeError, ValueError) as error:  # a loss that only the gradient on trial can take
        return Proof(report, None, failure, str(error))
    return Proof(report, control, failure)


def _choose_engine(report: ParityReport) -> str:
    """One of the regimes of the proof that have ranks: it needs no more devices than they did."""
    ran = {each.engine for each in report.differences} - {"jit"}
    return _CONTROL_ENGINE if not ran or _CONTROL_ENGINE in ran else min(ran)


def _compare(case: Mapping[str, Any]) -> tuple[ParityReport, str | None]:
    try:
        report = check_gradients(**case)
    except ParityError as error:
        return error.report, str(error)
    return report, None


def mean_of_local_means(
    loss_fn: Callable[..., Any],
    *,
    microbatches: int = 1,
    divisors: Mapping[str, Any] | None = None,
    statistics: Callable[..., Any] | None = None,
    **options: Any,
) -> Callable[..., tuple[Any, PyTree]]:
    """The control: the mean over ranks of each rank's own mean, taken by the library's gradient.

    Over its own weights, whatever the divisors, and with the statistics of its own rows; what a
    rank has found weighs 1. So it takes what `value_and_grad` takes: states, shards, other axes.
    """
    del microbatches, divisors

    def local_means(params: PyTree, batch: Any, **given: Any) -> Any:
        if statistics is not None:
            own = find_named(statistics, "params, batch", given, argument="parity: statistics")
            given["statistics"] = statistics(params, batch, **own)
        found = loss_fn(params, batch, **given)
        if isinstance(found, tuple):  # beside a state or auxiliary output
            return _weigh_once(found[0]), *found[1:]
        return _weigh_once(found)

    return value_and_grad(local_means, **options)


def _weigh_once(sums: Any) -> Any:
    """The same means, each of weight 1."""
    if isinstance(sums, Mapping):
        return {name: _weigh_once(each) for name, each in sums.items()}
    if not isinstance(sums, WeightedSum):
        raise TypeError(
            "parity: loss_fn must return a WeightedSum, or a dict of them, for a control, got "
            f"{describe(sums)}. Nobody knows the weights otherwise that a rank divides by."
        )
    return WeightedSum(sums.mean(), jnp.int32(1))
