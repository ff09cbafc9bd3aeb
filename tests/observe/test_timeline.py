"""Timelines of all ranks: clocks aligned, every arrow there and none backwards, and traces that other tools read."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

import asyncpar as ap
from asyncpar.core.observe.records import EventKind
from asyncpar.node import Node
from asyncpar.observe.clocks import align_clocks
from asyncpar.observe.image import RankImage, read_image
from asyncpar.observe.perfetto import encode_chrome, encode_perfetto
from asyncpar.observe.timeline import Timeline, make_timeline, merge_images, print_timeline
from asyncpar.testing.loop import run_virtual
from asyncpar.testing.world import local_world

SKEWS = {0: 0.0, 1: 5.0, 2: -5.0, 3: 1e5}
"""Seconds by which the clocks of ranks are ahead."""


class Echo(ap.Actor):
    @ap.endpoint
    async def say(self, words: str) -> str:
        await asyncio.sleep(0)
        return words


async def run(node: Node) -> None:
    for step in range(5):
        await node.world.all_reduce(np.zeros(100, np.float32))
        after, before = (node.rank + 1) % node.size, (node.rank - 1) % node.size
        await asyncio.gather(node.world.send(np.zeros(9), after), node.world.recv(before))
        assert await node.ref("echo", after).say(f"{step}") == f"{step}"
    await node.world.barrier()


async def images_of_a_run() -> dict[int, RankImage]:
    async with local_world(4) as nodes:
        await asyncio.gather(*(node.spawn(Echo, name="echo") for node in nodes))
        await asyncio.gather(*(run(node) for node in nodes))
        return {node.rank: read_image(node.links.recorder.snapshot()) for node in nodes}


def skewed(image: RankImage, seconds: float) -> RankImage:
    """Return ``image`` as a rank of a host of its own had recorded it, whose clock is ahead."""
    events = tuple(
        msgspec.structs.replace(
            event, created=event.created + seconds, ended=None if event.ended is None else event.ended + seconds
        )
        for event in image.events
    )
    identity = msgspec.structs.replace(image.identity, clock_domain=f"host of rank {image.rank}")
    return replace(image, events=events, identity=identity)


async def test_clocks_are_aligned_by_what_ranks_do_together() -> None:
    images = await images_of_a_run()
    offsets = align_clocks({rank: skewed(image, SKEWS[rank]) for rank, image in images.items()})
    for rank, offset in offsets.items():
        assert offset.seconds == pytest.approx(-SKEWS[rank], abs=offset.uncertainty + 1e-6)
        assert offset.uncertainty < 0.1


async def test_every_arrow_is_there_and_none_points_backwards_with_clocks_apart() -> None:
    images = await images_of_a_run()
    timeline = make_timeline({rank: skewed(image, SKEWS[rank]) for rank, image in images.items()})
    kinds = [arrow.source.event.kind for arrow in timeline.arrows]
    assert (kinds.count(EventKind.SEND), kinds.count(EventKind.ASK)) == (20, 20)
    assert timeline.backwards == 0
    assert all(arrow.begun <= arrow.ended for arrow in timeline.arrows)


def test_clocks_of_hosts_with_nothing_in_common_go_by_the_time_of_the_day() -> None:
    async def alone() -> dict[int, RankImage]:
        async with local_world(2) as nodes:
            return {node.rank: read_image(node.links.recorder.snapshot()) for node in nodes}

    images = run_virtual(alone())
    offsets = align_clocks({rank: skewed(image, 0.0) for rank, image in images.items()})
    assert offsets[1].uncertainty >= 1.0
    assert align_clocks({}) == {}


async def test_slices_of_one_track_nest() -> None:
    timeline = make_timeline(await images_of_a_run())
    for rank in timeline.ranks:
        lanes: dict[tuple[str, int], list[float]] = {}
        for one in timeline.slices:
            if one.rank == rank:
                ends = lanes.setdefault((one.track, one.lane), [])
                while ends and ends[-1] <= one.begun:
                    ends.pop()
                assert not ends or one.ended <= ends[-1]
                ends.append(one.ended)


async def test_merging_images_completes_what_was_under_way() -> None:
    async with local_world(1) as (node,):
        with ap.span("load"):
            first = read_image(node.links.recorder.snapshot())
        with ap.span("later"):
            pass
        merged = merge_images(first, read_image(node.links.recorder.snapshot()))
        assert [(event.name, event.is_over) for event in merged.events] == [
            ("world 0 of 1 ranks", True),
            ("load", True),
            ("later", True),
        ]


def test_in_virtual_time_the_printed_timeline_is_always_the_same() -> None:
    async def main() -> str:
        async with local_world(2, trace=True) as world:

            async def step(node: Node) -> None:
                with node.span("compute", step=1):
                    await asyncio.sleep(1.0 + node.rank)
                await node.world.all_reduce(np.zeros(4, np.float32))

            await asyncio.gather(*(step(node) for node in world))
            return print_timeline(make_timeline({n.rank: read_image(n.links.recorder.snapshot()) for n in world}))

    first, second = run_virtual(main()), run_virtual(main())
    assert first == second
    assert first.splitlines() == [
        "0.000-0.000  rank 0  world 0 of 2 ranks",
        "0.000-1.000  rank 0  compute",
        "0.000-0.000  rank 1  world 0 of 2 ranks",
        "0.000-2.000  rank 1  compute",
        "1.000-2.000  rank 0  all_reduce #1  (bytes 16)",
        "2.000-2.000  rank 1  all_reduce #1  (bytes 16)",
    ]


# -- formats -------------------------------------------------------------------------------------------------------


def message_class() -> Any:
    """Return the class of a Perfetto trace, with the fields that Perfetto's own description has."""
    kinds = descriptor_pb2.FieldDescriptorProto
    one, many = kinds.LABEL_OPTIONAL, kinds.LABEL_REPEATED
    u64, f64, text, i32, i64 = (
        kinds.TYPE_UINT64,
        kinds.TYPE_FIXED64,
        kinds.TYPE_STRING,
        kinds.TYPE_INT32,
        kinds.TYPE_INT64,
    )
    shapes: dict[str, list[tuple[str, int, int, int, str]]] = {
        "Trace": [("packet", 1, many, kinds.TYPE_MESSAGE, "TracePacket")],
        "TracePacket": [
            ("timestamp", 8, one, u64, ""),
            ("trusted_packet_sequence_id", 10, one, kinds.TYPE_UINT32, ""),
            ("track_event", 11, one, kinds.TYPE_MESSAGE, "TrackEvent"),
            ("track_descriptor", 60, one, kinds.TYPE_MESSAGE, "TrackDescriptor"),
        ],
        "TrackDescriptor": [
            ("uuid", 1, one, u64, ""),
            ("process", 3, one, kinds.TYPE_MESSAGE, "ProcessDescriptor"),
            ("thread", 4, one, kinds.TYPE_MESSAGE, "ThreadDescriptor"),
            ("parent_uuid", 5, one, u64, ""),
        ],
        "ProcessDescriptor": [("pid", 1, one, i32, ""), ("process_name", 6, one, text, "")],
        "ThreadDescriptor": [("pid", 1, one, i32, ""), ("tid", 2, one, i32, ""), ("thread_name", 5, one, text, "")],
        "TrackEvent": [
            ("debug_annotations", 4, many, kinds.TYPE_MESSAGE, "DebugAnnotation"),
            ("type", 9, one, i32, ""),
            ("track_uuid", 11, one, u64, ""),
            ("categories", 22, many, text, ""),
            ("name", 23, one, text, ""),
            ("flow_ids", 47, many, f64, ""),
            ("terminating_flow_ids", 48, many, f64, ""),
        ],
        "DebugAnnotation": [
            ("int_value", 4, one, i64, ""),
            ("string_value", 6, one, text, ""),
            ("name", 10, one, text, ""),
        ],
    }
    file = descriptor_pb2.FileDescriptorProto(name="trace.proto", package="p", syntax="proto2")
    for name, fields in shapes.items():
        shape = file.message_type.add(name=name)
        for field, number, label, kind, of in fields:
            shape.field.add(name=field, number=number, label=label, type=kind, type_name=f".p.{of}" if of else None)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("p.Trace"))


