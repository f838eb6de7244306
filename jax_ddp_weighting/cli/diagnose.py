"""The command `diagnose`: a reduction of the user's own, by name. It imports JAX when called."""

from typing import Annotated

import typer

from jax_ddp_weighting._arguments import check_microbatches, check_num_replicas
from jax_ddp_weighting.cli.console import print_json, print_line, waiting
from jax_ddp_weighting.cli.devices import start_jax
from jax_ddp_weighting.cli.options import NUMBER, RIGHT, WRONG, X64, Json
from jax_ddp_weighting.cli.user_code import in_one_line, load

_PARTS = 512  # each rank is a device of its own, and each probe holds tokens for every part


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
    x64: X64 = False,
    json: Json = False,
) -> int:
    """How your own reduction counts each token: its convention, by name, and what mends it."""
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
        found = probing.diagnose(gradient_of, num_replicas=num_replicas, microbatches=microbatches)
    if json:
        print_json(found.as_dict())
    else:
        print_line(str(found))
    return RIGHT if found.right else WRONG
