"""The ways in which a job of one launcher is run: its hosts are fixed, or may come and go."""

from __future__ import annotations

from typing import Final

import pytest

FIXED: Final[tuple[str, ...]] = ()
CHANGING: Final = ("--nnodes", "1:1")
both_ways: Final = pytest.mark.parametrize("hosts", [FIXED, CHANGING], ids=["fixed", "changing"])
