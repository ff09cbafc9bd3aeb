"""The actor of Ray that runs the agent of a place."""

from __future__ import annotations

from asyncpar.engines.polled_place import PolledPlace, describe_process


class RayPlace:
    """An asynchronous actor; its processes end with it."""

    def __init__(self) -> None:
        self._place: PolledPlace | None = None

    async def describe(self) -> dict[str, str]:
        """Return the facts about this process that the caller needs before it starts anything here."""
        from ray.util import get_node_ip_address

        return describe_process(get_node_ip_address())

    async def start(self, order: bytes) -> None:
        """Start the agent of an order."""
        self._place = PolledPlace(order, on_loop=False)

    async def events(self) -> list[bytes]:
        """Return the encoded events since the last call."""
        return [] if self._place is None else await self._place.events()

    async def send(self, command: bytes) -> None:
        """Send a command to the agent."""
        if self._place is not None:
            self._place.send(command)

    async def end(self) -> None:
        """Kill everything that still runs, and wait for its end."""
        if self._place is not None:
            await self._place.end()
