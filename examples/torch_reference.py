"""One model trained by torch's DistributedDataParallel and by this library, step by step.

Real processes, real DDP over gloo, on the CPU. Both sides start from the same weights and read the
same examples in torch's own order; 101 examples divide neither by the ranks nor by the batches.

a. torch, written right (a sum, divided by the global weight): equal to ours in every step.
b. torch as usual (each rank's mean, which DDP averages): named, and what each example counted.
c. torch's join, for ranks that run out of data at different times: the same.

    python examples/torch_reference.py [--record FILE]

`--record` writes down what torch gave. The suite reads tests/recorded/torch_reference.json, so that
it can compare without torch.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

import numpy as np

import jax_ddp_weighting as jdw

EXAMPLES, FEATURES, HIDDEN, CLASSES = 101, 6, 8, 4
ROWS, SEED = 4, 3  # rows per rank and step
EPOCHS = {2: 3, 3: 4}  # by the number of ranks: 39 steps and 36
RATE, MOMENTUM = 0.1, 0.9
ALLOWED = {"float32": 1e-5, "float64": 1e-10}

_RNG = np.random.RandomState(0)
X = _RNG.normal(size=(EXAMPLES, FEATURES))
Y = _RNG.randint(CLASSES, size=EXAMPLES)
IMPORTANCE = _RNG.choice([0.5, 1.0, 2.0], size=EXAMPLES)  # fractional weights, in (a)
START = {
    "w1": _RNG.normal(size=(FEATURES, HIDDEN)) / 2,
    "b1": _RNG.normal(size=HIDDEN) / 4,
    "w2": _RNG.normal(size=(HIDDEN, CLASSES)) / 2,
    "b2": _RNG.normal(size=CLASSES) / 4,
}
STREAMS = {rank: [rank + 2] * (rank + 1) for rank in range(3)}  # (c): rows of each rank's steps


def plan_of(ranks):
    """Who reads what: torch's order, no example twice, the last step of an epoch uneven."""
    return jdw.EpochPlan(EXAMPLES, ranks, ROWS, seed=SEED, order="torch", tail="mask")


def flat(gradient):
    """A gradient as one list, leaves in the order of their names."""
    return np.concatenate([np.asarray(gradient[name]).reshape(-1) for name in START]).tolist()


def unflat(values):
    """The gradient again."""
    edges = np.cumsum([leaf.size for leaf in START.values()])[:-1]
    parts = np.split(np.asarray(values), edges)
    return {name: part.reshape(START[name].shape) for name, part in zip(START, parts, strict=True)}


def stream_ids(step, rank):
    """(c): the examples that a rank reads at a step; none once it has run out."""
    if step >= len(STREAMS[rank]):
        return np.zeros(0, int)
    first = sum(sum(rows) for other, rows in STREAMS.items() if other < rank)
    return first + sum(STREAMS[rank][:step]) + np.arange(STREAMS[rank][step])


# --- ours -----------------------------------------------------------------------------------------


