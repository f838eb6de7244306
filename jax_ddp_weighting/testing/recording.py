"""One step of a training script in torch, written down: its gradient, and whose it is."""

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from jax_ddp_weighting._files import open_whole
from jax_ddp_weighting.testing.torch_arrays import as_array, import_torch

GRADIENT, PER_EXAMPLE = "gradient/", "per_example/"
WEIGHTS, RANK, MICROBATCH = "weights", "rank", "microbatch"


class Recording:
    """What `record` hands to the script: `add` is called for every microbatch."""

    def __init__(self, torch: Any, model: Any, loss_of_example: Callable[[Any, Any], Any]):
        self._torch = torch
        if not isinstance(model, torch.nn.Module):
            raise TypeError(
                f"record: model must be a module of torch, got {type(model).__name__}. Give what "
                "is trained, or DDP's wrapper around it."
            )
        wrapper = type(model).__name__ == "DistributedDataParallel"
        self._model = model.module if wrapper else model  # whose forward is no step of DDP's
        self._loss_of = loss_of_example
        self._named = {n: p for n, p in self._model.named_parameters() if p.requires_grad}
        if not self._named:
            raise ValueError(
                "record: model must have parameters that require gradients, got none. Give the "
                "module that is trained."
            )
        self.gradient: dict[str, np.ndarray] = {}
        self.own: list[dict[str, np.ndarray]] = []
        self.weights: list[float] = []
        self.microbatch: list[int] = []
        self._microbatches = 0
        self.steps = 0

    def add(self, examples: Any, weights: Any = None) -> None:
        """Takes each example's own gradient, at the parameters as they are.

        Nothing of the script is changed: gradients, buffers and random streams stay as they are.

        Args:
            examples: a microbatch of this process, as `loss_of_example` is given one of them: a
                tensor, or a tuple, list or dict of tensors, `[examples, ...]`.
            weights: how much each example counts, `[examples]`; 1 by default, 0 for padding.

        Raises:
            ValueError: lengths differ, a weight is negative or not finite, a loss is no scalar,
                the model normalises by the batch's own statistics, or the optimizer has stepped.
        """
        self._check_rows_are_apart()
        if self.gradient:
            raise ValueError(
                "record: add must be called before the optimizer steps, got a call after it: the "
                "parameters are others by then. Call it beside the loss."
            )
        count = _count_rows(examples)
        given = np.ones(count) if weights is None else as_array(weights, "record: weights")
        given = np.asarray(given, float)
        if given.shape != (count,) or not (np.isfinite(given).all() and (given >= 0).all()):
            raise ValueError(
                f"record: weights must be {count} finite numbers of at least 0, one for each "
                f"example, got shape {given.shape}. Sum them up per example if they are per token."
            )
        torch, parameters = self._torch, list(self._named.values())
        kept = {name: buffer.clone() for name, buffer in self._model.named_buffers()}
        cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
        devices = range(torch.cuda.device_count()) if cuda else []
        with torch.random.fork_rng(devices=devices), torch.enable_grad():
            for row in range(count):
                loss = self._loss_of(self._model, _take_row(examples, row))
                if not hasattr(loss, "numel") or loss.numel() != 1:
                    shape = tuple(np.shape(loss))
                    raise ValueError(
                        "record: loss_of_example must return the scalar loss of one example, got "
                        f"{type(loss).__name__} of shape {shape}. Sum or average its tokens."
                    )
                found = torch.autograd.grad(loss.sum(), parameters, allow_unused=True)
                named = zip(self._named, parameters, found, strict=True)
                self.own.append({n: _to_host(torch, g, p) for n, p, g in named})
        with torch.no_grad():
            for name, buffer in self._model.named_buffers():
                buffer.copy_(kept[name])
        self.weights += given.tolist()
        self.microbatch += [self._microbatches] * count
        self._microbatches += 1

    def _check_rows_are_apart(self) -> None:
        """Raises where an example has no gradient of its own, since others are in its output."""
        nn = self._torch.nn
        norms = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm
        for name, module in self._model.named_modules():
            if isinstance(module, norms) and (module.training or module.running_mean is None):
                raise ValueError(
                    "record: model must normalise each example by itself, got "
                    f"{type(module).__name__} {name!r} with the batch's own statistics, under "
                    "which no example has a gradient of its own. Call eval() of such modules for "
                    "the step that is recorded."
                )

    def take_gradient(self) -> None:
        """Copies the gradients that lie in the parameters."""
        if all(p.grad is None for p in self._named.values()):
            raise ValueError(
                "record: model must have gradients when the optimizer steps, or at the end of the "
                "block, got none. Call backward() in the block, and zero_grad() not after it."
            )
        self.gradient = {n: _to_host(self._torch, p.grad, p) for n, p in self._named.items()}

    def on_step(self, optimizer: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Called before any optimizer steps: its gradients are what is applied.

        A step that is given a closure computes them in it: they are taken after its first call, at
        the parameters as they are. The step is then given a closure that does so.
        """
        ours = {id(p) for p in self._named.values()}
        if not any(id(p) in ours for group in optimizer.param_groups for p in group["params"]):
            return None
        self.steps += 1
        if self.steps > 1:
            return None
        own, *others = args
        if kwargs.get("closure") is not None:
            return args, {**kwargs, "closure": self._take_after(kwargs["closure"])}
        if others and callable(others[0]):
            return (own, self._take_after(others[0]), *others[1:]), kwargs
        self.take_gradient()
        return None

    def _take_after(self, closure: Callable[..., Any]) -> Callable[..., Any]:
        def closed(*args: Any, **kwargs: Any) -> Any:
            loss = closure(*args, **kwargs)
            if not self.gradient:
                self.take_gradient()
            return loss

        return closed


@contextmanager
def record(
    path: str | os.PathLike[str], model: Any, loss_of_example: Callable[[Any, Any], Any]
) -> Iterator[Recording]:
    """Writes one step of a training script in torch to a file that `diagnose --gradients` reads.

    The rule: what is written is the gradient that lies in the parameters when the optimizer steps
    (after DDP, accumulation, clipping and unscaling; of a step that is given a closure, after its
    first call), or at the end of the block if it does not step; each example's own gradient before
    it; the weights; and which rank and microbatch each example was in. In a process group every
    process enters the block, and rank 0 writes.

        with record("step.npz", ddp_model, loss_of_example) as step:
            for x, y, weights in microbatches:
                step.add((x, y), weights)
                loss(ddp_model(x), y, weights).backward()
            optimizer.step()

    Args:
        path: an `.npz`, there whole or not at all.
        model: the module that is trained, DDP's wrapper or what is inside it. Not sharded (FSDP).
        loss_of_example: `loss_of_example(module, example)` is the loss of one example, without
            weight: a scalar. `example` is as in `add`, with a leading axis of 1; `module` is what
            is inside the wrapper.

    Returns:
        A context that gives a `Recording`; call its `add(examples, weights)` for every microbatch,
        before the optimizer steps. One example's gradient is as large as the model: take a small
        step of a small model, fewer examples than parameters.

    Raises:
        TypeError: `model` is no module.
        ValueError: no example was added, there are no gradients, the optimizer stepped twice, or
            processes hold different gradients.
        ModuleNotFoundError: torch is not installed.
    """
    torch = import_torch("record")
    if Path(path).suffix != ".npz":
        raise ValueError(
            f"record: path must end in .npz, got {os.fspath(path)!r}. numpy writes the file."
        )
    recording = Recording(torch, model, loss_of_example)
    from torch.optim.optimizer import (  # pyright: ignore[reportMissingImports]
        register_optimizer_step_pre_hook,
    )

    hook = register_optimizer_step_pre_hook(recording.on_step)
    try:
        yield recording
    finally:
        hook.remove()
    if recording.steps > 1:
        raise ValueError(
            f"record: the block must hold one step of the optimizer, got {recording.steps}. Leave "
            "the block after the first."
        )
    if not recording.own:
        raise ValueError(
            "record: add must be called for every microbatch, got no examples. Call it beside the "
            "loss: step.add((x, y), weights)."
        )
    if not recording.gradient:
        recording.take_gradient()
    _write(path, torch, recording)


def _write(path: str | os.PathLike[str], torch: Any, recording: Recording) -> None:
    names = list(recording.gradient)
    own = {name: np.stack([each[name] for each in recording.own]) for name in names}
    digest = hashlib.sha256()
    for name in names:
        digest.update(recording.gradient[name].tobytes())
    share = own, recording.weights, recording.microbatch, digest.hexdigest()
    shares = _gather(torch, share)
    if len({each[3] for each in shares}) > 1:
        raise ValueError(
            "record: all processes must hold one gradient, got another on rank "
            f"{next(r for r, each in enumerate(shares) if each[3] != shares[0][3])} than on rank "
            "0. It is not reduced over all of them: look for no_sync() and for calls past DDP."
        )
    if len(shares) > 1 and torch.distributed.get_rank():
        return
    arrays = {GRADIENT + name: value for name, value in recording.gradient.items()}
    for name in names:
        arrays[PER_EXAMPLE + name] = np.concatenate([each[0][name] for each in shares])
    arrays[WEIGHTS] = np.concatenate([each[1] for each in shares])
    arrays[RANK] = np.repeat(np.arange(len(shares)), [len(each[1]) for each in shares])
    arrays[MICROBATCH] = np.concatenate([each[2] for each in shares])
    with open_whole(path) as file:
        np.savez(file, **arrays)  # pyright: ignore[reportArgumentType]  # numpy's own stub


def _gather(torch: Any, share: Any) -> list[Any]:
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return [share]
    shares: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(shares, share)
    return shares


def _to_host(torch: Any, gradient: Any, parameter: Any) -> np.ndarray:
    """A gradient as numpy's files hold it: narrow dtypes in float32, which is exact."""
    if gradient is None:  # torch's way to say that nothing depends on it
        gradient = torch.zeros_like(parameter)
    array = as_array(gradient.to_dense() if gradient.is_sparse else gradient, "record: gradient")
    return np.array(array, np.float64 if array.dtype == np.float64 else np.float32)


def _leaves(examples: Any) -> list[Any]:
    if isinstance(examples, Mapping):
        examples = list(examples.values())
    if isinstance(examples, list | tuple):
        return [leaf for each in examples for leaf in _leaves(each)]
    return [examples]


def _count_rows(examples: Any) -> int:
    leaves = _leaves(examples)
    shapes = [tuple(np.shape(leaf)) for leaf in leaves]
    if not shapes or any(not shape or shape[0] != shapes[0][0] for shape in shapes):
        raise ValueError(
            f"record: examples must be tensors of one leading length, got shapes {shapes}. Give "
            "what loss_of_example takes, stacked over examples."
        )
    return shapes[0][0]


def _take_row(examples: Any, row: int) -> Any:
    if isinstance(examples, Mapping):
        return {key: _take_row(value, row) for key, value in examples.items()}
    if isinstance(examples, list | tuple):
        rows = [_take_row(each, row) for each in examples]
        return type(examples)(rows) if type(examples) in (list, tuple) else tuple(rows)
    return examples[row : row + 1]
