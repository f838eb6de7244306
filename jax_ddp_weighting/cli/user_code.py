"""Code of the user's own that a command runs: `module:function`, and what to say if it fails."""

import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

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
            remedy = "Name it as an import statement would, or go to its folder."
            if module_name.endswith(".py"):  # the name of its file
                named = module_name.removesuffix(".py").replace("/", ".")
                remedy = f"Name it as an import statement would: {named}:{function_name}"
            raise ValueError(
                f"{command}: module {cause.name!r} was not found, neither installed nor in"
                f" {Path.cwd()}. {remedy}"
            ) from None
        raise
    with in_one_line(f"{command}: looking for {function_name} in {module_name}"):
        function = getattr(module, function_name, None)  # a module may compute its attributes
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
        ValueError: foreign code raised something, ended the program, or closed a standard stream.
    """
    process = os.getpid()
    try:
        with _lend_streams(what):
            try:
                yield
            except BaseException as error:  # foreign code may raise anything
                _raise_in_words(what, error)
    finally:
        if os.getpid() != process:  # it forked, and came back twice: one answer is enough
            os._exit(0)


@contextmanager
def _lend_streams(what: str) -> Iterator[None]:
    """Standard error in place of both streams, on every way to them, until the block ends."""
    out, err, lent = sys.stdout, sys.stderr, _Lent(sys.stderr)
    ours = list(filter(_is_open, (out, err, sys.__stdout__, sys.__stderr__, 1, 2)))
    out.flush()
    kept = {number: os.dup(number) for number in (1, 2)}
    os.dup2(2, 1)  # for who writes past Python's streams
    try:
        with redirect_stdout(lent), redirect_stderr(lent):
            yield
        closed = lent.was_closed or not all(map(_is_open, ours))
    finally:
        for stream in (out, sys.__stdout__):
            if stream is not None and _is_open(stream):
                stream.flush()  # past the lent one it was written to: to standard error with it
        for number, copy in kept.items():
            os.dup2(copy, number)
            os.close(copy)
        if not _is_open(err):
            sys.stderr = open(2, "w", errors="backslashreplace", closefd=False)  # noqa: SIM115
    if closed:
        raise ValueError(f"{what} closed a standard stream. Answers are printed there: leave it.")


class _Lent:
    """A stream that others may write to and close: it stays open, and it is known that they did."""

    was_closed = False

    def __init__(self, stream: Any):
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        return self._stream.write(text)

    def flush(self) -> None:
        self._stream.flush()

    def close(self) -> None:
        self.was_closed = True


def _is_open(stream: Any) -> bool:
    try:
        return bool(os.fstat(stream)) if isinstance(stream, int) else not stream.closed
    except (OSError, ValueError, AttributeError):  # closed, detached, None
        return False


def _raise_in_words(what: str, error: BaseException) -> NoReturn:
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, SystemExit):
        raise ValueError(
            f"{what} ended the program{_find_line(frames, error)}. Guard it by"
            " if __name__ == '__main__'."
        ) from error
    try:
        words = " ".join(str(error).split())
    except BaseException:  # its own __str__ may fail too, and in any way
        words = "an error that cannot be printed"
    if _PACKAGE in Path(frames[-1].filename).parents and _OURS.match(words):
        raise error
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
