"""What XLA makes of it: all-reduces and where they stand, flops, memory, one trace for a run."""

import importlib.util
from functools import cache
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax import lax

from jax_ddp_weighting import (
    Batch,
    data_mesh,
    make_train_step,
    value_and_grad,
    weighted_multi_steps,
    weighted_sum,
)
from jax_ddp_weighting.distributed import mesh as meshes

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SPEC = importlib.util.spec_from_file_location("hlo", BENCHMARKS / "hlo.py")
hlo = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(hlo)

RANKS, ROWS = 4, 256  # rows of one rank
SHAPES = {"w1": (64, 512), "w2": (512, 16)}
PARAMS = {name: jnp.asarray(np.ones(shape, np.float32)) for name, shape in SHAPES.items()}
LARGE = 256  # entries; the sums of a step have fewer, gradients more


def losses(params, batch):
    x, y = batch.data
    return jnp.sum((jnp.tanh(x @ params["w1"]) @ params["w2"] - y) ** 2, axis=-1)


def one_term(params, batch):
    return weighted_sum(losses(params, batch), batch.weights)


def two_terms(params, batch):
    each = losses(params, batch)
    # one weighs by integers, one by fractions
    return {"a": weighted_sum(each, batch.weights), "b": weighted_sum(each, 0.5 * batch.weights)}


def rows(dtype=np.int32):
    x = np.ones((RANKS * ROWS, 64), np.float32)
    return Batch.of((x, x[:, :16]), weights=np.ones(RANKS * ROWS, dtype))


def ours(axis_name, microbatches, loss_fn=one_term, coefficients=None):
    return value_and_grad(
        loss_fn, axis_name=axis_name, microbatches=microbatches, coefficients=coefficients
    )


def naive(axis_name, microbatches, *, vary=True):
    """The step that everybody writes: the mean over ranks and microbatches of local means."""

    def fn(params, batch):
        if vary and axis_name is not None:
            params = meshes.vary(params, axis_name)

        def mean(params, k):
            part = jax.tree.map(lambda x: x.reshape(-1, microbatches, *x.shape[1:])[:, k], batch)
            local = jnp.mean(losses(params, part))
            return local if vary or axis_name is None else lax.pmean(local, axis_name)

        def added(carry, k):
            return jax.tree.map(jnp.add, carry, jax.value_and_grad(mean)(params, k)), None

        if microbatches == 1:
            found = jax.value_and_grad(mean)(params, 0)
        else:
            zeros = jax.tree.map(jnp.zeros_like, (jnp.float32(0), params))
            zeros = meshes.vary(zeros, axis_name) if vary and axis_name is not None else zeros
            found, _ = lax.scan(added, zeros, jnp.arange(microbatches))
            found = jax.tree.map(lambda x: x / microbatches, found)
        return lax.pmean(found, axis_name) if vary and axis_name is not None else found

    return fn


@cache
def compiled(make, engine, microbatches, **options):
    batch = rows()
    if engine == "pmap":
        fn = jax.pmap(
            make("data", microbatches, **options),
            "data",
            in_axes=(None, 0),
            devices=jax.devices()[:RANKS],
        )
        batch = jax.tree.map(lambda x: x.reshape(RANKS, ROWS, *x.shape[1:]), batch)
    else:
        axis_name = None if engine == "jit" else "data"
        fn = meshes.over_ranks(
            make(axis_name, microbatches, **options), data_mesh(RANKS), engine=engine
        )
        rows_of_ranks = meshes.row_sharding(data_mesh(RANKS), "data")
        fn = jax.jit(fn, in_shardings=(None, rows_of_ranks))
    return fn.lower(PARAMS, batch).compile()


def with_two_terms(axis_name, microbatches):
    return ours(axis_name, microbatches, two_terms, {"a": 1.0, "b": 0.5})


def counted(program):
    """All-reduces in loops, those outside that carry gradients, and those of scalars alone."""
    found = [each for each in hlo.collectives(program.as_text()) if each.kind == "all-reduce"]
    outside = [each for each in found if not each.in_loop]
    gradients = [each for each in outside if max(each.sizes) >= LARGE]
    return len(found) - len(outside), len(gradients), len(outside) - len(gradients)


@pytest.mark.parametrize(
    ("engine", "microbatches"),
    [("jit", 1), *((e, k) for e in ("shard_map", "shard_map_unchecked", "pmap") for k in (1, 4))],
)
def test_gradients_cross_the_network_once_and_outside_loops(engine, microbatches):
    in_loops, gradients, scalars = counted(compiled(ours, engine, microbatches))
    assert in_loops == 0
    assert 1 <= gradients <= len(SHAPES)  # combined, or one per leaf
    assert scalars <= 2


@pytest.mark.parametrize("microbatches", [1, 4])
def test_two_terms_of_other_weights_cost_no_further_reduction(microbatches):
    in_loops, gradients, scalars = counted(compiled(with_two_terms, "shard_map", microbatches))
    assert (in_loops, gradients) == (0, 1)
    assert scalars <= 2


def hidden_sums(params, batch):
    """Of the first layer alone, a sum over rows for each of sixteen experts, and their number."""
    hidden = jnp.tanh(batch.data[0] @ params["w1"])
    return {"experts": jnp.sum(hidden[:, :16], axis=0), "all": jnp.sum(hidden)}


