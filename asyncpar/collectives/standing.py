"""Receives that stand: of messages that may never come, for services that run beside a program.

Nobody waits in a standing receive.  It has no timeout, asks no rank what it does, and is neither a wait nor an event of
its rank until its message is there; then it is a receive as any other.
"""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, TypeVar

from asyncpar.collectives import objects
from asyncpar.collectives.arrays import Array
from asyncpar.collectives.communicator import Communicator

T = TypeVar("T")


def stand_for_object(
    group: Communicator, source: int | None = None, *, tag: int, wanted: type[T]
) -> Coroutine[Any, Any, T]:
    """Return what ``Communicator.recv_object`` does, whenever it comes.  Raises ``PeerLost`` if it cannot come."""
    return group._receive(
        source,
        None,
        tag,
        lambda delivery: objects.decoded(delivery.array, wanted, "recv_object"),
        is_object=True,
        is_standing=True,
    )


def stand_for_array(group: Communicator, source: int, *, out: Array, tag: int) -> Coroutine[Any, Any, Array]:
    """Return what ``Communicator.recv`` does, whenever it comes.  Raises ``PeerLost`` if it cannot come."""
    return group._receive(source, out, tag, lambda delivery: delivery.array, is_standing=True)
