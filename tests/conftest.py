"""For the whole suite: eight faked CPU devices, annotations checked, no rank promotion."""

import jax
from jaxtyping import install_import_hook

# shapes and dtypes of annotated arrays are checked on every call, in tests only
install_import_hook("jax_ddp_weighting", "annotations.checked")

from jax_ddp_weighting import force_cpu_devices  # noqa: E402 - after the hook

# those need torch and grain, a browser, or the package index: `make test-torch` and so on
collect_ignore = ["live", "browser", "package"]

force_cpu_devices(8)
jax.config.update("jax_numpy_rank_promotion", "raise")
