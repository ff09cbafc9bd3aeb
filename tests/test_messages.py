"""Workers send what came of each test, and of a test that passes nothing else."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests import messages
from tests.messages import Brevity

pytest_plugins = ["pytester"]

SUITE = """
import pytest

@pytest.fixture
def has_no_setup():
    raise RuntimeError

@pytest.fixture
def has_no_teardown():
    yield
    raise RuntimeError

def test_passes(): pass
def test_fails(): raise RuntimeError
def test_skips(): pytest.skip("not here")
def test_begins(has_no_setup): pass
def test_ends(has_no_teardown): pass
"""


class WorkerInteractor:
    """What stands for the plugin that sends reports."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, str, str]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.sent.append((report.head_line or "", report.when, report.outcome))


def test_what_came_of_each_test_is_sent_and_setups_that_passed_are_not(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(SUITE)
    pytester.makeini("[pytest]\nasyncio_default_fixture_loop_scope = function\n")
    sender = WorkerInteractor()
    run = pytester.inline_run("-p", "no:cacheprovider", plugins=[sender, Brevity()])
    run.assertoutcome(passed=2, failed=3, skipped=1)
    assert sender.sent == [
        ("test_passes", "call", "passed"),
        ("test_fails", "call", "failed"),
        ("test_skips", "call", "skipped"),
        ("test_begins", "setup", "failed"),
        ("test_ends", "call", "passed"),
        ("test_ends", "teardown", "failed"),
    ]


@pytest.mark.parametrize(
    ("options", "is_brief"),
    [
        ({}, True),
        ({"verbose": 1}, False),
        ({"reportchars": "A"}, False),
        ({"durations": 10}, False),
        ({"durations_file": "durations.json"}, False),
        ({"xmlpath": "report.xml"}, False),
    ],
)
def test_all_reports_are_sent_where_more_is_asked_for(options: dict[str, object], is_brief: bool) -> None:
    plugins = pytest.PytestPluginManager()
    option = SimpleNamespace(**{"verbose": 0, "reportchars": "a", **options})
    messages.pytest_configure(SimpleNamespace(workerinput={}, option=option, pluginmanager=plugins))  # type: ignore[arg-type]
    assert plugins.has_plugin("brevity") == is_brief
