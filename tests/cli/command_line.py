"""A command line run inside the test, and what it printed."""

import re

from jax_ddp_weighting.cli import app as cli

COMMANDS = [command.name or command.callback.__name__ for command in cli.app.registered_commands]
PLAN = ["-n", "47", "-w", "3", "-b", "8"]


def run(*arguments: str) -> int:
    return cli.run([str(each) for each in arguments])


def printed(capsys) -> str:
    """What a command printed, without the blanks that pad a table's lines."""
    out = capsys.readouterr().out
    return "\n".join(line.rstrip() for line in re.sub(r"\x1b\[[\d;]*m", "", out).splitlines())


def refusal(capsys, *arguments: str) -> str:
    """The one line that bad input gets."""
    assert run(*arguments) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    return said.err
