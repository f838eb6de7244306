"""What torch code counts, named: accumulation, DDP over real processes, and steps written down."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from jax_ddp_weighting import diagnose_torch, record
from jax_ddp_weighting.cli import app as cli

ROOT = Path(__file__).parents[2]

# --- inside one process ---------------------------------------------------------------------------


def mean_of_parts(divide):
    """Each microbatch's loss over `divide(weights, all weights)`, left in `params.grad`."""

    def gradient_of(token_loss, params, tokens, weights):
        for rank in range(len(tokens)):
            for own, counts in zip(tokens[rank], weights[rank], strict=True):
                total = (token_loss(params, own) * counts).sum()
                (total / divide(counts, weights)).backward()

    return gradient_of


def parts(weights):
    return weights.shape[0] * weights.shape[1]


ACCUMULATED = {
    "global_mean": lambda own, all: all.sum().clamp(min=1e-30),
    "mean_of_means": lambda own, all: own.sum() * parts(all),
    "sum": lambda own, all: 1.0,
    "times_microbatches": lambda own, all: all.sum() / all.shape[1],
    "padding_counted": lambda own, all: all.numel(),
}


@pytest.mark.parametrize("name", ACCUMULATED)
def test_accumulation_is_named(name):
    found = diagnose_torch(mean_of_parts(ACCUMULATED[name]), num_replicas=2, microbatches=3)
    assert found.convention == name
    assert found.right == (name == "global_mean")


def test_a_gradient_may_be_returned_and_computed_in_bfloat16():
    def gradient_of(token_loss, params, tokens, weights):
        narrow = params.detach().to(torch.bfloat16).requires_grad_()
        losses = token_loss(narrow, tokens) * weights
        total = losses.sum() / weights.sum().clamp(min=1e-30)
        return torch.autograd.grad(total, narrow)[0]

    assert diagnose_torch(gradient_of, num_replicas=2, microbatches=2, rtol=1e-2).right


def test_clipping_is_found():
    def gradient_of(token_loss, params, tokens, weights):
        (token_loss(params, tokens) * weights).sum().div(weights.sum().clamp(min=1e-30)).backward()
        torch.nn.utils.clip_grad_norm_([params], 1.0)

    found = diagnose_torch(gradient_of, num_replicas=2)
    assert found.convention == "unknown"
    assert "depend on the losses" in found.words


def test_errors_are_the_codes_own():
    def raises(token_loss, params, tokens, weights):
        return torch.ones(3) @ torch.ones(4)

    with pytest.raises(RuntimeError, match="size") as raised:
        diagnose_torch(raises, num_replicas=2)
    assert (
        "diagnose_torch: gradient_of failed on the probe where every" in raised.value.__notes__[0]
    )
    with pytest.raises(ValueError, match=r"got None and left none in params\.grad"):
        diagnose_torch(lambda *_: None, num_replicas=2)
    with pytest.raises(ValueError, match=r"gradient of params, of shape \(14,\), got one of shape"):
        diagnose_torch(lambda *_: torch.ones(3), num_replicas=2)
    with pytest.raises(
        ValueError, match=r"must be given where torch\.distributed has no process group"
    ):
        diagnose_torch(lambda *_: None)
    with pytest.raises(ValueError, match=r"diagnose_torch: rtol must be in \[0, 1\)"):
        diagnose_torch(lambda *_: None, num_replicas=2, rtol=2)


def test_code_that_refuses_an_empty_step_is_noted_by_its_own_error():
    class NoTokens(Exception):
        pass

    def gradient_of(token_loss, params, tokens, weights):
        if not weights.any():
            raise NoTokens
        (token_loss(params, tokens) * weights).sum().div(weights.sum()).backward()

    found = diagnose_torch(gradient_of, num_replicas=2)
    assert found.right
    assert any("NoTokens" in note for note in found.notes)


# --- over real processes --------------------------------------------------------------------------

