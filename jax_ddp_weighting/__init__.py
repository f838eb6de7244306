"""Data-parallel training in which every example counts as its weight, once.

The public names are resolved on first use (PEP 562), so that importing the package, or only
`jax_ddp_weighting.sampling`, never imports JAX. `_rooms` lists them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from jax_ddp_weighting import _rooms

if TYPE_CHECKING:
    from jax_ddp_weighting._errors import *
    from jax_ddp_weighting._version import *
    from jax_ddp_weighting.data import *
    from jax_ddp_weighting.distributed import *
    from jax_ddp_weighting.evaluation import *
    from jax_ddp_weighting.sampling import *
    from jax_ddp_weighting.testing import *
    from jax_ddp_weighting.train import *
    from jax_ddp_weighting.weighting import *

_HOME = {name: room for room, names in _rooms.PUBLIC.items() for name in names}

__all__ = sorted(name for name in _HOME if not name.startswith("_"))


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
        globals()[name] = value
        return value
    if name in _rooms.PUBLIC:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME, *_rooms.PUBLIC})
