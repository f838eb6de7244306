"""Rows in another machine's byte order, as HDF5, IDX and FITS files hold them: the same numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_ddp_weighting import (
    Batch,
    EpochPlan,
    batches,
    data_mesh,
    evaluate,
    global_batch,
    join_batches,
    make_optax_epoch,
    make_optax_step,
    value_and_grad,
    weighted_sum,
)
from jax_ddp_weighting.distributed.placement import RankPlacement

SWAPPED = np.dtype(np.float32).newbyteorder().str[0]  # ">" on nearly every machine
PLAN = EpochPlan(4, 2, 1, shuffle=False)
DTYPES = ["f4", "f8", "f2", "i2", "i4", "i8", "u4", "c8"]


def rows_of(dtype):
    return {"x": np.arange(4).astype(SWAPPED + dtype), "y": np.ones((4, 3), SWAPPED + dtype)}


def own_batch(rows):
    order = SWAPPED + "i4", SWAPPED + "f4"
    return Batch(rows, np.arange(4).astype(order[0]), np.array([1, 1, 1, 0]).astype(order[1]))


def read_plan(rows):
    fetched = batches(PLAN, 0, lambda ids: {name: leaf[ids] for name, leaf in rows.items()}, MESH)
    return [x for batch in fetched for x in batch.data["x"].tolist()]


MESH = data_mesh(2)
READERS = {
    "batches": read_plan,
    "join_batches": lambda rows: next(join_batches([own_batch(rows)], MESH)).data["x"].tolist(),
    "votes": lambda rows: (
        next(join_batches([own_batch(rows)], MESH, convention="initial_ranks")).data["x"].tolist()
    ),
    "global_batch": lambda rows: global_batch(own_batch(rows), MESH).data["x"].tolist(),
    "Batch.of": lambda rows: jax.jit(lambda batch: batch.data["x"])(Batch.of(rows)).tolist(),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reader", READERS)
def test_the_numbers_arrive_whatever_their_byte_order(reader, dtype):
    assert READERS[reader](rows_of(dtype)) == [0, 1, 2, 3]


def test_they_arrive_where_a_transfer_is_the_copy(monkeypatch):
    # as on a GPU, which does not read the host's memory
    monkeypatch.setattr(RankPlacement, "_shares_host_memory", False)
    for dtype in DTYPES:
        assert read_plan(rows_of(dtype)) == [0, 1, 2, 3]


def error_of(params, batch):
    return weighted_sum((batch.data["x"] - params) ** 2, batch.weights)


def test_steps_epochs_and_metrics_read_them_too():
    rows = rows_of("f4")
    params = np.array(1.0, SWAPPED + "f4")

    def metric(params, batch):
        return {"error": error_of(params, batch)}

    assert evaluate(metric, [own_batch(rows)], MESH, params=params)["error"] == pytest.approx(2 / 3)
    optimizer = optax.sgd(0.5)
    step = make_optax_step(error_of, optimizer, MESH)
    native = {name: leaf.astype("f4") for name, leaf in rows.items()}
    found = step(params, optimizer.init(jnp.float32(1)), own_batch(rows))
    weights = np.array([1, 1, 1, 0], np.float32)
    right = step(jnp.float32(1), optimizer.init(jnp.float32(1)), Batch.of(native, weights))
    assert found[0] == right[0]
    grads = value_and_grad(error_of, axis_name=None)(jnp.float32(1), Batch.of(rows, weights))
    assert grads[0].value == pytest.approx(2 / 3)
    epoch = make_optax_epoch(error_of, optimizer, MESH, PLAN)
    ended = [
        epoch(jnp.float32(1), optimizer.init(jnp.float32(1)), data, 0)[0] for data in (rows, native)
    ]
    assert ended[0] == ended[1]


def test_numbers_that_no_device_has_are_named():
    wide = {"x": np.ones(4, np.longdouble)}
    for read in (read_plan, lambda rows: global_batch(Batch(rows, *[np.ones(4, int)] * 2), MESH)):
        with pytest.raises(TypeError, match=r"data\['x'\] must be of a dtype that devices have, g"):
            read(wide)
