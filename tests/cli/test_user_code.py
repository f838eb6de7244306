"""Code of the user's own: it may print, fail, end the program; a command says so in one line."""

import json
import re

import pytest
from command_line import refusal, run


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
        ("diagnose", r"Missing argument"),
        ("diagnose users:right -w 0", r"num_replicas must be"),
        ("diagnose users:right -k 0", r"microbatches must be"),
        ("diagnose users:broken", r"users:broken raised TypeError: .*positional arguments"),
        ("diagnose users:wrong_shape", r"gradient_of must return the gradient of params"),
    ],
)
def test_a_target_that_cannot_be_used_gets_one_line(users, arguments, said, capsys):
    assert re.search(said, refusal(capsys, *arguments.split()))