DDP = """
import os, sys, warnings
import torch
from torch import distributed as dist
from contextlib import nullcontext
from jax_ddp_weighting import diagnose_torch, record
rank, ranks, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=ranks)

class Net(torch.nn.Module):
    def __init__(self, params, token_loss):
        super().__init__()
        self.params = torch.nn.Parameter(params.detach().clone())
        self.token_loss = token_loss
    def forward(self, tokens):
        return self.token_loss(self.params, tokens)

def reduced(loss_of, wrap=torch.nn.parallel.DistributedDataParallel):
    def gradient_of(token_loss, params, tokens, weights):
        net = Net(params, token_loss)
        model = wrap(net)
        own, counts = tokens[rank], weights[rank]
        total = counts.sum()
        dist.all_reduce(total)
        for k in range(len(own)):
            last = k == len(own) - 1
            with nullcontext() if last or not hasattr(model, "no_sync") else model.no_sync():
                loss_of((model(own[k]) * counts[k]).sum(), counts[k], total, len(own)).backward()
        return net.params.grad
    return gradient_of

def right(total, own, everything, count):
    return total * ranks / everything.clamp(min=1e-30)
def usual(total, own, everything, count):
    return total / own.sum() / count
def forgotten(total, own, everything, count):
    return total / everything.clamp(min=1e-30)

def fails(token_loss, params, tokens, weights):
    if rank == 1:
        raise OSError("on one rank")
    return params.detach()

say = []
for loss_of, microbatches in ((right, 1), (right, 2), (usual, 1), (usual, 2), (forgotten, 2)):
    found = diagnose_torch(reduced(loss_of), microbatches=microbatches)
    say.append(f"{loss_of.__name__} {microbatches}: {found.convention} {found.factor}")
say.append("apart: " + diagnose_torch(reduced(right, lambda net: net)).words)
try:
    diagnose_torch(fails)
except Exception as error:
    say.append(f"fails: {type(error).__name__}: {error}")

def step_of(divide, path):
    torch.manual_seed(0)
    layers = torch.nn.Linear(6, 9), torch.nn.Tanh(), torch.nn.Linear(9, 2)
    net = torch.nn.Sequential(*layers).double()
    model = torch.nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=.1)
    generator = torch.Generator().manual_seed(rank)
    weights = [1, 1, 1, 1, 1, 1, 0, 0], [1, 1, 1, 0, 1, 0, 0, 0], [1, 0, 0, 0, 1, 2, 1, 1]
    own = torch.tensor(weights[rank]).double().reshape(2, 4)
    everything = own.sum()
    dist.all_reduce(everything)
    def loss(module, example):
        x, y = example
        return (module(x) - y).square().sum()
    with record(path, model, loss) as step:
        for k in range(2):
            x = torch.randn(4, 6, generator=generator, dtype=float)
            y = torch.randn(4, 2, generator=generator, dtype=float)
            step.add((x, y), own[k])
            with model.no_sync() if k == 0 else nullcontext():
                losses = (model(x) - y).square().sum(-1) * own[k]
                divide(losses.sum(), own[k], everything, 2).backward()
        optimizer.step()
        optimizer.zero_grad()

step_of(right, f"{folder}/right.npz")
step_of(usual, f"{folder}/usual.npz")
with open(f"{folder}/{rank}.out", "w") as out:
    out.write("\\n".join(say))
dist.barrier()
os._exit(0)  # gloo's threads may abort an interpreter that is taken down in the usual way
"""


