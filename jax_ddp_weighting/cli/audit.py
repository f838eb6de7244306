"""The command `audit`: which ids were read, by a run or by a plan. It never imports JAX."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from jax_ddp_weighting.cli.console import (
    count_of,
    print_json,
    print_line,
    print_table,
    progress_bar,
)
from jax_ddp_weighting.cli.epoch_audits import AuditedEpoch, audit_epochs
from jax_ddp_weighting.cli.id_files import read_ranks
from jax_ddp_weighting.cli.options import (
    NUMBER,
    OF_A_PLAN,
    RIGHT,
    WRONG,
    Json,
    NumExamples,
    OrderOption,
    Seed,
    Shuffle,
    TailOption,
    find_given,
    plan_of,
)
from jax_ddp_weighting.cli.plan_summary import audit_as_dict, describe_plan
from jax_ddp_weighting.sampling.audit import CoverageError, EpochAudit, audit_ids
from jax_ddp_weighting.sampling.plan import EpochPlan

_SHOWN = 3  # wrong epochs of which it is told what is wrong
_COLUMNS = {
    "epoch": "epoch",
    "slots": "slots",
    "accepted": "accepted",
    "unique": "unique",
    "num_duplicated": "twice+",
    "num_omitted": "never",
    "num_out_of_range": "stray",
    "new_order": "new order",
    "exactly_once": "right",
}


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
        # of a plan's options, files need the number of examples too
        if of_a_plan := find_given(context, (*OF_A_PLAN[1:], "epochs", "closed_form")):
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
    if of_files := find_given(context, ("column", "weight_column", "weights")):
        raise ValueError(
            f"audit: {', '.join(of_files)} must come with files of ids, got none. Name the files of"
            " ids, or leave the option out to audit a plan."
        )
    return _audit_plan(plan_of(context), epochs, closed_form, json)


def _audit_files(
    num_examples: int,
    files: list[Path],
    column: str | None,
    weight_column: str | None,
    weight_files: list[Path],
    json: bool,
) -> int:
    with progress_bar("reading", len(files)) as advance:
        ids, weights = read_ranks(
            files,
            column=column,
            weight_files=weight_files,
            weight_column=weight_column,
            advance=advance,
        )
    found = audit_ids(ids, num_examples, weights=weights)
    if json:
        print_json(audit_as_dict(found) | {"files": [str(path) for path in files]})
    else:
        ranks = zip(files, ids, found.per_rank, strict=True)
        rows = [[rank, path.name, len(read), n] for rank, (path, read, n) in enumerate(ranks)]
        print_table("Ranks", ["rank", "file", "slots", "accepted"], rows)
        _print_audits([AuditedEpoch(found)], _hint(found, weights is not None))
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
    slots = epochs * plan.num_samples * plan.num_replicas
    with progress_bar("walking every slot", slots) as advance:
        audited = audit_epochs(plan, epochs, closed_form=closed_form, advance=advance)
    right = all(each.audit.exactly_once for each in audited)
    if json:
        found = [
            audit_as_dict(each.audit) | {"order": each.order, "new_order": each.new_order}
            for each in audited
        ]
        print_json({"exactly_once": right, "plan": describe_plan(plan), "epochs": found})
    else:
        _print_audits(audited)
    return RIGHT if right else WRONG


def _print_audits(audited: Sequence[AuditedEpoch], hint: str = "") -> None:
    """The epochs, what is wrong in the first of those that are, and a hint."""
    audits = [each.audit for each in audited]

    def value(each: AuditedEpoch, name: str) -> Any:
        return each.new_order if name == "new_order" else getattr(each.audit, name)

    print_table(
        f"Every one of {count_of(audits[0].num_examples, 'id')} exactly once?",
        list(_COLUMNS.values()),
        [[value(each, name) for name in _COLUMNS] for each in audited],
    )
    wrong = [audit for audit in audits if not audit.exactly_once]
    for audit in wrong[:_SHOWN]:
        try:
            audit.check_exactly_once()
        except CoverageError as error:  # its text is what is wanted: the verdict is in the table
            print_line(f"{error}{hint}")
    if len(wrong) > _SHOWN:
        print_line(f"and {len(wrong) - _SHOWN} epochs more")
