"""torchdata's StatefulDataLoader over our samplers: stopped, saved, and gone on with."""

import pytest
from torch.utils.data import DataLoader
from torch_workers import STOPPED
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler
from torchdata.stateful_dataloader.stateful import Stateful

from jax_ddp_weighting import CoverageError, DistributedSampler, audit_ids

# torchdata 0.11 makes a call that torch 2.13 has deprecated
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")

EXAMPLES = 240


def loader_of(sampler, workers, kind=StatefulDataLoader, **options):
    # a range is a dataset whose examples are their ids, and which spawned workers know
    options |= STOPPED | {"num_workers": workers} if workers else {"collate_fn": list}
    return kind(range(EXAMPLES), batch_size=8, sampler=sampler, **options)


def sampler_of(rank, ranks, view, epoch=0):
    ours = DistributedSampler(range(EXAMPLES), ranks, rank, tail="mask", order="keyed")
    ours.set_epoch(epoch)
    return ours.torch_sampler() if view else ours


def read(batches, count=None):
    wanted = iter(batches) if count is None else (next(batches) for _ in range(count))
    return [i for batch in wanted for i in batch]


def find_positions(state):
    """Every position in a loader's nested state."""
    found = [state["position"]] if "position" in state else []
    return found + [
        each for part in state.values() if isinstance(part, dict) for each in find_positions(part)
    ]


def test_the_sampler_and_its_view_are_stateful_to_torchdata():
    assert isinstance(sampler_of(0, 2, view=False), Stateful)
    assert isinstance(sampler_of(0, 2, view=True), Stateful)


@pytest.mark.parametrize(
    ("workers", "before", "after", "view"),
    [
        (0, 3, 3, False),
        (0, 3, 4, True),
        (0, 3, 5, False),
        (0, 4, 7, False),
        (2, 2, 3, True),
    ],
)
def test_a_stopped_epoch_goes_on_with_any_ranks_and_every_id_comes_once(
    workers, before, after, view
):
    ids, states = [], []
    for rank in range(before):
        loader = loader_of(sampler_of(rank, before, view, epoch=2), workers)
        ids += read(iter(loader), 3)
        states.append(loader.state_dict())
    positions = [find_positions(state) for state in states]
    assert positions == [[3 * 8 * before]] * before  # what was received, not what was read ahead
    order = list(sampler_of(0, 1, view, epoch=2))
    rest = []
    for rank in range(after):
        sampler = sampler_of(rank, after, view)
        loader = loader_of(sampler, workers)
        loader.load_state_dict(states[0])
        rest.append(read(loader))
        assert sampler.epoch == 2
        assert rest[-1] == order[len(ids) + rank :: after]
    audit_ids([ids, *rest], EXAMPLES).check_exactly_once()


def test_torchdatas_own_sampler_loses_ids_on_other_ranks():
    """The control: each rank's own count, carried over to more ranks."""
    ids = []
    for rank in range(3):
        loader = loader_of(StatefulDistributedSampler(range(EXAMPLES), 3, rank), 0)
        ids += read(iter(loader), 3)
        state = loader.state_dict()
    for rank in range(4):
        loader = loader_of(StatefulDistributedSampler(range(EXAMPLES), 4, rank), 0)
        loader.load_state_dict(state)
        ids += read(loader)
    with pytest.raises(CoverageError, match=r"\d+ of 240 ids omitted"):
        audit_ids(ids, EXAMPLES).check_exactly_once()


def test_epochs_after_a_resumed_one_are_whole():
    loader = loader_of(sampler_of(0, 3, view=False), 0)
    first = read(iter(loader), 3)
    sampler = sampler_of(0, 3, view=False)
    resumed = loader_of(sampler, 0)
    resumed.load_state_dict(loader.state_dict())
    assert len(first) + len(read(resumed)) == 80
    sampler.set_epoch(1)
    assert read(resumed) == list(sampler_of(0, 3, view=False, epoch=1))


def test_the_sampler_itself_is_ahead_of_a_loader_with_workers():
    sampler = sampler_of(0, 3, view=False)
    loader = loader_of(sampler, 2)
    batches = iter(loader)
    read(batches, 3)
    assert loader.state_dict()  # the loader's is right, as above
    with pytest.raises(ValueError, match="consumed must be given where ids are read ahead"):
        sampler.state_dict()


def test_behind_torchs_loader_with_workers_the_first_state_says_what_it_needs():
    ids, states = [], []
    for rank in range(3):
        sampler = sampler_of(rank, 3, view=False)
        batches = iter(loader_of(sampler, 2, DataLoader))
        ids += read(batches, 3)
        with pytest.raises(ValueError, match="here by a loader with workers, got None"):
            sampler.state_dict()
        states.append(sampler.state_dict(consumed=3 * 8))
    assert states == [states[0]] * 3
    for rank in range(5):
        sampler = sampler_of(rank, 5, view=False)
        sampler.load_state_dict(states[0])
        ids += read(loader_of(sampler, 0, DataLoader))
    audit_ids(ids, EXAMPLES).check_exactly_once()


def test_an_epoch_that_torchs_loader_has_handed_out_needs_no_count():
    sampler = sampler_of(0, 3, view=False)
    assert len(read(loader_of(sampler, 2, DataLoader))) == 80
    assert sampler.state_dict()["position"] == EXAMPLES
