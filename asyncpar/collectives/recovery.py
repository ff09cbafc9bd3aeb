"""Recovery of a group after a loss: survivors agree on a number, and make a group without the lost ranks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from asyncpar.collectives import subgroups
from asyncpar.collectives.engine import Engine
from asyncpar.errors import UsageError

if TYPE_CHECKING:
    from asyncpar.collectives.fault_tolerance.messages import AgreementKind, Outcome

T = TypeVar("T")


class Agreed(NamedTuple):
    """The AND of the flags of all survivors, and the lost ranks, in the numbering of the group."""

    flag: int
    lost: tuple[int, ...]


class _CalledAgreement(NamedTuple):
    """Agreement ``number`` of the group of ``engine``, which this rank has called."""

    engine: Engine
    number: int
    label: str
    outcome: asyncio.Future[Outcome]

    async def result(self) -> Outcome:
        """Return the outcome, or raise the error that it represents."""
        from asyncpar.collectives.fault_tolerance.service import fault_of  # needed after a loss only

        context = self.engine.table.context
        if self.outcome.done() and context.is_turn_due(context.now()):
            await asyncio.sleep(0)
        outcome = await self.outcome
        links = self.engine.table.links
        hosts = [member.host for member in links.world.members]
        fault = fault_of(outcome, rank=links.rank, label=self.label, hosts=hosts)
        if fault is not None:
            raise fault
        return outcome


def agree(engine: Engine, flag: object) -> Coroutine[Any, Any, Agreed]:
    """Implement ``Communicator.agree``."""
    if not isinstance(flag, int | np.integer) or not -(2**63) <= flag < 2**63:
        raise UsageError(f"flag: expected an integer of at most 64 bits, got {flag!r}")
    pending = _call(engine, "agree", int(flag))

    async def body() -> Agreed:
        outcome = await pending.result()
        return Agreed(outcome.flag, tuple(place for place, rank in enumerate(engine.ranks) if rank in outcome.lost))

    return body()


def shrink(engine: Engine, wrap: Callable[[Engine], T]) -> Coroutine[Any, Any, T]:
    """Implement ``Communicator.shrink``.

    The survivors agree on the lost ranks, and then, in the group of the others, on whether one of these has been lost
    since: a leader that dies right after its decision is not among the lost ranks of that decision.
    """
    first = _call(engine, "shrink", 0)

    async def body() -> T:
        pending = first
        try:
            while True:
                outcome = await pending.result()
                if pending is not first and not outcome.lost:
                    _inherit_devices(engine, pending.engine)
                    return wrap(pending.engine)
                before, ranks = pending, tuple(rank for rank in pending.engine.ranks if rank not in outcome.lost)
                pending = _call(subgroups.survivors(before.engine, ranks, before.number), "shrink", 0)
                if before is not first:
                    before.engine.close()
        except BaseException:
            if pending is not first:
                pending.engine.close()
            raise

    return body()


def _inherit_devices(engine: Engine, left: Engine) -> None:
    if engine.devices is not None:
        from asyncpar.collectives.device.state import inherit  # needed only with devices

        inherit(engine, left)


def _call(engine: Engine, kind: AgreementKind, flag: int) -> _CalledAgreement:
    table, group = engine.table, engine.group
    table.context.check_home_loop(kind)
    if group.is_closed or group.has_left:
        group.check_open()
    group.agreements_called += 1
    number = group.agreements_called
    timeout = None if group.limits.timeout is None else float(group.limits.timeout)
    future = table.agreements.call(group.number, number, engine.ranks, kind, flag, timeout)
    return _CalledAgreement(engine, number, f"{kind} #{number}", future)
