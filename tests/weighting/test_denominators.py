"""What people have run into: each report's input, the right value, and the wrong one it reported.

The right values come from `value_and_grad` in the default `shard_map`; the wrong ones from the
reports' own ways of reducing, written out here, so that each check is seen to fail.
"""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from jax_ddp_weighting import WeightedSum, data_mesh, valid_labels, value_and_grad, weighted_sum
from jax_ddp_weighting.distributed import mesh as meshes


def over(ranks, fn, params, rows, engine="shard_map"):
    return jax.jit(meshes.over_ranks(fn, data_mesh(ranks), engine=engine))(params, rows)


def ours(loss_fn, ranks, params, rows, **options):
    """Loss and gradient; rows are `[ranks * microbatches * width, ...]`, see `laid_out`."""
    return over(ranks, value_and_grad(loss_fn, axis_name="data", **options), params, rows)


def averaged(divide, loss_fn, ranks, params, rows, microbatches=1):
    """A wrong way: the mean over ranks and microbatches of what `divide` makes of each sum."""

    def fn(params, rows):
        split = jax.tree.map(lambda x: x.reshape(-1, microbatches, *x.shape[1:]), rows)

        def loss(params):
            parts = [
                divide(loss_fn(params, jax.tree.map(lambda x, k=k: x[:, k], split)))
                for k in range(microbatches)
            ]
            return sum(parts) / microbatches

        return lax.pmean(jax.value_and_grad(loss)(params), "data")

    return over(ranks, fn, params, rows, engine="vmap")


def own_mean(local):
    return local.mean()


def clamped_mean(local):
    return local.total / jnp.maximum(local.weight, 1)


def linear_loss(w, batch):
    """Each row's loss is w times its value, so that its gradient is its value."""
    values, weights = batch
    return weighted_sum(w * values, weights)


def laid_out(ranks, shape=None):
    """Uneven rows of (rank, microbatch) as (value, weight), padded to one width with weight 0."""
    width = max(len(rows) for rank in ranks for rows in rank)
    table = np.zeros(((len(ranks), width, len(ranks[0])) if shape is None else shape) + (2,))
    for r, rank in enumerate(ranks):
        for k, rows in enumerate(rank):
            for j, row in enumerate(rows):
                table[r, j, k] = row
    table = table.astype(np.float32).reshape(-1, 2)
    return table[:, 0], table[:, 1]


REPORTS = {  # ranks of microbatches of (gradient, weight); a wrong way; what it gives; right
    "prime-rl 1957": ([[[(1, 1)] * 5], [[(7, 1)]]], own_mean, 4, 2),
    "flax wmt and nlp_seq": ([[[(1, 1)]], [[(3, 1)] * 3]], own_mean, 2, 2.5),
    "ms-swift 10144, a sign": ([[[(0.1, 1)], [(-0.05, 1)] * 3]], own_mean, 0.025, -0.0125),
    "transformers 608": ([[[(1, 1)] + [(0, 1)] * 6], [[(0, 1)] * 6]], own_mean, 1 / 14, 1 / 13),
    "the other rank's rows": (
        [[[(0, 1)] * 7], [[(1, 1)] + [(0, 1)] * 5]],
        own_mean,
        1 / 12,
        1 / 13,
    ),
    "tunix 1833": ([[[(2, 0.25), (4, 0.25)]]], clamped_mean, 1.5, 3),
    "Megatron 1764, Automodel 3796": ([[[(9, 0)]], [[(3, 1), (5, 1)]]], own_mean, 2, 4),
    "pytorch 15259, 25571": (  # class weights, divided by the number of rows
        [[[(1, 0.1), (1, 0.1)]], [[(4, 2.0), (4, 2.0)]]],
        lambda local: local.total / 2,
        4.05,
        16.2 / 4.2,
    ),
}
WIDEST = (2, 7, 2)


@cache
def ours_on_reports():
    fn = value_and_grad(linear_loss, axis_name="data", microbatches=WIDEST[2])
    return jax.jit(meshes.over_ranks(fn, data_mesh(WIDEST[0])))


@pytest.mark.parametrize("report", REPORTS)
def test_gradients_of_reports(report):
    ranks, divide, wrong, right = REPORTS[report]
    loss, gradient = ours_on_reports()(jnp.float32(1), laid_out(ranks, WIDEST))
    assert (gradient, loss.value) == pytest.approx((right, right), rel=1e-6)
    _, theirs = averaged(
        divide, linear_loss, len(ranks), jnp.float32(1), laid_out(ranks), len(ranks[0])
    )
    assert theirs == pytest.approx(wrong, rel=1e-6)
    assert theirs != pytest.approx(right, rel=1e-2)


def test_a_rank_without_valid_tokens_does_not_make_nan():
    # Megatron 1764: 0 / 0 on that rank, and NaN on all of them after the mean
    rows = laid_out([[[(9, 0), (9, 0)]], [[(3, 1), (5, 1)]]])
    loss, gradient = ours(linear_loss, 2, jnp.float32(1), rows)
    assert (loss.value, gradient) == (4, 4)

    def by_hand(w, batch):
        values, weights = batch
        return WeightedSum(jnp.sum(w * values * weights), jnp.sum(weights))

    value, theirs = averaged(lambda s: s.total / s.weight, by_hand, 2, jnp.float32(1), rows)
    assert np.isnan([value, theirs]).all()


