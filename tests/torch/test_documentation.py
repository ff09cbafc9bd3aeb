"""The pieces of programs in the documentation that need torch."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.programs import Shown, pieces_that_need, run_piece


@pytest.mark.process
@pytest.mark.parametrize("shown", pieces_that_need("torch"), ids=str)
def test_a_piece_of_a_program_runs(shown: Shown, tmp_path: Path) -> None:
    run_piece(shown, tmp_path)
