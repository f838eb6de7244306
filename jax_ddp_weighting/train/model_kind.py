"""The user's functions in a step: what each is given of what is carried, and what it hands back."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from jaxtyping import Array, PyTree

from jax_ddp_weighting.data.batch import Batch
from jax_ddp_weighting.train.step_options import StepOptions
from jax_ddp_weighting.weighting.loss_terms import LossFn
from jax_ddp_weighting.weighting.statistics import Statistics, call_statistics


class ModelKind(Protocol):
    """A model as users know it, made of the parameters and the state that a step carries.

    A step itself knows parameters, which have a gradient, and one state beside them, which passes
    through the microbatches. Makers of steps differ in what they make of the two.
    """

    @property
    def noun(self) -> str:
        """What the first argument of the user's functions is, for errors: `"params"`."""
        ...

    def hand_out(self, params: PyTree, state: PyTree) -> tuple[Any, dict[str, Any]]:
        """The first argument of the user's functions, and what else they are given by name."""
        ...

    def take_back(self, first: Any, out: Any, state: PyTree) -> tuple[Any, PyTree]:
        """The sums that a loss function has returned, and the state after it.

        Args:
            first: what `hand_out` made, and the loss function may have changed.
            out: what the loss function returned.
            state: the state before.
        """
        ...

    def check_unused(self, first: Any, state: PyTree) -> None:
        """Raises where statistics, whose changes are dropped, have used up what the loss needs."""
        ...


def as_step_loss(loss_fn: LossFn, kind: ModelKind, options: StepOptions) -> Callable[..., Any]:
    """The loss as `(params, batch, [rng], *, state, ...) -> (sums, state)`."""

    def step_loss(
        params: PyTree, batch: Batch, *rng: Array, state: PyTree, **given: Any
    ) -> tuple[Any, PyTree]:
        first, named = kind.hand_out(params, state)
        given = {**options.find_for_loss(loss_fn, given), **named}
        arguments = f"{kind.noun}, batch, rng" if rng else f"{kind.noun}, batch"
        check_takes(options.caller, loss_fn, arguments, 2 + len(rng), given)
        return kind.take_back(first, loss_fn(first, batch, *rng, **given), state)

    return step_loss


def as_step_statistics(kind: ModelKind, options: StepOptions) -> Statistics | None:
    """The statistics of the options as `(params, batch, *, state, rng, replicated) -> sums`."""
    statistics = options.statistics
    if statistics is None:
        return None

    def step_statistics(
        params: PyTree, batch: Batch, *, state: PyTree, rng: Any = None, replicated: PyTree = None
    ) -> PyTree:
        first, named = kind.hand_out(params, state)
        offered = {"rng": rng, "replicated": replicated, **named}
        sums = call_statistics(statistics, first, batch, offered, names=f"{kind.noun}, batch")
        kind.check_unused(first, state)
        return sums

    return step_statistics


def check_takes(
    caller: str, loss_fn: Callable[..., Any], names: str, count: int, given: Mapping[str, Any]
) -> None:
    """Raises `TypeError` unless `loss_fn` can be called with what the step was given.

    Args:
        caller: the maker of the step, which speaks in the error.
        loss_fn: what will be called.
        names: its positional arguments in order, for the error.
        count: how many they are.
        given: what comes by name, such as `replicated`.
    """
    signature = inspect.signature(loss_fn)
    try:
        signature.bind(*range(count), **given)
    except TypeError:
        if given:
            raise TypeError(
                f"{caller}: loss_fn must take ({names}, *, {', '.join(given)}) when the step is "
                f"given {' and '.join(given)}, got {signature}. Give it only what the loss "
                "function takes."
            ) from None
        rng = "an rng" if count == 3 else "no rng"
        raise TypeError(
            f"{caller}: loss_fn must take ({names}) when the step is given {rng}, got "
            f"{signature}. Give the step an rng if the loss function takes one, and only then."
        ) from None
