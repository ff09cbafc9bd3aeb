"""Pauses and cuts of leaders, followers and their ranks: the faults of a siege, in simulations of production agents."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from random import Random
from typing import Any
from unittest.mock import patch

from asyncpar.elasticity.pipe import PipeWorlds
from asyncpar.hosts import group, service
from asyncpar.hosts.director import ElasticDirector
from asyncpar.hosts.group import HostFacts
from asyncpar.hosts.messages import HostEvent, HostLeaving, WorldAnnounced, WorldStarted
from asyncpar.launch.agents import elastic_ranks
from asyncpar.launch.agents.elastic_ranks import ElasticRanks
from asyncpar.testing.simulation import Fault, SimulationResult, simulate
from tests.testing.simulation.programs import bits, check_bits

UNTIL = 30
FAULTS = 4
FIRST_AT, MOST_APART = 0.5, 2.5
"""When faults begin, and how many seconds they are apart at most."""
SHORTEST, LONGEST = 0.5, 5.0
LEADER_CHANCE = 1 / 2
BOUND = 100.0
"""Virtual seconds after the last fault in which a run has to end: far more than any takes that goes on."""


@dataclass(frozen=True, kw_only=True)
class Siege:
    """What is besieged, and how: ``kinds`` of faults, and those of a second host that is hit meanwhile."""

    size: int = 3
    witnesses: int = 0
    kinds: tuple[str, ...] = ("pause_agent", "pause_rank", "pause", "isolate", "one_way", "silence")
    of_others: tuple[str, ...] = ("pause_agent", "pause_rank", "pause", "isolate")
    pair_chance: float = 1 / 3

    @property
    def settings(self) -> dict[str, Any]:
        return {"size": self.size, "witnesses": self.witnesses, "elastic": True}


LEAVING = Siege(
    kinds=("leave", "pause_agent", "pause", "isolate"),
    of_others=("leave", "pause_agent", "pause_rank", "isolate", "kill"),
    pair_chance=0.6,
)
"""Hosts get SIGTERM, while others pause, are cut off, or lose their ranks."""


async def besieged() -> object:
    """Commit steps for some seconds."""
    return await bits(seconds=0.03, until=UNTIL)


def check_besieged(result: SimulationResult) -> None:
    """See ``check_bits``: no step is lost or repeated, nobody who had no fault is lost, and it goes on soon."""
    check_bits(result, UNTIL)


def draw_pauses(seed: object, siege: Siege) -> list[Fault]:
    """Return faults of hosts of which node 0 leads at first; one that does not leave is left."""
    dice, size = Random(f"{seed} pauses"), siege.size
    leavers: set[int] = set()

    def one(at: float, kind: str, node: int) -> Fault:
        if kind == "leave":
            kind = kind if len(leavers | {node}) < size else "pause_agent"
            leavers.update([node] if kind == "leave" else [])
        peer = (node + dice.randrange(1, size)) % size if kind in ("one_way", "silence", "reset") else None
        seconds = None if kind in ("kill", "reset", "leave") else round(dice.uniform(SHORTEST, LONGEST), 3)
        return Fault(at=round(at, 3), kind=kind, node=node, peer=peer, seconds=seconds)

    faults: list[Fault] = []
    at = FIRST_AT
    while len(faults) < FAULTS:
        at += dice.random() * MOST_APART
        node = 0 if dice.random() < LEADER_CHANCE else dice.randrange(size)
        faults.append(one(at, dice.choice(siege.kinds), node))
        if len(faults) < FAULTS and dice.random() < siege.pair_chance:
            other = (node + dice.randrange(1, size)) % size
            faults.append(one(at + dice.random() / 2, dice.choice(siege.of_others), other))
    return faults


def besiege(seed: int, siege: Siege = Siege()) -> SimulationResult:  # immutable
    """Run the program under the faults of ``seed``.  Raises ``SimulationFailed``."""
    faults = draw_pauses(seed, siege)
    check = check_besieged
    return simulate(besieged, seed=seed, faults=faults, check=check, shrinks=False, bound=BOUND, **siege.settings)


@dataclass(frozen=True, kw_only=True)
class Missing:
    """A safeguard: what it prevents, the siege that misses it, and the patches that take it away."""

    prevents: str
    siege: Siege = Siege()
    patches: tuple[tuple[Any, str, Any], ...]


_ANNOUNCED = ElasticRanks._announced  # noqa: SLF001


def _ends_at_once(ranks: ElasticRanks, announced: WorldAnnounced) -> Any:
    commands = _ANNOUNCED(ranks, announced)
    parked = ranks._parked  # noqa: SLF001
    return commands + (ranks._revoke(announced.generation, parked) if parked else [])  # noqa: SLF001


async def _waits_for_the_future(worlds: PipeWorlds, generation: int) -> Any:
    assert generation >= 0
    assert worlds._addresses is not None  # noqa: SLF001
    return await worlds._addresses  # noqa: SLF001


def _takes_once(worlds: PipeWorlds, generation: int, members: tuple[str, ...]) -> None:
    addresses = worlds._addresses  # noqa: SLF001
    if addresses is None or addresses.done():
        raise ValueError(f"the members of generation {generation} came twice")
    addresses.set_result(members)


def _starts_what_is_over(director: ElasticDirector, member: str, generation: int, address: str) -> Any:
    world = director._world  # noqa: SLF001
    if world is None or generation != world.generation or member not in world.members or member in world.ready:
        return []
    world.ready[member] = address
    is_complete = len(world.ready) == len(world.members)
    return [WorldStarted(generation, tuple(world.ready[one] for one in world.members))] if is_complete else []


_NOTE = HostFacts.note


def _forgets_who_leaves(facts: HostFacts, event: HostEvent) -> None:
    if not isinstance(event, HostLeaving):
        _NOTE(facts, event)


MISSING: dict[str, Missing] = {
    "parked-hosts-wait": Missing(
        prevents="a parked host ends each world that is announced to it, and the next one",
        patches=((elastic_ranks, "_OF_A_WORLD", ()), (ElasticRanks, "_announced", _ends_at_once)),
    ),
    "stops-are-reported": Missing(
        prevents="a host ends its stopped rank although nobody else that has the state answers",
        siege=Siege(size=2, witnesses=1, kinds=("pause_rank", "pause"), of_others=("pause_rank",), pair_chance=1.0),
        patches=((ElasticRanks, "_silent", lambda ranks, slot, how: ranks._free(slot, how)),),  # noqa: SLF001
    ),
    "last-holders": Missing(
        prevents="a leader gives up the last hosts that have the state because they pause",
        siege=Siege(size=2, witnesses=1, kinds=("kill",), of_others=("isolate", "pause"), pair_chance=1.0),
        patches=((group, "LAST_HOLDER_SECONDS", group.SILENT_SECONDS),),
    ),
    "addresses-once": Missing(
        prevents="a rank dies of addresses that come after its world was revoked",
        siege=Siege(size=4, kinds=("reset", "pause_rank", "isolate"), of_others=("pause_rank",), pair_chance=1.0),
        patches=(
            (PipeWorlds, "_all_served", _waits_for_the_future),
            (PipeWorlds, "_take_addresses", _takes_once),
            (ElasticDirector, "ready", _starts_what_is_over),
        ),
    ),
    "leaving-is-a-fact": Missing(
        prevents="only a leader that leaves, too, was notified that a host leaves, and its vote is missed for good",
        siege=LEAVING,
        patches=((HostFacts, "note", _forgets_who_leaves), (service, "_LEAVE_SECONDS", 3.0)),
    ),
    "leavers-keep-nothing": Missing(
        prevents="a host leaves with the state while the only other one that has it pauses",
        siege=LEAVING,
        patches=((ElasticDirector, "_keepers", lambda _director, members: members),),
    ),
}


@contextmanager
def without(name: str) -> Iterator[None]:
    """Take a safeguard away for the time of the block."""
    with ExitStack() as stack:
        for place, attribute, value in MISSING[name].patches:
            stack.enter_context(patch.object(place, attribute, value))
        yield
