"""Rows belong to their ids, whatever their owner writes into its memory afterwards."""

import mmap

import jax
import numpy as np
import pytest

from jax_ddp_weighting import Batch, EpochPlan, batches, data_mesh, join_batches
from jax_ddp_weighting.distributed import placement

# XLA's CPU client takes memory on this boundary as it is, and copies any other in its own time.
BOUNDARY = 64


def on_boundary(shape, dtype, *, offset=0):
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    memory = np.zeros(size + 2 * BOUNDARY, np.uint8)
    start = -memory.ctypes.data % BOUNDARY + offset
    return memory[start : start + size].view(dtype).reshape(shape)


def mapped_file(shape, dtype, folder):
    path = folder / str(len(list(folder.iterdir())))
    path.write_bytes(bytes(int(np.prod(shape)) * np.dtype(dtype).itemsize))
    return np.memmap(path, dtype, "r+", shape=shape)


def shared_memory(shape, dtype, folder):
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.frombuffer(mmap.mmap(-1, size), dtype).reshape(shape)


BUFFERS = {
    "aligned": lambda shape, dtype, folder: on_boundary(shape, dtype),
    "not aligned": lambda shape, dtype, folder: on_boundary(shape, dtype, offset=16),
    "plain": lambda shape, dtype, folder: np.zeros(shape, dtype),
    "mapped": mapped_file,
    "shared": shared_memory,
}


@pytest.fixture(params=BUFFERS)
def make_buffer(request, tmp_path):
    return lambda shape, dtype=np.float32: BUFFERS[request.param](shape, dtype, tmp_path)


def check_rows(found, width=2):
    """Row j of every batch is its id, `width` times."""
    for batch in found:
        rows, ids = np.asarray(batch.data), np.asarray(batch.ids)
        np.testing.assert_array_equal(rows, np.repeat(ids[:, None], width, axis=1))


