"""What commands print: tables for people, one JSON document for programs."""

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from math import isfinite
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from jax_ddp_weighting._arguments import list_some
from jax_ddp_weighting.cli.epoch_audits import AuditedEpoch
from jax_ddp_weighting.cli.plan_summary import ROWS_MADE, PlanSummary
from jax_ddp_weighting.sampling.audit import CoverageError, EpochAudit

_WRONG = 3  # audits of which it is told what is wrong


def print_json(document: Any) -> None:
    """One JSON document on standard output; numbers that JSON lacks, such as NaN, as text."""
    print(json.dumps(_plain(document), indent=2, allow_nan=False))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return str(value) if isinstance(value, float) and not isfinite(value) else value


def print_line(text: str = "") -> None:
    """A line, not folded: it may be searched or cut by other programs."""
    Console(highlight=False, markup=False, soft_wrap=True).print(_printable(text))


def _printable(text: str) -> str:
    """Text in which names of files may stand, which need not be UTF-8."""
    return text.encode(errors="backslashreplace").decode()


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """A table whose numbers stand right and whose words stand left."""
    table = Table(box=box.SIMPLE_HEAD)
    for place, column in enumerate(columns):
        words = any(isinstance(row[place], str) for row in rows)
        table.add_column(column, justify="left" if words else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(shown(value) for value in row))
    console = Console(highlight=False, markup=False)
    console.print(title, style="bold", soft_wrap=True)
    # as wide as its numbers, which must not be cut where nothing says how wide the screen is
    wanted = console.measure(table, options=console.options.update_width(1000)).maximum
    console.width = max(console.width, wanted)
    console.print(table)


def shown(value: Any) -> str:
    """A value as people read it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return (
        f"{value:.3g}"
        if isinstance(value, float)
        else "-"
        if value is None
        else _printable(str(value))
    )


@contextmanager
def progress_bar(task: str, total: int) -> Iterator[Any]:
    """A bar on standard error while something long runs; nothing where that is no terminal.

    Args:
        task: what is being done.
        total: how many parts it has.

    Returns:
        A function that is told how many parts more are done.
    """
    console = Console(file=sys.stderr)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    with Progress(
        *columns, TimeRemainingColumn(), console=console, transient=True,
        disable=not console.is_terminal,
    ) as progress:  # fmt: skip
        bar = progress.add_task(task, total=total)
        yield lambda parts: progress.advance(bar, parts)


def waiting(task: str) -> AbstractContextManager[Any]:
    """A sign on standard error that something of unknown length is going on."""
    return Console(file=sys.stderr).status(f"{task} ...")


_TAILS = {
    "steps": "steps",
    "slots": "slots",
    "accepted": "accepted slots",
    "padding": "slots of weight 0",
    "copies": "copies that count",
    "left_out": "ids left out",
    "last_step": "accepted in the last step",
}


def print_plan(summary: PlanSummary) -> None:
    """The tables of `plan`."""
    plan, cost = summary.plan, summary.cost
    print_table(
        f"An epoch of {plan.epoch_length:,} ids over {plan.num_replicas:,} ranks,"
        f" {plan.batch_size:,} rows each per step",
        ["", *(each.tail + " (chosen)" * (each.tail == plan.tail) for each in summary.tails)],
        [[said, *(getattr(each, name) for each in summary.tails)] for name, said in _TAILS.items()],
    )
    print_table(
        f"Ranks in epoch {summary.epoch}",
        ["rank", "accepted", "weight 0", "first ids"],
        [
            [each.rank, each.accepted, each.padding, list_some(each.first_ids or ["-"])]
            for each in summary.ranks
        ],
    )
    if cost is not None:
        print_line(
            f"a rank's batch of {cost.rows:,} rows: {cost.milliseconds:.3g} ms, {cost.bytes:,}"
            f" bytes (the whole order would take {cost.order_bytes:,})"
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


def print_files(files: Sequence[Path], ids: Sequence[Any], audit: EpochAudit) -> None:
    """What each rank's file held."""
    rows = [
        [rank, path.name, len(ids[rank]), audit.per_rank[rank]] for rank, path in enumerate(files)
    ]
    print_table("Ranks", ["rank", "file", "slots", "accepted"], rows)


def print_audits(audited: Sequence[AuditedEpoch], hint: str = "") -> None:
    """The table of `audit`, and what is wrong in the first of the epochs that are, and a hint."""
    audits = [each.audit for each in audited]
    print_table(
        f"Every one of {audits[0].num_examples:,} ids exactly once?",
        ["epoch", "slots", "accepted", "unique", "twice+", "never", "stray", "new order", "right"],
        [
            [
                each.audit.epoch,
                each.audit.slots,
                each.audit.accepted,
                each.audit.unique,
                each.audit.num_duplicated,
                each.audit.num_omitted,
                each.audit.num_out_of_range,
                each.new_order,
                each.audit.exactly_once,
            ]
            for each in audited
        ],
    )
    wrong = [audit for audit in audits if not audit.exactly_once]
    for audit in wrong[:_WRONG]:
        try:
            audit.check_exactly_once()
        except CoverageError as error:
            print_line(f"{error}{hint}")
    if len(wrong) > _WRONG:
        print_line(f"and {len(wrong) - _WRONG} epochs more")


def print_proof(proof: Any) -> None:
    """The table of `parity`: the worst leaf of each split in each regime, and of the control."""
    found, control = proof.report.differences, proof.control.differences
    engines = list(dict.fromkeys(each.engine for each in found))

    def worst(differences: Sequence[Any], split: Any, engine: str | None = None) -> float:
        return max(
            d.difference for d in differences if d.split == split and engine in (None, d.engine)
        )

    print_table(
        "Largest difference from one device, relative to the leaf",
        ["rows per rank", *engines, "mean of local means"],
        [
            [
                " + ".join(map(str, split)),
                *(worst(found, split, engine) for engine in engines),
                worst(control, split),
            ]
            for split in dict.fromkeys(each.split for each in found)
        ],
    )
    if proof.failure:
        print_line(proof.failure)
    else:
        allowed = max(each.rtol for each in found)
        print_line(f"One gradient in all {len(found)} comparisons, to {allowed:g} or less.")
    if proof.control.worst.equal:
        print_line("The mean of local means is right here too: this batch cannot tell them apart.")
