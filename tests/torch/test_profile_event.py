"""Operations in torch's profilers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.torch.worlds import on_ranks


@on_ranks(2)
def test_each_operation_is_an_event_with_the_shapes_of_its_inputs() -> None:
    x, wide = torch.ones(3, 4), torch.empty(6, 4)
    with torch.autograd.profiler.profile(record_shapes=True) as profile:
        dist.all_reduce(x)
        dist.all_gather_single(wide, x)
        dist.reduce_scatter_single(torch.empty(3, 4), wide)
        works = [dist.broadcast(x, 0, async_op=True), dist.barrier(async_op=True)]
        for work in works:
            assert work is not None
            work.wait()

    torch.testing.assert_close(
        _shapes(profile),
        {
            "all_reduce": [[3, 4]],
            "all_gather_into_tensor": [[3, 4]],
            "reduce_scatter_tensor": [[6, 4]],
            "broadcast": [[3, 4]],
            "barrier": [],
        },
    )


@on_ranks(2)
def test_events_of_sends_and_receives_are_asynchronous() -> None:
    x = torch.ones(5)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        if dist.get_rank() == 0:
            dist.send(x, 1)
        else:
            dist.recv(x)

    name = "send" if dist.get_rank() == 0 else "recvAnySource"
    torch.testing.assert_close(_shapes(profile), {name: [[5]]})
    if not all(event.is_async for event in _events(profile)):
        raise AssertionError("an event ended in the thread where it began")


@on_ranks(2)
def test_the_event_of_a_failed_operation_ends() -> None:
    with (
        torch.autograd.profiler.profile(record_shapes=True) as profile,
        pytest.raises(ValueError, match=r"float32\[2\].*float32\[3\]"),
    ):
        dist.all_reduce(torch.ones(2 + dist.get_rank()))

    torch.testing.assert_close(_shapes(profile), {"all_reduce": [[2 + dist.get_rank()]]})


def _events(profile: Any) -> list[Any]:
    events = profile.function_events if isinstance(profile, torch.autograd.profiler.profile) else profile.events()
    return [event for event in events if event.name.startswith("asyncpar:")]


def _shapes(profile: Any) -> dict[str, Any]:
    return {event.name.removeprefix("asyncpar:"): event.input_shapes for event in _events(profile)}
