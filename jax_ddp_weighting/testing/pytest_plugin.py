"""Fixtures for testing data-parallel code with pytest, on faked devices.

They are asked for by name: `pytest_plugins = ["jax_ddp_weighting.testing.pytest_plugin"]` in the
`conftest.py` at the root of the tests. Nothing is registered with pytest otherwise, so that whoever
has the package installed and runs other tests pays nothing and never imports JAX.
"""

from collections.abc import Callable

import numpy as np
import pytest
from jax.sharding import Mesh
from jaxtyping import Float32

from jax_ddp_weighting._arguments import check_integer
from jax_ddp_weighting.distributed.mesh import ENGINES, data_mesh, force_cpu_devices

_DEVICES = "how many CPU devices JAX is to have, made before the first test; 0 leaves JAX alone"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds `--jdw-devices`, and `jdw_devices` in pytest's settings."""
    group = parser.getgroup("jax_ddp_weighting", "jax_ddp_weighting: faked devices")
    group.addoption("--jdw-devices", type=int, help=f"{_DEVICES}; beats the setting jdw_devices")
    parser.addini("jdw_devices", _DEVICES, default="8")


def pytest_configure(config: pytest.Config) -> None:
    """Makes the devices, and the mark `ranks`."""
    config.addinivalue_line(
        "markers", "ranks(*numbers): run the test once for each number of ranks of ranks_mesh"
    )
    devices = _asked_devices(config)
    if devices:
        force_cpu_devices(devices)


def _asked_devices(config: pytest.Config) -> int:
    asked = config.getoption("--jdw-devices")
    setting = config.getini("jdw_devices")
    if asked is None:
        if not str(setting).isdigit():
            raise pytest.UsageError(
                f"jdw_devices must be a number of devices, got {setting!r}. 0 leaves JAX alone."
            )
        asked = int(setting)
    if asked < 0:
        raise pytest.UsageError(
            f"--jdw-devices must be at least 0, got {asked}. 0 leaves JAX alone."
        )
    return asked


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Runs a test once for each number of ranks that it is marked with."""
    mark = metafunc.definition.get_closest_marker("ranks")
    if mark is None:
        return
    if "ranks_mesh" not in metafunc.fixturenames:
        raise pytest.UsageError(
            f"{metafunc.definition.nodeid}: a test marked with ranks must take ranks_mesh, got "
            f"{', '.join(metafunc.fixturenames) or 'no fixture'}. Add it to the arguments."
        )
    whole = [n for n in mark.args if isinstance(n, int) and not isinstance(n, bool) and n >= 1]
    if mark.kwargs or not mark.args or len(whole) < len(mark.args):
        # pytest would skip a test without numbers, and a mesh knows nothing of the mark
        given = [*map(repr, mark.args), *(f"{name}={n!r}" for name, n in mark.kwargs.items())]
        raise pytest.UsageError(
            f"{metafunc.definition.nodeid}: the mark ranks must be given integers of at least 1, "
            f"got {', '.join(given) or 'none'}. For instance: @pytest.mark.ranks(1, 2, 4)"
        )
    metafunc.parametrize("ranks_mesh", mark.args, indirect=True, ids=lambda n: f"{n} ranks")


@pytest.fixture
def ranks_mesh(request: pytest.FixtureRequest) -> Mesh:
    """A data mesh: as wide as `@pytest.mark.ranks` says, or over all devices."""
    return data_mesh(getattr(request, "param", None))


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    """Each regime of a data axis in turn: one of `ENGINES`."""
    return request.param


@pytest.fixture
def uneven_weights() -> Callable[[int], Float32[np.ndarray, " rows"]]:
    """`uneven_weights(rows)`: weights on which wrong denominators differ from the right one.

    The rule: the first half weighs 1, but for one row that weighs .25; the second half is padding,
    but for the last row, which weighs .5. So no two of two or four ranks hold the same weight, and
    with four ranks or more one at least holds none.
    """

    def make(rows: int) -> Float32[np.ndarray, " rows"]:
        rows = check_integer(
            "uneven_weights: rows", rows, 4, 2**31, "Fewer cannot be uneven.", rule="be at least 4"
        )
        weights = np.ones(rows, np.float32)
        weights[1] = 0.25
        weights[rows // 2 :] = 0
        weights[-1] = 0.5
        return weights

    return make
