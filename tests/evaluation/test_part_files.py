"""Predictions on disk: what a run that is cut short leaves, and what is read back."""

import ml_dtypes
import numpy as np
import processes
import pytest

from jax_ddp_weighting import (
    CoverageError,
    EpochPlan,
    batches,
    data_mesh,
    due_step,
    gather_by_id,
    held_ids,
    read_parts,
    write_part,
)


def predictions_for(ids):
    return {
        "logits": np.stack([ids, -ids], 1) / 7,
        "more": [ids.astype(ml_dtypes.bfloat16), (ids % 2 == 0, None)],
        "text": ids.astype(str),
    }


def run(folder, plan, *, fails_at=None):
    start = due_step(folder, plan)
    for step, batch in enumerate(
        batches(plan, 0, lambda ids: ids, data_mesh(plan.num_replicas), start_step=start), start
    ):
        if step == fails_at:
            raise KeyboardInterrupt
        ids = np.asarray(batch.ids)
        write_part(folder, ids, np.asarray(batch.weights), predictions_for(ids))
    return start


@pytest.mark.parametrize("into", [False, True])
def test_a_run_that_was_cut_short_goes_on_and_gives_what_gather_by_id_gives(tmp_path, into):
    plan = EpochPlan(47, num_replicas=3, batch_size=4)
    parts = tmp_path / "parts"
    with pytest.raises(KeyboardInterrupt):
        run(parts, plan, fails_at=2)
    assert len(held_ids(parts)) == 24
    with pytest.raises(CoverageError, match="23 of 47 ids omitted"):
        read_parts(parts, num_examples=47)
    # on another number of ranks, whose steps are cut otherwise: some are written again
    assert run(parts, EpochPlan(47, num_replicas=2, batch_size=5)) == 2
    assert due_step(parts, plan) == plan.steps_per_epoch
    found = read_parts(parts, num_examples=47, into=tmp_path / "result" if into else None)
    right = gather_by_id(np.arange(47), None, predictions_for(np.arange(47)))
    assert found.num_duplicated == 24 - 20  # and said so
    np.testing.assert_array_equal(found.ids, right.ids)
    for name in ("logits", "text"):
        np.testing.assert_array_equal(found.predictions[name], right.predictions[name])
    half, (even, none) = found.predictions["more"]
    assert half.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(half, right.predictions["more"][0])
    np.testing.assert_array_equal(even, right.predictions["more"][1][0])
    assert none is None
    assert isinstance(half, np.memmap) == into
    if into:
        names = sorted(path.name for path in (tmp_path / "result").iterdir())
        assert names == [
            "ids.npy",
            "predictions_logits.npy",
            "predictions_more_0.npy",
            "predictions_more_1_0.npy",
            "predictions_text.npy",
        ]
        again = np.load(tmp_path / "result" / "predictions_logits.npy", mmap_mode="r")
        np.testing.assert_array_equal(again, right.predictions["logits"])


def test_a_step_that_runs_again_replaces_its_own_part(tmp_path):
    first = write_part(tmp_path, [3, 1, 0], [1, 1, 0], [30, 10, 99])
    assert write_part(tmp_path, [3, 1], None, [31, 11]) == first
    assert read_parts(tmp_path).predictions.tolist() == [11, 31]
    assert write_part(tmp_path, [3, 1], [0, 0], [31, 11]) is None
    assert [path.name for path in tmp_path.iterdir()] == [first.name]


# what wrote the names: bytes alone, without dtype, width, number of rows, or where the run begins
ALIKE = [
    (["1", "2"], ["12"]),
    (["a1", "b2"], ["a1b2"]),
    (np.array([5, 1], np.int32), np.array([2**32 + 5], np.int64)),
    (np.array([2**63], np.uint64), np.array([-(2**63)], np.int64)),
    (np.array([97], np.int32), ["a"]),
    (["a", ""], ["a"]),
    ([1, 2], [2, 1]),
]


@pytest.mark.parametrize(("one", "other"), ALIKE)
def test_steps_of_other_ids_never_share_a_file(tmp_path, one, other):
    assert write_part(tmp_path, one, None, np.ones(len(one))) != write_part(
        tmp_path, other, None, np.ones(len(other))
    )


