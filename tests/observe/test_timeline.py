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
from asyncpar.core.observe.records import EventKind, EventState, RankIdentity
from asyncpar.node import Node
from asyncpar.observe.clocks import align_clocks
from asyncpar.observe.image import Event, RankImage, read_image
from asyncpar.observe.perfetto import encode_chrome, encode_perfetto
from asyncpar.observe.timeline import Timeline, cut_timeline, make_timeline, merge_images, print_timeline
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


def skewed(image: RankImage, seconds: float, host: int | None = None) -> RankImage:
    """Return ``image`` as a rank of ``host`` (None: one of its own) had recorded it, whose clock is ahead."""
    events = tuple(
        msgspec.structs.replace(
            event, created=event.created + seconds, ended=None if event.ended is None else event.ended + seconds
        )
        for event in image.events
    )
    identity = msgspec.structs.replace(image.identity, clock_domain=f"host {image.rank if host is None else host}")
    return replace(image, events=events, identity=identity)


async def test_clocks_are_aligned_by_what_ranks_do_together() -> None:
    images = await images_of_a_run()
    offsets = align_clocks({rank: skewed(image, SKEWS[rank]) for rank, image in images.items()}).offsets
    for rank, offset in offsets.items():
        assert offset.seconds == pytest.approx(-SKEWS[rank], abs=offset.uncertainty + 1e-6)
        assert offset.uncertainty < 0.1


