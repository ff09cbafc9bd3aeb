"""Links over a channel of messages that joins all ranks from the beginning."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from asyncpar.backends.courier import Courier
from asyncpar.backends.message_lane import MessageLane
from asyncpar.transport.links import Connector, Links


class Office(ABC):
    """All couriers of one rank."""

    @abstractmethod
    def open(self, *, meet: Callable[[int], None], leave: Callable[[int], None]) -> None:
        """Begin to receive.

        ``meet`` is called with a rank whose first message is here before its courier was asked for; ``leave`` instead
        if all it has to say is that nothing comes.
        """

    @abstractmethod
    def courier(self, rank: int) -> Courier:
        """Return the courier to ``rank``, always the same."""

    @abstractmethod
    async def close(self) -> None:
        """Tell all ranks that this one ends, wait until all have (for at most a second), and stop receiving."""


class MessageConnector(Connector):
    """Links ranks by message lanes.  Nothing is dialed: whoever sends first links both."""

    def __init__(self, office: Office, *, kind: str) -> None:
        self._office = office
        self._kind = kind
        self._links: Links | None = None

    def join(self, links: Links) -> None:
        """Begin to carry the frames of ``links``."""
        self._links = links
        self._office.open(meet=self._meet, leave=links.report_left)

    async def connect(self, links: Links, rank: int) -> None:
        if not links.is_up(rank):
            links.adopt(rank, MessageLane(self._office.courier(rank), kind=self._kind))

    def default_lane(self, rank: int) -> str:  # noqa: ARG002
        return self._kind

    def _meet(self, rank: int) -> None:
        assert self._links is not None
        self._links.adopt(rank, MessageLane(self._office.courier(rank), kind=self._kind))
