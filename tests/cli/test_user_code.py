"""Code of the user's own: it may print, fail, end the program; a command says so in one line."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
from command_line import refusal, run
from programs import run_program


@pytest.mark.parametrize(
    "arguments",
    [
        "parity noisy:loud --engine vmap --split 3,2",
        "parity users:loud --engine jit --split 3,2",
        "diagnose users:loud_and_right",
    ],
)
def test_json_is_one_document_where_users_code_prints(users, arguments, capsys):
    assert run(*arguments.split(), "--json") == 0
    said = capsys.readouterr()
    assert json.loads(said.out)
    assert "loud" in said.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("parity users", r"target must be module:function, got 'users'"),
        ("parity users:nothing", r"must hold a function 'nothing', got none. It holds loss, case"),
        ("parity users:USERS", r"must hold a function"),
        ("parity nowhere:case", r"module 'nowhere' was not found"),
        ("parity users.deeper:case", r"module 'users.deeper' was not found"),
        ("parity users.py:case", r"'users.py' was not found.* statement would: users:case$"),
        ("parity src/users.py:case", r"was not found.* statement would: src.users:case$"),
        ("parity torn:f", r"importing torn raised SyntaxError: .*torn.py, line 1\)"),
        ("parity needy:f", r"raised ModuleNotFoundError: .*'not_installed_at_all' \(.*line 1\)"),
        (
            "parity quitter:f",
            r"importing quitter ended the program \(.*quitter.py, line 2\). Guard",
        ),
        ("diagnose quitter:f", r"importing quitter ended the program .* if __name__ == '__main__'"),
        ("parity users:quits", r"calling users:quits ended the program \(.*users.py, line \d+\)"),
        ("parity users:quits_later", r"the gradient ended the program \(.*users.py, line \d+\)"),
        ("diagnose users:quits", r"users:quits ended the program \(.*users.py, line \d+\)"),
        ("parity users:odd", r"calling users:odd raised Odd: odd \(.*users.py, line \d+\)"),
        ("parity users:odd_later", r"the gradient raised Odd: odd \(.*users.py, line \d+\)"),
        ("diagnose users:odd", r"users:odd raised Odd: odd \(.*users.py, line \d+\)"),
        ("parity users:interrupts", r"raised KeyboardInterrupt \(.*users.py, line \d+\)"),
        ("parity users:ends_generators", r"raised GeneratorExit \(.*users.py, line \d+\)"),
        ("parity users:unprintable", r"raised Unprintable: an error that cannot be printed \("),
        ("diagnose users:unprintable", r"raised Unprintable: an error that cannot be printed \("),
        ("parity users:closes", r"calling users:closes closed a standard stream\. Answers"),
        ("parity users:computed", r"looking for computed in users raised RuntimeError: computed"),
        ("parity users:no_rows", r"must have a row of weight above 0, got 0 rows"),
        ("parity users:no_weight", r"must have a row of weight above 0, got 5 rows without weight"),
        ("parity users:number", r"must return loss_fn, params and batch, .* got int"),
        ("parity users:no_batch", r"batch of the target must be a Batch, got ndarray"),
        ("parity users:broken", r"calling users:broken raised KeyError: 'not there' \(.*line \d+"),
        ("parity users:fails_later", r"raised ZeroDivisionError: .*users.py, line \d+\)"),
        ("parity users:a_mean", r"loss_fn must return a WeightedSum"),
        ("parity users:case --split 3", r"splits must deal out all 5 rows, got \(3,\)"),
        ("parity users:case --split 3;2", r"--split must be rows per rank, got '3;2'"),
        ("parity users:case --engine pmop", r"engines must be a list of some of jit"),
        ("parity --split 1,1,1,1,1,1,1,1,1", r"9"),
        ("parity --rtol -1", r"rtol must be in \[0, 1\), got -1"),
        ("parity --rtol nan", r"rtol must be in \[0, 1\), got nan"),
        ("parity -k 0", r"parity: microbatches must be an integer in \[1, 2\*\*31\], got 0"),
        ("parity -k 1e30", r"parity: microbatches must be an integer in \[1, 2\*\*31\], got 1"),
        (
            "parity -k 1e7",
            r"parity: microbatches must be an integer in \[1, 6\], got 10000000\.",
        ),
        ("parity users:case -k 6", r"microbatches must be an integer in \[1, 5\], got 6"),
        ("parity users:many_microbatches", r"microbatches must be an integer in \[1, 5\], got 60"),
        ("diagnose users:right -k 1e7", r"ranks times microbatches must be at most 512, got 20,"),
        (
            "diagnose users:right -w 20000",
            r"ranks times microbatches must be at most 512, got 20,",
        ),
        ("diagnose", r"either MODULE:FUNCTION or --gradients must be given, got neither"),
        ("diagnose users:right -w 0", r"num_replicas must be"),
        ("diagnose users:right -k 0", r"microbatches must be"),
        ("diagnose users:broken", r"users:broken raised TypeError: .*positional arguments"),
        ("diagnose users:wrong_shape", r"gradient_of must return the gradient of params"),
    ],
)
def test_a_target_that_cannot_be_used_gets_one_line(users, arguments, said, capsys):
    assert re.search(said, refusal(capsys, *arguments.split()))


def run_apart(arguments, folder):
    """A command line as a shell runs it: in a process of its own, which code may end."""
    code = f"""import sys
