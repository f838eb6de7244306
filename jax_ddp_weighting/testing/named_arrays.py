"""Arrays by name in files that others have written: never unpickled, and one sentence for each."""

import json
import os
import re
import struct
import zipfile
import zlib
from pathlib import Path
from typing import BinaryIO

import numpy as np

_PICKLED = {".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle"}
_ZIPS = (zipfile.BadZipFile, EOFError, zlib.error, struct.error, KeyError, SyntaxError)


def read_named(path: str | os.PathLike[str], *, caller: str) -> dict[str, np.ndarray]:
    """The arrays of a file by their names.

    Args:
        path: an `.npz` of `numpy.savez(path, **arrays)`, or a `.safetensors`, if that is installed.
        caller: who speaks in errors.

    Raises:
        ValueError: the file is of another kind, torn, or empty; its arrays have no names, or hold
            Python objects or raw bytes; safetensors is not installed.
        OSError: it cannot be read.
    """
    kind = Path(path).suffix.lower()
    if kind == ".safetensors":
        return _read_safetensors(path, caller)
    if kind != ".npz":
        raise ValueError(
            f"{caller}: {path} must be an .npz or a .safetensors, got {kind or 'no'} suffix. "
            + (
                "A file of torch.save or pickle may run code when it is read, and never is: write "
                "np.savez(path, **{name: tensor.numpy()}) or safetensors."
                if kind in _PICKLED
                else "Write it by np.savez(path, **arrays)."
            )
        )
    with open(path, "rb") as opened:
        return _read_npz(opened, path, caller)


def _read_npz(opened: BinaryIO, path: object, caller: str) -> dict[str, np.ndarray]:
    if opened.read(6) == b"\x93NUMPY":
        raise ValueError(
            f"{caller}: {path} must hold arrays by name, got one array without a name. Write it by "
            "np.savez(path, **{name: array})."
        )
    opened.seek(0)
    if not zipfile.is_zipfile(opened):  # numpy would take it for a pickle
        raise _torn(path, caller, zipfile.BadZipFile("no archive"))
    opened.seek(0)
    try:
        file = np.load(opened, allow_pickle=False)
    except (*_ZIPS, ValueError) as error:
        raise _torn(path, caller, error) from None
    with file:
        unnamed = [name for name in file.files if re.fullmatch(r"arr_\d+", name)]
        if unnamed:
            raise ValueError(
                f"{caller}: {path} must name its arrays, got {unnamed[0]}, as numpy calls what has "
                "no name. Write it by np.savez(path, **{name: array})."
            )
        found = {name: _read_member(file, name, path, caller) for name in file.files}
    if not found:
        raise ValueError(f"{caller}: {path} must hold arrays, got none. Write the gradient's.")
    return found


def read_array(path: str | os.PathLike[str], *, caller: str) -> np.ndarray:
    """The one array of an `.npy`, or the numbers of a text file.

    Raises:
        ValueError: the file is of another kind or torn, or holds Python objects.
        OSError: it cannot be read.
    """
    kind = Path(path).suffix.lower()
    if kind not in (".npy", ".txt"):
        raise ValueError(
            f"{caller}: {path} must be an .npy or a .txt of numbers, got {kind or 'no'} suffix. "
            "Write it by np.save(path, array)."
        )
    try:
        if kind == ".txt":
            return np.loadtxt(path, ndmin=1)
        with open(path, "rb") as opened:
            if opened.read(6) != b"\x93NUMPY":  # numpy would take it for a pickle
                raise ValueError("no header of numpy's")
            opened.seek(0)
            found = np.load(opened, allow_pickle=False)
    except (*_ZIPS, ValueError) as error:
        raise _torn(path, caller, error) from None
    return _check_dtype(found, f"{caller}: {path}")


def _read_member(file: np.lib.npyio.NpzFile, name: str, path: object, caller: str) -> np.ndarray:
    try:
        array = file[name]
    except (*_ZIPS, ValueError, OSError, MemoryError) as error:
        raise _torn(f"{path}, {name}", caller, error) from None
    return _check_dtype(array, f"{caller}: {path}, {name}")


def _check_dtype(array: object, what: str) -> np.ndarray:
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "biufc":
        got = getattr(array, "dtype", type(array).__name__)
        raw = " bfloat16 is raw bytes to numpy: write float32, which holds it exactly." * (
            getattr(got, "kind", "") == "V"
        )
        raise ValueError(f"{what} must be an array of numbers, got dtype {got}.{raw}")
    return array


def _torn(path: object, caller: str, error: Exception) -> ValueError:
    words = " ".join(str(error).split()) or type(error).__name__
    if "allow_pickle" in words or "Object arrays" in words:
        return ValueError(
            f"{caller}: {path} must hold numbers, got Python objects, which are never unpickled: "
            "that may run code. Write arrays of one shape and dtype."
        )
    return ValueError(
        f"{caller}: {path} must be a whole file of numpy's, got one that cannot be read "
        f"({type(error).__name__}: {words[:120]}). Write it again by np.savez or np.save."
    )


def _read_safetensors(path: str | os.PathLike[str], caller: str) -> dict[str, np.ndarray]:
    os.stat(path)  # what is not there is said as for every file
    try:
        from safetensors import SafetensorError  # pyright: ignore[reportMissingImports]  # optional
        from safetensors.numpy import load_file  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError:
        raise ValueError(
            f"{caller}: {path} must be read by the package safetensors, got none installed. "
            "pip install safetensors, or write an .npz by np.savez(path, **arrays)."
        ) from None
    try:
        found = load_file(path)
    except (SafetensorError, ValueError, KeyError, json.JSONDecodeError) as error:
        raise ValueError(
            f"{caller}: {path} must be a whole safetensors file, got one that cannot be read "
            f"({' '.join(str(error).split())[:120]}). Write it again by save_file."
        ) from None
    if not found:
        raise ValueError(f"{caller}: {path} must hold arrays, got none. Write the gradient's.")
    return dict(found)
