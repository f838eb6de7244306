"""BatchNorm over accepted rows of all ranks, for flax linen; what its twin for nnx shares.

A batch statistic is a weighted mean too: its sums are taken over all ranks, and divided once.
flax's own layers average the ranks' means, so that a rank of few rows has as much say as a full
one.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.linen.dtypes import canonicalize_dtype
from jax import lax
from jaxtyping import Array

from jax_ddp_weighting.distributed import mesh
from jax_ddp_weighting.distributed.mesh import AxisName
from jax_ddp_weighting.weighting.counts import is_bad
from jax_ddp_weighting.weighting.dtypes import widen
from jax_ddp_weighting.weighting.sums import divide


class BatchNorm(nn.BatchNorm):
    """`flax.linen.BatchNorm` whose statistics are over accepted rows of all ranks.

    The rule: `mean = sum(w * x) / sum(w)` and `var = sum(w * |x - mean|^2) / sum(w)`, every sum
    taken over all positions of all ranks on `axis_name`. Training statistics, running averages and
    gradients are those of one device that holds the accepted rows alone. Where nothing in the step
    has weight, the running averages normalise, and stay as they are.

    Constructor, parameters, collections and names are flax's, so that a model swaps the class, and
    passes on `weights`. Each microbatch is normalised by its own statistics, as everywhere.

    Attributes:
        axis_name: the mapped data axis (or a tuple of axes) inside `shard_map`, `pmap` or `vmap`;
            None for the global view of `jit`, and for one device. All other fields are flax's.

    Matches: `flax.linen.BatchNorm` of flax 0.12.8 on one device and the accepted rows alone:
        outputs, running averages and gradients, to 1e-12 in float64
        (tests/train/test_batch_norm.py).

    Example:
        >>> norm = jdw.BatchNorm(use_running_average=False, momentum=0.0, axis_name="data")
        >>> x = jnp.array([[[0.0], [7.0], [7.0]], [[2.0], [4.0], [6.0]]])  # two ranks of 1 and 3
        >>> weights = jnp.array([[1, 0, 0], [1, 1, 1]])
        >>> variables = norm.init(jax.random.key(0), x[0])
        >>> def statistics(x, weights):
        ...     return norm.apply(variables, x, weights=weights, mutable="batch_stats")[1]
        >>> ours = jax.vmap(statistics, axis_name="data")(x, weights)["batch_stats"]
        >>> ours["mean"].tolist(), ours["var"].tolist()  # flax gives 2 and 5.33
        ([[3.0], [3.0]], [[5.0], [5.0]])
    """

    @nn.compact
    def __call__(  # pyright: ignore[reportIncompatibleMethodOverride] - weights, for flax's mask
        self,
        x: Array,
        use_running_average: bool | None = None,
        *,
        weights: Array | None = None,
        mask: Array | None = None,
    ) -> Array:
        """The normalised input.

        Args:
            x: `[rows, ..., features]`, or with the features where `axis` says.
            use_running_average: normalise by the running averages, and leave them as they are.
            weights: how much each position counts: `[rows]`, or any leading axes of `x`; 0 is
                padding. Every position counts 1 when None.
            mask: flax's name for weights that are all 0 or 1, as bools or integers.

        Returns:
            An array of the shape of `x`. Positions of weight 0 are normalised too.

        Raises:
            TypeError: `mask` is neither bool nor integer.
            ValueError: `weights` has another shape, or comes beside a `mask`; or the axis is not
                mapped.
        """
        weights = check_mask(weights, mask)
        if nn.merge_param("use_running_average", self.use_running_average, use_running_average):
            return super().__call__(x, use_running_average)  # where it was said; flax merges too
        features = feature_axes(x, self.axis)
        shape = tuple(x.shape[axis] for axis in features)
        # From here on flax's own method, which has no place for weights: the same collections,
        # parameters and dtypes, in the same order, so that checkpoints and seeds carry over.
        kept_dtype = jnp.float32 if self.force_float32_reductions else self.param_dtype
        means = self.variable("batch_stats", "mean", jnp.zeros, shape, kept_dtype)
        variances = self.variable("batch_stats", "var", jnp.ones, shape, kept_dtype)
        # Models are initialised outside of the mapped function, where the axis is not known.
        axis_name = None if self.is_initializing() else self.axis_name
        batch, present = batch_statistics(x, weights, features, self, axis_name)
        running = (means.value, variances.value)
        if not self.is_initializing():
            means.value, variances.value = update_running(running, batch, present, self.momentum)
        mean, var = choose(present, batch, running)
        scale = (
            self.param("scale", self.scale_init, shape, self.param_dtype)
            if self.use_scale
            else None
        )
        bias = (
            self.param("bias", self.bias_init, shape, self.param_dtype) if self.use_bias else None
        )
        return normalise(x, mean, var, scale, bias, features, self.epsilon, self.dtype)


Statistics = tuple[Array, Array]  # mean and variance, each of the shape of the features


def check_mask(weights: Array | None, mask: Array | None) -> Array | None:
    """The weights, by whichever of the two names they came."""
    if mask is None:
        return weights
    if weights is not None:
        raise ValueError(
            "BatchNorm: weights must come without a mask, got both. Multiply them into one."
        )
    mask = jnp.asarray(mask)
    if not (mask.dtype == jnp.bool_ or jnp.issubdtype(mask.dtype, jnp.integer)):
        raise TypeError(
            f"BatchNorm: mask must be of bools, got {mask.dtype}. What counts in part is a weight: "
            "pass it as weights=."
        )
    return mask != 0


def feature_axes(x: Array, axis: int | Sequence[int]) -> tuple[int, ...]:
    """The axes of `x` that keep statistics of their own, ascending."""
    axes = (axis,) if isinstance(axis, int) else axis
    return tuple(sorted({each % x.ndim for each in axes}))


def batch_statistics(
    x: Array,
    weights: Array | None,
    features: tuple[int, ...],
    options: Any,
    axis_name: AxisName | None,
) -> tuple[Statistics, Array]:
    """Mean and variance over all positions of all ranks, and whether any position has weight."""
    dtype = x.dtype if options.dtype is None else options.dtype
    x = x.astype(widen(jnp.float32, dtype))  # bfloat16 stops adding at 256
    over = tuple(axis for axis in range(x.ndim) if axis not in features)
    weights = _expand_weights(weights, x, features)
    floating = jnp.finfo(x.dtype).dtype  # of complex numbers, that of their parts
    # Counted by row first: integers stay exact up to the one cast, and no count passes 2**31.
    positions = math.prod(x.shape[i] for i in over if weights.shape[i] == 1)
    count = jnp.sum(weights).astype(floating) * float(positions)
    # A weight that cannot count makes the step one without weight, as it does in a loss: NaN is not
    # above 0, on any rank that it reaches.
    count = jnp.where(jnp.any(is_bad(weights)), jnp.nan, count)
    weights = weights.astype(floating)
    # padding may be NaN, and 0 * NaN is NaN
    kept = jnp.where(weights != 0, x, jnp.zeros((), x.dtype))

    def means_of(*values: Array) -> tuple[list[Array], Array]:
        sums = [jnp.sum(weights * each, axis=over).reshape(-1) for each in values]
        # one all-reduce for all of them
        sums = jnp.concatenate([*sums, count.astype(sums[0].dtype).reshape(1)])
        if axis_name is not None:
            mesh.axis_size(axis_name, caller="BatchNorm")
            if options.axis_index_groups is not None and mesh.is_checked(axis_name):
                raise ValueError(
                    "BatchNorm: axis_index_groups must be None where shard_map checks what varies, "
                    f"got {options.axis_index_groups}. JAX sums over groups of ranks only under "
                    "shard_map(check_vma=False), pmap and vmap."
                )
            sums = lax.psum(sums, axis_name, axis_index_groups=options.axis_index_groups)
        shape = tuple(x.shape[axis] for axis in features)
        found = jnp.split(divide(sums[:-1], sums[-1]), len(values))
        return [each.reshape(shape) for each in found], sums[-1].real > 0

    if options.use_fast_variance:  # flax's default: E[x^2] - E[x]^2, in one all-reduce
        (mean, square), present = means_of(kept, _square(kept).astype(kept.dtype))
        var = jnp.maximum(square.real - _square(mean), 0)  # rounding may leave it below 0
    else:  # the deviations from a mean that must be known first, in two
        (mean,), present = means_of(kept)
        # over all positions: those of weight 0 are taken out by their weight
        (var,), _ = means_of(_square(kept - jnp.expand_dims(mean, over)))
    return (mean, var), present


@partial(jax.jit, inline=True)
def _square(x: Array) -> Array:
    return (x * jnp.conj(x)).real


def _expand_weights(weights: Array | None, x: Array, features: tuple[int, ...]) -> Array:
    if weights is None:
        return jnp.ones((1,) * x.ndim, jnp.int32)
    weights = lax.stop_gradient(jnp.asarray(weights))
    shape = (*weights.shape, *(1,) * (x.ndim - weights.ndim))
    fits = len(shape) == x.ndim and all(
        length == 1 or (length == x.shape[axis] and axis not in features)
        for axis, length in enumerate(shape)
    )
    if not fits:
        raise ValueError(
            f"BatchNorm: weights must have the shape of the leading axes of x, got weights "
            f"{weights.shape} and x {x.shape} with features at {features}. Give one weight per "
            f"row, ({x.shape[0]},), or one per position."
        )
    integers = jnp.issubdtype(weights.dtype, jnp.integer) or weights.dtype == jnp.bool_
    least = jnp.int32 if integers else jnp.float32
    return weights.astype(widen(least, weights.dtype)).reshape(shape)


def update_running(
    running: Statistics, batch: Statistics, present: Array, momentum: float
) -> Statistics:
    """The new running averages; the old ones where nothing in the step has weight."""

    def update(old: Array, each: Array) -> Array:
        # no gradient: what is kept for later steps is no part of this step's loss
        each = lax.stop_gradient(each)
        if not jnp.iscomplexobj(each):  # the mean of complex inputs is complex, and kept so
            each = each.astype(old.dtype)
        return momentum * old + (1 - momentum) * each

    return choose(present, tuple(map(update, running, batch)), running)


def choose(present: Array, first: Any, second: Any) -> Any:
    """Of two pairs of statistics the first, if anything has weight."""
    return tuple(jnp.where(present, a, b) for a, b in zip(first, second, strict=True))


@partial(jax.jit, static_argnames=("features", "dtype"), inline=True)
def normalise(
    x: Array,
    mean: Array,
    var: Array,
    scale: Array | None,
    bias: Array | None,
    features: tuple[int, ...],
    epsilon: float,
    dtype: Any,
) -> Array:
    """The input with its statistics taken out, scaled and shifted."""
    shape = tuple(x.shape[axis] if axis in features else 1 for axis in range(x.ndim))
    arguments = [each for each in (x, scale, bias) if each is not None]
    factor = lax.rsqrt(var.reshape(shape) + epsilon)
    if scale is not None:
        factor *= scale.reshape(shape)
    y = (x - mean.reshape(shape)) * factor
    if bias is not None:
        y += bias.reshape(shape)
    return y.astype(canonicalize_dtype(*arguments, dtype=dtype))
