"""Tests of ``asyncpar.torch`` need torch: without it they are skipped, or fail where extras are required."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.backends.extras import REQUIRED
from tests.program_host import ProgramHost
from tests.torch.fork_servers import close_fork_servers
from tests.torch.worlds import Worlds

HAS_TORCH = importlib.util.find_spec("torch") is not None


class WithoutTorch(pytest.Module):
    """A module of tests that is not imported."""

    def collect(self) -> list[pytest.Item | pytest.Collector]:
        pytest.skip('torch is not installed: pip install "asyncpar[torch]"', allow_module_level=True)


def pytest_configure(config: pytest.Config) -> None:
    """Let torch import its own modules: some use what it deprecates."""
    config.addinivalue_line("filterwarnings", "ignore:`torch.jit:DeprecationWarning:torch")


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    if HAS_TORCH or os.environ.get(REQUIRED):
        return None
    return WithoutTorch.from_parent(parent, path=module_path)


@pytest.fixture(scope="session", autouse=True)
def _servers_end() -> Iterator[None]:
    yield
    close_fork_servers()


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Let torch compute in one thread; more only cost time where matrices are small."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", name="host")
def open_host() -> Iterator[ProgramHost]:
    """A process that has imported torch after the first program that is run in it."""
    host = ProgramHost()
    yield host
    host.close()


@pytest.fixture(scope="session")
def torch_worlds() -> Iterator[Worlds]:
    """Worlds that stay there for the whole session."""
    worlds = Worlds()
    yield worlds
    worlds.close()