def example_loss(params, x, y):
    """Cross entropy of one row, or of many."""
    import jax
    import jax.numpy as jnp

    hidden = jnp.tanh(x @ params["w1"] + jnp.broadcast_to(params["b1"], (*x.shape[:-1], HIDDEN)))
    logits = hidden @ params["w2"] + jnp.broadcast_to(params["b2"], (*x.shape[:-1], CLASSES))
    picked = jnp.take_along_axis(logits, y[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - picked


def train_ours(ranks, dtype, value_and_grad=jdw.value_and_grad):
    """Losses `[steps]` and gradients `[steps][parameters]`, on a mesh of `ranks` devices."""
    import jax
    import optax
    from jax.sharding import PartitionSpec as P

    def loss_fn(params, batch):
        x, y, importance = batch.data
        return jdw.weighted_sum(example_loss(params, x, y), importance * batch.weights)

    def fetch(ids):
        return X[ids].astype(dtype), Y[ids].astype(np.int32), IMPORTANCE[ids].astype(dtype)

    with jax.enable_x64(dtype == "float64"):
        mesh = jdw.data_mesh(ranks)
        in_specs = P(), P("data")
        gradient = jax.jit(
            jax.shard_map(
                value_and_grad(loss_fn, axis_name="data"),
                mesh=mesh,
                in_specs=in_specs,
                out_specs=P(),
            )
        )
        optimizer = optax.sgd(RATE, momentum=MOMENTUM)
        params = {name: jax.numpy.asarray(leaf, dtype) for name, leaf in START.items()}
        state = optimizer.init(params)
        losses, gradients = [], []
        for epoch in range(EPOCHS[ranks]):
            for batch in jdw.batches(plan_of(ranks), epoch, fetch, mesh, prefetch=0):
                loss, grads = gradient(params, batch)
                updates, state = optimizer.update(grads, state)
                params = optax.apply_updates(params, updates)
                losses.append(float(loss.value))
                gradients.append(flat(grads))
    return losses, gradients


def counted(gradient, ids_of_rank):
    """What each row counted in a gradient at the starting weights, and weights, in a grid."""
    ids = np.concatenate(ids_of_rank)
    own = jdw.per_example_gradients(
        lambda params, row: example_loss(params, *row), START, (X[ids], Y[ids].astype(np.int32))
    )
    solved = iter(jdw.effective_weights(unflat(gradient), own))
    shape = len(ids_of_rank), 1, max(len(each) for each in ids_of_rank)
    counts, weights = np.zeros(shape), np.zeros(shape)
    for rank, rank_ids in enumerate(ids_of_rank):
        for row in range(len(rank_ids)):
            counts[rank, 0, row], weights[rank, 0, row] = next(solved), 1
    return counts, weights


# --- torch's: each of these runs in every process -------------------------------------------------


def torch_model(dtype):
    """The model and its loss in torch; `ddp` wraps it."""
    import torch

    class Network(torch.nn.Module):
        """The same numbers under the same names."""

        def __init__(self):
            super().__init__()
            for name, leaf in START.items():
                leaf = torch.nn.Parameter(torch.tensor(leaf, dtype=getattr(torch, dtype)))
                self.register_parameter(name, leaf)

        def forward(self, x):
            return torch.tanh(x @ self.w1 + self.b1) @ self.w2 + self.b2

    return Network()


def tensors(ids, dtype):
    """Inputs, labels and weights of some examples."""
    import torch

    kind = getattr(torch, dtype)
    importance = torch.tensor(IMPORTANCE[ids], dtype=kind)
    return torch.tensor(X[ids], dtype=kind), torch.tensor(Y[ids]), importance


def torch_gradient(model):
    """The gradient that DDP has left in the parameters."""
    return flat({name: leaf.grad.numpy() for name, leaf in model.module.named_parameters()})


def train_torch(rank, ranks, dtype):
    """(a) A sum per rank, times the ranks, over the global weight; DDP averages what results."""
    import torch
    from torch import distributed as dist
    from torch.nn.functional import cross_entropy

    model = torch.nn.parallel.DistributedDataParallel(torch_model(dtype))
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
    sampler = jdw.DistributedSampler(EXAMPLES, ranks, rank, seed=SEED, tail="mask")
    loader = torch.utils.data.DataLoader(range(EXAMPLES), batch_size=ROWS, sampler=sampler)
    losses, gradients = [], []
    for epoch in range(EPOCHS[ranks]):
        sampler.set_epoch(epoch)
        for ids in loader:
            x, y, importance = tensors(ids.numpy(), dtype)
            optimizer.zero_grad()
            total = (cross_entropy(model(x), y, reduction="none") * importance).sum()
            sums = torch.stack([total.detach(), importance.sum()])
            dist.all_reduce(sums)
            (total * ranks / sums[1]).backward()
            optimizer.step()
            losses.append(float(sums[0] / sums[1]))
            gradients.append(torch_gradient(model))
    return losses, gradients


def usual_torch(rank, ranks):
    """(b) The mean of each rank's rows, averaged by DDP: the uneven last step of epoch 0."""
    import torch
    from torch.nn.functional import cross_entropy

    model = torch.nn.parallel.DistributedDataParallel(torch_model("float64"))
    x, y, _ = tensors(last_ids(ranks)[rank], "float64")
    cross_entropy(model(x), y).backward()
    return torch_gradient(model)


def last_ids(ranks):
    """The examples of each rank in the last step of epoch 0."""
    plan = plan_of(ranks)
    slots = plan.batch(0, plan.steps_per_epoch - 1)
    return [ids[weights > 0] for ids, weights in zip(slots.ids, slots.weights, strict=True)]


def joined_torch(rank, by_initial):
    """(c) Ranks that run out after 1, 2 and 3 steps: the gradients that the last one applies."""
    import torch
    from torch.nn.functional import cross_entropy

    model = torch.nn.parallel.DistributedDataParallel(torch_model("float64"))
    gradients = []
    with model.join(divide_by_initial_world_size=by_initial):
        for step in range(len(STREAMS[rank])):
            x, y, _ = tensors(stream_ids(step, rank), "float64")
            model.zero_grad()
            cross_entropy(model(x), y).backward()
            gradients.append(torch_gradient(model))
    return gradients


def joined_powers(rank, by_initial):
    """(c) A single weight whose gradient is 10 ** rank."""
    import torch

    model = torch.nn.Linear(1, 1, bias=False, dtype=torch.float64)
    model = torch.nn.parallel.DistributedDataParallel(model)
    gradients = []
    with model.join(divide_by_initial_world_size=by_initial):
        for _ in STREAMS[rank]:
            model.zero_grad()
            model(torch.full((1, 1), 10.0**rank, dtype=torch.float64)).sum().backward()
            gradients.append(float(model.module.weight.grad))
    return gradients


def torch_process(rank, ranks, folder):
    """All of it, in one of several processes; the last rank writes down what it found."""
    import torch
    from torch import distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks
    )
    found = {"right": {}, "usual": usual_torch(rank, ranks)}
    for dtype in ALLOWED:
        losses, gradients = train_torch(rank, ranks, dtype)
        steps = {str(step): gradient for step, gradient in enumerate(gradients)}
        found["right"][dtype] = {"losses": losses, "gradients": steps}
    if ranks == len(STREAMS):
        for name, by_initial in (("initial_ranks", True), ("active_ranks", False)):
            found[name] = joined_torch(rank, by_initial)
            found[f"{name} of powers"] = joined_powers(rank, by_initial)
    if rank == ranks - 1:
        Path(folder, "found.json").write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)  # gloo's threads may abort an interpreter that is taken down in the usual way


