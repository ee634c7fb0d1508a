"""Tests run under strict dtype promotion: no silent widening anywhere in the library.

Most of a test's time is the compiler's. So programs are compiled without LLVM's optimizations and, in JAX 0.10, by
XLA's earlier emitters, which is three times as fast. A test that needs optimizations, or runs for longer than they
take, is marked `optimized`; with the environment variable APGRAD_OPTIMIZED=1 all is compiled as users compile it.
"""

import gc
import os
import re
from pathlib import Path

import jax
import pytest

# One core for each of pytest-xdist's workers: their pools of threads would wait for each other.
worker = re.fullmatch(r"gw(\d+)", os.environ.get("PYTEST_XDIST_WORKER", ""))
if worker and hasattr(os, "sched_setaffinity"):
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(worker[1]) % len(cores)]})

QUICKLY = os.environ.get("APGRAD_OPTIMIZED") != "1"
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = str(QUICKLY)  # for processes that tests start
jax.config.update("jax_disable_most_optimizations", QUICKLY)
if QUICKLY and jax.__version_info__ < (0, 11):  # the flag goes then
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_use_fusion_emitters=false"
    os.environ["XLA_FLAGS"] += " --xla_cpu_parallel_codegen_split_count=1"  # a worker has one core

gc.set_threshold(50_000, 50, 50)  # tracing makes so many objects that collecting at each 700 takes a tenth of the time

collect_ignore = ["mutations", "programs/on_eight_devices.py"]  # which other files run

MEMORY = 3e9  # how many bytes a worker may hold before its compiled programs are forgotten

# Two devices for the tests of sharding; everything else stays on the first.
jax.config.update("jax_num_cpu_devices", 2)


def pytest_collection_modifyitems(items):
    """The longest first: the notebooks, so that no worker waits for another at the end. Experiments' tests are long."""
    for item in items:
        if "experiments" in item.path.relative_to(Path(__file__).parent.parent).parts:
            item.add_marker("long")
    items.sort(key=lambda item: "test_notebook_runs" not in item.name)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """A file's tests on one worker, as long as another one has tests of its own: they share compiled programs."""
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log) if config.getoption("dist") == "load" else None  # as -n alone has it


@pytest.fixture(autouse=True)
def strict_promotion():
    with jax.numpy_dtype_promotion("strict"):
        yield


@pytest.fixture(autouse=True)
def optimized_where_marked(request):
    marked = request.node.get_closest_marker("optimized") is not None
    jax.config.update("jax_disable_most_optimizations", QUICKLY and not marked)
    yield
    jax.config.update("jax_disable_most_optimizations", QUICKLY)


@pytest.fixture(autouse=True, scope="session")
def processes_find_what_others_compiled(tmp_path_factory):
    """A killed run, the run that goes on and the one to compare are the same program. JAX has read its own setting."""
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(tmp_path_factory.mktemp("compiled")))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")


@pytest.fixture(autouse=True, scope="module")
def forget_compiled_programs():
    """Compiled programs are kept for later tests until they fill the memory; all would take tens of gigabytes."""
    yield
    pages = Path("/proc/self/statm")
    if not pages.exists() or int(pages.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") > MEMORY:
        jax.clear_caches()


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield
