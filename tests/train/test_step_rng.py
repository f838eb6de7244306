"""The keys that a step hands to its loss function, per rank and per example."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fitting import X, Y, fetch, new_state

from jax_ddp_weighting import (
    Batch,
    data_mesh,
    make_train_step,
    weighted_sum,
)
from jax_ddp_weighting.train import step as step_module


def test_each_rank_and_microbatch_has_its_own_rng():
    def noisy(params, batch, rng):
        drawn = jax.random.normal(rng, ())
        return weighted_sum(params["b"] + jnp.full(batch.weights.shape, drawn), batch.weights)

    step = make_train_step(noisy, data_mesh(4), microbatches=2)
    batch = Batch.of(fetch(np.arange(8)))
    values = []
    for rng in (jax.random.key(0), jax.random.key(0), jax.random.key(1)):
        _, report = step(new_state(optax.sgd(0.1)), batch, rng)
        values.append(float(report.loss.value))
    keys = [
        jax.random.fold_in(jax.random.fold_in(jax.random.key(0), rank), k)
        for rank in range(4)
        for k in range(2)
    ]
    mean = np.mean([float(jax.random.normal(key, ())) for key in keys])
    assert values[0] == values[1] == pytest.approx(mean, rel=1e-5)
    assert values[2] != values[0]


def test_keys_per_example_give_one_run_however_rows_are_split():
    def dropped(params, batch, keys):
        x, y = batch.data
        kept = jax.vmap(lambda key: jax.random.bernoulli(key, 0.5, (3,)))(keys)
        return weighted_sum(((x * kept) @ params["w"] + params["b"] - y) ** 2, batch.weights)

    def run(rng_per, engine, ranks, microbatches, order):
        fn = dropped
        if rng_per == "rank":

            def fn(params, batch, rng):
                return dropped(params, batch, jax.random.split(rng, batch.weights.shape[0]))

        step = make_train_step(
            fn, data_mesh(ranks), engine=engine, microbatches=microbatches, rng_per=rng_per
        )
        state = new_state(optax.sgd(0.1)).replace(params={"w": jnp.ones(3), "b": jnp.zeros(())})
        batch = Batch.of((X[order], Y[order]), ids=order)
        for i in range(2):
            state, _ = step(state, batch, jax.random.fold_in(jax.random.key(0), i))
        return np.asarray(state.params["w"])

    order = np.arange(8)
    splits = [
        ("jit", 1, 1, order),
        ("pmap", 2, 2, order),
        ("shard_map", 4, 1, order[::-1]),
    ]
    first, *others = [run("example", *split) for split in splits]
    for other in others:
        np.testing.assert_allclose(first, other, rtol=1e-5)
    assert not np.allclose(run("rank", *splits[0]), run("rank", *splits[1]), rtol=1e-3)


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_rows_are_kept_or_not_whatever_the_kind_of_key(impl):
    def kept_rows(params, batch, keys):
        kept = jax.vmap(jax.random.bernoulli)(keys)
        value = jnp.where(kept, 2.0 ** batch.ids.astype(jnp.float32), 0)
        return weighted_sum(params["b"] + value, batch.weights)

    def run(ranks, microbatches, order):
        step = make_train_step(
            kept_rows, data_mesh(ranks), microbatches=microbatches, rng_per="example"
        )
        batch = Batch.of(fetch(order), ids=order.astype(np.int32))
        _, report = step(new_state(optax.sgd(0.1)), batch, jax.random.key(7, impl=impl))
        return int(report.loss.terms["loss"].total)

    order = np.arange(12)
    splits = [(1, 1, order), (2, 3, order), (4, 1, order), (2, 2, order[::-1])]
    found = {run(*split) for split in splits}
    assert len(found) == 1
    assert 0 < found.pop() < 2**12 - 1  # a bit per row, some of each


def test_keys_of_rbg_itself_would_depend_on_the_other_rows():
    def draw(rows):
        fold = jax.vmap(jax.random.fold_in, in_axes=(None, 0))
        keys = fold(jax.random.key(7, impl="rbg"), rows)
        return jax.vmap(jax.random.bernoulli)(keys)

    halves = np.concatenate([draw(jnp.arange(6)), draw(jnp.arange(6, 12))])
    assert (draw(jnp.arange(12)) != halves).any()


def test_an_examples_key_depends_on_all_bits_of_its_id_and_not_on_their_width():
    def first_draw(ids, x64):
        with jax.enable_x64(x64):
            keys = step_module._example_keys(jax.random.key(0), jnp.asarray(np.array(ids)))
            return np.asarray(jax.random.key_data(keys))

    narrow, wide = first_draw(np.int32([0, 1, 7]), False), first_draw([0, 1, 7], True)
    np.testing.assert_array_equal(narrow, wide)
    large = first_draw([2**40 + 7, 2**41 + 7, 7], True)
    assert len(np.unique(large, axis=0)) == 3
