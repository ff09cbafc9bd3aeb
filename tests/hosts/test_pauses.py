"""Probes of processes that may be stopped: one connection shows it as long as the pause lasts."""

from __future__ import annotations

import contextlib
import socket

import pytest

from asyncpar.hosts import pauses

_PROBES = 8


async def test_a_pause_is_seen_however_long_it_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pauses, "STOPPED_SECONDS", 0.02)
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server:  # as of a process that accepts nothing any more
        address = f"127.0.0.1:{server.getsockname()[1]}"
        async with contextlib.aclosing(pauses.PauseProbe(address)) as probe:
            assert [await probe.is_stopped() for _ in range(_PROBES)] == [True] * _PROBES
            server.close()  # it was killed
            assert not await probe.is_stopped()
            assert not await probe.is_stopped()


async def test_a_process_that_runs_again_and_stops_again_is_probed_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pauses, "STOPPED_SECONDS", 0.02)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        async with contextlib.aclosing(pauses.PauseProbe(address)) as probe:
            assert await probe.is_stopped()
            server.accept()[0].close()  # it runs
            assert not await probe.is_stopped()
            assert await probe.is_stopped()
