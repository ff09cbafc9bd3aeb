"""The pieces of programs in the documentation that need torch."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.programs import REPLACES_A_PART, Shown, pieces_that_need, run_piece
from tests.program_host import ProgramHost


@pytest.mark.process
@pytest.mark.parametrize("shown", pieces_that_need("torch"), ids=str)
def test_a_piece_of_a_program_runs(shown: Shown, host: ProgramHost, tmp_path: Path) -> None:
    run_piece(shown, tmp_path, host, alone=REPLACES_A_PART)  # they destroy their process group
