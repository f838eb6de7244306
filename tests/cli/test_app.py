"""The command line: what it prints, what it answers, and one line for whatever is wrong."""

import json
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import jax_ddp_weighting
from jax_ddp_weighting import EpochPlan
from jax_ddp_weighting.cli import app as cli
from jax_ddp_weighting.distributed.mesh import ENGINES

HELP = Path(__file__).parent / "help"
COMMANDS = sorted(
    command.name or command.callback.__name__ for command in cli.app.registered_commands
)
PLAN = ["-n", "47", "-w", "3", "-b", "8"]


@pytest.fixture(scope="module", autouse=True)
def started():
    """JAX has started: a command leaves it as it is, with the suite's eight devices."""
    assert len(jax.devices()) == 8


def run(*arguments: str) -> int:
    return cli.run([str(each) for each in arguments])


def printed(capsys) -> str:
    """What a command printed, without the blanks that pad a table's lines."""
    out = capsys.readouterr().out
    return "\n".join(line.rstrip() for line in re.sub(r"\x1b\[[\d;]*m", "", out).splitlines())


def refusal(capsys, *arguments: str) -> str:
    """The one line that bad input gets."""
    assert run(*arguments) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    return said.err


# --- help -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_is_what_it_was(command, capsys, monkeypatch):
    # On purpose? COLUMNS=80 python -m jax_ddp_weighting COMMAND --help > tests/cli/help/COMMAND.txt
    monkeypatch.setenv("COLUMNS", "80")
    assert run(*command.split(), "--help") == 0
    kept = (HELP / f"{command or 'all'}.txt").read_text()
    assert printed(capsys).split("\n") == [line.rstrip() for line in kept.splitlines()]


def test_every_help_that_is_kept_belongs_to_a_command():
    assert {path.stem for path in HELP.glob("*.txt")} == {"all", *COMMANDS}


def test_the_version_is_printed(capsys):
    assert run("--version") == 0
    assert capsys.readouterr().out == f"jax-ddp-weighting {jax_ddp_weighting.__version__}\n"


# --- plan -----------------------------------------------------------------------------------------


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


# --- audit ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tail", "status", "duplicated", "omitted"),
    [("mask", 0, 0, 0), ("repeat", 1, 1, 0), ("drop", 1, 0, 23)],
)
@pytest.mark.parametrize("how", [[], ["--closed-form"]])
def test_a_plan_is_audited_over_epochs(tail, status, duplicated, omitted, how, capsys):
    assert run("audit", *PLAN, "--tail", tail, "--epochs", "3", "--json", *how) == status
    said = json.loads(capsys.readouterr().out)
    assert said["exactly_once"] == (status == 0)
    for epoch, audit in enumerate(said["epochs"]):
        whole = EpochPlan(47, 3, 8, tail=tail).audit(epoch)
        assert (audit["epoch"], audit["slots"]) == (epoch, whole.slots)
        assert (audit["num_duplicated"], audit["num_omitted"]) == (duplicated, omitted)
        assert audit["omitted"] == list(whole.omitted)
        assert audit["per_rank"] == list(whole.per_rank)


@pytest.mark.parametrize(("shuffle", "new"), [("--shuffle", True), ("--no-shuffle", False)])
def test_an_audit_says_whether_the_order_changed(shuffle, new, capsys):
    assert run("audit", *PLAN, shuffle, "--json") == 0
    first, second = json.loads(capsys.readouterr().out)["epochs"]
    assert first["new_order"] is None
    assert second["new_order"] is new


def test_an_audit_names_the_ids_that_are_wrong(capsys):
    assert run("audit", *PLAN, "--tail", "repeat", "--no-shuffle", "--epochs", "5") == 1
    out = printed(capsys)
    assert "epoch 0: 0 of 47 ids omitted, 1 duplicated (0)." in out
    assert "and 2 epochs more" in out


def text(ids):
    return "# a rank's ids\n" + "\n".join(
        ", ".join(map(str, ids[i : i + 5])) for i in range(0, 20, 5)
    )


