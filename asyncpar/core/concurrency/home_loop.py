"""Checks that a call happens on the event loop of its node."""

from __future__ import annotations

import asyncio
from asyncio import _get_running_loop

from asyncpar.errors import UsageError


def is_home_loop(home: asyncio.AbstractEventLoop | None) -> bool:
    """Whether ``home`` is the running loop."""
    return home is not None and _get_running_loop() is home


def check_home_loop(home: asyncio.AbstractEventLoop, what: str) -> None:
    """Raise ``UsageError`` about ``what`` unless it happens on ``home``, since other threads corrupt its state."""
    running = _get_running_loop()
    if running is not home:
        raise UsageError(
            f"{what}: expected on the event loop of its node, got "
            + ("a thread without a running loop" if running is None else "another event loop")
            + "; from a thread, put the call into a coroutine function and pass that coroutine to "
            "asyncio.run_coroutine_threadsafe"
        )
