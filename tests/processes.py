"""Several real JAX processes on this machine, over gloo, each killed hard at its limit.

A program is Python source. It runs in every process after `jax.distributed` has been initialized,
with `jax`, `rank` and `processes` defined, and prints its findings.
"""

import os
import signal
import socket
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from forked import FORKED

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Finished:
    """How one process ended; `code` is negative where it was killed, as in `subprocess`."""

    code: int
    out: str
    err: str


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def launch(
    program: str,
    processes: int,
    *,
    devices: int = 1,
    timeout_s: float = 120.0,
    heartbeat_s: int = 10,
) -> list[Finished]:
    """Runs the program in every process and returns how each ended, in rank order.

    JAX ends the survivors of a process that was killed about `heartbeat_s` later.
    """
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "program.py").write_text(program)
        for rank in range(processes):  # also where one is killed before it begins
            Path(folder, f"{rank}.out").touch()
            Path(folder, f"{rank}.err").touch()
        path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
        environment = os.environ | {"PYTHONPATH": path}  # for what a program starts
        arguments = (environment, folder, processes, port, devices, heartbeat_s)
        running = [
            FORKED.Process(target=_run, args=(rank, *arguments)) for rank in range(processes)
        ]
        for process in running:
            process.start()
        deadline = time.monotonic() + timeout_s
        try:
            for process in running:
                process.join(max(0.0, deadline - time.monotonic()))
        finally:  # the code of those that are killed here is negative
            for process in running:
                if process.exitcode is None:
                    _kill(process.pid)
                process.join()
        return [
            Finished(
                process.exitcode,
                Path(folder, f"{rank}.out").read_text(),
                Path(folder, f"{rank}.err").read_text(),
            )
            for rank, process in enumerate(running)
        ]


def _kill(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)  # and what it has started
    except ProcessLookupError:  # not the leader of its group yet, or gone
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _run(
    rank: int,
    environment: dict[str, str],
    folder: str,
    processes: int,
    port: int,
    devices: int,
    heartbeat_s: int,
) -> NoReturn:
    """One process.

    It leaves by `os._exit`: the CPU client of jax 0.10 and 0.12 hangs one exit in forty as the
    interpreter goes down, joining a thread whose wake-up got lost.
    """
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    # gloo greets on descriptor 1, from several threads at once, so the program prints to another
    os.dup2(os.open(Path(folder, f"{rank}.err"), os.O_WRONLY), 2)
    os.dup2(2, 1)
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)
    sys.stdout = open(Path(folder, f"{rank}.out"), "w", buffering=1)  # noqa: SIM115 - to the end
    # what a shell runs in the background was itself started with SIGINT ignored
    signal.signal(signal.SIGINT, signal.default_int_handler)

    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_preemption_service", False)  # it would swallow SIGTERM
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_num_cpu_devices", devices)
    jax.distributed.initialize(
        f"127.0.0.1:{port}",
        processes,
        rank,
        initialization_timeout=60,
        shutdown_timeout_seconds=5,
        heartbeat_timeout_seconds=heartbeat_s,
    )
    code = 0
    try:
        path = Path(folder, "program.py")
        names = {"__name__": "__main__", "jax": jax, "rank": rank, "processes": processes}
        exec(compile(path.read_text(), path, "exec"), names)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    try:
        jax.distributed.shutdown()  # rank 0 holds the service, so it leaves after the others
    except RuntimeError:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(code)
