"""Masked arrays, as readers of netCDF and tables give them: nobody but numpy.ma heeds a mask."""

import tempfile

import numpy as np
import pytest

from jax_ddp_weighting import (
    Batch,
    EpochPlan,
    Ledger,
    audit_ids,
    batches,
    data_mesh,
    evaluate,
    gather_by_id,
    weighted_order,
    weighted_sum,
    write_part,
)

MESH = data_mesh(1)
PLAN = EpochPlan(4, 1, 4, shuffle=False)
HELD = Batch.of(np.arange(4.0))


def read(rows):
    return next(batches(PLAN, 0, lambda ids: {"x": rows[ids]}, MESH))


def measure(rows):
    batch = Batch(rows, HELD.ids, HELD.weights)
    return evaluate(lambda batch: {"x": weighted_sum(batch.data, batch.weights)}, [batch], MESH)


def predict(rows):
    return gather_by_id(np.arange(4), None, {"x": rows})


TAKEN = {
    "batches: data['x']": read,
    "Batch.of: data": Batch.of,
    "Batch.of: weights": lambda rows: Batch.of(np.ones(4), rows),
    "Batch.of: ids": lambda rows: Batch.of(np.ones(4), ids=rows.astype(int)),
    "evaluate: data": measure,
    "gather_by_id: predictions['x']": predict,
    "gather_by_id: weights": lambda rows: gather_by_id(np.arange(4), rows, np.ones(4)),
    "gather_by_id: ids": lambda rows: gather_by_id(rows.astype(int), None, np.ones(4)),
    "write_part: predictions": lambda rows: write_part(
        tempfile.mkdtemp(), np.arange(4), None, rows
    ),
    "audit_ids: ids": lambda rows: audit_ids(rows.astype(int), 4),
    "audit_ids: weights": lambda rows: audit_ids(np.arange(4), 4, weights=rows),
    "Ledger.add: ids": lambda rows: Ledger(4).add(rows.astype(int)),
    "Ledger.add: weights": lambda rows: Ledger(4).add(np.arange(4), rows),
    "weighted_order: weights": lambda rows: weighted_order(rows, 4),
}


@pytest.mark.parametrize("argument", TAKEN)
def test_masked_values_are_refused_and_plain_ones_of_a_masked_array_are_taken(argument):
    values = np.arange(4.0)
    take = TAKEN[argument]
    take(np.ma.array(values, mask=False))  # as readers give them where nothing is missing
    take(np.ma.array(values))
    with pytest.raises(TypeError, match=r" must not be masked, got 1 of 4 values so\. ") as caught:
        take(np.ma.array(values, mask=[0, 0, 1, 0]))
    assert str(caught.value).startswith(argument)


def test_a_masked_array_without_masked_values_is_its_values():
    rows = np.ma.array(np.arange(4, dtype=np.float32))
    assert read(rows).data["x"].tolist() == [0, 1, 2, 3]
    assert predict(rows).predictions["x"].tolist() == [0, 1, 2, 3]
    assert type(predict(rows).predictions["x"]) is np.ndarray
