"""Several real JAX processes on this machine, over gloo, each killed hard at its limit.

A program is Python source. It runs in every process after `jax.distributed` has been initialized,
with `rank` and `processes` defined, and prints its findings.
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

_PRELUDE = """\
import sys
import jax
rank, processes, port, devices = map(int, sys.argv[1:5])
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.config.update("jax_num_cpu_devices", devices)
jax.distributed.initialize(
    f"127.0.0.1:{port}", processes, rank,
    initialization_timeout=60, shutdown_timeout_seconds=5, heartbeat_timeout_seconds=10,
)
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
    program: str, processes: int, *, devices: int = 1, timeout_s: float = 120.0
) -> list[Finished]:
    """Runs the program in every process and returns how each ended, in rank order."""
    port = free_port()
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_PREEMPTION_SERVICE": "0",  # it would swallow SIGTERM
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "program.py")
        path.write_text(_PRELUDE + program)
        running = []
        for rank in range(processes):
            arguments = map(str, (rank, processes, port, devices))
            with (
                Path(folder, f"{rank}.out").open("w") as out,
                Path(folder, f"{rank}.err").open("w") as err,
            ):
                running.append(
                    subprocess.Popen(
                        [sys.executable, str(path), *arguments],
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
                _spoken(Path(folder, f"{rank}.out").read_text()),
                Path(folder, f"{rank}.err").read_text(),
            )
            for rank, process in enumerate(running)
        ]


def _spoken(out: str) -> str:
    """What the program printed, without gloo's own greetings."""
    return "".join(line for line in out.splitlines(True) if not line.startswith("[Gloo]"))
