"""Settings for all tests: property tests are repeatable, and have no deadline on a busy machine."""

import asyncio
import gc
import inspect
import logging
import os
import signal
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from decod.process import LEAVE_SIGNALS
from tests.support.devices import DEFAULT_DEVICE, IS_FAKE
from tests.support.fake_accelerator.installing import announce

# Numerical libraries read this when they are imported: a test is small, and tests share two cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

if IS_FAKE:
    announce()  # Before a conftest.py of another folder loads torch.

if os.environ.get("DECOD_PORTABLE"):
    folder = str(Path(__file__).parent / "support" / "portable")
    # An empty entry would be the working folder.
    path = [folder, *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(path)
    import tests.support.portable.sitecustomize  # noqa: F401

# No test asks the real Hub. `tests.support.hub_server` plays it.
os.environ["HF_HUB_OFFLINE"] = "1"

# Under nohup hang-ups are ignored, and daemons would inherit that.
signal.signal(signal.SIGHUP, signal.SIG_DFL)

settings.register_profile("decod", deadline=None, derandomize=True, print_blob=True)
settings.register_profile("search", deadline=None, max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "decod"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--rewrite", action="store_true", help="write what happens in scenarios and traces"
    )


def pytest_configure() -> None:
    if IS_FAKE:
        # Imported here, since it loads torch.
        from decod.train.executor_config import ExecutorConfig

        ExecutorConfig.__init__.__kwdefaults__["device"] = DEFAULT_DEVICE


def pytest_itemcollected(item: pytest.Item) -> None:
    """Run tests for a GPU on the fake one, if there is one. Allow torch's warnings on a real one.

    Which of them come depends on the host. Torch warns of a build that does not fit the device, for
    example, and of a thread that uses cuBLAS first. The result of a test is what counts.
    """
    if IS_FAKE:
        item.own_markers[:] = [mark for mark in item.own_markers if mark.name != "gpu"]
    elif item.get_closest_marker("gpu"):
        item.add_marker(pytest.mark.filterwarnings("default::UserWarning"))


def pytest_collection_finish() -> None:
    """Take what all tests share out of garbage collection: a node collects whenever it comes back.

    Torch and thousands of collected tests are a million objects, and each full collection looks at
    every one.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def keep_signals() -> Iterator[None]:
    """Undo what a test did to signals. A daemon ignores them at its end; processes inherit that."""
    before = [signal.getsignal(number) for number in LEAVE_SIGNALS]
    yield
    for number, handler in zip(LEAVE_SIGNALS, before, strict=True):
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def keep_log() -> Iterator[None]:
    """Undo what a test did to the log: a daemon keeps its lines from the root logger, for good."""
    logger = logging.getLogger("decod")
    before = logger.propagate
    yield
    logger.propagate = before


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test that needs CUDA, with the reason, before its fixtures are made."""
    if item.get_closest_marker("gpu"):
        from tests.support.devices import cuda_absence

        if absence := cuda_absence():
            pytest.skip(f"needs a CUDA device: {absence}")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine in an event loop of its own.

    A fixture that is an asynchronous context manager is entered in that loop.
    """
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None

    async def run() -> None:
        async with AsyncExitStack() as stack:
            given = dict[str, Any]()
            for name in inspect.signature(pyfuncitem.obj).parameters:
                given[name] = pyfuncitem.funcargs[name]
                if isinstance(given[name], AbstractAsyncContextManager):
                    given[name] = await stack.enter_async_context(given[name])
            await pyfuncitem.obj(**given)

    asyncio.run(run())
    return True


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    """Deals tests out as `scripts/test` wants it."""
    if config.getoption("dist") != "loadfile":
        return None
    from tests.support.dealing import FromBothEnds

    return FromBothEnds(config, log)