def test_every_target_of_10_and_100_weighs_one_over_110():
    # transformers 24725: each rank's own mean gives 1/20 and 1/200
    def loss_fn(targets, batch):
        ids, weights = batch
        return weighted_sum(targets[ids], weights)

    ids = np.concatenate([np.arange(10), np.zeros(90, int), np.arange(10, 110)])
    weights = np.concatenate([np.ones(10), np.zeros(90), np.ones(100)])
    _, gradient = ours(loss_fn, 2, jnp.zeros(110), (ids, weights))
    np.testing.assert_allclose(gradient, np.full(110, 1 / 110), rtol=1e-6)
    _, theirs = averaged(own_mean, loss_fn, 2, jnp.zeros(110), (ids, weights))
    np.testing.assert_allclose(theirs, [1 / 20] * 10 + [1 / 200] * 100, rtol=1e-6)


def test_a_tail_of_40_rows_counts_as_40_rows():
    # mlcommons training 89: the mean of batch means gives a row of the tail 3.19 votes
    sizes = [128] * 195 + [40]
    one_row = [WeightedSum(0.0, size) for size in sizes[:-1]] + [WeightedSum(1.0, 40)]
    assert sum(one_row).mean() * sum(sizes) == pytest.approx(1.0)
    of_means = np.mean([each.mean() for each in one_row]) * sum(sizes)
    assert of_means == pytest.approx(3.19, abs=5e-3)


def test_batches_of_2_and_1_rows_of_value_3_have_mean_3():
    # Lightning 21838: totals over the number of batches give 4.5
    batches = [weighted_sum(np.full(2, 3.0)), weighted_sum(np.full(1, 3.0))]
    assert sum(batches).mean() == 3.0
    assert sum(each.total for each in batches) / len(batches) == 4.5


def test_a_rank_whose_loss_is_zero_still_gets_the_gradient_of_all():
    # jax 3970, 36886: the gradient of a psum, inside pmap, is 0 on one rank and 4 on the other
    def loss_fn(w, d):
        return WeightedSum(jnp.sum((w**2 + 1) * d), 0.5)  # two ranks: divided by 1 in all

    _, gradient = over(2, value_and_grad(loss_fn, axis_name="data"), jnp.float32(1), np.arange(2.0))
    assert gradient == 2

    def theirs(d):
        return jax.grad(lambda w: lax.psum((w**2 + 1) * d, "data"))(1.0)

    np.testing.assert_array_equal(jax.vmap(theirs, axis_name="data")(jnp.arange(2.0)), [0, 4])


ROWS = (np.float32([1, 2, 3, 4, 5, 6, 7, 8]), np.float32([1, 1, 1, 1, 1, 0, 1, 0]))


@pytest.mark.parametrize("microbatches", [1, 2, 4])
def test_the_gradient_does_not_grow_with_accumulation(microbatches):
    # transformers 45305, axolotl 2262: K times too large
    right = np.average(ROWS[0], weights=ROWS[1])
    options = {"microbatches": microbatches}
    _, gradient = ours(linear_loss, 1, jnp.float32(1), ROWS, **options)
    assert gradient == pytest.approx(right, rel=1e-6)
    _, theirs = averaged(
        lambda local: local.mean() * microbatches, linear_loss, 1, jnp.float32(1), ROWS, **options
    )
    assert microbatches == 1 or theirs > 1.5 * right


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_gradient_is_neither_divided_nor_multiplied_by_the_ranks(ranks):
    # OpenNMT 2451, liquid 38
    right = np.average(ROWS[0], weights=ROWS[1])
    _, gradient = ours(linear_loss, ranks, jnp.float32(1), ROWS)
    assert gradient == pytest.approx(right, rel=1e-6)

    def divided_twice(local):
        return local.total / lax.psum(local.weight, "data")

    _, theirs = averaged(divided_twice, linear_loss, ranks, jnp.float32(1), ROWS)
    assert theirs == pytest.approx(right / ranks, rel=1e-6)