from jax_ddp_weighting.__main__ import main
sys.argv = ["jax-ddp-weighting", *{arguments.split()}]
sys.exit(main())"""
    return run_program(code, folder)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("parity users:leaves", r"parity: the process ended with status 0 before there was an "),
        (
            "parity users:leaves_as_if_wrong",
            r"ended with status 1 before there was an answer\.",
        ),
        ("parity users:leaves_later", r"ended with status 0 before"),
        ("parity users:leaves_in_a_thread", r"ended with status 0 before"),
        ("parity leaver:f", r"ended with status 0 before"),
        ("diagnose users:leaves", r"diagnose: the process ended with status 0 before"),
        ("parity users:crashes", r"ended by SIGSEGV before"),
        ("parity users:terminates", r"ended by SIGTERM before"),
        ("parity users:becomes_another", r"ended with status 0 before"),
        ("parity users:closes_the_first", r"closed a standard stream"),
        ("parity users:closes_errors", r"closed a standard stream"),
        ("parity users:closes_number", r"closed a standard stream"),
        ("parity users:detaches", r"closed a standard stream"),
    ],
)
def test_code_that_ends_the_process_gets_one_line(users, arguments, said, tmp_path):
    status, out, err = run_apart(arguments, tmp_path)
    assert (status, out, err.count("\n")) == (2, "", 1), err
    assert re.search(said, err)


@pytest.mark.parametrize("function", ["writes", "forks", "forks_and_fails"])
def test_json_is_one_document_however_users_code_writes(users, function, tmp_path):
    arguments = f"parity users:{function} --json --engine vmap --split 3,2"
    status, out, err = run_apart(arguments, tmp_path)
    assert status == 0, err
    assert json.loads(out)["equal"]
    assert ("past the redirection" in err) == (function == "writes")


def test_json_is_one_document_where_users_code_writes_at_the_end(users, tmp_path):
    # as a user starts it: a process that was forked leaves without its exit functions
    arguments = ["parity", "users:writes_at_exit", "--json", "--engine", "vmap", "--split", "3,2"]
    command = [sys.executable, "-m", "jax_ddp_weighting", *arguments]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (ran.returncode, json.loads(ran.stdout)["equal"]) == (0, True)
    for said in ("from a thread", "at exit", "at exit, to the number"):
        assert said in ran.stderr


def test_json_is_one_document_in_a_process_of_somebody_elses(users, capfd):
    assert run("parity", "users:writes", "--json", "--engine", "vmap", "--split", "3,2") == 0
    said = capfd.readouterr()
    assert json.loads(said.out)["equal"]
    assert "to the number" in said.err
    assert "from a child" in said.err


def test_a_command_ends_with_the_process_that_started_it(tmp_path):
    # killed as a time limit kills: nobody is left to pass anything on
    (tmp_path / "slow.py").write_text(SLOW)
    # a suite that runs in the background was itself started with SIGINT ignored
    start = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    start += "from jax_ddp_weighting.__main__ import main; sys.exit(main())"
    command = [sys.executable, "-c", start, "parity", "slow:case"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE) as process:
        while not (tmp_path / "begun").exists():
            assert process.poll() is None
            time.sleep(0.05)
        process.kill()
        assert process.stdout.read() == b""  # returns when nobody holds it any more


SLOW = """
import pathlib, time

def case():
    pathlib.Path("begun").touch()
    time.sleep(60)
"""


# A shell's background jobs, and so whatever they start, ignore SIGINT: it is not inherited here.
NOT_IGNORED = """
import os, signal, sys
signal.signal(int(sys.argv[1]), signal.SIG_DFL)
os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_from_outside_ends_a_command(number, tmp_path):
    (tmp_path / "slow.py").write_text(SLOW)
    command = [sys.executable, "-c", NOT_IGNORED, str(int(number))]
    command += ["-m", "jax_ddp_weighting", "parity", "slow:case"]
    with subprocess.Popen(
        command, cwd=tmp_path, stderr=subprocess.PIPE, start_new_session=True
    ) as process:
        while not (tmp_path / "begun").exists():
            assert process.poll() is None
            time.sleep(0.05)
        os.killpg(process.pid, number)
        said = process.stderr.read()
    assert process.returncode == -number
    assert (b"raised KeyboardInterrupt" in said) == (number == signal.SIGINT)
