"""A client that is no rank."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import asyncpar as ap

SECRET = b"0123456789abcdef0123456789abcdef"


class Model(ap.Actor):
    """Holds weights, and streams its steps."""

    def __init__(self) -> None:
        self._weights: np.ndarray[Any, Any] = np.zeros(4, np.float32)

    @ap.endpoint
    async def load(self, weights: np.ndarray[Any, Any], *, scale: float = 1.0) -> float:
        """Take weights; return their sum."""
        self._weights = weights * scale
        return float(self._weights.sum())

    @ap.endpoint
    async def weights(self) -> np.ndarray[Any, Any]:
        """Return them."""
        return self._weights

    @ap.endpoint
    async def steps(self, count: int) -> AsyncIterator[int]:
        """Yield numbers."""
        for step in range(count):
            yield step

    @ap.endpoint
    async def fail(self) -> None:
        """Raise."""
        raise ZeroDivisionError("no such step")


@pytest.fixture
async def node(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> AsyncIterator[ap.Node]:
    path = tmp_path / "secret"
    path.write_bytes(SECRET)
    path.chmod(0o600)
    monkeypatch.setenv("ASYNCPAR_SECRET_FILE", str(path))
    node = await ap.Node.start(serve="127.0.0.1:0")
    await node.spawn(Model, name="model")
    yield node
    await node.stop()


async def test_a_client_pushes_weights_asks_tells_and_reads_streams(node: ap.Node) -> None:
    async with ap.connect(node.address, SECRET) as job:
        model = job.ref("model", rank=0)
        assert await model.load(np.full(4, 2.0, np.float32), scale=0.5) == 4.0
        await model.load.tell(np.arange(4, dtype=np.float32))
        assert (await job.ref("model").weights()).tolist() == [0.0, 1.0, 2.0, 3.0]
        assert [step async for step in model.steps.stream(3)] == [0, 1, 2]


async def test_the_secret_may_be_in_a_file(node: ap.Node) -> None:
    async with ap.connect(node.address, os.environ["ASYNCPAR_SECRET_FILE"]) as job:
        assert [step async for step in job.ref("model").steps.stream(1)] == [0]


SERVING = """
import asyncio
from pathlib import Path

import asyncpar as ap
from tests.engines.test_connect import Model


async def main() -> None:
    async with ap.init() as node:
        await node.spawn(Model, name="model")
        await node.world.barrier()
        Path(f"address-{node.rank}.new").write_text(node.address)
        Path(f"address-{node.rank}.new").rename(f"address-{node.rank}")
        while not Path("over").exists():
            await asyncio.sleep(0.05)


ap.run(main)
"""


@pytest.mark.process
async def test_a_job_of_the_launcher_takes_weights_and_streams_steps(tmp_path: Path) -> None:
    (tmp_path / "job.secret").write_bytes(SECRET)
    (tmp_path / "job.secret").chmod(0o600)
    (tmp_path / "serving.py").write_text(SERVING)
    launch = ("-m", "asyncpar", "launch", "--nproc-per-node", "2", "--secret-file", "job.secret", "serving.py")
    launcher = await asyncio.create_subprocess_exec(
        sys.executable, *launch, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    )
    try:
        while not (tmp_path / "address-0").exists():
            assert launcher.returncode is None
            await asyncio.sleep(0.05)
        async with ap.connect((tmp_path / "address-0").read_text(), tmp_path / "job.secret") as job:
            for rank in range(2):  # the other one through the first
                model = job.ref("model", rank=rank)
                assert await model.load(np.full(4, 2.0, np.float32), scale=1.0 + rank) == 8.0 * (1 + rank)
                assert [step async for step in model.steps.stream(3)] == [0, 1, 2]
        (tmp_path / "over").touch()
        assert await launcher.wait() == 0
    finally:
        (tmp_path / "over").touch()
        await launcher.wait()


async def test_errors_are_those_of_the_actor(node: ap.Node) -> None:
    async with ap.connect(node.address, SECRET) as job:
        with pytest.raises(ap.RemoteError, match="no such step") as failed:
            await job.ref("model").fail()
        assert (failed.value.rank, failed.value.type_name) == (0, "ZeroDivisionError")
        with pytest.raises(ap.NotFound, match="nobody"):
            await job.ref("nobody").fail()
        with pytest.raises(ap.NotFound, match="no endpoint"):
            await job.ref("model").no_endpoint()
        with pytest.raises(ap.UsageError, match="weights"):
            await job.ref("model").load("many")
        with pytest.raises(ap.UsageError, match="cannot be sent"):
            await job.ref("model").load(object())


async def test_a_wrong_secret_and_a_closed_job_are_reported(node: ap.Node) -> None:
    async with ap.connect(node.address, b"x" * 32) as job:
        with pytest.raises(ap.AuthenticationError):
            await job.ref("model").weights()
    async with ap.connect("127.0.0.1:1", SECRET) as job:
        with pytest.raises(ap.PeerLost):
            async with asyncio.timeout(20):
                await job.ref("model").weights()
        await job.close()
        with pytest.raises(ap.UsageError, match="not open"):
            await job.ref("model").weights()


@pytest.mark.parametrize(("address", "secret"), [("nowhere", SECRET), ("127.0.0.1:1", b"short")])
def test_bad_arguments_are_refused(address: str, secret: bytes) -> None:
    with pytest.raises(ap.UsageError):
        ap.connect(address, secret)
