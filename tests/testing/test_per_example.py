"""What each example counted, solved from gradients; and when that cannot be told."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_ddp_weighting import Batch, effective_weights, per_example_gradients, value_and_grad
from jax_ddp_weighting.weighting.sums import WeightedSum, weighted_sum


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(nn.tanh(nn.Dense(8)(x)))


class Nnx(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(4, 8, rngs=rngs)
        self.last = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x):
        return self.last(nnx.tanh(self.first(x)))


X = np.random.default_rng(1).normal(size=(7, 4)).astype(np.float32)
Y = np.random.default_rng(2).normal(size=(7, 3)).astype(np.float32)
WEIGHTS = np.array([1.0, 0.25, 0.0, 3.0, 1.0, 0.5, 1.0], np.float32)
LINEN = Linen()


def linen_loss(params, example):
    x, y = example
    return jnp.sum((LINEN.apply(params, x[None])[0] - y) ** 2)


def nnx_loss(model, example):
    x, y = example
    return jnp.sum((model(x[None])[0] - y) ** 2)


def test_the_global_mean_counts_each_linen_example_as_its_weight():
    params = jax.jit(LINEN.init)(jax.random.key(0), X[:1])
    own = per_example_gradients(linen_loss, params, (X, Y))

    def loss_fn(params, batch):
        x, y = batch.data
        losses = jnp.sum((LINEN.apply(params, x) - y) ** 2, axis=-1)
        return weighted_sum(losses, batch.weights)

    gradient_of = jax.jit(value_and_grad(loss_fn))
    _, gradient = gradient_of(params, Batch.of((X, Y), WEIGHTS))
    found = effective_weights(gradient, own)
    np.testing.assert_allclose(found, WEIGHTS / WEIGHTS.sum(), atol=1e-5)
    # and a mean of local means does not, by the same check
    _, first = gradient_of(params, Batch.of((X[:3], Y[:3]), WEIGHTS[:3]))
    _, last = gradient_of(params, Batch.of((X[3:], Y[3:]), WEIGHTS[3:]))
    found = effective_weights(jax.tree.map(lambda a, b: (a + b) / 2, first, last), own)
    halves = np.concatenate([WEIGHTS[:3] / 1.25, WEIGHTS[3:] / 5.5]) / 2
    np.testing.assert_allclose(found, halves, atol=1e-5)
    assert np.max(np.abs(found - WEIGHTS / WEIGHTS.sum())) > 0.05


def test_an_nnx_model_goes_in_whole():
    model = Nnx(nnx.Rngs(0))
    own = per_example_gradients(nnx_loss, model, (X, Y))

    def loss(model):
        losses = jnp.sum((model(X) - Y) ** 2, axis=-1)
        return jnp.sum(losses * WEIGHTS) / WEIGHTS.sum()

    found = effective_weights(nnx.grad(loss)(model), own)
    np.testing.assert_allclose(found, WEIGHTS / WEIGHTS.sum(), atol=1e-5)


def random_problem(seed, *, examples=6, parameters=40, dtype=np.float64):
    rng = np.random.default_rng(seed)
    own = {
        "kernel": rng.normal(size=(examples, parameters, 2)).astype(dtype),
        "bias": 100 * rng.normal(size=(examples, 3)).astype(dtype),
    }
    weights = rng.uniform(-1, 2, size=examples)
    gradient = {
        name: np.einsum("e,e...->...", weights, leaf.astype(float)).astype(dtype)
        for name, leaf in own.items()
    }
    return gradient, own, weights


@pytest.mark.parametrize("seed", range(5))
def test_plain_numpy_trees_are_solved_exactly(seed):
    gradient, own, weights = random_problem(seed)
    np.testing.assert_allclose(effective_weights(gradient, own), weights, rtol=1e-12, atol=1e-13)


def test_nearly_alike_examples_are_solved_as_well_as_they_can_be():
    gradient, own, weights = random_problem(0)
    own = {name: leaf.copy() for name, leaf in own.items()}
    for leaf in own.values():
        leaf[1] = leaf[0] * (1 + 0) + 1e-4 * leaf[1]
    gradient = {name: np.einsum("e,e...->...", weights, leaf) for name, leaf in own.items()}
    np.testing.assert_allclose(effective_weights(gradient, own), weights, rtol=1e-8)


def test_copies_of_an_example_cannot_be_told_apart():
    gradient, own, _ = random_problem(3)
    for leaf in own.values():
        leaf[4] = leaf[1]
    with pytest.raises(ValueError, match="got 6 gradients of which those of examples 1, 4 are not"):
        effective_weights(gradient, own)


def test_float32_copies_that_differ_by_rounding_are_not_noise_but_an_error():
    gradient, own, _ = random_problem(3, dtype=np.float32)
    for leaf in own.values():
        leaf[4] = leaf[1] * np.float32(1 + 1e-5)
        leaf[4].flat[0] *= np.float32(1 + 1e-5)
    message = r"must determine the weights to rtol=0.001, got .* examples 1, 4 are nearly alike"
    with pytest.raises(ValueError, match=f"{message}|of examples 1, 4 are not"):
        effective_weights(gradient, own)


ORTHOGONAL = np.eye(4, 10, dtype=np.float32)


def with_a_trace_of_something_else():
    noise = np.random.default_rng(0)
    own = noise.normal(size=(4, 30)).astype(np.float32)
    return own.mean(0) + np.float32(4e-4) * noise.normal(size=30).astype(np.float32), own


def rounded_to_bfloat16():
    own = ORTHOGONAL.astype(jnp.bfloat16)
    return ORTHOGONAL.mean(0), own


def of_three():
    own = ORTHOGONAL + 0
    own[2] = own[0] - own[1] + 1e-4 * own[2]
    return own.mean(0), own


UNCERTAIN = {
    "one gradient is small": (
        lambda: ((own := ORTHOGONAL * np.float32([[1], [1], [1], [1e-4]])).mean(0), own),
        {},
        r"at example 3: its gradient is 1\.0e-04 of the largest. Leave it out, take float64, or",
    ),
    "an update was undone, or something small is in it": (
        with_a_trace_of_something_else,
        {},
        r"the examples leave \d\.\de-04 of the gradient unexplained. It may be the rounding of an "
        r"update that was undone, or something small .* such as a regulariser.*, or allow rtol=",
    ),
    "gradients are rounded": (
        rounded_to_bfloat16,
        {"rtol": 0.02},
        r"the gradients are rounded too much. Take a wider dtype",
    ),
    "three make each other up": (
        of_three, {}, "gradients of examples 0, 1, 2 are nearly linearly dependent. Take fewer"),
}  # fmt: skip


@pytest.mark.parametrize("case", UNCERTAIN)
def test_why_weights_are_uncertain_is_not_made_up(case):
    problem, options, said = UNCERTAIN[case]
    with pytest.raises(ValueError, match=said) as caught:
        effective_weights(*problem(), **options)
    assert "nearly alike" not in str(caught.value)


@pytest.mark.parametrize("case", [*UNCERTAIN][:2])
def test_the_tolerance_that_is_said_to_be_enough_is_enough(case):
    problem = UNCERTAIN[case][0]
    with pytest.raises(ValueError, match=r"or allow rtol=[\d.]+\.$") as caught:
        effective_weights(*problem())
    enough = float(str(caught.value).removesuffix(".").rpartition("=")[2])
    assert np.isfinite(effective_weights(*problem(), rtol=enough)).all()


def test_a_small_example_is_left_out_as_the_error_says():
    own = ORTHOGONAL * np.float32([[1], [1], [1], [1e-4]])
    assert effective_weights(own.mean(0), own[:3]).tolist() == pytest.approx([0.25] * 3)


def test_more_examples_than_parameters_cannot_be_told_apart():
    gradient, own, _ = random_problem(0, examples=6, parameters=1)
    with pytest.raises(ValueError, match="must be linearly independent, got 6 gradients"):
        effective_weights({"bias": gradient["bias"]}, {"bias": own["bias"]})


def test_an_example_without_a_gradient_cannot_show():
    gradient, own, _ = random_problem(0)
    for leaf in own.values():
        leaf[2] = 0
    with pytest.raises(ValueError, match="got gradients of 0 for examples 2: what they counted"):
        effective_weights(gradient, own)


def test_a_gradient_with_something_else_in_it_is_refused():
    gradient, own, _ = random_problem(0)
    decayed = {name: leaf + 0.1 for name, leaf in gradient.items()}
    with pytest.raises(ValueError, match=r"of which they leave \d+\.\d% unexplained"):
        effective_weights(decayed, own)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda g, own: (g, own["kernel"]), "must have the structure of gradient, got"),
        (
            lambda g, own: (g, own | {"bias": own["bias"][:3]}),
            r"got \(6, 40, 2\) for \(40, 2\) at gradient\[",
        ),
        (lambda g, own: (g, g), r"got \(3,\) for \(3,\) at gradient\['bias'\]"),
        (lambda g, own: ({}, {}), "gradient must have leaves, got an empty tree"),
        (
            lambda g, own: (g | {"bias": g["bias"] * np.nan}, own),
            r"gradient must be finite, got NaN or infinity at gradient\['bias'\]",
        ),
        (
            lambda g, own: (g, own | {"bias": own["bias"] / np.float64(0)}),
            "per_example_gradients must be finite",
        ),
    ],
)
def test_trees_that_do_not_fit_are_refused(change, message):
    gradient, own, _ = random_problem(0)
    with np.errstate(divide="ignore"), pytest.raises(ValueError, match=message):
        effective_weights(*change(gradient, own))


def test_counts_of_complex_gradients_are_found():
    own = np.array([[1j, 2.0, 0], [0, 1j, 3j], [1, 1j, 1]])
    counts = np.array([0.5, 0.25, 0.0])
    np.testing.assert_allclose(effective_weights(counts @ own, own), counts, atol=1e-12)
    imaginary = np.array([[1j, 0], [0, 2j]])
    assert effective_weights(np.array([2j, 6j]), imaginary).tolist() == pytest.approx([2, 3])


@pytest.mark.parametrize(
    ("loss_of_example", "params", "match"),
    [
        (lambda p, x: x @ p["w"], {"w": jnp.ones(3), "n": jnp.int32(1)}, r"int32 at params\['n'\]"),
        (lambda p, x: x * p["w"], {"w": jnp.ones(3)}, r"must return a scalar, got .* shape \(3,\)"),
        (
            lambda p, x: WeightedSum(x @ p["w"], 1),
            {"w": jnp.ones(3)},
            r"must return a scalar, got WeightedSum\.",
        ),
    ],
)
def test_what_has_no_gradient_by_example_is_named(loss_of_example, params, match):
    with pytest.raises(TypeError, match=f"^per_example_gradients: .*{match}"):
        per_example_gradients(loss_of_example, params, np.ones((2, 3), np.float32))
