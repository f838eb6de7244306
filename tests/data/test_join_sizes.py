"""Streams whose batches change in size; streams that stop at the shortest, or begin again."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

from jax_ddp_weighting import (
    Batch,
    data_mesh,
    join_batches,
    make_train_step,
    value_and_grad,
    weighted_sum,
)


def stream(*sizes, first=0):
    """Batches of so many rows, numbered on; None is a batch of no rows."""
    found = []
    for size in sizes:
        ids = np.arange(first, first + (size or 0), dtype=np.int32)
        found.append(Batch.of(ids.astype(np.float32), ids=ids))
        first += size or 0
    return found


def counted(batch):
    """Ids that count."""
    return np.asarray(batch.ids)[np.asarray(batch.weights) > 0].tolist()


def loss_fn(params, batch):
    return weighted_sum((params["w"] - batch.data) ** 2, batch.weights)


def test_batches_of_any_size_are_padded_to_the_least_stated_one():
    given = stream(3, 5, 2, 9, None, 1)
    joined = list(join_batches(given, data_mesh(1), sizes=[3, 6, 12]))
    assert [len(batch.weights) for batch in joined] == [3, 6, 3, 12, 3, 3]
    assert [counted(batch) for batch in joined] == [each.ids.tolist() for each in given]


def test_ranks_have_one_size_a_step_and_every_row_counts_once():
    given = [stream(3, 1, None, 2), stream(1, 8, 2, first=50), [], stream(1, 1, 1, 1, 1, first=90)]
    joined = list(join_batches(given, data_mesh(4), sizes=[2, 4, 8]))
    assert [len(batch.weights) // 4 for batch in joined] == [4, 8, 2, 2, 2]
    for step, batch in enumerate(joined):
        there = [each[step].ids.tolist() for each in given if step < len(each)]
        assert counted(batch) == [i for ids in there for i in ids]
        assert np.isfinite(np.asarray(batch.data)).all()


def test_a_stream_that_ranks_share_is_padded_per_rank():
    joined = list(join_batches(stream(3, 5, 2, 9), data_mesh(2), sizes=[1, 3, 6]))
    assert [len(batch.weights) for batch in joined] == [6, 6, 2, 12]
    assert [counted(batch) for batch in joined] == [
        [0, 1, 2],
        [3, 4, 5, 6, 7],
        [8, 9],
        list(range(10, 19)),
    ]


def test_one_buffer_refilled_at_every_size_is_copied():
    def refilling():
        buffer = np.zeros(9, np.float32)
        for step, size in enumerate((3, 5, 2, 9)):
            buffer[:] = step
            yield Batch.of(buffer[:size])

    joined = list(join_batches([refilling(), stream(1, 1, 1, 1)], data_mesh(2), sizes=[4, 9]))
    for step, batch in enumerate(joined):
        half = len(batch.weights) // 2
        assert set(np.asarray(batch.data)[:half].tolist()) == {float(step)}


def test_a_step_compiles_once_for_each_size_and_its_gradient_is_that_of_the_rows():
    traced = []

    def noting(params, batch):
        traced.append(batch.data.shape)
        return loss_fn(params, batch)

    mesh = data_mesh(2)
    step = make_train_step(noting, mesh)
    state = TrainState.create(
        apply_fn=lambda: None, params={"w": jnp.float32(0)}, tx=optax.sgd(0.25)
    )
    given = [stream(3, 5, 2, 8, 1), stream(1, 2, None, 3, first=100)]
    w = 0.0
    for number, batch in enumerate(join_batches(given, mesh, sizes=[4, 8])):
        state, report = step(state, batch)
        rows = [x for each in given if number < len(each) for x in each[number].data]
        assert float(report.weight if hasattr(report, "weight") else len(rows)) == len(rows)
        w -= 0.25 * np.mean([2 * (w - x) for x in rows])
        np.testing.assert_allclose(float(state.params["w"]), w, rtol=1e-5)
    shapes = set(traced)
    assert len(shapes) == 2, shapes


def test_sizes_hold_for_votes_too():
    given = [stream(1, 3), stream(2, first=10)]
    gradient = jax.jit(value_and_grad(loss_fn))
    found = [
        float(gradient({"w": jnp.float32(0)}, batch)[1]["w"])
        for batch in join_batches(given, data_mesh(2), convention="initial_ranks", sizes=[2, 4])
    ]
    # means 0 and 10.5, halved; then 2 alone, halved
    np.testing.assert_allclose(found, [-2 * (0 + 10.5) / 2, -2 * 2 / 2], rtol=1e-6)


@pytest.mark.parametrize("sizes", [[], [4, 2], [2, 2], range(1, 200)])
def test_sizes_that_do_not_ascend_are_refused(sizes):
    with pytest.raises(ValueError, match=r"sizes must be 1 to 128 different numbers in ascending"):
        join_batches([], data_mesh(1), sizes=sizes)


def test_bad_sizes_and_larger_batches_are_refused():
    with pytest.raises(ValueError, match=r"sizes must be .* at least 1, got 0\. They are rows per"):
        join_batches([], data_mesh(1), sizes=[0, 4])
    with pytest.raises(TypeError, match=r"sizes must be .*, got 1\.5"):
        join_batches([], data_mesh(1), sizes=[1.5])
    with pytest.raises(RuntimeError, match=r"at most 4 rows per rank, the largest of sizes, got 5"):
        list(join_batches([stream(1), stream(5)], data_mesh(2), sizes=[2, 4]))
    joined = join_batches(stream(2, 9), data_mesh(2), sizes=[2, 4])
    next(joined)
    with pytest.raises(
        RuntimeError, match=r"at step 1 .*at most the 8 rows .*largest of sizes.* 9"
    ):
        next(joined)


# --- other ways to end ----------------------------------------------------------------------------


def steps_of(*streams, convention, **options):
    joined = join_batches(list(streams), data_mesh(len(streams)), convention=convention, **options)
    return [counted(batch) for batch in joined]


def test_all_stop_with_the_shortest():
    found = steps_of(stream(2, 2, 2), stream(1, 2, first=10), convention="shortest")
    assert found == [[0, 1, 10], [2, 3, 11, 12]]
    assert steps_of(stream(2), [], convention="shortest") == []
    assert steps_of([], [], convention="shortest") == []
    # a batch of no rows is no end
    assert steps_of(stream(1, None, 1), stream(1, 1, 1, 1, first=10), convention="shortest") == [
        [0, 10],
        [11],
        [1, 12],
    ]
    assert steps_of(iter(stream(1, 1)), iter(stream(1)), convention="shortest") == [[0, 0]]


def test_short_streams_begin_again_until_all_are_through():
    found = steps_of(
        stream(2, 1), stream(1, 1, 1, 1, 1, first=10), stream(1, first=20), convention="cycle"
    )
    assert found == [
        [0, 1, 10, 20],
        [2, 11, 20],
        [0, 1, 12, 20],
        [2, 13, 20],
        [0, 1, 14, 20],
    ]
    assert steps_of(stream(1, 1), [], convention="cycle") == [[0], [1]]
    assert steps_of([], [], convention="cycle") == []
    assert steps_of(stream(None, None), stream(1, 1, 1), convention="cycle") == [[0], [1], [2]]
    assert steps_of(stream(1, None), stream(1, 1, 1, first=5), convention="cycle") == [
        [0, 5],
        [6],
        [0, 7],
    ]


def test_a_stream_that_begins_again_makes_room_for_its_rows():
    found = steps_of(
        stream(4, 1), stream(1, 1, 1, 1, first=10), convention="cycle", sizes=[1, 2, 4]
    )
    assert found == [[0, 1, 2, 3, 10], [4, 11], [0, 1, 2, 3, 12], [4, 13]]


class Loader:
    def __init__(self, times):
        self.times = times

    def __iter__(self):
        self.times -= 1
        return iter(stream(1) if self.times >= 0 else [])


def test_what_cannot_begin_again_is_refused():
    with pytest.raises(TypeError, match=r"must begin again with .*cycle.*, got generator, which"):
        join_batches([(b for b in stream(1)), stream(1)], data_mesh(2), convention="cycle")
    with pytest.raises(TypeError, match=r"got list_iterator, which can be read but once"):
        join_batches(iter(stream(1)), data_mesh(1), convention="cycle")
    assert steps_of(Loader(9), stream(1, 1), convention="cycle") == [[0, 0], [0, 1]]
    with pytest.raises(RuntimeError, match=r"rank 0 .*ValueError: .* no batch the second time"):
        steps_of(Loader(1), stream(1, 1), convention="cycle")


@pytest.mark.parametrize("convention", ["shortest", "cycle"])
def test_a_failure_is_told_under_every_convention(convention):
    class Breaking:
        def __iter__(self):
            yield from stream(1)
            raise OSError("disk gone")

    joined = join_batches([stream(1, 1, 1), Breaking()], data_mesh(2), convention=convention)
    next(joined)
    with pytest.raises(RuntimeError, match=r"failed at step 1 on rank 1 .*OSError: disk gone"):
        next(joined)
