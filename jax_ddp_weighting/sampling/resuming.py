"""The state of a sampler as plain values: made of a plan, and checked against one."""

from collections.abc import Mapping
from typing import Any

from jax_ddp_weighting._arguments import check_epoch, check_limit, check_up_to
from jax_ddp_weighting.sampling.kinds import Plan
from jax_ddp_weighting.sampling.packing import PackedPlan

_VERSION = 1


def make_state(plan: Plan, epoch: int, position: int) -> dict[str, Any]:
    """Where a sampler is in an epoch of a whole plan: JSON holds it."""
    if isinstance(plan, PackedPlan):  # whose last step may be longer than what was left
        position = min(position, plan.dealt_rows(epoch).epoch_length)
    place = {"version": _VERSION, "epoch": epoch, "position": position}
    return place | plan.fingerprint_of(epoch)


def read_state(caller: str, plan: Plan, state: Mapping[str, Any]) -> tuple[int, int]:
    """The epoch and the position that a state holds, if it is of this plan.

    Raises:
        TypeError: the state is no mapping, or a number in it is none.
        ValueError: the state is of another plan; names the field and both values.
    """
    function = f"{caller}.load_state_dict"
    if not isinstance(state, Mapping):
        raise TypeError(
            f"{function}: state must be a mapping, got {type(state).__name__}."
            " state_dict gives one."
        )
    needed = ("version", *plan.fingerprint, "epoch", "position")
    missing = [name for name in needed if name not in state]
    if missing:
        raise ValueError(
            f"{function}: state must hold {', '.join(missing)}, got {sorted(state)}."
            " It is incomplete, or no state of this sampler."
        )
    # which ids an order of one's own has is asked of the epoch that the state is of
    epoch = check_epoch(f"{function}: epoch", state["epoch"])
    for name, value in {"version": _VERSION, **plan.fingerprint_of(epoch)}.items():
        if state[name] != value:
            raise ValueError(
                f"{function}: {name} must be this sampler's, {value!r}, got {state[name]!r}."
                " The state belongs to another order of ids; make the sampler as it was."
            )
    position = f"{function}: position"
    if isinstance(plan, PackedPlan):  # how many rows there are is for `resumed` to say
        return epoch, check_limit(position, state["position"])
    return epoch, check_up_to(position, state["position"], plan.epoch_length)
