"""What checks annotations at run time: arrays' shapes and dtypes, and nothing else.

Everything else is the business of pyright, and of the library's own errors, which a type check
at every call would forestall.
"""

from typing import Any

import beartype
from jaxtyping import AbstractArray


def checked(fn: Any) -> Any:
    """`fn` with its jaxtyping annotations checked on every call."""
    if not hasattr(fn, "__annotations__") or isinstance(fn, type):
        return fn
    arrays = {
        name: hint
        for name, hint in fn.__annotations__.items()
        if isinstance(hint, type) and issubclass(hint, AbstractArray)
    }
    fn.__annotations__ = arrays
    return beartype.beartype(fn) if arrays else fn
