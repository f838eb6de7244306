"""Ranks of unequal data: torch's Join reproduced by name, and every row as its weight by default.

One process, one stream for each of its devices: what several processes do is in
test_multiprocess_join.py.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

from jax_ddp_weighting import (
    Batch,
    DistributedBatchSampler,
    EpochPlan,
    ShardedIterable,
    data_mesh,
    join_batches,
    make_train_step,
    value_and_grad,
    weighted_sum,
)

# Steps per rank, and what torch 2.13.0's Join gives for gradients 10**rank, step by step.
GOLDENS = [
    ((1, 2), "initial_ranks", [5.5, 5.0]),
    ((1, 2), "active_ranks", [5.5, 10.0]),
    ((1, 2), "example", [5.5, 10.0]),
    ((1, 2, 3), "initial_ranks", [37.0, 110 / 3, 100 / 3]),
    ((1, 2, 3), "active_ranks", [37.0, 55.0, 100.0]),
    ((1, 2, 3), "example", [37.0, 55.0, 100.0]),
    ((0, 2), "initial_ranks", [5.0, 5.0]),
    ((3, 0, 1), "active_ranks", [50.5, 1.0, 1.0]),
]


def streams(steps, rows=2):
    """Rank r yields `steps[r]` batches whose loss has the gradient 10**r."""
    return [
        [Batch.of(np.full(rows, 10.0**rank, np.float32)) for _ in range(count)]
        for rank, count in enumerate(steps)
    ]


def loss_fn(params, batch):
    return weighted_sum(params["w"] * batch.data, batch.weights)


def gradients(steps, convention, gradient=None, rows=2):
    gradient = jax.jit(gradient or value_and_grad(loss_fn))
    joined = join_batches(streams(steps, rows), data_mesh(len(steps)), convention=convention)
    return [float(gradient({"w": jnp.float32(0)}, batch)[1]["w"]) for batch in joined]


@pytest.mark.parametrize(("steps", "convention", "right"), GOLDENS)
def test_each_convention_divides_by_what_it_says(steps, convention, right):
    np.testing.assert_allclose(gradients(steps, convention), right, rtol=1e-6)


def test_the_golden_check_can_fail():
    def forgetful(params, batch):  # a reduction of one's own, which knows of no missing ranks
        return value_and_grad(loss_fn)(params, Batch(batch.data, batch.ids, batch.weights))

    assert gradients((1, 2), "initial_ranks", forgetful) == [5.5, 10.0]


@pytest.mark.parametrize("engine", ["jit", "shard_map", "pmap"])
def test_a_training_step_follows_the_convention(engine):
    steps, convention, right = GOLDENS[3]
    mesh = data_mesh(len(steps))
    step = make_train_step(loss_fn, mesh, engine=engine, microbatches=2)
    state = TrainState.create(apply_fn=None, params={"w": jnp.float32(0)}, tx=optax.sgd(1.0))
    moved, before = [], 0.0
    for batch in join_batches(streams(steps), mesh, convention=convention):
        state, _ = step(state, batch)
        moved.append(before - float(state.params["w"]))
        before = float(state.params["w"])
    np.testing.assert_allclose(moved, right, rtol=1e-6)


def test_rows_count_as_their_weights_by_default_and_as_rank_votes_otherwise():
    # rank 0: rows 1, 2 of weights 1, 3; rank 1: one row 10, its second batch of no weight at all
    def unequal():
        first = [Batch.of(np.float32([1, 2]), weights=np.float32([1, 3]))] * 2
        second = [
            Batch.of(np.float32([10]), weights=np.float32([1])),
            Batch.of(np.float32([99]), weights=np.float32([0])),
        ]
        return [first, second]

    right = {
        "example": [17 / 5, 7 / 4],
        "active_ranks": [(7 / 4 + 10) / 2, 7 / 4],
        "initial_ranks": [(7 / 4 + 10) / 2, 7 / 4 / 2],
    }
    gradient = jax.jit(value_and_grad(loss_fn))
    for convention, expected in right.items():
        joined = join_batches(unequal(), data_mesh(2), convention=convention)
        found = [float(gradient({"w": 1.0}, batch)[1]["w"]) for batch in joined]
        np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_metrics_are_not_divided_by_ranks_that_are_gone():
    def with_metric(params, batch):
        value = weighted_sum(params["w"] * batch.data, batch.weights)
        return {"loss": value, "metric": weighted_sum(batch.data, batch.weights)}

    gradient = value_and_grad(with_metric, coefficients={"loss": 1.0, "metric": 0})
    *_, last = join_batches(streams((1, 2)), data_mesh(2), convention="initial_ranks")
    loss, _ = gradient({"w": jnp.float32(1)}, last)
    assert float(loss.terms["loss"].mean()) == 5.0
    assert float(loss.terms["metric"].mean()) == 10.0


def test_momentum_is_one_for_all_ranks_after_uneven_steps():
    mesh = data_mesh(2)
    step = make_train_step(loss_fn, mesh)
    tx = optax.sgd(0.1, momentum=0.9)
    state = TrainState.create(apply_fn=None, params={"w": jnp.float32(0)}, tx=tx)
    for batch in join_batches(streams((1, 3)), mesh, convention="active_ranks"):
        state, _ = step(state, batch)
    momenta = [float(shard.data) for shard in state.opt_state[0].trace["w"].addressable_shards]
    # 5.5, then 10 twice, at momentum 0.9
    np.testing.assert_allclose(momenta, [5.5 * 0.81 + 19, 5.5 * 0.81 + 19], rtol=1e-6)
    # where a rank stops stepping when its data ends, as under torch's Join, it keeps the first
    assert abs(momenta[0] - 5.5) > 10


def test_a_step_without_any_weight_is_skipped_under_every_convention():
    def empty():
        yield Batch.of(np.float32([1]), weights=np.float32([0]))

    mesh = data_mesh(2)
    step = make_train_step(loss_fn, mesh)
    for convention in ("example", "active_ranks", "initial_ranks"):
        state = TrainState.create(apply_fn=None, params={"w": jnp.float32(3)}, tx=optax.adamw(0.1))
        (batch,) = join_batches([empty(), []], mesh, convention=convention)
        state, report = step(state, batch)
        assert (float(state.params["w"]), bool(report.skipped)) == (3.0, True)


def test_one_stream_of_a_process_is_shared_by_its_ranks_and_filled_up():
    data = np.arange(11, dtype=np.float32)
    cuts = [data[:8], data[8:]]
    found = list(join_batches([Batch.of(x, ids=x.astype(int)) for x in cuts], data_mesh(4)))
    assert [batch.weights.tolist() for batch in found] == [[1] * 8, [1] * 3 + [0] * 5]
    np.testing.assert_array_equal(found[0].data, cuts[0])
    np.testing.assert_array_equal(found[1].data[:3], cuts[1])
    np.testing.assert_array_equal(found[1].ids[:3], cuts[1])
    assert np.isfinite(found[1].data).all()


def test_the_longest_first_batch_sets_the_rows():
    short, long = [Batch.of(np.float32([5]))], [Batch.of(np.float32([1, 2, 3]))] * 2
    found = list(join_batches([short, long], data_mesh(2)))
    assert [batch.weights.tolist() for batch in found] == [[1, 0, 0, 1, 1, 1], [0, 0, 0, 1, 1, 1]]


NO_ROWS = Batch.of(np.zeros(0, np.float32))


def means(*streams, convention="example"):
    """Each step's mean over all rows, or of the votes."""
    gradient = jax.jit(value_and_grad(loss_fn))
    joined = join_batches(list(streams), data_mesh(len(streams)), convention=convention)
    return [round(float(gradient({"w": 1.0}, batch)[1]["w"]), 6) for batch in joined]


