"""Which rank sees which rows, and on which device, in every regime."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType

from jax_ddp_weighting import data_mesh
from jax_ddp_weighting.distributed.mesh import over_ranks

AXES = ("replica", "data")


def numbered(_, rows):
    """Each rank's row under the rank's own number, counted over both axes."""
    rank = lax.axis_index("replica") * 3 + lax.axis_index("data")
    return lax.psum(jnp.zeros(6, rows.dtype).at[rank].set(rows[0]), AXES)


@pytest.mark.parametrize("engine", ["shard_map", "shard_map_unchecked", "vmap"])
def test_rows_are_dealt_in_the_order_of_the_axes(engine):
    rows = np.arange(10.0, 16.0, dtype=np.float32)
    if engine == "vmap":
        mesh = AbstractMesh((2, 3), AXES)
    else:
        mesh = jax.make_mesh(
            (2, 3), AXES, axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:6]
        )
    run = over_ranks(numbered, mesh, axis_name=AXES, engine=engine)
    np.testing.assert_array_equal(jax.jit(run)(None, rows), rows)


@pytest.mark.parametrize("engine", ["shard_map", "pmap"])
def test_ranks_sit_on_the_devices_of_their_mesh(engine):
    devices = jax.devices()[5:7]
    run = over_ranks(
        lambda _, rows: lax.psum(rows.sum(), "data"), data_mesh(2, devices=devices), engine=engine
    )
    found = (run if engine == "pmap" else jax.jit(run))(jnp.float32(0), np.arange(4.0))
    assert found == 6.0
    assert found.devices() <= set(devices)