@pytest.fixture(scope="module", params=[2, 3])
def ran(request, tmp_path_factory):
    """So many processes of DDP have run; what each said, and where they wrote."""
    folder = tmp_path_factory.mktemp(f"ddp{request.param}")
    (folder / "program.py").write_text(DDP)
    running = [
        subprocess.Popen(
            [
                sys.executable,
                str(folder / "program.py"),
                str(rank),
                str(request.param),
                str(folder),
            ],
            stderr=subprocess.PIPE,
            text=True,
            env={"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "PATH": "/usr/bin:/bin"},
        )
        for rank in range(request.param)
    ]
    errors = [process.communicate(timeout=300)[1] for process in running]
    assert [process.returncode for process in running] == [0] * request.param, errors
    said = [(folder / f"{rank}.out").read_text().splitlines() for rank in range(request.param)]
    return request.param, said, folder


def test_real_ddp_is_named_the_same_in_every_process(ran):
    ranks, said, _ = ran
    assert said[0][:6] == [
        "right 1: global_mean 1.0",
        "right 2: global_mean 1.0",
        "usual 1: mean_of_means 1.0",
        "usual 2: mean_of_means 1.0",
        f"forgotten 2: divided_by_ranks {1 / ranks}",
        "apart: another gradient in every process: it is not reduced over all of them",
    ]
    assert all(each[:6] == said[0][:6] for each in said)
    assert said[1][6] == "fails: OSError: on one rank"
    assert said[0][6].startswith(
        "fails: RuntimeError: diagnose_torch: gradient_of failed on rank 1"
    )


def test_a_recorded_step_of_ddp_is_named_by_the_command(ran, capsys):
    _, _, folder = ran
    assert cli.run(["diagnose", "--gradients", str(folder / "right.npz")]) == 0
    assert "global_mean, factor 1" in capsys.readouterr().out
    assert cli.run(["diagnose", "--gradients", str(folder / "usual.npz")]) == 1
    assert "mean_of_means, factor 1" in capsys.readouterr().out


# --- steps written down ---------------------------------------------------------------------------


def net():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 2)
    )


def loss_of(module, example):
    return (module(example["x"]) - example["y"]).square().sum()


