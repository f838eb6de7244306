"""The conventions of join_batches beside torch's own Join, in processes of its own over gloo."""

import os
import socket

import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
import torch.multiprocessing
from flax.training.train_state import TrainState
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from jax_ddp_weighting import Batch, data_mesh, join_batches, make_train_step, weighted_sum

LR, MOMENTUM = 1.0, 0.9


def torch_rank(rank, port, steps, initial, found):
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=len(steps)
    )
    torch.set_num_threads(1)
    layer = torch.nn.Linear(1, 1, bias=False, dtype=torch.float64)
    torch.nn.init.zeros_(layer.weight)
    model = DistributedDataParallel(layer)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    gradients = []
    with Join([model], divide_by_initial_world_size=initial):
        for _ in range(steps[rank]):
            optimizer.zero_grad()
            model(torch.full((1, 1), 10.0**rank, dtype=torch.float64)).sum().backward()
            gradients.append(layer.weight.grad.item())
            optimizer.step()
    momentum = optimizer.state[layer.weight]["momentum_buffer"].item()
    found.put((rank, gradients, momentum))
    torch.distributed.barrier()
    os._exit(0)  # gloo's threads may abort an interpreter that is taken down in the usual way


def torchs(steps, initial):
    """Each rank's gradients, and its momentum at the end."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = torch.multiprocessing.get_context("spawn")
    found = context.SimpleQueue()
    arguments = (port, steps, initial, found)
    torch.multiprocessing.start_processes(
        torch_rank, arguments, nprocs=len(steps), start_method="spawn"
    )
    told = sorted(found.get() for _ in steps)
    return [gradients for _, gradients, _ in told], [momentum for _, _, momentum in told]


def ours(steps, convention):
    mesh = data_mesh(len(steps))
    step = make_train_step(
        lambda params, batch: weighted_sum(params["w"] * batch.data, batch.weights), mesh
    )
    tx = optax.sgd(LR, momentum=MOMENTUM)
    state = TrainState.create(apply_fn=None, params={"w": jnp.float32(0)}, tx=tx)
    streams = [[Batch.of(np.float32([10.0**r]))] * count for r, count in enumerate(steps)]
    gradients, before = [], 0.0
    for batch in join_batches(streams, mesh, convention=convention):
        state, _ = step(state, batch)
        after = float(state.opt_state[0].trace["w"])
        gradients.append(after - MOMENTUM * before)
        before = after
    return gradients, [float(s.data) for s in state.opt_state[0].trace["w"].addressable_shards]


@pytest.mark.parametrize("initial", [True, False])
def test_gradients_are_torchs_and_momentum_is_one_where_torchs_differs(initial):
    steps = (1, 3)
    theirs, their_momenta = torchs(steps, initial)
    gradients, momenta = ours(steps, "initial_ranks" if initial else "active_ranks")
    for rank, count in enumerate(steps):
        np.testing.assert_allclose(gradients[:count], theirs[rank], rtol=1e-6)
    np.testing.assert_allclose(momenta, their_momenta[1], rtol=1e-6)
    assert abs(their_momenta[0] - their_momenta[1]) > 1  # rank 0 stopped stepping
