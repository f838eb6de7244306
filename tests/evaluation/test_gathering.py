"""Predictions by id: sorted, each once, nothing by position, nothing hidden."""

import tracemalloc
from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_ddp_weighting import Batch, CoverageError, EpochPlan, batches, data_mesh, gather_by_id
from jax_ddp_weighting.distributed import allgather
from jax_ddp_weighting.evaluation.predictions import Predictions


def oracle(ids, weights, predictions):
    """Each accepted id once, in plain lists; copies must agree."""
    found = {}
    for i, weight, prediction in zip(ids, weights, predictions, strict=True):
        if weight > 0:
            assert found.setdefault(i, prediction) == prediction
    return sorted(found.items())


@pytest.mark.parametrize(
    ("ids", "weights", "predictions"),
    [
        ([2, 0, 1], [1, 1, 1], [20, 0, 10]),
        ([2, 0, 1, 0], [1, 1, 1, 0], [20, 0, 10, 99]),  # padding may say anything
        ([2, 1, 1, 3], [1, 1, 1, 1], [20, 10, 10, 30]),  # an equal copy
        ([2, 2], [0.5, 0.25], [7, 7]),  # weights are no counts
        ([5, 3], [True, False], [1, 2]),
        ([2**62, -(2**62), 0], [1, 1, 1], [1, 2, 3]),  # too far apart for one sorted word
        ([6, 8, 5, 7], [1, 1, 1, 1], [1, 2, 3, 4]),  # one run, which needs no sorting
        ([6, 8, 5, 8], [1, 1, 1, 1], [1, 2, 3, 2]),  # and what looks like one
        ([2**40 + 1, 1], [1, 1], [1, 2]),  # int32 would make one id of them
        (["b", "a", "ab"], [1, 1, 1], [1, 2, 3]),
        ([4, 4], [0, 0], [1, 2]),
        ([], [], []),
    ],
)
def test_rows_come_out_by_id(ids, weights, predictions):
    found = gather_by_id(ids, weights, predictions)
    right = oracle(ids, weights, predictions)
    assert found.ids.tolist() == [i for i, _ in right]
    assert found.predictions.tolist() == [prediction for _, prediction in right]
    assert len(found) == len(right)


rows = st.lists(st.tuples(st.integers(-4, 9), st.sampled_from([0, 1, 0.5])), max_size=30)


