"""Rows that lie on the devices, by the ids that a plan makes there."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, PyTree

from jax_ddp_weighting.data.batch import Batch
from jax_ddp_weighting.data.device_plan import DevicePlan
from jax_ddp_weighting.distributed import mesh as meshes
from jax_ddp_weighting.distributed.mesh import AxisName
from jax_ddp_weighting.distributed.placement import check_device_values, id_dtype
from jax_ddp_weighting.sampling.plan import EpochPlan, check_plan


def check_plan_of_mesh(plan: Any, mesh: Mesh, axis_name: AxisName, *, caller: str) -> None:
    """Refuses a plan of which no program can be made for the mesh.

    Raises:
        TypeError: the plan is no `EpochPlan`, or the mesh none of devices.
        ValueError: it has another number of ranks than the mesh's data axis, or no steps.
    """
    check_plan(f"{caller}: plan", plan)
    ranks = meshes.num_ranks(mesh, axis_name, caller=caller)
    meshes.check_has_devices(mesh, caller=caller)
    if plan.num_replicas != ranks:
        raise ValueError(
            f"{caller}: plan must have as many ranks as the mesh's {axis_name!r} axis, got"
            f" {plan.num_replicas} and {ranks}. Make the plan with num_replicas={ranks}."
        )
    if not plan.steps_per_epoch:
        raise ValueError(
            f"{caller}: plan must have a step, got {plan.num_examples} examples for"
            f" {ranks} ranks of {plan.batch_size} rows and tail={plan.tail!r}."
        )


def check_rows_of_plan(data: PyTree, plan: EpochPlan, mesh: Mesh, *, caller: str) -> None:
    """Refuses data that have no row for each example, that a device would cut, or cannot hold.

    Raises:
        ValueError: they are such; names the leaf.
    """
    n = plan.num_examples
    leaves = jax.tree_util.tree_leaves_with_path(data)
    coming = 0
    for path, leaf in leaves:
        if np.shape(leaf)[:1] != (n,):
            name = f"data{jax.tree_util.keystr(path)}"
            raise ValueError(
                f"{caller}: data must have a row for each of the plan's {n} examples, got"
                f" shape {np.shape(leaf)} at {name}. Row i is example i, whatever the order."
            )
        if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
            values = np.asarray(leaf)
            check_device_values(values, f"data{jax.tree_util.keystr(path)}", caller=caller)
            coming += values.nbytes
    if not leaves:
        raise ValueError(f"{caller}: data must be arrays, got none.")
    free = meshes.free_bytes(mesh) if coming else None
    if free is not None and coming > free:
        raise ValueError(
            f"{caller}: data must fit on every device, got {coming:,} bytes for {free:,} free."
            " Spread the rows, jax.device_put(data, NamedSharding(mesh, PartitionSpec(axis_name))),"
            " or read them from the host with batches(plan, ...)."
        )


def take_batch(
    on_device: DevicePlan, epoch: Array, number: Array, data: PyTree, rows: NamedSharding
) -> Batch:
    """The batch of a step of all ranks, traced, each row where its rank is.

    The rule: bit for bit the rows, also where they lie spread over the ranks.

    Args:
        on_device: the plan.
        epoch: the epoch, traced.
        number: the step, traced.
        data: arrays ``[num_examples, ...]``.
        rows: how a batch lies on the mesh.
    """
    slots = on_device.batch(epoch, number)
    ids, weights = (
        jax.lax.with_sharding_constraint(leaf.reshape(-1), rows)
        for leaf in (slots.ids, slots.weights)
    )

    def take(leaf: Array) -> Array:
        # As integers: where rows are sharded XLA adds up what each device has, and -0 + 0 is 0.
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            words = take(jax.random.key_data(leaf))
            return jax.random.wrap_key_data(words, impl=jax.random.key_impl(leaf))
        if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
            return jax.lax.complex(take(leaf.real), take(leaf.imag))
        bits = leaf
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            unsigned = jnp.dtype(f"uint{8 * leaf.dtype.itemsize}")
            bits = jax.lax.bitcast_convert_type(leaf, unsigned)
        taken = bits.at[ids].get(mode="promise_in_bounds")
        if bits is not leaf:
            taken = jax.lax.bitcast_convert_type(taken, leaf.dtype)
        return jax.lax.with_sharding_constraint(taken, rows)

    return Batch(jax.tree.map(take, data), ids.astype(id_dtype()), weights)
