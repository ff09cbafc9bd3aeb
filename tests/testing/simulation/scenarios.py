"""For each safeguard that can be taken away: a program and faults under which a simulation sees that it is missing."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

import asyncpar as ap
from asyncpar.collectives.communicator import Communicator
from asyncpar.errors import DivergedState, LaunchError, PeerError, StaleGeneration
from asyncpar.hosts.group import LAST_HOLDER_SECONDS, SILENT_SECONDS
from asyncpar.net.arena import formation
from asyncpar.net.arena.channel import Channel, Offer, Turn
from asyncpar.net.arena.segment import HEADER_BYTES, Segment
from asyncpar.net.arena.settings import LEAST_BYTES, ArenaSettings
from asyncpar.net.transport.negotiation import LINK_UP_SECONDS
from asyncpar.testing import run_virtual
from asyncpar.testing.simulation import Conditions, Fault, SimulationResult, note
from asyncpar.testing.simulation.process import CURRENT
from tests.elasticity.sharded_training import train_sharded
from tests.elasticity.training import Result
from tests.testing.simulation.programs import PORTIONS, UNTIL, bits, check_bits, check_sums, sums


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """What to simulate, and how to see that something is wrong."""

    main: Callable[..., Any]
    check: Callable[[SimulationResult], object]
    kinds: tuple[str, ...] = ()
    faults: int = 0
    size: int = 3
    elastic: bool = False
    settings: dict[str, Any] = field(default_factory=dict)


class Tally(ap.Actor):
    """Counts what it is told."""

    def __init__(self) -> None:
        self.told = 0

    @ap.endpoint
    async def add(self) -> None:
        self.told += 1

    @ap.endpoint
    async def count(self) -> int:
        return self.told


async def tells(node: ap.Node) -> int:
    """Tell an actor some things, and ask how many it has heard."""
    tally = await node.spawn(Tally, name=f"tally {node.rank}")
    del tally
    await node.world.barrier()
    other = node.ref(f"tally {(node.rank + 1) % node.size}", (node.rank + 1) % node.size)
    for _ in range(10):
        other.add.tell()
        await asyncio.sleep(0.001)
    count = int(await other.count())
    note(("count", count))
    await node.world.barrier()
    return count


def check_tells(result: SimulationResult) -> None:
    for entry in result.notes:
        assert entry.content == ("count", 10), f"10 were told, {entry.content[1]} were heard"


async def generations(node: ap.Node) -> None:
    """Note what ranks of a generation sum up to; they begin late, so that a paused one may wake in the next one."""
    generation = node.membership.generation
    await asyncio.sleep(1.0)
    for _ in range(3):
        x = np.array([float((generation + 1) * 10**node.rank)])
        await node.world.all_reduce(x)
        note((generation, float(x[0])))
        await asyncio.sleep(0.01)


def check_generations(result: SimulationResult) -> None:
    assert not result.errors, f"a world without a loss failed: {dict(result.errors)}"
    for entry in result.notes:
        generation, total = entry.content
        assert total == (generation + 1) * float("1" * result.size), f"generation {generation} got {total}"


class SharedMemory:
    """The part of an arena that channels use, for simulated ranks that pretend to be on one host."""

    polls = True

    def __init__(self, segments: dict[int, Segment]) -> None:
        self.segments = segments

    def ring(self, rank: int, group: int, word: int) -> None:
        """Wake nobody: all look again and again."""


_MEMORY: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[tuple[int, int], Segment]] = WeakKeyDictionary()
"""The segments of the ranks of each generation."""


async def in_shared_memory(node: ap.Node) -> None:
    """As ``generations``, through flags and payloads in shared memory, which has no header that says of when it is."""
    generation, rank = node.membership.generation, node.rank
    brought = formation.contribute(rank, ArenaSettings(bytes=LEAST_BYTES, polls=True))
    memory = _MEMORY.setdefault(asyncio.get_running_loop(), {})
    memory[generation, rank] = brought.segment
    try:
        await node.world.barrier()
        arena: Any = SharedMemory({other: memory[generation, other] for other in range(node.size)})
        offers = [Offer(HEADER_BYTES, 64)] * node.size
        channel = Channel(arena, number=0, ranks=range(node.size), place=rank, offers=offers)
        for sequence in range(1, 4):
            await asyncio.sleep(0.1 * (rank + 1))
            note((generation, await _sum_in_memory(channel, sequence, float((generation + 1) * 10**rank))))
    finally:
        brought.close()


async def _sum_in_memory(channel: Channel, sequence: int, own: float) -> float:
    turn = Turn(channel, sequence)
    await _until(lambda: channel.is_clear(turn.parity))
    turn.enter(1)
    slots = channel.whole(turn.parity, np.dtype(np.float64))
    slots[channel.place][0] = own
    turn.post(1)
    await _until(lambda: turn.has_reached(channel.others, 1))
    total = sum(float(slot[0]) for slot in slots)
    turn.end(is_completed=True)
    return total


async def _until(is_so: Callable[[], bool]) -> None:
    """Read the memory again and again, as it notifies nobody of what is written there."""
    while not is_so():  # noqa: ASYNC110
        await asyncio.sleep(0.02)


async def dials_late(node: ap.Node) -> None:
    """Note the end of a barrier that begins after a while, with which ranks dial each other."""
    await asyncio.sleep(1.0)
    with suppress(PeerError):
        await node.world.barrier()
    note("ended")


def check_dials_late(result: SimulationResult) -> None:
    times = [entry.at for entry in result.notes if entry.node != STOPPED.node]
    assert len(times) == result.size - 1
    assert max(times) < 2.0 + LINK_UP_SECONDS, f"the last of them gave up after {max(times):.0f} s"


STOPPED = Fault(at=0.5, kind="pause", node=1, seconds=200.0)


async def in_pairs(node: ap.Node) -> None:
    """Let all ranks send to all others at once, so that they dial each other."""
    pieces = [np.full(1, node.rank) for _ in range(node.size)]
    received = [np.empty(1, pieces[0].dtype) for _ in range(node.size)]
    await node.world.all_to_all(np.concatenate(pieces))
    await node.world.barrier()
    del received


async def survives(node: ap.Node) -> tuple[tuple[int, ...], float]:
    """Pass a message round, while pairs work on their own; after a loss, go on in the group of those who are left."""
    world, after = node.world, (node.rank + 1) % node.size
    pairs = world.subgroup([rank for rank in range(node.size) if rank % 3 == node.rank % 3])
    assert pairs is not None
    await world.barrier()
    note(("begun", node.rank))
    try:
        for turn in range(10):
            if node.rank % 2 == 0:
                await world.send(np.ones(1), after, tag=turn)
            await pairs.all_reduce(np.ones(1))
            if node.rank % 2:
                await world.send(np.ones(1), after, tag=turn)
            await world.recv((node.rank - 1) % node.size, tag=turn)
            await asyncio.sleep(0.001)
        await world.barrier()
    except PeerError as error:
        world.revoke(error)
    left: Communicator = world
    while True:
        left = await left.shrink()
        x, is_right = np.array([float(1 << node.rank)]), 1
        try:
            await left.all_reduce(x)
        except PeerError as error:
            is_right = 0
            left.revoke(error)
        if (await left.agree(is_right)).flag:
            return left.ranks, float(x[0])


def check_survives(result: SimulationResult) -> None:
    begun = {entry.node for entry in result.notes}
    assert not begun & result.errors.keys(), f"a survivor did not come through: {dict(result.errors)}"
    assert result.seconds < 10.0, f"it took {result.seconds:.1f} s"
    ended = {ranks for ranks, _ in result.results.values()}
    assert len(ended) <= 1, f"groups differ: {ended}"
    for node, (ranks, total) in result.results.items():
        assert node in ranks
        assert total == sum(1 << rank for rank in ranks), f"node {node}: {ranks} came to {total}"


def check_soon(result: SimulationResult) -> None:
    assert result.seconds < 0.9, f"it took {result.seconds:.1f} s"


def check_nothing(result: SimulationResult) -> None:
    """Whatever is wrong raises."""


def check_awake(result: SimulationResult) -> None:
    """A rank that was stopped, or out of reach, until it was declared lost commits nothing any more."""
    check_bits(result)
    for fault in result.faults:
        lost_at = fault.at + LAST_HOLDER_SECONDS + SILENT_SECONDS
        if fault.kind not in ("pause", "isolate") or fault.at + (fault.seconds or 0.0) < lost_at:
            continue
        own = [entry for entry in result.notes if entry.node == fault.node and entry.content[0] == "committed"]
        first = min((entry.incarnation for entry in own if entry.at < fault.at), default=None)
        late = [entry for entry in own if entry.incarnation == first and entry.at > lost_at]
        assert not late, f"{late[0]} after {fault}"


def check_prompt_bits(result: SimulationResult) -> None:
    check_bits(result)
    last = max((fault.at + (fault.seconds or 0.0) for fault in result.faults), default=0.0)
    assert result.seconds < last + 12.0, f"it took {result.seconds - last:.1f} s after the last fault"


async def drifting() -> tuple[float, tuple[int, ...], bytes] | None:
    """As ``bits``, but the memory of one node goes wrong by a bit."""
    total = np.zeros(1, np.float64)
    async with ap.elastic(portions=PORTIONS, seed=5) as job:
        state = job.state({"total": total})
        async for step in job.steps(state, until=UNTIL):
            async with step:
                for portion in step.portions:
                    step.add(portion, {"total": np.array([float(1 << portion)])})
                total += (await step.reduce("sum"))["total"]
                process = CURRENT.get()
                if process is not None and process.node == 1 and step.number == 2:
                    total += 1.0
        return float(total[0]), (), b""


def check_drifting(result: SimulationResult) -> None:
    assert len(set(result.results.values())) <= 1, f"ends differ: {result.results}"


async def with_ballast() -> tuple[float, tuple[int, ...], bytes] | None:
    """As ``bits``, with a state that takes longer to fetch than a step."""
    return await bits(5000)


async def in_slow_steps() -> tuple[float, tuple[int, ...], bytes] | None:
    """As ``bits``, with steps that faults hit in their midst."""
    return await bits(seconds=0.02)


async def slowly() -> tuple[float, tuple[int, ...], bytes] | None:
    """As ``bits``, with steps of four seconds."""
    return await bits(seconds=0.5)


async def encoded() -> Result:
    """Train with a lossy codec, whose residuals are parts of the state."""
    return await train_sharded(None, until=4, codec="int4")


@functools.cache
def encoded_alone() -> Result:
    return run_virtual(encoded())


def check_encoded(result: SimulationResult) -> None:
    for node, found in result.results.items():
        assert found.parameters == encoded_alone().parameters, f"node {node} has other parameters"
        assert found.digest == encoded_alone().digest, f"node {node} has another lineage"


PARTIAL = ("kill", "crash", "restart", "reset", "half_open", "pause", "isolate")
STEPS = Scenario(main=bits, check=check_bits, kinds=PARTIAL, faults=3, elastic=True)
JOINS = Scenario(
    main=with_ballast,
    check=check_bits,
    kinds=("restart",),
    faults=2,
    elastic=True,
    settings={"conditions": Conditions(bandwidth=1e6, spread=0.01)},
)
JOINS_AND_LOSSES = Scenario(
    main=in_slow_steps,
    check=check_prompt_bits,
    kinds=("restart", "kill"),
    faults=6,
    size=4,
    elastic=True,
    settings={"conditions": Conditions(spread=0.03)},
)
APART = Scenario(
    main=bits,
    check=check_bits,
    kinds=("crash",),
    faults=1,
    size=4,
    elastic=True,
    settings={"conditions": Conditions(spread=0.01)},
)
DAMAGE = Scenario(main=sums, check=check_sums, kinds=("damage",), faults=3)
DIALS = Scenario(main=in_pairs, check=check_nothing, settings={"bound": 50.0})

LOSSES = Scenario(main=survives, check=check_survives, kinds=("kill",), faults=2, size=6)
QUARRELS = Scenario(
    main=bits,
    check=check_bits,
    kinds=("one_way", "silence"),
    faults=1,
    elastic=True,
    settings={"core": 2, "bound": 100.0},
)

STOPS = Scenario(
    main=slowly,
    check=check_awake,
    size=1,
    elastic=True,
    settings={
        "faults": [Fault(at=3.9, kind="pause", node=0, seconds=LAST_HOLDER_SECONDS + 15.0)],
        "expected": (LaunchError, StaleGeneration),
    },
)

ENCODED = Scenario(main=encoded, check=check_encoded, kinds=("kill",), faults=1, elastic=True)

SCENARIOS: dict[str, Scenario] = {
    "generation-check": Scenario(
        main=generations,
        check=check_generations,
        kinds=("pause", "restart"),
        faults=3,
        settings={"expected": (PeerError, StaleGeneration)},
    ),
    "frame-numbers": Scenario(main=tells, check=check_tells, kinds=("replay",), faults=3),
    "payload-checksums": DAMAGE,
    "header-checksums": DAMAGE,
    "leaving-is-announced": Scenario(main=sums, check=check_sums, size=4),
    "one-dial-wins": DIALS,
    "one-dial-goes-on": Scenario(main=in_pairs, check=check_soon),
    "dials-have-a-deadline": Scenario(main=dials_late, check=check_dials_late, settings={"faults": [STOPPED]}),
    "fresh-segments": Scenario(
        main=in_shared_memory,
        check=check_generations,
        kinds=("pause", "restart"),
        faults=3,
        settings={"expected": (PeerError, StaleGeneration)},
    ),
    "child-groups-are-revoked": LOSSES,
    "proposals-are-inherited": LOSSES,
    "arrival-is-taken-back": JOINS_AND_LOSSES,
    "newcomers-are-caught-up": JOINS,
    "history-not-popularity": APART,
    "commit-lease": STOPS,
    "quarrels-end": QUARRELS,
    "vote-of-all": APART,
    "roll-forward": APART,
    "forward-if-all-prepared": APART,
    "lineage-digest": Scenario(
        main=drifting,
        check=check_drifting,
        elastic=True,
        settings={"expected": (DivergedState, LaunchError, StaleGeneration)},
    ),
    "revoke-interrupts": Scenario(main=bits, check=check_prompt_bits, kinds=PARTIAL, faults=2, elastic=True),
    "abort-restores-values": STEPS,
    "abort-restores-arrays": APART,
    "parts-are-mirrored": ENCODED,
    "residuals-are-rekeyed": ENCODED,
    "lent-arrays-stay": JOINS,
}