@settings(max_examples=60, deadline=None)
@given(rows, st.lists(st.integers(0, 30), max_size=4), st.integers(1, 7), st.integers(0, 61))
def test_no_split_into_steps_and_no_chunk_size_changes_the_result(rows, cuts, size, shift):
    ids = np.array([i for i, _ in rows], np.int64) << shift
    weights = np.array([w for _, w in rows])
    predictions = {"double": ids * 2, "text": [str(i) for i in ids.tolist()]}
    predictions["text"] = np.array(predictions["text"], str)
    cuts = sorted({0, len(rows), *(cut for cut in cuts if cut < len(rows))})
    spans = [slice(a, b) for a, b in pairwise(cuts)] or [slice(0, 0)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(allgather, "rows_per_chunk", lambda row_bytes: size)
        found = gather_by_id(
            [ids[span] for span in spans],
            [weights[span] for span in spans],
            [{name: leaf[span] for name, leaf in predictions.items()} for span in spans],
        )
    right = oracle(ids.tolist(), weights.tolist(), predictions["text"].tolist())
    assert list(zip(found.ids.tolist(), found.predictions["text"].tolist(), strict=True)) == right
    np.testing.assert_array_equal(found.predictions["double"], found.ids * 2)


def test_copies_that_were_dropped_are_reported():
    found = gather_by_id([3, 1, 3, 2, 1, 3], [1, 1, 1, 1, 0, 1], [3, 1, 3, 2, 9, 3])
    assert found.duplicated == {3: 3}
    assert found.num_duplicated == 1
    known = gather_by_id([0, 1, 1], None, [5, 6, 6], num_examples=2)
    assert (known.duplicated, known.ids.tolist()) == ({1: 2}, [0, 1])


def test_nan_agrees_with_nan_and_bits_survive():
    values = np.array([np.nan, 1.0, np.nan], ml_dtypes.bfloat16)
    found = gather_by_id([1, 0, 1], None, (values, np.array(["é", "a", "é"])))
    assert found.predictions[0].dtype == ml_dtypes.bfloat16
    assert found.duplicated == {1: 2}
    assert found.predictions[1].tolist() == ["a", "é"]


def test_ids_keep_64_bits_and_their_sign():
    large = np.array([2**64 - 1, 2**63, 5], np.uint64)
    assert gather_by_id(large, None, [1, 2, 3]).ids.tolist() == [5, 2**63, 2**64 - 1]
    assert gather_by_id(large[:1] - np.uint64([1, 0]), None, [1, 2]).ids[1] == 2**64 - 1
    assert gather_by_id(np.array([7], np.uint8), None, [1]).ids.dtype == np.int64


def test_any_order_can_be_asked_for():
    found = gather_by_id([7, 5, 6], None, {"x": [0.7, 0.5, 0.6]})
    assert found.take([6, 7, 6])["x"].tolist() == [0.6, 0.7, 0.6]
    assert found.take([])["x"].tolist() == []
    with pytest.raises(CoverageError, match=r"got 4, 8 without one. 3 ids have one"):
        found.take([8, 7, 4])
    with pytest.raises(CoverageError, match=r"got 1 without one. 0 ids"):
        gather_by_id([], None, []).take([1])


def test_the_order_in_which_an_epoch_was_read_is_not_lost():
    plan = EpochPlan(11, num_replicas=2, batch_size=3, seed=4)
    seen = list(batches(plan, 0, lambda ids: ids * 1.5, data_mesh(2)))
    read = np.concatenate([np.asarray(b.ids)[np.asarray(b.weights) > 0] for b in seen])
    found = gather_by_id([b.ids for b in seen], [b.weights for b in seen], [b.data for b in seen])
    assert not np.array_equal(read, found.ids)
    np.testing.assert_array_equal(found.take(read), read * 1.5)


def test_the_result_is_the_callers_own():
    predictions = np.arange(3.0)
    found = gather_by_id([0, 1, 2], None, predictions, num_examples=3)
    found.predictions[0] = 9
    assert predictions[0] == 0


def test_rows_of_different_width_are_padded_on_request_with_their_lengths():
    ids, steps = [[3, 1], [2]], [{"t": np.ones((2, 3), int)}, {"t": np.full((1, 2), 7)}]
    found = gather_by_id(ids, None, steps, pad=-1)
    assert found.predictions["t"].tolist() == [[1, 1, 1], [7, 7, -1], [1, 1, 1]]
    assert found.lengths["t"].tolist() == [3, 2, 3]


def test_a_copy_padded_to_another_width_is_still_a_copy():
    steps = [np.array([[1, 2, 0]]), np.array([[1, 2]])]
    found = gather_by_id([[4], [4]], None, steps, pad=0)
    assert (found.predictions.tolist(), found.lengths.tolist()) == ([[1, 2, 0]], [3])
    with pytest.raises(ValueError, match="different ones for id 4: row 0 of step 0, row 0 of st"):
        gather_by_id([[4], [4]], None, steps, pad=9)


def test_device_arrays_are_read_shard_by_shard_wherever_they_lie():
    plan = EpochPlan(13, num_replicas=4, batch_size=2)
    mesh = data_mesh(4)
    for batch in batches(plan, 0, lambda ids: np.stack([ids, ids], 1), mesh):
        on_host = np.asarray(batch.data)
        everywhere = gather_by_id(batch.ids, batch.weights, batch.data)
        mixed = gather_by_id(np.asarray(batch.ids), batch.weights, on_host)
        np.testing.assert_array_equal(everywhere.predictions, mixed.predictions)
        np.testing.assert_array_equal(everywhere.predictions[:, 0], everywhere.ids)


def table():
    two, three = np.zeros((2, 2)), np.zeros((2, 3))
    yield {"ids": [0.0, 1.5]}, TypeError, "ids must be integers or strings, got float64"
    yield {"ids": [b"a", b"b"]}, TypeError, r"ids must be integers or strings, got \|S1"
    yield {"ids": [[0], [1]]}, ValueError, "predictions must have one entry per step .* got ndarray"
    yield {"ids": np.zeros((2, 1), int)}, ValueError, r"ids must be \[rows\], got shape \(2, 1\)"
    yield {"weights": [1]}, ValueError, r"weights must have the shape of ids, got weights \(1,\)"
    yield {"weights": [1, -1]}, ValueError, "finite and at least 0, got -1 at row 1"
    yield {"weights": [np.nan, 1]}, ValueError, "finite and at least 0, got nan at row 0"
    yield {"weights": ["1", "1"]}, TypeError, "weights must be numbers, got <U1"
    yield {"predictions": [1.0]}, ValueError, r"one row per id, got shape \(1,\) at predictions an"
    yield {"predictions": {"a": two[:1]}}, ValueError, r"at predictions\['a'\] and 2 ids"
    yield {"predictions": ()}, ValueError, r"predictions must hold arrays, got \(\)"
    yield {"predictions": (1.0, 2.0)}, TypeError, r"got float64\[\] at predictions\[0\]"
    yield {"predictions": [None, None]}, TypeError, r"numbers or strings, got object\[2\]"
    yield {"to": "root"}, ValueError, 'to must be "all" or "first", got \'root\''
    yield {"num_examples": -1}, ValueError, r"num_examples must be an integer in .*, got -1"
    steps = {"ids": [[0, 1], [2, 3]], "weights": None}
    yield dict(steps, predictions=[two]), ValueError, "one entry per step .* 2 steps, got 1"
    yield dict(steps, predictions=[two, three]), ValueError, r"got \(2,\) and \(3,\) at predictions"
    yield dict(steps, predictions=[two, two[:, :, None]]), ValueError, "rows of one shape everywhe"
    yield dict(steps, predictions=[two, three], pad="x"), TypeError, "pad must be a value of the"
    yield dict(steps, predictions=[two, two.astype(int)]), TypeError, "got float64 and int64 at"
    yield dict(steps, predictions=[two, (two,)]), ValueError, "one structure in every step, got"


@pytest.mark.parametrize(("change", "error", "message"), list(table()))
def test_bad_input_is_refused(change, error, message):
    arguments = {"ids": [0, 1], "weights": [1, 1], "predictions": np.zeros(2)} | change
    with pytest.raises(error, match=message):
        gather_by_id(arguments.pop("ids"), arguments.pop("weights"), **arguments)


def test_missing_ids_are_named_ten_and_then_a_count():
    message = r"30 of 32 ids omitted \(0, 1, 2, 3, 4, 5, 6, 7, 8, 9 and 20 more\)"
    with pytest.raises(CoverageError, match=message):
        gather_by_id([30, 31], None, [1, 2], num_examples=32)
    # a row of weight 0 covers nothing
    with pytest.raises(CoverageError, match=r"1 of 2 ids omitted \(1\)"):
        gather_by_id([0, 1], [1, 0], [1, 2], num_examples=2)
    with pytest.raises(CoverageError, match="1 different ids found, num_examples is 2"):
        gather_by_id(["a", "a"], None, [1, 1], num_examples=2)


def test_ids_out_of_range_are_named():
    with pytest.raises(CoverageError, match=r"1 slots out of range \(4\)"):
        gather_by_id([0, 1, 4], None, [1, 2, 3], num_examples=2)
    with pytest.raises(CoverageError, match="1 slots out of range"):
        gather_by_id(np.array([0, 2**63 + 1], np.uint64), None, [1, 2], num_examples=1)
    # but padding rows may hold any id
    assert len(gather_by_id([0, 1, -1], [1, 1, 0], [1, 2, 3], num_examples=2)) == 2


def test_rows_that_claim_one_id_with_different_predictions_are_refused_with_their_places():
    message = (
        r"different ones for id 1: row 1, row 3, and on 1 more ids. Neither can be believed: "
        'padding rows and copies weigh 0, as tail="mask" has them.'
    )
    with pytest.raises(ValueError, match=message):
        gather_by_id([0, 1, 2, 1, 2], None, [5, 1, 2, 3, 4])
    # one leaf of a tree is enough, and so is one place of a row
    same = np.zeros((2, 3))
    other = np.array([[0, 0, 0], [0, 0, 1.0]])
    with pytest.raises(ValueError, match="different ones for id 8: row 0, row 1"):
        gather_by_id([8, 8], None, {"a": same, "b": other})
    # the check can pass
    assert isinstance(gather_by_id([8, 8], None, {"a": same, "b": same}), Predictions)


def test_a_batch_by_hand_is_gathered_too():
    batch = Batch.of(np.arange(4.0), weights=np.array([1, 0, 1, 0]))
    assert gather_by_id(batch.ids, batch.weights, batch.data).ids.tolist() == [0, 2]


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("shape", [(), (8,)])
def test_memory_is_the_result_and_little_more(known, shape):
    n = 400_000
    ids = np.random.default_rng(0).permutation(n)
    weights, predictions = np.ones(n, np.int32), np.zeros((n, *shape), np.float32)
    tracemalloc.start()
    found = gather_by_id(ids, weights, predictions, num_examples=n if known else None)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2.2 * (found.ids.nbytes + found.predictions.nbytes)


@pytest.mark.parametrize(
    ("pad", "dtype"),
    [
        *[(-0.5, int), (float("nan"), int), (-1, bool), (300, np.uint8), (2**70, int)],
        *[(1e300, np.float32), ("x", float), ([1], int)],
    ],
)
def test_a_pad_that_the_dtype_cannot_hold_is_refused(pad, dtype):
    narrow, wide = np.ones((2, 1), dtype), np.ones((2, 2), dtype)
    with pytest.raises(TypeError, match=r"pad must be a value of the predictions' dtype, got"):
        gather_by_id([[0, 1], [2, 3]], None, [narrow, wide], pad=pad)


def test_a_pad_that_would_be_cut_off_is_refused():
    words = [np.array([["ab"], ["c"]]), np.array([["ab", "x"], ["c", "d"]])]
    with pytest.raises(TypeError, match=r"pad must be a value .* got '<pad>' for <U2"):
        gather_by_id([[0, 1], [2, 3]], None, words, pad="<pad>")
    assert gather_by_id([[0, 1], [2, 3]], None, words, pad="-").predictions[0].tolist() == [
        "ab",
        "-",
    ]


def test_large_ids_are_taken_whatever_kind_of_integer_asks():
    found = gather_by_id(np.array([1, 2**53, 2**53 + 1]), None, np.arange(3))
    assert found.take(np.array([2**53 + 1, 2**53], np.uint64)).tolist() == [2, 1]
    with pytest.raises(CoverageError, match=f"got {2**64 - 1} without one"):
        found.take(np.array([2**64 - 1], np.uint64))


@pytest.mark.parametrize("ids", [np.array([True, False]), [1.0], np.array([2.0**53 + 2])])
def test_a_mask_and_floats_are_no_ids_to_take(ids):
    found = gather_by_id([0, 1], None, np.array([0.5, 0.25]))
    with pytest.raises(TypeError, match=r"Predictions.take: ids must be integers or strings, got"):
        found.take(ids)
    assert found.take([]).shape == (0,)


def test_numbers_beside_strings_are_no_string_ids():
    with pytest.raises(TypeError, match=r"gather_by_id: ids must be all integers or all strings"):
        gather_by_id(["a", 1], None, np.zeros(2))


def test_strings_of_any_width_are_ids_and_predictions():
    free = np.dtypes.StringDType()
    texts = np.array([["q"], ["longer"]], free)
    found = gather_by_id(np.array(["b", "a"], free), None, texts)
    assert found.predictions.tolist() == [["longer"], ["q"]]
    for asked in (np.array(["b", "a"], free), np.array(["b", "a"], object), ["b", "a"]):
        assert found.take(asked).tolist() == [["q"], ["longer"]]