def batch():
    generator = torch.Generator().manual_seed(1)
    shapes = {"x": (4, 6), "y": (4, 2)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def test_a_record_changes_nothing_of_the_script_and_holds_the_step(tmp_path):
    model, examples = net().eval(), batch()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.random.get_rng_state()
    with record(tmp_path / "step.npz", model, loss_of) as step:
        step.add(examples, torch.tensor([1, 1, 2, 0.5]))
        loss = ((model(examples["x"]) - examples["y"]).square().sum(-1)).mean()
        loss.backward()
    assert torch.equal(state, torch.random.get_rng_state())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    with np.load(tmp_path / "step.npz") as file:
        assert file["weights"].tolist() == [1, 1, 2, 0.5]
        assert file["rank"].tolist() == file["microbatch"].tolist() == [0] * 4
        assert file["per_example/0.weight"].shape == (4, 5, 6)
        mean = file["per_example/0.weight"].mean(axis=0)
        np.testing.assert_allclose(mean, file["gradient/0.weight"], rtol=1e-4, atol=1e-6)
    assert cli.run(["diagnose", "--gradients", str(tmp_path / "step.npz")]) == 1


class Counted(torch.nn.Module):
    """Changes its buffer at every call in training, as quantization's observers do."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += self.training
        return x


def test_buffers_and_random_streams_of_a_training_model_stay(tmp_path):
    norm = torch.nn.BatchNorm1d(6).eval()  # averages as they are: each row by itself
    model = torch.nn.Sequential(norm, Counted(), net().eval(), torch.nn.Dropout())
    examples, state = batch(), torch.random.get_rng_state()
    with record(tmp_path / "step.npz", model, loss_of) as step:
        step.add(examples)
        assert model[1].calls == 0
        assert torch.equal(state, torch.random.get_rng_state())
        model(examples["x"]).sum().backward()


@pytest.mark.parametrize("tracked", [True, False])
def test_a_model_that_normalises_by_the_batch_has_no_gradient_of_one_example(tracked, tmp_path):
    model = torch.nn.Sequential(torch.nn.BatchNorm2d(3, track_running_stats=tracked), net())
    model.train(tracked)
    said = "record: model must normalise each example by itself, got BatchNorm2d '0'"
    with (
        pytest.raises(ValueError, match=said),
        record(tmp_path / "step.npz", model, loss_of) as step,
    ):
        step.add(batch())


def stepped(tmp_path, change):
    model, examples = net().eval(), batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with record(tmp_path / "step.npz", model, loss_of) as step:
        change(step, model, optimizer, examples)
    return model


def backward(model, examples):
    (model(examples["x"]) - examples["y"]).square().sum().backward()


def add_after(step, model, optimizer, examples):
    step.add(examples)
    backward(model, examples)
    optimizer.step()
    step.add(examples)


def step_twice(step, model, optimizer, examples):
    step.add(examples)
    backward(model, examples)
    optimizer.step()
    optimizer.step()


def closure_without_gradient(step, model, optimizer, examples):
    step.add(examples)
    optimizer.step(lambda: model(examples["x"]).sum())


BAD = {
    "no gradient of a closure": (closure_without_gradient, "model must have gradients when"),
    "no examples": (lambda step, model, opt, x: backward(model, x), "got no examples"),
    "no gradient": (lambda step, model, opt, x: step.add(x), "model must have gradients when"),
    "added too late": (add_after, "add must be called before the optimizer steps"),
    "two steps": (step_twice, "one step of the optimizer, got 2"),
    "too few weights": (lambda s, m, o, x: s.add(x, [1, 1]), r"4 finite numbers.*shape \(2,\)"),
    "a bad weight": (lambda s, m, o, x: s.add(x, [1, 1, 1, np.nan]), "must be 4 finite numbers"),
    "lengths": (lambda s, m, o, x: s.add({**x, "y": x["y"][:3]}), "tensors of one leading length"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_a_step_that_cannot_be_recorded_is_one_sentence_and_no_file(case, tmp_path):
    change, said = BAD[case]
    with pytest.raises(ValueError, match=f"record: .*{said}"):
        stepped(tmp_path, change)
    assert not list(tmp_path.iterdir())
    # the hook on optimizers is gone
    model = net().eval()
    backward(model, batch())
    torch.optim.SGD(model.parameters(), lr=0.1).step()


CLOSED = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "adam": lambda params: torch.optim.Adam(params, lr=0.1),
    "lbfgs": lambda params: torch.optim.LBFGS(params, lr=0.1, max_iter=3),
}


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("name", CLOSED)
def test_a_step_that_takes_a_closure_is_recorded_by_its_first_call(name, by_name, tmp_path):
    """Gradients of an earlier step lie there until the closure has cleared them."""
    model, examples = net().eval(), batch()
    optimizer = CLOSED[name](model.parameters())
    (100 * model(examples["x"])).sum().backward()
    calls = []

    def closure():
        calls.append(1)
        optimizer.zero_grad()
        loss = (model(examples["x"]) - examples["y"]).square().sum(-1).mean()
        loss.backward()
        return loss

    with record(tmp_path / "step.npz", model, loss_of) as step:
        step.add(examples)
        loss = optimizer.step(closure=closure) if by_name else optimizer.step(closure)
    assert loss.shape == ()
    assert len(calls) == (3 if name == "lbfgs" else 1)
    with np.load(tmp_path / "step.npz") as file:
        mean = file["per_example/0.weight"].mean(axis=0)
        np.testing.assert_allclose(mean, file["gradient/0.weight"], rtol=1e-4, atol=1e-6)


def test_what_has_no_parameters_or_a_loss_for_all_is_refused(tmp_path):
    def refused(said, path, model, loss):
        with pytest.raises(ValueError, match=said), record(tmp_path / path, model, loss) as step:
            step.add(batch())

    said = "record: model must have parameters that require gradients"
    refused(said, "x.npz", torch.nn.Tanh(), loss_of)
    with (
        pytest.raises(TypeError, match="record: model must be a module of torch, got int"),
        record(tmp_path / "x.npz", 3, loss_of),
    ):
        pass
    refused(r"record: path must end in \.npz, got", "x.pt", net(), loss_of)
    rows = lambda module, example: module(example["x"])[0]  # noqa: E731
    said = "record: loss_of_example must return the scalar loss of one example, got Tensor"
    refused(said, "x.npz", net().eval(), rows)
