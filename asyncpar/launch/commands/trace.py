"""`asyncpar trace`: one timeline of all ranks, for Perfetto or Chrome's viewer."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

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
"""Events of all ranks together; a trace of so many has about 50 MB."""


@click.command(cls=OneLineCommand)
@option("--seconds", metavar="S", type=float, default=5.0, help="How long to record, from now on.  [5]")
@option("--output", "-o", metavar="FILE", default="trace.pftrace", help="Where to write it.  [trace.pftrace]")
@option("--ranks", "-r", "ranks", metavar="N,...", multiple=True, help="Of these ranks only: 0,2 or 4-7.")
@option("--json", "as_json", is_flag=True, help="Write Chrome's JSON instead of Perfetto's own format.")
@click.argument("job", required=False, default=None)
def trace(job: str | None, seconds: float, output: str, ranks: tuple[str, ...], *, as_json: bool) -> None:
    """Record what all ranks do, and write it as one timeline.

    Operations, messages with arrows, calls of actors and spans, on one clock.
    Open the file at https://ui.perfetto.dev (it stays on your machine) or in
    chrome://tracing (with --json).  What the ranks still remember of the time
    before is in it, too: the last 4,096 events of each.  Events of a rank that
    has more than about 8,000 a second are missing in part; it says how many.
    """
    exit_with("trace", lambda: _trace(job, seconds, Path(output), ranks, as_json=as_json))


def _trace(job: str | None, seconds: float, output: Path, ranks: tuple[str, ...], *, as_json: bool) -> int:
    from asyncpar.observe.perfetto import encode_chrome, encode_perfetto
    from asyncpar.observe.timeline import make_timeline

    if not 0.0 <= seconds <= _MOST_SECONDS:
        raise UsageError(f"--seconds: expected up to {_MOST_SECONDS:.0f}, got {seconds:g}")
    images, silent = _record(job, seconds, parse_ranks(ranks))
    timeline = make_timeline(images)
    content = encode_chrome(timeline) if as_json else encode_perfetto(timeline)
    write_result(output, content)
    print_line(_describe(timeline, output, len(content)))
    for gap in describe_gaps(images, timeline, seconds):
        print_line(gap, err=True)
    for rank, why in sorted(silent.items()):
        print_line(f"rank {rank} is not in it: {why}", err=True)
    return 0


def _record(
    job: str | None, seconds: float, ranks: Iterable[int] | None
) -> tuple[dict[int, RankImage], dict[int, str]]:
    """Look at the rings until the time is over; return what they said, and by rank why there is nothing."""
    from asyncpar.observe.timeline import merge_images

    images: dict[int, RankImage] = {}
    deadline = time.monotonic() + seconds
    while True:
        found, silent = ask_images(job, ranks)
        for rank, image in found.items():
            images[rank] = merge_images(images.get(rank), image)
        left = deadline - time.monotonic()
        if left <= 0.0 or _count(images) > _MOST_EVENTS:
            return images, {rank: why for rank, why in silent.items() if rank not in images}
        time.sleep(min(_LOOK_SECONDS, left))


def _count(images: Mapping[int, RankImage]) -> int:
    return sum(len(image.events) for image in images.values())


def describe_gaps(images: Mapping[int, RankImage], timeline: Timeline, seconds: float) -> list[str]:
    """Return what a trace of so many ``seconds`` lacks, in sentences."""
    gaps = []
    if _count(images) > _MOST_EVENTS:
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
    """Return the images of a job's ranks, and by rank why there is none.  Raises ``LaunchError`` if there is none."""
    from asyncpar.observe.image import read_image

    contents, silent = ask_rings(job, ranks)
    return {rank: read_image(content) for rank, content in contents.items()}, silent


def ask_rings(job: str | None, ranks: Iterable[int] | None = None) -> tuple[dict[int, bytes], dict[int, str]]:
    """Do as ``ask_images``, but return the bytes."""
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
        raise LaunchError(f"no rank of the job has told what it does: {why}")
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
