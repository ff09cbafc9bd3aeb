"""Count the asks that are in flight to each rank of a mesh, on their way through."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar

from asyncpar.actors.runtime.ref import ActorRef, Messenger, Told

R = TypeVar("R")


class CallCounter(Messenger):
    """Carries the messages of a mesh's references as ``messenger`` does, and counts the asks that wait."""

    def __init__(self, messenger: Messenger) -> None:
        self._messenger = messenger
        self._asks: Counter[int] = Counter()

    def waiting(self, rank: int) -> int:
        """Return how many asks wait for the actor on ``rank``."""
        return self._asks[rank]

    def ask(
        self, ref: ActorRef[Any], endpoint: str, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> Coroutine[Any, Any, Any]:
        return self.counted(ref.rank, self._messenger.ask(ref, endpoint, arguments, keywords))

    def tell(self, ref: ActorRef[Any], endpoint: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Told:
        return self._messenger.tell(ref, endpoint, arguments, keywords)

    def stream(
        self, ref: ActorRef[Any], endpoint: str, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> AsyncGenerator[Any, None]:
        return self._messenger.stream(ref, endpoint, arguments, keywords)

    async def counted(self, rank: int, ask: Coroutine[Any, Any, R]) -> R:
        """Return what ``ask``, to the actor on ``rank``, returns."""
        self._asks[rank] += 1
        try:
            return await ask
        finally:
            self._asks[rank] -= 1
