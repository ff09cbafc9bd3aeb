"""Every program on the pages of the documentation runs, and so does every piece of one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.programs import SHOWN, Shown, pieces_that_need, run, run_piece
from tests.docs.surroundings import SURROUNDINGS


@pytest.mark.process
@pytest.mark.parametrize("shown", [shown for shown in SHOWN if shown.is_program], ids=str)
def test_a_program_runs_alone(shown: Shown, tmp_path: Path) -> None:
    run_piece(shown, tmp_path)


@pytest.mark.process
@pytest.mark.parametrize("shown", [shown for shown in SHOWN if shown.is_test], ids=str)
def test_a_test_runs(shown: Shown, tmp_path: Path) -> None:
    fails = "test_every_update_counts" in shown.text  # it is there to find a race
    (tmp_path / "test_shown.py").write_text(shown.text)
    (tmp_path / "pytest.ini").write_text("[pytest]\nasyncio_mode = auto\n")
    options = ("-q", "-p", "no:cacheprovider")
    if fails:
        with pytest.raises(AssertionError, match="updates were lost"):
            run("-m", "pytest", *options, home=tmp_path)
    else:
        assert re.search(r"\d+ passed", run("-m", "pytest", *options, home=tmp_path))


@pytest.mark.process
@pytest.mark.parametrize("shown", pieces_that_need(None), ids=str)
def test_a_piece_of_a_program_runs(shown: Shown, tmp_path: Path) -> None:
    run_piece(shown, tmp_path)


@pytest.mark.parametrize("shown", [*pieces_that_need("a GPU"), *pieces_that_need("a cluster")], ids=str)
def test_a_piece_that_needs_a_gpu_or_a_cluster_is_a_program(shown: Shown) -> None:
    compile(shown.text, shown.page, "exec")


def test_no_surroundings_are_left_over() -> None:
    for page, begin in SURROUNDINGS:
        assert any(shown.page == page and shown.text.startswith(begin) for shown in SHOWN), (page, begin)
