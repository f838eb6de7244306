"""A real Trainer of transformers over two processes of DDP, its step named by what it counted."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "in_the_wild.py"


@pytest.mark.parametrize(
    ("name", "convention", "counts"),
    [
        ("tokens averaged across devices", "global_mean", ("1.000", "1.000")),
        ("each device its own tokens", "rank_token_mean", ("0.722", "1.625")),
    ],
)
def test_both_settings_of_the_trainers_tokens_are_named(name, convention, counts):
    # in processes of their own: the Trainer makes a group of them
    command = [sys.executable, str(EXAMPLE), "HF Trainer,", name]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stderr
    lines = ran.stdout.splitlines()
    assert lines[0].startswith(f"{convention}, factor 1: ")
    for rank, count in enumerate(counts):  # both of a rank's microbatches
        (row,) = [line for line in lines if line.startswith(f"rank {rank} ")]
        assert row.split("(")[0].split()[2] == count
        assert row.count(f" {count} (weight") == 2
