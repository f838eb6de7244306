"""What checks annotations at run time: arrays' shapes and dtypes, and nothing else.

Everything else is the business of pyright, and of the library's own errors, which a type check
at every call would forestall. jaxtyping's own hook wraps every function of a package, nested ones
too, and binds each call's arguments twice, which cost more than most of our functions do.
"""

import sys
from collections.abc import Callable
from functools import wraps
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder, SourceFileLoader
from inspect import signature
from types import FunctionType, ModuleType
from typing import Any

from jaxtyping import AbstractArray, TypeCheckError, jaxtyped


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
            _check_what_stands_in(value)
        kind = type(value) if isinstance(value, classmethod | staticmethod) else None
        function = value if kind is None else value.__func__
        if not isinstance(function, FunctionType) or not (hints := _find_arrays(function)):
            continue
        if function.__module__ == own or name == "__init__":  # a dataclass's has another's name
            checked = _check(function, hints)
            setattr(owner, name, checked if kind is None else kind(checked))


def _find_arrays(fn: Callable) -> dict[str, type]:
    return {
        name: hint
        for name, hint in fn.__annotations__.items()
        if isinstance(hint, type) and issubclass(hint, AbstractArray)
    }


def _check(fn: Callable, hints: dict[str, type]) -> Callable:
    """`fn`, which raises where an array is not as its annotation says; axes of a name are equal."""
    names = list(signature(fn).parameters)

    @wraps(fn)
    def checked(*args: Any, **kwargs: Any) -> Any:
        with jaxtyped("context"):
            for name, value in (*zip(names, args, strict=False), *kwargs.items()):
                if name in hints and not isinstance(value, hints[name]):
                    raise TypeCheckError(_put_in_words(fn, name, value, hints[name]))
            result = fn(*args, **kwargs)
            if "return" in hints and not isinstance(result, hints["return"]):
                raise TypeCheckError(_put_in_words(fn, "return", result, hints["return"]))
            return result

    return checked


def _put_in_words(fn: Callable, name: str, value: Any, hint: type) -> str:
    got = f"{value.dtype}{list(value.shape)}" if hasattr(value, "shape") else repr(value)
    return f"{fn.__qualname__}: {name} must be {hint.__name__}, got {got}."
