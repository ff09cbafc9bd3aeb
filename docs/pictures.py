"""Pictures of the site as SVG, drawn of plans and simulated runs when it is built."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

import asyncpar as ap
from asyncpar.collectives.algorithms.hierarchical import all_reduce_by_ring, chunks_by_ring
from asyncpar.collectives.algorithms.steps import Send
from asyncpar.core.observe.records import EventKind
from asyncpar.gradsync import GradientBucketingConfig, GradientSynchronizer
from asyncpar.gradsync.plan import GradientSpec, plan_buckets
from asyncpar.observe.image import read_image
from asyncpar.pipeline import make_schedule
from asyncpar.pipeline import simulate as simulate_schedule
from asyncpar.testing.simulation import Conditions, simulate

_COLOURS = {"forward": "#2563eb", "backward": "#d97706", "backward_input": "#d97706", "backward_weight": "#65a30d"}
_BUCKETS = ("#2563eb", "#65a30d", "#9333ea", "#0e7490", "#be185d")
_SHARED, _BETWEEN = "#65a30d", "#d97706"
_SCALE, _ROW, _MILLISECOND = 24, 26, 14
_STEP_RIGHT, _STEP_DOWN, _MARGIN = 170, 70, 70
_BANDWIDTH = 8e8


def _figure(title: str, width: float, height: float, parts: Iterable[str]) -> str:
    return (
        f'<figure><svg viewBox="0 0 {width:g} {height:g}" style="max-width: {width:g}px; width: 100%" font-size="12" '
        f'role="img" aria-label="{title}">{"".join(parts)}</svg><figcaption>{title}</figcaption></figure>'
    )


def _label(row: int, text: str) -> str:
    return f'<text x="0" y="{row * _ROW + 17}" fill="currentColor">{text}</text>'


def _box(row: int, x: float, width: float, colour: str, text: str, hint: str) -> str:
    """Return a box of a timeline, with ``text`` inside; ``hint`` shows under the mouse."""
    return (
        f'<rect x="{x:g}" y="{row * _ROW + 2}" width="{width - 1:g}" height="22" fill="{colour}">'
        f"<title>{hint}</title></rect>"
        f'<text x="{x + width / 2:g}" y="{row * _ROW + 17}" fill="#fff" text-anchor="middle">{text}</text>'
    )


def draw_schedule(name: str, num_stages: int, num_microbatches: int) -> str:
    """Return the timeline of a simulated schedule as SVG: a row per rank, a box with its micro-batch per operation."""
    simulated = simulate_schedule(make_schedule(name, num_stages=num_stages, num_microbatches=num_microbatches))
    parts = []
    for rank, spans in enumerate(simulated.spans):
        parts.append(_label(rank, f"rank {rank}"))
        for span in spans:
            x, width = 56 + span.start * _SCALE, (span.end - span.start) * _SCALE
            kind, number = str(span.operation.kind), str(span.operation.micro_batch)
            parts.append(_box(rank, x, width, _COLOURS[kind], number, f"{kind} of micro-batch {number}"))
    title = f"{name}: {simulated.bubble_fraction:.0%} of the time is idle"
    return _figure(title, 60 + simulated.makespan * _SCALE, num_stages * _ROW, parts)


@dataclass(frozen=True, slots=True)
class _Stretch:
    """A part of a step, of a layer or of a ``bucket``; in milliseconds from the step's beginning."""

    name: str
    bucket: int
    begun: float
    ended: float


@dataclass(frozen=True, slots=True)
class _SimulatedStep:
    """The backward pass and the buckets of a gradient step on rank 0, and the part of communication that is hidden."""

    layers: list[_Stretch]
    buckets: list[_Stretch]
    hidden: float


def _simulate_step(num_layers: int, bucket_mb: int, ranks: int) -> _SimulatedStep:
    """Take a step of ``GradientSynchronizer`` on simulated ``ranks``; a layer has 1 MiB of gradients and takes 4 ms."""
    gradients = {f"layer {index}": np.ones(1 << 18, np.float32) for index in range(num_layers)}
    specs = [GradientSpec(name=name, shape=each.shape, dtype=each.dtype) for name, each in gradients.items()]
    plan = plan_buckets(specs, bucket_bytes=bucket_mb << 20, max_buckets=num_layers)
    places = {slot.name: bucket.index for bucket in plan.buckets for slot in bucket.slots}

    async def main(node: ap.Node) -> _SimulatedStep:
        bucketing = GradientBucketingConfig(bucket_size_mb=bucket_mb, max_buckets=num_layers)
        synchronizer = GradientSynchronizer.data_parallel(node.world, bucketing=bucketing)
        own = {name: each.copy() for name, each in gradients.items()}
        await synchronizer.reserve(own)
        await node.world.barrier()
        clock = asyncio.get_running_loop().time
        start, layers = clock(), list[_Stretch]()
        async with synchronizer.step(own) as step:
            for name in reversed(own):
                begun = clock() - start
                await asyncio.sleep(0.004)
                step.ready(name)
                layers.append(_Stretch(name, places[name], begun * 1e3, (clock() - start) * 1e3))
        events = [each for each in read_image(node.links.recorder.snapshot()).events if each.kind == EventKind.BUCKET]
        buckets = [
            _Stretch(each.name, index, (each.created - start) * 1e3, (each.ended or clock()) * 1e3 - start * 1e3)
            for index, each in enumerate(events)
        ]
        return _SimulatedStep(layers, buckets, synchronizer.get_sync_stats().overlap_fraction)

    result: _SimulatedStep = simulate(main, size=ranks, conditions=Conditions(bandwidth=_BANDWIDTH)).results[0]
    return result


