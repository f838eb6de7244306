"""Losses that are sums over rows pass; losses in which rows depend on each other are refused."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_ddp_weighting import Batch, ParityError, WeightedSum, check_additive, weighted_sum

RNG = np.random.default_rng(0)
X = RNG.normal(size=(6, 4)).astype(np.float32)
Y = RNG.uniform(0.1, 0.9, size=(6, 3)).astype(np.float32)
WEIGHTS = np.array([1.0, 0.25, 0.0, 3.0, 1.0, 0.5], np.float32)
BATCH = Batch.of((X, Y), WEIGHTS)
PARAMS = {"w": RNG.normal(size=(4, 3)).astype(np.float32)}


def outputs(params, batch):
    return batch.data[0] @ params["w"]


def squares(params, batch):
    return jnp.sum((outputs(params, batch) - batch.data[1]) ** 2, axis=-1)


def plain(params, batch):
    return weighted_sum(squares(params, batch), batch.weights)


def with_a_regulariser(params, batch):
    fit = plain(params, batch)
    return {"fit": fit, "decay": fit.once(jnp.sum(params["w"] ** 2))}


def of_two_denominators(params, batch):
    tokens = jnp.abs(outputs(params, batch))
    counts = jnp.broadcast_to(batch.weights[:, None], tokens.shape)
    return {"rows": plain(params, batch), "tokens": weighted_sum(tokens, counts)}


@pytest.mark.parametrize("loss_fn", [plain, with_a_regulariser, of_two_denominators])
@pytest.mark.parametrize("float64", [False, True])
def test_sums_over_rows_pass(loss_fn, float64):
    report = check_additive(loss_fn, PARAMS, BATCH, float64=float64)
    assert all(each.equal for each in report.differences)
    assert "rows of weight 0 added" in {each.engine for each in report.differences}
    tolerances = {each.rtol for each in report.differences if each.leaf.endswith("['w']")}
    assert tolerances == ({1e-12} if float64 else {1e-5})
    assert not jax.config.jax_enable_x64


class Normed(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.BatchNorm(use_running_average=False)(nn.Dense(3)(x))


NORMED = Normed()
NORMED_PARAMS = jax.jit(NORMED.init)(jax.random.key(0), X)


def contrastive(params, batch):
    """Every other row of the batch is a negative."""
    first = outputs(params, batch)
    logits = first @ batch.data[1].T
    losses = jax.nn.logsumexp(logits, axis=-1) - jnp.diagonal(logits)
    return weighted_sum(losses, batch.weights)


def batch_norm(params, batch):
    out, _ = NORMED.apply(params, batch.data[0], mutable=["batch_stats"])
    return weighted_sum(jnp.sum((out - batch.data[1]) ** 2, axis=-1), batch.weights)


def dice(params, batch):
    found = jax.nn.sigmoid(outputs(params, batch))
    overlap = jnp.sum(found * batch.data[1])
    ratio = 2 * overlap / (jnp.sum(found) + jnp.sum(batch.data[1]))
    return WeightedSum(1 - ratio, 1)


def load_balance(params, batch):
    """Each expert's share of rows times its mean gate, as mixtures of experts balance them."""
    gates = jax.nn.softmax(outputs(params, batch))
    share = jnp.mean(jax.nn.one_hot(jnp.argmax(gates, axis=-1), 3), axis=0)
    return {
        "fit": plain(params, batch),
        "balance": plain(params, batch).once(3 * jnp.sum(share * jnp.mean(gates, axis=0))),
    }


def weights_from_data(params, batch):
    losses = squares(params, batch)
    return weighted_sum(losses, batch.weights / (1 + jnp.max(losses)))


def a_mean(params, batch):
    return WeightedSum(plain(params, batch).mean(), jnp.sum(batch.weights))


def padding_that_counts(params, batch):
    return weighted_sum(squares(params, batch))


