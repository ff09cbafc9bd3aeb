"""``--soak``: everything, where the suite runs a sample by default.

More seeds, whole products of parameters, larger numbers, and the tests marked ``soak``: what takes long and would find
rarely what the sample does not.  Each of them has a small, deterministic case among the tests that always run.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

import pytest

T = TypeVar("T")

PATIENCE = 3600
"""Seconds that any test may take with ``--soak``; what the tests say themselves is for the few cases."""

_configs: list[pytest.Config] = []
"""This session's: a test may run a session within it, which has no say here."""


def add_option(parser: pytest.Parser) -> None:
    parser.addoption("--soak", action="store_true", help="run every case of what is sampled, and tests marked soak")


def configure(config: pytest.Config) -> None:
    if config.getoption("soak") and config.getoption("quick"):
        raise pytest.UsageError("--soak runs everything and --quick the least: leave one of them out")
    _configs[:] = [config]


def is_soak() -> bool:
    """Say whether this session runs everything; modules of tests may call it as they are imported."""
    return any(config.getoption("soak") for config in _configs)


def chosen(few: T, *, soak: T) -> T:
    """Return ``few``, or ``soak`` with ``--soak``: numbers, cases, seeds."""
    return soak if is_soak() else few


def first(count: int, values: Iterable[T]) -> list[T]:
    """Return the first ``count`` of ``values``, or all with ``--soak``: what shows most comes first."""
    everything = list(values)
    assert count < len(everything), "there is nothing to leave out"
    return everything if is_soak() else everything[:count]


def leave_out(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("soak"):
        for item in items:
            mark = item.get_closest_marker("timeout")
            if mark is None or not mark.args or mark.args[0] < PATIENCE:
                item.add_marker(pytest.mark.timeout(PATIENCE), append=False)
        return
    left_out = [item for item in items if item.get_closest_marker("soak") is not None]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item.get_closest_marker("soak") is None]
