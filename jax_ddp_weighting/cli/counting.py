"""The commands `parity`, `diagnose` and `report`: what is counted. They import JAX when called."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from jax_ddp_weighting._arguments import check_microbatches, check_num_replicas, check_rtol
from jax_ddp_weighting._files import open_whole
from jax_ddp_weighting.cli import id_files as idfiles
from jax_ddp_weighting.cli import user_code as targets
from jax_ddp_weighting.cli.console import print_json, print_line, print_proof, progress_bar, waiting
from jax_ddp_weighting.cli.options import (
    NAME,
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
)
from jax_ddp_weighting.sampling.plan import EpochPlan


def parity(
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODULE:FUNCTION]",
            help="Called without arguments, returns (loss_fn, params, batch), or a dict of"
            " check_gradients' arguments, over which options given here win. A tiny case of ours"
            " where none is given.",
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
        int | None,
        typer.Option(
            "--microbatches", "-k", help="Microbatches of each rank; 1 by default.", **NUMBER
        ),
    ] = None,
    rtol: Annotated[
        float | None, typer.Option(help="Difference allowed, of the leaf's largest; by dtype.")
    ] = None,
    x64: Annotated[bool, typer.Option("--x64", help="Let JAX hold 64-bit numbers.")] = False,
    json: Json = False,
) -> int:
    """Gradients proved equal: every split of a batch, in every regime, against one device."""
    from jax_ddp_weighting.cli import proof

    if microbatches is not None:
        check_microbatches("parity: microbatches", microbatches)
    if rtol is not None:
        check_rtol("parity: rtol", rtol)
    splits = [_split(text) for text in split or []]
    _start_jax(max([len(each) for each in splits], default=4), x64)
    if target is None:
        case = proof.tiny_case()
    else:
        function = targets.load("parity", target)
        with targets.in_one_line(f"parity: calling {target}"):
            case = function()
    case = proof.checked_case(case)
    with waiting("comparing gradients"), targets.in_one_line("parity: the gradient"):
        found = proof.prove(
            case,
            splits or None,
            engines=engine or None,
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


def _start_jax(devices: int, x64: bool) -> None:
    import jax

    from jax_ddp_weighting.distributed.mesh import force_cpu_devices

    try:
        force_cpu_devices(devices)
    except RuntimeError as error:  # whoever runs a command from Python may have more of them
        if len(jax.devices()) < devices:
            raise ValueError(str(error)) from None
    if x64:
        jax.config.update("jax_enable_x64", True)


def diagnose(
    target: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:FUNCTION",
            help="gradient_of(token_loss, params, tokens, weights): reduces as your code does, over"
            " tokens and weights of shape \\[ranks, microbatches, tokens].",  # no markup of rich's
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
    from jax_ddp_weighting.testing import probing as diagnosis

    check_microbatches("diagnose: microbatches", microbatches)
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
        from jax_ddp_weighting.cli.report import figures
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        raise ValueError(
            "report: pictures need matplotlib, which is not installed."
            " Install the extra: pip install 'jax-ddp-weighting[cli,plot]'"
        ) from None
    from jax_ddp_weighting.cli.report.findings import find
    from jax_ddp_weighting.cli.report.page import page

    if path.is_dir() or not path.absolute().parent.is_dir():
        raise ValueError(
            f"report: the page must be a file in a folder that is there, got {str(path)!r}."
            " Make the folder first, or write the page elsewhere."
        )
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
        findings = find(
            drawn_plan,
            epochs,
            convention,
            microbatches=microbatches,
            example_weights=idfiles.read_weights(example_weights) if example_weights else None,
            advance=advance,
        )
    with waiting("drawing"):
        pictures = {name: figures.as_png(each) for name, each in figures.draw(findings).items()}
    command = shlex.join([NAME, *context.obj])
    # names of files are bytes, which need not be UTF-8; a page must be
    files = {path: page(findings, pictures, command).encode(errors="backslashreplace")}
    if png is not None:
        png.mkdir(parents=True, exist_ok=True)
        files |= {png / f"{name}.png": picture for name, picture in pictures.items()}
    for file, content in files.items():
        with open_whole(file) as opened:
            opened.write(content)
    if json:
        print_json(findings.as_dict() | {"written": [str(each) for each in files]})
    else:
        print_line(f"wrote {', '.join(map(str, files))}")
    return RIGHT if findings.exactly_once else WRONG
