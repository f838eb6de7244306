"""`plan`: who reads what, in tables and as JSON, at any scale."""

import json
import re

import pytest
from command_line import PLAN, printed, refusal, run

from jax_ddp_weighting import EpochPlan


def test_plan_says_what_each_tail_makes_of_an_epoch(capsys):
    assert run("plan", *PLAN) == 0
    out = printed(capsys)
    for row in (
        r"steps +2 +2 +1",
        r"accepted slots +47 +48 +24",
        r"slots of weight 0 +1 +0 +0",
        r"copies that count +0 +1 +0",
        r"ids left out +0 +0 +23",
        r"accepted in the last step +23 +24 +24",
    ):
        assert re.search(row, out), row


def test_plan_as_json_is_the_plan(capsys):
    assert run("plan", *PLAN, "--tail", "repeat", "--epoch", "3", "--seed", "5", "--json") == 0
    said = json.loads(capsys.readouterr().out)
    plan = EpochPlan(47, 3, 8, tail="repeat", seed=5)
    assert said["plan"]["tail"] == "repeat"
    assert [each["tail"] for each in said["tails"]] == ["mask", "repeat", "drop"]
    for rank in range(3):
        assert said["ranks"][rank]["first_ids"] == plan.slots(3, rank).ids[:4].tolist()
        assert said["ranks"][rank]["accepted"] == plan.accepted_by(rank)
    assert said["cost"]["bytes"] == 8 * (8 + 4)


def test_plan_answers_at_any_scale(capsys):
    assert run("plan", "-n", "1e12", "-w", "65_536", "-b", "1024", "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert said["plan"]["steps_per_epoch"] == -(-(10**12) // (65536 * 1024))
    assert [each["rank"] for each in said["ranks"]] == [0, 1, 2, 3, 4, 5, 6, 65535]


def test_plan_does_not_make_a_huge_order_only_to_show_it(capsys):
    assert run("plan", "-n", "2e9", "-w", "2", "-b", "2", "--order", "torch") == 0
    assert "made whole" in printed(capsys)


def test_plan_does_not_make_a_huge_batch_only_to_measure_it(capsys):
    assert run("plan", "-n", "10", "-w", "2", "-b", "2e9") == 0
    out = printed(capsys)
    assert "a rank's batch of 2,000,000,000 rows was not made" in out
    first = EpochPlan(10, 2, 2_000_000_000).slots(0, 1).ids[:4].tolist()
    assert ", ".join(map(str, first)) in out
    assert run("plan", "-n", "10", "-w", "2", "-b", "2e9", "--tail", "drop") == 0
    assert "was not made" not in printed(capsys)  # an epoch without a step has no batch


def test_no_number_of_a_table_is_cut(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    assert run("plan", "-n", "1e12", "-w", "65536", "-b", "1024") == 0
    out = printed(capsys)
    assert "1,000,056,291,328" in out
    assert "…" not in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("plan --tails mask", r"No such option.* See jax-ddp-weighting plan --help"),
        ("plan", r"Missing option '--num-examples'"),
        ("plan -n 10 -w 2 -b 2.5", r"'2.5' is no whole number"),
        ("plan -n 1e400 -w 2 -b 2", r"'1e400' is no whole number"),
        ("plan -n ten -w 2 -b 2", r"'ten' is no whole number"),
        ("plan -n -1 -w 2 -b 2", r"num_examples must be an integer in \[0, 2\*\*62\], got -1"),
        ("plan -n 10 -w 0 -b 2", r"num_replicas must be .* got 0"),
        ("plan -n 10 -w 2 -b 0", r"batch_size must be .* got 0"),
        ("plan -n 10 -w 2 -b 2 --tail wrap", r"'wrap' is not one of"),
        ("plan -n 10 -w 2 -b 2 --seed x", r"'--seed'"),
        ("plan -n 10 -w 2 -b 2 --seed 99999999999999999999", r"seed must be"),
        ("plan -n 10 -w 2 -b 2 --seed 1e30", r"seed must be an integer in .*, got 1"),
        ("plan -n 10 -w 2 -b 2 --seed 0.5", r"'0.5' is no whole number"),
        ("plan -n 10 -w 2 -b 2 --epoch 1e30", r"epoch must be an integer in .*, got 1"),
        ("plan -n 10 -w 2 -b 2 --epoch -1", r"epoch must be .* got -1"),
        ("plan -n 4e18 -w 2 -b 2 extra", r"unexpected extra argument"),
    ],
)
def test_bad_input_gets_one_line(arguments, said, capsys):
    assert re.search(said, refusal(capsys, *arguments.split()))
