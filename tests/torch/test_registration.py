"""Registration of the backend with torch."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

import asyncpar.torch  # noqa: F401  # should torch have been told not to look for it


def test_torch_finds_the_backend_by_itself_and_without_grpc() -> None:
    program = "import torch, sys; print('asyncpar' in torch.distributed.Backend.backend_list, 'grpc' in sys.modules)"

    assert _printed(program, TORCH_DEVICE_BACKEND_AUTOLOAD="1") == "True False"


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
