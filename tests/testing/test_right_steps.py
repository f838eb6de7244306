"""Right steps as people write them, on random batches: none is given another name."""

import jax
import jax.numpy as jnp
import pytest
from right_steps import STYLES, check_not_misnamed, diagnose_style, total_of


@pytest.mark.parametrize("style", STYLES)
def test_no_right_step_of_this_style_is_misnamed(style):
    right = [check_not_misnamed(diagnose_style(style, seed)) for seed in range(9)]
    assert sum(right) >= 7


def test_a_wrong_step_of_the_same_kind_is_found():
    def mean_of_halves(params, data, weights):
        def half(params, rows):
            part = jax.tree.map(lambda leaf: leaf[rows], (data, weights))
            return total_of(params, *part) / jnp.maximum(jnp.sum(part[1]), 1e-9)

        own = [jax.grad(half)(params, rows) for rows in (slice(0, 6), slice(6, 12))]
        return jax.tree.map(lambda a, b: (a + b) / 2, *own)

    found = [diagnose_style("halves", seed, jax.jit(mean_of_halves)) for seed in range(3)]
    assert not any(each.right for each in found)
