"""How much each example really counted, solved from a gradient that any code has made."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, PyTree

from jax_ddp_weighting._arguments import check_callable, check_rtol, list_some
from jax_ddp_weighting.testing.conventions import round_up
from jax_ddp_weighting.testing.torch_arrays import as_array

_TELLING = 10  # by so much a cause must add to an uncertainty to be called the cause
_WIDEST = 0.05  # conventions lie no further apart


def effective_weights(
    gradient: PyTree, per_example_gradients: PyTree, *, rtol: float = 1e-3
) -> Float[np.ndarray, " examples"]:
    """How much each example counted in a gradient: the factors that its own gradient had there.

    The rule: least squares for `gradient = sum over i of weight_i * gradient_i`, in float64. They
    are returned only if the gradients determine them; else the error says which examples cannot be
    told apart, or that the gradient is no such sum.

    Args:
        gradient: what a step applied, a pytree of arrays; made by JAX, torch or anything else.
            Arrays of numpy, JAX and torch are taken as they are, bfloat16 and parameters too.
        per_example_gradients: each example's own gradient at the same parameters: the same
            structure, every leaf with one more leading axis, `[examples, ...]`. See
            `per_example_gradients`.
        rtol: the uncertainty allowed in a weight, relative to the largest; and the part of the
            gradient, relative to its norm, that the examples may leave unexplained.

    Returns:
        float64 `[examples]`. The right ones are `weight / sum of all weights`, over all ranks and
        microbatches.

    Raises:
        ValueError: the trees differ in structure or shape; something is not finite; the examples'
            gradients do not determine the weights; they do not explain the gradient; or `rtol` is
            not in `[0, 1)`.
        TypeError: a leaf is no array of numbers.

    Example:
        >>> own = np.array([[1.0, 0.0, 2.0], [0.0, 3.0, 1.0]])  # two examples, three parameters
        >>> mean_of_two = np.array([0.5, 1.5, 1.5])
        >>> effective_weights(mean_of_two, own).tolist()
        [0.5, 0.5]
    """
    check_rtol("effective_weights: rtol", rtol)
    target, own, target_eps, eps = _flatten(gradient, per_example_gradients)
    # Gram matrix of unit vectors: its entries are cosines, so that examples with small gradients
    # are told apart as well as those with large ones, and one floor below fits all of them.
    norms = np.sqrt(sum(np.einsum("ep,ep->e", leaf, leaf) for leaf in own))
    _check_norms(norms)
    gram = sum(leaf @ leaf.T for leaf in own) / np.outer(norms, norms)
    values, vectors = np.linalg.eigh(gram)
    # below this a direction is rounding: of the gradients, or of the Gram matrix itself
    floor = max(len(norms) * np.finfo(float).eps, (4 * eps) ** 2) * values[-1]
    determined = values > floor
    _check_determined(vectors[:, ~determined])

    def solve(leaves: list[np.ndarray]) -> np.ndarray:
        right = sum(leaf @ each for leaf, each in zip(own, leaves, strict=True)) / norms
        return vectors @ ((vectors.T @ right) / values) / norms

    def residual(weights: np.ndarray) -> list[np.ndarray]:
        return [each - weights @ leaf for leaf, each in zip(own, target, strict=True)]

    weights = solve(target)
    for _ in range(2):  # refined, since the Gram matrix squares the condition number
        weights = weights + solve(residual(weights))
    size = _norm(target)
    left = _norm(residual(weights))
    if left > rtol * size:
        raise ValueError(
            f"effective_weights: gradient must be a weighted sum of per_example_gradients, got one "
            f"of which they leave {left / size:.1%} unexplained. Something else is in it: a "
            "regulariser, momentum, clipping, batch statistics, other examples or parameters than "
            "these, or the rounding of an update that was undone."
        )
    # What is left shows the noise only of more parameters than examples. So no less than what the
    # examples' gradients are rounded by, summed up, and the gradient itself, which is rounded once.
    noise = max(left, 8 * eps * float(np.abs(weights) @ norms), target_eps / 2 * size)
    spread = np.sqrt((vectors**2 / values).sum(axis=1))  # 1 where no two gradients are alike
    uncertainty = noise * spread / norms
    worst = int(np.argmax(uncertainty))
    largest = float(np.max(np.abs(weights)))
    if uncertainty[worst] > rtol * largest:
        off = uncertainty[worst] / largest
        if spread[worst] >= max(_TELLING, norms.max() / norms[worst]):
            cause = _name_alike(gram, vectors[:, np.argmax(vectors[worst] ** 2 / values)])
        else:
            unexplained = left / size if left == noise else 0.0
            cause = _name_noise(norms[worst] / norms.max(), unexplained, off)
        raise ValueError(
            f"effective_weights: per_example_gradients must determine the weights to rtol={rtol:g},"
            f" got an uncertainty of {off:.1e} of the largest weight at example {worst}: {cause}"
        )
    return weights


def per_example_gradients(
    loss_of_example: Callable[[Any, Any], Any], params: Any, examples: PyTree, *, wrt: Any = None
) -> PyTree:
    """Each example's own gradient, by `vmap` of `grad`.

    Args:
        loss_of_example: `loss_of_example(params, example)` returns the scalar loss of one example,
            whose arrays have no leading axis. For a linen model it calls `model.apply(params, ...)`
            on a batch of one row.
        params: the parameters, a pytree; or an nnx model, which the loss is then given whole, and
            whose `nnx.Param`s are differentiated.
        examples: a pytree of arrays `[examples, ...]`.
        wrt: for an nnx model, which variables are differentiated in place of all `nnx.Param`s, such
            as an optimizer's `wrt`.

    Returns:
        The structure of `params` (for an nnx model, the `nnx.State` of its parameters, as
        `nnx.grad` returns it), every leaf `[examples, ...]`.

    Raises:
        TypeError: a parameter is no float, or the loss no scalar.

    Example:
        >>> gradients = per_example_gradients(lambda w, x: w * x, 2.0, jnp.array([1.0, 3.0]))
        >>> gradients.tolist()
        [1.0, 3.0]
    """
    from flax import nnx  # here: the rest of this module needs no flax

    remedy = "It takes (params, example) and returns a scalar."
    check_callable("per_example_gradients: loss_of_example", loss_of_example, remedy)

    def loss_of(params: Any, example: Any) -> Any:
        loss = loss_of_example(params, example)
        is_number = hasattr(loss, "dtype") or isinstance(loss, int | float)
        if not is_number or np.shape(loss):
            shape = f" of shape {np.shape(loss)}" if hasattr(loss, "dtype") else ""
            raise TypeError(
                "per_example_gradients: loss_of_example must return a scalar, got"
                f" {type(loss).__name__}{shape}. It is the loss of one example: sum over its"
                " tokens, or take the total of its WeightedSum."
            )
        return loss

    if not isinstance(params, nnx.Module):
        for path, leaf in jax.tree_util.tree_leaves_with_path(params):
            if not jnp.issubdtype(jnp.result_type(leaf), jnp.inexact):
                raise TypeError(
                    "per_example_gradients: params must be floating point, got"
                    f" {jnp.result_type(leaf)} at params{jax.tree_util.keystr(path)}. What is no"
                    " parameter the functions may close over."
                )
        return jax.vmap(jax.grad(loss_of), in_axes=(None, 0))(params, examples)
    graph, state, rest = nnx.split(params, nnx.Param if wrt is None else wrt, ...)

    def loss_of_state(state: Any, example: Any) -> Any:
        return loss_of(nnx.merge(graph, state, rest), example)

    return jax.vmap(jax.grad(loss_of_state), in_axes=(None, 0))(state, examples)


def _flatten(
    gradient: PyTree, examples: PyTree
) -> tuple[list[np.ndarray], list[np.ndarray], float, float]:
    """Both trees as float64 leaves `[parameters]` and `[examples, parameters]`, and their eps."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(gradient)
    own, own_structure = jax.tree_util.tree_flatten(examples)
    if structure != own_structure:
        raise ValueError(
            "effective_weights: per_example_gradients must have the structure of gradient, got "
            f"{own_structure} for {structure}. Stack the examples' gradients leaf by leaf: "
            "jax.tree.map(lambda *leaves: np.stack(leaves), *gradients)."
        )
    if not leaves:
        raise ValueError(
            "effective_weights: gradient must have leaves, got an empty tree. "
            "Give the gradient of every parameter."
        )
    leaves = [
        (path, as_array(leaf, f"effective_weights: gradient{jax.tree_util.keystr(path)}"))
        for path, leaf in leaves
    ]
    own = [as_array(each, "effective_weights: per_example_gradients") for each in own]
    count = own[0].shape[:1]
    targets, owns = [], []
    target_eps = own_eps = float(np.finfo(float).eps)
    for (path, a), b in zip(leaves, own, strict=True):
        where = f"gradient{jax.tree_util.keystr(path)}"
        if b.shape != (*count, *a.shape) or not count or not count[0]:
            raise ValueError(
                "effective_weights: per_example_gradients must have the shapes of gradient with "
                f"one more leading axis, got {b.shape} for {a.shape} at {where}. The leading axis "
                "is over examples, the same in every leaf."
            )
        target_eps, own_eps = max(target_eps, _eps(a.dtype)), max(own_eps, _eps(b.dtype))
        a, b = _as_reals(a.reshape(-1)), _as_reals(b.reshape(b.shape[0], -1))
        if not (np.isfinite(a).all() and np.isfinite(b).all()):
            whose = "gradient" if not np.isfinite(a).all() else "per_example_gradients"
            raise ValueError(
                f"effective_weights: {whose} must be finite, got NaN or infinity at {where}. "
                "Look for a mean over no examples, or a loss of NaN at weight 0."
            )
        targets.append(a)
        owns.append(b)
    return targets, owns, target_eps, own_eps


