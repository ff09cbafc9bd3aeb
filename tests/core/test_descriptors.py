"""The reserve of file descriptors of a process, and its work when no descriptor is left."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
from collections.abc import Iterator

import pytest

from asyncpar.core.descriptors import (
    SpareDescriptor,
    accepted_at_once,
    descriptor_reserve,
    has_room,
    is_reserved,
    places,
    spare_descriptors,
)
from asyncpar.net.transport.stranger_limits import server_limits


@contextlib.contextmanager
def no_more_descriptors() -> Iterator[None]:
    """Let this process open nothing more."""
    with contextlib.ExitStack() as stack:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        highest = max(map(int, os.listdir("/proc/self/fd")))
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, hard))
        with contextlib.suppress(OSError):
            while True:
                stack.callback(os.close, os.open(os.devnull, os.O_RDONLY))
        yield


@pytest.mark.parametrize("limit", [256, 512, 1024, 4096, 65_536])
def test_all_listeners_of_a_rank_together_leave_the_reserve_while_they_are_flooded(limit: int) -> None:
    grpc = sum(dict(server_limits(limit, others))["grpc.max_allowed_incoming_connections"] for others in range(2))
    lanes = 2 * 2 * places(64, limit)  # TCP and Unix; a lane has a duplicate of its socket
    assert grpc + lanes <= spare_descriptors(limit)
    assert 2 * accepted_at_once(32, limit) < descriptor_reserve(limit)


def test_the_last_descriptors_are_reserved() -> None:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert not is_reserved(10)
    assert is_reserved(soft - 1)
    assert is_reserved(soft - descriptor_reserve(soft))
    assert not is_reserved(soft - descriptor_reserve(soft) - 1)


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc")
def test_a_spare_descriptor_duplicates_when_nothing_can_be_opened() -> None:
    here, there = socket.socketpair()
    spare = SpareDescriptor()
    with here, there, no_more_descriptors():
        assert not has_room(1)
        with pytest.raises(OSError, match="Too many open files"):
            os.dup(here.fileno())
        copy = spare.lend(here.fileno())
        os.write(copy, b"x")
        assert there.recv(1) == b"x"
        here.close()
        spare.take_back()
        assert there.recv(1) == b"", "nothing holds the connection any more"
    spare.close()
    assert has_room(4)
