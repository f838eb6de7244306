"""The command line: it parses and prints only. `plan` and `audit` never import JAX."""

import sys
from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import typer

from jax_ddp_weighting import idfiles
from jax_ddp_weighting.arguments import check_integer
from jax_ddp_weighting.audit import audit_ids
from jax_ddp_weighting.console import (
    print_audits,
    print_json,
    print_plan,
    print_table,
    progress_bar,
)
from jax_ddp_weighting.plan import EpochPlan, Order, Tail
from jax_ddp_weighting.summary import as_json, described, summarised
from jax_ddp_weighting.walk import walk

RIGHT, WRONG, BAD_INPUT = 0, 1, 2
_NAME = "jax-ddp-weighting"
_WALKED = 2 * 10**9  # examples up to which a plan is walked: a byte each, and half a minute

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Data-parallel training in which every example counts as its weight, once."
    " Exit status: 0 right, 1 found wrong, 2 bad input.",
)


def run(arguments: Sequence[str]) -> int:
    """Runs one command line; whatever is wrong with it is one line on standard error.

    Args:
        arguments: what stands after the program's name.

    Returns:
        0 where all is right, 1 where something was found wrong, 2 where the input is bad.
    """
    try:
        status = app(list(arguments), prog_name=_NAME, standalone_mode=False)
    except typer.TyperException as error:
        context = getattr(error, "ctx", None)
        command = context.command_path if context else _NAME
        return _refused(f"{command}: {error.format_message()} See {command} --help.")
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return _refused(f"{where}{error.strerror or error}. Name a file that can be used.")
    except (ValueError, TypeError, OverflowError) as error:
        return _refused(str(error))
    except MemoryError as error:
        return _refused(f"{error}. Take fewer examples, or order=keyed, which makes no lists.")
    return status if isinstance(status, int) else RIGHT


def _refused(message: str) -> int:
    print(" ".join(message.split()), file=sys.stderr)
    return BAD_INPUT


def _whole_number(text: str) -> int:
    """`1000`, `1_000` and `1e3`."""
    try:
        number = float(text) if "e" in text.lower() else int(text)
        whole = int(number)
    except (ValueError, OverflowError):
        whole = number = None
    if whole is None or whole != number:
        raise typer.BadParameter(f"{text!r} is no whole number, such as 50000, 50_000 or 1e9.")
    return whole


_Number = {"parser": _whole_number, "metavar": "INT"}
NumExamples = Annotated[
    int, typer.Option("--num-examples", "-n", help="Length of the dataset.", **_Number)
]
NumReplicas = Annotated[
    int, typer.Option("--num-replicas", "-w", help="Number of data-parallel ranks.", **_Number)
]
BatchSize = Annotated[
    int, typer.Option("--batch-size", "-b", help="Rows per rank and step.", **_Number)
]
TailOption = Annotated[
    Tail, typer.Option(help="Slots beyond the data: weight 0, weight 1 as torch, or cut.")
]
OrderOption = Annotated[
    Order, typer.Option(help="keyed: the cost of the rows asked for; torch: bit for bit torch's.")
]
Seed = Annotated[int, typer.Option(help="Chooses the orders.")]
Shuffle = Annotated[bool, typer.Option("--shuffle/--no-shuffle", help="A new order each epoch.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of tables.")]


