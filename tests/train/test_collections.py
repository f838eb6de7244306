"""What a model keeps beside its parameters, such as batch statistics, in a step."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fitting import X, fetch, loss_fn, new_state
from flax.training.train_state import TrainState

from jax_ddp_weighting import (
    Batch,
    BatchNorm,
    data_mesh,
    make_train_step,
    weighted_sum,
)
from jax_ddp_weighting.train.step_options import STEP_ENGINES


class StatsState(TrainState):
    batch_stats: Any


class Normalised(nn.Module):
    axis_name: str | None = "data"
    norm: Any = nn.BatchNorm

    @nn.compact
    def __call__(self, x, weights):
        norm = self.norm(
            use_running_average=False, axis_name=self.axis_name, momentum=0.5, name="norm"
        )
        # ours takes weights, flax's a mask
        weighed = {"weights": weights} if self.norm is BatchNorm else {"mask": weights[:, None] > 0}
        return nn.Dense(1)(jnp.tanh(norm(x, **weighed)))[:, 0]


def stats_run(engine, model, mesh, microbatches=1, batches=1, empty=(), rows=8, weights=1):
    def fn(variables, batch):
        x, y = batch.data
        out, updates = model.apply(variables, x, batch.weights, mutable=["batch_stats"])
        return weighted_sum((out - y) ** 2, batch.weights), updates

    variables = jax.jit(Normalised(None).init)(jax.random.key(0), X[:2], np.ones(2))
    state = StatsState.create(
        apply_fn=None,
        params=variables["params"],
        tx=optax.sgd(0.1),
        batch_stats=variables["batch_stats"],
    )
    step = make_train_step(
        fn, mesh, engine=engine, microbatches=microbatches, mutable="batch_stats"
    )
    for i in range(batches):
        ids = np.arange(rows) + rows * i
        counted = np.broadcast_to(np.int32(weights), rows) * (i not in empty)
        state, _ = step(state, Batch.of(fetch(ids), weights=counted))
    return jax.device_get(state.batch_stats["norm"]["mean"]), jax.device_get(state.params)


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("engine", STEP_ENGINES)
def test_collections_pass_through_the_microbatches_and_steps_in_order(engine, microbatches):
    model = Normalised("data" if engine != "jit" else None)
    mesh = data_mesh(2)
    mean, params = stats_run(engine, model, mesh, microbatches, batches=3, empty=(1,))
    expected = np.zeros(3)
    for first in (0, 16):  # the step without weight leaves the statistics alone
        rows = X[first : first + 8].reshape(-1, microbatches, 3)
        for k in range(microbatches):
            expected = 0.5 * expected + 0.5 * rows[:, k].mean(0)
    np.testing.assert_allclose(mean, expected, rtol=1e-5)
    if microbatches == 1:
        _, right = stats_run("jit", Normalised(None), data_mesh(1), 1, batches=3, empty=(1,))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4), params, right)


@pytest.mark.parametrize("engine", ["shard_map", "pmap"])
def test_batch_norm_over_uneven_ranks_trains_as_on_one_device(engine):
    uneven, whole = [1, 0, 0, 0, 1, 1, 1, 1], data_mesh(1)

    def run(norm):
        return stats_run(engine, Normalised("data", norm), data_mesh(2), weights=uneven)

    def gaps(found):
        right = stats_run("jit", Normalised(None), whole, weights=uneven)
        gaps = jax.tree.map(lambda a, b: np.max(np.abs(a - b)), found, right)
        return np.array(jax.tree.leaves(gaps))

    assert np.max(gaps(run(BatchNorm))) < 1e-6
    assert np.max(gaps(run(nn.BatchNorm))) > 1e-3  # flax's gives each rank one vote


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("engine", ["shard_map", "pmap"])
def test_collections_that_would_differ_from_rank_to_rank_are_refused(engine, microbatches):
    with pytest.raises(
        ValueError,
        match=r"the same on every rank, got one that may vary over 'data' at "
        r"state\['batch_stats'\]\['norm'\]\['mean'\]",
    ):
        stats_run(engine, Normalised(None), data_mesh(2), microbatches)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda sums, stats: sums, "must return .sums, updates. where mutable is given, got Weigh"),
        (lambda sums, stats: (sums, {}), r"must return updates of \['stats'\], got \[\]"),
        (
            lambda sums, stats: (sums, {"stats": stats.astype(jnp.bfloat16)}),
            r"form it was given, got bfloat16\[2\] for float32\[2\] at state\['stats'\]",
        ),
        (
            lambda sums, stats: (sums, {"stats": (stats, stats)}),
            "state of the structure it was given",
        ),
    ],
)
def test_updates_of_another_form_are_refused(returned, message):
    class State(TrainState):
        stats: Any

    def fn(variables, batch):
        return returned(loss_fn(variables["params"], batch), variables["stats"])

    step = make_train_step(fn, data_mesh(1), mutable=["stats"])
    state = State.create(
        apply_fn=None, params=new_state(optax.sgd(1)).params, tx=optax.sgd(1), stats=jnp.zeros(2)
    )
    with pytest.raises((TypeError, ValueError), match=message):
        step(state, Batch.of(fetch(np.arange(4))))


@pytest.mark.parametrize(
    ("mutable", "error", "match"),
    [
        (True, TypeError, "must be names of collections, got True"),
        ([3], TypeError, r"must be names of collections, got \[3\]"),
        (["params"], ValueError, "must name each collection beside the parameters once"),
        (["batch_stats", "batch_stats"], ValueError, "must name each collection"),
    ],
)
def test_names_that_are_no_collections_are_refused(mutable, error, match):
    with pytest.raises(error, match=f"^make_train_step: mutable {match}"):
        make_train_step(lambda variables, batch: None, data_mesh(1), mutable=mutable)
