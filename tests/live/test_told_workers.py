"""Streams behind torch's loaders whose workers stay, begin again, or batch otherwise than told."""

import numpy as np
import pytest
from torch.utils.data import DataLoader
from torch_workers import SPAWN, STOPPED
from torchdata.stateful_dataloader import StatefulDataLoader

from jax_ddp_weighting import Batch, DistributedSampler, ShardedIterable, data_mesh, join_batches

# torchdata 0.11 makes a call that torch 2.13 has deprecated
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")

STATE = {"version": 1, "epoch": 1, "position": 8}


def of_epoch(epoch):
    return list(range(100 * epoch, 100 * epoch + 12))


def read(loader):
    return [i for batch in loader for i in batch.tolist()]


@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
def test_workers_that_stay_are_told_of_epochs_and_places(kind):
    share = ShardedIterable(of_epoch, 1, 0, batch_size=2)
    loader = kind(share.torch_dataset(), batch_size=2, persistent_workers=True, **SPAWN)
    for epoch in (0, 1, 3):
        share.set_epoch(epoch)
        assert read(loader) == of_epoch(epoch)
    share.load_state_dict(STATE)
    assert read(loader) == of_epoch(1)[8:]
    assert share.state_dict(consumed=2)["position"] == 10  # of the rest
    assert read(loader) == of_epoch(1)
    assert share.state_dict(consumed=2)["position"] == 2  # of a pass from the start


@pytest.mark.parametrize("workers", [0, 2])
def test_only_the_first_pass_after_a_resume_is_the_rest(workers):
    share = ShardedIterable(of_epoch, 1, 0, batch_size=2)
    share.load_state_dict(STATE)
    loader = DataLoader(share.torch_dataset(), batch_size=2, **(SPAWN if workers else {}))
    assert [read(loader) for _ in range(3)] == [of_epoch(1)[8:], of_epoch(1), of_epoch(1)]
    assert share.state_dict(consumed=4)["position"] == 4


def test_a_state_of_batches_in_another_order_is_refused():
    def begin(told, made):
        share = ShardedIterable(of_epoch, 1, 0, batch_size=told)
        return share, next(iter(DataLoader(share.torch_dataset(), batch_size=made, **STOPPED)))

    share, first = begin(4, 4)
    assert first == of_epoch(0)[: share.state_dict(consumed=4)["position"]]
    share, first = begin(1, 4)
    assert first == [0, 2, 4, 6]  # no beginning of the stream
    with pytest.raises(
        ValueError, match=r"batch_size must be the loader's .* got 1 and batches of 4"
    ):
        share.state_dict(consumed=4)


@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_that_is_read_ahead_by_join_batches_asks_for_what_was_used(kind, workers):
    sampler = DistributedSampler(12, 1, 0, tail="mask", shuffle=False)
    options = {**SPAWN, "num_workers": 1} if workers else {}
    loader = kind(range(12), batch_size=2, sampler=sampler, **options)
    stream = (Batch.of(np.float32(ids), ids=ids.numpy()) for ids in loader)
    for step, batch in enumerate(join_batches(stream, data_mesh(1)), start=1):
        used = 2 * step
        assert batch.ids.tolist() == [used - 2, used - 1]
        if step < 6:
            with pytest.raises(ValueError, match="consumed must be given where ids are read ahead"):
                sampler.state_dict()
            if kind is StatefulDataLoader and not workers:
                with pytest.raises(ValueError, match=r"read ahead .* here by join_batches"):
                    loader.state_dict()
        assert sampler.state_dict(consumed=used)["position"] == used
    assert sampler.state_dict()["position"] == 12
