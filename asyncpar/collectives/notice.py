"""Notices: a signal from one rank to all others of a group, which the others get without taking part in an
operation."""

from __future__ import annotations

from collections.abc import Callable

from asyncpar.collectives.engine import Engine
from asyncpar.collectives.protocol import Abort, encode_control
from asyncpar.net.wire.frame import FrameKind, Key

_PAYLOAD = encode_control(Abort("cancelled", "notice"))


class GroupNotice:
    """One use of ``key``, in which any rank of the group may give notice to all others.

    All ranks create the n-th notice of a key, as they call the n-th operation of one.  ``is_given`` is whether another
    rank has given notice, perhaps before this one was created; ``on_given`` is then called, once, on the loop.  Nothing
    is sent until a rank gives notice.  Control frames that a rank sends for other operations after ``give`` arrive
    after the notice.
    """

    __slots__ = ("_engine", "_sequence", "is_given", "on_given")

    def __init__(self, engine: Engine, key: str) -> None:
        self._engine = engine
        self._sequence = engine.skip(key)
        self.is_given = engine.table.take_abort(engine.group, self._sequence)
        self.on_given: Callable[[], None] | None = None
        engine.group.notices[self._sequence] = self._receive

    def give(self) -> None:
        """Notify all other ranks, over links that are opened if necessary; lost ranks are left out."""
        links, key = self._engine.table.links, Key(self._engine.group.number, self._sequence, 0)
        if not links.is_closing:
            for rank in self._engine.others:
                links.control(rank, FrameKind.ABORT, key, _PAYLOAD)

    def close(self) -> None:
        """Stop listening.  Idempotent."""
        self._engine.group.notices.pop(self._sequence, None)

    def _receive(self) -> None:
        if not self.is_given:
            self.is_given = True
            if self.on_given is not None:
                self.on_given()
