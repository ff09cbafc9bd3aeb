"""The faults of a siege: which parts of which hosts are paused or cut off, for how long.  Pure, as a seed says."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from scripts.bench.chaos.chaos_agents import CUTS

PAUSES = ("agent", "rank", "both")
"""Processes of a host that get SIGSTOP, and SIGCONT later."""

WHATS = (*PAUSES, *CUTS)
TARGETS = ("leader", "follower")
PAIR = "pair"
KINDS = (*(f"{target}-{what}" for target in TARGETS for what in WHATS), PAIR)
LEAST_SECONDS, MOST_SECONDS = 0.5, 5.0
COMPANIONS = 1 / 3
"""The share of the faults of a leader during which another host is hit, too."""


@dataclass(frozen=True, slots=True)
class Strike:
    """One part of a fault: ``what`` is done to a ``target``, ``after`` so many seconds, for ``seconds``."""

    target: str
    what: str
    seconds: float
    after: float = 0.0
    pick: float = 0.0
    """Which of the followers it is: from 0 to less than 1."""
    host: str = ""
    """The host that is hit, once it is chosen."""


def draw_faults(seed: int, count: int, kinds: Sequence[str] = KINDS) -> Iterator[tuple[Strike, ...]]:
    """Yield ``count`` faults: each kind once, in an order that the seed says, then all of them anew."""
    dice, deck = random.Random(seed), list[str]()
    for _ in range(count):
        if not deck:
            deck = list(kinds)
            dice.shuffle(deck)
        yield _draw(deck.pop(), dice)


def _draw(kind: str, dice: random.Random) -> tuple[Strike, ...]:
    if kind == PAIR:
        return _strike(dice, dice.choice(TARGETS)), _strike(dice, "follower")
    target, _, what = kind.partition("-")
    first = replace(_strike(dice, target), what=what)
    if target != "leader" or dice.random() >= COMPANIONS:
        return (first,)
    return first, replace(_strike(dice, "follower"), after=dice.uniform(0.0, first.seconds))


def _strike(dice: random.Random, target: str) -> Strike:
    return Strike(target, dice.choice(WHATS), dice.uniform(LEAST_SECONDS, MOST_SECONDS), pick=dice.random())


def choose_hosts(
    strikes: Sequence[Strike], hosts: Sequence[str], *, leader: str, members: Collection[str]
) -> tuple[Strike, ...]:
    """Return the strikes with the hosts that they hit: different ones, never all that have ``members`` of the world.

    Who holds the state and is left alone must keep it.  Strikes for which there is no such host are left out.
    """
    chosen: tuple[Strike, ...] = ()
    for strike in strikes:
        hit = {one.host for one in chosen}
        free = [host for host in hosts if host not in hit and set(members) - hit - {host}]
        found = [host for host in free if (host == leader) == (strike.target == "leader")]
        if found:
            chosen += (replace(strike, host=found[int(strike.pick * len(found))]),)
    return chosen
