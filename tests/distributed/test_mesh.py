"""Meshes, forced devices, and what the regimes' only file knows about them."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import regimes

from jax_ddp_weighting import data_mesh, force_cpu_devices
from jax_ddp_weighting.distributed import mesh as meshes


def test_a_data_mesh_has_auto_axes_and_the_devices_asked_for():
    mesh = data_mesh(3, axis_name="rows")
    assert mesh.axis_names == ("rows",)
    assert list(mesh.devices) == jax.devices()[:3]
    assert mesh.axis_types == (jax.sharding.AxisType.Auto,)
    assert data_mesh().size == 8
    assert data_mesh(1, devices=jax.devices()[4:]).devices[0] == jax.devices()[4]


@pytest.mark.parametrize(
    ("count", "message"),
    [
        (9, r"9 devices wanted on cpu, 8 found. Call force_cpu_devices\(9\) before the first JAX"),
        (0, r"num_devices must be at least 1, got 0"),
    ],
)
def test_meshes_that_cannot_be_are_refused(count, message):
    with pytest.raises(ValueError, match=message):
        data_mesh(count)


def test_forcing_devices_again_is_fine_and_other_numbers_are_too_late():
    jax.devices()
    force_cpu_devices(8)
    with pytest.raises(RuntimeError, match=r"before the first JAX operation, got 3 when .* with 8"):
        force_cpu_devices(3)
    with pytest.raises(ValueError, match="num_devices must be at least 1, got 0"):
        force_cpu_devices(0)


def test_forced_devices_win_over_the_flag_in_the_environment():
    # in a process of its own: this one's devices are made
    code = (
        "import os; os.environ['XLA_FLAGS'] = '--xla_force_host_platform_device_count=2'\n"
        "import jax_ddp_weighting as jdw; jdw.force_cpu_devices(3)\n"
        "import jax; print(len(jax.devices()))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "3\n"


@pytest.mark.parametrize("regime", regimes.MAPPED)
def test_only_default_shard_map_is_checked(regime):
    seen = []

    def make(axis_name):
        def fn(params, rows):
            seen.append(meshes.is_checked(axis_name))
            return jax.lax.psum(jnp.sum(rows) * params, axis_name)

        return fn

    assert regimes.run(regime, 2, make, jnp.float32(1), jnp.arange(4.0)) == 6
    assert set(seen) == {regime in ("shard_map", "shard_map_explicit")}


def test_varying_twice_is_varying_once():
    def fn(params, rows):
        once = meshes.vary(params, "data")
        return jax.lax.psum(meshes.vary(once, "data") * jnp.sum(rows), "data")

    mapped = meshes.over_ranks(fn, data_mesh(2))
    assert jax.jit(mapped)(jnp.float32(2), jnp.arange(4.0)) == 12


@pytest.mark.parametrize("devices", [1, 2])
def test_donating_what_was_placed_leaves_the_callers_arrays_alone(devices):
    own = {"device": jnp.ones(1000), "host": np.ones(1000, np.float32), "key": jax.random.key(0)}
    placed = meshes.place(own, meshes.replicated_sharding(data_mesh(devices)))
    donate = jax.jit(
        lambda tree: {**tree, "device": tree["device"] + 1, "host": tree["host"] + 1},
        donate_argnums=0,
    )
    jax.block_until_ready(donate(placed))
    assert placed["device"].is_deleted()
    np.testing.assert_array_equal(own["device"], np.ones(1000))
    np.testing.assert_array_equal(own["host"], np.ones(1000))
    assert jax.random.key_data(own["key"]).tolist() == [0, 0]


def test_an_axis_that_is_not_mapped_is_named():
    message = r"axis_name must be an axis mapped here, got 'rows'. .* leave axis_name=None"
    with pytest.raises(ValueError, match=message):
        meshes.axis_size("rows", caller="value_and_grad")


def test_an_unknown_engine_is_named():
    with pytest.raises(ValueError, match=r"engine must be one of jit, .* got 'mpi'"):
        meshes.over_ranks(lambda p, x: x, data_mesh(2), engine="mpi")


def test_a_mesh_whose_axis_is_mapped_already_is_refused():
    manual = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Manual,))
    with pytest.raises(ValueError, match="f: mesh must have axes of type Auto or Explicit, got"):
        meshes.num_ranks(manual, "data", caller="f")
    assert meshes.num_ranks(data_mesh(2), "data", caller="f") == 2


def test_a_device_holds_one_rank():
    with pytest.raises(
        ValueError, match=r"data_mesh: devices must be different ones, got cpu:0, c"
    ):
        data_mesh(devices=[jax.devices()[0]] * 2)
