"""A seeded network of consensus nodes on virtual time.

Messages get lost, doubled and late, links break one way or both, nodes crash in the middle of their commands, lose what
they have not stored, stop for a while, and have clocks of their own rate that jump.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from asyncpar.hosts.consensus import ConsensusNode, ElectionTimes
from asyncpar.hosts.consensus_messages import (
    Command,
    ConsensusTick,
    DurableState,
    Entry,
    Event,
    Learn,
    LearnDecided,
    Message,
    MessageReceived,
    Persist,
    Propose,
    SendMessage,
)

HASTY = ElectionTimes(heartbeat=0.05, election=0.15, stagger=0.03, lease=0.12)
"""Elections while messages take longer than that: many candidates at a time."""


class UnsafeError(AssertionError):
    """Two nodes have decided differently, or something that was decided is not there any more."""


class StuckError(AssertionError):
    """Nothing was decided although all nodes could talk again."""


@dataclass
class Machine:
    """One node with its disk and its clock."""

    name: str
    disk: DurableState
    rate: float
    node: ConsensusNode | None = None
    stopped_until: float = 0.0
    jumped: float = 0.0
    held: list[Event] = field(default_factory=list)


class Network:
    """``count`` nodes, of which the first founds the chain.  Nodes propose random voters whenever they may."""

    def __init__(
        self,
        seed: int,
        *,
        count: int = 5,
        make: Callable[..., ConsensusNode] = ConsensusNode,
        stores: Callable[[random.Random, DurableState, DurableState], DurableState] | None = None,
        is_calm: bool = False,
    ) -> None:
        """``stores`` says what is on the disk after a ``Persist``, by the state before and after.

        ``is_calm``: messages arrive soon, nothing crashes, and all nodes always vote.
        """
        self.random = random.Random(seed)
        self.now = 0.0
        self.make, self.stores = make, stores
        names = [f"n{number}" for number in range(count)]
        genesis = Entry(generation=0, voters=tuple(names[: min(count, 3)]), nodes=tuple(names))
        self.machines = {
            name: Machine(name, DurableState(decided=genesis), self.random.uniform(0.93, 1.07)) for name in names
        }
        self.decided: dict[int, Entry] = {0: genesis}
        self.known: dict[str, int] = dict.fromkeys(names, 0)
        self.broken: set[tuple[str, str]] = set()
        self.loss = self.random.choice((0.0, 0.05, 0.2))
        self.delay = self.random.choice((0.003, 0.02, 0.1, 0.3))
        self.crash_chance = self.random.choice((0.0, 0.002, 0.01, 0.05))
        self.times = self.random.choice((ElectionTimes(), HASTY, HASTY))
        self.tail = self.random.choice((0.7, 1.5, 10.0))
        self.eagerness = self.random.choice((2.0, 100.0))
        self.is_calm = is_calm
        if is_calm:
            self.loss, self.delay, self.crash_chance, self.tail, self.times = 0.0, 0.005, 0.0, 10.0, ElectionTimes()
        self.queue: list[tuple[float, int, Callable[[], None]]] = []
        self.order = itertools.count()
        self.propose_at = 0.0
        self.bag: list[tuple[str, str, Message]] | None = None
        self.ignorance = self.random.choice((0.0, 0.7, 0.95))
        self.is_steady = self.random.random() < 0.5
        self.elections = self.random.choice((0.04, 0.15))
        self.restarts = self.random.choice((0.01, 0.04, 0.15))
        self.freshness = self.random.choice((0.1, 0.5, 0.8))
        self.trace: list[tuple[float, str, Any]] = []
        for name in names:
            self.start(name)

    def at(self, delay: float, action: Callable[[], None]) -> None:
        heapq.heappush(self.queue, (self.now + delay, next(self.order), action))

    def clock(self, machine: Machine) -> float:
        return 100.0 + machine.jumped + self.now * machine.rate

    def start(self, name: str) -> None:
        machine = self.machines[name]
        machine.node = self.make(
            name, machine.disk, now=self.clock(machine), jitter=self.random.random, times=self.times
        )
        self.known[name] = machine.disk.decided.generation
        self.arm(name)

    def arm(self, name: str) -> None:
        machine = self.machines[name]
        node = machine.node
        if node is None:
            return
        wait = (
            max(machine.stopped_until - self.now, (node.next_deadline - self.clock(machine)) / machine.rate, 0.0) + 1e-6
        )
        self.at(wait, lambda: self.tick(name, node))

    def tick(self, name: str, node: ConsensusNode) -> None:
        if self.machines[name].node is node:
            self.feed(name, ConsensusTick())
            self.arm(name)

    def feed(self, name: str, event: Event) -> None:
        machine = self.machines[name]
        if machine.node is None:
            return
        if machine.stopped_until > self.now:
            machine.held.append(event)
            return
        self.carry_out(machine, machine.node.handle(event, now=self.clock(machine)))

    def carry_out(self, machine: Machine, commands: list[Command]) -> None:
        for command in commands:
            if self.crash_chance and self.random.random() < self.crash_chance:
                self.crash(machine.name)
                return
            match command:
                case Persist(state):
                    before = machine.disk
                    machine.disk = state if self.stores is None else self.stores(self.random, before, state)
                case SendMessage(node, message):
                    self.send(machine.name, node, message)
                case LearnDecided(entry):
                    self.learn(machine.name, entry)
                case _:
                    self.trace.append((self.now, machine.name, command))
        if machine.node is not None and machine.node.leads and (self.bag is not None or self.now >= self.propose_at):
            self.propose(machine)

    def propose(self, machine: Machine) -> None:
        node = machine.node
        assert node is not None
        self.propose_at = self.now + self.random.expovariate(self.eagerness)
        names = list(self.machines)
        voters = self.random.sample(names, self.random.randint(1, min(5, len(names))))
        if self.is_calm or self.is_steady:
            voters = names[:5]
        elif machine.name not in voters and self.random.random() < 0.9:
            voters[0] = machine.name
        parent = node.decided
        content = f"{machine.name}:{self.random.getrandbits(48)}<{parent.content.decode().split('<')[0]}"
        proposal = Propose(content.encode(), tuple(voters), tuple(names))
        self.carry_out(machine, node.handle(proposal, now=self.clock(machine)))

    def learn(self, name: str, entry: Entry) -> None:
        self.trace.append((self.now, name, entry))
        if entry.generation <= self.known[name]:
            raise UnsafeError(f"{name} learned {entry.generation} after {self.known[name]}")
        self.known[name] = entry.generation
        other = self.decided.setdefault(entry.generation, entry)
        if other != entry:
            raise UnsafeError(f"generation {entry.generation}: {name} has {entry}, another has {other}")
        parent = self.decided.get(entry.generation - 1)
        if parent is not None and parent.content:
            said = entry.content.decode().partition("<")[2]
            if said != parent.content.decode().split("<")[0]:
                raise UnsafeError(f"generation {entry.generation} follows {said}, decided was {parent}")

    def send(self, source: str, target: str, message: Message) -> None:
        if self.bag is not None:
            if not isinstance(message, Learn) or self.random.random() > self.ignorance:
                self.bag.append((source, target, message))
            return
        copies = 1 + (self.random.random() < 0.02)
        for _ in range(copies):
            if (source, target) in self.broken or self.random.random() < self.loss:
                continue
            delay = min(4.0, self.delay * self.random.paretovariate(self.tail))
            self.at(delay, lambda: self.arrive(source, target, message))

    def run_shuffled(self, steps: int) -> None:
        """Deliver messages in any order at all, elect without a reason, restart nodes: safety needs no clock."""
        names = list(self.machines)
        self.bag = []
        for _ in range(steps):
            chance = self.random.random()
            if self.bag and chance < 1.0 - self.restarts - self.elections:
                newest = len(self.bag) - 1
                index = newest if self.random.random() < self.freshness else self.random.randint(0, newest)
                source, target, message = self.bag.pop(index)
                self.feed(target, MessageReceived(source, message))
            elif chance < 1.0 - self.restarts:
                self.elect(self.random.choice(names))
            else:
                name = self.random.choice(names)
                self.crash(name)
                self.restart(name)
            del self.bag[: max(0, len(self.bag) - 200)]
        self.bag = None

    def elect(self, name: str) -> None:
        """Let ``name`` try to lead, if it votes, without asking first: safety must not rest on that."""
        machine = self.machines[name]
        if machine.node is not None and name in machine.node.decided.voters:
            self.carry_out(machine, machine.node._run(self.clock(machine)))  # noqa: SLF001  # no event does that
        self.feed(name, ConsensusTick())

    def arrive(self, source: str, target: str, message: Message) -> None:
        if (source, target) not in self.broken:
            self.feed(target, MessageReceived(source, message))

    def crash(self, name: str) -> None:
        machine = self.machines[name]
        machine.node, machine.held = None, []
        self.at(self.random.choice((0.01, 0.3, 2.0)), lambda: self.restart(name))

    def restart(self, name: str) -> None:
        if self.machines[name].node is None:
            self.start(name)

    def resume(self, name: str) -> None:
        machine = self.machines[name]
        held, machine.held = machine.held, []
        for event in held:
            self.feed(name, event)

    def disturb(self) -> None:
        """Do one random thing to the network."""
        names = list(self.machines)
        match self.random.randrange(8):
            case 0:
                self.crash(self.random.choice(names))
            case 1:
                name, length = self.random.choice(names), self.random.uniform(0.1, 3.0)
                self.machines[name].stopped_until = self.now + length
                self.at(length + 1e-6, lambda: self.resume(name))
            case 2:
                side = set(self.random.sample(names, self.random.randint(1, len(names) - 1)))
                self.broken = {(a, b) for a in names for b in names if (a in side) != (b in side)}
            case 3:
                self.broken |= {(self.random.choice(names), self.random.choice(names)) for _ in range(3)}
            case 4 | 5:
                for name in self.random.sample(names, self.random.randint(1, len(names))):
                    self.machines[name].jumped += self.random.choice((0.3, 2.0))
                    self.feed(name, ConsensusTick())
            case _:
                self.broken = set()

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self.queue and self.queue[0][0] <= end:
            self.now, _, action = heapq.heappop(self.queue)
            action()
        self.now = end

    def run_with_faults(self, seconds: float) -> None:
        """First safety, then liveness: when the faults are over, entries must be decided within 10 seconds."""
        end = self.now + seconds
        while self.now < end:
            self.run(self.random.choice((0.02, 0.2, 0.8)))
            self.disturb()
        self.broken, self.loss, self.crash_chance, self.delay, self.tail = set(), 0.0, 0.0, 0.005, 10.0
        self.run(4.0)
        for name in self.machines:
            self.restart(name)
        self.run(2.0)
        before = max(self.decided)
        self.run(10.0)
        if max(self.decided) <= before:
            raise StuckError(f"nothing was decided after generation {before}")
