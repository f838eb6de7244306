"""A command in a process of its own: what ends that process is told from the command's answer."""

import os
import signal
import sys
import time
from collections.abc import Callable
from threading import Thread
from types import FrameType

from jax_ddp_weighting.cli.console import answers_on
from jax_ddp_weighting.cli.options import BAD_INPUT


def run_apart(name: str, command: Callable[[], int]) -> int:
    """What a command answers, or 2 where its process ended before it had an answer.

    Code of the user's own may call `os._exit(0)`, crash, or put another program in the process's
    place, and the status that it leaves would pass for a verdict. The rule: an answer is what the
    command said through a pipe of ours, and nothing else.

    Standard output is the answer's alone, and only `console` writes to it. For everybody else in
    that process both `sys.stdout` and descriptor 1 are standard error, to the end of the process:
    threads, children and what runs at exit write when they like.

    Args:
        name: how the command is called, for the error.
        command: runs it, and returns its exit status; JAX must not have started.

    Returns:
        The exit status.
    """
    if not hasattr(os, "fork"):
        return command()
    told, tell = os.pipe()
    parent_lives, hold = os.pipe()
    child = os.fork()
    if not child:
        os.close(told)
        os.close(hold)
        Thread(target=_end_with_parent, args=(parent_lives,), daemon=True).start()
        _interrupt_once()
        return _answer(command, tell)
    os.close(tell)
    os.close(parent_lives)
    passed_on: list[int] = []

    def pass_on(number: int, _: object) -> None:
        passed_on.append(number)
        os.kill(child, number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, pass_on)
    ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os.set_blocking(told, False)  # children of the child may hold the pipe's other end for long
    try:
        answer = os.read(told, 1)
    except BlockingIOError:
        answer = b""
    if answer and not passed_on:
        return answer[0]
    if passed_on or -ended == signal.SIGPIPE:  # end as the child did: its reader has gone, too
        by = passed_on[0] if passed_on else signal.SIGPIPE
        signal.signal(by, signal.SIG_DFL)
        os.kill(os.getpid(), by)
    how = f"with status {ended}" if ended >= 0 else f"by {signal.Signals(-ended).name}"
    print(
        f"{name}: the process ended {how} before there was an answer. Code of your own must return"
        " or raise: look in it for os._exit, and for what may crash.",
        file=sys.stderr,
    )
    return BAD_INPUT


def _answer(command: Callable[[], int], tell: int) -> int:
    out = sys.stdout
    with os.fdopen(os.dup(1), "w", encoding=out.encoding, errors=out.errors) as answers:
        os.dup2(2, 1)
        with answers_on(answers):
            status = command()
    sys.stdout = sys.stderr  # its own may be closed by now
    os.write(tell, bytes([status]))
    return status


def _interrupt_once() -> None:
    """A signal to the whole group, as ctrl-C is, comes here twice: by itself and passed on.

    The second would interrupt the words about the first.
    """
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return
    last = -float("inf")

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal last
        before, last = last, time.monotonic()
        if last - before > 1:
            signal.default_int_handler(number, frame)

    signal.signal(signal.SIGINT, interrupt)


def _end_with_parent(parent_lives: int) -> None:
    """Ends this process when nobody waits for it any more: a killed parent cannot say so."""
    os.read(parent_lives, 1)  # returns when the other end is closed
    os.kill(os.getpid(), signal.SIGKILL)
