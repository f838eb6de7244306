"""BatchNorm takes what flax's takes, where flax's takes it."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_ddp_weighting import BatchNorm, NnxBatchNorm

X = np.float32([[0.0, 1.0], [2.0, 5.0], [4.0, 3.0], [100.0, 100.0]])
COUNTED = np.array([1, 1, 1, 0])
VARIABLES = {
    "params": {"scale": jnp.float32([1, 2]), "bias": jnp.float32([0, 1])},
    "batch_stats": {"mean": jnp.float32([3, 4]), "var": jnp.float32([4, 9])},
}


@pytest.mark.parametrize("norm", [BatchNorm, nn.BatchNorm])
def test_running_averages_are_asked_for_in_either_place(norm):
    by_call = norm().apply(VARIABLES, X, use_running_average=True)
    by_position = norm().apply(VARIABLES, X, True)
    by_constructor = norm(use_running_average=True).apply(VARIABLES, X)
    np.testing.assert_array_equal(by_call, by_constructor)
    np.testing.assert_array_equal(by_call, by_position)
    np.testing.assert_allclose(by_call, (X - [3, 4]) / [2, 3] * [1, 2] + [0, 1], rtol=1e-4)


@pytest.mark.parametrize("asked", [True, False])
@pytest.mark.parametrize("norm", [BatchNorm, nn.BatchNorm])
def test_both_places_at_once_are_refused_as_in_flax(norm, asked):
    with pytest.raises(ValueError, match="use_running_average"):
        norm(use_running_average=asked).apply(VARIABLES, X, use_running_average=asked)


@pytest.mark.parametrize("norm", [BatchNorm, nn.BatchNorm])
def test_neither_place_is_refused_as_in_flax(norm):
    with pytest.raises(ValueError, match="use_running_average"):
        norm().apply(VARIABLES, X)


def test_weights_may_be_given_to_a_layer_that_evaluates():
    norm = BatchNorm(use_running_average=True)
    found = norm.apply(VARIABLES, X, weights=COUNTED)
    np.testing.assert_array_equal(found, norm.apply(VARIABLES, X))


@pytest.mark.parametrize("mask", [COUNTED > 0, COUNTED, (COUNTED > 0)[:, None]])
def test_a_mask_is_a_weight_of_0_or_1(mask):
    def run(**given):
        norm = BatchNorm(use_running_average=False, momentum=0.0)
        return norm.apply(VARIABLES, X, mutable="batch_stats", **given)

    out, updates = run(mask=mask)
    right, expected = run(weights=COUNTED)
    np.testing.assert_array_equal(out, right)
    jax.tree.map(np.testing.assert_array_equal, updates, expected)
    np.testing.assert_allclose(updates["batch_stats"]["mean"], [2, 3])
    if mask.ndim == 2:  # as flax's own layer has it on one device
        norm = nn.BatchNorm(use_running_average=False, momentum=0.0)
        theirs, _ = norm.apply(VARIABLES, X, mask=mask, mutable="batch_stats")
        np.testing.assert_allclose(out[:3], theirs[:3], rtol=1e-5)


def test_a_mask_is_taken_by_the_nnx_layer_too():
    def statistics(**given):
        norm = NnxBatchNorm(2, momentum=0.0, rngs=nnx.Rngs(0))
        out = norm(jnp.asarray(X), **given)
        return out, norm.mean[...], norm.var[...]

    masked = statistics(mask=COUNTED > 0)
    jax.tree.map(np.testing.assert_array_equal, masked, statistics(weights=COUNTED))
    np.testing.assert_allclose(masked[1], [2, 3])


@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_masks_that_are_weights_are_refused(kind):
    def run(**given):
        if kind == "linen":
            return BatchNorm(use_running_average=False).apply(
                VARIABLES, X, mutable="batch_stats", **given
            )
        return NnxBatchNorm(2, rngs=nnx.Rngs(0))(jnp.asarray(X), **given)

    with pytest.raises(TypeError, match=r"mask must be of bools, got float32.*weights="):
        run(mask=np.float32(COUNTED) / 2)
    with pytest.raises(ValueError, match="weights must come without a mask, got both"):
        run(mask=COUNTED > 0, weights=COUNTED)
    with pytest.raises(ValueError, match="weights must have the shape of the leading axes"):
        run(mask=np.ones(X.shape, bool))  # features have no weights of their own


def test_nnx_averages_are_asked_for_in_either_place():
    by_constructor = NnxBatchNorm(2, use_running_average=True, rngs=nnx.Rngs(0))
    by_call = NnxBatchNorm(2, rngs=nnx.Rngs(0))
    x = jnp.asarray(X)
    np.testing.assert_array_equal(by_constructor(x), by_call(x, use_running_average=True))
    np.testing.assert_array_equal(by_constructor.mean[...], np.zeros(2))
