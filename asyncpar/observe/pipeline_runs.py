"""Runs of a pipeline as recorded by its ranks: each reports its last ones, and together they make one drawing.  Pure.

Ranks of several hosts have clocks of their own.  No stage begins before its input from another one was computed, so the
actions of a run bound the offsets between clocks, as messages do in a trace (see ``clocks``).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from asyncpar.core.observe.records import EventKind, EventState, RankIdentity
from asyncpar.observe.clocks import align_clocks
from asyncpar.observe.image import Event, RankImage

MOST_ROWS: Final = 64
MOST_ACTIONS: Final = 4096
"""Maximum number of actions that are drawn in all; larger runs show the first ones of each rank."""

_MOST_RUNS: Final = 3
_KINDS: Final = ("forward", "backward", "backward_input", "backward_weight")
_PLACE: Final = re.compile(r"stage=(\d+), micro-batch=(\d+)")


class ActionSummary(msgspec.Struct, frozen=True, array_like=True):
    """An action of a run: its kind, virtual stage and micro-batch, and by the rank's clock its begin and end."""

    kind: str
    stage: int
    micro_batch: int
    begun: float
    ended: float


class RunSummary(msgspec.Struct, frozen=True, array_like=True):
    """The actions of one rank in run ``number``, in the order of their begins."""

    number: int
    actions: tuple[ActionSummary, ...]


class PipelineSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The last runs of this rank's latest pipeline; ``ranks`` are all of its ranks.

    ``identity`` has the rank and its clock.
    """

    identity: RankIdentity
    ranks: tuple[int, ...] = ()
    runs: tuple[RunSummary, ...] = ()


def summarize_pipeline(image: RankImage) -> PipelineSummary:
    """Return the last runs in ``image``, without runs if there are none."""
    actions = [event for event in image.events if event.kind is EventKind.PIPELINE and event.group]
    if not actions:
        return PipelineSummary(identity=image.identity)
    group = actions[-1].group
    by_run: dict[int, list[ActionSummary]] = defaultdict(list)
    for event in actions:
        place = _PLACE.fullmatch(event.text)
        if event.group == group and place is not None and event.ended is not None and event.name in _KINDS:
            by_run[event.sequence].append(
                ActionSummary(event.name, int(place[1]), int(place[2]), event.created, event.ended)
            )
    known = image.groups.get(group)
    return PipelineSummary(
        identity=image.identity,
        ranks=(image.rank,) if known is None else known.ranks,
        runs=tuple(RunSummary(number, tuple(by_run[number])) for number in sorted(by_run)[-_MOST_RUNS:]),
    )


def draw_run(reported: Sequence[PipelineSummary]) -> dict[str, Any] | None:
    """Return the last run that all of ``reported``, ranks of one pipeline, have completed; None without one.

    It consists of plain values.  ``rows`` are in the order of their first stages: rank, stages, the part of the run in
    which it computed, and its actions: kind (an index into ``kinds``), stage, micro-batch, begin and length in
    microseconds.  ``left`` counts actions that are left out.
    """
    reported = [one for one in reported if one.runs][:MOST_ROWS]
    number = _choose(reported)
    if number is None:
        return None
    of_rank = {one.identity.rank: run for one in reported for run in one.runs if run.number == number}
    offsets = _offsets({one.identity.rank: one.identity for one in reported}, of_rank)
    begin = min(run.actions[0].begun + offsets[rank] for rank, run in of_rank.items())
    end = max(action.ended + offsets[rank] for rank, run in of_rank.items() for action in run.actions)
    length, most = max(end - begin, 1e-9), MOST_ACTIONS // len(of_rank)
    rows = [
        {
            "rank": rank,
            "stages": sorted({action.stage for action in run.actions}),
            "busy": round(sum(action.ended - action.begun for action in run.actions) / length, 4),
            "actions": [_plain(action, begin - offsets[rank]) for action in run.actions[:most]],
        }
        for rank, run in of_rank.items()
    ]
    return {
        "run": number,
        "seconds": length,
        "kinds": list(_KINDS),
        "total": max(len(one.ranks) for one in reported),
        "left": sum(max(0, len(run.actions) - most) for run in of_rank.values()),
        "rows": sorted(rows, key=lambda row: (row["stages"], row["rank"])),
    }


def _choose(reported: Sequence[PipelineSummary]) -> int | None:
    """Return the last run that all ranks have completed, or else the last that all have begun.

    A rank has completed a run if none of its reported runs has more actions: an unfinished run has fewer.
    """
    if not reported:
        return None
    for is_whole in (True, False):
        shared: set[int] | None = None
        for one in reported:
            most = max(len(run.actions) for run in one.runs)
            numbers = {run.number for run in one.runs if len(run.actions) == most or not is_whole}
            shared = numbers if shared is None else shared & numbers
        if shared:
            return max(shared)
    return None


def _plain(action: ActionSummary, begin: float) -> list[int]:
    begun, micros = round((action.begun - begin) * 1e6), round((action.ended - action.begun) * 1e6)
    return [_KINDS.index(action.kind), action.stage, action.micro_batch, begun, micros]


def _offsets(identities: Mapping[int, RankIdentity], of_rank: Mapping[int, RunSummary]) -> dict[int, float]:
    """Return the seconds to add to the times of each rank, to put all on one clock."""
    images = {
        rank: RankImage(identity=identities[rank], events=tuple(_messages(run.actions)))
        for rank, run in of_rank.items()
    }
    return {rank: offset.seconds for rank, offset in align_clocks(images).offsets.items()}


def _messages(actions: Sequence[ActionSummary]) -> Iterator[Event]:
    """Yield the messages that the actions imply: sent after one action, received before the next."""
    for action in actions:
        is_forward = action.kind == "forward"
        if action.kind == "backward_weight":
            continue
        step = 1 if is_forward else -1
        yield _message(EventKind.SEND, action.ended, action.stage, action.micro_batch, is_forward=is_forward)
        yield _message(EventKind.RECEIVE, action.begun, action.stage - step, action.micro_batch, is_forward=is_forward)


def _message(kind: EventKind, time: float, maker: int, micro_batch: int, *, is_forward: bool) -> Event:
    """Return one end of the message of virtual stage ``maker``."""
    number = (maker + 1) << 32 | micro_batch << 1 | is_forward
    return Event(
        ticket=0, kind=kind, state=EventState.COMPLETED, created=time, ended=time, name="", group=1, sequence=number
    )
