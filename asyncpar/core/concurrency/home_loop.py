"""Everything of a node belongs to one event loop."""

from __future__ import annotations

import asyncio

from asyncpar.errors import UsageError


def is_home_loop(home: asyncio.AbstractEventLoop | None) -> bool:
    """Is ``home`` the running loop?"""
    return home is not None and _running() is home


def check_home_loop(home: asyncio.AbstractEventLoop, what: str) -> None:
    """Raise ``UsageError`` about ``what`` unless it happens on ``home``: calls from other threads or loops corrupt."""
    if not is_home_loop(home):
        running = _running()
        raise UsageError(
            f"{what}: expected on the event loop of its node, got "
            + ("a thread without a running loop" if running is None else "another event loop")
            + "; from a thread, put the call into a coroutine function and pass that coroutine to "
            "asyncio.run_coroutine_threadsafe"
        )


def _running() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
