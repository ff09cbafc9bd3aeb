"""Start operations of one group and run them to their end."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from asyncpar.collectives.algorithms.catalog import check_algorithm, schedule_of
from asyncpar.collectives.algorithms.hierarchical import Hosts
from asyncpar.collectives.algorithms.steps import Schedule
from asyncpar.collectives.arguments import check_key
from asyncpar.collectives.call import Call
from asyncpar.collectives.description import Description, describe, hash64
from asyncpar.collectives.group import Group
from asyncpar.collectives.ledger import GroupLedger
from asyncpar.collectives.operation import Limits, Operation
from asyncpar.collectives.plan import Plan
from asyncpar.collectives.policy import Policy
from asyncpar.collectives.statistics import CollectiveStatistics, Tally, Traffic
from asyncpar.collectives.table import OperationTable
from asyncpar.errors import OperationMismatch, PeerLost, UsageError
from asyncpar.transport.home_loop import check_home_loop

T = TypeVar("T")
Body = Callable[[Operation], Awaitable[T]]

_KEPT_PLANS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """What is the same for all calls with equal arguments."""

    description: Description
    plan: Plan
    extra: Any = None
    """What else the operation keeps: layouts, for those that copy."""


class Ticket:
    """Held by the coroutine of a call alone: when it dies before the call was awaited, the call is given up."""

    __slots__ = ("operation",)

    def __init__(self, operation: Operation) -> None:
        self.operation = operation

    def __del__(self) -> None:
        self.give_up()

    def give_up(self) -> None:
        """Nobody will await the call.  From any thread."""
        operation = self.operation
        loop = operation.table.loop
        if not operation.has_started and not operation.is_over and not loop.is_closed():
            loop.call_soon_threadsafe(_give_up, operation)


class Engine:
    """The operations of this rank in one group.  ``rank`` is its place in ``ranks``, which are ranks of the world."""

    def __init__(
        self, *, table: OperationTable, number: int, name: str, ranks: tuple[int, ...], policy: Policy, limits: Limits
    ) -> None:
        self.table = table
        self.policy = policy
        self.hosts: Hosts = policy.model.hosts
        self.ranks = ranks
        self.size = len(ranks)
        self.rank = ranks.index(table.links.rank)
        self.ledger = GroupLedger()
        self.group = Group(number=number, name=name, ranks=ranks, ledger=self.ledger, limits=limits)
        self.others = tuple(rank for rank in ranks if rank != table.links.rank)
        self._prepared: OrderedDict[Hashable, Prepared] = OrderedDict()
        self._tallies: dict[tuple[str, str], Tally] = {}
        self._subgroups: dict[tuple[int, ...], int] = {}
        table.add(self.group)

    # -- preparing ---------------------------------------------------------------------------------------------------

    def prepared(self, key: Hashable, make: Callable[[], Prepared]) -> Prepared:
        """Return what ``make`` returned for ``key``, from memory if possible."""
        found = self._prepared.get(key)
        if found is None:
            found = self._prepared[key] = make()
            if len(self._prepared) > _KEPT_PLANS:
                self._prepared.popitem(last=False)
        return found

    def forget_prepared(self) -> None:
        """Choose anew from now on."""
        self._prepared.clear()

    def algorithm(self, operation: str, payload: int, wanted: str | None) -> str:
        """Return the algorithm to use: the caller's, the pinned one, or the cheapest."""
        if wanted is None:
            return self.policy.choose(operation, payload)
        if not isinstance(wanted, str):
            raise UsageError(f"algorithm: expected a name, got {wanted!r}")
        check_algorithm(operation, wanted)
        return wanted

    def schedule(self, operation: str, algorithm: str, root: int = 0) -> Schedule:
        """Return this rank's schedule."""
        hosts = self.hosts if algorithm.startswith("hierarchical") else None
        return schedule_of(operation, algorithm, rank=self.rank, size=self.size, root=root, hosts=hosts)

    def subgroup_number(self, ranks: tuple[int, ...]) -> int:
        """Return a number for a group of ``ranks`` (of the world) that all its members find without talking."""
        made = self._subgroups[ranks] = self._subgroups.get(ranks, 0) + 1
        return hash64("group", self.group.number, ranks, made)

    # -- running -------------------------------------------------------------------------------------------------------

    def open(self, name: str, description: Description, key: str | None) -> Ticket:
        """Give the next call its sequence number."""
        check_home_loop(self.table.loop, name)
        if key is None:
            sequence = self.ledger.allot()
            label = f"{name} #{sequence}"
        else:
            check_key(key)
            sequence, use = self.ledger.allot_keyed(key, self.group.active)
            label = f'{name} #{use} "{key}"'
        operation = Operation(
            table=self.table,
            home=self.group,
            route=self.group,
            sequence=sequence,
            description=description,
            name=name,
            label=label,
            audience=self.others,
        )
        self.table.enter(operation)
        return Ticket(operation)

    def start(self, name: str, description: Description, key: str | None, body: Body[T]) -> Coroutine[Any, Any, T]:
        """Give a call its place in the order of operations now; it runs when the returned coroutine is awaited."""
        return self.launch(self.open(name, description, key), body)

    def launch(
        self, ticket: Ticket, body: Body[T], *, gone: Callable[[], PeerLost | None] | None = None
    ) -> Coroutine[Any, Any, T]:
        """Return the coroutine that runs the operation of ``ticket``.

        ``gone`` says who is missing for it; by default the first rank of its group that is lost.
        """
        coroutine = self._run(ticket, body, gone)
        named: Any = coroutine
        named.__qualname__ = f"Communicator.{ticket.operation.name}"  # what Python names if it is never awaited
        return Call(coroutine, ticket.give_up)

    async def _run(self, ticket: Ticket, body: Body[T], gone: Callable[[], PeerLost | None] | None) -> T:
        operation = ticket.operation
        try:
            check_home_loop(self.table.loop, operation.label)
        except UsageError:
            ticket.give_up()
            raise
        try:
            operation.begin(gone() if gone is not None else self.table.lost_member(operation.home))
            result = await body(operation)
        except BaseException as error:
            outcome = _ended(operation, error)
            if outcome is error:
                raise
            raise outcome from error
        operation.finish()
        self._count(operation)
        return result

    # -- statistics ----------------------------------------------------------------------------------------------------

    def _count(self, operation: Operation) -> None:
        tally = self._tallies.get((operation.name, operation.algorithm))
        if tally is None:
            tally = self._tallies[operation.name, operation.algorithm] = Tally()
        tally.calls += 1
        tally.payload_bytes += operation.payload_sent
        tally.messages += operation.messages_sent
        tally.steps += operation.steps
        tally.seconds += self.table.now() - operation.started_at

    def traffic(self) -> Traffic:
        """Return what finished operations have sent so far."""
        entries: list[CollectiveStatistics] = [
            tally.snapshot(operation, algorithm) for (operation, algorithm), tally in sorted(self._tallies.items())
        ]
        return Traffic(operations=tuple(entries))