def test_accelerates_own_toy_ends_at_the_weights_of_its_documentation():
    # "Gradient accumulation on training samples of variable size": sequence i holds the tokens
    # 1 .. i + 1, labels are their parity; 2 ranks, 2 microbatches of 4 sequences, one SGD step.
    start = jnp.array([-0.0075, 0.5364])
    tokens = np.zeros((16, 16), np.float32)
    labels = np.full((16, 16), -100)
    for i in range(16):
        tokens[i, : i + 1] = np.arange(1, i + 2)
        labels[i, : i + 1] = np.arange(1, i + 2) % 2
    # loaders deal batches of four in turn: rank 0 gets batches 0 and 2, interleaved row by row
    rows = np.concatenate([np.stack([b, b + 8], 1).reshape(-1) for b in np.arange(8).reshape(2, 4)])

    def loss_fn(w, batch):
        inputs, labels = batch
        labels, weights = valid_labels(labels)
        logits = inputs[..., None] * w[None, None]
        return weighted_sum(
            optax.softmax_cross_entropy_with_integer_labels(logits, labels), weights
        )

    batch = (tokens[rows], labels[rows])
    loss, gradient = ours(loss_fn, 2, start, batch, microbatches=2)
    assert loss.terms["loss"].weight == 136
    np.testing.assert_allclose(start - 0.08 * gradient, [0.2117, 0.3172], atol=1e-4)
    _, theirs = averaged(own_mean, loss_fn, 2, start, batch, microbatches=2)
    assert np.linalg.norm(theirs) / np.linalg.norm(gradient) == pytest.approx(1 - 0.226, abs=1e-3)


def test_4_and_60_tokens_give_the_one_devices_direction_and_length():
    # Soup 932: norm ratio 1.78, cosine .51 against one device
    x = np.random.default_rng(0).normal(size=(120, 16)).astype(np.float32)
    weights = (np.arange(120) < 4) | (np.arange(120) >= 60)

    def loss_fn(w, batch):
        x, weights = batch
        return weighted_sum((x @ w - 1) ** 2, weights)

    def compared(gradient):
        w, kept = np.ones(16), x[weights].astype(float)
        right = 2 * (kept @ w - 1) @ kept / len(kept)
        a, b = np.linalg.norm(gradient), np.linalg.norm(right)
        return a / b, np.asarray(gradient, float) @ right / (a * b)

    batch = (x, weights.astype(np.int32))
    assert compared(ours(loss_fn, 2, jnp.ones(16), batch)[1]) == pytest.approx((1, 1), rel=1e-5)
    ratio, cosine = compared(averaged(own_mean, loss_fn, 2, jnp.ones(16), batch)[1])
    assert ratio > 1.3
    assert cosine < 0.9


def test_an_auxiliary_loss_has_its_own_denominator():
    # Automodel 1408, MaxText 3311, Megatron 1652: divided by the token count
    aux, tokens = np.float32([2, 4, 0, 6]), np.float32([1, 1, 1, 5])
    weights, routed = np.int32([1, 1, 0, 3]), np.int32([1, 1, 0, 0])

    def loss_fn(w, batch):
        aux, tokens, weights, routed = batch
        return {"nll": weighted_sum(w * tokens, weights), "aux": weighted_sum(w * aux, routed)}

    batch = (aux, tokens, weights, routed)
    loss, gradient = ours(loss_fn, 2, jnp.float32(1), batch, coefficients={"nll": 1.0, "aux": 0.1})
    right = 17 / 5 + 0.1 * 6 / 2
    assert (loss.value, gradient) == pytest.approx((right, right), rel=1e-6)
    assert right != pytest.approx(17 / 5 + 0.1 * 6 / 5, rel=1e-2)


@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 1), (2, 2), (4, 1)])
def test_a_regulariser_is_counted_once(ranks, microbatches):
    # keras 7178, 19891: L2 inside the loss, scaled by the ranks or divided by the count
    def loss_fn(w, batch):
        data = linear_loss(w, batch)
        return {"data": data, "l2": data.once(w**2)}

    factors = {"data": 1.0, "l2": 0.5}
    _, gradient = ours(
        loss_fn, ranks, jnp.float32(3), ROWS, microbatches=microbatches, coefficients=factors
    )
    right = np.average(ROWS[0], weights=ROWS[1]) + 0.5 * 2 * 3
    assert gradient == pytest.approx(right, rel=1e-6)

    def inside(w, batch):  # the count divides the regulariser too
        data = linear_loss(w, batch)
        return WeightedSum(data.total + 0.5 * w**2, data.weight)

    _, theirs = ours(inside, ranks, jnp.float32(3), ROWS, microbatches=microbatches)
    assert theirs != pytest.approx(right, rel=1e-2)


def test_per_sequence_means_of_packed_segments_weigh_each_sequence_alike():
    # two rows that pack sequences of 2 + 3 and of 1 + 4 tokens; segment 0 is padding
    segments = np.array([[1, 1, 2, 2, 2, 0], [1, 2, 2, 2, 2, 0]])
    values = np.float32([[1, 3, 6, 6, 6, 99], [5, 1, 1, 1, 5, 99]])

    def loss_fn(w, batch):
        values, segments = batch
        same = (segments[:, :, None] == segments[:, None, :]) & (segments > 0)[:, None, :]
        sizes = jnp.sum(same, axis=-1)
        return weighted_sum(w * values, jnp.where(segments > 0, 1 / jnp.maximum(sizes, 1), 0))

    loss, gradient = ours(loss_fn, 2, jnp.float32(1), (values, segments))
    assert loss.terms["loss"].weight == pytest.approx(4.0)
    assert gradient == pytest.approx(np.mean([2, 6, 5, 2]), rel=1e-6)
    assert gradient != pytest.approx(values[segments > 0].mean(), rel=1e-2)  # by token