def rows(*values):
    """A stream of batches, each of one row or of none."""
    return [NO_ROWS if value is None else Batch.of(np.float32([value])) for value in values]


@pytest.mark.parametrize(
    ("first", "second", "right"),
    [
        ((2, 3, 4), (6, None, 8), [4, 3, 6]),  # to leave it out would give 4, 5.5, 4
        ((2, None, 4), (6, None, 8), [4, 0, 6]),  # nobody has anything: a step of no weight
        ((None, 3, 4), (6, 5), [6, 4, 4]),
        ((2, 3), (6, None), [4, 3]),
        ((2, 3), (None,), [2, 3]),
        ((None,), (None, 5), [0, 5]),
    ],
)
def test_a_batch_of_no_rows_counts_as_weight_0(first, second, right):
    assert means(rows(*first), rows(*second)) == right


def test_a_stream_votes_with_no_weight_where_its_batch_has_no_rows():
    streams = rows(2, 3, 4), rows(6, None, 8)
    assert means(*streams, convention="active_ranks") == [4, 3, 6]
    assert means(*streams, convention="initial_ranks") == [4, 1.5, 6]


def test_a_batch_of_no_rows_may_be_of_another_dtype_and_is_finite():
    def ratio(params, batch):
        return weighted_sum(params["w"] / batch.data, batch.weights)

    stream = [Batch.of(np.float32([4, 2])), Batch.of(np.zeros(0)), Batch.of(np.float32([1]))]
    gradient = jax.jit(value_and_grad(ratio))
    found = [
        float(gradient({"w": 1.0}, batch)[1]["w"]) for batch in join_batches(stream, data_mesh(2))
    ]
    assert found == [0.375, 0.0, 1.0]