def describe_array(
    operation: str, dtype: np.dtype[Any], shape: Sequence[int | None], more: Sequence[str], algorithm: str
) -> Description:
    """Return the description of an operation on one array."""
    lengths = ",".join("?" if length is None else str(length) for length in shape)
    return describe(operation, (f"{dtype.name}[{lengths}]", *more), algorithm)


def _ended(operation: Operation, error: BaseException) -> BaseException:
    """Clean up after ``error``, tell the others if they cannot know, and return what the caller gets."""
    if isinstance(error, GeneratorExit) and not operation.table.loop.is_running():
        return error  # the loop has ended under the call; there is nobody left to tell
    if operation.failure is not None and not isinstance(error, asyncio.CancelledError):
        operation.discard()
        return operation.failure
    if isinstance(error, asyncio.CancelledError):
        message = operation.describe_wait(operation.table.now())
        error.args = (message,)
        error.add_note(message)
        if operation.failure is None:
            operation.tell_failure("cancelled", "")
    elif isinstance(error, OperationMismatch):
        operation.tell_failure("mismatch", f"{operation.label}: {error}")
    elif isinstance(error, PeerLost):
        operation.tell_failure("lost", error.cause or str(error), lost=error.rank)
        operation.discard()
        return operation.lost(error)
    else:
        operation.tell_failure("failed", f"{type(error).__name__}: {error}")
    operation.discard()
    return error


def _give_up(operation: Operation) -> None:
    """A call was never awaited: its peers must not wait for it."""
    if not operation.has_started and not operation.is_over:
        operation.tell_failure("failed", "it was called there, but never awaited")
        operation.discard()
