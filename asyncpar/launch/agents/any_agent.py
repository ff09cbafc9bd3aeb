"""Ask any agent of a group: another one when the one that was asked before does not answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, TypeVar

from asyncpar.launch.agents.control_client import ControlClient, NoAgent
from asyncpar.launch.agents.views import GroupView
from asyncpar.net.transport.rpc import Credentials

T = TypeVar("T")

_ANSWER_SECONDS: Final = 5.0
"""Seconds that one agent may take to answer.  After that, another one is asked: the first may be stopped."""
_LOST_SECONDS: Final = 15.0
"""Seconds for which an agent that answers is sought."""
_AGAIN_SECONDS: Final = 0.2


class AnyAgent:
    """Asks the agent that answered last and, if it does not answer, the others that it named, one after another.

    Requests must be safe to repeat: an agent may have obeyed although its answer was lost.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        credentials: Credentials,
        *,
        connect: Callable[[str, Credentials, float], ControlClient] | None = None,
    ) -> None:
        """``addresses`` (``host:port``) are known initially; ``connect`` makes a client with a limit in seconds."""
        self._addresses = list(dict.fromkeys(addresses))
        self._credentials = credentials
        self._connect = connect or (lambda address, own, seconds: ControlClient(address, own, seconds=seconds))

    @property
    def address(self) -> str:
        """The address of the agent that answered last."""
        return self._addresses[0]

    def know(self, view: GroupView) -> None:
        """Remember the current members of the group."""
        first = self._addresses[0]
        self._addresses[1:] = [host.address for host in view.hosts if host.address != first]

    async def status(self) -> GroupView:
        """Return an agent's view of its group, and remember its members for further requests."""
        view = await self.ask(lambda client: client.status())
        self.know(view)
        return view

    async def ask(self, ask: Callable[[ControlClient], Awaitable[T]], *, seconds: float = _ANSWER_SECONDS) -> T:
        """Return the answer of the first agent that gives one; each has ``seconds`` for it.

        Raises the errors of ``ControlClient``; ``NoAgent`` when all were asked and none has answered for 15 s.
        """
        loop = asyncio.get_running_loop()
        deadline, waiting = loop.time() + _LOST_SECONDS, set(self._addresses)
        while True:
            address = self._addresses[0]
            try:
                return await ask(self._connect(address, self._credentials, seconds))
            except NoAgent:
                waiting.discard(address)
                if loop.time() > deadline and waiting.isdisjoint(self._addresses):  # addresses may change meanwhile
                    raise
                self._addresses.append(self._addresses.pop(0))
                await asyncio.sleep(_AGAIN_SECONDS)
