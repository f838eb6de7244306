"""The probes of `diagnose` in tensors of torch: accumulation, reductions over real processes."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_ddp_weighting._arguments import check_callable, check_num_replicas, check_rtol
from jax_ddp_weighting.testing.diagnosis import Diagnosis, unknown
from jax_ddp_weighting.testing.probing import diagnose
from jax_ddp_weighting.testing.torch_arrays import as_array, import_torch

_RTOL = 1e-5


class _Failed(Exception):
    """Stands for what torch code raised, which `diagnose` must not take for its own."""

    def __init__(self, error: Exception):
        super().__init__(str(error))
        self.error = error


class _GradientsApart(Exception):
    """Processes do not hold one gradient."""


def diagnose_torch(
    gradient_of: Callable[[Callable[[Any, Any], Any], Any, Any, Any], Any],
    *,
    num_replicas: int | None = None,
    microbatches: int = 1,
    rtol: float = _RTOL,
    **options: Any,
) -> Diagnosis:
    """The convention by which a reduction written in torch counts tokens: `diagnose` in tensors.

    The rule: the probes, names and remedies are those of `diagnose`. Without `num_replicas` every
    process of torch's default group is a rank: all of them call this together, each takes its own
    rank's part (`tokens[dist.get_rank()]`) and returns the gradient that it would apply, so that
    what is looked at is DDP's own reduction. Processes that do not hold one gradient are found.

    Args:
        gradient_of: `gradient_of(token_loss, params, tokens, weights)` reduces as the code on trial
            does. `params` is a float tensor on the CPU that requires gradients, new in every call;
            `tokens` (int64) and `weights` (of the dtype of `params`) are `[num_replicas,
            microbatches, tokens]`; `token_loss(params, tokens)` returns one loss per token, for
            tokens of any shape. It returns the gradient, a tensor of the shape of `params`, or None
            where it has left it in `params.grad`. A module for DDP holds a
            `torch.nn.Parameter(params.detach().clone())` and calls `token_loss(parameter, tokens)`.
        num_replicas: how many ranks the tokens are laid out for, for a reduction inside one
            process; by default the processes of the default group.
        microbatches: how many microbatches each rank accumulates.
        rtol: how exactly counts must fit, relative to the largest; about 1e-2 for bfloat16.
        **options: other options of `diagnose`.

    Returns:
        A `Diagnosis`, the same in every process.

    Raises:
        ValueError: the numbers are below 1, `rtol` is not in `[0, 1)`, no process group is there
            and `num_replicas` is left out, or `gradient_of` returns no gradient of `params`.
        ModuleNotFoundError: torch is not installed.
    """
    torch = import_torch("diagnose_torch")
    remedy = "It takes (token_loss, params, tokens, weights) and returns the gradient of params."
    check_callable("diagnose_torch: gradient_of", gradient_of, remedy)
    check_rtol("diagnose_torch: rtol", rtol)
    together = num_replicas is None
    if num_replicas is None:
        num_replicas = _count_processes(torch)
    check_num_replicas("diagnose_torch: num_replicas", num_replicas)

    def in_tensors(token_loss: Any, params: Any, tokens: Any, weights: Any) -> np.ndarray:
        probe = _Probe(torch, token_loss, np.asarray(params))
        gradient, error = None, None
        try:
            gradient = probe.run(gradient_of, np.asarray(tokens), np.asarray(weights))
        except Exception as raised:  # of any kind: all processes must hear of it
            error = raised
        if together:
            gradient, error = _agree(torch, gradient, error, rtol)
        if error is not None:
            raise _stand_in(error) from None
        assert gradient is not None
        return gradient

    try:
        return diagnose(
            in_tensors,
            num_replicas=num_replicas,
            microbatches=microbatches,
            rtol=rtol,
            **options,
        )
    except _Failed as stand_in:
        for note in getattr(stand_in, "__notes__", ()):
            stand_in.error.add_note(note.replace("diagnose:", "diagnose_torch:"))
        raise stand_in.error from None
    except _GradientsApart as apart:
        return unknown(
            "another gradient in every process: it is not reduced over all of them",
            advice="Reduce the gradient over all processes before the optimizer steps: wrap the "
            "module in DistributedDataParallel, leave no_sync() for the last microbatch, and call "
            "the wrapper rather than its .module.",
            notes=(str(apart),),
        )


class _Probe:
    """One call: parameters, and the loss that gives every token one of its own."""

    def __init__(self, torch: Any, token_loss: Any, params: np.ndarray):
        self._torch = torch
        # Losses are linear, each in its own parameter: what JAX's gives for 1 is its slope.
        ones = jnp.ones(params.shape, params.dtype)
        slopes = token_loss(ones, jnp.arange(params.size))
        self._slopes = torch.tensor(np.asarray(slopes))
        self._params = params

    def token_loss(self, params: Any, tokens: Any) -> Any:
        """One loss per token."""
        return params[tokens] * self._slopes.to(params)[tokens]

    def run(self, gradient_of: Any, tokens: np.ndarray, weights: np.ndarray) -> np.ndarray:
        torch = self._torch
        params = torch.tensor(self._params, requires_grad=True)
        found = gradient_of(
            self.token_loss,
            params,
            torch.tensor(tokens.astype(np.int64)),
            torch.tensor(weights.astype(self._params.dtype)),
        )
        if found is None:
            found = params.grad
        shape = None if found is None else tuple(np.shape(found))
        if shape != self._params.shape:
            got = "None and left none in params.grad" if found is None else f"one of shape {shape}"
            raise ValueError(
                "diagnose_torch: gradient_of must return the gradient of params, of shape "
                f"{self._params.shape}, got {got}. Return what the code would apply, as one rank "
                "holds it, without the loss."
            )
        found = as_array(found, "diagnose_torch: the gradient that gradient_of returns")
        return found.astype(np.float64)


def _count_processes(torch: Any) -> int:
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        raise ValueError(
            "diagnose_torch: num_replicas must be given where torch.distributed has no process "
            "group, got none. Give the ranks that gradient_of goes through, or call it in every "
            "process after init_process_group."
        )
    return distributed.get_world_size()


def _agree(
    torch: Any, gradient: np.ndarray | None, error: Exception | None, rtol: float
) -> tuple[np.ndarray | None, Exception | None]:
    """One gradient for all processes, so that all of them go on in the same way; or one error."""
    said: list[Any] = [None] * torch.distributed.get_world_size()
    words = None if error is None else f"{type(error).__name__}: {error}"
    torch.distributed.all_gather_object(said, (gradient, words))
    failed = [(rank, words) for rank, (_, words) in enumerate(said) if words is not None]
    if error is not None:
        return None, error
    if failed:
        rank, words = failed[0]
        return None, RuntimeError(f"diagnose_torch: gradient_of failed on rank {rank}: {words}")
    first = said[0][0]
    size = np.nanmax(np.abs(first), initial=0.0)
    for rank, (other, _) in enumerate(said):
        if not np.allclose(other, first, rtol=0, atol=rtol * size, equal_nan=True):
            return None, _GradientsApart(f"rank {rank} holds another gradient than rank 0.")
    return first, None


def _stand_in(error: Exception) -> Exception:
    """An error of the same name that does not come from torch's code."""
    if isinstance(error, _GradientsApart):
        return error
    return type(type(error).__name__, (_Failed,), {})(error)
