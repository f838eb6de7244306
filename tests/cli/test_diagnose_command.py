"""`diagnose`: the convention of a user's own reduction."""

import json

from command_line import printed, run


def test_diagnose_finds_nothing_wrong_with_the_global_mean(users, capsys):
    assert run("diagnose", "users:right") == 0
    assert printed(capsys).startswith("global_mean, factor 1")


def test_diagnose_names_a_users_convention(users, capsys):
    assert run("diagnose", "users:rank_means", "-k", "3", "--json") == 1
    assert json.loads(capsys.readouterr().out)["convention"] == "rank_token_mean"
