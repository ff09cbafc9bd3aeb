"""The ways in which a job of one launcher is run: its hosts are fixed, or may come and go."""

from __future__ import annotations

from typing import Final

import pytest

from tests.soak import first

FIXED: Final[tuple[str, ...]] = ()
CHANGING: Final = ("--nnodes", "1:1")
both_ways: Final = pytest.mark.parametrize("hosts", [FIXED, CHANGING], ids=["fixed", "changing"])
changing_first: Final = pytest.mark.parametrize("hosts", first(1, [CHANGING, FIXED]), ids=str)
fixed_first: Final = pytest.mark.parametrize("hosts", first(1, [FIXED, CHANGING]), ids=str)
"""With ``--soak`` both; the tests of one file share the ways out."""
