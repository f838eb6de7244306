"""A result on disk: one file for each leaf, its space taken first, and a mark when all is whole."""

import hashlib
import os
import re
import secrets
import unicodedata
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from jax_ddp_weighting._files import PARTIAL, open_whole

_MARK = "ids.npy"
_LONGEST = 180  # bytes of a name; a file's may have 255, its unfinished stand-in's included


class ResultFiles:
    """The `.npy` files of a result in a folder; without `finish` nothing of them is left.

    The rule: what is not finished has another name, so no file looks whole that is not, and whoever
    has an older result open keeps it. `ids.npy` comes last.

    Args:
        folder: where they are kept, made if it is not there.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._unfinished: dict[Path, Path] = {}

    def __enter__(self) -> "ResultFiles":
        self._folder.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(self, *_: Any) -> None:
        for path in self._unfinished:
            path.unlink(missing_ok=True)

    def allocate(
        self, names: list[str], forms: list[tuple[tuple[int, ...], np.dtype]]
    ) -> list[np.ndarray]:
        """Arrays to fill, in files whose space on the disk is theirs.

        Args:
            names: the leaves' paths, as `jax.tree_util.keystr` writes them.
            forms: their shapes and dtypes.

        Raises:
            OSError: there is no space for them.
        """
        files = zip(name_files(names), forms, strict=True)
        return [self._allocate(self._folder / name, *form) for name, form in files]

    def _allocate(self, path: Path, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        unfinished = path.with_name(f".{path.stem}.{secrets.token_hex(4)}{PARTIAL}")
        self._unfinished[unfinished] = path
        plain = as_storable(np.empty(0, dtype)).dtype
        if 0 in shape:  # an empty file cannot be mapped
            with unfinished.open("wb") as file:
                np.save(file, np.empty(shape, plain))
            return np.empty(shape, dtype)
        mapped = np.lib.format.open_memmap(unfinished, "w+", plain, shape)
        # who writes into a hole of a mapped file when the disk is full is ended by SIGBUS
        _take_space(unfinished)
        return mapped.view(dtype)

    def finish(self, filled: list[np.ndarray], *, ids: np.ndarray) -> list[np.ndarray]:
        """The arrays once they are filled, in files of their final names."""
        (self._folder / _MARK).unlink(missing_ok=True)
        arrays = []
        for (unfinished, path), array in zip(self._unfinished.items(), filled, strict=True):
            if array.size:
                array.view(np.memmap).flush()
                _sync(unfinished)
            unfinished.replace(path)
            if array.size:  # opened by the name that it has now
                array = np.load(path, mmap_mode="r+").view(array.dtype)
            arrays.append(array)
        self._unfinished.clear()
        with open_whole(self._folder / _MARK) as file:
            np.save(file, ids)
        return arrays


def name_files(names: list[str]) -> list[str]:
    """A file name for each leaf's path, none twice, on file systems that ignore case neither."""
    plain = ["_".join(["predictions", *re.findall(r"[\w.-]+", name)]) for name in names]
    alike = [unicodedata.normalize("NFKC", name).casefold() for name in plain]
    times = Counter(alike)
    found = []
    for name, short, key in zip(names, plain, alike, strict=True):
        if times[key] > 1 or len(short.encode()) > _LONGEST:
            cut = short.encode()[: _LONGEST // 2].decode(errors="ignore")
            short = f"{cut}-{hashlib.blake2b(name.encode(), digest_size=8).hexdigest()}"
        found.append(f"{short}.npy")
    return found


def as_storable(leaf: np.ndarray) -> np.ndarray:
    """A leaf as numpy's own formats know it: they have no bfloat16 or its kin."""
    return leaf.view(f"u{leaf.dtype.itemsize}") if leaf.dtype.kind == "V" else leaf


def _take_space(path: Path) -> None:
    if hasattr(os, "posix_fallocate"):  # not on macOS
        with path.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
