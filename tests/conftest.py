"""For the whole suite: eight faked CPU devices, annotations checked, no rank promotion."""

import jax
import pytest
from jaxtyping import install_import_hook

# shapes and dtypes of annotated arrays are checked on every call, in tests only
install_import_hook("jax_ddp_weighting", "annotations.checked")

from jax_ddp_weighting import force_cpu_devices  # noqa: E402 - after the hook

# those need torch and grain, a browser, or the package index: `make test-torch` and so on
collect_ignore = ["live", "peers", "browser", "package"]

force_cpu_devices(8)
jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_collection_modifyitems(items):
    """Under pytest-xdist a file stays on one worker, which compiles what its tests share.

    All tests that start several processes share a worker: they compete for the cores as it is.
    """
    for item in items:
        several = hasattr(item.module, "processes") or "processes" in item.module.__name__
        group = "processes" if several else item.module.__name__
        item.add_marker(pytest.mark.xdist_group(group))
