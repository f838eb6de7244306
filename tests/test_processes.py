"""The launcher of several processes: they really meet, and cannot hang the suite."""

import processes
import pytest
from programs import run_example, run_program

MEET = """
import numpy as np
from jax.experimental import multihost_utils
everyone = multihost_utils.process_allgather(np.int32(rank + 1))
print(len(jax.devices()), int(everyone.sum()))
"""


def test_processes_meet():
    ended = processes.launch(MEET, 2, devices=2)
    assert [(each.code, each.out) for each in ended] == [(0, "4 3\n")] * 2, ended


def test_signals_and_devices_are_as_told_whoever_started_the_server(tmp_path):
    assert run_program("", tmp_path) == (0, "", "")  # in the environment of the tests
    said = "print(jax.config.jax_enable_preemption_service, jax.config.jax_platforms)"
    assert processes.launch(said, 1)[0].out == "False cpu\n"


def test_a_process_that_hangs_is_killed():
    ended = processes.launch("import time; time.sleep(600)", 2, timeout_s=4)
    assert [each.code for each in ended] == [-9, -9]


def test_a_failed_program_shows_its_traceback_and_what_it_had_said():
    ended = processes.launch("print('before')\nraise KeyError(rank)", 1)[0]
    assert (ended.code, ended.out) == (1, "before\n")
    assert "KeyError: 0" in ended.err


def test_an_example_that_warns_or_fails_is_seen_to(tmp_path):
    program = tmp_path / "program.py"
    for text in (
        "import warnings\nwarnings.warn('wears out')",
        "import sys\nsys.exit('wears out')",
    ):
        program.write_text(text)
        with pytest.raises(AssertionError, match="wears out"):
            run_example(program)
    program.write_text("import sys\nif __name__ == '__main__':\n    print(*sys.argv[1:])")
    assert run_example(program, "--rows", "2") == "--rows 2\n"
