"""Notices: a word of one rank to all others of a group, for which the others take no part in an operation."""

from __future__ import annotations

from collections.abc import Callable

from asyncpar.collectives.engine import Engine
from asyncpar.collectives.protocol import Abort, encode_control
from asyncpar.net.wire.frame import FrameKind, Key

_PAYLOAD = encode_control(Abort("cancelled", "notice"))


class GroupNotice:
    """One use of ``key``, in which any rank of the group may give notice to all others.

    All ranks make the n-th notice of a key, as they call the n-th operation of one.  ``is_given`` says whether another
    rank has given notice, perhaps before this one was made; ``on_given`` is then called, once, on the loop.  Nothing is
    sent while no rank has anything to say.  What ranks send in other operations after ``give`` comes after the notice
    where both travel as control frames.
    """

    __slots__ = ("_engine", "_sequence", "is_given", "on_given")

    def __init__(self, engine: Engine, key: str) -> None:
        self._engine = engine
        self._sequence = engine.skip(key)
        self.is_given = engine.table.take_abort(engine.group, self._sequence)
        self.on_given: Callable[[], None] | None = None
        engine.group.notices[self._sequence] = self._hear

    def give(self) -> None:
        """Tell all other ranks, over links that are opened if need be; those that are lost are left out."""
        links, key = self._engine.table.links, Key(self._engine.group.number, self._sequence, 0)
        if not links.is_closing:
            for rank in self._engine.others:
                links.control(rank, FrameKind.ABORT, key, _PAYLOAD)

    def close(self) -> None:
        """Listen no longer; idempotent."""
        self._engine.group.notices.pop(self._sequence, None)

    def _hear(self) -> None:
        if not self.is_given:
            self.is_given = True
            if self.on_given is not None:
                self.on_given()
