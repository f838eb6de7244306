"""What checks annotations at run time: arrays' shapes and dtypes, and nothing else.

Everything else is the business of pyright, and of the library's own errors, which a type check
at every call would forestall. Only what has such annotations is wrapped: jaxtyping's own hook wraps
every function of a package, nested ones too, and a wrapped call costs more than most of ours do.
"""

import sys
from collections.abc import Callable
from dataclasses import is_dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder, SourceFileLoader
from types import FunctionType, ModuleType
from typing import Any

import beartype
from jaxtyping import AbstractArray, jaxtyped


def install_import_hook(package: str) -> None:
    """Checks the annotated arrays of every module of `package` that is imported from now on."""
    sys.meta_path.insert(0, _Finder(package))


class _Finder(MetaPathFinder):
    def __init__(self, package: str):
        self.package = package

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname.split(".")[0] != self.package:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


class _Loader(SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)  # others import its names only after this
        _check_what_stands_in(module)


def _check_what_stands_in(owner: ModuleType | type) -> None:
    own = owner.__name__ if isinstance(owner, ModuleType) else owner.__module__
    for name, value in list(vars(owner).items()):
        if isinstance(value, type) and value.__module__ == own and isinstance(owner, ModuleType):
            if is_dataclass(value) and _arrays_of(value.__init__):
                jaxtyped(value, typechecker=_only_arrays)
            _check_what_stands_in(value)
        function = value.__func__ if isinstance(value, classmethod | staticmethod) else value
        is_own = isinstance(function, FunctionType) and function.__module__ == own
        if is_own and name != "__init__" and _arrays_of(function):
            setattr(owner, name, jaxtyped(value, typechecker=_only_arrays))


def _arrays_of(fn: Callable) -> dict[str, type]:
    return {
        name: hint
        for name, hint in fn.__annotations__.items()
        if isinstance(hint, type) and issubclass(hint, AbstractArray)
    }


def _only_arrays(fn: Any) -> Any:
    if not hasattr(fn, "__annotations__"):
        return fn
    fn.__annotations__ = _arrays_of(fn)
    return beartype.beartype(fn)