def test_a_run_is_no_part_of_the_ids(tmp_path):
    names = {
        write_part(tmp_path, ids, None, np.ones(1), run=run)
        for ids, run in ((["a"], "b"), (["ab"], ""), (["b"], "a"), (["a"], "b\x00"))
    }
    assert len(names) == 4


def test_every_string_id_is_kept_whatever_the_steps_hold(tmp_path):
    names = [str(i) for i in range(13)]
    plan = EpochPlan(13, 1, 2, seed=35)
    for step in range(plan.steps_per_epoch):
        slots = plan.batch(0, step)
        ids = slots.ids[0]
        write_part(tmp_path, [names[i] for i in ids], slots.weights[0], ids * 10)
    found = read_parts(tmp_path)
    assert found.ids.tolist() == sorted(names)
    assert found.take(names).tolist() == list(range(0, 130, 10))


@pytest.mark.parametrize(
    "spellings",
    [
        [np.array([3, 1], dtype) for dtype in ("<i4", ">i4", "<i8", ">i8", "u1", ">u8")],
        [np.array(["ab", "c"], dtype) for dtype in ("<U2", ">U2", "<U9", ">U9", object)]
        + [["ab", "c"], np.array(["ab", "c"], np.dtypes.StringDType())],
    ],
)
def test_equal_ids_share_a_file_whatever_array_they_come_in(tmp_path, spellings):
    paths = {write_part(tmp_path, ids, None, [1, 2]) for ids in spellings}
    paths |= {write_part(tmp_path, ids, [1, 1], [1, 2]) for ids in spellings}
    assert len(paths) == 1


def test_a_step_among_wider_strings_of_weight_0_shares_its_file(tmp_path):
    path = write_part(tmp_path, ["ab", "c"], None, [1, 2])
    assert write_part(tmp_path, ["ab", "c", "a long one"], [1, 1, 0], [1, 2, 3]) == path


OTHER_ORDER = np.dtype(np.int32).newbyteorder().str[0]


@pytest.mark.parametrize("dtype", ["U1", "U7", "f4", "f8", "i2", "c16", "S3"])
def test_predictions_in_another_byte_order_come_back(tmp_path, dtype):
    """As files of other machines hold them; what is read again must not be taken for its bytes."""
    right = np.array([3, 1, 2]).astype(dtype)
    given = right.astype(OTHER_ORDER + dtype)
    write_part(tmp_path, np.array([2, 0, 1]).astype(OTHER_ORDER + "i8"), None, {"x": given})
    write_part(tmp_path, [5], [1], {"x": right[:1]})  # a part of the machine's own
    for into in (None, tmp_path / "into"):
        found = read_parts(tmp_path, into=into).predictions["x"]
        assert found.tolist() == np.array([1, 2, 3, 3]).astype(dtype).tolist()
        assert found.dtype == right.dtype
    gathered = gather_by_id([2, 0, 1], np.ones(3, OTHER_ORDER + "f4"), {"x": given})
    assert gathered.predictions["x"].tolist() == np.sort(right).tolist()


def test_a_write_that_fails_leaves_the_old_part_and_nothing_else(tmp_path, monkeypatch):
    path = write_part(tmp_path, [1], None, [10])

    def full(file, **columns):
        file.write(b"half of it")
        raise OSError("No space left on device")

    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(OSError, match="No space left"):
        write_part(tmp_path, [1], None, [11])
    assert list(tmp_path.iterdir()) == [path]
    assert read_parts(tmp_path).predictions.tolist() == [10]


def test_parts_that_disagree_are_refused(tmp_path):
    a = write_part(tmp_path, [2, 1], None, [20, 10])
    b = write_part(tmp_path, [5, 1], None, [50, 11])
    names = sorted([f"row 1 of {a.name}", f"row 1 of {b.name}"], key=lambda text: text[-8:])
    with pytest.raises(ValueError, match=r"read_parts: predictions must agree .* for id 1: ") as it:
        read_parts(tmp_path)
    assert all(name in str(it.value) for name in names)
    write_part(tmp_path, [5, 1], None, [50, 10])
    assert read_parts(tmp_path).duplicated == {1: 2}


