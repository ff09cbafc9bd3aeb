"""Secrets and tokens are shown nowhere: not by formatting, in tracebacks with local variables, or in debug logs."""

from __future__ import annotations

import asyncio
import io
import logging
import os
import pickle
import stat
import traceback
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console
from rich.traceback import Traceback

from asyncpar.core.config.secret import Secret, SecretText
from asyncpar.errors import AsyncparError
from asyncpar.launch.options import StreamChoice, Streams
from asyncpar.launch.rank_output import RankLogs
from asyncpar.net.membership.client import join_world
from asyncpar.net.membership.credentials import read_secret, write_secret
from asyncpar.net.security.identity import rank_role
from asyncpar.net.security.reading import read_certificates
from asyncpar.net.transport.rpc import Credentials, RpcServer
from asyncpar.testing.world import local_world
from tests.hostile.doors import open_door
from tests.net.membership.test_client import rendezvous, request
from tests.net.transport.pairs import TERMS

PLAIN = b"TOPSECRET-" * 4
CREDENTIALS = Credentials(PLAIN)
TOKEN = bytes(CREDENTIALS.metadata()[0][1].encode()).decode()
FORBIDDEN = ("TOPSECRET", PLAIN[:8].hex(), TOKEN[:12])


def check_hidden(text: str) -> None:
    for word in FORBIDDEN:
        assert word not in text, text[max(0, text.index(word) - 300) : text.index(word) + 80]


@pytest.mark.parametrize("secret", [Secret(PLAIN), SecretText(PLAIN.decode())])
def test_no_way_of_formatting_shows_a_secret(secret: Secret | SecretText) -> None:
    shown = [repr(secret), str(secret), f"{secret}", f"{secret!r:>5}", f"{secret} {secret!r}", repr([{"a": secret}])]
    check_hidden(" ".join(shown))
    assert all("secret" in text for text in shown)


def test_a_secret_is_worth_what_it_holds() -> None:
    assert Secret(PLAIN) == PLAIN
    assert SecretText("abc").encode() == b"abc"
    assert pickle.loads(pickle.dumps(Secret(PLAIN))) == PLAIN
    assert hash(Secret(PLAIN)) == hash(PLAIN)


# -- tracebacks ------------------------------------------------------------------------------------------------------


def render(error: BaseException) -> str:
    """Return the tracebacks of ``error`` and its causes with all local variables, by two libraries."""
    console = Console(file=io.StringIO(), width=400)
    console.print(
        Traceback.from_exception(
            type(error), error, error.__traceback__, show_locals=True, locals_max_string=10_000, locals_max_length=1_000
        )
    )
    assert isinstance(console.file, io.StringIO)
    plain = traceback.TracebackException.from_exception(error, capture_locals=True)
    return console.file.getvalue() + "".join(plain.format())


async def join_with_another_secret() -> None:
    async with rendezvous() as (_, address):
        await join_world(address, CREDENTIALS, request(0, 2))


async def join_nobody() -> None:
    await join_world("127.0.0.1:1", CREDENTIALS, request(0, 2, timeout=0.2))


async def dial_with_another_secret() -> None:
    async with open_door("tcp") as door:
        await door.dial(TERMS, CREDENTIALS.secret)


async def listen_at_a_port_in_use() -> None:
    server = RpcServer(CREDENTIALS)
    await server.start()
    try:
        await RpcServer(CREDENTIALS, port=server.port).start()
    finally:
        await server.stop(grace=0)


def files(directory: Path) -> list[Callable[[], object]]:
    """Return calls that fail over files with secrets in them."""
    (directory / "short").write_bytes(PLAIN[:20])
    write_secret(directory / "there", Secret(PLAIN))
    (directory / "short").chmod(0o600)
    (directory / "rank-0.crt").write_bytes(b"none")
    return [
        lambda: read_secret(directory / "short"),
        lambda: write_secret(directory / "there", Secret(PLAIN)),
        lambda: Credentials(Secret(PLAIN[:20])),
        lambda: read_certificates(directory, rank_role(0), now=datetime.now(UTC)),
    ]


@pytest.mark.parametrize(
    "fail", [join_with_another_secret, join_nobody, dial_with_another_secret, listen_at_a_port_in_use]
)
async def test_tracebacks_with_local_variables_do_not_show_it(fail: Callable[[], Awaitable[None]]) -> None:
    with pytest.raises((AsyncparError, OSError)) as caught:
        await fail()
    text = render(caught.value)
    assert "locals" in text
    check_hidden(text)


def test_tracebacks_over_files_do_not_show_it(tmp_path: Path) -> None:
    for fail in files(tmp_path):
        with pytest.raises(Exception) as caught:
            fail()
        check_hidden(render(caught.value))


async def test_a_node_that_fails_does_not_show_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncpar.testing.world.secrets", SimpleNamespace(token_bytes=lambda _: PLAIN))
    with pytest.raises(ExceptionGroup) as caught:  # noqa: PT012
        async with local_world(2, transport="tcp") as nodes, asyncio.TaskGroup() as tasks:
            tasks.create_task(nodes[0].world.all_reduce(np.ones(4)))
            tasks.create_task(nodes[1].world.all_reduce(np.ones(5)))
    check_hidden(render(caught.value))


# -- logs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["shm", "tcp", "grpc"])
async def test_debug_logs_do_not_show_it(
    transport: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("asyncpar.testing.world.secrets", SimpleNamespace(token_bytes=lambda _: PLAIN))
    loop = asyncio.get_running_loop()
    loop.set_debug(True)
    loop.slow_callback_duration = 0.0  # so that every callback is logged with its arguments
    with caplog.at_level(logging.DEBUG):
        async with local_world(2, transport=transport) as nodes:
            await asyncio.gather(*(node.world.all_reduce(np.ones(4)) for node in nodes))
        loop.set_debug(False)
    assert len(caplog.records) > 100
    check_hidden(caplog.text)


def test_logs_of_ranks_are_for_their_user_alone(tmp_path: Path) -> None:
    old = tmp_path / "attempt_0" / "3" / "stdout.log"
    old.parent.mkdir(parents=True)
    old.touch(0o644)
    everywhere = Streams.STDOUT | Streams.STDERR
    mask = os.umask(0)
    try:
        every = RankLogs(tmp_path, redirects=StreamChoice(everywhere=everywhere), tee=StreamChoice())
        for stream in (Streams.STDOUT, Streams.STDERR):
            file = every.open(stream, attempt=0, rank=3)
            assert file is not None
            with file:
                assert stat.S_IMODE(os.fstat(file.fileno()).st_mode) == 0o600
    finally:
        os.umask(mask)