def _as_reals(values: np.ndarray) -> np.ndarray:
    """In float64, imaginary parts beside real ones: weights are real, and both are sums by them."""
    if not np.iscomplexobj(values):
        return values.astype(float)
    return np.concatenate([np.real(values), np.imag(values)], axis=-1).astype(float)


def _eps(dtype: Any) -> float:
    return float(jnp.finfo(dtype).eps) if jnp.issubdtype(dtype, jnp.inexact) else 0.0


def _check_norms(norms: np.ndarray) -> None:
    if not norms.all():
        raise ValueError(
            "effective_weights: per_example_gradients must differ from 0, got gradients of 0 for "
            f"examples {list_some(np.flatnonzero(norms == 0))}: what they counted cannot show. "
            "Leave them out, or take other parameters."
        )


def _name_alike(gram: np.ndarray, mixture: np.ndarray) -> str:
    """Which examples nearly make each other up, by a mixture of them that is nearly nothing."""
    sizes = np.abs(mixture)
    mixed = np.flatnonzero(sizes >= sizes.max() / 2)
    are_alike = len(mixed) == 2 and gram[mixed[0], mixed[1]] > 0
    how = "are nearly alike" if are_alike else "are nearly linearly dependent"
    return (
        f"the gradients of examples {list_some(mixed)} {how}. Take fewer or more different "
        "examples, a larger model, or float64."
    )


