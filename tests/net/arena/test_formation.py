"""Formation with ranks of this process: all of them or none, whatever goes wrong, and nothing is left behind."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import resource
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from asyncpar.errors import ArenaFull, PeerLost, UsageError
from asyncpar.net.arena import rendezvous
from asyncpar.net.arena.arena import Arena
from asyncpar.net.arena.formation import LocalSegment, contribute
from asyncpar.net.arena.formation_machine import Rendezvous, SegmentOffer
from asyncpar.net.arena.packet_socket import open_socket
from asyncpar.net.arena.segment import HEADER_BYTES
from asyncpar.net.arena.settings import ArenaSettings
from tests.net.arena.conftest import SECRET, SETTINGS, Events, Ranks, Run, settle
from tests.soak import chosen

REQUIRED = replace(SETTINGS, required=True)
HASTY = replace(SETTINGS, seconds=0.3)


def problems(caplog: pytest.LogCaptureFixture, level: int = logging.WARNING) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= level]


def failing_with(error: Exception) -> Callable[[int, ArenaSettings], LocalSegment]:
    def fail(_rank: int, _settings: ArenaSettings) -> LocalSegment:
        raise error

    return fail


async def check_shared(arenas: list[Arena]) -> None:
    """Everyone reads what everyone wrote."""
    for arena in arenas:
        arena.segments[arena.rank].words(HEADER_BYTES, 1)[0] = 100 + arena.rank
    members = arenas[0].members
    for arena in arenas:
        assert arena.members == members
        assert [arena.segments[rank].words(HEADER_BYTES, 1)[0] for rank in members] == [100 + rank for rank in members]


def close_all(arenas: list[Arena]) -> None:
    for arena in arenas:
        arena.close()


@pytest.mark.parametrize("size", [2, 3, 9])
def test_ranks_of_one_host_meet_and_share_memory(run: Run, size: int) -> None:
    async def main() -> None:
        arenas = await Ranks(size).form_all()
        await check_shared(arenas)
        assert [arena.rank for arena in arenas] == list(arenas[0].members) == list(range(size))
        assert [arena.polls for arena in arenas] == [True] * size
        assert not any(arena.may_spin for arena in arenas), "they share a process"
        close_all(arenas)

    run(main())


def test_each_host_has_an_arena_of_its_own(run: Run) -> None:
    async def main() -> None:
        arenas = await Ranks(5, hosts=("a", "b", "a", "b", "a")).form_all()
        assert [arena.members for arena in arenas] == [(0, 2, 4), (1, 3), (0, 2, 4), (1, 3), (0, 2, 4)]
        await check_shared(arenas[::2])
        await check_shared(arenas[1::2])
        close_all(arenas)

    run(main())


def test_a_roster_of_many_ranks_comes_in_parts(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "OFFERS_PER_MESSAGE", 2)

    async def main() -> None:
        arenas = await Ranks(5).form_all()
        await check_shared(arenas)
        close_all(arenas)

    run(main())


def test_a_convener_that_comes_late_is_waited_for(run: Run) -> None:
    async def main() -> None:
        ranks = Ranks(3)
        early = [asyncio.ensure_future(ranks.form(rank)) for rank in (2, 1)]
        done, _ = await asyncio.wait(early, timeout=0.05)
        assert not done
        arenas = await asyncio.gather(ranks.form(0), *early)
        assert None not in arenas
        close_all([arena for arena in arenas if arena is not None])

    run(main())


def test_buffers_of_one_rank_are_read_by_another(run: Run) -> None:
    async def main() -> None:
        arenas = await Ranks(2).form_all()
        array = arenas[1].empty((3, 4), np.float32)
        array[:] = 2.5
        offset = arenas[1].locate(array)
        assert offset is not None
        assert arenas[0].segments[1].heap_array(offset, 12, np.float32).tolist() == [2.5] * 12
        assert arenas[0].locate(array) is None
        close_all(arenas)

    run(main())


# -- none, and why -----------------------------------------------------------------------------------------------------


def test_a_rank_that_is_alone_on_its_host_has_none(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "asyncpar.net.arena")
    run(Ranks(2, hosts=("a", "b")).fail_all())
    assert problems(caplog, logging.INFO) == [
        "no arena on host a: rank 0 is alone there",
        "no arena on host b: rank 1 is alone there",
    ]
    assert problems(caplog) == []


def test_there_is_none_when_it_is_turned_off(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "asyncpar.net.arena")
    run(Ranks(3, settings=ArenaSettings(bytes=0, polls=True)).fail_all())
    assert problems(caplog, logging.INFO) == ["no arena on host here: it is turned off (ASYNCPAR_ARENA_BYTES)"]


@pytest.mark.parametrize(
    ("ranks", "problem"),
    [
        (Ranks(2, settings=replace(REQUIRED, bytes=0)), r"^arena: it is turned off"),
        (Ranks(2, settings=REQUIRED, hosts=("a", "b")), r"^arena: rank 0 is alone there"),
    ],
)
def test_when_one_is_required_it_is_an_error_that_there_is_none(run: Run, ranks: Ranks, problem: str) -> None:
    async def main() -> None:
        with pytest.raises(UsageError, match=problem):
            await ranks.form(0)

    run(main())


def test_a_world_of_one_needs_none(run: Run) -> None:
    run(Ranks(1, settings=REQUIRED).fail_all())


def test_on_another_system_there_is_none(
    run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("asyncpar.net.arena.formation.sys.platform", "darwin")
    run(Ranks(2).fail_all())
    assert problems(caplog) == ["no arena on host here, lanes will do: it needs Linux, this is darwin"]


@pytest.mark.parametrize("name", ["memfd_create", "pidfd_open"])
def test_where_the_system_lacks_a_call_there_is_none(
    run: Run, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr(os, name)
    run(Ranks(2).fail_all())
    (problem,) = problems(caplog)
    assert problem.endswith(f"lanes will do: rank 0: arena: this Python was built without os.{name}")


@pytest.mark.parametrize("unable", [0, 1, 2])
@pytest.mark.parametrize(
    "error", [ArenaFull("arena: no memory"), OSError(errno.ENOSYS, "arena: no memory")], ids=["full", "system"]
)
def test_a_rank_that_is_unable_makes_it_none_for_all(
    run: Run, unable: int, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    ranks = Ranks(3, contribute={unable: failing_with(error)})
    run(ranks.fail_all())
    assert problems(caplog) == [f"no arena on host here, lanes will do: rank {unable}: arena: no memory"]


def test_a_rank_that_is_unable_is_an_error_for_all_when_one_is_required(run: Run) -> None:
    async def main() -> None:
        full = ArenaFull("no memory")
        ranks = Ranks(3, settings=REQUIRED, contribute={1: failing_with(full)})
        errors = await asyncio.gather(*(ranks.form(rank) for rank in range(3)), return_exceptions=True)
        assert [type(error) for error in errors] == [UsageError] * 3
        assert {str(error) for error in errors} == {"arena: rank 1: no memory"}

    run(main())


def test_different_settings_make_it_none(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    run(Ranks(2, own_settings={1: replace(SETTINGS, polls=False)}).fail_all())
    (problem,) = problems(caplog)
    assert problem.endswith(
        "the ranks have different settings: rank 0 arena=262144 wait=poll, rank 1 arena=262144 wait=doorbell"
    )


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"nonce": bytes(32)}, "the memory is not shared"),
        ({"heap_bytes": 4096}, "its owner announced"),
        ({"rank": 0}, "rank 1 offered out of turn, as rank 0"),
    ],
)
def test_an_offer_that_is_not_true_makes_it_none(
    run: Run, changes: dict[str, object], problem: str, caplog: pytest.LogCaptureFixture
) -> None:
    def lie(rank: int, settings: ArenaSettings) -> LocalSegment:
        true = contribute(rank, settings)
        return replace(true, offer=msgspec.structs.replace(true.offer, **changes))

    run(Ranks(5, contribute={1: lie}).fail_all())
    (logged,) = problems(caplog)
    assert problem in logged


def test_a_rank_of_limited_address_space_has_an_arena_but_nobody_has_buffers(run: Run) -> None:
    def limited(rank: int, settings: ArenaSettings) -> LocalSegment:
        true = contribute(rank, settings)
        return replace(true, offer=msgspec.structs.replace(true.offer, maps_heaps=False))

    async def main() -> None:
        arenas = await Ranks(3, contribute={1: limited}).form_all()
        for arena in arenas:
            with pytest.raises(UsageError, match=r"no buffers, the address space of rank 1 is limited \(ulimit -v\)"):
                arena.empty(3, np.int8)
        close_all(arenas)

    run(main())


# -- ranks that do not come, or go -------------------------------------------------------------------------------------


def test_a_rank_that_does_not_come_is_named(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        ranks = Ranks(4, settings=HASTY)
        assert not any(await asyncio.gather(ranks.form(0), ranks.form(1)))

    run(main())
    assert problems(caplog) == ["no arena on host here, lanes will do: ranks 2, 3 did not come in time"]


def test_a_rank_that_does_not_come_is_lost_when_an_arena_is_required(run: Run) -> None:
    async def main() -> None:
        ranks = Ranks(3, settings=replace(HASTY, required=True))
        errors = await asyncio.gather(ranks.form(0), ranks.form(1), return_exceptions=True)
        for error in errors:
            assert isinstance(error, PeerLost)
            assert (error.rank, error.host, str(error)) == (2, "here", "arena: rank 2 did not come in time")

    run(main())


def test_a_convener_that_does_not_come_is_not_waited_for_for_ever(run: Run) -> None:
    async def main() -> None:
        ranks = Ranks(2, settings=replace(HASTY, required=True))
        with pytest.raises(PeerLost, match="rank 0 did not come in time") as caught:
            await ranks.form(1)
        assert caught.value.rank == 0

    run(main())


@pytest.mark.parametrize("gone", range(3))
def test_a_rank_whose_server_is_gone_is_named_long_before_the_time_is_up(
    run: Run, gone: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It joined the world, and ended before it came to the formation; the servers of the others listen."""
    monkeypatch.setattr(rendezvous, "LOOK_SECONDS", 0.02)

    async def main() -> None:
        servers = [await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0) for _ in range(3)]
        addresses = {rank: f"127.0.0.1:{server.sockets[0].getsockname()[1]}" for rank, server in enumerate(servers)}
        servers[gone].close()
        ranks = Ranks(3, settings=replace(REQUIRED, seconds=3600.0), addresses=addresses)
        async with asyncio.timeout(50.0):
            others = [rank for rank in range(3) if rank != gone]
            errors = await asyncio.gather(*(ranks.form(rank) for rank in others), return_exceptions=True)
        for server in servers:
            server.close()
        for error in errors:
            assert isinstance(error, PeerLost)
            assert (error.rank, error.host) == (gone, "here")
            assert "nobody listens at its address any more" in str(error)

    run(main())


