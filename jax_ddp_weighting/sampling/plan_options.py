"""What plans of every kind ask of their options, and of an epoch they are asked for."""

from typing import Literal, get_args

from jax_ddp_weighting._arguments import check_epoch

Tail = Literal["mask", "repeat", "drop"]


def check_shuffle(caller: str, shuffle: object) -> None:
    """Raises `TypeError` unless it is a bool; `caller` speaks in the error."""
    if not isinstance(shuffle, bool):
        raise TypeError(f"{caller}: shuffle must be True or False, got {shuffle!r}.")


def check_tail(caller: str, tail: object) -> None:
    """Raises `ValueError` unless it is one of `Tail`; `caller` speaks in the error."""
    if tail not in get_args(Tail):
        raise ValueError(
            f'{caller}: tail must be "mask", "repeat" or "drop", got {tail!r}.'
            ' "mask" keeps every id once.'
        )


def check_epoch_of(only_epoch: int | None, function: str, epoch: int) -> int:
    """`epoch` as a Python int, if a plan has it that knows `only_epoch`, or all where it is None.

    Args:
        only_epoch: the epoch that a plan is the rest of.
        function: who asks, and speaks in the error.
        epoch: the epoch that is asked for.
    """
    epoch = check_epoch(f"{function}: epoch", epoch)
    if only_epoch not in (None, epoch):
        raise ValueError(
            f"{function}: epoch must be {only_epoch}, the one that this plan is the rest"
            f" of, got {epoch}. Other epochs are read whole, by the plan that was resumed."
        )
    return epoch
