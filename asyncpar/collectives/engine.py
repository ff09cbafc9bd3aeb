"""Start operations of one group and run them to their end."""

from __future__ import annotations

import logging
import weakref
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Sequence
from dataclasses import replace
from sys import _getframe
from typing import Any, TypeVar

import msgspec
import numpy as np

from asyncpar.collectives.algorithms.catalog import (
    ARENA,
    check_algorithm,
    is_hierarchical,
    leaders_of,
    schedule_across,
    schedule_of,
)
from asyncpar.collectives.algorithms.hierarchical import Hosts
from asyncpar.collectives.algorithms.steps import RankSchedule
from asyncpar.collectives.arrays import Array, check_key
from asyncpar.collectives.call import Call, MessageCall, refuse
from asyncpar.collectives.device_ways import DeviceWays
from asyncpar.collectives.lane_estimate import SYMMETRIC, LaneEstimate
from asyncpar.collectives.ledger import (
    LARGE_CALL_BYTES,
    CollectiveStatistics,
    GroupLedger,
    Tally,
    Traffic,
    UseCounts,
    hash64,
)
from asyncpar.collectives.operation import Closes, Group, Limits, Operation
from asyncpar.collectives.plan import AlongBuffer, ChunkLayout, Plan
from asyncpar.collectives.policy import Policy
from asyncpar.collectives.protocol import Description, add_detail, describe
from asyncpar.collectives.shared_memory.call import ArenaCall, ArenaOperation, ArenaTask, MakeProgram
from asyncpar.collectives.shared_memory.fast_path import QuickPlan
from asyncpar.collectives.shared_memory.group import ArenaGroup
from asyncpar.collectives.shared_memory.hierarchical import Route
from asyncpar.collectives.table import OperationTable
from asyncpar.core.concurrency.tasks import is_home_loop
from asyncpar.core.config.transport import LaneCosts
from asyncpar.core.observe.recorder import NO_TICKET, Recorder
from asyncpar.core.observe.records import (
    NO_PEER,
    RECORD_BYTES,
    RECORDS_OFFSET,
    EventKind,
    EventState,
    GroupIdentity,
    head_of,
)
from asyncpar.core.observe.reporting import text_of
from asyncpar.errors import AsyncparError, NodeClosed, UsageError
from asyncpar.net.arena.channel import Channel

T = TypeVar("T")
PlanT = TypeVar("PlanT", bound="OperationPlan")
OperationT = TypeVar("OperationT", bound=Operation)

KEPT_PLANS = 256
_log = logging.getLogger(__name__)

_CALL_DEPTH = 4
"""Minimum number of calls between the user's call and the search for its place."""


class OperationPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Plan of all calls of an operation with equal arguments: its messages, and whether the arena carries it.

    Operations that need more have a class of their own.
    """

    description: Description
    messages: Plan
    is_in_arena: bool = False


class Engine:
    """The operations of this rank in one group.  ``rank`` is its index in ``ranks``, which are ranks of the world."""

    _is_made = False

    def __init__(
        self,
        *,
        table: OperationTable,
        number: int,
        name: str,
        ranks: tuple[int, ...],
        policy: Policy,
        limits: Limits,
        ancestors: frozenset[int] = frozenset(),
    ) -> None:
        self.table = table
        self._recorder = table.links.recorder
        self._record = _recording(self._recorder, number)
        has_arena = table.arena is not None and table.arena.has_all(ranks)
        self.policy = replace(policy, has_arena=has_arena)
        self.hosts: Hosts = policy.model.hosts
        self.ranks = ranks
        self.size = len(ranks)
        self.rank = ranks.index(table.links.rank)
        self.ledger = GroupLedger()
        self.group = Group(
            number=number,
            name=name,
            ranks=ranks,
            ledger=self.ledger,
            limits=limits,
            admit_early=_weakly(self),
            ancestors=ancestors,
        )
        self.lanes = LaneEstimate()
        self.measured_lane: LaneCosts | None = None
        """The lane costs that ``calibrate`` of this group measured between hosts, or of all lanes if there is one
        host."""
        self.quick: dict[Hashable, QuickPlan] = {}
        """Plans of small operations: by name, the settings that all ranks must agree on, dtype and shape."""
        self.others = tuple(rank for rank in ranks if rank != table.links.rank)
        self._detail = ""
        """Set while ``agreeing`` makes a call."""
        self._prepared: OrderedDict[Hashable, Any] = OrderedDict()
        self._refused: deque[tuple[str, BaseException, str | None]] = deque()
        """Calls that were refused, possibly in other threads, and have not taken their places yet."""
        self._tallies: dict[tuple[str, str], Tally] = {}
        self._subgroups = UseCounts()
        self.series: dict[str | None, Any] = {}
        """By key, the series of calls whose completion a policy defines: see ``collectives.completion``."""
        self.devices: Closes | None = None
        """Its NCCL communicator, once device arrays were used: see ``collectives.device``."""
        self.device_ways = DeviceWays(self.policy.pin)
        """The ways that operations on device arrays last took, and the reasons."""
        self.arena: ArenaGroup | None = None
        self._keyed_arena: ArenaGroup | None = None
        if table.arena is not None and has_arena:
            self.arena = ArenaGroup(table.arena, number=number, name=name, ranks=ranks, place=self.rank)
            self._keyed_arena = ArenaGroup(
                table.arena, number=hash64("keyed", number), name=name, ranks=ranks, place=self.rank, are_keyed=True
            )
        table.add(self.group)
        self._recorder.add_group(GroupIdentity(number=number, name=name, ranks=ranks))
        self._is_made = True

    def __del__(self) -> None:  # not ``weakref.finalize``: that would keep the table alive, which leads back to here
        if self._is_made:
            _let_go(self.table, self.group, (self.arena, self._keyed_arena, self.devices))

    # -- preparing ---------------------------------------------------------------------------------------------------

    def prepared(self, key: Hashable, make: Callable[[], PlanT]) -> PlanT:
        """Return the plan that ``make`` makes for ``key``, from the cache if possible."""
        found: PlanT | None = self._prepared.get(key)
        if found is None:
            found = self._prepared[key] = make()
            if len(self._prepared) > KEPT_PLANS:
                self._prepared.popitem(last=False)
        return found

    def forget_prepared(self) -> None:
        """Drop all plans, so that later calls choose their algorithms again."""
        self._prepared.clear()
        self.quick.clear()

    def plan_quickly(self, key: Hashable, make: Callable[[ArenaGroup, Channel], QuickPlan | None]) -> None:
        """Cache the plan that ``make`` returns for calls like ``key``, if the group's channel is open."""
        group = self.arena
        channel = None if group is None else group.run_queue.channel
        plan = None if group is None or channel is None else make(group, channel)
        if plan is not None:
            if len(self.quick) >= KEPT_PLANS:
                self.quick.clear()
            self.quick[key] = plan

    def agreeing(self, detail: str, make: Callable[[], T]) -> T:
        """Return ``make()``; the operations called in it match only those called with the same ``detail``.

        Details of nested calls add up.
        """
        before, quick = self._detail, self.quick
        self._detail = ", ".join(filter(None, (before, detail)))
        self.quick = {}  # quick plans have the fingerprints of plain calls
        try:
            return make()
        finally:
            self._detail, self.quick = before, quick

    def _detailed(self, description: Description) -> Description:
        return add_detail(description, self._detail) if self._detail else description

    def algorithm(self, operation: str, payload: int, wanted: str | None, *, arena: bool = False) -> str:
        """Return the algorithm to use: the caller's, the pinned one, or the cheapest.

        ``arena`` means that the call could run in the arena.  Where it cannot, a pin of the arena is ignored, and the
        log reports it once for each operation: a pin applies to all groups, including those between hosts.
        """
        arena = arena and self.arena is not None
        if wanted is None:
            chosen = self.policy.choose(operation, payload, arena=arena)
            if not arena and self.size > 1 and self.policy.pin.find(operation, payload) == ARENA:
                self._report_fallback(operation, chosen)
            return chosen
        if not isinstance(wanted, str):
            raise UsageError(f"algorithm: expected a name, got {wanted!r}")
        check_algorithm(operation, wanted)
        if wanted == ARENA and not arena:
            raise UsageError(f"algorithm: {operation} cannot run in the arena here; {self._why_not()}")
        return wanted

    def message_algorithm(self, operation: str, payload: int, algorithm: str) -> str:
        """Return ``algorithm``, or the one whose messages replace the arena where that has no room."""
        return self.policy.choose(operation, payload) if algorithm == ARENA else algorithm

    def schedule(self, operation: str, algorithm: str, root: int = 0) -> RankSchedule:
        """Return this rank's schedule."""
        hosts = self.hosts if algorithm.startswith("hierarchical") else None
        return schedule_of(operation, algorithm, rank=self.rank, size=self.size, root=root, hosts=hosts)

    def route(self, algorithm: str, layout: AlongBuffer, *, phase: int = 0) -> Route | None:
        """Return the route of a hierarchical ``algorithm``; None for other algorithms, or if this host has no arena."""
        arena = self.table.arena
        if not is_hierarchical(algorithm) or arena is None:
            return None
        members = next(host for host in self.hosts if self.rank in host)
        ranks = tuple(self.ranks[member] for member in members)
        if not arena.has_all(ranks):
            return None
        schedule = schedule_across(algorithm, rank=self.rank, hosts=self.hosts)
        return Route(
            group=arena.group_on_host(ranks),
            layout=layout,
            across=self.bind(schedule, layout, phase=phase),
            leaders=leaders_of(algorithm, self.hosts),
            place=members.index(self.rank),
            phase=phase,
        )

    def bind(self, schedule: RankSchedule, layout: ChunkLayout, *, phase: int = 0) -> Plan:
        """Bind ``schedule`` to memory laid out by ``layout``, and return its messages."""
        return Plan(schedule, layout, rank=self.rank, ranks=self.ranks, phase=phase)

    def check_node(self, what: str) -> None:
        """Raise the error of operations on a closed node for ``what``, which is no operation."""
        links = self.table.links
        if links.closed is not None:
            if self.group.revocation is not None:
                raise self.group.revocation.stale(self.group.name)
            raise NodeClosed.of(links.rank, what)

    def subgroup_number(self, ranks: tuple[int, ...], key: str | None = None) -> int:
        """Return a number for a group of ``ranks`` (of the world) that all its members derive without communicating.

        It depends on how often the ranks were requested, with this ``key`` or without one.
        """
        return hash64("group", self.group.number, ranks, key, self._subgroups.add((ranks, key)))

    def leave_arena(self) -> None:
        """Free the group's memory in the arena; all its operations are over, and no more will come."""
        self.forget_prepared()
        _close_all((self.arena, self._keyed_arena))
        if self.series:
            try:
                self.group.check_open()
            except AsyncparError as error:
                for series in self.series.values():
                    self.table.choices.end(series.number, error)

    def close(self) -> None:
        """Free everything of the group; all its operations are over, and no more will come."""
        self.leave_arena()
        _close_all((self.devices,))
        self.table.drop(self.group)

    # -- running -------------------------------------------------------------------------------------------------------

    def operation(
        self,
        name: str,
        description: Description,
        sequence: int,
        label: str | None,
        kind: Callable[..., OperationT],
    ) -> OperationT:
        """Make the operation, of class ``kind``, of a call that has its ``sequence`` number."""
        return kind(
            context=self.table.context,
            home=self.group,
            route=self.group,
            sequence=sequence,
            description=description,
            name=name,
            label=label,
            audience=self.others,
        )

    def _enter(self, operation: Operation, site: int = 0) -> None:
        """Register ``operation``, called at ``site``; if a peer has already given it up, it fails."""
        self.group.active[operation.sequence] = operation
        self._record(operation, site)
        if self.table.aborted:
            self.table.enter(operation)

    def _find_site(self) -> int:
        """Return the number of the place in the user's program that has called this, some frames up."""
        frame = _getframe(_CALL_DEPTH)
        return self._recorder.sites.get(id(frame.f_code) + frame.f_lasti) or self._recorder.site(frame)

    def _allot(self, name: str, key: str | None) -> tuple[int, str | None]:
        """Return the sequence number of a call, and its label if that is not made of the number."""
        if self._refused:
            self._take_refused()
        return self._number(name, key)

    def _number(self, name: str, key: str | None) -> tuple[int, str | None]:
        self.group.check_open()
        if key is None:
            self.ledger.last += 1
            return self.ledger.last, None
        check_key(key)
        sequence, use = self.ledger.allot_keyed(key, self.group.active)
        return sequence, f'{name} #{use} "{key}"'

    def refuse(self, name: str, error: BaseException, key: str | None = None) -> None:
        """Take the place of a call that raises ``error`` instead, so that it ends on the other ranks with the reason.

        Does nothing for an invalid ``key``.  Thread-safe.
        """
        loop = self.table.loop
        self._refused.append((name, error, key))
        if is_home_loop(loop):
            self._take_refused()
        elif not loop.is_closed():
            self.quick.clear()  # the next call may come before the loop's next turn, and takes its place after this
            loop.call_soon_threadsafe(self._take_refused)

    def _take_refused(self) -> None:
        while self._refused:
            self._refuse(*self._refused.popleft())

    def _refuse(self, name: str, error: BaseException, key: str | None) -> None:
        if self.group.given_up is not None or key == "" or not isinstance(key, str | None):
            return
        reason = f"refused: {text_of(error)}"
        sequence, label = self._number(name, key)
        operation = self.operation(name, describe(name, (reason,), "none"), sequence, label, Operation)
        self._enter(operation)
        refuse(operation, error)

    def checked(self, name: str, key: str | None, make: Callable[[], Coroutine[Any, Any, T]]) -> Coroutine[Any, Any, T]:
        """Return ``make()``; if that raises, take the place of the call nevertheless (see ``refuse``)."""
        try:
            return make()
        except Exception as error:
            self.refuse(name, error, key)
            raise

    def skip(self, key: str) -> int:
        """Skip a use of ``key``: count it without an operation, as all ranks do; return its number."""
        sequence, _ = self.ledger.allot_keyed(key, self.group.active)
        return sequence

    def start(
        self,
        name: str,
        description: Description,
        key: str | None,
        body: Callable[[Operation], Awaitable[T]],
        *,
        kind: Callable[..., Operation] = Operation,
        call: Callable[..., Call[T]] = MessageCall,
    ) -> Call[T]:
        """Give a call its place in the order of operations now; ``body`` runs when the returned call is awaited.

        ``kind`` makes its operation, and ``call`` the returned call.
        """
        self.table.context.check_home_loop(name)
        sequence, label = self._allot(name, key)
        operation = self.operation(name, self._detailed(description), sequence, label, kind)
        self._enter(operation, self._find_site())
        return call(operation, body, self.count, is_alone=self.size == 1)

    def start_in_arena(
        self,
        name: str,
        plan: OperationPlan,
        make: MakeProgram,
        by_messages: Callable[[Operation], Awaitable[T]],
        *,
        key: str | None = None,
        result: T,
        shows: Array | None = None,
        sends: int = 0,
    ) -> Coroutine[Any, Any, T]:
        """Start a call in the arena; ``make`` makes its program, and the caller gets ``result``.

        ``shows`` is the input that others may read in place, if it lies in the arena's heap; ``sends`` the number of
        bytes that go through this rank's slot.  ``by_messages`` runs it if the group got no room in the arena.
        """
        group = self.arena if key is None else self._keyed_arena
        assert group is not None
        if group.is_refused:
            return self.start(name, plan.description, key, by_messages)
        self.table.context.check_home_loop(name)
        if key is None:
            self.admit_early()
        sequence, label = self._allot(name, key)
        site = self._find_site()
        description = self._detailed(plan.description)
        task = self.admit(name, description, sequence, make, label=label, shows=shows, sends=sends, site=site)
        return ArenaCall(task, result, by_messages, self.count)

    def enter_arena(
        self, name: str, description: Description, make: MakeProgram, kind: Callable[..., ArenaOperation]
    ) -> ArenaTask:
        """Give a call its place in the order of operations and of the arena now; ``kind`` makes its operation."""
        self.table.context.check_home_loop(name)
        self.admit_early()
        sequence, label = self._allot(name, None)
        return self.admit(name, description, sequence, make, label=label, kind=kind, site=self._find_site())

    def admit(
        self,
        name: str,
        description: Description,
        sequence: int,
        make: MakeProgram,
        *,
        label: str | None = None,
        shows: Array | None = None,
        sends: int = 0,
        kind: Callable[..., ArenaOperation] = ArenaOperation,
        site: int = 0,
    ) -> ArenaTask:
        """Make the operation of a call in the arena, keyed if it has a ``label``, and queue it."""
        group = self.arena if label is None else self._keyed_arena
        assert group is not None
        operation = self.operation(name, description, sequence, label, kind)
        operation.payload_sent = sends
        task = operation.task = ArenaTask(operation, group, make, shows)
        group.run_queue.called(task)
        self._enter(operation, site)
        return task

    def admit_early(self) -> None:
        """Make the operations of all quick calls that have none yet, in the order of their calls."""
        early = self.group.early
        while early:
            sequence = next(iter(early))
            plan, x, site = early.pop(sequence)
            self.admit_quick(plan, sequence, x, site)

    def admit_quick(self, plan: QuickPlan, sequence: int, x: Array, site: int) -> ArenaTask:
        """Make the operation of a quick call, which was made at ``site``."""
        return self.admit(
            plan.name,
            plan.description,
            sequence,
            lambda turn: plan.program(turn, x),
            shows=x if plan.shows else None,
            sends=plan.sends,
            site=site,
        )

    def _report_fallback(self, operation: str, chosen: str) -> None:
        if operation in self.table.fallbacks:
            return
        self.table.fallbacks.add(operation)
        _log.warning(
            "rank %d: %s is pinned to the arena, which cannot be used in the group %s (%s); it runs by %s instead",
            self.ranks[self.rank],
            operation,
            self.group.name,
            self._why_not(),
            chosen,
        )

    def _why_not(self) -> str:
        if self.table.arena is None:
            return "this rank's host has none (its log has the reason)"
        if self.arena is None:
            return "that needs two ranks or more, all on one host"
        return "operations of unequal lengths or on objects go by messages"

    # -- statistics ----------------------------------------------------------------------------------------------------

    def count(self, operation: Operation) -> None:
        """Add a finished operation to the statistics."""
        seconds = self.table.now() - operation.started_at
        tally = self.count_call(operation.name, operation.description.algorithm, operation.payload_sent, seconds)
        tally.messages += operation.messages_sent
        tally.steps += operation.steps
        by_lanes = operation.begun_at and operation.messages_sent and operation.steps and operation.name in SYMMETRIC
        if by_lanes and not is_hierarchical(operation.description.algorithm):  # those use two kinds of lanes
            exact = operation.context.clock() - operation.begun_at
            self.lanes.add(rounds=operation.steps, payload=operation.payload_sent, seconds=exact)

    def count_call(self, name: str, algorithm: str, payload: int, seconds: float) -> Tally:
        """Count a finished call that has sent ``payload`` bytes, and return the tally that it belongs to."""
        tally = self._tallies.get((name, algorithm))
        if tally is None:
            tally = self._tallies[name, algorithm] = Tally()
        tally.calls += 1
        tally.payload_bytes += payload
        tally.seconds += seconds
        if payload >= LARGE_CALL_BYTES and seconds > 0.0:
            tally.fastest = max(tally.fastest, payload / seconds)
        return tally

    @property
    def bandwidth(self) -> float:
        """Bytes/s of a lane: the maximum measured by ``calibrate`` or in operations; a built-in figure before that."""
        lane = self.policy.model.lane
        measured = [tally.rate for tally in self._tallies.values()]
        if lane.is_measured:
            measured.append(lane.bandwidth)
        return max(measured, default=0.0) or lane.bandwidth

    def traffic(self) -> Traffic:
        """Return the statistics of finished operations."""
        entries: list[CollectiveStatistics] = [
            tally.snapshot(operation, algorithm) for (operation, algorithm), tally in sorted(self._tallies.items())
        ]
        return Traffic(operations=tuple(entries))


