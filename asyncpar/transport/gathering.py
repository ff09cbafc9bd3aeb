"""The connections of striped lanes that come in one by one."""

from __future__ import annotations

from asyncpar.errors import PeerLost
from asyncpar.transport.connection import Connection
from asyncpar.transport.lane import Lane
from asyncpar.transport.striped import StripedLane
from asyncpar.wire.handshake import LinkTerms


class Gathering:
    """Holds connections until all of their lane are there."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[bytes, str], dict[int, Connection]] = {}

    def add(self, terms: LinkTerms, connection: Connection) -> Lane | None:
        """Take a connection that proved itself; return the lane if it was the last one missing."""
        if terms.connections == 1:
            return connection
        present = self._waiting.setdefault((terms.token, connection.kind), {})
        if terms.connection in present:
            connection.abort(_unwanted("there is such a connection already"))
            return None
        present[terms.connection] = connection
        if len(present) < terms.connections:
            return None
        del self._waiting[terms.token, connection.kind]
        return StripedLane([present[index] for index in range(terms.connections)])

    def drop(self, token: bytes) -> None:
        """The lane that was agreed on under ``token`` will not be complete: close what there is of it."""
        for key in [key for key in self._waiting if key[0] == token]:
            for connection in self._waiting.pop(key).values():
                connection.abort(_unwanted("the other connections of its lane did not come"))

    def drop_all(self) -> None:
        """Close everything that waits."""
        for token, _ in list(self._waiting):
            self.drop(token)


def _unwanted(cause: str) -> PeerLost:
    return PeerLost(f"the connection is not needed: {cause}", cause=cause)