def consume(stream, kept):
    """Checks batches one by one as they come, or all of them at the end."""
    if kept:
        check_rows(list(stream))
    else:
        for batch in stream:
            check_rows([batch])


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("prefetch", [0, 1, 2])
@pytest.mark.parametrize("ranks", [1, 4])
def test_a_fetch_that_refills_one_buffer(make_buffer, ranks, prefetch, kept):
    plan = EpochPlan(46, num_replicas=ranks, batch_size=8 // ranks, seed=3)
    buffer = make_buffer((8, 2))

    def fetch(ids):
        buffer[:] = np.asarray(ids)[:, None]
        return buffer

    consume(batches(plan, 0, fetch, data_mesh(ranks), prefetch=prefetch), kept)


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_stream_that_refills_one_buffer(make_buffer, ranks, kept):
    buffer, ids = make_buffer((4, 2)), make_buffer((4,), np.int32)

    def stream():
        for step in range(6):
            ids[:] = 4 * step + np.arange(4)
            buffer[:] = ids[:, None]
            yield Batch.of(buffer, ids=ids)
        buffer[:] = ids[:] = -1

    consume(join_batches(stream(), data_mesh(ranks)), kept)


def test_streams_that_share_one_buffer(make_buffer):
    buffer = make_buffer((4, 2))

    def stream(rank, steps):
        for step in range(steps):
            ids = 100 * rank + 4 * step + np.arange(4)
            buffer[:] = ids[:, None]
            yield Batch.of(buffer, ids=ids)

    found = list(join_batches([stream(0, 2), stream(1, 5)], data_mesh(2)))
    check_rows(found)
    assert [int(batch.weights.sum()) for batch in found] == [8, 8, 4, 4, 4]


def test_large_rows_that_jax_would_copy_in_a_thread_of_its_own():
    buffer = on_boundary((4, 1 << 20), np.float32, offset=16)

    def stream():
        for step in range(4):
            buffer[:] = step
            yield Batch.of(buffer, ids=np.full(4, step))

    for batch in join_batches(stream(), data_mesh(1)):
        assert np.unique(batch.data).tolist() == [int(batch.ids[0])]


def test_weights_that_are_written_again_stay_as_they_were():
    weights = on_boundary((4,), np.float32)

    def stream():
        for step in range(1, 4):
            weights[:] = step
            yield Batch.of(np.zeros(4), weights)

    found = list(join_batches(stream(), data_mesh(1)))
    assert [batch.weights.tolist() for batch in found] == [[1] * 4, [2] * 4, [3] * 4]


def test_the_check_can_fail(monkeypatch):
    # without a copy of our own, rows on the boundary are their owner's
    monkeypatch.setattr(placement, "copy_aligned", lambda rows: rows)
    buffer = on_boundary((8, 2), np.float32)

    def fetch(ids):
        buffer[:] = ids[:, None]
        return buffer

    stream = batches(EpochPlan(48, 1, 8), 0, fetch, data_mesh(1), prefetch=0)
    with pytest.raises(AssertionError, match="not equal"):
        check_rows(list(stream))


def test_rows_are_copied_once():
    rows = np.random.default_rng(0).normal(size=(8, 1024)).astype(np.float32)
    shards = [placement.copy_aligned(each) for each in np.split(rows, 4)]
    layout = placement.RankPlacement.here(data_mesh(4), "data", caller="test")
    placed = layout.place_shards(shards)
    for shard, own in zip(placed.addressable_shards, shards, strict=True):
        # JAX has taken the copy as it is, and made none of its own
        assert shard.data.unsafe_buffer_pointer() == own.ctypes.data


# --- the ids that fetch is given ------------------------------------------------------------------

PIXELS = np.arange(47, dtype=np.float32)


@pytest.mark.parametrize("change", [np.ndarray.sort, lambda ids: ids.__setitem__(0, 3)])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_the_ids_given_to_fetch_cannot_be_written(change, prefetch):
    def fetch(ids):
        change(ids)
        return PIXELS[ids]

    plan = EpochPlan(47, num_replicas=1, batch_size=4)
    with pytest.raises(ValueError, match="read-only"):
        next(batches(plan, 0, fetch, data_mesh(1), prefetch=prefetch))


def test_the_ids_given_to_fetch_cannot_be_made_writable():
    def fetch(ids):
        ids.flags.writeable = True
        return PIXELS[ids]

    with pytest.raises(ValueError, match="cannot set WRITEABLE flag"):
        next(batches(EpochPlan(47, 1, 4), 0, fetch, data_mesh(1), prefetch=0))


def test_a_sorted_copy_of_the_ids_changes_nothing_else():
    def fetch(ids):
        ascending = ids.copy()
        ascending.sort()
        found = PIXELS[ascending]
        return found[np.searchsorted(ascending, ids)]

    plan = EpochPlan(47, num_replicas=2, batch_size=4)
    seen = []
    for batch in batches(plan, 0, fetch, data_mesh(2)):
        np.testing.assert_array_equal(batch.data, batch.ids)
        seen += np.asarray(batch.ids)[np.asarray(batch.weights) > 0].tolist()
    assert sorted(seen) == list(range(47))


# --- what a device would cut ----------------------------------------------------------------------

KEYS = np.array([2**40 + 1, 2**41 + 2, 7])
CUT = [
    (KEYS, r"data\['keys'\] must be of at most 32 bits while x64 is off, got 2199023255554"),
    (-KEYS, r"data\['keys'\] must be of at most 32 bits .* got -2199023255554"),
    (KEYS.astype(np.uint64), r"data\['keys'\] must be of at most 32 bits"),
    (np.array([2**31, 0, 1]), r".* at most 32 bits while x64 is off, got 2147483648"),
    (np.array([1.0, -1e39, np.inf]), r".* must be within float32 while x64 is off, got 1e\+39"),
    (np.array([1, 1e300j, np.nan]), r".* must be within float32 while x64 is off, got 1e\+300"),
]


@pytest.mark.parametrize(("keys", "message"), CUT)
def test_numbers_that_a_device_would_cut_are_refused_by_name(keys, message):
    with pytest.raises(ValueError, match=f"batches: {message}"):
        next(batches(EpochPlan(3, 1, 3), 0, lambda ids: {"keys": keys[ids]}, data_mesh(1)))
    with pytest.raises(ValueError, match=f"Batch.of: {message}"):
        Batch.of({"keys": keys})
    by_hand = Batch({"keys": keys}, np.arange(3), np.ones(3, np.int32))
    with pytest.raises(RuntimeError, match=f"at step 0 on rank 0 .*join_batches: {message}"):
        next(join_batches([by_hand], data_mesh(1)))


@pytest.mark.parametrize(
    "kept",
    [
        np.array([2**31 - 1, -(2**31), 0]),
        np.array([2**32 - 1, 0, 1], np.uint64),
        np.array([3.4e38, np.inf, np.nan]),
        np.array([np.nan, np.nan, -np.inf]),
        np.zeros((3, 0), np.int64),
    ],
)
def test_numbers_that_fit_come_through(kept):
    (batch,) = batches(EpochPlan(3, 1, 3, shuffle=False), 0, lambda ids: kept[ids], data_mesh(1))
    np.testing.assert_allclose(np.asarray(batch.data, kept.dtype), kept, rtol=1e-6)
    (batch,) = join_batches([Batch.of(kept)], data_mesh(1))
    np.testing.assert_allclose(np.asarray(batch.data, kept.dtype), kept, rtol=1e-6)


def test_under_x64_nothing_is_cut():
    with jax.enable_x64(True):
        columns = {"keys": KEYS, "far": np.array([1e300, 1, 2])}
        stream = batches(
            EpochPlan(3, 1, 3, shuffle=False),
            0,
            lambda ids: {name: each[ids] for name, each in columns.items()},
            data_mesh(1),
        )
        (batch,) = stream
        assert batch.data["keys"].tolist() == KEYS.tolist()
        assert batch.data["far"].tolist() == [1e300, 1, 2]


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (np.array([2**32 + 2, 2, 1]), r"weights must be of at most 32 bits .* got 4294967298"),
        (np.array([1e39, 2, 1]), r"weights must be within float32"),
        (np.array([1e-60, 2, 1]), r"weights must be above float32's least .* got 1e-60"),
    ],
)
def test_weights_that_a_device_would_cut_are_refused(weights, message):
    with pytest.raises(ValueError, match=f"Batch.of: {message}"):
        Batch.of(np.zeros(3), weights)


def test_what_is_no_number_is_refused_by_name_and_step():
    names = np.array(["a", "b", "c"])
    stream = batches(EpochPlan(3, 1, 3), 0, lambda ids: {"name": names[ids]}, data_mesh(1))
    with pytest.raises(TypeError, match=r"data\['name'\] must be numbers, got <U1") as told:
        next(stream)
    assert told.value.__notes__ == ["batches: fetch failed at epoch 0, step 0."]
