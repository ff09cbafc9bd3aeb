"""The example of a web service that streams, over real HTTP."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

httpx = pytest.importorskip("httpx", reason="httpx (extra test) is not installed")
pytest.importorskip("fastapi", reason="fastapi (extra test) is not installed")
pytest.importorskip("uvicorn", reason="uvicorn (extra test) is not installed")

SCRIPT = Path(__file__).parents[2] / "scripts" / "examples" / "stream_service.py"
LIMIT = 45.0
pytestmark = pytest.mark.process


def answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def address() -> Iterator[str]:
    """The address of a service that answers."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    service = subprocess.Popen([sys.executable, str(SCRIPT), str(port)], stderr=subprocess.PIPE, text=True)
    try:
        until = time.monotonic() + LIMIT
        while not answers(port):
            assert service.poll() is None
            assert time.monotonic() < until
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
        service.send_signal(signal.SIGINT)
        assert "Error" not in service.communicate(timeout=LIMIT)[1]
    finally:
        service.kill()
        service.communicate()


def test_lines_come_while_others_are_computed_and_a_reader_may_leave(address: str) -> None:
    with httpx.Client(base_url=address, timeout=LIMIT) as client:
        with client.stream("GET", "/words/5") as response:
            chunks = list(response.iter_text())
        assert len(chunks) > 1  # not in one piece
        lines = [json.loads(line)["word"] for line in "".join(chunks).splitlines()]
        assert lines == [f"word {number}" for number in range(5)]
        with client.stream("GET", "/words/100000") as response:
            assert next(response.iter_lines()) == '{"word": "word 0"}'
        assert client.get("/words/0").text == ""
        assert client.get("/words/many").status_code == 422
