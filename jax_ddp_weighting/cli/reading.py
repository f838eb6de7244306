"""The commands `plan` and `audit`: what is read. They never import JAX."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from jax_ddp_weighting.cli import id_files as idfiles
from jax_ddp_weighting.cli.console import (
    print_audits,
    print_files,
    print_json,
    print_plan,
    progress_bar,
)
from jax_ddp_weighting.cli.epoch_audits import AuditedEpoch, audit_epochs
from jax_ddp_weighting.cli.options import (
    NUMBER,
    RIGHT,
    WRONG,
    BatchSize,
    Json,
    NumExamples,
    NumReplicas,
    OrderOption,
    Seed,
    Shuffle,
    TailOption,
    given,
)
from jax_ddp_weighting.cli.plan_summary import as_json, describe_plan, summarise
from jax_ddp_weighting.sampling.audit import EpochAudit, audit_ids
from jax_ddp_weighting.sampling.plan import EpochPlan

_OF_FILES = ("column", "weight_column", "weights")
_OF_A_PLAN = (
    *("num_replicas", "batch_size", "tail", "order", "seed", "shuffle"),
    *("epochs", "closed_form"),
)


def plan(
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
    chosen = EpochPlan(
        num_examples,
        num_replicas,
        batch_size,
        shuffle=shuffle,
        seed=seed,
        tail=tail,
        order=order,
    )
    summary = summarise(chosen, epoch)
    if json:
        print_json({**asdict(summary), "plan": describe_plan(chosen)})
    else:
        print_plan(summary)
    return RIGHT


def audit(
    context: typer.Context,
    num_examples: NumExamples,
    files: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Files of ids, one per rank: text, .npy, or JSON lines. None: audit a plan."
        ),
    ] = None,
    column: Annotated[
        str | None, typer.Option(help="Where JSON lines keep an id or a list of ids.")
    ] = None,
    weight_column: Annotated[
        str | None, typer.Option(help="Where JSON lines keep the weights.")
    ] = None,
    weights: Annotated[
        list[Path] | None, typer.Option(help="Files of weights, in the order of the files of ids.")
    ] = None,
    num_replicas: Annotated[
        int | None,
        typer.Option("--num-replicas", "-w", help="Ranks of the plan to audit.", **NUMBER),
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option("--batch-size", "-b", help="Rows per rank and step of the plan.", **NUMBER),
    ] = None,
    tail: TailOption = "mask",
    order: OrderOption = "keyed",
    seed: Seed = 0,
    shuffle: Shuffle = True,
    epochs: Annotated[
        int, typer.Option(help="How many epochs of the plan to audit.", **NUMBER)
    ] = 2,
    closed_form: Annotated[
        bool, typer.Option("--closed-form", help="Audit a plan too large to walk slot by slot.")
    ] = False,
    json: Json = False,
) -> int:
    """Which ids were read once, twice or never: by a run that wrote them down, or by a plan."""
    if files:
        if of_a_plan := given(context, _OF_A_PLAN):
            raise ValueError(
                f"audit: give files of ids, or a plan, got files and {', '.join(of_a_plan)}."
                " Files say themselves which rank read what."
            )
        return _audit_files(num_examples, files, column, weight_column, weights or [], json)
    if num_replicas is None or batch_size is None:
        raise ValueError(
            "audit: give files of ids, one per rank, or --num-replicas and --batch-size of a plan,"
            " got neither. For instance: audit -n 50000 rank0.txt rank1.txt"
        )
    if of_files := given(context, _OF_FILES):
        raise ValueError(
            f"audit: {', '.join(of_files)} must come with files of ids, got none. Name the files of"
            " ids, or leave the option out to audit a plan."
        )
    audited = EpochPlan(
        num_examples,
        num_replicas,
        batch_size,
        shuffle=shuffle,
        seed=seed,
        tail=tail,
        order=order,
    )
    return _audit_plan(audited, epochs, closed_form, json)


def _audit_files(
    num_examples: int,
    files: list[Path],
    column: str | None,
    weight_column: str | None,
    weight_files: list[Path],
    json: bool,
) -> int:
    with progress_bar("reading", len(files)) as advance:
        ids, weights = idfiles.read_ranks(
            files,
            column=column,
            weight_files=weight_files,
            weight_column=weight_column,
            advance=advance,
        )
    found = audit_ids(ids, num_examples, weights=weights)
    if json:
        print_json(as_json(found) | {"files": [str(path) for path in files]})
    else:
        print_files(files, ids, found)
        print_audits([AuditedEpoch(found)], _hint(found, weights is not None))
    return RIGHT if found.exactly_once else WRONG


def _hint(found: EpochAudit, weighted: bool) -> str:
    """What files may hold where ids came twice, beyond what is said of a plan."""
    hint = ""
    if found.num_duplicated and not weighted:
        hint += " Weights were not given: padding rows count."
    each_again = found.num_duplicated == found.num_examples
    if each_again and len(set(found.duplicated.values())) == 1:
        hint += " Several epochs? A file holds one."
    return hint


def _audit_plan(plan: EpochPlan, epochs: int, closed_form: bool, json: bool) -> int:
    with progress_bar(
        "walking every slot", epochs * plan.num_samples * plan.num_replicas
    ) as advance:
        audited = audit_epochs(plan, epochs, closed_form=closed_form, advance=advance)
    right = all(each.audit.exactly_once for each in audited)
    if json:
        found = [
            as_json(each.audit) | {"order": each.order, "new_order": each.new_order}
            for each in audited
        ]
        print_json({"exactly_once": right, "plan": describe_plan(plan), "epochs": found})
    else:
        print_audits(audited)
    return RIGHT if right else WRONG
