"""Every program on the pages of the documentation runs, and so does every piece of one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.docs.programs import ROOT, SHOWN, Shown, pieces_that_need, run, run_piece
from tests.docs.surroundings import SURROUNDINGS
from tests.program_host import ProgramHost


@pytest.fixture(scope="module")
def host() -> Iterator[ProgramHost]:
    """A process for all programs."""
    made = ProgramHost()
    yield made
    made.close()


@pytest.mark.process
@pytest.mark.parametrize("shown", [shown for shown in SHOWN if shown.is_program], ids=str)
def test_a_program_runs_alone(shown: Shown, tmp_path: Path, host: ProgramHost) -> None:
    run_piece(shown, tmp_path, host)


TESTS = [shown for shown in SHOWN if shown.is_test]


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Run all tests of the pages in one session; return what it reports of each."""
    home = tmp_path_factory.mktemp("shown")
    for shown in TESTS:
        (home / f"test_{slug(shown)}.py").write_text(shown.text)
    (home / "pytest.ini").write_text("[pytest]\nasyncio_mode = auto\njunit_family = xunit1\n")
    options = ("-q", "-p", "no:cacheprovider", "--junitxml", "report.xml")
    done = run("-m", "pytest", *options, home=home, status=1)  # there is one that fails
    reports = dict.fromkeys(map(slug, TESTS), "")
    for case in ElementTree.parse(home / "report.xml").getroot().iter("testcase"):
        ended = [case.get("name"), *(f"{found.tag}: {found.get('message')}\n{found.text}" for found in case)]
        reports[Path(case.get("file", "")).stem.removeprefix("test_")] += " ".join(map(str, ended)) + "\n"
    assert "" not in reports.values(), done
    return reports


def slug(shown: Shown) -> str:
    return re.sub(r"\W", "_", str(shown))


@pytest.mark.process
@pytest.mark.parametrize("shown", TESTS, ids=str)
def test_a_test_runs(shown: Shown, reports: dict[str, str]) -> None:
    report = reports[slug(shown)]
    if "test_every_update_counts" in shown.text:  # it is there to find a race
        assert "updates were lost" in report
    else:
        assert not re.search("failure: |error: |skipped: ", report), report


@pytest.mark.process
@pytest.mark.parametrize("shown", pieces_that_need(None), ids=str)
def test_a_piece_of_a_program_runs(shown: Shown, tmp_path: Path, host: ProgramHost) -> None:
    run_piece(shown, tmp_path, host)


@pytest.mark.parametrize("shown", [*pieces_that_need("a GPU"), *pieces_that_need("a cluster")], ids=str)
def test_a_piece_that_needs_a_gpu_or_a_cluster_is_a_program(shown: Shown) -> None:
    compile(shown.text, shown.page, "exec")


def test_programs_of_other_libraries_are_programs() -> None:
    """They need libraries that are not here, so they are not run."""
    page = (ROOT / "docs" / "coming_from.md").read_text()
    programs = re.findall(r"^```{code-block} python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    assert len(programs) == len([shown for shown in SHOWN if shown.page == "docs/coming_from.md"])
    for program in programs:
        compile(program, "before.py", "exec")


def test_no_surroundings_are_left_over() -> None:
    for page, begin in SURROUNDINGS:
        assert any(shown.page == page and shown.text.startswith(begin) for shown in SHOWN), (page, begin)
