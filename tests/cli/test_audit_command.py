"""`audit`: of plans, and of files that a run wrote."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from command_line import PLAN, printed, refusal, run

from jax_ddp_weighting import EpochPlan


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


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
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
        ("audit -n 10 twice.jsonl --column id", r"line 1: must be .* \(the name 'id' twice\)"),
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
    Path("twice.jsonl").write_text('{"id": 1, "id": 2}')
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


NO_NUMBERS = [
    ("cat\ndog\n", r"line 1: ids must be integers of 64 bits, got 'cat'\. Strings .* audit_ids\("),
    ("cat dog", r"line 1: .* got 'cat'\. Strings as ids are counted .* audit_ids\("),
    ("cat", r"got 'cat'\. Strings as ids are counted .* audit_ids\("),
    ("0001.jpg\n0002.jpg\n", r"got '0001\.jpg'\. Strings as ids are counted .* audit_ids\("),
    ("id,label\n0,cat\n1,dog\n", r"line 1: .* got 'id'\. Strings as ids are counted"),
    ("id\n0\n1\n", r"line 1: .* got 'id'\. Remove the header: only ids belong in the file"),
    ("id w\n0 1\n", r"Remove the header: only ids belong in the file\. Weights go in files of"),
    ('{"id": "cat"}\n', r"got '\{\"id\":'\. JSON lines are read from files named"),
    ("0.5\n1.5\n", r"line 1: .* got '0\.5'\. JSON lines are read"),
    ("0 1\n2 1_0\n", r"line 2: ids must be integers of 64 bits, got '1_0'\. .*without underscores"),
]


@pytest.mark.parametrize(("text", "said"), NO_NUMBERS)
def test_what_a_text_of_no_ids_is_is_said(text, said, tmp_path, capsys):
    path = tmp_path / "ids.txt"
    path.write_text(text)
    assert re.search(said, refusal(capsys, "audit", "-n", "20", path))


def test_strings_as_ids_are_named_in_every_kind_of_file(tmp_path, capsys):
    np.save(tmp_path / "ids.npy", np.array(["cat", "dog"]))
    said = refusal(capsys, "audit", "-n", "2", tmp_path / "ids.npy")
    assert "got an array of <U3. Strings as ids are counted" in said
    (tmp_path / "ids.jsonl").write_text('{"id": ["cat"]}')
    said = refusal(capsys, "audit", "-n", "2", tmp_path / "ids.jsonl", "--column", "id")
    assert "got \"cat\" in 'id'. Strings as ids are counted" in said


def test_an_underscore_in_a_number_is_an_error_and_in_a_remark_is_none(tmp_path, capsys):
    ids, weights = tmp_path / "ids.txt", tmp_path / "w.txt"
    ids.write_text("0 1 2  # step_0\n")
    weights.write_text("1 1_0 1\n")
    assert run("audit", "-n", "3", ids) == 0
    capsys.readouterr()
    said = refusal(capsys, "audit", "-n", "3", ids, "--weights", weights)
    assert "line 1: weights must be numbers, got '1_0'. Write it without underscores." in said


# --- each weight beside its id --------------------------------------------------------------------

BATCHES = [[0, 1, 0], [2, 3, 4]]  # right under weights 1, 1, 0 and 1, 1, 1
SHIFTED = [[1, 1], [0, 1, 1, 1]]  # as many in all, and another id's


def write_json_lines(path, **columns):
    rows = zip(*columns.values(), strict=True)
    path.write_text("".join(f"{json.dumps(dict(zip(columns, r, strict=True)))}\n" for r in rows))
    return path


def test_weights_of_json_lines_belong_to_the_ids_of_their_line(tmp_path, capsys):
    right = write_json_lines(tmp_path / "right.jsonl", ids=BATCHES, w=[[1, 1, 0], [1, 1, 1]])
    wrong = write_json_lines(tmp_path / "wrong.jsonl", ids=BATCHES, w=SHIFTED)
    columns = ["--column", "ids", "--weight-column", "w"]
    assert run("audit", "-n", "5", right, *columns) == 0
    capsys.readouterr()
    said = refusal(capsys, "audit", "-n", "5", right, wrong, *columns)
    assert "wrong.jsonl: line 1: weights must be as many as the ids, 3, got 2. " in said
    later = [[0], [1, 2], [3, 4]], [1, [1, 1], [1]]
    gap = write_json_lines(tmp_path / "gap.jsonl", ids=later[0], w=later[1])
    gap.write_text("\n\n" + gap.read_text())  # empty lines count as lines
    assert "gap.jsonl: line 5: weights must be" in refusal(
        capsys, "audit", "-n", "5", gap, *columns
    )


@pytest.mark.parametrize(
    ("ids", "weights", "said"),
    [
        ("0 1 0\n2 3 4", "1 1\n0 1 1 1", r"w: line 1: weights must be as many as the ids, 3, got"),
        ("0 1 0\n2 3 4", "1 1 0\n\n# rest\n1 1 1", ""),
        ("0 1 0\n2 3 4", "1 1 0 1 1 1", ""),  # lines of text may be folded anywhere
        ("0\n1\n0\n2\n3\n4", "1 1 0\n1 1 1", ""),
        ([[0, 1, 0], [2, 3, 4]], [[1, 1], [0, 1], [1, 1]], r"w: .* lie in rows as the ids do, 2 "),
        ([[0, 1], [0, 2], [3, 4]], [[1, 1, 0], [1, 1, 1]], r"w: .* as the ids do, 3 of them"),
        ([[[0, 1, 0], [2, 3, 4]]], [[[1, 1], [0, 1], [1, 1]]], r"w: .* as the ids do, 2 of them, "),
        ([[0, 1, 0], [2, 3, 4]], [1, 1, 0, 1, 1, 1], ""),
        ([[0, 1, 0, 2, 3, 4]], [[1], [1], [0], [1], [1], [1]], ""),
        ([[0, 1, 0], [2, 3, 4]], [[1, 1, 0], [1, 1, 1]], ""),
        ({"ids": BATCHES}, [[1, 1], [0, 1], [1, 1]], r"w: .* in rows as the ids do, 2 of them, go"),
        ({"ids": BATCHES}, "1 1\n0 1 1 1", r"w: line 1: weights must be as many as the ids, 3, go"),
        ({"ids": [[0, 1], [0, 2, 3, 4]]}, [[1, 1, 0], [1, 1, 1]], r"w: row 0: weights must be as"),
        ({"ids": BATCHES}, [1, 1, 0, 1, 1, 1], ""),
        ({"ids": [0, 1, 0, 2, 3, 4]}, [[1, 1, 0], [1, 1, 1]], ""),
    ],
)
def test_weights_in_a_file_of_their_own_lie_as_the_ids_do(ids, weights, said, tmp_path, capsys):
    def write(name, values):
        if isinstance(values, dict):
            return write_json_lines(tmp_path / f"{name}.jsonl", **values)
        path = tmp_path / f"{name}.{'txt' if isinstance(values, str) else 'npy'}"
        if isinstance(values, str):
            path.write_text(values)
        else:
            np.save(path, np.array(values))
        return path

    column = ["--column", "ids"] if isinstance(ids, dict) else []
    arguments = ["audit", "-n", "5", write("i", ids), *column, "--weights", write("w", weights)]
    if said:
        assert re.search(said.replace("w:", r"w\.\w+:"), refusal(capsys, *arguments))
    else:
        assert run(*arguments) == 0


# --- arrays that are not what they say ------------------------------------------------------------


def npy(shape, values, descr="<i8"):
    header = f"{{'descr': {descr!r}, 'fortran_order': False, 'shape': {shape}, }}"
    header += " " * (-(len(header) + 11) % 64) + "\n"
    length = len(header).to_bytes(2, "little")
    return b"\x93NUMPY\x01\x00" + length + header.encode() + np.array(values, "<i8").tobytes()


@pytest.mark.parametrize(
    "content",
    [
        npy("(10**15,)".replace("10**15", "1000000000000000"), [0, 1, 2]),
        npy("(4,)", [0, 1, 2]),
        npy("(2,)", [0, 1, 2]),  # numpy alone would read two and say nothing
        npy("(4611686018427387904, 4)", [0, 1, 2]),
        npy("(-3,)", [0, 1, 2]),
        npy("(3.0,)", [0, 1, 2]),
        npy("(" * 3000, [0, 1, 2]),
        npy("(3,)", [0, 1, 2], descr="<i9"),
        npy("(3,)", [0, 1, 2], descr="('<i8', (10**9,))"),
        npy("(3,)", [0, 1, 2])[:-1],
        npy("(3,)", [0, 1, 2])[:40],
        npy("(3,)", [0, 1, 2]) * 2,
    ],
)
def test_an_array_that_is_not_what_its_header_says_is_named(content, tmp_path, capsys):
    path = tmp_path / "ids.npy"
    path.write_bytes(content)
    said = refusal(capsys, "audit", "-n", "3", path)
    assert said.startswith(f"{path}: must be an array of numbers that numpy.save wrote, got ")


def test_arrays_as_numpy_saves_them_are_read(tmp_path, capsys):
    for number, ids in enumerate([np.arange(3), np.arange(3).reshape(3, 1), np.int32([[0, 1, 2]])]):
        path = tmp_path / f"{number}.npy"
        np.save(path, np.asfortranarray(ids))
        assert run("audit", "-n", "3", path) == 0
    path = tmp_path / "none.npy"
    np.save(path, np.zeros((0, 3), int))
    assert run("audit", "-n", "0", path) == 0