def test_parts_of_different_width_dtype_or_structure(tmp_path):
    write_part(tmp_path / "width", [1], None, np.ones((1, 2)))
    write_part(tmp_path / "width", [0], None, np.ones((1, 3)))
    with pytest.raises(ValueError, match=r"got \(\d,\) in part-00000-\w+.npz and \(\d,\) in part-"):
        read_parts(tmp_path / "width")
    padded = read_parts(tmp_path / "width", pad=0.0)
    assert (padded.predictions.tolist(), padded.lengths.tolist()) == (
        [[1, 1, 1], [1, 1, 0]],
        [3, 2],
    )
    write_part(tmp_path / "dtype", [1], None, np.ones(1))
    write_part(tmp_path / "dtype", [0], None, np.ones(1, int))
    with pytest.raises(TypeError, match="predictions must have one dtype everywhere, got"):
        read_parts(tmp_path / "dtype")
    write_part(tmp_path / "structure", [1], None, {"a": np.ones(1)})
    write_part(tmp_path / "structure", [0], None, (np.ones(1),))
    with pytest.raises(ValueError, match="parts must hold one structure of predictions, got diff"):
        read_parts(tmp_path / "structure")
    with pytest.raises(
        TypeError, match="dicts with string keys, lists, tuples and arrays, got dic"
    ):
        write_part(tmp_path / "keys", [1], None, {1: np.ones(1)})


def test_ids_of_all_kinds_are_kept(tmp_path):
    write_part(tmp_path / "large", np.array([2**63], np.uint64), None, [1])
    write_part(tmp_path / "large", np.array([5], np.int32), None, [2])
    assert held_ids(tmp_path / "large").tolist() == [5, 2**63]
    write_part(tmp_path / "text", ["b"], None, [1])
    write_part(tmp_path / "text", ["aaa"], None, [2])
    assert read_parts(tmp_path / "text").ids.tolist() == ["aaa", "b"]
    write_part(tmp_path / "text", [3], None, [2])
    with pytest.raises(TypeError, match="read_parts: ids must be of one kind, got integers and st"):
        read_parts(tmp_path / "text")


def test_a_folder_without_parts_holds_nothing(tmp_path):
    assert held_ids(tmp_path).tolist() == []
    assert due_step(tmp_path / "none", EpochPlan(9, 2, 3)) == 0
    with pytest.raises(ValueError, match="folder must hold parts, got none in"):
        read_parts(tmp_path)


TWO = """
import numpy as np
import jax_ddp_weighting as jdw

mesh, plan = jdw.data_mesh(), jdw.EpochPlan(11, num_replicas=2, batch_size=2)
start = jdw.due_step({folder!r}, plan)
for step, batch in enumerate(jdw.batches(plan, 0, lambda i: i * 2, mesh, start_step=start), start):
    if rank == 1 and step == 1 and not start:
        break  # cut short where the other process has written its part
    jdw.write_part({folder!r}, batch.ids, batch.weights, batch.data)
    if step == 1:
        break
print(start)
"""


def test_processes_go_on_from_one_step(tmp_path):
    # in processes of their own: what one has written, the other must know of
    program = TWO.format(folder=str(tmp_path))
    for start, step in ((0, 1), (1, 2)):
        ended = processes.launch(program, 2)
        assert [(each.code, each.out) for each in ended] == [(0, f"{start}\n")] * 2, ended
        assert due_step(tmp_path, EpochPlan(11, num_replicas=2, batch_size=2)) == step
    np.testing.assert_array_equal(read_parts(tmp_path).predictions, held_ids(tmp_path) * 2)


def test_a_part_of_several_steps_comes_back(tmp_path):
    for first in (0, 4):
        ids = [[first, first + 1], [first + 2, first + 3]]
        write_part(tmp_path, ids, None, [np.array(["ab", "cd"]), np.array(["efgh", "i"])])
    found = read_parts(tmp_path, num_examples=8).predictions.tolist()
    assert found == ["ab", "cd", "efgh", "i"] * 2


@pytest.mark.parametrize(
    ("steps", "error", "message"),
    [
        ([np.ones(2), np.ones(2, int)], TypeError, "write_part: predictions must have one dtype"),
        ([np.ones((2, 1)), np.ones((2, 2))], ValueError, "write_part: .* rows of one shape"),
    ],
)
def test_steps_that_differ_are_refused_before_they_are_written(tmp_path, steps, error, message):
    with pytest.raises(error, match=message):
        write_part(tmp_path, [[0, 1], [2, 3]], None, steps)
    assert not list(tmp_path.iterdir())
