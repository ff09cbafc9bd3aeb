"""View of the actors of a rank: pending calls, calls being served, mailboxes, messages that were not handled.

Read from the observer's thread, like all of ``rank_view``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from asyncpar.actors.runtime.calls import PendingCall
from asyncpar.actors.runtime.dead_letters import DeadLetters
from asyncpar.actors.runtime.system import ActorSystem
from asyncpar.core.observe.records import EventKind
from asyncpar.net.transport.links import Links
from asyncpar.observe.image import Event
from asyncpar.observe.summary import (
    MOST_LETTERS,
    MOST_MAILBOXES,
    MOST_SERVED,
    AskSummary,
    LetterSummary,
    MailboxSummary,
)

_LONGEST_NAME: Final = 60
_LONGEST_REASON: Final = 160


def view_actors(actors: ActorSystem, links: Links, events: Sequence[Event]) -> dict[str, Any]:
    """Return the fields of a rank's summary about its actors."""
    return {
        "asks": _asks(actors, links, events),
        "serving": _serving(actors),
        "mailboxes": _mailboxes(actors),
        "dead_letters": actors.dead_letters.count,
        "letters": _letters(actors.dead_letters),
    }


def _asks(actors: ActorSystem, links: Links, events: Sequence[Event]) -> tuple[AskSummary, ...]:
    """Return the calls that wait for their answers, oldest first."""
    pending = [one for one in list(actors._caller._pending.values()) if not one.future.done()]
    recorder, observer = links.recorder, links.observer
    begun = {event.ticket: event.created for event in events if event.kind is EventKind.ASK}
    now = recorder.clock()
    return tuple(
        AskSummary(
            rank=one.ref.rank,
            actor=one.ref.name,
            endpoint=one.endpoint,
            seconds=max(0.0, now - begun.get(one.ticket, now)),
            site=recorder.site_of(one.ticket),
            told=observer.notice_of(one),
            is_stream=one.inlet is not None,
            call=one.call,
            **_origin(actors, one),
        )
        for one in pending[:MOST_MAILBOXES]
    )


def _origin(actors: ActorSystem, pending: PendingCall) -> dict[str, Any]:
    """Return the calling actor, the call that it works for, and whether it takes other messages meanwhile."""
    origin = pending.origin
    if origin is None:
        return {}
    cell, execution = actors._registry.cells.get(origin.actor), origin.execution
    return {
        "caller": origin.actor,
        "serves": None if origin.call is None else (origin.sender, origin.call),
        "is_holding": cell is not None and execution is not None and execution.task is cell.task,
    }


def _serving(actors: ActorSystem) -> tuple[tuple[int, int], ...]:
    """Return the calls whose endpoints run, by the rank and the number of their callers."""
    served = list(actors._callee._serving.items())
    return tuple(place for place, delivery in served if delivery.execution is not None)[:MOST_SERVED]


def _mailboxes(actors: ActorSystem) -> tuple[MailboxSummary, ...]:
    waiting = [(len(cell._mailbox or ()), name) for name, cell in list(actors._registry.cells.items())]
    return tuple(
        MailboxSummary(actor=name, waiting=count)
        for count, name in sorted(waiting, reverse=True)[:MOST_MAILBOXES]
        if count
    )


def _letters(letters: DeadLetters) -> tuple[LetterSummary, ...]:
    """Return the latest letters, newest first."""
    return tuple(
        LetterSummary(
            sender=letter.sender,
            rank=letter.rank,
            actor=letter.actor[:_LONGEST_NAME],
            endpoint=letter.endpoint[:_LONGEST_NAME],
            reason=letter.reason[:_LONGEST_REASON],
        )
        for letter in list(letters.recent)[: -MOST_LETTERS - 1 : -1]
    )
