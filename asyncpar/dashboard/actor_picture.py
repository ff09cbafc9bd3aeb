"""The part of a picture about actors: mailboxes, pending calls, chains of them, dead letters; bounded.  Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from asyncpar.observe.ask_chains import AskChain, find_ask_chains
from asyncpar.observe.summary import AskSummary, RankReport

MOST_ACTORS: Final = 64
MOST_CHAINS: Final = 32
_MOST_STEPS: Final = 16

Json = dict[str, Any]


def picture_actors(reports: Sequence[RankReport], shown: Sequence[RankReport]) -> Json:
    """Return mailboxes and calls of the ranks that are ``shown``, and chains and dead letters of all ``reports``."""
    summaries = [report.summary for report in shown if report.summary is not None]
    boxes: list[Json] = [
        {"rank": summary.rank, "actor": box.actor, "waiting": box.waiting}
        for summary in summaries
        for box in summary.mailboxes
    ]
    asks = [_ask(summary.rank, ask) for summary in summaries for ask in summary.asks]
    return {
        "mailboxes": sorted(boxes, key=lambda box: -box["waiting"])[:MOST_ACTORS],
        "asks": sorted(asks, key=lambda ask: -ask["seconds"])[:MOST_ACTORS],
        "chains": [_chain(chain) for chain in find_ask_chains(reports)[:MOST_CHAINS]],
        "letters": _letters(reports),
        "lettersCount": sum(report.summary.dead_letters for report in reports if report.summary is not None),
    }


def _ask(rank: int, ask: AskSummary) -> Json:
    return {
        "from": rank,
        "caller": ask.caller,
        "rank": ask.rank,
        "actor": ask.actor,
        "endpoint": ask.endpoint,
        "seconds": ask.seconds,
        "site": ask.site,
    }


def _chain(chain: AskChain) -> Json:
    return {
        "ranks": list(chain.ranks[:_MOST_STEPS]),
        "count": len(chain.ranks),
        "caller": chain.caller,
        "steps": [step._asdict() for step in chain.steps[:_MOST_STEPS]],
        "more": max(0, len(chain.steps) - _MOST_STEPS),
        "end": chain.end[:300],
        "cycle": chain.is_cycle,
    }


def _letters(reports: Sequence[RankReport]) -> list[Json]:
    """Return the last dead letters, the last one of each rank first."""
    found = [
        (place, summary.rank, letter)
        for summary in (report.summary for report in reports)
        if summary is not None
        for place, letter in enumerate(summary.letters)
    ]
    found.sort(key=lambda one: one[:2])
    return [{"on": on, **msgspec.to_builtins(letter)} for _, on, letter in found[:MOST_ACTORS]]
