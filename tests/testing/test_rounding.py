"""What rows contribute, how narrow numbers are, and what measuring that costs a right proof."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_ddp_weighting import Batch, check_gradients, weighted_sum
from jax_ddp_weighting.testing.conventions import round_up
from jax_ddp_weighting.testing.rounding import find_largest, find_narrowest, measure_rows


def linear(w, batch):
    return weighted_sum(w * batch.data, batch.weights)


def test_rows_that_cancel_contribute_all_the_same():
    batch = Batch.of(np.float32([5.0, -5.0, 3.0, -1.0]), weights=np.float32([1, 1, 2, 0]))
    # |5| + |-5| + |2 * 3|, over the weight of 4; the loss at w = 2 twice as much
    found = measure_rows(linear, np.float32(2.0), batch, None)
    chex.assert_trees_all_close(found, {"loss": 8.0, "params": 4.0}, rtol=1e-6)


def test_a_term_counted_once_contributes_once_and_a_metric_not_at_all():
    def terms(w, batch):
        loss = linear(w, batch)
        metric = weighted_sum(1e6 * w * batch.data, batch.weights)
        return {"loss": loss, "penalty": loss.once(w**2), "metric": metric}

    batch = Batch.of(np.float32([1.0, -1.0, 1.0, -1.0]))
    factors = {"loss": 1.0, "penalty": 3.0, "metric": 0.0}
    found = measure_rows(terms, np.float32(2.0), batch, factors)
    # the penalty pulls by 3 * 2 * w, a quarter in each row; what rows pull by lies below that
    assert found["params"] == pytest.approx(12.0)


def test_a_loss_that_takes_no_single_row_has_no_sizes():
    def of_pairs(w, batch):
        return weighted_sum(w * batch.data.reshape(-1, 2).sum(1), batch.weights[::2])

    found = measure_rows(of_pairs, np.float32(1.0), Batch.of(np.float32([1.0, 2.0])), None)
    assert found == {"loss": 0.0, "params": 0.0}


def test_the_narrowest_dtype_is_found_wherever_it_hides():
    def inside(x):
        def body(carry, each):
            return carry + each.astype(jnp.bfloat16).astype(each.dtype), None

        return jax.jit(lambda x: jax.lax.scan(body, jnp.float32(0), x)[0])(x)

    assert find_narrowest(inside, jnp.ones(3)) == jnp.bfloat16
    assert find_narrowest(lambda x: x * 2, jnp.ones(3)) == jnp.float32
    assert find_narrowest(lambda x: x + 1, jnp.arange(3)) is None


@pytest.mark.parametrize(
    ("number", "rounded"), [(0.0021, 0.003), (0.0095, 0.02), (0.5, 0.6), (1e-6, 2e-6)]
)
def test_a_tolerance_is_rounded_up_to_one_digit(number, rounded):
    assert round_up(number) == pytest.approx(rounded)


def test_the_largest_of_nothing_is_0():
    assert find_largest({}) == 0.0
    assert find_largest({"a": np.zeros(0), "b": jnp.bfloat16(-3.0)}) == 3.0


def test_a_proof_that_holds_traces_its_loss_once_a_regime():
    chex.clear_trace_counter()
    # one device, and two engines; vmap's types do not tell which axes a loss uses, nor which half
    # of a term is summed over them, so it is asked twice
    counted = chex.assert_max_traces(linear, n=5)
    batch = Batch.of(np.float32([1.0, 2.0, 3.0]))
    check_gradients(counted, np.float32(2.0), batch, [(2, 1)], engines=["jit", "vmap"])
    with pytest.raises(AssertionError, match="traced > 5 times"):
        check_gradients(counted, np.float32(2.0), batch, [(1, 2)], engines=["vmap"])
