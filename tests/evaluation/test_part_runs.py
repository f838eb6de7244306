"""Whose parts are in a folder, which of them are torn, and what a result on disk is called."""

import os
import subprocess
import sys

import numpy as np
import pytest

from jax_ddp_weighting import EpochPlan, due_step, gather_by_id, held_ids, read_parts, write_part
from jax_ddp_weighting.evaluation import result_files

PLAN = EpochPlan(6, num_replicas=1, batch_size=2)


def write_all(folder, value, **options):
    for step in range(PLAN.steps_per_epoch):
        ids = PLAN.batch(0, step).ids[0]
        write_part(folder, ids, None, ids * value, **options)


def test_parts_of_another_run_are_refused_and_never_overwritten(tmp_path):
    write_all(tmp_path, 10, run="a")
    assert due_step(tmp_path, PLAN, run="a") == 3
    for run in ("b", ""):
        for ask in (
            lambda run=run: due_step(tmp_path, PLAN, run=run),
            lambda run=run: held_ids(tmp_path, run=run),
            lambda run=run: read_parts(tmp_path, run=run),
        ):
            with pytest.raises(ValueError, match=rf"parts must be of run '{run}', got one of 'a'"):
                ask()
    write_all(tmp_path, 20, run="b")
    assert len(list(tmp_path.iterdir())) == 6
    for path in tmp_path.iterdir():  # what was there is still what it was
        with np.load(path) as part:
            value = 20 if '"run": "b"' in str(part["about"]) else 10
            np.testing.assert_array_equal(part["leaf0"], part["ids"] * value)
    with pytest.raises(TypeError, match="write_part: run must be a string, got 3"):
        write_part(tmp_path, [1], None, [1], run=3)


def tear(path, how):
    data = path.read_bytes()
    torn = {
        "half": data[: len(data) // 2],
        "empty": b"",
        "zeros": bytes(len(data)),
        "a pickle": b"\x80\x04K\x01.",
        "text": b"not found",
        "a member": data[:60] + bytes(40) + data[100:],
        "an array": b"\x93NUMPY\x01\x00",
    }
    path.write_bytes(torn[how])


@pytest.mark.parametrize(
    "how", ["half", "empty", "zeros", "a pickle", "text", "a member", "an array"]
)
def test_a_torn_part_is_named_and_its_step_is_due_again(tmp_path, how):
    write_all(tmp_path, 10)
    torn = write_part(tmp_path, PLAN.batch(0, 1).ids[0], None, PLAN.batch(0, 1).ids[0] * 10)
    tear(torn, how)
    with pytest.raises(ValueError, match=rf"read_parts: a part must be whole, got .* {torn.name}"):
        read_parts(tmp_path)
    with pytest.warns(UserWarning, match=rf"due_step: a part must be whole, got .* {torn.name}"):
        assert due_step(tmp_path, PLAN) == 1
    with pytest.warns(UserWarning, match="held_ids: a part must be whole"):
        assert len(held_ids(tmp_path)) == 4
    write_all(tmp_path, 10)
    assert read_parts(tmp_path, num_examples=6).predictions.tolist() == [0, 10, 20, 30, 40, 50]


def test_a_part_that_may_not_be_read_is_no_torn_one(tmp_path, monkeypatch):
    write_all(tmp_path, 10)

    def denied(*_, **__):
        raise PermissionError("not yours")

    monkeypatch.setattr("pathlib.Path.open", denied)
    with pytest.raises(PermissionError, match="not yours"):
        due_step(tmp_path, PLAN)


ALIKE = [
    ("a/b", "a_b"),
    ("a b", "a/b"),
    ("t(1)", "t[1]"),
    ("", " "),
    ("A", "a"),
    ("x" * 300, "x" * 299),
    ("é" * 150, "é" * 151),
    ("ß", "ss"),
    ("a", "a.lengths"),
]


@pytest.mark.parametrize("names", ALIKE)
def test_every_leaf_has_a_file_of_its_own(tmp_path, names):
    tree = {name: np.arange(3) + 10 * j for j, name in enumerate(names)}
    tree["nested"] = {names[0]: [np.arange(3) + 90]}
    write_part(tmp_path / "parts", [2, 0, 1], None, tree)
    found = read_parts(tmp_path / "parts", into=tmp_path / "result").predictions
    right = gather_by_id([2, 0, 1], None, tree).predictions
    files = set()
    for name in names:
        np.testing.assert_array_equal(found[name], right[name])
        files.add(found[name].filename)
        np.testing.assert_array_equal(np.load(found[name].filename), right[name])
    assert len({os.path.basename(file).casefold() for file in files}) == 2
    np.testing.assert_array_equal(found["nested"][names[0]][0], right["nested"][names[0]][0])


def test_names_that_nothing_is_like_are_their_leaves_paths():
    names = result_files.name_files(["['a']", "['b'][0]", "", "['x/y']"])
    assert names == [f"predictions{end}.npy" for end in ("_a", "_b_0", "", "_x_y")]


def test_a_result_that_is_not_finished_leaves_no_file_and_the_older_one_is_whole(
    tmp_path, monkeypatch
):
    parts, result = tmp_path / "parts", tmp_path / "result"
    write_all(parts, 10)
    older = read_parts(parts, into=result)
    before = sorted(path.name for path in result.iterdir())

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("jax_ddp_weighting.evaluation.part_files.columns_of", interrupted)
        with pytest.raises(KeyboardInterrupt):
            read_parts(parts, into=result)
    assert sorted(path.name for path in result.iterdir()) == before
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", _full)
        with pytest.raises(OSError, match="No space left"):
            read_parts(parts, into=result)
    assert sorted(path.name for path in result.iterdir()) == before
    # while files take their places there is no mark that all is whole
    with monkeypatch.context() as patch:
        patch.setattr("jax_ddp_weighting.evaluation.result_files._sync", interrupted)
        with pytest.raises(KeyboardInterrupt):
            read_parts(parts, into=result)
    assert not (result / "ids.npy").exists()
    again = read_parts(parts, into=result)
    assert sorted(path.name for path in result.iterdir()) == before
    assert older.predictions.tolist() == again.predictions.tolist()


def _full(*_):
    raise OSError(28, "No space left on device")


# In a process of its own: what is at stake is that the whole process is ended by SIGBUS.
FULL = """
import resource, sys
import numpy as np
from jax_ddp_weighting import read_parts, write_part

write_part(sys.argv[1], np.arange(400), None, np.zeros((400, 1000)))
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
import signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
try:
    read_parts(sys.argv[1], into=sys.argv[2])
except OSError as error:
    print("told", error)
"""


def test_a_disk_that_is_full_is_an_error_and_not_the_end_of_the_process(tmp_path):
    # a limit on files' sizes stands for the full disk, which a test cannot have
    command = [sys.executable, "-c", FULL, str(tmp_path / "parts"), str(tmp_path / "result")]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stdout[:5]) == (0, "told "), ran
    assert not list((tmp_path / "result").iterdir())
