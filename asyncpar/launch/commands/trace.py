"""`asyncpar trace`: one timeline of all ranks, for Perfetto or Chrome's viewer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from asyncpar.core.observe.recorder import clock_domain
from asyncpar.core.observe.waits import name_ranks
from asyncpar.errors import LaunchError, UsageError
from asyncpar.launch.command_line import OneLineCommand, exit_with, option, print_line, write_result
from asyncpar.launch.commands.job_choice import ask_job, parse_ranks

if TYPE_CHECKING:
    from asyncpar.observe.image import RankImage
    from asyncpar.observe.timeline import Timeline

_LOOK_SECONDS: Final = 0.5
_MOST_SECONDS: Final = 600.0
_MOST_EVENTS: Final = 300_000
"""Most events of all ranks together; a trace of that many has about 50 MB."""


@click.command(cls=OneLineCommand)
@option("--seconds", metavar="S", type=float, default=5.0, help="How long to record, from now on.  [5]")
@option(
    "--before", metavar="S", type=float, default=0.0, help="Add what ranks remember of so many seconds before.  [0]"
)
@option("--output", "-o", metavar="FILE", default="trace.pftrace", help="Where to write it.  [trace.pftrace]")
@option("--ranks", "-r", "ranks", metavar="N,...", multiple=True, help="Of these ranks only: 0,2 or 4-7.")
@option("--json", "as_json", is_flag=True, help="Write Chrome's JSON instead of Perfetto's own format.")
@click.argument("job", required=False, default=None)
def trace(
    job: str | None, seconds: float, before: float, output: str, ranks: tuple[str, ...], *, as_json: bool
) -> None:
    """Record what all ranks do, and write it as one timeline.

    Operations, messages with arrows, calls of actors and spans, on one clock.
    Open the file at https://ui.perfetto.dev (it stays on your machine) or in
    chrome://tracing (with --json).  With --before the file has what the ranks
    still remember of the time before, too: the last 4,096 events of each.
    Events of a rank that has more than about 8,000 a second are missing in
    part; it says how many.
    """
    window = TraceWindow(seconds=seconds, before=before)
    exit_with("trace", lambda: _trace(job, window, Path(output), ranks, as_json=as_json))


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceWindow:
    """The time that a trace covers: the next ``seconds``, and the ``before`` seconds until now."""

    seconds: float
    before: float = 0.0

    def check(self) -> None:
        """Raise ``UsageError`` if the window is invalid."""
        if not 0.0 <= self.seconds <= _MOST_SECONDS:
            raise UsageError(f"--seconds: expected up to {_MOST_SECONDS:.0f}, got {self.seconds:g}")
        if not self.before >= 0.0:
            raise UsageError(f"--before: expected seconds, 0 or more, got {self.before:g}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """The contents of the rings over the time of recording.

    ``started`` and ``wall`` are the times of the first inspection, by this host's monotonic clock and its wall clock;
    ``first`` are the images of that inspection.  ``silent`` has, by rank, the reason why there is no image.
    """

    started: float
    wall: float
    first: Mapping[int, RankImage] = field(default_factory=dict)
    images: Mapping[int, RankImage] = field(default_factory=dict)
    silent: Mapping[int, str] = field(default_factory=dict)

    @property
    def is_full(self) -> bool:
        """Whether the events since the first inspection are as many as a trace may have."""
        return _count(self.images) - _count(self.first) > _MOST_EVENTS

    def begin(self, timeline: Timeline, here: str) -> float:
        """Return when recording began, by the clock of the ``timeline``; ``here`` is the domain of this host's clock.

        It is exact where a rank runs on this host.  Elsewhere it is taken from the wall clocks, in which hosts may
        differ: it is after everything that had ended at the first inspection, and before everything that began later.
        """
        for rank, image in self.images.items():
            if image.identity.clock_domain == here:
                return self.started + timeline.offsets[rank].seconds
        identity = self.images[min(self.images)].identity
        begun = identity.clock + (self.wall - identity.wall)
        seen = {rank: max((event.ticket for event in image.events), default=-1) for rank, image in self.first.items()}
        offset = {rank: timeline.offsets[rank].seconds for rank in self.images}
        past = [image.last_at + offset[rank] for rank, image in self.first.items() if rank in offset]
        new = [
            event.created + offset[rank]
            for rank, image in self.images.items()
            for event in image.events
            if event.ticket > seen.get(rank, -1)
        ]
        return min([max([begun, *past]), *new])


def _trace(job: str | None, window: TraceWindow, output: Path, ranks: tuple[str, ...], *, as_json: bool) -> int:
    from asyncpar.observe.perfetto import encode_chrome, encode_perfetto
    from asyncpar.observe.timeline import cut_timeline, make_timeline

    window.check()
    chosen = parse_ranks(ranks)
    recording = record(lambda: ask_images(job, chosen), window.seconds)
    images = recording.images
    whole = make_timeline(images)
    begun = recording.begin(whole, clock_domain())
    timeline = cut_timeline(whole, begun - window.before, begun + window.seconds)
    content = encode_chrome(timeline) if as_json else encode_perfetto(timeline)
    write_result(output, content)
    print_line(_describe(timeline, output, len(content)))
    for gap in describe_gaps(images, timeline, window.seconds, is_full=recording.is_full):
        print_line(gap, err=True)
    for rank, why in sorted(recording.silent.items()):
        print_line(f"rank {rank} is not in it: {why}", err=True)
    return 0


def record(ask: Callable[[], tuple[dict[int, RankImage], dict[int, str]]], seconds: float) -> Recording:
    """Inspect the rings with ``ask`` until the time is over; the last inspection is after that."""
    from asyncpar.observe.timeline import merge_images

    images: dict[int, RankImage] = {}
    first: dict[int, RankImage] | None = None
    started, wall = time.perf_counter(), time.time()
    while True:
        left = started + seconds - time.perf_counter()
        found, silent = ask()
        first = found if first is None else first
        for rank, image in found.items():
            images[rank] = merge_images(images.get(rank), image)
        silent = {rank: why for rank, why in silent.items() if rank not in images}
        recording = Recording(started=started, wall=wall, first=first, images=images, silent=silent)
        if left <= 0.0 or recording.is_full:
            return recording
        time.sleep(min(_LOOK_SECONDS, max(0.0, started + seconds - time.perf_counter())))


def _count(images: Mapping[int, RankImage]) -> int:
    return sum(len(image.events) for image in images.values())


def describe_gaps(
    images: Mapping[int, RankImage], timeline: Timeline, seconds: float, *, is_full: bool = False
) -> list[str]:
    """Return sentences on what a trace of so many ``seconds`` lacks; ``is_full``: it took no more events."""
    gaps = []
    if is_full:
        gaps.append(
            f"it has as many events as a trace may have, {_MOST_EVENTS:,}, and may end before {seconds:g} s are over"
        )
    if lost := sorted(rank for rank, image in images.items() if image.lost):
        count = sum(images[rank].lost for rank in lost)
        gaps.append(
            f"{count:,} events of {name_ranks(lost)} are missing: others took their places in the ring, which has room "
            f"for {images[lost[0]].capacity:,}, before they were read"
        )
    if timeline.left_out:
        gaps.append(
            f"arrows that are left out, since they are shorter than the clocks are certain: {timeline.left_out:,}"
        )
    return gaps


def ask_images(job: str | None, ranks: Iterable[int] | None = None) -> tuple[dict[int, RankImage], dict[int, str]]:
    """Return the images of a job's ranks and, by rank, why one is missing.  Raises ``LaunchError`` if there is none."""
    from asyncpar.observe.image import read_image

    contents, silent = ask_rings(job, ranks)
    return {rank: read_image(content) for rank, content in contents.items()}, silent


