"""The pytest plugin: worlds as fixtures, and tests that run on every rank of a world.

pytest loads it wherever asyncpar is installed, so it imports nothing from the package until a test needs it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import pytest

if TYPE_CHECKING:
    from asyncpar.node import Node
    from asyncpar.testing import GuardedWorld

SETTING: Final = "asyncpar_timeout"
_FUNCTION: Final = pytest.StashKey[Any]()


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Add the setting of the limit, and exempt the package from pytest's assertion rewriting.

    pytest would rewrite the assertions of every module of asyncpar, and parse 700 modules for that.
    """
    getattr(pluginmanager.rewrite_hook, "_must_rewrite", set[str]()).discard("asyncpar")
    what = "seconds after which a world of `world`, `virtual_world` or `@pytest.mark.ranks` fails, with a report"
    parser.addini(SETTING, what, default="30")


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker ``ranks``."""
    config.addinivalue_line(
        "markers",
        "ranks(size, *, transport='inproc', timeout=30, virtual=False, ...): run the test, an `async def test(node)`, "
        "on every rank of a world in this process",
    )


@pytest.fixture
def world(request: pytest.FixtureRequest) -> Callable[..., GuardedWorld]:
    """Make worlds: ``async with world(4, transport="tcp") as nodes``, or ``world(4).run(program)`` in a plain test.

    The options are those of ``asyncpar.testing.GuardedWorld``.
    """
    return _maker(request.config)


@pytest.fixture
def virtual_world(request: pytest.FixtureRequest) -> Callable[..., GuardedWorld]:
    """Make worlds on virtual time: ``virtual_world(4).run(program)``."""
    return _maker(request.config, virtual=True)


@pytest.fixture
def node(request: pytest.FixtureRequest) -> Node | None:
    """Return the node of this rank, in a test with the marker ``ranks``."""
    if request.node.get_closest_marker("ranks") is None:
        pytest.fail("node: it is for tests that run on every rank; mark the test @pytest.mark.ranks(4)", pytrace=False)
    return None  # each rank gets its own: see ``pytest_pyfunc_call``


def _maker(config: pytest.Config, **preset: Any) -> Callable[..., GuardedWorld]:
    def make(size: int, **options: Any) -> GuardedWorld:
        from asyncpar.testing import GuardedWorld

        return GuardedWorld(size, **{"timeout": _limit(config)} | preset | options)

    return make


def _limit(config: pytest.Config) -> float:
    text = config.getini(SETTING)
    try:
        return float(text)
    except ValueError:
        raise pytest.UsageError(f"{SETTING}: expected seconds, got {text!r}") from None


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Store the test's original function: plugins for coroutines wrap it when it runs."""
    if isinstance(item, pytest.Function) and item.get_closest_marker("ranks") is not None:
        item.stash[_FUNCTION] = item.obj


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test with the marker ``ranks`` on every rank."""
    mark = pyfuncitem.get_closest_marker("ranks")
    if mark is None:
        return None
    function = pyfuncitem.stash[_FUNCTION]
    names = tuple(inspect.signature(function).parameters)
    if not inspect.iscoroutinefunction(function) or "node" not in names:
        pytest.fail(f"ranks: expected `async def {pyfuncitem.originalname}(node)`", pytrace=False)
    from asyncpar.errors import UsageError
    from asyncpar.testing import WorldHung

    try:
        guarded = _maker(pyfuncitem.config)(*mark.args, **mark.kwargs)
    except (TypeError, UsageError) as error:
        text = str(error).replace("_maker.<locals>.make()", "ranks(size)")
        pytest.fail(f"ranks: {text}", pytrace=False)
    arguments = {name: pyfuncitem.funcargs[name] for name in names}
    hung = ""
    try:
        guarded.run(lambda node: function(**arguments | {"node": node}))
    except WorldHung as error:
        hung = str(error)  # it has the frames of the test
    if hung:
        pytest.fail(hung, pytrace=False)
    return True
