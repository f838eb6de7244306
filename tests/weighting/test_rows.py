"""What is a row and what is none: leaves of one length, and what goes in beside them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import regimes

from jax_ddp_weighting import Batch, value_and_grad, weighted_sum

ENGINES = ["jit", "shard_map", "shard_map_unchecked", "pmap", "vmap"]
RNG = np.random.default_rng(0)
LABELS = RNG.integers(0, 6, size=24).astype(np.int32)
VALUES = RNG.normal(size=24).astype(np.float32)
CLASS_WEIGHTS = np.float32([0.5, 1, 2, 3, 4, 5])


def class_loss(w, batch, *, replicated):
    values, labels = batch
    return weighted_sum(w * values, replicated[labels])


RIGHT = np.average(VALUES, weights=CLASS_WEIGHTS[LABELS])


@pytest.mark.parametrize("regime", ENGINES)
@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 3), (2, 2), (4, 1), (4, 3)])
def test_what_is_no_row_is_given_whole(regime, ranks, microbatches):
    def make(axis_name):
        gradient = value_and_grad(class_loss, axis_name=axis_name, microbatches=microbatches)
        return lambda params, rows: gradient(params[0], rows, replicated=params[1])

    params = (jnp.float32(1), jnp.asarray(CLASS_WEIGHTS))
    loss, gradient = regimes.run(regime, ranks, make, params, (VALUES, LABELS))
    assert float(gradient) == pytest.approx(RIGHT, rel=1e-5)
    assert float(loss.terms["loss"].weight) == pytest.approx(CLASS_WEIGHTS[LABELS].sum())


def test_class_weights_that_are_split_like_rows_give_another_gradient():
    # what came of them as a leaf of the batch: microbatch k took every third
    totals = [weighted_sum(VALUES[k::3], CLASS_WEIGHTS[k::3][LABELS[k::3] % 2]) for k in range(3)]
    assert float(sum(totals).mean()) != pytest.approx(RIGHT, rel=1e-2)


def test_a_teacher_has_no_gradient_and_comes_with_rng_and_state():
    def towards(w, batch, rng, *, state, replicated):
        noise = jax.random.normal(rng, ()) * 0
        return weighted_sum((w - replicated["w"] * batch + noise) ** 2), state + 1

    gradient = value_and_grad(towards, microbatches=2, has_state=True)
    (_, state), slope = gradient(
        jnp.float32(3),
        jnp.ones(4),
        jax.random.key(0),
        state=jnp.int32(0),
        replicated={"w": jnp.float32(1)},
    )
    assert (float(slope), int(state)) == (4.0, 2)


UNEVEN = {
    "class weights": ({"x": np.ones(16), "classes": np.ones(10)}, r"\(10,\) at batch\['classes'\]"),
    "as many as divide": ({"x": np.ones(16), "y": np.ones((8, 2))}, r"\(8, 2\) at batch\['y'\]"),
    "a scalar": ({"x": np.ones(16), "temperature": np.float32(2)}, r"\(\) at batch\['temp"),
    "a Python number": ({"x": np.ones(16), "t": 2.0}, r"\(\) at batch\['t'\]"),
    "a batch made by hand": (
        Batch({"x": np.ones(16), "c": np.ones(10)}, np.arange(16), np.ones(16)),
        r"\(16,\) at batch.data\['x'\]",
    ),
    "weights of another length": (
        Batch(np.ones(16), np.arange(16), np.ones(8)),
        r"\(8,\) at batch.weights",
    ),
    "a batch with a scalar": (
        Batch({"t": np.float32(1), "x": np.ones(16)}, np.arange(16), np.ones(16)),
        r"\(\) at batch.data\['t'\]",
    ),
}


@pytest.mark.parametrize("case", UNEVEN)
@pytest.mark.parametrize("microbatches", [1, 2])
def test_leaves_of_other_lengths_are_refused(case, microbatches):
    batch, message = UNEVEN[case]

    def loss_fn(w, batch):
        return weighted_sum(w * jnp.ones(4))

    message = f"value_and_grad: batch must have one leading axis of rows.*{message}.*replicated="
    with pytest.raises(ValueError, match=message):
        value_and_grad(loss_fn, microbatches=microbatches)(jnp.float32(1), batch)


@pytest.mark.parametrize("regime", ["shard_map", "shard_map_unchecked", "pmap", "vmap"])
def test_they_are_refused_on_every_rank_too(regime):
    def make(axis_name):
        return value_and_grad(lambda w, batch: weighted_sum(w * batch["x"]), axis_name=axis_name)

    with pytest.raises(ValueError, match="value_and_grad: batch must have one leading axis"):
        regimes.run(regime, 2, make, jnp.float32(1), {"c": np.ones(10), "x": np.ones(16)})


def test_leaves_of_one_length_are_rows_whatever_they_are():
    batch = {
        "x": jnp.ones((4, 3)),
        "key": jax.random.split(jax.random.key(0), 4),
        "half": jnp.ones(4, jnp.bfloat16),
        "none": None,
    }
    loss, _ = value_and_grad(lambda w, b: weighted_sum(w * b["x"][:, 0]), microbatches=2)(
        jnp.float32(1), batch
    )
    assert float(loss.value) == 1


def test_a_loss_function_of_no_rows_may_have_an_empty_batch():
    loss, gradient = value_and_grad(lambda w, batch: weighted_sum(w * jnp.ones(2)))(2.0, ())
    assert (float(loss.value), float(gradient)) == (2.0, 1.0)
