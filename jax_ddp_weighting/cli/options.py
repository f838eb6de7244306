"""What the commands share: the program's name, exit statuses, and options."""

from collections.abc import Collection
from typing import Annotated

import typer

from jax_ddp_weighting.sampling.epoch_order import Order
from jax_ddp_weighting.sampling.plan import EpochPlan
from jax_ddp_weighting.sampling.plan_options import Tail

NAME = "jax-ddp-weighting"
RIGHT, WRONG, BAD_INPUT = 0, 1, 2
OF_A_PLAN = ("num_examples", "num_replicas", "batch_size", "tail", "order", "seed", "shuffle")
"""The parameters of a command that together are a plan: an `EpochPlan` calls them the same."""


def read_whole_number(given: str | int) -> int:
    """`1000`, `1_000` and `1e3`; defaults are numbers already."""
    text = str(given)
    try:
        number = float(text) if "e" in text.lower() else int(text)
        whole = int(number)
    except (ValueError, OverflowError):
        whole = number = None
    if whole is None or whole != number:
        raise typer.BadParameter(f"{text!r} is no whole number, such as 50000, 50_000 or 1e9.")
    return whole


# the commands check ranges themselves: typer's own range types would say less
NUMBER = {"parser": read_whole_number, "metavar": "INT"}
NumExamples = Annotated[
    int, typer.Option("--num-examples", "-n", help="Length of the dataset.", **NUMBER)
]
NumReplicas = Annotated[
    int, typer.Option("--num-replicas", "-w", help="Number of data-parallel ranks.", **NUMBER)
]
BatchSize = Annotated[
    int, typer.Option("--batch-size", "-b", help="Rows per rank and step.", **NUMBER)
]
TailOption = Annotated[
    Tail, typer.Option(help="Slots beyond the data: weight 0, weight 1 as torch, or cut.")
]
OrderOption = Annotated[
    Order, typer.Option(help="keyed: the cost of the rows asked for; torch: bit for bit torch's.")
]
Seed = Annotated[int, typer.Option(help="Chooses the orders.", **NUMBER)]
Shuffle = Annotated[bool, typer.Option("--shuffle/--no-shuffle", help="A new order each epoch.")]
X64 = Annotated[bool, typer.Option("--x64", help="Let JAX hold 64-bit numbers.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of tables.")]


def plan_of(context: typer.Context) -> EpochPlan:
    """The plan that a command's options describe.

    They are read from the context, where the command's own parameters only declare them: three
    commands take all seven, and none does anything else with them.
    """
    return EpochPlan(**{name: context.params[name] for name in OF_A_PLAN})


def find_given(context: typer.Context, parameters: Collection[str]) -> list[str]:
    """The options, of these parameters, that stand on the command line: defaults do not."""
    found = []
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if parameter.name in parameters and source is not None and source.name == "COMMANDLINE":
            found.append("/".join([parameter.opts[0], *parameter.secondary_opts]))
    return found
