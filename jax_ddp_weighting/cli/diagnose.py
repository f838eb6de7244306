"""The command `diagnose`: a reduction of the user's own, by name. It imports JAX when called."""

from pathlib import Path
from typing import Annotated, Any

import typer

from jax_ddp_weighting._arguments import check_microbatches, check_num_replicas, check_rtol
from jax_ddp_weighting.cli.console import print_json, print_line, waiting
from jax_ddp_weighting.cli.devices import start_jax
from jax_ddp_weighting.cli.options import NUMBER, RIGHT, WRONG, X64, Json, find_given
from jax_ddp_weighting.cli.user_code import in_one_line, load

_PARTS = 512  # each rank is a device of its own, and each probe holds tokens for every part


def diagnose(
    context: typer.Context,
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODULE:FUNCTION]",
            help="gradient_of(token_loss, params, tokens, weights): reduces as your code does, over"
            " tokens and weights of shape \\[ranks, microbatches, tokens].",  # no markup of rich's
        ),
    ] = None,
    num_replicas: Annotated[
        int,
        typer.Option(
            "--num-replicas", "--ranks", "-w", help="Ranks of the probe, or of the step.", **NUMBER
        ),
    ] = 2,
    microbatches: Annotated[
        int,
        typer.Option(
            "--microbatches", "-k", help="Microbatches of the probe, or of the step.", **NUMBER
        ),
    ] = 1,
    gradients: Annotated[
        Path | None,
        typer.Option(
            help="In place of a function: the gradient of one step by name, .npz or .safetensors;"
            " or a step that record wrote, which needs no more."
        ),
    ] = None,
    per_example: Annotated[
        Path | None,
        typer.Option(help="Each example's own gradient: the same names, \\[examples, ...]."),
    ] = None,
    weights: Annotated[
        Path | None,
        typer.Option(
            help="The examples' weights, .npy: in equal runs for ranks and their microbatches, or"
            " \\[ranks, microbatches, examples]."
        ),
    ] = None,
    rtol: Annotated[
        float | None,
        typer.Option(
            help="How exactly counts must fit, of the largest: 1e-5 for a function, 1e-3 for files."
        ),
    ] = None,
    x64: X64 = False,
    json: Json = False,
) -> int:
    """How your own reduction counts each token: its convention, by name, and what mends it."""
    if rtol is not None:
        check_rtol("diagnose: --rtol", rtol)
    allowed: dict[str, Any] = {} if rtol is None else {"rtol": rtol}
    if gradients is not None or per_example is not None or weights is not None:
        found = _diagnose_files(context, gradients, per_example, weights, **allowed)
        return _answer(found, json)
    if target is None:
        raise ValueError(
            "diagnose: either MODULE:FUNCTION or --gradients must be given, got neither. For"
            " instance: diagnose mypackage.train:gradient_of, or diagnose --gradients step.npz"
        )
    from jax_ddp_weighting.testing import probing

    check_microbatches("diagnose: microbatches", microbatches)
    check_num_replicas("diagnose: num_replicas", num_replicas)
    if num_replicas * microbatches > _PARTS:
        raise ValueError(
            f"diagnose: ranks times microbatches must be at most {_PARTS:,}, got"
            f" {num_replicas * microbatches:,}. Two or three of each tell all conventions apart."
        )
    start_jax(num_replicas, x64)
    gradient_of = load("diagnose", target)
    with waiting("looking at gradients"), in_one_line(f"diagnose: {target}"):
        found = probing.diagnose(
            gradient_of, num_replicas=num_replicas, microbatches=microbatches, **allowed
        )
    return _answer(found, json)


def _diagnose_files(
    context: typer.Context,
    gradients: Path | None,
    per_example: Path | None,
    weights: Path | None,
    **allowed: float,
) -> Any:
    """The diagnosis of one step in files: three of one's own, or a recording."""
    from jax_ddp_weighting.testing.named_arrays import read_array, read_named
    from jax_ddp_weighting.testing.recorded import (
        diagnose_recorded,
        is_recording,
        lay_out_step,
        read_recording,
    )

    if gradients is None or context.params["target"] is not None:
        got = "a function too" if gradients else "no gradient"
        raise ValueError(
            "diagnose: --gradients must name the step's gradient, in place of a function, got"
            f" {got}. For instance: diagnose --gradients g.npz --per-example own.npz --weights"
            " w.npy --ranks 2"
        )
    arrays = read_named(gradients, caller="diagnose")
    if is_recording(arrays):
        of_the_file = ("per_example", "weights", "num_replicas", "microbatches")
        given = find_given(context, of_the_file)
        if given:
            raise ValueError(
                f"diagnose: {gradients} must be given alone, got {', '.join(given)} beside a"
                " recorded step, which holds them. Leave them out."
            )
        return diagnose_recorded(read_recording(arrays), **allowed)
    if per_example is None or weights is None:
        missing = "--per-example" if per_example is None else "--weights"
        raise ValueError(
            f"diagnose: --gradients must come with --per-example and --weights, got no {missing}."
            " Or write all of it in torch by record(path, model, loss_of_example)."
        )
    own = read_named(per_example, caller="diagnose")
    numbers = read_array(weights, caller="diagnose")
    ranks, microbatches = context.params["num_replicas"], context.params["microbatches"]
    return diagnose_recorded(lay_out_step(arrays, own, numbers, ranks, microbatches), **allowed)


def _answer(found: Any, json: bool) -> int:
    if json:
        print_json(found.as_dict())
    else:
        print_line(str(found))
    return RIGHT if found.right else WRONG
