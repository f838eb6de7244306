"""The command line: it parses and prints only. `plan` and `audit` never import JAX."""

import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from jax_ddp_weighting import idfiles, targets
from jax_ddp_weighting.arguments import check_integer, check_num_replicas
from jax_ddp_weighting.audit import audit_ids
from jax_ddp_weighting.console import (
    print_audits,
    print_files,
    print_json,
    print_line,
    print_plan,
    print_proof,
    progress_bar,
    waiting,
)
from jax_ddp_weighting.options import (
    NUMBER,
    BatchSize,
    Json,
    NumExamples,
    NumReplicas,
    OrderOption,
    Seed,
    Shuffle,
    TailOption,
)
from jax_ddp_weighting.plan import EpochPlan
from jax_ddp_weighting.summary import as_json, described, summarised
from jax_ddp_weighting.walk import AuditedEpoch, audit_epochs

RIGHT, WRONG, BAD_INPUT = 0, 1, 2
_NAME = "jax-ddp-weighting"

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
        status = app(list(arguments), prog_name=_NAME, standalone_mode=False, obj=list(arguments))
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
        print_audits([AuditedEpoch(found)])
    return RIGHT if found.exactly_once else WRONG


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
        print_json({"exactly_once": right, "plan": described(plan), "epochs": found})
    else:
        print_audits(audited)
    return RIGHT if right else WRONG


@app.command()
def parity(
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODULE:FUNCTION]",
            help="Called without arguments, returns (loss_fn, params, batch), or a dict of"
            " check_gradients' arguments. A tiny case of ours where none is given.",
        ),
    ] = None,
    split: Annotated[
        list[str] | None,
        typer.Option(help="Rows per rank, such as 3,1; may be repeated. Unkind ones by default."),
    ] = None,
    engine: Annotated[
        list[str] | None, typer.Option(help="A regime to compare in; may be repeated. All of them.")
    ] = None,
    microbatches: Annotated[
        int, typer.Option("--microbatches", "-k", help="Microbatches of each rank.", **NUMBER)
    ] = 1,
    rtol: Annotated[
        float | None, typer.Option(help="Difference allowed, of the leaf's largest; by dtype.")
    ] = None,
    x64: Annotated[bool, typer.Option("--x64", help="Let JAX hold 64-bit numbers.")] = False,
    json: Json = False,
) -> int:
    """Gradients proved equal: every split of a batch, in every regime, against one device."""
    from jax_ddp_weighting import proof

    _check_microbatches("parity", microbatches)
    splits = [_split(text) for text in split or []]
    _start_jax(max([len(each) for each in splits], default=4), x64)
    if target is None:
        case = proof.tiny_case()
    else:
        function = targets.load("parity", target)
        with targets.in_one_line(f"parity: calling {target}"):
            case = function()
    case = proof.checked_case(case)
    if not split:
        splits = proof.default_splits(len(case["batch"].weights))
    with waiting("comparing gradients"), targets.in_one_line("parity: the gradient"):
        found = proof.prove(
            case,
            splits,
            engines=engine or proof.ALL,
            microbatches=microbatches,
            rtol=rtol,
        )
    if json:
        print_json(found.as_dict())
    else:
        print_proof(found)
    return WRONG if found.failure else RIGHT


def _split(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(rows) for rows in text.split(","))
    except ValueError:
        raise ValueError(
            f"parity: --split must be rows per rank, got {text!r}. For instance: --split 3,1"
        ) from None


def _check_microbatches(command: str, number: int) -> None:
    rule, remedy = "be an integer of at least 1", "1 takes a batch whole."
    check_integer(f"{command}: microbatches", number, 1, 2**31, rule, remedy)


def _start_jax(devices: int, x64: bool) -> None:
    import jax

    from jax_ddp_weighting.mesh import force_cpu_devices

    try:
        force_cpu_devices(devices)
    except RuntimeError as error:  # whoever runs a command from Python may have more of them
        if len(jax.devices()) < devices:
            raise ValueError(str(error)) from None
    if x64:
        jax.config.update("jax_enable_x64", True)