def _recording(recorder: Recorder, group: int) -> Callable[[Operation, int], None]:
    """Return a faster equivalent of ``Recorder.begin`` for operations of a group, with all it needs at hand."""
    take, write, clock, owners = recorder.tickets.__next__, recorder.write, recorder.clock, recorder.owners
    mask, lap_bits, words = recorder.mask, recorder.lap_bits, recorder.words
    head = head_of(NO_PEER, EventKind.COLLECTIVE, EventState.CALLED)

    def record(operation: Operation, site: int) -> None:
        ticket = take()
        if owners[ticket & mask]:
            ticket = recorder.elsewhere(ticket)
            if ticket == NO_TICKET:
                return
        operation.ticket = ticket
        place, lap, description = ticket & mask, (ticket >> lap_bits) + 1, operation.description
        owners[place] = ticket + 1
        word = words.get(description.fingerprint)
        if word is None:
            word = recorder.operation(description.text, description.algorithm, description.fingerprint)
        where = RECORDS_OFFSET + place * RECORD_BYTES
        write(where, lap, head, 0.0, clock(), word, group, operation.sequence, 0, site, lap)

    return record


def _weakly(engine: Engine) -> Callable[[], None]:
    """Return a callback that calls ``admit_early`` without keeping ``engine`` alive: a call in progress does that."""
    reference = weakref.ref(engine)

    def admit_early() -> None:
        found = reference()
        if found is not None:
            found.admit_early()

    return admit_early


def _let_go(table: OperationTable, group: Group, owned: Sequence[Closes | None]) -> None:
    """Close a group to which no reference is left, in a later turn of the loop.  Thread-safe, even from a finalizer."""
    if not (group.is_closed or table.links.is_closing or table.loop.is_closed()):
        table.loop.call_soon_threadsafe(_let_go_now, table, group, owned)


def _let_go_now(table: OperationTable, group: Group, owned: Sequence[Closes | None]) -> None:
    if not table.links.is_closing:
        group.is_closed = True
        _close_all(owned)
        table.drop(group)


def _close_all(owned: Sequence[Closes | None]) -> None:
    for one in owned:
        if one is not None:
            one.close()


def describe_array(
    operation: str, dtype: np.dtype[Any], shape: Sequence[int | None], more: Sequence[str], algorithm: str
) -> Description:
    """Return the description of an operation on one array."""
    lengths = ",".join("?" if length is None else str(length) for length in shape)
    return describe(operation, (f"{dtype.name}[{lengths}]", *more), algorithm)
