"""Read from what agents print which worlds a job had, which ranks ended on their own, and why others were lost."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

_WORLD = re.compile(
    r"asyncpar agent \S+: generation (?P<generation>\d+)(?:; joined: (?P<joined>[^;]*))?(?:; left: (?P<left>[^;]*))?"
    r"(?:; (?P<why>.*))?; \d+ ranks? on \d+ hosts?$"
)
_CRASH = re.compile(r"asyncpar agent \S+: (rank \S+ exited with code (?!143\b)[1-9]\d*)")  # SIGTERM: 143


@dataclass(frozen=True, slots=True)
class World:
    """A world, and how it differs from the one before: members are ``host/slot/mark``."""

    generation: int
    joined: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    why: str = ""


def read_agents(folder: Path) -> list[str]:
    """Return the lines that the agents of a run have printed so far."""
    return [line for path in sorted(folder.glob("*.log")) for line in path.read_text(errors="replace").splitlines()]


def worlds_in(lines: Iterable[str]) -> list[World]:
    """Return the worlds that agents have announced, each once, in order."""
    found: dict[int, World] = {}
    for match in filter(None, map(_WORLD.search, lines)):
        joined, left = (tuple((match[name] or "").split(", ")) if match[name] else () for name in ("joined", "left"))
        found[int(match["generation"])] = World(int(match["generation"]), joined, left, match["why"] or "")
    return [found[generation] for generation in sorted(found)]


def crashes_in(lines: Iterable[str]) -> list[str]:
    """Return the ends of ranks that have failed, those excepted that a signal has ended."""
    return [match[1] for match in map(_CRASH.search, lines) if match is not None]


def causes_of(worlds: Sequence[World], struck: Iterable[tuple[int, str, str]]) -> dict[str, str]:
    """Return what was done to each member that others have gone on without, "" if nothing was.

    ``struck`` are the faults: the generation in which each was, the slot (``host/slot``) whose rank it ends, its kind.
    """
    due, found = list(struck), {}
    for world in worlds:
        for member in world.left:
            slot = member.rpartition("/")[0]
            fault = next((one for one in due if one[1] == slot and one[0] < world.generation), None)
            if fault is not None:
                due.remove(fault)
            found[member] = "" if fault is None else fault[2]
    return found


def false_deaths(worlds: Sequence[World], causes: Mapping[str, str]) -> list[str]:
    """Return who was declared lost though nobody had touched it, with the reason; one that is done says so."""
    return [
        f"generation {world.generation}: {member}: {world.why}"
        for world in worlds
        for member in world.left
        if not causes[member] and f"{member} left" not in world.why
    ]


def ended_by_drains(worlds: Sequence[World], causes: Mapping[str, str], kinds: Collection[str]) -> set[int]:
    """Return the generations after which members left because of faults of these kinds, and no others."""
    return {
        before.generation
        for before, after in pairwise(worlds)
        if after.left and all(causes[member] in kinds for member in after.left)
    }