async def test_the_native_trace_has_all_slices_and_arrows() -> None:
    timeline = make_timeline(await images_of_a_run())
    trace = message_class().FromString(encode_perfetto(timeline))
    events = [packet.track_event for packet in trace.packet if packet.HasField("track_event")]
    tracks = {packet.track_descriptor.uuid for packet in trace.packet if packet.HasField("track_descriptor")}
    assert (
        [event.type for event in events].count(1) == [event.type for event in events].count(2) == len(timeline.slices)
    )
    assert {event.track_uuid for event in events} <= tracks
    out = {flow: p.timestamp for p in trace.packet for flow in p.track_event.flow_ids}
    into = {flow: p.timestamp for p in trace.packet for flow in p.track_event.terminating_flow_ids}
    assert len(timeline.arrows) == 40
    assert out.keys() == into.keys() == {arrow.number for arrow in timeline.arrows}
    assert all(out[flow] <= into[flow] for flow in out)
    assert {p.track_descriptor.process.process_name for p in trace.packet} >= {
        f"rank {rank} (localhost)" for rank in range(4)
    }
    assert {len(event.name) > 0 for event in events if event.type == 1} == {True}


async def test_the_packets_of_a_trace_are_in_the_order_of_time_and_arrows_begin_before_they_end() -> None:
    trace = message_class().FromString(encode_perfetto(make_timeline(await images_of_a_run())))
    events = [packet for packet in trace.packet if packet.HasField("track_event")]
    assert [event.timestamp for event in events] == sorted(event.timestamp for event in events)
    begun: set[int] = set()
    for event in events:
        begun |= set(event.track_event.flow_ids)
        assert begun >= set(event.track_event.terminating_flow_ids)


async def test_chromes_json_has_all_slices_and_arrows() -> None:
    timeline: Timeline = make_timeline(await images_of_a_run())
    events = json.loads(encode_chrome(timeline))["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    assert len(slices) == len(timeline.slices)
    sources = {event["id"]: event for event in events if event["ph"] == "s"}
    sinks = {event["id"]: event for event in events if event["ph"] == "f"}
    assert len(sources) == len(sinks) == 40
    assert all(sources[number]["ts"] <= sinks[number]["ts"] for number in sources)
    for flow in (*sources.values(), *sinks.values()):
        assert any(
            (one["pid"], one["tid"]) == (flow["pid"], flow["tid"])
            and one["ts"] <= flow["ts"] <= one["ts"] + one["dur"] + 1e-3
            for one in slices
        )
