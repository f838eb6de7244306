"""For the whole suite: eight faked CPU devices, annotations checked, no rank promotion."""

import gc
import os
import re
from functools import cache
from importlib.metadata import version
from pathlib import Path

from strict import TORN_ENTRY

ROOT = Path(__file__).parents[1]

# What XLA has compiled is kept on the disk, for the other workers, for the examples and programs
# that run in processes of their own, and for the next run: compiling is most of what tests cost.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".jax_cache"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
os.environ.setdefault("PYTHONWARNINGS", TORN_ENTRY)

# Thousands of tiny programs run once each: LLVM's optimizations and, where XLA lets us choose, its
# emitters of fusions are half of what they cost, and a tenth goes into splitting each for LLVM's
# threads. `XLA_FLAGS='' make test` compiles as users do.
QUICK = ["--xla_backend_optimization_level=0", "--xla_cpu_parallel_codegen_split_count=1"]
if version("jaxlib").startswith("0.10."):  # 0.12 has no such flag, and an unknown one is fatal
    QUICK.append("--xla_cpu_use_fusion_emitters=false")
os.environ.setdefault("XLA_FLAGS", " ".join(QUICK))

import jax  # noqa: E402 - which reads them when it is imported
import pytest  # noqa: E402
from annotations import install_import_hook  # noqa: E402

# shapes and dtypes of annotated arrays are checked on every call, in tests only
install_import_hook("jax_ddp_weighting")

from jax_ddp_weighting import force_cpu_devices  # noqa: E402 - after the hook

# those need torch and grain, a browser, the package index, or minutes: `make test-torch` and so on
collect_ignore = ["live", "peers", "browser", "package", "faults"]

force_cpu_devices(8)
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.hookimpl(optionalhook=True)  # where xdist is not there, or switched off
def pytest_xdist_auto_num_workers(config):
    """One more than there are cores: the one with the processes waits most of its time."""
    return len(os.sched_getaffinity(0)) + 1 if hasattr(os, "sched_getaffinity") else None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Under pytest-xdist a file stays on one worker, which compiles what its tests share.

    All tests that start several processes share a worker: they compete for the cores as it is.
    (`--dist=loadgroup` would do, but pytest 9.2 does not see the groups of xdist 3.8.)
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            file = nodeid.split("::", 1)[0]
            if is_program(file):
                return nodeid
            return "processes" if starts_processes(file) else file

    config.option.loadscopereorder = False  # which puts scopes of a single test last
    return ByFile(config, log)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """A worker begins with what takes longest, or the last ones would wait for one of them."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: not is_long(item.nodeid.split("::", 1)[0]))


@pytest.hookimpl(trylast=True)
def pytest_collection_finish():
    """What is there by now stays to the end: the garbage collector need not look at it again."""
    gc.collect()
    gc.freeze()


def is_program(file):
    """Whether each test of a file runs a program of its own, and a long one."""
    return file.endswith("test_examples.py")


def is_long(file):
    return is_program(file) or bool(starts_processes(file))


@cache
def starts_processes(file):
    return re.search(
        r"^(import|from) processes\b|multiprocess", (ROOT / file).read_text(), re.MULTILINE
    )


@pytest.fixture(scope="module", autouse=True)
def compiled_programs_do_not_pile_up():
    """What a file has compiled is dropped after it: some thousand programs slow down every next."""
    yield
    jax.clear_caches()
    gc.collect()
