"""torch, where it is installed, may import its own modules."""

from __future__ import annotations

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Let torch import its own modules: some use what it deprecates."""
    config.addinivalue_line("filterwarnings", "ignore:`torch.jit:DeprecationWarning:torch")
