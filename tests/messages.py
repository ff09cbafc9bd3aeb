"""Fewer messages from the workers of a session: of a test that passes, workers send the report of its call, and neither
its beginning nor those of its setup and teardown, which show nothing.

Twenty thousand tests have five messages each, and they take the process that shows how the session goes, and the
workers, ten seconds of a processor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pytest
from _pytest.runner import runtestprotocol

SHOWING: Final = {"durations", "durations_file", "xmlpath"}
"""Options that show or store what setups and teardowns take."""

SENDER: Final = "WorkerInteractor"
"""The plugin of a worker of xdist that sends reports."""


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput") and not _shows_all(config):
        config.pluginmanager.register(Brevity(), "brevity")


def _shows_all(config: pytest.Config) -> bool:
    option = config.option
    has_option = any(getattr(option, name, None) is not None for name in SHOWING)
    return has_option or option.verbose > 0 or bool({"p", "P", "A"} & set(option.reportchars))


class Brevity:
    """Runs tests as pytest does, and keeps reports within the worker that nobody would see."""

    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        for report in runtestprotocol(item, log=False, nextitem=nextitem):
            is_shown = report.when == "call" or not report.passed
            tell = item.ihook.pytest_runtest_logreport if is_shown else _report_within(item.config)
            tell(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True


def _report_within(config: pytest.Config) -> Callable[..., Any]:
    """Return the hook of reports without the plugin that sends them."""
    plugins = config.pluginmanager
    senders = [plugin for plugin in plugins.get_plugins() if type(plugin).__name__ == SENDER]
    return plugins.subset_hook_caller("pytest_runtest_logreport", senders)
