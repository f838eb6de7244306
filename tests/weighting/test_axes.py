"""An axis over which rows lie and that nobody has named: refused where types can tell."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jax_ddp_weighting import value_and_grad, weighted_sum

VALUES = np.float32([1, 0, 3, 3, 5, 3, 3, 3])
WEIGHTS = np.int32([1, 0, 1, 1, 1, 0, 0, 0])


def loss_fn(w, batch):
    return weighted_sum(w * batch[0], batch[1])


def over(axes, *, rows, axis_name, params=None, microbatches=1, check=True, sizes=None):
    params = P() if params is None else params
    sizes = sizes or dict.fromkeys(axes, 2)
    devices = np.array(jax.devices()[: int(np.prod(list(sizes.values())))])
    mesh = jax.sharding.Mesh(devices.reshape(tuple(sizes.values())), tuple(sizes))
    gradient = value_and_grad(loss_fn, axis_name=axis_name, microbatches=microbatches)

    def fn(w, batch):
        return gradient(w.reshape(()), batch)[1].reshape(w.shape)

    return jax.jit(
        jax.shard_map(fn, mesh=mesh, in_specs=(params, P(rows)), out_specs=params, check_vma=check)
    )


ONE = jnp.float32(1)


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_an_axis_left_out_is_refused(ranks, microbatches):
    run = over(
        ("data",), rows="data", axis_name=None, microbatches=microbatches, sizes={"data": ranks}
    )
    message = (
        r"axis_name must name every mapped axis that rows lie over, got None for term 'loss', "
        r"which varies over \('data',\) too. Pass axis_name='data', or sum"
    )
    with pytest.raises(ValueError, match=message):
        run(ONE, (VALUES, WEIGHTS))


def test_one_of_two_axes_is_refused():
    run = over(("replica", "data"), rows=("replica", "data"), axis_name="data")
    message = r"got 'data' for term 'loss', which varies over \('replica',\) too. Pass axis_name="
    with pytest.raises(ValueError, match=message + r"\('data', 'replica'\)"):
        run(ONE, (VALUES, WEIGHTS))


@pytest.mark.parametrize("microbatches", [1, 2])
def test_both_of_them_are_right(microbatches):
    run = over(
        ("replica", "data"),
        rows=("replica", "data"),
        axis_name=("replica", "data"),
        microbatches=microbatches,
    )
    assert float(run(ONE, (VALUES, WEIGHTS))) == pytest.approx(np.average(VALUES, weights=WEIGHTS))


def test_without_types_the_axis_left_out_is_wrong_and_unsaid():
    # the control: what the check prevents where it can
    run = over(("data",), rows="data", axis_name=None, check=False)
    assert float(run(ONE, (VALUES, WEIGHTS))) != pytest.approx(np.average(VALUES, weights=WEIGHTS))


def test_an_axis_that_rows_do_not_lie_over_may_be_named_or_not():
    for axis_name in ("data", ("data", "model")):
        run = over(("data", "model"), rows="data", axis_name=axis_name)
        assert float(run(ONE, (VALUES, WEIGHTS))) == pytest.approx(
            np.average(VALUES, weights=WEIGHTS)
        )


def test_an_ensemble_has_an_axis_of_its_own():
    # two models, each over its own half of the rows
    run = over(("model", "data"), rows=("model", "data"), axis_name="data", params=P("model"))
    gradients = run(jnp.ones(2), (VALUES, np.ones(8, np.int32)))
    np.testing.assert_allclose(gradients, [VALUES[:4].mean(), VALUES[4:].mean()], rtol=1e-6)
