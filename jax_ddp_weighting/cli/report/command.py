"""The command `report`: a page with pictures. It imports JAX and matplotlib when called."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from jax_ddp_weighting._files import open_whole
from jax_ddp_weighting.cli.console import print_json, print_line, progress_bar, waiting
from jax_ddp_weighting.cli.id_files import read_weights
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
    plan_of,
)


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
    plan = plan_of(context)
    slots = epochs * (plan.num_samples + plan.steps_per_epoch * batch_size)
    with progress_bar("walking every slot", slots * num_replicas) as advance:
        findings = find(
            plan,
            epochs,
            convention,
            microbatches=microbatches,
            example_weights=read_weights(example_weights) if example_weights else None,
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