def ask_rings(job: str | None, ranks: Iterable[int] | None = None) -> tuple[dict[int, bytes], dict[int, str]]:
    """Return the same as ``ask_images``, with the bytes in place of images."""
    from asyncpar.errors import ProtocolError
    from asyncpar.observe.image import read_image

    _, reply = ask_job(job, "image", ranks)
    contents: dict[int, bytes] = {}
    silent: dict[int, str] = {}
    for answer in reply.ranks:
        try:
            if answer.error:
                raise ProtocolError(answer.error)
            read_image(answer.content)
        except ProtocolError as error:
            silent[answer.rank] = str(error)
        else:
            contents[answer.rank] = answer.content
    if not contents:
        why = "; ".join(f"rank {rank}: {text}" for rank, text in sorted(silent.items())) or "it has none here"
        raise LaunchError(f"no rank of the job has reported what it does: {why}")
    return contents, silent


def _describe(timeline: Timeline, output: Path, nbytes: int) -> str:
    start = min((one.begun for one in timeline.slices), default=0.0)
    end = max((one.ended for one in timeline.slices), default=0.0)
    off = max((offset.uncertainty for offset in timeline.offsets.values()), default=0.0)
    clocks = f", clocks aligned within {1e6 * off:.0f} us" if off else ""
    return (
        f"{output}: {len(timeline.slices)} events of {len(timeline.ranks)} ranks in {end - start:.1f} s, "
        f"{len(timeline.arrows)} arrows, {nbytes / 1e6:.1f} MB{clocks}"
    )
