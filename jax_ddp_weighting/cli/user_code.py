"""Code of the user's own that a command runs: `module:function`, and what to say if it fails."""

import re
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from importlib import import_module
from pathlib import Path
from typing import Any

from jax_ddp_weighting._arguments import list_some

_PACKAGE = Path(__file__).parent.parent
_OURS = re.compile(r"[\w. ]+: ")  # how every error of this library begins
_LONGEST = 300  # characters of a foreign error that are repeated


def load(command: str, target: str) -> Callable[..., Any]:
    """The function that `module:function` names; modules of the current folder are found too.

    Args:
        command: who asks, as errors name it.
        target: the module's dotted name, a colon, and the function's name.

    Returns:
        The function.

    Raises:
        ValueError: there is no such module or function, or the module fails on import.

    Example:
        >>> load("parity", "math:sqrt")(4)
        2.0
    """
    module_name, _, function_name = target.partition(":")
    if not (module_name and function_name):
        raise ValueError(
            f"{command}: target must be module:function, got {target!r}."
            " For instance: mypackage.train:case"
        )
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        with in_one_line(f"{command}: importing {module_name}"):
            module = import_module(module_name)
    except ValueError as error:
        cause = error.__cause__
        if isinstance(cause, ModuleNotFoundError) and f"{module_name}.".startswith(
            f"{cause.name}."
        ):
            raise ValueError(
                f"{command}: module {cause.name!r} was not found, neither installed nor in"
                f" {Path.cwd()}. Name it as an import statement would, or go to its folder."
            ) from None
        raise
    function = getattr(module, function_name, None)
    if not callable(function):
        names = [name for name, value in vars(module).items() if _is_own(module_name, name, value)]
        raise ValueError(
            f"{command}: {module_name} must hold a function {function_name!r}, got"
            f" {'none' if function is None else type(function).__name__}."
            f" It holds {list_some(names) or 'no functions'}."
        )
    return function


def _is_own(module_name: str, name: str, value: Any) -> bool:
    own = getattr(value, "__module__", None) == module_name
    return own and callable(value) and not name.startswith("_")


@contextmanager
def in_one_line(what: str) -> Iterator[None]:
    """Turns whatever foreign code raises inside into one line that says what, and where.

    Errors of this library pass through: they say what is wrong by themselves. What foreign code
    prints goes to standard error: standard output is the command's, and with --json one document.

    Args:
        what: what is being done: ``"parity: calling case"``.

    Raises:
        ValueError: foreign code raised something, or ended the program; that is its cause.
    """
    try:
        with redirect_stdout(sys.stderr):
            yield
    except SystemExit as error:
        place = _find_line(traceback.extract_tb(error.__traceback__), error)
        raise ValueError(
            f"{what} ended the program{place}. Guard it by if __name__ == '__main__'."
        ) from error
    except Exception as error:  # foreign code may raise anything
        frames = traceback.extract_tb(error.__traceback__)
        raised_by = Path(frames[-1].filename)
        words = " ".join(str(error).split())
        if _PACKAGE in raised_by.parents and _OURS.match(words):
            raise
        words = f"{words[:_LONGEST]}..." if len(words) > _LONGEST else words
        raise ValueError(
            f"{what} raised {type(error).__name__}{': ' if words else ''}{words}"
            f"{_find_line(frames, error)}. Run it by itself to see more."
        ) from error


def _find_line(frames: traceback.StackSummary, error: BaseException) -> str:
    """The last line of the user's own, which is neither installed nor of this library."""
    if isinstance(error, SyntaxError):
        return f" ({error.filename}, line {error.lineno})"
    own = [
        frame
        for frame in frames
        if Path(frame.filename).is_file()
        and _PACKAGE not in Path(frame.filename).parents
        and not {"site-packages", "dist-packages"} & set(Path(frame.filename).parts)
        and not frame.filename.startswith(sys.base_prefix)
    ]
    return f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""