def lines(ids):
    batches = [{"step": i, "ids": ids[i : i + 4], "w": [1] * len(ids[i : i + 4])} for i in (0, 4)]
    rest = [{"step": i, "ids": ids[i], "w": 1} for i in range(8, len(ids))]
    return "\n".join(json.dumps(each) for each in batches + rest) + "\n\n"


@pytest.mark.parametrize("suffix", ["txt", "npy", "jsonl"])
@pytest.mark.parametrize(("left_out", "status"), [([], 0), ([5], 1)])
def test_files_of_ids_are_audited_one_per_rank(suffix, left_out, status, tmp_path, capsys):
    files = []
    for rank in range(3):
        ids = [i for i in range(rank, 47, 3) if i not in left_out]
        files.append(tmp_path / f"rank{rank}.{suffix}")
        if suffix == "npy":
            np.save(files[-1], np.array(ids))
        else:
            files[-1].write_text({"txt": text, "jsonl": lines}[suffix](ids))
    column = ["--column", "ids", "--weight-column", "w"] if suffix == "jsonl" else []
    assert run("audit", "-n", "47", *files, *column, "--json") == status
    said = json.loads(capsys.readouterr().out)
    assert said["omitted"] == left_out
    assert said["per_rank"] == [16, 16, 15 - len(left_out)]
    assert run("audit", "-n", "47", *files, *column) == status
    assert "rank2" in printed(capsys)


def test_files_of_weights_say_which_slots_are_padding(tmp_path, capsys):
    (tmp_path / "ids.txt").write_text("0 1 2 0")
    (tmp_path / "weights.txt").write_text("1 1 0.5 0")
    ids, weights = tmp_path / "ids.txt", tmp_path / "weights.txt"
    assert run("audit", "-n", "3", ids, "--json") == 1
    assert json.loads(capsys.readouterr().out)["duplicated"] == {"0": 2}
    assert run("audit", "-n", "3", ids, "--weights", weights, "--json") == 0
    assert json.loads(capsys.readouterr().out)["weight_range"] == [0.5, 1]


@pytest.mark.parametrize(
    ("ids", "weights", "said"),
    [
        ("0 1 2 0", "", "keeps every id once. Weights were not given: padding rows count.\n"),
        ("0 1 2 0", "1 1 1 0.5", "keeps every id once.\n"),
        ("0 1", "", "keeps every id once.\n"),
        ("0 1 2 2 1 0", "", "padding rows count. Several epochs? A file holds one.\n"),
        ("0 1 2 2 1 0", "1 1 1 1 1 1", "every id once. Several epochs? A file holds one.\n"),
        ("0 1 2 2 1 0 0", "", "padding rows count.\n"),
    ],
)
def test_an_audit_says_what_else_files_may_hold(ids, weights, said, tmp_path, capsys):
    (tmp_path / "ids.txt").write_text(ids)
    (tmp_path / "weights.txt").write_text(weights)
    given = ["--weights", tmp_path / "weights.txt"] if weights else []
    assert run("audit", "-n", "3", tmp_path / "ids.txt", *given) == 1
    assert f"{printed(capsys)}\n".endswith(said)


@pytest.mark.parametrize("suffix", ["txt", "jsonl"])
def test_a_byte_order_mark_is_no_part_of_an_id(suffix, tmp_path, capsys):
    path = tmp_path / f"ids.{suffix}"
    path.write_text("\ufeff" + {"txt": "0 1 2", "jsonl": '{"id": [0, 1, 2]}'}[suffix])
    column = ["--column", "id"] if suffix == "jsonl" else []
    assert run("audit", "-n", "3", path, *column) == 0


def test_names_of_files_need_not_be_utf_8(tmp_path, capsys):
    path = tmp_path / "\udcff.txt"  # what Python makes of the byte 0xff
    path.write_text("0 1 2")
    assert run("audit", "-n", "3", path) == 0
    assert r"\udcff.txt" in printed(capsys)


def test_ids_beyond_the_dataset_are_strays(tmp_path, capsys):
    (tmp_path / "ids.txt").write_text("0 1 2 99")
    assert run("audit", "-n", "3", tmp_path / "ids.txt") == 1
    assert "1 slots out of range (99)" in printed(capsys)


# --- parity and diagnose --------------------------------------------------------------------------

