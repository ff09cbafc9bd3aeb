"""The programs and statements of the README are true."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.soak import first

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
EXAMPLE = ROOT / "scripts" / "examples" / "first_steps.py"


def _blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_the_readme_stays_short_and_names_every_guide() -> None:
    assert len(README.splitlines()) <= 235
    written_elsewhere = {"actors_contract", "architecture", "changelog", "figures", "security"}
    guides = {page.stem for page in (ROOT / "docs").glob("*.md")} - written_elsewhere - {"index"}
    where = README.partition("## Where to go next")[2]
    assert [name for name in sorted(guides) if f"(docs/{name}.md)" not in where] == []


def test_a_table_compares_six_libraries_by_ten_rows_and_says_where_others_are_better() -> None:
    rows = re.findall(r"^\| (.*) \|$", README.partition("## Why asyncpar")[2].partition("\n## ")[0], re.MULTILINE)
    cells = [row.split(" | ") for row in rows[2:]]
    assert (len(cells), {len(row) for row in cells}) == (10, {7})
    assert sum(cell.startswith("**") for row in cells for cell in row[2:]) >= 5


def test_each_way_to_use_it_has_a_program_that_fits_a_screen() -> None:
    for title in ("The smallest program", "Train", "Embed", "Test", "Under torch"):
        section = README.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
        programs = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
        assert [len(program.splitlines()) <= 25 for program in programs] == [True], title


@pytest.mark.process
def test_the_smallest_program_prints_what_the_readme_shows(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(_blocks("python")[0])
    launch = [sys.executable, "-m", "asyncpar", "launch", "--nproc-per-node", "4", str(program)]
    done = subprocess.run(launch, check=True, capture_output=True, text=True)
    shown = next(block for block in _blocks("text") if block.startswith("rank 0"))
    others = sorted(re.sub(r"^\[[^:]*:", "[host:", line) for line in done.stderr.splitlines())
    assert done.stdout.splitlines() + others == shown.splitlines()


def test_the_program_with_an_actor_is_the_example() -> None:
    program = EXAMPLE.read_text().split("\n\n", 1)[1]
    assert f"```python\n{program}```" in (ROOT / "docs" / "start.md").read_text()


def test_the_program_in_three_dimensions_is_the_example() -> None:
    program = (ROOT / "scripts" / "examples" / "three_dimensions.py").read_text().split('"""\n\n', 1)[1]
    assert f"```python\n{program}```" in (ROOT / "docs" / "training.md").read_text()


@pytest.mark.process
def test_the_program_with_an_actor_runs_alone() -> None:
    shown = subprocess.run([sys.executable, EXAMPLE], check=True, capture_output=True, text=True).stdout
    assert shown == "0 0.0 (1, 4) (1048576,) 3\n"


@pytest.mark.process
@pytest.mark.parametrize(("ranks", "printed"), first(1, [(2, "1.0 (2, 4) (524288,) 3"), (4, "6.0 (4, 4) (262144,) 3")]))
def test_the_program_with_an_actor_runs_with_several_ranks(ranks: int, printed: str) -> None:
    launch = [sys.executable, "-m", "asyncpar", "launch", "--nproc-per-node", str(ranks), str(EXAMPLE)]
    done = subprocess.run(launch, check=True, capture_output=True, text=True)
    assert done.stdout == f"0 {printed}\n"
    others = sorted(line.split("] ", 1)[1] for line in done.stderr.splitlines())
    assert others == [f"{rank} {printed}" for rank in range(1, ranks)]


def test_every_file_it_names_is_there() -> None:
    text = "\n".join(page.read_text() for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")))
    named = set(re.findall(r"`((?:asyncpar|scripts|proto|\.ci)/[\w./-]+)`", text))
    named |= set(re.findall(r"(?m)(scripts/[\w./-]+\.py)", text))
    named |= set(re.findall(r"\]\(((?!http)[\w./-]+)\)", README))
    assert len(named) > 10
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


def test_the_way_in_for_contributors_names_every_script() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text()
    scripts = [path for path in sorted((ROOT / "scripts").iterdir()) if path.is_file() and not path.suffix]
    assert len(scripts) > 10
    assert [path.name for path in scripts if f"`scripts/{path.name}" not in page] == []
    assert [link for link in re.findall(r"\]\(((?!http)[\w./-]+)\)", page) if not (ROOT / link).exists()] == []
