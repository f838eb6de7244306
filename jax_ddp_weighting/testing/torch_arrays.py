"""Tensors of torch as arrays of numpy and back, bit for bit, without importing torch."""

import sys
from typing import Any

import jax.numpy as jnp
import numpy as np

# Dtypes that numpy itself lacks, by torch's names, and an integer of the same width to carry them.
_NARROW = {
    "bfloat16": (jnp.bfloat16, "int16"),
    "float8_e4m3fn": (jnp.float8_e4m3fn, "uint8"),
    "float8_e5m2": (jnp.float8_e5m2, "uint8"),
}


def import_torch(caller: str) -> Any:
    """The module torch, for functions that cannot do without.

    Raises:
        ModuleNotFoundError: it is not installed; the words say what to install.
    """
    try:
        import torch  # pyright: ignore[reportMissingImports]  # optional
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ModuleNotFoundError(
            f"{caller}: torch must be installed, got no module of that name. Install it: pip "
            "install 'jax-ddp-weighting[torch]'.",
            name="torch",
        ) from None
    return torch


def is_tensor(value: Any) -> bool:
    """Whether it is a tensor of torch; torch is not imported to find out."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def as_array(value: Any, argument: str) -> np.ndarray:
    """The value on the host, bit for bit: a tensor of torch, an array of JAX or numpy, a number.

    Args:
        value: what the caller was given; tensors may be on any device and require gradients.
        argument: who asks for what, as errors name it.

    Raises:
        TypeError: it is no array of numbers, or a tensor that has no numbers of its own.
    """
    if is_tensor(value):
        return _read_tensor(value, argument)
    try:
        array = np.asarray(value)
    except ValueError:  # rows of several lengths
        array = np.empty(0, object)
    if array.dtype.kind not in "biufc" and array.dtype not in _NARROW_DTYPES:
        raise TypeError(
            f"{argument} must be an array of numbers or a tensor, got {type(value).__name__} of "
            f"dtype {array.dtype}. Take it from a state dict, or from p.grad of a parameter."
        )
    return array


_NARROW_DTYPES = {np.dtype(each) for each, _ in _NARROW.values()}


def _read_tensor(tensor: Any, argument: str) -> np.ndarray:
    torch = sys.modules["torch"]
    if tensor.is_meta or tensor.layout is not torch.strided or tensor.is_quantized:
        raise TypeError(
            f"{argument} must hold its numbers, got a tensor that is meta, sparse or quantized: "
            f"{tensor.layout} on {tensor.device}. Load it first, and call .to_dense() of a sparse "
            "gradient."
        )
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg()
    narrow = _NARROW.get(str(tensor.dtype).removeprefix("torch."))
    if narrow is None:
        return tensor.numpy()
    dtype, carrier = narrow
    return tensor.contiguous().view(getattr(torch, carrier)).numpy().view(dtype)


def as_tensor(array: np.ndarray) -> Any:
    """The array as a tensor of its own memory, bit for bit; torch has been imported."""
    torch = sys.modules["torch"]
    array = np.array(array, order="C")  # a copy: a tensor may be written to
    for name, (dtype, carrier) in _NARROW.items():
        if array.dtype == dtype:
            return torch.from_numpy(array.view(carrier)).view(getattr(torch, name))
    return torch.from_numpy(array)


def find_memory(value: Any) -> tuple[Any, ...] | None:
    """What two names of one tensor have in common: where it lies; None of what lies nowhere."""
    if is_tensor(value):
        if value.is_meta or not value.numel():
            return None
        return value.device, value.data_ptr(), tuple(value.shape), value.stride(), value.dtype
    if isinstance(value, np.ndarray) and value.size:
        return value.__array_interface__["data"][0], value.shape, value.strides, value.dtype.str
    return None