def on_two_hosts(images: dict[int, RankImage]) -> dict[int, RankImage]:
    """Return ``images`` of four ranks as those of two hosts, whose clocks are 5 s apart."""
    return {rank: skewed(image, 5.0 * (rank // 2), host=rank // 2) for rank, image in images.items()}


async def test_every_arrow_is_there_and_none_points_backwards_with_clocks_apart() -> None:
    images = await images_of_a_run()
    timeline = make_timeline(on_two_hosts(images))
    kinds = [arrow.source.event.kind for arrow in timeline.arrows]
    assert (kinds.count(EventKind.SEND), kinds.count(EventKind.ASK)) == (20, 20)
    assert timeline.left_out == 0
    assert all(arrow.begun <= arrow.ended for arrow in timeline.arrows)
    apart = make_timeline({rank: skewed(image, SKEWS[rank]) for rank, image in images.items()})
    assert (len(apart.arrows), apart.left_out) == (40, 0)
    assert all(arrow.begun <= arrow.ended for arrow in apart.arrows)


def test_clocks_of_hosts_with_nothing_in_common_go_by_the_time_of_the_day() -> None:
    async def alone() -> dict[int, RankImage]:
        async with local_world(2) as nodes:
            return {node.rank: read_image(node.links.recorder.snapshot()) for node in nodes}

    images = run_virtual(alone())
    offsets = align_clocks({rank: skewed(image, 0.0) for rank, image in images.items()}).offsets
    assert offsets[1].uncertainty >= 1.0
    assert align_clocks({}).offsets == {}


def exchanged(*messages: tuple[int, float, int, float]) -> dict[int, RankImage]:
    """Return images of ranks, each with a clock of its own, that exchanged messages: sent by whom when, received."""
    events: dict[int, list[Event]] = {rank: [] for rank in range(1 + max(max(one[0], one[2]) for one in messages))}
    for number, (source, sent, sink, received) in enumerate(messages, 1):
        for rank, kind, begun, ended in (
            (source, EventKind.SEND, sent, sent + 1e-5),
            (sink, EventKind.RECEIVE, received - 1e-5, received),
        ):
            events[rank].append(
                Event(
                    ticket=len(events[rank]),
                    kind=kind,
                    state=EventState.COMPLETED,
                    created=begun,
                    ended=ended,
                    name="message",
                    group=1,
                    sequence=number,
                )
            )
    return {
        rank: RankImage(RankIdentity(rank=rank, size=len(events), clock_domain=f"host of rank {rank}"), tuple(of_rank))
        for rank, of_rank in events.items()
    }


def test_an_arrow_as_short_as_the_clocks_are_uncertain_is_there() -> None:
    timeline = make_timeline(exchanged((0, 1.0, 1, 6.001), (1, 6.5, 0, 1.503), (0, 2.0, 1, 7.004)))
    assert timeline.offsets[1].uncertainty == pytest.approx(0.002)
    assert sorted(round(arrow.ended - arrow.begun, 6) for arrow in timeline.arrows) == [0.002, 0.002, 0.005]
    assert timeline.left_out == 0


def test_between_three_clocks_every_arrow_is_there() -> None:
    there_and_back = [(0, 1.0, 1, 6.001), (1, 7.0, 0, 2.001), (0, 3.0, 2, 0.001), (2, 1.0, 0, 4.001)]
    timeline = make_timeline(exchanged(*there_and_back, (1, 10.0, 2, 2.0005), (2, 3.0, 1, 11.0015)))
    arrows = {(one.source.rank, one.sink.rank): round(one.ended - one.begun, 6) for one in timeline.arrows}
    assert arrows == {(0, 1): 0.001, (1, 0): 0.001, (0, 2): 0.00125, (2, 0): 0.00075, (1, 2): 0.00075, (2, 1): 0.00125}
    assert timeline.left_out == 0
    assert [timeline.offsets[rank].seconds for rank in (1, 2)] == pytest.approx([-5.0, 3.00025])
    assert [timeline.offsets[rank].uncertainty for rank in (1, 2)] == pytest.approx([0.001, 0.00125])


def test_clocks_that_know_each_other_and_not_the_first_one_are_a_second_off() -> None:
    offsets = align_clocks(exchanged((1, 1.0, 2, 6.001), (2, 6.5, 1, 1.503), (0, 1.0, 0, 1.1))).offsets
    assert [offsets[rank].uncertainty for rank in (0, 1, 2)] == [0.0, 1.0, 1.0]
    assert offsets[2].seconds - offsets[1].seconds == pytest.approx(-4.999)


def test_an_arrow_that_is_shorter_than_the_clocks_are_uncertain_is_left_out() -> None:
    one_way = make_timeline(exchanged((0, 1.0, 1, 1.2), (0, 2.0, 1, 4.5)))  # nothing came back: a second of doubt
    assert [round(arrow.ended - arrow.begun, 6) for arrow in one_way.arrows] == [2.5]
    assert one_way.left_out == 1


def test_ranks_with_one_clock_are_certain() -> None:
    images = exchanged((0, 1.0, 1, 1.0), (0, 2.0, 1, 2.5))
    same = {rank: replace(image, identity=replace_domain(image, "here")) for rank, image in images.items()}
    assert len(make_timeline(same).arrows) == 2


def test_a_window_has_what_went_on_in_it_and_arrows_between_that() -> None:
    images = exchanged((0, 1.0, 1, 1.5), (0, 2.0, 1, 2.5), (0, 3.0, 1, 3.5))
    same = {rank: replace(image, identity=replace_domain(image, "here")) for rank, image in images.items()}
    waits = Event(
        ticket=9, kind=EventKind.COLLECTIVE, state=EventState.STARTED, created=1.9, ended=None, name="b", group=1
    )
    same[0] = replace(same[0], events=(*same[0].events, waits))
    same[1] = replace(same[1], events=(*same[1].events, msgspec.structs.replace(waits, created=2.2, ended=9.0)))
    window = cut_timeline(make_timeline(same), 2.1, 3.4)
    assert [(one.rank, one.begun, one.ended, one.is_open) for one in window.slices] == [
        (0, 2.1, 3.4, True),
        (1, 2.2, 3.4, True),
        (1, pytest.approx(2.5, abs=1e-4), 2.5, False),
        (0, 3.0, pytest.approx(3.0, abs=1e-4), False),
    ]
    assert window.arrows == ()
    (arrow,) = cut_timeline(make_timeline(same), 2.0, 2.6).arrows
    assert (arrow.begun, arrow.ended) == (2.0, 2.5)
    assert arrow.sink in window.slices


def replace_domain(image: RankImage, domain: str) -> RankIdentity:
    return msgspec.structs.replace(image.identity, clock_domain=domain)


def test_both_formats_say_how_certain_the_clocks_are() -> None:
    timeline = make_timeline(exchanged((0, 1.0, 1, 6.001), (1, 6.5, 0, 1.503)))
    chrome = json.loads(encode_chrome(timeline))["traceEvents"]
    native = message_class().FromString(encode_perfetto(timeline)).packet
    expected = {"rank 0", "rank 1, clock +-2000 us"}
    assert {event["args"]["name"] for event in chrome if event["name"] == "process_name"} == expected
    assert {packet.track_descriptor.process.process_name for packet in native} - {""} == expected


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


async def test_events_that_were_overwritten_between_two_inspections_are_counted() -> None:
    async with local_world(1) as (node,):
        recorder = node.links.recorder
        word = recorder.name("tick")

        def tick(count: int) -> RankImage:
            for _ in range(count):
                recorder.end(recorder.begin(EventKind.SPAN, word))
            return read_image(recorder.snapshot())

        with ap.span("whole"):
            first = tick(10)
            second = merge_images(first, tick(4000))
            assert (second.lost, len(second.events)) == (0, 4012)
            third = merge_images(second, tick(5000))
            missed = 5000 - 4095  # the place of the span that goes on is passed over
            assert (third.lost, len(third.events)) == (missed, 4012 + 5000 - missed)
            assert merge_images(third, tick(1)).lost == missed


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


def test_a_world_that_is_traced_prints_its_timeline_once_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    async def main() -> None:
        async with local_world(2, trace=True) as world:
            await asyncio.gather(*(node.world.barrier() for node in world))
            with world[1].span("alone"):
                await asyncio.sleep(0.5)
            assert capsys.readouterr().out == ""

    run_virtual(main())
    printed = capsys.readouterr()
    assert printed.err == ""
    assert printed.out.splitlines() == [
        "0.000-0.000  rank 0  world 0 of 2 ranks",
        "0.000-0.000  rank 0  barrier #1",
        "0.000-0.000  rank 1  world 0 of 2 ranks",
        "0.000-0.000  rank 1  barrier #1",
        "0.000-0.500  rank 1  alone",
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
