"""The command `plan`: who reads what. It never imports JAX."""

from dataclasses import asdict
from typing import Annotated

import typer

from jax_ddp_weighting._arguments import list_some
from jax_ddp_weighting.cli.console import count_of, print_json, print_line, print_table
from jax_ddp_weighting.cli.options import (
    NUMBER,
    RIGHT,
    BatchSize,
    Json,
    NumExamples,
    NumReplicas,
    OrderOption,
    Seed,
    Shuffle,
    TailOption,
    plan_of,
)
from jax_ddp_weighting.cli.plan_summary import ROWS_MADE, PlanSummary, describe_plan, summarise

_TAILS = {
    "steps": "steps",
    "slots": "slots",
    "accepted": "accepted slots",
    "padding": "slots of weight 0",
    "copies": "copies that count",
    "left_out": "ids left out",
    "last_step": "accepted in the last step",
}


def plan(
    context: typer.Context,
    num_examples: NumExamples,
    num_replicas: NumReplicas,
    batch_size: BatchSize,
    tail: TailOption = "mask",
    order: OrderOption = "keyed",
    seed: Seed = 0,
    shuffle: Shuffle = True,
    epoch: Annotated[int, typer.Option(help="The epoch whose first ids are shown.", **NUMBER)] = 0,
    json: Json = False,
) -> int:
    """Who reads what: steps, tails, accepted slots, each rank's share, and what it costs."""
    summary = summarise(plan_of(context), epoch)
    if json:
        print_json({**asdict(summary), "plan": describe_plan(summary.plan)})
    else:
        _print_summary(summary)
    return RIGHT


def _print_summary(summary: PlanSummary) -> None:
    plan, cost = summary.plan, summary.cost
    print_table(
        f"An epoch of {count_of(plan.epoch_length, 'id')} over"
        f" {count_of(plan.num_replicas, 'rank')}, {count_of(plan.batch_size, 'row')} each per step",
        ["", *(each.tail + " (chosen)" * (each.tail == plan.tail) for each in summary.tails)],
        [[said, *(getattr(each, name) for each in summary.tails)] for name, said in _TAILS.items()],
    )
    rows = [
        [each.rank, each.accepted, each.padding, list_some(each.first_ids or ["-"])]
        for each in summary.ranks
    ]
    columns = ["rank", "accepted", "weight 0", "first ids"]
    print_table(f"Ranks in epoch {summary.epoch}", columns, rows)
    if cost is not None:
        print_line(
            f"a rank's batch of {count_of(cost.rows, 'row')}: {cost.milliseconds:.3g} ms,"
            f" {cost.bytes:,} bytes (the whole order would take {cost.order_bytes:,})"
        )
    elif plan.steps_per_epoch and plan.batch_size > ROWS_MADE:
        print_line(
            f"a rank's batch of {plan.batch_size:,} rows was not made: beyond {ROWS_MADE:,} it"
            " would cost too much here. Take a smaller batch to see what one costs."
        )
    elif plan.steps_per_epoch:
        print_line(
            f"torch's order of {plan.num_examples:,} ids is made whole, 8 bytes an id and more:"
            " too many to show here. --order keyed costs only the rows that are read."
        )
