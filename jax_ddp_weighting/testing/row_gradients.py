"""Each row's own gradient and weight, and which rows can be told by them."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from jax_ddp_weighting.testing.per_example import per_example_gradients
from jax_ddp_weighting.weighting.sums import WeightedSum


def differentiate_rows(
    loss_of_example: Callable[..., Any], params: Any, data: PyTree, keys: Any, wrt: Any
) -> tuple[PyTree, np.ndarray]:
    """Each row's gradient of its mean, `[rows, ...]`, and its weight in the units of its loss."""
    examples = data if keys is None else (data, keys)

    def losses_of(params: Any, example: Any) -> tuple[Any, Any]:
        given = (example,) if keys is None else example
        found = loss_of_example(params, *given)
        if isinstance(found, WeightedSum):
            return found.total, found.weight
        if isinstance(found, Mapping) or np.shape(found) != ():
            shape = "" if isinstance(found, Mapping) else f" of shape {np.shape(found)}"
            raise TypeError(
                "diagnose_step: loss_of_example must return a scalar or one WeightedSum, got "
                f"{type(found).__name__}{shape}. weighted_sum(losses, weights) is that of a row's "
                "tokens; of a loss of several terms give the one that the step takes."
            )
        return found, 1.0

    trained, whole = _split_model(params, wrt)
    own = per_example_gradients(lambda p, x: losses_of(whole(p), x)[0], trained, examples)

    def weigh(trained: PyTree, example: Any) -> Any:
        return jnp.asarray(losses_of(whole(trained), example)[1], float)

    # compiled, which leaves out the losses that no weight is made of
    weights = np.asarray(jax.jit(jax.vmap(weigh, (None, 0)))(trained, examples), float)
    if not np.isfinite(weights).all() or (weights < 0).any():
        raise ValueError(
            "diagnose_step: loss_of_example must return weights that are finite and at least 0, "
            f"got {weights.tolist()}. They are the counts of a row's tokens."
        )
    size = np.where(weights > 0, weights, 1.0)

    def divide(leaf: Any) -> np.ndarray:
        leaf = np.asarray(leaf)
        of_rows = size.reshape(-1, *[1] * (leaf.ndim - 1))
        return leaf if (size == 1).all() else (leaf / of_rows.astype(leaf.dtype))

    return jax.tree.map(divide, own), weights


def _split_model(params: Any, wrt: Any) -> tuple[PyTree, Callable[[PyTree], Any]]:
    """What is differentiated, and what makes of it that which the loss is given.

    Of a model of nnx that is a copy at each call: models write into themselves on their way
    forward, counters and statistics and what they sow, and one from outside of a trace must not.
    """
    from flax import nnx  # here: the rest of this module needs no flax

    if not isinstance(params, nnx.Module):
        return params, lambda params: params
    graph, trained, rest = nnx.split(params, wrt, ...)
    return trained, lambda trained: nnx.merge(graph, trained, rest, copy=True)


def find_in_training(params: Any) -> list[str]:
    """Layers of a model of nnx that draw, or normalise by the batch's own statistics, and where."""
    from flax import nnx

    if not isinstance(params, nnx.Module):
        return []
    found = []
    for path, node in nnx.iter_graph(params):
        rate = getattr(node, "rate", getattr(node, "dropout_rate", 0))
        draws = getattr(node, "deterministic", None) is False and np.ndim(rate) == 0 and rate > 0
        if draws or getattr(node, "use_running_average", None) is False:
            found.append(f"{type(node).__name__} at {'.'.join(map(str, path))!r}")
    return found


def find_solvable(own: PyTree, weights: np.ndarray) -> np.ndarray:
    """The rows whose counts are solved for: all but those of weight 0 that cannot show.

    A row without any gradient counts nothing, whatever is done to it; of copies one stays, with
    which the others are counted; and what is not finite in a row of weight 0 shows in the step.
    """
    rows = flatten_rows(own, len(weights))
    kept: list[int] = []
    seen: set[bytes] = set()
    for row in [*np.flatnonzero(weights), *np.flatnonzero(weights == 0)]:
        name = rows[row].tobytes()
        hidden = not rows[row].any() or not np.isfinite(rows[row]).all() or name in seen
        if weights[row] or not hidden:
            kept.append(int(row))
            seen.add(name)
    return np.sort(np.array(kept, int))


def flatten_rows(own: PyTree, count: int) -> np.ndarray:
    """Every row's gradient as one vector, `[rows, parameters]`."""
    leaves = [np.asarray(leaf, float).reshape(count, -1) for leaf in jax.tree.leaves(own)]
    return np.concatenate(leaves, axis=1) if leaves else np.zeros((count, 0))
