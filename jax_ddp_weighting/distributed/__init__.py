"""Devices and processes: data meshes, regimes of a data axis, what processes tell each other."""

from jax_ddp_weighting.distributed.mesh import ENGINES, data_mesh, force_cpu_devices

__all__ = [
    "ENGINES",
    "data_mesh",
    "force_cpu_devices",
]
