"""BatchNorm over accepted rows of all ranks, for flax nnx: the twin of `batch_norm`.

A file of its own, because importing `flax.nnx` costs a quarter of a second.
"""

from flax import nnx
from jaxtyping import Array

from jax_ddp_weighting.train.batch_norm import (
    batch_statistics,
    check_mask,
    choose,
    feature_axes,
    normalise,
    update_running,
)


class NnxBatchNorm(nnx.BatchNorm):
    """`flax.nnx.BatchNorm` whose statistics are over accepted rows of all ranks.

    The rule: as for `BatchNorm`, its twin for linen.

    Constructor and state are flax's, so that a model swaps the class, and passes on `weights`.

    Attributes:
        axis_name: the mapped data axis (or a tuple of axes) inside `shard_map`, `pmap` or `vmap`;
            None for the global view of `jit`, and for one device. All other arguments are flax's.

    Matches: `flax.nnx.BatchNorm` of flax 0.12.8, as its twin does.

    Example:
        >>> from flax import nnx
        >>> norm = jdw.NnxBatchNorm(1, momentum=0.0, rngs=nnx.Rngs(0))
        >>> x = jnp.array([[0.0], [2.0], [4.0], [6.0], [7.0]])
        >>> y = norm(x, weights=jnp.array([1, 1, 1, 1, 0]))
        >>> norm.mean[...].tolist(), norm.var[...].tolist()
        ([3.0], [5.0])
    """

    def __call__(  # pyright: ignore[reportIncompatibleMethodOverride] - weights, for flax's mask
        self,
        x: Array,
        use_running_average: bool | None = None,
        *,
        weights: Array | None = None,
        mask: Array | None = None,
    ) -> Array:
        """The normalised input; see `BatchNorm`."""
        weights = check_mask(weights, mask)
        if use_running_average is None:
            use_running_average = self.use_running_average
        if use_running_average is None or use_running_average:
            return super().__call__(x, use_running_average)
        features = feature_axes(x, self.axis)
        scale = None if self.scale is None else self.scale[...]
        bias = None if self.bias is None else self.bias[...]
        running = (self.mean[...], self.var[...])
        x, _, _, scale, bias = self.promote_dtype((x, *running, scale, bias), dtype=self.dtype)
        batch, present = batch_statistics(x, weights, features, self, self.axis_name)
        self.mean[...], self.var[...] = update_running(running, batch, present, self.momentum)
        mean, var = choose(present, batch, running)
        return normalise(x, mean, var, scale, bias, features, self.epsilon, self.dtype)
