"""Settings for every test."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import settings

# A deadline per example would measure the machine's load: pytest-timeout bounds each test.
settings.register_profile("outrider", deadline=None)
settings.load_profile("outrider")

if "PYTEST_XDIST_WORKER" in os.environ:
    # Torch reads it when it is imported. More threads would take each other's cores.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
# The same for threads of services that tests start: idle ones sleep instead of spinning.
os.environ.setdefault("GOMP_SPINCOUNT", "0")
# Where it is set, each HTTP client reads all of its certificates (20 ms). No test needs any.
os.environ.pop("SSL_CERT_FILE", None)

# A shell starts what it runs in the background with SIGINT ignored, and so would be its children.
signal.signal(signal.SIGINT, signal.default_int_handler)

gc.disable()  # modules stay, so that looking through them while they are imported frees nothing


@pytest.fixture
def socket_folder() -> Iterator[Path]:
    """A folder for Unix sockets, whose paths have 107 bytes: `tmp_path` may be too long."""
    with TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


def pytest_collection_finish() -> None:
    """Collect garbage from now on, but not among what was imported, nor after every few objects."""
    gc.freeze()
    gc.set_threshold(10_000)
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    """Return a scheduler that keeps a file on one worker, and likewise all of tests/e2e.

    Fixtures are then made once, and no two stacks of processes run at the same time.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return "tests/e2e" if file.startswith("tests/e2e/") else file

    config.option.loadscopereorder = False  # the order of `testpaths`
    return ByFile(config, log)
