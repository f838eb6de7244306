"""Eight faked CPU devices, and no silent rank promotion, for the whole suite."""

import jax

from jax_ddp_weighting import force_cpu_devices

force_cpu_devices(8)
jax.config.update("jax_numpy_rank_promotion", "raise")