USERS = """
import sys
import jax
import jax.numpy as jnp
import numpy as np
import jax_ddp_weighting as jdw
from jax_ddp_weighting.cli.proof import mean_of_local_means

def loss(params, batch):
    return jdw.weighted_sum((params["w"] * batch.data - 1) ** 2, batch.weights)

def case():
    return loss, {"w": np.float32(2)}, jdw.Batch.of(np.arange(5, dtype=np.float32))

def case_of_terms():
    def terms(params, batch):
        size = jdw.weighted_sum(params["w"] * batch.data, batch.weights)
        return {"fit": loss(params, batch), "size": size}
    batch = jdw.Batch.of(np.arange(5, dtype=np.float32))
    return {"loss_fn": terms, "params": case()[1], "batch": batch,
            "coefficients": {"fit": 1.0, "size": 0.1}}

def naive():
    return dict(zip(("loss_fn", "params", "batch"), case())) | {"gradient": mean_of_local_means}

def a_mean():
    return (lambda params, batch: jnp.mean(params["w"] * batch.data)), *case()[1:]

def own_options():
    return dict(zip(("loss_fn", "params", "batch"), case())) | {
        "splits": [(3, 2)], "engines": ["vmap"], "rtol": 1e-4, "microbatches": 2}

def loud():
    def loss_fn(params, batch):
        print("loud")
        jax.debug.print("louder")
        return loss(params, batch)
    print("loud")
    return loss_fn, *case()[1:]

def quits(*arguments):
    sys.exit(0)

def quits_later():
    return quits, *case()[1:]

def no_rows():
    return loss, case()[1], jdw.Batch.of(np.zeros(0, np.float32))

def no_weight():
    return loss, case()[1], jdw.Batch.of(np.zeros(5, np.float32), weights=np.zeros(5))

def no_batch():
    return loss, {}, np.arange(5)

def number():
    return 3

def broken():
    return {}["not there"]

def fails_later():
    return (lambda params, batch: 1 // 0), *case()[1:]

def right(token_loss, params, tokens, weights):
    def total(params):
        return (token_loss(params, tokens) * weights).sum() / jnp.maximum(weights.sum(), 1e-30)
    return jax.grad(total)(params)

def loud_and_right(*arguments):
    print("loud")
    return right(*arguments)

def rank_means(token_loss, params, tokens, weights):
    def total(params, rank):
        return (token_loss(params, tokens[rank]) * weights[rank]).sum() / weights[rank].sum()
    return (jax.grad(total)(params, 0) + jax.grad(total)(params, 1)) / 2

def wrong_shape(token_loss, params, tokens, weights):
    return params[:1]
"""


@pytest.fixture
def users(tmp_path, monkeypatch):
    """A user's folder, with a module of code to try."""
    (tmp_path / "users.py").write_text(USERS)
    (tmp_path / "torn.py").write_text("def f(:\n")
    (tmp_path / "needy.py").write_text("import not_installed_at_all")
    (tmp_path / "quitter.py").write_text("import sys\nsys.exit(0)")
    (tmp_path / "noisy.py").write_text("print('noisy')\nfrom users import *")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    for name in ("users", "torn", "needy", "quitter", "noisy"):
        sys.modules.pop(name, None)