@app.command()
def plan(
    num_examples: NumExamples,
    num_replicas: NumReplicas,
    batch_size: BatchSize,
    tail: TailOption = "mask",
    order: OrderOption = "keyed",
    seed: Seed = 0,
    shuffle: Shuffle = True,
    epoch: Annotated[int, typer.Option(help="The epoch whose first ids are shown.")] = 0,
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
    summary = summarised(chosen, epoch)
    if json:
        print_json({**asdict(summary), "plan": described(chosen)})
    else:
        print_plan(summary)
    return RIGHT


@app.command()
def audit(
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
        typer.Option("--num-replicas", "-w", help="Ranks of the plan to audit.", **_Number),
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option("--batch-size", "-b", help="Rows per rank and step of the plan.", **_Number),
    ] = None,
    tail: TailOption = "mask",
    order: OrderOption = "keyed",
    seed: Seed = 0,
    shuffle: Shuffle = True,
    epochs: Annotated[int, typer.Option(help="How many epochs of the plan to audit.")] = 2,
    closed_form: Annotated[
        bool, typer.Option("--closed-form", help="Audit a plan too large to walk slot by slot.")
    ] = False,
    json: Json = False,
) -> int:
    """Which ids were read once, twice or never: by a run that wrote them down, or by a plan."""
    if files:
        if num_replicas is not None or batch_size is not None:
            raise ValueError(
                "audit: give files of ids, or a plan (--num-replicas, --batch-size), got both."
                " Files say themselves which rank read what."
            )
        return _audit_files(num_examples, files, column, weight_column, weights or [], json)
    if num_replicas is None or batch_size is None:
        raise ValueError(
            "audit: give files of ids, one per rank, or --num-replicas and --batch-size of a plan,"
            " got neither. For instance: audit -n 50000 rank0.txt rank1.txt"
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
    if weight_files and weight_column:
        raise ValueError(
            "audit: give --weights or --weight-column, got both. Weights stand in files of their"
            " own, or beside the ids in JSON lines."
        )
    if weight_files and len(weight_files) != len(files):
        raise ValueError(
            f"audit: --weights must name one file for each of the {len(files)} files of ids, got"
            f" {len(weight_files)}. Repeat --weights in the order of the files of ids."
        )
    if weight_column:
        weight_files = files
    with progress_bar("reading", len(files) + len(weight_files)) as advance:
        ids, weights = [], []
        for path in files:
            ids.append(idfiles.read_ids(path, column=column))
            advance(1)
        for path, rank_ids in zip(weight_files, ids, strict=False):
            weights.append(idfiles.read_weights(path, column=weight_column))
            if len(weights[-1]) != len(rank_ids):
                raise ValueError(
                    f"{path}: weights must be as many as the ids, {len(rank_ids)}, got"
                    f" {len(weights[-1])}. Every slot has one weight."
                )
            advance(1)
    found = audit_ids(ids, num_examples, weights=weights or None)
    if json:
        print_json(as_json(found) | {"files": [str(path) for path in files]})
    else:
        print_table(
            "Ranks",
            ["rank", "file", "slots", "accepted"],
            [
                [rank, path.name, len(ids[rank]), found.per_rank[rank]]
                for rank, path in enumerate(files)
            ],
        )
        print_audits([found], [None])
    return RIGHT if found.exactly_once else WRONG


def _audit_plan(plan: EpochPlan, epochs: int, closed_form: bool, json: bool) -> int:
    check_integer("audit: epochs", epochs, 1, 2**31, "be an integer of at least 1")
    orders: Sequence[str | None] = [None] * epochs
    if closed_form:
        audits = [plan.audit(epoch) for epoch in range(epochs)]
    elif plan.num_examples > _WALKED:
        raise ValueError(
            f"audit: --num-examples must be at most {_WALKED:,} to walk every slot, got"
            f" {plan.num_examples:,}. --closed-form says what an epoch covers without walking it."
        )
    else:
        per_epoch = plan.num_samples * plan.num_replicas
        with progress_bar("walking every slot", epochs * per_epoch) as advance:
            walked = list(walk(plan, epochs, advance=advance))
        audits, orders = [each.audit for each in walked], [each.order for each in walked]
    right = all(each.exactly_once for each in audits)
    changed = [None, *(a and a != b for a, b in pairwise(orders))]
    if json:
        found = [
            as_json(each) | {"order": order, "new_order": new}
            for each, order, new in zip(audits, orders, changed, strict=True)
        ]
        print_json({"exactly_once": right, "plan": described(plan), "epochs": found})
    else:
        print_audits(audits, changed)
    return RIGHT if right else WRONG
