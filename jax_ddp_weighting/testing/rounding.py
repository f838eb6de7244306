"""How much of a difference is rounding: what rows contribute, and how narrow the numbers are.

A gradient is a sum over rows. Near an optimum its rows cancel, and what is left is as small as the
rounding of the rows: measured by itself, two right ways of summing it up differ by everything.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import PyTree

from jax_ddp_weighting.data.batch import Batch
from jax_ddp_weighting.weighting.divisors import Divisors, apply_divisors
from jax_ddp_weighting.weighting.loss_terms import has_gradient, name_terms
from jax_ddp_weighting.weighting.sums import divide


def measure_rows(
    sums_of: Callable[[PyTree, Batch], Any],
    params: PyTree,
    batch: Batch,
    coefficients: Mapping[str, Any] | None,
    divisors: Divisors | None = None,
) -> dict[str, PyTree]:
    """The sizes that a loss and its gradients would have if no two rows cancelled.

    Args:
        sums_of: `sums_of(params, batch)` returns a `WeightedSum`, or a dict of them.
        params: the parameters.
        batch: the whole batch, whose rows are taken one by one.
        coefficients: one factor per term, or None for a loss of one.
        divisors: what terms are divided by that have a divisor.

    Returns:
        Of `loss`, and of each leaf of `params`, the largest entry of the rows' contributions, added
        up without their signs; 0 where rows cannot be had one by one.
    """
    factors = coefficients or {"loss": 1.0}
    rows = jnp.arange(np.shape(batch.weights)[0])

    def terms_of(params: PyTree, row: Any) -> dict[str, Any]:
        one = jax.tree.map(lambda leaf: lax.dynamic_slice_in_dim(jnp.asarray(leaf), row, 1), batch)
        terms = name_terms(sums_of(params, one), coefficients, caller="check_gradients")
        return {name: each for name, each in terms.items() if has_gradient(factors[name])}

    @jax.jit
    def measure(params: PyTree) -> tuple[Any, PyTree]:
        weights = lax.map(
            lambda row: {name: each.weight for name, each in terms_of(params, row).items()}, rows
        )
        weights = jax.tree.map(jnp.sum, weights)
        given = {name: each for name, each in (divisors or {}).items() if name in weights}
        weights |= apply_divisors(given, weights, replicated=None, axis_name=None)

        def share(params: PyTree, row: Any) -> Any:
            terms = terms_of(params, row).items()
            return sum(factors[name] * divide(each.total, weights[name]) for name, each in terms)

        def add(sizes: PyTree, row: Any) -> tuple[PyTree, None]:
            return jax.tree.map(
                lambda size, each: size + jnp.abs(each).astype(size.dtype),
                sizes,
                jax.value_and_grad(share)(params, row),
            ), None

        # at least float32, whatever the gradients are: bfloat16 would stop adding up
        sizes = jax.tree.map(
            lambda leaf: jnp.zeros(
                jnp.shape(leaf), jnp.promote_types(jnp.float32, abs(leaf).dtype)
            ),
            (jnp.zeros(()), params),
        )
        return lax.scan(add, sizes, rows)[0]

    def find_size(leaf: Any) -> float:
        size = find_largest(leaf)
        return size if np.isfinite(size) else 0.0

    try:
        loss, gradients = measure(params)
    except Exception:  # a loss of somebody's that takes no single row: the scale stays what it was
        return {"loss": 0.0, "params": jax.tree.map(lambda _: 0.0, params)}
    return {"loss": find_size(loss), "params": jax.tree.map(find_size, gradients)}


def find_largest(tree: PyTree) -> float:
    """The largest absolute entry of a tree of arrays."""
    sizes = [np.max(np.abs(np.asarray(leaf)), initial=0.0) for leaf in jax.tree.leaves(tree)]
    return float(max(sizes, default=0.0))


def find_narrowest(fn: Callable[..., Any], *args: Any) -> np.dtype | None:
    """The narrowest floating point dtype that `fn(*args)` computes in, wherever in its program."""
    program = jax.make_jaxpr(fn)(*args).jaxpr
    found = {dtype for dtype in _dtypes_in(program) if jnp.issubdtype(dtype, jnp.floating)}
    return min(found, key=lambda dtype: -jnp.finfo(dtype).eps, default=None)


def _dtypes_in(program: Any) -> Iterator[Any]:
    for equation in program.eqns:
        yield from (out.aval.dtype for out in equation.outvars if hasattr(out.aval, "dtype"))
        for parameter in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda each: hasattr(each, "eqns")
        ):
            inner = getattr(parameter, "jaxpr", parameter)  # closed ones hold another
            if hasattr(inner, "eqns"):
                yield from _dtypes_in(inner)