def test_parity_proves_ours_and_fails_its_control(capsys):
    assert run("parity", "--split", "4,1,1", "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert said["equal"]
    assert {each["engine"] for each in said["differences"]} == set(ENGINES)
    assert max(each["difference"] for each in said["differences"]) < 1e-6
    assert min(each["difference"] for each in said["control"] if each["leaf"] != "loss") > 0.01


@pytest.mark.parametrize("case", ["case", "case_of_terms"])
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


def test_parity_finds_a_users_own_gradient_wrong(users, capsys):
    assert run("parity", "users:naive", "--split", "3,2", "--engine", "vmap") == 1
    assert "2 of 2 gradient leaves differ" in printed(capsys)


def test_diagnose_finds_nothing_wrong_with_the_global_mean(users, capsys):
    assert run("diagnose", "users:right") == 0
    assert printed(capsys).startswith("global_mean, factor 1")


def test_diagnose_names_a_users_convention(users, capsys):
    assert run("diagnose", "users:rank_means", "-k", "3", "--json") == 1
    assert json.loads(capsys.readouterr().out)["convention"] == "rank_token_mean"


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


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("", r"Missing command"),
        ("plam", r"No such command 'plam'"),
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
        ("audit -n 10", r"give files of ids, one per rank, or --num-replicas and --batch-size"),
        ("audit -n 10 -w 2", r"give files of ids, one per rank, or"),
        ("audit -n 10 ids.txt -w 2", r"give files of ids, or a plan, got files and --num-replicas"),
        (
            "audit -n 10 ids.txt --tail mask --epochs 2 --closed-form --seed 0 --no-shuffle",
            r"files and --tail, --seed, --shuffle/--no-shuffle, --epochs, --closed-form\. Files",
        ),
        ("audit -n 10 ids.txt --order keyed", r"got files and --order\. Files"),
        (
            "audit -n 10 -w 2 -b 2 --weights ids.txt --column x --weight-column y",
            r"--column, --weight-column, --weights must come with files of ids, got none",
        ),
        ("audit -n 10 nowhere.txt", r"nowhere.txt: No such file or directory"),
        ("audit -n 10 folder", r"folder: must be a file of ids, got a folder"),
        ("audit -n -1 ids.txt", r"num_examples must be"),
        ("audit -n 10 -w 2 -b 2 --epochs 0", r"epochs must be .* got 0"),
        ("audit -n 10 -w 2 -b 2 --epochs 0 --closed-form", r"epochs must be .* got 0"),
        ("audit -n 10 -w 2 -b 2 --epochs 10_001 --closed-form", r"in \[1, 10000\], got 10001"),
        ("audit -n 10 -w 2 -b 2 --epochs 1e30", r"epochs must be an integer in \[1, 10000\], got"),
        ("audit -n 10 -w 2e9 -b 2", r"ranks of all epochs must be at most 2,000,000, got 4,000,0"),
        ("audit -n 10 -w 2e9 -b 2 --closed-form", r"ranks of all epochs must be at most 2,000,000"),
        ("audit -n 1e9 -w 2 -b 2 --epochs 3", r"slots of all epochs must be at most .* 3,000,000,"),
        ("audit -n 1e18 ids.txt", r"Take fewer examples, a smaller batch or fewer ranks"),
        ("audit -n 1e12 -w 2 -b 2", r"at most 2,000,000,000 .* --closed-form"),
        ("audit -n 10 words.txt", r"words.txt: line 2: ids must be integers .* got 'two'"),
        ("audit -n 10 floats.txt", r"floats.txt: line 1: ids must be integers .* got '0.5'"),
        ("audit -n 10 large.txt", r"large.txt: line 1: ids must be integers of 64 bits"),
        ("audit -n 10 bytes.txt", r"bytes.txt: must be text in UTF-8"),
        ("audit -n 10 bytes.npy", r"bytes.npy: must be an array of numbers"),
        ("audit -n 10 empty.npy", r"empty.npy: must be an array of numbers"),
        ("audit -n 10 objects.npy", r"objects.npy: must be an array of numbers"),
        ("audit -n 10 floats.npy", r"floats.npy: ids must be integers, got an array of float64"),
        ("audit -n 10 ids.jsonl", r"got no column .* has 'step', 'id': name one by --column\."),
        (
            "audit -n 10 ids.jsonl --column id --weight-column w",
            r"weights must be in a named column, got no column 'w'.* by --weight-column\.",
        ),
        ("audit -n 10 wide.jsonl", r"This line has 'k0', .* 'k9' and 2 more: name one"),
        ("audit -n 10 ids.txt --weights ids.jsonl", r"ids.jsonl: .* Give a .txt or .npy file"),
        ("audit -n 10 deep.jsonl --column id", r"deep.jsonl: line 1: must be a JSON object"),
        ("audit -n 10 header.txt", r"line 2: .* got 'id'\. Remove the header: .* by --weights"),
        ("audit -n 10 ids.txt.gz", r"ids.txt.gz: .* got a .gz file\. Unpack it"),
        ("audit -n 10 ids.npz", r"ids.npz: .* got a .npz file\. Unpack it"),
        (
            "audit -n 10 ids.txt ids.txt --weights ids.txt --weights inf.txt",
            r"inf.txt: weights must be finite and at least 0, got inf at row 1",
        ),
        ("audit -n 10 ids.jsonl --column ids", r"got no column 'ids'. This line has 'step', 'id'"),
        ("audit -n 10 ids.jsonl --column step", r"line 2: ids must be integers .* got \"one\""),
        ("audit -n 10 cut.jsonl --column id", r"cut.jsonl: line 1: must be a JSON object"),
        ("audit -n 10 list.jsonl --column id", r"list.jsonl: line 1: must be a JSON object"),
        ("audit -n 10 ids.txt --column id", r"a column is for JSON lines"),
        (
            "audit -n 10 ids.txt --weights short.txt",
            r"short.txt: weights must be as many as the ids",
        ),
        ("audit -n 10 ids.txt ids.txt --weights ids.txt", r"must name one file for each of the 2"),
        ("audit -n 10 ids.txt --weights words.txt", r"line 2: weights must be numbers, got 'two'"),
        ("audit -n 10 ids.txt --weights minus.txt", r"weights must be finite and at least 0"),
        (
            "audit -n 10 ids.jsonl --column id --weight-column step --weights ids.txt",
            r"give --weights or --weight-column, got both",
        ),
    ],
)
def test_bad_input_gets_one_line(arguments, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("ids.txt").write_text("0 1 2")
    Path("short.txt").write_text("1 1")
    Path("minus.txt").write_text("1 1 -1")
    Path("words.txt").write_text("0 1\ntwo")
    Path("floats.txt").write_text("0.5")
    Path("large.txt").write_text("9" * 30)
    Path("bytes.txt").write_bytes(b"\xff\xfe\x00")
    Path("bytes.npy").write_bytes(b"\xff\xfe\x00")
    Path("empty.npy").write_bytes(b"")
    np.save("objects.npy", np.array([{}]))
    np.save("floats.npy", np.array([0.0, 1.0]))
    Path("ids.jsonl").write_text('{"step": 0, "id": 3}\n{"step": "one", "id": [4, 5]}\n')
    Path("cut.jsonl").write_text('{"id": ')
    Path("list.jsonl").write_text("[1]")
    Path("wide.jsonl").write_text(json.dumps({f"k{i}": i for i in range(12)}))
    Path("deep.jsonl").write_text('{"id":' + "[" * 200_000)
    Path("header.txt").write_text("# a log\nid,w\n0,1\n")
    Path("inf.txt").write_text("1 inf 1")
    Path("ids.txt.gz").write_bytes(b"")
    np.savez("ids.npz", np.arange(3))
    assert re.search(said, refusal(capsys, *arguments.split()))


def test_a_reader_that_has_gone_hears_no_complaint():
    # in a process of its own: its standard output is closed
    command = f"{sys.executable} -m jax_ddp_weighting audit -n 9 -w 3 -b 1 --epochs 999 --json"
    ran = subprocess.run(["bash", "-c", f"{command} | head -1"], capture_output=True, text=True)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "{\n", "")


# --- starting -------------------------------------------------------------------------------------


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


LOADED = """import sys
from jax_ddp_weighting.cli import app
app.run({})
assert 'jax' not in sys.modules"""


@pytest.mark.parametrize("command", ["plan", "audit"])
def test_plan_and_audit_start_without_jax(command):
    # in a process of its own: this one has imported JAX long ago
    assert python(LOADED.format([command, *PLAN])).returncode == 0


def test_the_check_for_jax_can_fail():
    ran = python("import jax\n" + LOADED.format(["plan", *PLAN]))
    assert "AssertionError" in ran.stderr


@pytest.mark.parametrize("package", ["typer", "rich"])
def test_a_missing_extra_is_one_line(package):
    hidden = f"import sys; sys.modules[{package!r}] = None\n"
    start = "from jax_ddp_weighting.__main__ import main; sys.exit(main())"
    ran = python(hidden + start)
    assert ran.returncode == 2
    assert ran.stderr.count("\n") == 1
    assert "pip install 'jax-ddp-weighting[cli]'" in ran.stderr
