"""The command `parity`: gradients proved equal. It imports JAX when called."""

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from jax_ddp_weighting._arguments import check_microbatches, check_rtol
from jax_ddp_weighting.cli.console import print_json, print_line, print_table, waiting
from jax_ddp_weighting.cli.devices import start_jax
from jax_ddp_weighting.cli.options import NUMBER, RIGHT, WRONG, X64, Json
from jax_ddp_weighting.cli.user_code import in_one_line, load


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
    x64: X64 = False,
    json: Json = False,
) -> int:
    """Gradients proved equal: every split of a batch, in every regime, against one device."""
    from jax_ddp_weighting.cli.proof import check_case, prove, tiny_case

    if microbatches is not None:
        check_microbatches("parity: microbatches", microbatches)
    if rtol is not None:
        check_rtol("parity: rtol", rtol)
    splits = [_read_split(text) for text in split or []]
    # before the case is made: the arrays that it holds start JAX
    start_jax(max([len(each) for each in splits], default=4), x64)
    if target is None:
        case = tiny_case()
    else:
        function = load("parity", target)
        with in_one_line(f"parity: calling {target}"):
            case = check_case(function())  # what it returned may be code of the user's as well
    with waiting("comparing gradients"), in_one_line("parity: the gradient"):
        proof = prove(
            case, splits or None, engines=engine or None, microbatches=microbatches, rtol=rtol
        )
    if json:
        print_json(proof.as_dict())
    else:
        _print_proof(proof)
    return WRONG if proof.failure else RIGHT


def _read_split(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(rows) for rows in text.split(","))
    except ValueError:
        raise ValueError(
            f"parity: --split must be rows per rank, got {text!r}. For instance: --split 3,1"
        ) from None


def _print_proof(proof: Any) -> None:
    """The worst leaf of each split in each regime, and of the control."""
    found, control = proof.report.differences, proof.control
    engines = list(dict.fromkeys(each.engine for each in found))

    def worst(differences: Sequence[Any], split: Any, engine: str | None = None) -> float:
        return max(
            d.difference for d in differences if d.split == split and engine in (None, d.engine)
        )

    rows = [
        [
            " + ".join(map(str, split)),
            *(worst(found, split, engine) for engine in engines),
            *([] if control is None else [worst(control.differences, split)]),
        ]
        for split in dict.fromkeys(each.split for each in found)
    ]
    columns = ["rows per rank", *engines, *["mean of local means"] * (control is not None)]
    print_table("Largest difference from one device, relative to the leaf", columns, rows)
    allowed = max(each.rtol for each in found)
    one = f"One gradient in all {len(found)} comparisons, to {allowed:g} or less."
    print_line(proof.failure or one)
    if control is None:
        print_line(f"Nothing shows that this proof could fail: {proof.no_control}")
    elif control.worst.equal:
        print_line("The mean of local means is right here too: this batch cannot tell them apart.")