@app.command()
def diagnose(
    target: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:FUNCTION",
            help="gradient_of(token_loss, params, tokens, weights): reduces as your code does, over"
            " tokens and weights of shape [ranks, microbatches, tokens].",
        ),
    ],
    num_replicas: Annotated[
        int, typer.Option("--num-replicas", "-w", help="Ranks of the probe.", **NUMBER)
    ] = 2,
    microbatches: Annotated[
        int, typer.Option("--microbatches", "-k", help="Microbatches of the probe.", **NUMBER)
    ] = 1,
    x64: Annotated[bool, typer.Option("--x64", help="Let JAX hold 64-bit numbers.")] = False,
    json: Json = False,
) -> int:
    """How your own reduction counts each token: its convention, by name, and what mends it."""
    from jax_ddp_weighting import diagnosis

    _check_microbatches("diagnose", microbatches)
    _start_jax(check_num_replicas("diagnose: num_replicas", num_replicas), x64)
    gradient_of = targets.load("diagnose", target)
    with waiting("looking at gradients"), targets.in_one_line(f"diagnose: {target}"):
        found = diagnosis.diagnose(
            gradient_of, num_replicas=num_replicas, microbatches=microbatches
        )
    if json:
        print_json(found.as_dict())
    else:
        print_line(str(found))
    return RIGHT if found.right else WRONG


@app.command()
def report(
    context: typer.Context,
    path: Annotated[Path, typer.Argument(metavar="PAGE.html", help="The page to write.")],
    num_examples: NumExamples,
    num_replicas: NumReplicas,
    batch_size: BatchSize,
    tail: TailOption = "mask",
    order: OrderOption = "keyed",
    seed: Seed = 0,
    shuffle: Shuffle = True,
    epochs: Annotated[int, typer.Option(help="How many epochs to walk.", **NUMBER)] = 4,
    convention: Annotated[
        str, typer.Option(help="Set beside the right weights; named as diagnose names it.")
    ] = "mean_of_means",
    microbatches: Annotated[
        int, typer.Option("--microbatches", "-k", help="Microbatches of each rank.", **NUMBER)
    ] = 1,
    example_weights: Annotated[
        Path | None,
        typer.Option(help="A file of what each example weighs, such as its number of tokens."),
    ] = None,
    png: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Write the pictures there too.")
    ] = None,
    json: Json = False,
) -> int:
    """A page with pictures: who read what, how often, and how much each example counted."""
    try:
        from jax_ddp_weighting import figures
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        raise ValueError(
            "report: pictures need matplotlib, which is not installed."
            " Install the extra: pip install 'jax-ddp-weighting[cli,plot]'"
        ) from None
    from jax_ddp_weighting.page import page
    from jax_ddp_weighting.report import found

    drawn_plan = EpochPlan(
        num_examples,
        num_replicas,
        batch_size,
        shuffle=shuffle,
        seed=seed,
        tail=tail,
        order=order,
    )
    slots = epochs * (drawn_plan.num_samples + drawn_plan.steps_per_epoch * batch_size)
    with progress_bar("walking every slot", slots * num_replicas) as advance:
        findings = found(
            drawn_plan,
            epochs,
            convention,
            microbatches=microbatches,
            example_weights=idfiles.read_weights(example_weights) if example_weights else None,
            advance=advance,
        )
    with waiting("drawing"):
        pictures = {name: figures.as_png(each) for name, each in figures.drawn(findings).items()}
    command = shlex.join([_NAME, *context.obj])
    path.write_text(page(findings, pictures, command), encoding="utf-8")
    written = [path]
    if png is not None:
        png.mkdir(parents=True, exist_ok=True)
        for name, picture in pictures.items():
            written.append(png / f"{name}.png")
            written[-1].write_bytes(picture)
    if json:
        print_json(findings.as_dict() | {"written": [str(each) for each in written]})
    else:
        print_line(f"wrote {', '.join(map(str, written))}")
    return RIGHT if findings.exactly_once else WRONG
