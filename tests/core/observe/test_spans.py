"""Spans of users are in the event ring of their node: under way, over, failed."""

from __future__ import annotations

import asyncio

import pytest

import asyncpar as ap
from asyncpar.core.observe.records import EventKind, EventState
from asyncpar.node import Node
from asyncpar.observe.image import Event, read_image
from asyncpar.testing.world import local_world


def spans(node: Node) -> list[Event]:
    image = read_image(node.links.recorder.snapshot())
    return [event for event in image.events if event.kind is EventKind.SPAN]


async def test_a_span_is_there_while_it_lasts_and_afterwards() -> None:
    async with local_world(1) as (node,):
        with ap.span("load", batch=7):
            (event,) = spans(node)
            assert (event.name, event.text, event.is_over) == ("load", "batch=7", False)
            assert event.site is not None
            assert event.site.file == __file__
        async with ap.span("evaluate"):
            await asyncio.sleep(0)
        with pytest.raises(ZeroDivisionError), ap.span("divide"):
            _ = 1 / 0
        with pytest.raises(asyncio.CancelledError), ap.span("wait"):
            raise asyncio.CancelledError
        assert [(event.name, event.state) for event in spans(node)] == [
            ("load", EventState.COMPLETED),
            ("evaluate", EventState.COMPLETED),
            ("divide", EventState.FAILED),
            ("wait", EventState.CANCELLED),
        ]


def test_without_a_node_a_span_does_nothing() -> None:
    with ap.span("load"):
        pass


async def test_a_span_that_outlives_its_node_harms_nothing() -> None:
    span = ap.span("outer")
    async with local_world(1) as (node,):
        span.__enter__()
        ring = node.links.recorder
    span.__exit__(None, None, None)
    assert [event.state for event in read_image(ring.snapshot()).events][-1] is EventState.CANCELLED
