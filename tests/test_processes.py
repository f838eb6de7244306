"""The launcher of several processes: they really meet, and cannot hang the suite."""

import processes
from programs import run_program

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
