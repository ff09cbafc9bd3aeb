"""Registration of the backend with torch."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import asyncpar.torch  # noqa: F401  # in case torch does not look for backends itself
from tests.torch.fork_servers import fork_servers


@pytest.mark.process
@pytest.mark.timeout(180)
def test_torch_finds_the_backend_by_itself_and_without_grpc(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, (tmp_path / "log").open("wb") as log:
        process = fork_servers()[0].start(
            "tests.torch.ranks:send_backends", [], environment=os.environ, log=log.fileno(), channel=theirs.fileno()
        )
        assert process.wait(timeout=60) == 0, (tmp_path / "log").read_text()
        backends, has_grpc = json.loads(ours.recv(1 << 16))
    assert "asyncpar" in backends
    assert not has_grpc


@pytest.mark.parametrize("autoload", ["1", "0"])
def test_importing_it_first_registers_the_backend(autoload: str) -> None:
    program = "import asyncpar.torch, torch; print('asyncpar' in torch.distributed.Backend.backend_list)"

    assert _printed(program, TORCH_DEVICE_BACKEND_AUTOLOAD=autoload) == "True"


def test_an_older_torch_is_refused_when_a_group_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.6.0")
    with pytest.raises(ValueError, match=r"needs version 2\.13 or later, got 2\.6\.0"):
        dist.init_process_group("asyncpar", store=dist.HashStore(), rank=0, world_size=1)
    assert not dist.is_initialized()


def _printed(program: str, **environment: str) -> str:
    run = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | environment, capture_output=True, text=True, check=True
    )
    return run.stdout.strip()
