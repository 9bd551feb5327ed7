"""Settings that every test runs under: no network, one torch thread, no test judged by its time.

The variables are set before torch, numba or transformers can be imported: those read them once.
"""

from __future__ import annotations

import gc
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
# Tiny models spend more time handing work to threads than doing it, and tests that start further
# processes must not ask for more cores than the machine has.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")


def _has_cuda() -> bool:
    # torch takes seconds to import, and a machine without the driver has no GPU that it could use.
    if not any(
        Path(path).exists() for path in ("/proc/driver/nvidia", "/dev/nvidiactl", "/dev/dxg")
    ):
        return False
    import torch

    return torch.cuda.is_available()


HAS_CUDA = _has_cuda()

# FlashInfer builds kernels for minutes: those that are there already are tested, unless this is set
# to the empty string.
os.environ.setdefault("FLASHINFER_DISABLE_JIT", "1")

# Without a GPU Triton's kernels run under its interpreter, which is chosen when they are defined.
if not HAS_CUDA:
    os.environ["TRITON_INTERPRET"] = "1"


def _steady_products() -> None:
    """Gives Triton's interpreter products whose rows do not depend on their neighbours.

    It takes numpy's, which are those of a BLAS. There the order of a row's sums depends on the
    processor, on the number of rows and on the place among them; a GPU's is that of the kernel. In
    float64 the order no longer matters: the sum is rounded to the same float32.
    """
    import numpy as np
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    theirs = builder.create_dot
    if theirs.__name__ == "steady":
        return

    def steady(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        if d.data.dtype != np.float32 or a.data.dtype.itemsize < 4 or b.data.dtype.itemsize < 4:
            return theirs(self, a, b, d, *options)
        made = np.matmul(a.data, b.data, dtype=np.float64).astype(np.float32) + d.data
        return interpreter.TensorHandle(made, d.dtype.scalar)

    builder.create_dot = steady


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """On a machine with a GPU, shows it to the tests that are about it and to no other.

    The others are about engines on the CPU, which ``device="auto"`` would not give them there.
    """
    if not HAS_CUDA:
        if "triton" in sys.modules:
            _steady_products()
        return
    import torch

    _HIDDEN.undo()
    if "kernels" not in item.path.parts and not item.path.stem.startswith(_ON_GPU):
        _HIDDEN.setattr(torch.cuda, "is_available", lambda: False)
        _HIDDEN.setenv("CUDA_VISIBLE_DEVICES", "")  # for processes that a test starts


_HIDDEN = pytest.MonkeyPatch()
# Files about a GPU, beside all of those in `kernels`.
_ON_GPU = ("test_cuda", "test_fake_gpu", "test_graph_steps")

# They ask the same servers, each two processes that take seconds to start.
_SERVED = {
    "report/test_routes",
    "report/test_dashboard",
    "report/test_metrics",
    "commands/test_report",
}


# These come first, in this order. The first file compiles the kernels that most others need, for a
# minute, while the other processes have files that need none: else each would compile them. Then
# come those with few tests, which take long: at the end one process would have them to itself,
# while the others have nothing to do.
_FIRST = [
    "server/test_faults",
    "tests/test_package",
    "frontend/test_cost",
    "triton/test_plans",
    "cluster/test_cluster",
    "demo/test_run",
    "client/test_engine",
    "startup/test_light_transformers",
    "sampling/test_grammar_library",
    "engine/test_tier_fuzz",
]


def _file(path: Path) -> str:
    return f"{path.parent.name}/{path.stem}"


@pytest.hookimpl(optionalhook=True)  # there without pytest-xdist too
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With ``--dist loadfile``, gives files that share servers to one process, as one file."""
    if config.getoption("dist") != "loadfile":
        return None
    config.option.loadscopereorder = False  # they are in order; see below
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path = Path(nodeid.partition("::")[0])
            return "served" if _file(path) in _SERVED else str(path)

    return Scheduling(config, log)


# A busy machine is slow; that says nothing about the code.
settings.register_profile("coppice", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("coppice")


@pytest.hookimpl(hookwrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collects no garbage while the tests are collected: their million objects stay.

    Each process would search them a dozen times meanwhile, which takes seconds. They are searched
    once at the end, so that the collector knows how many there are: it searches all of them again
    only when as many new ones as a quarter of them have come.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.collect()
        gc.enable()


@pytest.hookimpl(tryfirst=True)  # before -m leaves out what is slow
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a test marked ``pairwise``, marks as slow all that is not needed to try every pair.

    Files that take long come first, then those with most tests.
    """
    sizes = Counter(item.path for item in items)
    place = {name: at for at, name in enumerate(_FIRST)}
    items.sort(key=lambda item: (place.get(_file(item.path), len(place)), -sizes[item.path]))
    tests: defaultdict[str, list[pytest.Function]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("pairwise"):
            assert isinstance(item, pytest.Function)
            tests[item.nodeid.partition("[")[0]].append(item)
    for members in tests.values():
        values = [sorted((k, repr(v)) for k, v in each.callspec.params.items()) for each in members]
        pairs = [set(combinations(each, 2)) for each in values]
        left, chosen = set[object]().union(*pairs), set()
        while left:
            best = max(range(len(members)), key=lambda i: len(pairs[i] & left))
            left -= pairs[best]
            chosen.add(best)
        for index, item in enumerate(members):
            if index not in chosen:
                item.add_marker(pytest.mark.slow)
