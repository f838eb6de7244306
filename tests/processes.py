"""Several real JAX processes on this machine, over gloo, each killed hard at its limit.

A program is Python source. It runs in every process after `jax.distributed` has been initialized,
with `jax`, `rank` and `processes` defined, and prints its findings.
"""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent

# gloo greets on descriptor 1, from several threads at once, so the program prints to another.
# The process leaves by os._exit: the CPU client of jax 0.10 and 0.12 hangs one exit in forty as the
# interpreter goes down, joining a thread whose wake-up got lost.
_PRELUDE = """\
import os, signal, sys, traceback
# what a shell runs in the background was itself started with SIGINT ignored
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.stdout = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
import jax
program, rank, processes, port, devices, heartbeat = sys.argv[1], *map(int, sys.argv[2:])
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.config.update("jax_num_cpu_devices", devices)
jax.distributed.initialize(
    f"127.0.0.1:{port}", processes, rank,
    initialization_timeout=60, shutdown_timeout_seconds=5, heartbeat_timeout_seconds=heartbeat,
)
code = 0
try:
    with open(program) as source:
        exec(
            compile(source.read(), program, "exec"),
            {"__name__": "__main__", "jax": jax, "rank": rank, "processes": processes},
        )
except BaseException:
    traceback.print_exc()
    code = 1
sys.stdout.flush()
sys.stderr.flush()
try:
    jax.distributed.shutdown()  # rank 0 holds the service, so it leaves after the others
except RuntimeError:
    traceback.print_exc()
sys.stderr.flush()
os._exit(code)
"""


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
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
        "PYTHONUNBUFFERED": "1",  # what was said before an abort is not lost
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_PREEMPTION_SERVICE": "0",  # it would swallow SIGTERM
    }
    with tempfile.TemporaryDirectory() as folder:
        prelude, path = Path(folder, "prelude.py"), Path(folder, "program.py")
        prelude.write_text(_PRELUDE)
        path.write_text(program)
        running = []
        for rank in range(processes):
            arguments = [path, rank, processes, port, devices, heartbeat_s]
            with (
                Path(folder, f"{rank}.out").open("w") as out,
                Path(folder, f"{rank}.err").open("w") as err,
            ):
                running.append(
                    subprocess.Popen(
                        [sys.executable, str(prelude), *map(str, arguments)],
                        stdout=out,
                        stderr=err,
                        env=environment,
                        start_new_session=True,
                    )
                )
        deadline = time.monotonic() + timeout_s
        try:
            for process in running:
                process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            pass  # the hard kill below says so: its exit code is negative
        finally:
            for process in running:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        return [
            Finished(
                process.returncode,
                Path(folder, f"{rank}.out").read_text(),
                Path(folder, f"{rank}.err").read_text(),
            )
            for rank, process in enumerate(running)
        ]