REFUSED = {
    "contrastive": (contrastive, PARAMS, "loss.total"),
    "BatchNorm": (batch_norm, NORMED_PARAMS, "loss.total"),
    "Dice": (dice, PARAMS, "loss.total"),
    "load balance": (load_balance, PARAMS, "balance.mean"),
    "weights from the data": (weights_from_data, PARAMS, "loss.weight"),
    "a mean inside": (a_mean, PARAMS, "loss.total"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_rows_that_depend_on_each_other_are_refused(name):
    loss_fn, params, leaf = REFUSED[name]
    with pytest.raises(ParityError, match=r"do not add up .* No weighting can mend") as caught:
        check_additive(loss_fn, params, BATCH)
    wrong = [each.leaf for each in caught.value.report.wrong]
    assert leaf in wrong
    assert not any(each.startswith("fit") for each in wrong)
    assert "in-batch" in str(caught.value) or "taken from the batch" in str(caught.value)


def test_rows_of_weight_0_that_count_are_refused():
    with pytest.raises(ParityError, match="rows of weight 0 added") as caught:
        check_additive(padding_that_counts, PARAMS, BATCH)
    assert {each.engine for each in caught.value.report.wrong} == {"rows of weight 0 added"}


WEIGHTLESS = {  # each divides by something that is no sum over rows, and is right otherwise
    "a constant": lambda fit, batch: WeightedSum(fit.total, 50.0),
    "a constant 1": lambda fit, batch: WeightedSum(fit.total, 1),
    "clamped": lambda fit, batch: WeightedSum(fit.total, jnp.maximum(fit.weight, 1)),
    "clamped positives": lambda fit, batch: WeightedSum(
        fit.total, jnp.maximum(jnp.sum((batch.weights > 0) & (batch.data[1][:, 0] > 0)), 1)
    ),
    "one positive, clamped": lambda fit, batch: WeightedSum(
        fit.total, jnp.maximum(jnp.sum(batch.weights == 3), 1)
    ),
}


@pytest.mark.parametrize("name", WEIGHTLESS)
def test_a_weight_that_does_not_add_is_named_and_belongs_into_a_divisor(name):
    def loss_fn(params, batch):
        fit = plain(params, batch)
        return {"fit": fit, "box": WEIGHTLESS[name](fit, batch)}

    message = r"Term 'box' has a weight that does not add: give it as a divisor, .*\{'box': 50"
    with pytest.raises(ParityError, match=message) as caught:
        check_additive(loss_fn, PARAMS, BATCH, [(3, 3), (2, 4)])
    assert {each.leaf for each in caught.value.report.wrong} == {"box.weight"}
    assert "No weighting can mend" not in str(caught.value)


def test_a_weight_that_does_not_add_beside_a_total_that_does_not_is_told_apart():
    def loss_fn(params, batch):
        return {
            "box": WEIGHTLESS["a constant"](plain(params, batch), batch),
            "dice": dice(params, batch),
        }

    with pytest.raises(ParityError, match=r"Term 'box' has a weight .* No weighting can mend"):
        check_additive(loss_fn, PARAMS, BATCH)


def test_a_loss_of_statistics_adds_up_if_they_do():
    def loss_fn(params, batch, *, statistics):
        return weighted_sum(squares(params, batch) / statistics, batch.weights)

    def rows(params, batch):
        return jnp.sum(batch.weights * squares(params, batch))

    def largest(params, batch):
        return jnp.max(batch.weights * squares(params, batch))

    report = check_additive(loss_fn, PARAMS, BATCH, statistics=rows)
    assert "statistics" in {each.leaf for each in report.differences}
    with pytest.raises(ParityError, match=r"worst statistics \(\), .* No weighting can mend"):
        check_additive(loss_fn, PARAMS, BATCH, statistics=largest)


def test_a_gradient_that_does_not_add_is_found_though_values_do():
    def stopped(params, batch):
        scale = jnp.mean(outputs(params, batch))
        return weighted_sum(
            squares(params, batch) * scale / jax.lax.stop_gradient(scale), batch.weights
        )

    with pytest.raises(ParityError, match=r"worst loss.gradient\['w'\] \(4, 3\)") as caught:
        check_additive(stopped, PARAMS, BATCH)
    assert {each.leaf for each in caught.value.report.wrong} == {"loss.gradient['w']"}


@pytest.mark.parametrize("rtol", [None, 1e-3, 1e-2])
def test_no_tolerance_hides_a_small_leaf_that_does_not_add(rtol):
    def centred(params, batch):
        """One leaf's rows depend on each other, and pull a thousand times less."""
        x = batch.data[0]
        pull = (x - x.mean(axis=0, keepdims=True)) @ params["small"]
        return weighted_sum(squares(params, batch) + 1e-3 * jnp.sin(pull), batch.weights)

    params = PARAMS | {"small": np.full(4, 0.5, np.float32)}
    with pytest.raises(ParityError, match="do not add up") as caught:
        check_additive(centred, params, BATCH, rtol=rtol)
    assert "loss.gradient['small']" in {each.leaf for each in caught.value.report.wrong}


def test_a_weight_is_measured_by_itself_and_not_by_its_total():
    def large(params, batch):
        fit = plain(params, batch)
        return WeightedSum(1e8 * fit.total, jnp.maximum(fit.weight, 2.5))

    with pytest.raises(ParityError, match="Term 'loss' has a weight that does not add"):
        check_additive(large, PARAMS, BATCH)


@pytest.mark.parametrize(
    ("splits", "message"),
    [
        ([(5, 2)], r"splits must deal all 6 rows out .* got \(5, 2\)"),
        ([(6, 0)], r"that are not empty, got \(6, 0\)"),
        ([(6,)], r"two or more parts .* got \(6,\)"),
        ([], "splits must name at least one split, got none"),
    ],
)
def test_splits_that_show_nothing_are_refused(splits, message):
    with pytest.raises(ValueError, match=message):
        check_additive(plain, PARAMS, BATCH, splits)


def test_one_row_and_bare_arrays_are_refused():
    one = jax.tree.map(lambda leaf: leaf[:1], BATCH)
    with pytest.raises(ValueError, match="batch must have at least 2 rows, got 1"):
        check_additive(plain, PARAMS, one)
    with pytest.raises(TypeError, match="check_additive: batch must be a Batch, got tuple"):
        check_additive(plain, PARAMS, (X, Y))


def test_a_loss_that_returns_a_mean_is_refused():
    with pytest.raises(TypeError, match="loss_fn must return a WeightedSum"):
        check_additive(lambda params, batch: plain(params, batch).mean(), PARAMS, BATCH)


def test_a_loss_that_is_not_finite_is_refused():
    def poisoned(params, batch):
        return weighted_sum(squares(params, batch) * jnp.nan, batch.weights)

    with pytest.raises(ValueError, match=r"loss_fn must be finite .* at total"):
        check_additive(poisoned, PARAMS, BATCH)


def test_what_is_no_sum_is_said_by_the_check_that_was_called():
    with pytest.raises(TypeError, match=r"^check_additive: loss_fn must return a WeightedSum"):
        check_additive(lambda w, batch: w * batch.data.mean(), 1.0, Batch.of(np.arange(4.0)))
