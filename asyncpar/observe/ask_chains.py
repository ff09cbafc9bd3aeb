"""Calls of actors that wait for each other, across all ranks of a job, by their summaries.  Pure.

A call waits for the call that its endpoint makes, on the actor's rank; one in the mailbox of an actor waits for that
actor's current work.  Summaries of ranks are from moments up to a second apart, so a chain that is shown once may never
have existed as a whole; one that persists does.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from asyncpar.observe.holdups import describe_rank, find_trouble
from asyncpar.observe.summary import MOST_SERVED, AskSummary, RankReport

_MOST_STEPS: Final = 64

_Place = tuple[int, int]
"""A call: the rank of its caller, and its number there."""


class ChainStep(NamedTuple):
    """A pending call: its actor and endpoint on ``rank``, the seconds of the wait, and its place in the program."""

    rank: int
    actor: str
    endpoint: str
    seconds: float
    site: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AskChain:
    """A chain of calls, each of which waits for the next one.

    ``ranks`` make the first, in actors of the name ``caller`` ("": in their programs).  ``end`` describes the last
    actor's work, "" if it is not known.  ``is_cycle`` means that the last call waits for an earlier one.
    """

    ranks: tuple[int, ...]
    caller: str
    steps: tuple[ChainStep, ...]
    end: str
    is_cycle: bool


def find_ask_chains(reports: Iterable[RankReport]) -> list[AskChain]:
    """Return the chains of at least two calls, cycles first, then those that have waited longest."""
    known = {report.rank: report for report in reports}
    reported = [
        (rank, ask)
        for rank, report in known.items()
        if report.summary is not None and report.condition != "ended"
        for ask in report.summary.asks
    ]
    callers = {(rank, ask.caller) for rank, ask in reported if ask.caller}
    asks = {(rank, ask.call): ask for rank, ask in reported if ask.caller or (ask.rank, ask.actor) in callers}
    following = _following(asks, known)
    heads = asks.keys() - following.values()
    by_way: dict[tuple[str, int, str, str, _Place], list[_Place]] = defaultdict(list)
    for head in sorted(heads & following.keys()):  # callers that wait for one actor are in one chain
        ask = asks[head]
        by_way[ask.caller, ask.rank, ask.actor, ask.endpoint, following[head]].append(head)
    found = [_chain(group, asks, following, known) for group in by_way.values()]
    found += [_chain([start], asks, following, known) for start in _starts_of_cycles(heads, following)]
    return sorted(found, key=lambda chain: (not chain.is_cycle, -chain.steps[0].seconds))


def _following(asks: Mapping[_Place, AskSummary], known: Mapping[int, RankReport]) -> dict[_Place, _Place]:
    """Return, for each call, the one that it waits for, if any."""
    serving: dict[_Place, _Place] = {}
    holding: dict[tuple[int, str], _Place] = {}
    for place, ask in asks.items():
        if ask.serves is not None:
            serving.setdefault(ask.serves, place)
        if ask.caller and ask.is_holding:
            holding.setdefault((place[0], ask.caller), place)
    found = {}
    for place, ask in asks.items():
        after = serving.get(place)
        if after is None and not _may_run(place, known.get(ask.rank)):
            after = holding.get((ask.rank, ask.actor))
        if after is not None and after != place:
            found[place] = after
    return found


def _may_run(place: _Place, report: RankReport | None) -> bool:
    """Return whether the endpoint of the call may currently run, on the rank of ``report``."""
    running = () if report is None or report.summary is None else report.summary.serving
    return place in running or len(running) >= MOST_SERVED


def _starts_of_cycles(heads: Iterable[_Place], following: Mapping[_Place, _Place]) -> list[_Place]:
    """Return one call of each cycle that no head leads to."""
    seen: set[_Place] = set()
    for head in heads:
        _follow(head, following, seen)
    starts = []
    for place in sorted(following):
        if place not in seen:
            starts.append(place)
            _follow(place, following, seen)
    return starts


def _follow(place: _Place | None, following: Mapping[_Place, _Place], seen: set[_Place]) -> None:
    while place is not None and place not in seen:
        seen.add(place)
        place = following.get(place)


def _chain(
    heads: list[_Place],
    asks: Mapping[_Place, AskSummary],
    following: Mapping[_Place, _Place],
    known: Mapping[int, RankReport],
) -> AskChain:
    path = [max(heads, key=lambda head: asks[head].seconds)]
    while (after := following.get(path[-1])) is not None and after not in path and len(path) < _MOST_STEPS:
        path.append(after)
    first = asks[path[0]]
    return AskChain(
        ranks=tuple(dict.fromkeys(rank for rank, _ in heads)),
        caller=first.caller,
        steps=tuple(_step(asks[place]) for place in path),
        end="" if after is not None else _end(path[-1], asks[path[-1]], known.get(asks[path[-1]].rank)),
        is_cycle=after in path,
    )


def _step(ask: AskSummary) -> ChainStep:
    return ChainStep(ask.rank, ask.actor, ask.endpoint, ask.seconds, ask.site)


def _end(place: _Place, ask: AskSummary, report: RankReport | None) -> str:
    """Describe the work of the actor for which the last call waits."""
    if report is None:
        return "is not known here"
    if find_trouble(report) or report.condition == "ended":
        return describe_rank(report)
    if ask.told is not None and (ask.told.culprit, ask.told.actor) == (ask.rank, ask.actor):
        return ask.told.where
    summary = report.summary
    return f"runs {ask.endpoint}()" if summary is not None and place in summary.serving else ""
