"""Voters of the chain of worlds on simulated machines: disks that lose what was not synced, clocks, partitions."""

from __future__ import annotations

import asyncio
import pickle
from random import Random

from asyncpar.hosts.consensus import ConsensusNode
from asyncpar.hosts.consensus_messages import (
    Command,
    ConsensusTick,
    DurableState,
    Entry,
    Event,
    LearnDecided,
    MessageReceived,
    Persist,
    Propose,
    SendMessage,
)
from asyncpar.testing.simulation import Conditions, SimulationNote, draw_faults, note
from asyncpar.testing.simulation.cluster import SimulatedCluster
from asyncpar.testing.simulation.disk import SimulatedDisk
from asyncpar.testing.simulation.loop import SimulationLoop
from asyncpar.testing.simulation.patches import simulated_machine
from asyncpar.testing.simulation.process import SimulatedProcess
from asyncpar.testing.simulation.trace import Trace
from tests.soak import chosen

VOTERS = ("n0", "n1", "n2")
GENESIS = Entry(generation=0, voters=VOTERS, nodes=VOTERS)
SECONDS = 12.0
CALM_FROM = 8.0
KINDS = ("crash", "kill", "pause", "isolate", "silence", "one_way", "clock", "restart")


class Voter:
    """One node: its machine, its log of states on a disk, its messages."""

    def __init__(self, cluster: SimulatedCluster, node: int) -> None:
        self.name = VOTERS[node]
        self.network = cluster.network
        self.disk: SimulatedDisk = cluster.disks[node]
        self.dice = Random(f"{cluster.dice.random()}")
        self.inbox: asyncio.Queue[Event] = asyncio.Queue()

    def stored(self) -> DurableState:
        """Return the last state that is whole in the log."""
        state = DurableState(decided=GENESIS)
        try:
            log = self.disk.read("votes")
        except FileNotFoundError:
            return state
        while len(log) >= 4 and len(log) - 4 >= (size := int.from_bytes(log[:4], "little")):
            state, log = pickle.loads(log[4 : 4 + size]), log[4 + size :]
        self.disk.truncate("votes", len(self.disk.read("votes")) - len(log))
        return state

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        machine = ConsensusNode(self.name, self.stored(), now=loop.time(), jitter=self.dice.random)
        self.network.serve("vote", self.take)
        while True:
            event: Event = ConsensusTick()
            try:
                async with asyncio.timeout_at(machine.next_deadline):
                    event = await self.inbox.get()
            except TimeoutError:
                pass
            self.obey(machine.handle(event, now=loop.time()))
            if machine.leads and self.dice.random() < 0.3:
                content = self.dice.randbytes(4)
                self.obey(machine.handle(Propose(content, VOTERS, VOTERS), now=loop.time()))

    async def take(self, event: Event) -> None:
        self.inbox.put_nowait(event)

    def obey(self, commands: list[Command]) -> None:
        for command in commands:
            match command:
                case Persist(state):
                    content = pickle.dumps(state)
                    self.disk.append("votes", len(content).to_bytes(4, "little") + content)
                    self.disk.sync("votes")
                case SendMessage(node, message):
                    self.network.post(VOTERS.index(node), "vote", MessageReceived(self.name, message))
                case LearnDecided(entry):
                    note(entry)


def vote(seed: int = True) -> list[SimulationNote]:
    """Let voters decide for some seconds under drawn faults, and return what they have learnt."""
    trace = Trace()
    loop = SimulationLoop(seed, trace)
    faults = draw_faults(seed, count=8, size=len(VOTERS), within=CALM_FROM, kinds=KINDS)
    cluster = SimulatedCluster(loop, size=len(VOTERS), seed=seed, trace=trace, conditions=Conditions(spread=0.02))

    async def program(process: SimulatedProcess) -> None:
        assert process.node is not None
        await Voter(cluster, process.node).run()

    def start(node: int) -> None:
        if cluster.living(node) is None:
            cluster.launch(node, program)

    async def watch() -> None:
        for node in range(len(VOTERS)):
            start(node)
        cluster.plan(faults)
        await asyncio.sleep(CALM_FROM)
        cluster.settle(frozenset(range(len(VOTERS))))
        for node in range(len(VOTERS)):
            cluster.network.put_up(node)
            start(node)
        await asyncio.sleep(SECONDS - CALM_FROM)

    asyncio.set_event_loop(loop)
    try:
        with simulated_machine(loop, seed):
            loop.run_until_complete(watch())
            cluster.network.mute()
            loop.bury(1.0)
    finally:
        asyncio.set_event_loop(None)
        loop.close()
    return list(loop.notes)


def is_safe(notes: list[SimulationNote]) -> bool:
    """Has every generation one entry on all nodes?"""
    known: dict[int, Entry] = {}
    return all(known.setdefault(one.content.generation, one.content) == one.content for one in notes)


def test_voters_agree_and_go_on_when_faults_are_over() -> None:
    for seed in range(chosen(8, soak=300)):
        notes = vote(seed)
        assert is_safe(notes), seed
        assert any(one.at > CALM_FROM for one in notes), f"seed {seed}: nothing was decided in the end"


def test_equal_seeds_decide_the_same() -> None:
    assert vote(5) == vote(5)
