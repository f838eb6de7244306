"""The kinds of plans, and what whoever reads one needs of it, whichever it is."""

from typing import Any

from jax_ddp_weighting.sampling.budget import BudgetPlan
from jax_ddp_weighting.sampling.packing import PackedPlan
from jax_ddp_weighting.sampling.plan import EpochPlan

Plan = EpochPlan | BudgetPlan | PackedPlan


def check_any_plan(argument: str, plan: object) -> None:
    """Raises unless `plan` is a plan, of any kind."""
    if not isinstance(plan, Plan):
        raise TypeError(
            f"{argument} must be an EpochPlan, a BudgetPlan or a PackedPlan, got"
            f" {type(plan).__name__}. Make one with EpochPlan(num_examples, num_replicas,"
            " batch_size); a sampler's, of one row a step, is its `plan`."
        )


def find_fingerprint(plan: Plan, epoch: int) -> dict[str, Any]:
    """What decides who reads what in an epoch: only an order of one's own differs over epochs."""
    return plan.fingerprint_of(epoch) if isinstance(plan, EpochPlan) else dict(plan.fingerprint)


def count_steps(plan: Plan, epoch: int) -> int:
    """Steps of an epoch; plans of one number in all epochs are not asked for one."""
    if isinstance(plan, PackedPlan):
        return plan.steps_per_epoch(epoch)
    return int(plan.steps_per_epoch)