def test_a_late_rank_whose_server_listens_is_waited_for(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "LOOK_SECONDS", 0.01)

    async def main() -> None:
        looks = Events[None]()

        def look(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            looks.append(None)
            writer.close()

        async with await asyncio.start_server(look, "127.0.0.1", 0) as server:
            address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
            ranks = Ranks(3, addresses=dict.fromkeys(range(3), address))
            early = [asyncio.ensure_future(ranks.form(rank)) for rank in (1, 2)]
            await looks.until(10)
            arenas = await asyncio.gather(ranks.form(0), *early)
        assert None not in arenas
        close_all([arena for arena in arenas if arena is not None])

    run(main())


def test_a_convener_that_says_nothing_is_not_waited_for_for_ever(run: Run) -> None:
    async def main() -> None:
        ranks = Ranks(3, settings=replace(HASTY, seconds=0.1), own_settings={0: replace(HASTY, seconds=60.0)})
        convening = asyncio.ensure_future(ranks.form(0))
        assert await ranks.form(1) is None
        convening.cancel()
        await asyncio.wait({convening})

    run(main())


def test_a_convener_of_another_secret_is_not_met(run: Run) -> None:
    run(Ranks(2, settings=HASTY, own_secrets={1: b"t" * 32}).fail_all())


def test_a_rendezvous_place_that_is_taken_makes_it_none(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    ranks = Ranks(2, settings=HASTY)
    with open_socket() as squatter:
        squatter.bind(Rendezvous.of(ranks.world, 0, secret=SECRET).address)
        run(ranks.fail_all())
    assert problems(caplog) == ["no arena on host here, lanes will do: Address already in use"]


def _connect(ranks: Ranks) -> socket.socket:
    sock = open_socket()
    sock.connect(Rendezvous.of(ranks.world, 0, secret=SECRET).address)
    return sock


@pytest.mark.parametrize("greeting", [b"", b"GET / HTTP/1.1", bytes(1000)])
def test_strangers_are_turned_away_and_do_no_harm(run: Run, greeting: bytes) -> None:
    async def main() -> None:
        ranks = Ranks(2)
        convening = asyncio.ensure_future(ranks.form(0))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        strangers = [_connect(ranks) for _ in range(3)]
        for stranger in strangers[:2]:
            stranger.send(greeting)
        strangers[1].close()
        arenas = await asyncio.gather(convening, ranks.form(1))
        assert None not in arenas
        close_all([arena for arena in arenas if arena is not None])
        for stranger in strangers:
            stranger.close()

    run(main())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
def test_other_users_are_turned_away_before_they_say_anything(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        ranks = Ranks(2)
        convening = asyncio.ensure_future(ranks.form(0))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        os.seteuid(65534)
        try:
            stranger = _connect(ranks)
        finally:
            os.seteuid(0)
        arenas = await asyncio.gather(convening, ranks.form(1))
        assert stranger.recv(1) == b""
        stranger.close()
        assert None not in arenas
        close_all([arena for arena in arenas if arena is not None])

    run(main())
    assert problems(caplog) == ["a connection was refused: arena: expected a process of user 0, got one of user 65534"]


# -- cancellation and scarcity -----------------------------------------------------------------------------------------


async def _step(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def test_cancelling_all_ranks_at_any_moment_leaves_nothing(run: Run) -> None:
    async def main() -> None:
        for steps in range(40):
            ranks = Ranks(3)
            tasks = [asyncio.ensure_future(ranks.form(rank)) for rank in range(3)]
            await _step(steps)
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            close_all([arena for task in tasks if not task.cancelled() and (arena := task.result())])

    run(main())


@pytest.mark.parametrize("cancelled", [0, 1])
def test_cancelling_one_rank_at_any_moment_ends_it_for_all_or_is_seen_as_leaving(run: Run, cancelled: int) -> None:
    endings: set[bool] = set()

    async def main() -> None:
        for steps in range(0, 40, chosen(2, soak=1)):
            ranks = Ranks(3, settings=replace(SETTINGS, seconds=0.2))
            tasks = [asyncio.ensure_future(ranks.form(rank)) for rank in range(3)]
            await _step(steps)
            tasks[cancelled].cancel()
            await asyncio.wait(tasks)
            if not tasks[cancelled].cancelled():
                close_all([arena for task in tasks if (arena := task.result())])
                continue
            arenas = [task.result() for rank, task in enumerate(tasks) if rank != cancelled]
            endings.add(None in arenas)
            formed = [arena for arena in arenas if arena is not None]
            for arena in formed:
                arena.on_ring = lambda _: None
            await settle()
            assert {rank for rank, peer in ranks.left if peer == cancelled} == {arena.rank for arena in formed}
            close_all(formed)

    run(main())
    assert True in endings


@contextmanager
def limit(what: int, soft: int) -> Iterator[None]:
    before = resource.getrlimit(what)
    resource.setrlimit(what, (soft, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(what, before)


def test_running_out_of_descriptors_anywhere_is_a_clean_end(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        lowest = os.dup(0)
        os.close(lowest)
        for more in range(0, 80, chosen(5, soak=1)):
            ranks = Ranks(3, settings=replace(SETTINGS, seconds=0.2))
            with limit(resource.RLIMIT_NOFILE, lowest + more):
                arenas = await asyncio.gather(*(ranks.form(rank) for rank in range(3)))
            formed = [arena for arena in arenas if arena is not None]
            assert len(formed) in (0, 3)
            close_all(formed)
        assert len(formed) == 3, "the last had enough"

    run(main())
    assert any("Too many open files" in problem for problem in problems(caplog))


def test_a_limit_on_the_size_of_files_makes_it_none(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    with limit(resource.RLIMIT_FSIZE, 1 << 20):
        run(Ranks(2).fail_all())
    assert problems(caplog) == ["no arena on host here, lanes will do: rank 0: File too large"]


def test_a_limit_on_address_space_is_noticed() -> None:
    true = contribute(0, SETTINGS)
    true.close()
    with limit(resource.RLIMIT_AS, 1 << 46):
        limited = contribute(0, SETTINGS)
        limited.close()
    assert isinstance(true.offer, SegmentOffer)
    assert (true.offer.maps_heaps, limited.offer.maps_heaps) == (True, False)