def run_torch(ranks):
    """What torch gives with so many processes."""
    from torch import multiprocessing

    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(torch_process, args=(ranks, folder), nprocs=ranks)
        return json.loads(Path(folder, "found.json").read_text())


# --- both -----------------------------------------------------------------------------------------


def difference(ours, torchs):
    """The largest difference, relative to torch's largest number."""
    ours, torchs = np.asarray(ours), np.asarray(torchs)
    return float(np.max(np.abs(ours - torchs)) / np.max(np.abs(torchs)))


def compared(ours, torchs):
    """(a) The worst difference of a loss, and of a gradient, over all steps."""
    losses, gradients = ours
    of_steps = [difference(gradients[int(k)], each) for k, each in torchs["gradients"].items()]
    return difference(losses, torchs["losses"]), max(of_steps)


def diagnosed(found, ranks):
    """(b) and (c) Named, with what each example counted, by what torch did."""
    import jax

    with jax.enable_x64(True):
        named = {"usual": jdw.diagnose_weights(*counted(found["usual"], last_ids(ranks)))}
        for name in ("initial_ranks", "active_ranks"):
            if name in found:  # the step at which one rank of three has run out
                ids = [stream_ids(1, rank) for rank in range(ranks)]
                named[name] = jdw.diagnose_weights(*counted(found[name][1], ids))
    return named


def recorded(found, ranks):
    """What is worth keeping: every loss; the gradients of the first, the uneven, the last step."""
    last = plan_of(ranks).steps_per_epoch * EPOCHS[ranks] - 1
    steps = "0", str(plan_of(ranks).steps_per_epoch - 1), str(last)
    right = {
        dtype: each | {"gradients": {step: each["gradients"][step] for step in steps}}
        for dtype, each in found["right"].items()
    }
    return found | {"right": right}


def main():
    """Runs both and prints what comes of it; returns how many comparisons failed."""
    jdw.force_cpu_devices(max(EPOCHS))
    record, wrong = {}, 0
    for ranks, epochs in EPOCHS.items():
        found = run_torch(ranks)
        tail = " + ".join(str(len(ids)) for ids in last_ids(ranks))
        print(f"{ranks} processes, {epochs} epochs, {ranks} x {ROWS} rows; last steps of {tail}")
        for dtype, torchs in found["right"].items():
            loss, gradient = compared(train_ours(ranks, dtype), torchs)
            print(
                f"  a. torch, written right, {dtype}: {len(torchs['losses'])} steps, losses within "
                f"{loss:.1e} of ours, gradients within {gradient:.1e}"
            )
            wrong += max(loss, gradient) > ALLOWED[dtype]
        for name, diagnosis in diagnosed(found, ranks).items():
            letter = "b. torch as usual" if name == "usual" else f"c. torch's join, {name}"
            print(f"  {letter}: {diagnosis.convention}, factor {diagnosis.factor:.4g}")
            rows = zip(diagnosis.counted[:, 0], diagnosis.weights[:, 0], strict=True)
            for rank, (counts, weights) in enumerate(rows):
                shown = " ".join(f"{each:.4f}" for each in counts[weights > 0])
                print(f"     rank {rank}: each example counts {shown or 'nothing: it has run out'}")
            print(f"     right: {1 / diagnosis.weights.sum():.4f} each")
        for name in ("initial_ranks", "active_ranks"):
            if name in found:
                powers = " ".join(f"{each:.2f}" for each in found[f"{name} of powers"])
                print(f"  c. gradients 1, 10, 100 of ranks with 1, 2, 3 steps, {name}: {powers}")
        record[str(ranks)] = recorded(found, ranks)
    if "--record" in sys.argv:
        import torch

        about = (
            "What torch's DistributedDataParallel over gloo gave in examples/torch_reference.py, "
            "by number of processes. Gradients are laid out as its `flat` does."
        )
        document = {"about": about, "torch": torch.__version__.split("+")[0], "ranks": record}
        Path(sys.argv[sys.argv.index("--record") + 1]).write_text(json.dumps(document) + "\n")
    return wrong


if __name__ == "__main__":
    sys.exit(main())
