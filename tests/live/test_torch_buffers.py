"""Torch's own memory: tensors that are written again after they were handed over."""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from jax_ddp_weighting import Batch, EpochPlan, batches, data_mesh, join_batches

TENSORS = {
    "plain": lambda *shape: torch.zeros(*shape),
    "shared": lambda *shape: torch.zeros(*shape).share_memory_(),
}


@pytest.fixture(params=TENSORS)
def tensor(request):
    return TENSORS[request.param](8, 16)


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_a_fetch_that_refills_one_tensor(tensor, prefetch):
    def fetch(ids):
        tensor.copy_(torch.tensor(ids)[:, None])
        return tensor

    for batch in list(batches(EpochPlan(46, 2, 4), 0, fetch, data_mesh(2), prefetch=prefetch)):
        rows = np.repeat(np.asarray(batch.ids)[:, None], 16, axis=1)
        np.testing.assert_array_equal(batch.data, rows)


def test_a_stream_that_refills_one_tensor(tensor):
    def stream():
        for step in range(6):
            tensor.fill_(step)
            yield Batch.of(tensor, ids=np.full(8, step))

    for step, batch in enumerate(list(join_batches(stream(), data_mesh(2)))):
        assert np.unique(np.asarray(batch.data)).tolist() == [step]


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_of_a_loader_with_workers(workers):
    context = "spawn" if workers else None  # JAX has threads, which a fork would not copy
    loader = DataLoader(
        torch.arange(64.0), batch_size=8, num_workers=workers, multiprocessing_context=context
    )

    def stream():
        for step, rows in enumerate(loader):
            yield Batch.of(rows, ids=np.arange(8) + 8 * step)
            rows.zero_()  # the consumer's to write, once it has asked for more

    for batch in list(join_batches(stream(), data_mesh(1))):
        np.testing.assert_array_equal(batch.data, batch.ids)
