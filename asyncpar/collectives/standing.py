"""Standing receives: receives of messages that may never come, or are not needed yet.

No task waits in a standing receive.  It has no timeout, sends no inquiries to other ranks, and is neither a wait nor an
event of its rank until its message arrives, or is needed; then it becomes an ordinary receive.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from asyncpar.collectives import objects
from asyncpar.collectives.arrays import Array
from asyncpar.collectives.call import MessageCall
from asyncpar.collectives.communicator import Communicator

T = TypeVar("T")


def stand_for_object(
    group: Communicator, source: int | None = None, *, tag: int, wanted: type[T]
) -> Coroutine[Any, Any, T]:
    """Receive like ``Communicator.recv_object``, whenever the value comes.  Raises ``PeerLost`` if it cannot come."""
    return group._receive(
        source,
        None,
        tag,
        lambda delivery: objects.decoded(delivery.array, wanted, "recv_object"),
        is_object=True,
        is_standing=True,
    )


def stand_for_array(group: Communicator, source: int, *, out: Array, tag: int) -> Coroutine[Any, Any, Array]:
    """Receive like ``Communicator.recv``, whenever the array comes.  Raises ``PeerLost`` if it cannot come."""
    return group._receive(source, out, tag, lambda delivery: delivery.array, is_standing=True)


def receive_ahead(
    group: Communicator, source: int, *, tag: int
) -> tuple[Coroutine[Any, Any, Array], Callable[[], None]]:
    """Return a receive that is called before its message is needed, and a callback for when it is needed."""
    call: Coroutine[Any, Any, Array] = group._receive(
        source, None, tag, lambda delivery: delivery.array, is_standing=True
    )
    assert isinstance(call, MessageCall), "an array of the host is received by messages"
    return call, lambda: group._messages.end_standing(call.operation, group.ranks[source])
