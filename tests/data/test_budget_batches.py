"""Batches by tokens, and packed rows, on the mesh: of their step's length, each row once."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

from jax_ddp_weighting import (
    Batch,
    BudgetPlan,
    EpochPlan,
    EpochRecord,
    Ledger,
    PackedPlan,
    batches,
    check_agreement,
    data_mesh,
    evaluate,
    make_train_step,
    pack_rows,
    weighted_sum,
)

LENGTHS = np.random.default_rng(0).integers(1, 30, 57)
TEXTS = [np.arange(length, dtype=np.int32) + 100 * i for i, length in enumerate(LENGTHS)]


def fetch(ids, length):
    tokens = np.zeros((len(ids), length), np.int32)
    for row, i in enumerate(ids):
        tokens[row, : LENGTHS[i]] = TEXTS[i]
    return {"tokens": tokens, "length": LENGTHS[ids].astype(np.int32)}


def fetch_packed(ids, length):
    return pack_rows(ids, TEXTS.__getitem__, length)._asdict()


@pytest.mark.parametrize("prefetch", [0, 2])
def test_batches_have_the_shapes_of_the_plan_and_every_row_once(prefetch):
    plan = BudgetPlan(LENGTHS, 4, 90, shapes=3)
    ledger, shapes = Ledger(57, epoch=2), set()
    for step, batch in enumerate(batches(plan, 2, fetch, data_mesh(4), prefetch=prefetch)):
        rows, length = plan.shape(2, step)
        assert batch.data["tokens"].shape == (4 * rows, length)
        assert batch.data["tokens"].addressable_shards[0].data.shape == (rows, length)
        shapes.add((rows, length))
        slots = plan.batch(2, step)
        np.testing.assert_array_equal(np.asarray(batch.ids).reshape(4, rows), slots.ids)
        np.testing.assert_array_equal(batch.data["length"], LENGTHS[np.asarray(batch.ids)])
        np.testing.assert_array_equal(batch.data["tokens"][:, 0], 100 * np.asarray(batch.ids))
        ledger.add(batch.ids, batch.weights)
    ledger.check_exactly_once()
    assert shapes == set(plan.step_shapes)


def test_a_resumed_epoch_goes_on_where_it_stopped():
    plan = BudgetPlan(LENGTHS, 4, 90, shapes=3)
    ledger = Ledger(57, epoch=0)
    for _, batch in zip(range(2), batches(plan, 0, fetch, data_mesh(4)), strict=False):
        ledger.add(batch.ids, batch.weights)
    rest = plan.resumed(0, plan.position(2), num_replicas=3, budget=60)
    for batch in batches(rest, 0, fetch, data_mesh(3)):
        ledger.add(batch.ids, batch.weights)
    ledger.check_exactly_once()
    whole = [np.asarray(b.ids) for b in batches(plan, 1, fetch, data_mesh(4))]
    last = [np.asarray(b.ids) for b in batches(plan, 1, fetch, data_mesh(4), start_step=3)]
    assert [each.tolist() for each in last] == [each.tolist() for each in whole[3:]]


def loss_fn(params, batch):
    tokens = batch.data["tokens"]
    real = jnp.arange(tokens.shape[1])[None] < batch.data["length"][:, None]
    losses = (params["w"] - tokens / 1000) ** 2
    return weighted_sum(losses, real * batch.weights[:, None])


def train(step, state, plan, epoch, mesh):
    weights = []
    for batch in batches(plan, epoch, fetch, mesh):
        state, report = step(state, batch)
        weights.append(int(report.weight))
    return state, weights


def test_a_step_is_compiled_once_for_each_shape_and_counts_every_row():
    traced = []

    def counted(params, batch):
        traced.append(batch.data["tokens"].shape)
        return loss_fn(params, batch)

    mesh = data_mesh(2)
    plan = BudgetPlan(LENGTHS, 2, 90, shapes=2, row_multiple=2)
    step = make_train_step(counted, mesh, microbatches=2)
    state = TrainState.create(apply_fn=None, params={"w": jnp.float32(0)}, tx=optax.sgd(0.01))
    state, weights = train(step, state, plan, 0, mesh)
    reached = float(state.params["w"])
    assert sum(weights) == 57
    first = len(traced)
    assert {length for _, length in traced} == {length for _, length in plan.step_shapes}
    train(step, state, plan, 1, mesh)
    assert len(traced) == first  # a second epoch compiles nothing

    # the oracle: each step's gradient by hand, on one device, without padding
    w = np.float64(0)
    for number in range(plan.steps_per_epoch):
        slots = plan.batch(0, number)
        ids = slots.ids[slots.weights > 0]
        tokens = np.concatenate([TEXTS[i] for i in ids]) / 1000
        w -= 0.01 * 2 * np.mean(w - tokens)
    assert reached == pytest.approx(w, rel=1e-5)
    # and this can fail: rows, not tokens, averaged
    w = np.float64(0)
    for number in range(plan.steps_per_epoch):
        slots = plan.batch(0, number)
        ids = slots.ids[slots.weights > 0]
        w -= 0.01 * 2 * np.mean([w - TEXTS[i].mean() / 1000 for i in ids])
    assert reached != pytest.approx(w, rel=1e-5)


def test_an_evaluation_pads_no_batch_over_the_budget():
    seen = []

    def metric_fn(batch):
        tokens = batch.data["tokens"]
        seen.append(tokens.shape)
        real = jnp.arange(tokens.shape[1])[None] < batch.data["length"][:, None]
        return {"mean": weighted_sum(tokens % 100, real * batch.weights[:, None])}

    plan = BudgetPlan(LENGTHS, 2, 90, shapes=2, shuffle=False)
    found = evaluate(metric_fn, batches(plan, 0, fetch, data_mesh(2)), data_mesh(2))
    assert found["mean"] == np.concatenate([text % 100 for text in TEXTS]).mean()
    assert (found.accepted, found.steps) == (57, plan.steps_per_epoch)
    assert sorted(seen) == sorted((2 * rows, length) for rows, length in plan.step_shapes)


def test_a_short_batch_is_filled_up_to_the_first_of_its_form():
    seen = []

    def metric_fn(batch):
        seen.append(batch.data.shape)
        return weighted_sum(batch.data[:, 0], batch.weights)

    rows = [Batch.of(np.ones(shape)) for shape in ((4, 2), (6, 3), (3, 2), (1, 3), (2, 2))]
    found = evaluate(metric_fn, rows, data_mesh(2))
    assert seen == [(4, 2), (6, 3)]
    assert found.accepted == 16


@pytest.mark.parametrize("ranks", [1, 3])
def test_packed_rows_hold_every_sequence_once_and_their_tokens_are_told_apart(ranks):
    plan = PackedPlan(LENGTHS, ranks, 2, 64)
    ledger, tokens = Ledger(57, epoch=1), []
    found = list(batches(plan, 1, fetch_packed, data_mesh(ranks)))
    assert len(found) == plan.steps_per_epoch(1)
    for batch in found:
        assert batch.data["tokens"].shape == (2 * ranks, 64)
        ledger.add(batch.ids, batch.weights)
        real = np.asarray(batch.data["segment_ids"]) > 0
        tokens += np.asarray(batch.data["tokens"])[real].tolist()
        np.testing.assert_array_equal(batch.data["weights"] > 0, real)
        np.testing.assert_array_equal(
            np.asarray(batch.data["tokens"])[real] % 100, np.asarray(batch.data["positions"])[real]
        )
    ledger.check_exactly_once()
    assert sorted(tokens) == np.concatenate(TEXTS).tolist()


def test_a_step_over_packed_rows_is_the_mean_over_all_tokens_or_sequences():
    def loss_fn(params, batch):
        losses = (params["w"] - batch.data["tokens"] / 1000) ** 2
        return weighted_sum(losses, batch.data["weights"])

    mesh = data_mesh(2)
    step = make_train_step(loss_fn, mesh)
    plan = PackedPlan(LENGTHS, 2, 8, 64)
    assert plan.steps_per_epoch(0) == 1
    for per, wanted in (
        ("token", np.concatenate(TEXTS).mean()),
        ("sequence", np.mean([text.mean() for text in TEXTS])),
    ):
        state = TrainState.create(apply_fn=None, params={"w": jnp.float32(0)}, tx=optax.sgd(0.5))

        def fetch(ids, length, per=per):
            return pack_rows(ids, TEXTS.__getitem__, length, per=per)._asdict()

        (batch,) = batches(plan, 0, fetch, mesh)
        state, report = step(state, batch)
        assert float(state.params["w"]) == pytest.approx(wanted / 1000, rel=1e-5)
        assert int(report.weight) == 57


def test_a_key_for_each_example_is_refused_where_rows_hold_several():
    def loss_fn(params, batch, rng):
        return weighted_sum(params["w"] * batch.data["tokens"], batch.data["weights"])

    step = make_train_step(loss_fn, data_mesh(1), rng_per="example")
    state = TrainState.create(apply_fn=None, params={"w": jnp.float32(0)}, tx=optax.sgd(0.5))
    batch = next(batches(PackedPlan(LENGTHS, 1, 2, 64), 0, fetch_packed, data_mesh(1)))
    with pytest.raises(ValueError, match=r"ids must be one for each row .* PackedPlan"):
        step(state, batch, jax.random.key(0))


def pad_to(extra):
    def fetch(ids, length):
        return np.zeros((len(ids), length + extra), np.float32)

    return fetch


@pytest.mark.parametrize(
    ("fetch", "error", "text"),
    [
        (lambda ids: np.zeros((len(ids), 9)), TypeError, r"must take \(ids, length\) .* got \(ids"),
        (pad_to(1), ValueError, r"padded to the length that it is given, \d+, got .*\(\d+,\)"),
        (pad_to(-1), ValueError, r"padded to the length that it is given"),
        (lambda ids, length: LENGTHS[ids], ValueError, r"padded to the length .* shape \(\)"),
        (
            lambda ids, length: np.zeros((len(ids), LENGTHS.max())),  # right at the longest alone
            ValueError,
            r"padded to the length that it is given",
        ),
        (
            lambda ids, length: {
                "x": np.zeros((len(ids), length)),
                "y": np.zeros((len(ids), len(ids))),
            },
            ValueError,
            r"rows must keep the form of the first ones, got .* at data\['y'\]",
        ),
        (lambda ids, length: np.zeros((1, length)), ValueError, "one row per id"),
    ],
)
def test_rows_of_another_length_are_refused_in_words(fetch, error, text):
    plan = BudgetPlan(LENGTHS, 2, 90, shapes=3)
    with pytest.raises(error, match=text):
        list(batches(plan, 0, fetch, data_mesh(2)))


@pytest.mark.parametrize("fixed", range(1, 31))
def test_features_of_one_size_pass_whatever_the_lengths(fixed):
    plan = BudgetPlan(LENGTHS, 2, 90, shapes=4)

    def fetch(ids, length):
        return np.zeros((len(ids), length)), np.zeros((len(ids), fixed, 2)), np.zeros(len(ids))

    assert len(list(batches(plan, 0, fetch, data_mesh(2), prefetch=0))) == plan.steps_per_epoch


def test_a_callable_without_a_signature_is_taken_at_its_word():
    plan = BudgetPlan(LENGTHS, 1, 90, shapes=1)

    class Fetch:
        def __call__(self, *given):
            ids, length = given
            return np.zeros((len(ids), length))

    assert len(list(batches(plan, 0, Fetch(), data_mesh(1)))) == plan.steps_per_epoch


def test_plans_of_other_ranks_are_refused():
    for plan in (BudgetPlan(LENGTHS, 3, 90), PackedPlan(LENGTHS, 3, 2, 64)):
        with pytest.raises(ValueError, match=r"plan must have as many ranks .* got 3 and 2"):
            batches(plan, 0, fetch, data_mesh(2))


def test_records_tell_plans_apart():
    plan = BudgetPlan(LENGTHS, 2, 90, shapes=2)
    record = EpochRecord.of(plan, 3, "hash")
    check_agreement(record)
    assert (record.steps, record.accepted) == (plan.steps_per_epoch, 57)
    assert f"steps of {plan.step_shapes[0][0]} x {plan.step_shapes[0][1]}" in record.order
    others = [
        BudgetPlan(LENGTHS, 2, 91, shapes=2),
        BudgetPlan(LENGTHS[::-1], 2, 90, shapes=2),
        BudgetPlan(LENGTHS, 2, 90, shapes=3),
        plan.resumed(3, plan.position(1)),
        plan.resumed(3, 0, budget=60),
        PackedPlan(LENGTHS, 2, 2, 64),
        PackedPlan(LENGTHS, 2, 2, 65),
        EpochPlan(57, 2, 2),
    ]
    records = [record, *(EpochRecord.of(each, 3, "hash") for each in others)]
    assert len({each.to_json() for each in records}) == len(records)
    packed = EpochRecord.of(others[5], 3, "hash")
    assert (packed.steps, packed.accepted) == (others[5].steps_per_epoch(3), 57)


def test_ids_of_more_than_32_bits_stay_refused():
    assert not jax.config.read("jax_enable_x64")
    with pytest.raises(ValueError, match="at most 32 bits while x64 is off"):
        batches(EpochPlan(2**33, 1, 1), 0, fetch, data_mesh(1))
