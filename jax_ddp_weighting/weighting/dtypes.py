"""The dtypes that sums are taken in, whatever promotion the program allows itself."""

from typing import Any

import jax
import jax.numpy as jnp


def widen(least: Any, *dtypes: Any) -> Any:
    """The narrowest dtype that holds `least` and all others, such as float32 for bfloat16.

    By JAX's own table also under `jax.numpy_dtype_promotion("strict")`: what a program must spell
    out in its own arithmetic, the library has decided for its sums.
    """
    with jax.numpy_dtype_promotion("standard"):
        for dtype in dtypes:
            least = jnp.promote_types(least, _find_promoted(dtype))
    return least


def _find_promoted(dtype: Any) -> Any:
    """The dtype, or where JAX's table ends, for floats of 8 bits and less and integers of 4."""
    dtype = jnp.dtype(dtype)
    if jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize == 1:
        return jnp.dtype(jnp.bfloat16)
    if dtype.kind == "V" and jnp.issubdtype(dtype, jnp.integer):
        return jnp.dtype(jnp.int8)
    return dtype
