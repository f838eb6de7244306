"""`parity`: ours is proved, a user's own is found wrong, and the control must fail."""

import json
import re

import pytest
from command_line import printed, run

from jax_ddp_weighting.distributed.mesh import ENGINES


def test_parity_proves_ours_and_fails_its_control(capsys):
    assert run("parity", "--split", "4,1,1", "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert said["equal"]
    assert {each["engine"] for each in said["differences"]} == set(ENGINES)
    assert max(each["difference"] for each in said["differences"]) < 1e-6
    assert min(each["difference"] for each in said["control"] if each["leaf"] != "loss") > 0.01


@pytest.mark.parametrize("case", ["case", "case_of_terms", "case_of_statistics"])
def test_parity_takes_a_users_case(users, case, capsys):
    assert run("parity", f"users:{case}", "--split", "3,2", "--engine", "vmap", "-k", "2") == 0
    ours, control = re.search(r"3 \+ 2 +(\S+) +(\S+)", printed(capsys)).groups()
    assert float(ours) < 1e-6 < 0.001 < float(control)


def test_options_win_over_those_of_a_users_case(users, capsys):
    def compared(*options):
        assert run("parity", "users:own_options", *options, "--json") == 0
        said = json.loads(capsys.readouterr().out)["differences"]
        return {(each["engine"], tuple(each["split"]), each["rtol"]) for each in said}

    assert compared() == {("vmap", (3, 2), 1e-4)}
    options = ["--engine", "shard_map", "--split", "4,1", "-k", "1", "--rtol", "1e-5"]
    assert compared(*options) == {("shard_map", (4, 1), 1e-5)}


def test_parity_finds_a_users_own_gradient_wrong(users, capsys):
    assert run("parity", "users:naive", "--split", "3,2", "--engine", "vmap") == 1
    assert "2 of 2 gradient leaves differ" in printed(capsys)


def test_a_proof_without_a_control_says_so(users, capsys):
    assert run("parity", "users:without_control") == 0
    said = printed(capsys)
    assert "mean of local means" not in said
    assert (
        "Nothing shows that this proof could fail: parity: loss_fn must return a Weighted" in said
    )
