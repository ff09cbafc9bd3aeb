"""Settings and hooks of all tests."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Generator

import pytest
from hypothesis import settings

from tests import belongings, durations, leftovers, quick, soak
from tests.belongings import nothing_is_left
from tests.lasting import LastingObjects
from tests.leftovers import pytest_unconfigure
from tests.quick import pytest_terminal_summary, pytest_testnodedown
from tests.world.forked import close_server

__all__ = [
    "nothing_is_left",
    "pytest_addoption",
    "pytest_collection",
    "pytest_collection_modifyitems",
    "pytest_configure",
    "pytest_runtest_makereport",
    "pytest_runtest_protocol",
    "pytest_sessionfinish",
    "pytest_terminal_summary",
    "pytest_testnodedown",
    "pytest_unconfigure",
]

# Tests start Python processes by the hundred: where no bytecode may be kept, each compiles all that it imports.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a job in the background of a shell: tests press Ctrl-C
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def no_server_is_left(nothing_is_left: None) -> Generator[None]:
    """End the process from which programs are forked."""
    yield
    close_server()


def pytest_addoption(parser: pytest.Parser) -> None:
    quick.add_option(parser)
    soak.add_option(parser)
    durations.pytest_addoption(parser)


def pytest_configure(config: pytest.Config) -> None:
    soak.configure(config)
    # No deadline: speed is measured in scripts/bench, never in a timed test.
    settings.register_profile("asyncpar", deadline=None, derandomize=not soak.is_soak())
    settings.load_profile("asyncpar")
    durations.pytest_configure(config)
    leftovers.pytest_configure(config)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    soak.leave_out(config, items)
    quick.leave_out(config, items)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    quick.pytest_sessionfinish(session)
    belongings.pytest_sessionfinish(session)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep the tests, 400,000 objects that live to the end, out of what the garbage collector looks through.

    It would go through all of them again and again while they are made, and half a second long whenever a test
    collects to see that nothing is left behind.  What a test makes is collected as ever.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


_lasting = LastingObjects()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    """Keep what pytest has of the tests that were run out of what the garbage collector looks through, too."""
    try:
        return (yield)
    finally:
        _lasting.count(is_module_over=nextitem is None or nextitem.path != item.path)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Escape what UTF-8 has no bytes for in what a test logs or prints: xdist cannot send it, and would end the run."""
    report = yield
    report.sections = [(name, text.encode(errors="backslashreplace").decode()) for name, text in report.sections]
    return report
