"""The command line: it parses and prints only. `plan` and `audit` never import JAX."""

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from jax_ddp_weighting._version import __version__
from jax_ddp_weighting.cli.audit import audit
from jax_ddp_weighting.cli.compare import compare
from jax_ddp_weighting.cli.diagnose import diagnose
from jax_ddp_weighting.cli.options import BAD_INPUT, NAME, RIGHT
from jax_ddp_weighting.cli.parity import parity
from jax_ddp_weighting.cli.plan import plan
from jax_ddp_weighting.cli.report.command import report

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Data-parallel training in which every example counts as its weight, once."
    " Exit status: 0 right, 1 found wrong, 2 bad input.",
)
for command in (plan, audit, parity, compare, diagnose, report):
    app.command()(command)


def _print_version(asked: bool) -> None:
    if asked:
        print(f"{NAME} {__version__}")
        raise typer.Exit


@app.callback()
def program(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Its options are those of no command; what it does, a callback does."""


def run(arguments: Sequence[str]) -> int:
    """Runs one command line; whatever is wrong with it is one line on standard error.

    Args:
        arguments: what stands after the program's name.

    Returns:
        0 where all is right, 1 where something was found wrong, 2 where the input is bad.
    """
    try:
        # not standalone: typer would print errors its own way, and end the process
        status = app(list(arguments), prog_name=NAME, standalone_mode=False, obj=list(arguments))
    except typer.TyperException as error:
        context = getattr(error, "ctx", None)
        command = context.command_path if context else NAME
        return _refuse(f"{command}: {error.format_message()} See {command} --help.")
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return _refuse(f"{where}{error.strerror or error}. Name a file that can be used.")
    except (ValueError, TypeError, OverflowError) as error:
        return _refuse(str(error))
    except MemoryError as error:
        return _refuse(
            f"{error}. Take fewer examples, a smaller batch or fewer ranks; order=keyed makes no"
            " lists."
        )
    return status if isinstance(status, int) else RIGHT


def _refuse(message: str) -> int:
    print(" ".join(message.split()), file=sys.stderr)
    return BAD_INPUT