def draw_buckets(num_layers: int, bucket_mb: int, ranks: int) -> str:
    """Return the timeline of a simulated gradient step as SVG: the backward pass, and a row per bucket below."""
    step = _simulate_step(num_layers, bucket_mb, ranks)
    parts = [_label(0, "backward")]
    for row, one in [(0, layer) for layer in step.layers] + [(1 + each.bucket, each) for each in step.buckets]:
        if row:
            parts.append(_label(row, one.name))
        x, width = 64 + one.begun * _MILLISECOND, (one.ended - one.begun) * _MILLISECOND
        hint = f"{one.name}: {one.begun:.1f} ms to {one.ended:.1f} ms"
        text = f"{one.ended - one.begun:.0f} ms" if row else one.name
        parts.append(_box(row, x, width, _BUCKETS[one.bucket % len(_BUCKETS)], text, hint))
    end = max(one.ended for one in step.buckets)
    title = (
        f"A gradient step of {ranks} simulated ranks, as rank 0 sees it: {len(step.buckets)} buckets, "
        f"{step.hidden:.0%} of the communication is hidden behind the backward pass"
    )
    return _figure(title, 68 + end * _MILLISECOND, (1 + len(step.buckets)) * _ROW, parts)


def draw_topology(*ranks_per_host: int) -> str:
    """Return hosts, their ranks and the lanes of a hierarchical all-reduce as SVG; hints tell the traffic."""
    starts = [sum(ranks_per_host[:index]) for index in range(len(ranks_per_host))]
    hosts = tuple(tuple(range(start, start + size)) for start, size in zip(starts, ranks_per_host, strict=True))
    places = {rank: (host, at) for host, ranks in enumerate(hosts) for at, rank in enumerate(ranks)}
    chunks = chunks_by_ring(hosts)
    sent: Counter[tuple[int, int]] = Counter()
    for rank in places:
        for one in (step for each in all_reduce_by_ring(rank, hosts) for step in each if isinstance(step, Send)):
            sent[min(rank, one.peer), max(rank, one.peer)] += sum(part.stop - part.start for part in one.chunks)
    height = _MARGIN + 46 + (max(ranks_per_host) - 1) * _STEP_DOWN
    parts = [_host(host, len(ranks)) for host, ranks in enumerate(hosts)]
    parts += [_lane(places[one], places[other], (one, other), count / chunks) for (one, other), count in sent.items()]
    parts += [_rank(rank, *place) for rank, place in places.items()]
    leaving = sum(count for (one, other), count in sent.items() if places[one][0] != places[other][0])
    title = (
        f"{len(hosts)} hosts: ranks of one share memory (green), lanes between hosts are TCP (orange). "
        f"Of a hierarchical all-reduce each host sends {leaving / chunks / len(hosts):.2f} times the array to others"
    )
    return _figure(title, len(hosts) * _STEP_RIGHT, height, parts)


def _centre(host: int, at: int) -> tuple[float, float]:
    return (host + 0.5) * _STEP_RIGHT, _MARGIN + at * _STEP_DOWN


def _host(host: int, size: int) -> str:
    (x, top), (_, bottom) = _centre(host, 0), _centre(host, size - 1)
    return (
        f'<rect x="{x - 50:g}" y="{top - 66:g}" width="100" height="{bottom - top + 108:g}" rx="8" fill="none" '
        f'stroke="currentColor" stroke-opacity="0.5"/>'
        f'<text x="{x:g}" y="{top - 46:g}" fill="currentColor" text-anchor="middle">host {host}</text>'
    )


def _rank(rank: int, host: int, at: int) -> str:
    x, y = _centre(host, at)
    return (
        f'<circle cx="{x:g}" cy="{y:g}" r="15" fill="#2563eb"/>'
        f'<text x="{x:g}" y="{y + 4:g}" fill="#fff" text-anchor="middle">{rank}</text>'
    )


def _lane(one: tuple[int, int], other: tuple[int, int], ranks: tuple[int, int], share: float) -> str:
    """Return the lane between two places, bent where others are between them."""
    (x, y), (to_x, to_y) = _centre(*one), _centre(*other)
    is_inside = one[0] == other[0]
    hosts, rows = other[0] - one[0], other[1] - one[1]
    bend_x = 36.0 * (abs(rows) - 1) if is_inside else 0.0
    bend_y = 0.0 if is_inside else 60.0 * (hosts - 1) * (1 if one[1] else -1)
    kind, colour = ("shared memory", _SHARED) if is_inside else ("TCP", _BETWEEN)
    return (
        f'<path d="M{x:g} {y:g} Q{(x + to_x) / 2 + bend_x:g} {(y + to_y) / 2 + bend_y:g} {to_x:g} {to_y:g}" '
        f'fill="none" stroke="{colour}" stroke-width="3">'
        f"<title>rank {ranks[0]} and rank {ranks[1]}, {kind}: {share:.2f} times the array</title></path>"
    )
