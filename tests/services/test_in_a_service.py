"""A node inside a web service: real servers in real processes, real HTTP, real signals."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.soak import first
from tests.world.processes import Rank, process_world

httpx = pytest.importorskip("httpx", reason="httpx (extra test) is not installed")
pytest.importorskip("fastapi", reason="fastapi (extra test) is not installed")
pytest.importorskip("uvicorn", reason="uvicorn (extra test) is not installed")
pytest.importorskip("aiohttp", reason="aiohttp (extra test) is not installed")

HERE = Path(__file__).parent
LIMIT = 30.0

pytestmark = pytest.mark.process


def uvicorn_on(loop: str) -> Callable[[Path], list[str]]:
    def command(socket: Path) -> list[str]:
        application = "tests.services.fastapi_app:app"
        return ["-m", "uvicorn", application, "--uds", str(socket), "--loop", loop, "--log-level", "warning"]

    return command


def aiohttp(socket: Path) -> list[str]:
    return ["-m", "tests.services.aiohttp_app", str(socket)]


SERVERS = {"uvicorn, uvloop": uvicorn_on("uvloop"), "aiohttp": aiohttp, "uvicorn, asyncio": uvicorn_on("asyncio")}


@dataclass
class Service:
    """A web server that is rank 1 of a world of two, and its peer, rank 0."""

    peer: Rank
    server: Rank
    socket: Path
    complaints: Path
    afterwards: Path

    async def get(self, path: str) -> Any:
        transport = httpx.AsyncHTTPTransport(uds=str(self.socket), retries=0)
        async with asyncio.timeout(LIMIT), httpx.AsyncClient(transport=transport, base_url="http://service") as client:
            answer = await client.get(path)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def is_up(self) -> None:
        """Return when the server listens."""
        async with asyncio.timeout(LIMIT):
            while True:
                try:
                    _, writer = await asyncio.open_unix_connection(str(self.socket))
                except OSError:
                    assert self.server.process.returncode is None, self.complaints.read_text()
                    await asyncio.sleep(0.02)  # another process: there is nothing to wait for but time
                else:
                    writer.close()
                    return

    async def end(self, number: signal.Signals) -> int:
        self.server.process.send_signal(number)
        async with asyncio.timeout(LIMIT):
            return await self.server.process.wait()


@asynccontextmanager
async def service(
    command: Callable[[Path], list[str]], directory: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Service]:
    socket, complaints, afterwards = (directory / name for name in ("socket", "complaints", "afterwards"))
    monkeypatch.setenv("AFTERWARDS", str(afterwards))
    monkeypatch.setenv("PYTHONPATH", str(HERE.parents[1]))
    arguments = [str(complaints), *command(socket)]
    async with process_world(2, HERE / "ranks.py", directory, *arguments) as (peer, server):
        started = Service(peer, server, socket, complaints, afterwards)
        await started.is_up()
        yield started


@pytest.mark.parametrize("number", first(1, [signal.SIGTERM, signal.SIGINT]))
@pytest.mark.parametrize("server", first(2, SERVERS))
async def test_a_node_in_a_service_leaves_loop_and_signals_alone_and_the_world_in_good_order(
    server: str, number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with service(SERVERS[server], tmp_path, monkeypatch) as running:
        loop = "uvloop" if "uvloop" in server else "asyncio"
        assert await running.get("/node") == {"doubled": 42, "loop": loop, "is_untouched": True}
        code = await running.end(number)
        async with asyncio.timeout(LIMIT):
            end = await running.peer.next()
            assert await running.peer.process.wait() == 0
    assert end == {"rank": 1, "cause": "it left the world"}
    assert running.complaints.read_text() == ""
    assert running.afterwards.read_text() == "untouched"
    raises_again = "uvicorn" in server and number is signal.SIGTERM  # what uvicorn does when all is done
    assert code == (-number if raises_again else 0)
