"""The ways in which a job of one launcher is run: its hosts are fixed, or may come and go."""

from __future__ import annotations

from typing import Final

import pytest

from tests.soak import first

FIXED: Final[tuple[str, ...]] = ()
CHANGING: Final = ("--nnodes", "1:1")
changing_first: Final = pytest.mark.parametrize("hosts", first(1, [CHANGING, FIXED]), ids=str)
fixed_first: Final = pytest.mark.parametrize("hosts", first(1, [FIXED, CHANGING]), ids=str)
"""With ``--soak`` both: they differ in how hosts decide, not in how ranks start, fail and end."""