def balanced(params, batch, statistics=None):
    scale = 1.0 if statistics is None else jnp.sum(statistics["experts"]) / statistics["all"]
    return weighted_sum(losses(params, batch) * scale, batch.weights)


def with_statistics(axis_name, microbatches):
    options = {"statistics": hidden_sums, "divisors": {"loss": lambda w: jnp.maximum(w, 1)}}
    return value_and_grad(balanced, axis_name=axis_name, microbatches=microbatches, **options)


@pytest.mark.parametrize("microbatches", [1, 4])
def test_statistics_cost_one_forward_pass_of_theirs_and_one_reduction(microbatches):
    found = compiled(with_statistics, "shard_map", microbatches)
    in_loops, gradients, scalars = counted(found)
    assert (in_loops, gradients) == (0, 1)
    assert scalars <= 3  # statistics, weights, totals
    without = compiled(ours, "shard_map", microbatches).cost_analysis()["flops"]
    own = 2 * ROWS * np.prod(SHAPES["w1"]) / microbatches  # of a loop one turn is counted
    assert found.cost_analysis()["flops"] <= without + 1.05 * own


def test_the_count_of_all_reduces_can_fail():
    # parameters that do not vary: JAX sums their gradient inside the loop, at every microbatch
    in_loops, gradients, _ = counted(compiled(naive, "shard_map", 4, vary=False))
    assert in_loops >= 1
    assert gradients == 0


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("engine", ["shard_map", "shard_map_unchecked"])
def test_flops_are_those_of_the_naive_step(engine, microbatches):
    found = compiled(ours, engine, microbatches).cost_analysis()["flops"]
    theirs = compiled(naive, engine, microbatches).cost_analysis()["flops"]
    assert found / theirs <= 1.001


def test_the_pass_over_the_weights_runs_no_forward_computation():
    # the loop body alone is counted: with a forward pass of the weights it would be 4/3
    whole = compiled(ours, "shard_map", 1).cost_analysis()["flops"]
    parts = compiled(ours, "shard_map", 4).cost_analysis()["flops"]
    assert parts * 4 / whole == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize("make", [ours, naive])
def test_memory_is_that_of_one_microbatch_and_one_gradient(make):
    def temporaries(microbatches):
        return compiled(make, "shard_map", microbatches).memory_analysis().temp_size_in_bytes

    gradient = 4 * sum(int(np.prod(shape)) for shape in SHAPES.values())
    assert temporaries(1) > 2 * ROWS * SHAPES["w1"][1] * 4  # activations of all rows
    assert temporaries(4) - gradient <= temporaries(1) / 4 * 1.02


def test_a_run_over_uneven_batches_is_traced_once():
    @jax.jit
    @chex.assert_max_traces(n=1)
    def step(params, batch):
        return meshes.over_ranks(ours("data", 4), data_mesh(RANKS))(params, batch)

    batch = rows()
    for accepted in (RANKS * ROWS, 3, 0):
        weights = (np.arange(RANKS * ROWS) < accepted).astype(np.int32)
        step(PARAMS, Batch(batch.data, batch.ids, weights))
    with pytest.raises(AssertionError, match="traced > 1 times"):
        step(PARAMS, rows(np.float32))


def naive_train_step(mesh):
    def step(state, batch):
        _, gradients = meshes.over_ranks(naive("data", 1), mesh)(state.params, batch)
        return state.apply_gradients(grads=gradients)

    return jax.jit(step, donate_argnums=0)


def test_the_train_step_costs_what_the_naive_one_does():
    mesh = data_mesh(RANKS)
    state = TrainState.create(apply_fn=None, params=PARAMS, tx=optax.adam(1e-3))
    theirs = naive_train_step(mesh).lower(state, rows()).compile()
    with hlo.recorded() as programs:
        make_train_step(one_term, mesh)(state, rows())
    found = programs[-1].compile()
    in_loops, gradients, scalars = counted(found)
    assert (in_loops, gradients) == (0, 1)
    assert scalars <= 2
    costs, theirs_cost = found.cost_analysis(), theirs.cost_analysis()
    assert costs["flops"] / theirs_cost["flops"] <= 1.001
    # a step that can be skipped copies no state: lax.cond would move a quarter more
    assert costs["bytes accessed"] / theirs_cost["bytes accessed"] <= 1.01
    temporaries = [each.memory_analysis().temp_size_in_bytes for each in (found, theirs)]
    assert temporaries[0] / temporaries[1] <= 1.01


def test_a_step_that_waits_for_its_window_copies_no_state():
    tx = weighted_multi_steps(optax.adam(1e-3), 4)
    state = TrainState.create(apply_fn=None, params=PARAMS, tx=tx)
    with hlo.recorded() as programs:
        make_train_step(one_term, data_mesh(RANKS))(state, rows())
    assert " conditional(" not in programs[-1].compile().as_text()


def test_that_check_can_fail():
    def waits(steps, state):
        return lax.cond(steps, lambda s: s * 2, lambda s: s, state)

    assert " conditional(" in jax.jit(waits).lower(True, jnp.ones(4)).compile().as_text()