def _name_noise(part: float, unexplained: float, off: float) -> str:
    """Why weights are uncertain though no two examples are alike.

    Args:
        part: the size of the uncertain example's gradient, as a part of the largest.
        unexplained: the part of the gradient that the examples leave; 0 where rounding is more.
        off: the uncertainty, as a part of the largest weight.
    """
    enough = f", or allow rtol={round_up(off):g}" if off < _WIDEST else ""
    if part <= 1 / _TELLING:
        return f"its gradient is {part:.1e} of the largest. Leave it out, take float64{enough}."
    if unexplained:
        return (
            f"the examples leave {unexplained:.1e} of the gradient unexplained. It may be the "
            "rounding of an update that was undone, or something small beside the examples, such "
            "as a regulariser. Give the gradient itself, take float64 or a learning rate of 1, "
            f"and leave out what is beside them{enough}."
        )
    return f"the gradients are rounded too much. Take a wider dtype{enough}."


def _check_determined(free: np.ndarray) -> None:
    """Refuses examples whose weights could be exchanged without a change in the gradient."""
    if free.size:
        alike = np.flatnonzero(np.abs(free).max(axis=1) > 1e-3)
        raise ValueError(
            "effective_weights: per_example_gradients must be linearly independent, got "
            f"{len(free)} gradients of which those of examples {list_some(alike)} are not: their "
            "weights cannot be told apart. Leave copies out, or take a model with more parameters."
        )


def _norm(leaves: list[np.ndarray]) -> float:
    return float(np.sqrt(sum(float(leaf @ leaf) for leaf in leaves)))
