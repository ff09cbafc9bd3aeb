"""A place whose caller polls it for events, over an engine that carries calls only.

If the caller does not come back, its job ends here.
"""

from __future__ import annotations

import asyncio
import platform
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from asyncpar import __version__
from asyncpar.engines.elastic_place import make_agent
from asyncpar.engines.interface import (
    PlaceEvent,
    PlaceOrder,
    PlaceReport,
    decode_command,
    decode_event,
    decode_order,
    encode,
)
from asyncpar.errors import UsageError
from asyncpar.net.membership.host import host_name

if TYPE_CHECKING:
    from asyncpar.engines.place_node import PlaceNode

POLL_SECONDS = 5.0
"""Seconds that a request for events waits for one."""
LEASE_SECONDS = 60.0
"""Seconds after which a caller that has not asked counts as gone, and so does a place that has not answered."""
ANSWER_SECONDS: Final = 30.0
"""Seconds that a process of the engine may take for other calls; the first of them imports asyncpar."""


class PolledPlace:
    """An agent in this process, and those of its events that the caller has not received yet."""

    def __init__(self, order: bytes, *, on_loop: bool) -> None:
        self._events: list[bytes] = []
        self._has_news = asyncio.Event()
        decoded = decode_order(order)
        self._agent = _make_node(decoded, self._take) if on_loop else make_agent(decoded, self._take)
        self._running = asyncio.create_task(self._agent.run(), name=f"asyncpar place of {decoded.job}")
        self._lease = asyncio.get_running_loop().call_later(LEASE_SECONDS, self._running.cancel)

    async def events(self) -> list[bytes]:
        """Return the events since the last call; after some seconds, an empty list."""
        self._renew()
        try:
            async with asyncio.timeout(POLL_SECONDS):
                await self._has_news.wait()
        except TimeoutError:
            return []
        events, self._events = self._events, []
        self._has_news.clear()
        return events

    def send(self, command: bytes) -> None:
        """Send a command to the agent."""
        self._agent.obey(decode_command(command))

    async def wait(self) -> None:
        """Return when the agent has ended."""
        await asyncio.wait({self._running})

    async def end(self) -> None:
        """Kill everything that still runs, and wait for its end."""
        self._lease.cancel()
        self._running.cancel()
        await asyncio.wait({self._running})

    def _take(self, event: PlaceEvent) -> None:
        self._events.append(encode(event))
        self._has_news.set()

    def _renew(self) -> None:
        self._lease.cancel()
        self._lease = asyncio.get_running_loop().call_later(LEASE_SECONDS, self._running.cancel)


def _make_node(order: PlaceOrder, take: Callable[[PlaceEvent], None]) -> PlaceNode:
    from asyncpar.engines.place_node import PlaceNode  # actors, which take long to import

    return PlaceNode(order, take)


async def pass_events_on(
    ask: Callable[[], Awaitable[Sequence[bytes]]], take: Callable[[PlaceEvent], None], lose: Callable[[str], None]
) -> None:
    """Pass the events that ``ask`` returns to ``take``, until the place's report.

    ``lose`` gets the reason if the place no longer answers; one that is stopped is lost when its lease expires.
    """
    lease = asyncio.timeout(None)
    try:
        while True:
            async with asyncio.timeout(LEASE_SECONDS) as lease:
                answer = await ask()
            for encoded in answer:
                event = decode_event(encoded)
                take(event)
                if isinstance(event, PlaceReport):
                    return
    except Exception as error:  # noqa: BLE001  # whatever it is, nothing would be reported of this place again
        if lease.expired():
            lose(f"gives no answer within {LEASE_SECONDS:g} s")
        else:
            lose(f"died ({type(error).__name__}: {str(error).strip().partition(chr(10))[0]})")


def describe_process(address: str) -> dict[str, str]:
    """Return the facts about this process, at the IP ``address``, that the caller needs before starting anything."""
    return {"version": __version__, "python": _python(), "host": host_name(), "address": address}


def check_process(name: str, described: Mapping[str, str]) -> None:
    """Raise ``UsageError`` unless the process ``name`` has the caller's versions."""
    for what, expected, got in (
        ("asyncpar", __version__, described["version"]),
        ("Python", _python(), described["python"]),
    ):
        if expected != got:
            raise UsageError(f"{name} has {what} {got}, the caller {expected}; install the same")


def _python() -> str:
    return ".".join(platform.python_version_tuple()[:2])