def test_streams_without_anything_are_no_steps():
    assert list(join_batches([], data_mesh(2))) == []
    assert list(join_batches([[], iter(())], data_mesh(2))) == []


def test_an_endless_stream_is_read_one_batch_ahead_and_no_further():
    read = []

    def endless():
        while True:
            read.append(len(read))
            yield Batch.of(np.float32([len(read)]))

    joined = join_batches(endless(), data_mesh(1))
    assert read == []
    assert [float(next(joined).data[0]) for _ in range(3)] == [1.0, 2.0, 3.0]
    assert len(read) == 4


def breaking(at, error):
    def stream():
        for _ in range(at):
            yield Batch.of(np.float32([1]))
        raise error

    return stream()


@pytest.mark.parametrize("at", [0, 3])
@pytest.mark.parametrize("error", [OSError("disk gone"), StopIteration("by mistake")])
def test_a_stream_that_raises_stops_all_after_the_steps_before_it(error, at):
    joined = join_batches([streams((10,))[0], breaking(at, error)], data_mesh(2))
    for _ in range(at):
        next(joined)
    with pytest.raises(RuntimeError, match=rf"failed at step {at} on rank 1 \(process 0\)") as told:
        next(joined)
    if isinstance(error, OSError):
        assert "OSError: disk gone" in str(told.value)
        assert told.value.__cause__ is error


FIRST = Batch.of({"x": np.zeros((2, 3), np.float32)})


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (Batch.of({"x": np.zeros((2, 4), np.float32)}), r"got float32\[4\] for float32\[3\] at d"),
        (Batch.of({"x": np.zeros((2, 3), np.int32)}), r"got int32\[3\] for float32\[3\] at data\["),
        (Batch.of({"y": np.zeros((2, 3), np.float32)}), r"got PyTreeDef.* for PyTreeDef.* at str"),
        (Batch.of(FIRST.data, weights=np.ones(2)), r"got float32 for int32 at weights"),
        (
            Batch.of({"x": np.zeros((3, 3), np.float32)}),
            r"at most the 2 rows of .* got 3",
        ),
        (
            Batch.of(FIRST.data, ids=np.array([0, 2**40])),
            r"at most 32 bits while x64 is off",
        ),
        (FIRST.data, r"a stream must yield Batches, got dict"),
    ],
)
def test_a_stream_that_changes_midway_is_refused_with_its_rank_and_step(second, message):
    with pytest.raises(RuntimeError, match=rf"at step 1 on rank 0 .*{message}"):
        list(join_batches([FIRST, second], data_mesh(1)))


