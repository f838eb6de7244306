"""An evaluation as one program finds what `evaluate` finds over the batches, to the last bit."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jax_ddp_weighting import (
    EpochPlan,
    WeightedSum,
    batches,
    data_mesh,
    evaluate,
    make_evaluation,
    weighted_sum,
)

RNG = np.random.default_rng(0)
X = RNG.normal(size=(47, 3)).astype(np.float32)
LABELS = RNG.integers(0, 3, 47).astype(np.int32)
PARAMS = RNG.normal(size=(3, 3)).astype(np.float32)


def metric_fn(params, batch):
    x, labels = batch.data
    logits = jnp.tanh(x @ params)
    found = logits.argmax(-1)
    pairs = jax.nn.one_hot(labels * 3 + found, 9, dtype=jnp.int32) * batch.weights[:, None]
    losses = -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1)[:, 0]
    return {
        "hits": weighted_sum(found == labels, batch.weights),
        "nll": weighted_sum(losses, batch.weights),
        "confusion": WeightedSum(pairs.sum(0), batch.weights.sum()),
    }


def over_batches(metric_fn, plan, mesh, epoch=0, params=PARAMS, data=(X, LABELS), **options):
    def fetch(ids):
        return jax.tree.map(lambda leaf: leaf[ids], data)

    return evaluate(metric_fn, batches(plan, epoch, fetch, mesh), mesh, params=params, **options)


def assert_same(found, wanted):
    assert found.accepted == wanted.accepted
    assert found.steps == wanted.steps
    jax.tree.map(np.testing.assert_array_equal, dict(found.means), dict(wanted.means))
    jax.tree.map(np.testing.assert_array_equal, dict(found.sums), dict(wanted.sums))


@pytest.mark.parametrize(
    ("ranks", "rows", "tail"), [(1, 10, "mask"), (2, 7, "mask"), (4, 3, "repeat")]
)
def test_it_is_evaluate_over_the_batches(ranks, rows, tail):
    mesh, plan = data_mesh(ranks), EpochPlan(47, ranks, rows, tail=tail)
    run = make_evaluation(metric_fn, mesh, plan)
    sharding = NamedSharding(mesh, PartitionSpec())
    data = jax.device_put((X, LABELS), sharding)
    for epoch in range(2):
        found = run(PARAMS, data, epoch)
        assert_same(found, over_batches(metric_fn, plan, mesh, epoch))
    # whatever the ranks and rows: each row once, no padding
    counted = int((np.tanh(X @ PARAMS).argmax(1) == LABELS).sum())
    if tail == "mask":
        assert found.sums["hits"] == WeightedSum(counted, 47)
    # the control
    other = run(PARAMS + 1, data, 0)
    assert other.sums["nll"].total != found.sums["nll"].total


def test_it_compiles_once_and_takes_rows_that_are_spread_and_numbers_without_params():
    traced = []

    def only_rows(batch):
        traced.append(batch)
        return weighted_sum(batch.data, batch.weights)

    mesh, plan = data_mesh(2), EpochPlan(46, 2, 5, weights=np.linspace(0, 2, 46))
    values = X[:46, 0]
    spread = jax.device_put(values, NamedSharding(mesh, PartitionSpec("data")))
    run = make_evaluation(only_rows, mesh, plan)
    found = [run(None, spread, epoch) for epoch in range(3)]
    assert len(traced) == 1
    for epoch, each in enumerate(found):
        wanted = over_batches(only_rows, plan, mesh, epoch, params=None, data=values)
        assert_same(each, wanted)
    text = run.lower(None, spread, 0).compile().as_text()
    assert not re.search(r" (infeed|outfeed|send|recv)\(|custom_call_target=\"[^\"]*callback", text)


def test_what_is_no_metric_and_what_does_not_fit_the_plan_is_refused():
    mesh, plan = data_mesh(2), EpochPlan(47, 2, 7)
    run = make_evaluation(lambda batch: batch.data.mean(), mesh, plan)
    with pytest.raises(TypeError, match="make_evaluation: metric_fn must return a dict"):
        run(None, X)
    rows = make_evaluation(lambda b: WeightedSum(b.data[:, 0], b.weights), mesh, plan)
    with pytest.raises(ValueError, match="make_evaluation: metric_fn must sum over rows"):
        rows(None, X)
    nothing = make_evaluation(lambda b: weighted_sum(b.data[:, 0], 0 * b.weights), mesh, plan)
    with pytest.raises(ValueError, match="make_evaluation: batches must hold weight for every"):
        nothing(None, X)
    allowed = make_evaluation(
        lambda b: weighted_sum(b.data[:, 0], 0 * b.weights), mesh, plan, empty="nan"
    )
    assert np.isnan(allowed(None, X)["loss"])
    negative = make_evaluation(lambda b: WeightedSum(b.data.sum(), -b.weights.sum()), mesh, plan)
    with pytest.raises(ValueError, match=r"weight must be at least 0, got -14 .* in step 0"):
        negative(None, X)
    with pytest.raises(ValueError, match=r"a row for each of the plan's 47 examples, .* at data"):
        run(None, X[:46])
    with pytest.raises(ValueError, match="epoch must be an integer"):
        run(None, X, -1)
    with pytest.raises(ValueError, match='make_evaluation: empty must be "raise" or "nan"'):
        make_evaluation(metric_fn, mesh, plan, empty="zero")
    with pytest.raises(ValueError, match="as many ranks as the mesh's 'data' axis, got 4 and 2"):
        make_evaluation(metric_fn, mesh, EpochPlan(47, 4, 6))


def test_sums_may_hold_numbers_of_pythons():
    def by_row(batch):
        return {"rows": WeightedSum(batch.data.sum(), len(batch.data)), "two": WeightedSum(6, 3.0)}

    plan = EpochPlan(4, 2, 1, shuffle=False)
    found = make_evaluation(by_row, data_mesh(2), plan)(None, np.float32([1, 2, 3, 4]))
    assert dict(found) == {"rows": 2.5, "two": 2.0}
    assert dict(found) == dict(
        over_batches(by_row, plan, data_mesh(2), params=None, data=np.float32([1, 2, 3, 4]))
    )
