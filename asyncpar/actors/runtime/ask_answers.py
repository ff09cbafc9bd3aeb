"""Answers about the actors of this rank to ranks whose asks wait for them: see ``ask_waits``."""

from __future__ import annotations

from asyncpar.actors.runtime.callee import Callee
from asyncpar.actors.runtime.caller import Caller
from asyncpar.actors.runtime.calls import Delivery
from asyncpar.actors.runtime.cell import Cell
from asyncpar.actors.runtime.message import AskAnswer, AskInquiry
from asyncpar.actors.runtime.outbound import Outbound
from asyncpar.actors.runtime.registry import ActorRegistry
from asyncpar.core.observe.whereabouts import describe_task, describe_thread


class AskAnswers:
    """Answers inquiries about actors of this rank."""

    def __init__(self, registry: ActorRegistry, caller: Caller, callee: Callee, outbound: Outbound) -> None:
        self._registry = registry
        self._caller = caller
        self._callee = callee
        self._outbound = outbound

    def answer(self, rank: int, inquiry: AskInquiry) -> None:
        """Answer an inquiry of ``rank``."""
        self._outbound.send_message(rank, self._find(inquiry))

    def _find(self, inquiry: AskInquiry) -> AskAnswer:
        number, cell = inquiry.number, self._registry.cells.get(inquiry.actor)
        if cell is None:
            return AskAnswer(number, self._outbound.observer.find_program() if not inquiry.actor else "is not there")
        delivery = self._callee.find(inquiry.caller, inquiry.call)
        if delivery is None or delivery.execution is None:
            if delivery is not None and cell.is_concurrent(delivery):
                return AskAnswer(number, f"is busy with other calls of {delivery.endpoint}()")
            return self._of_actor(number, cell)
        asks = [ask for ask in self._caller.asks_of(cell.name) if ask.origin is delivery]
        link = self._caller.waits.link_of(asks[0]) if asks else None
        where = _place(cell, delivery)
        return AskAnswer(number, where or f"runs {delivery.endpoint}()", inquiry.caller, inquiry.call, link)

    def _of_actor(self, number: int, cell: Cell) -> AskAnswer:
        """Describe the work of the actor's own task, for which a call waits."""
        asks = [
            ask
            for ask in self._caller.asks_of(cell.name)
            if ask.origin is not None and ask.origin.execution is not None and ask.origin.execution.task is cell.task
        ]
        where = "" if cell.task is None else describe_task(cell.task) or describe_thread(f"actor {cell.name}")
        if not asks or (origin := asks[0].origin) is None:
            return AskAnswer(number, where and f"is busy and {where}")
        link = self._caller.waits.link_of(asks[0])
        busy = f"is busy with {origin.endpoint}()" + (f" and {where}" if where else "")
        return AskAnswer(number, busy, origin.sender, origin.call, link)


def _place(cell: Cell, delivery: Delivery) -> str:
    """Return the current place of the running endpoint."""
    assert delivery.execution is not None, "it runs"
    return describe_task(delivery.execution.task) or describe_thread(f"actor {cell.name}")
