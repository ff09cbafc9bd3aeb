"""Spans: named periods of a rank's time, of users and of the package, in the rank's event ring."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import TracebackType
from typing import Self

from asyncpar.core.observe.recorder import NO_TICKET, Recorder, current_recorder
from asyncpar.core.observe.records import NO_PEER, EventKind, EventState


class EventSpan:
    """A named period of time: use as ``with`` or ``async with``, once.

    It counts as cancelled or failed if its block is left with an exception.  Without a node it does nothing.
    """

    __slots__ = ("_name", "_recorder", "_ticket", "fields", "group", "kind", "nbytes", "peer", "sequence", "site")

    def __init__(
        self,
        name: str,
        fields: Mapping[str, object] | None = None,
        *,
        kind: EventKind = EventKind.SPAN,
        recorder: Recorder | None = None,
        peer: int = NO_PEER,
        group: int = 0,
        sequence: int = 0,
        nbytes: int = 0,
        site: int = 0,
    ) -> None:
        self._name = name
        self.fields = fields
        self.kind = kind
        self.peer = peer
        self.group = group
        self.sequence = sequence
        self.nbytes = nbytes
        self.site = site
        self._recorder = recorder
        self._ticket = NO_TICKET

    def __enter__(self) -> Self:
        recorder = self._recorder = self._recorder or current_recorder()
        if recorder is not None:
            self._ticket = recorder.begin(
                self.kind,
                recorder.name(self._name, self.fields),
                peer=self.peer,
                group=self.group,
                sequence=self.sequence,
                nbytes=self.nbytes,
                site=self.site or recorder.site(sys._getframe(1)),
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._recorder is not None:
            self._recorder.end(self._ticket, _state_after(kind))

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.__exit__(kind, error, traceback)


def _state_after(kind: type[BaseException] | None) -> EventState:
    if kind is None:
        return EventState.COMPLETED
    return EventState.FAILED if issubclass(kind, Exception) else EventState.CANCELLED


def span(name: str, **fields: object) -> EventSpan:
    """Return a span of the user's program: ``with ap.span("load", batch=7):``.

    It is shown in traces, and names what a rank does while others wait for it.  ``fields`` are short values beside the
    name.  In a process with several nodes it belongs to the one started last.
    """
    return EventSpan(name, fields)