def test_ranks_of_different_forms_are_refused():
    other = Batch.of({"x": np.zeros((2, 4), np.float32)})
    message = r"data\['x'\] is 'float32\[3\]' on rank 0, 'float32\[4\]' on rank 1"
    with pytest.raises(RuntimeError, match=message):
        list(join_batches([[FIRST], [other]], data_mesh(2)))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"convention": "rank"}, ValueError, r"one of example, active_ranks, .* got 'rank'"),
        ({"timeout_s": -1}, ValueError, r"timeout_s must be above 0 and finite, got -1"),
        ({"axis_name": "batch"}, ValueError, r"mesh must have the axis 'batch'"),
        ({"batches": [[FIRST]]}, ValueError, r"got 1 streams for ranks 0, 1"),
        ({"batches": FIRST}, TypeError, r"batches must be a stream or several, got Batch"),
    ],
)
def test_bad_arguments_are_refused_before_the_first_batch(arguments, error, message):
    batches = arguments.pop("batches", [FIRST])
    with pytest.raises(error, match=message):
        join_batches(batches, data_mesh(2), **arguments)


def test_padding_a_joined_batch_adds_no_missing_weight():
    *_, last = join_batches(streams((1, 2), rows=1), data_mesh(2), convention="initial_ranks")
    padded = last.padded(5)
    assert padded.missing.tolist() == [1, 0, 0, 0, 0]
    assert padded.weights.tolist() == [0, 1, 0, 0, 0]


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("engine", ["shard_map", "jit"])
def test_ranks_that_left_stretch_every_term_alike(engine, microbatches):
    def loss_fn(params, batch):
        nll = weighted_sum(params["w"] * batch.data, batch.weights)
        return {"nll": nll, "penalty": nll.once(params["w"]), "hits": nll}

    mesh = data_mesh(4)
    step = make_train_step(
        loss_fn,
        mesh,
        engine=engine,
        microbatches=microbatches,
        coefficients={"nll": 1.0, "penalty": 1.0, "hits": 0.0},
    )
    state = TrainState.create(apply_fn=None, params={"w": jnp.float32(1)}, tx=optax.sgd(1.0))
    one = Batch.of(np.ones(2, np.float32))
    streams = [[one, one], [one, one], [one], [one]]
    seen = []
    for batch in join_batches(streams, mesh, convention="initial_ranks"):
        before = float(state.params["w"])
        state, report = step(state, batch)
        seen.append([float(report.means[name]) for name in ("nll", "penalty", "hits")])
        pulled = before - float(state.params["w"])
    # two of four ranks are left: what pulls counts half, what is only reported does not
    first, last = seen
    np.testing.assert_allclose(first, [1, 1, 1])
    np.testing.assert_allclose(last, np.array([0.5, 0.5, 1]) * before, atol=1e-6)
    np.testing.assert_allclose(pulled, 1.0)


@pytest.mark.parametrize(
    ("make", "item"),
    [
        (lambda: DistributedBatchSampler(EpochPlan(12, 1, 2, shuffle=False), 0), 1),
        (lambda: ShardedIterable(range(12), 1, 0), 2),
    ],
)
def test_what_is_read_ahead_is_not_taken_for_used(make, item):
    def stream(sampler):
        ids = iter(sampler)
        for _ in range(6):
            rows = next(ids) if item == 1 else [next(ids), next(ids)]
            yield Batch.of(np.float32(rows), ids=np.array(rows))

    sampler = make()
    for step, batch in enumerate(join_batches(stream(sampler), data_mesh(1)), start=1):
        if step < 6:
            with pytest.raises(ValueError, match="read ahead of training, here by join_batches"):
                sampler.state_dict()
        assert sampler.state_dict(consumed=item * step)["position"] == batch.ids[-1] + 1
    plain = make()
    for step, _ in enumerate(stream(plain), start=1):  # which nobody reads ahead
        assert plain.state_dict()["position"] == 2 * step
