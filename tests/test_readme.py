"""The programs and statements of the README are true."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
EXAMPLE = ROOT / "scripts" / "examples" / "first_steps.py"


def _blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_the_readme_stays_short_and_names_every_guide() -> None:
    assert len(README.splitlines()) <= 350
    index = (ROOT / "docs" / "index.md").read_text()
    guides = re.search(r":caption: Guides\n\n(.*?)\n```", index, re.DOTALL)
    assert guides is not None
    where = README.partition("## Where to read")[2].partition("\n## ")[0]
    assert [name for name in guides[1].split() if f"(docs/{name}.md)" not in where] == []


def test_the_first_program_is_the_example() -> None:
    program = EXAMPLE.read_text().split("\n\n", 1)[1]
    assert _blocks("python")[0] == program


def test_the_program_in_three_dimensions_is_the_example() -> None:
    program = (ROOT / "scripts" / "examples" / "three_dimensions.py").read_text().split('"""\n\n', 1)[1]
    assert f"```python\n{program}```" in (ROOT / "docs" / "training.md").read_text()


@pytest.mark.process
def test_the_first_program_runs_alone() -> None:
    shown = subprocess.run([sys.executable, EXAMPLE], check=True, capture_output=True, text=True).stdout
    assert shown == "0 0.0 (1, 4) (1048576,) 3\n"


@pytest.mark.process
def test_the_first_program_runs_with_four_ranks() -> None:
    launch = [sys.executable, "-m", "asyncpar", "launch", "--nproc-per-node", "4", str(EXAMPLE)]
    done = subprocess.run(launch, check=True, capture_output=True, text=True)
    assert done.stdout == "0 6.0 (4, 4) (262144,) 3\n"
    others = sorted(line.split("] ", 1)[1] for line in done.stderr.splitlines())
    assert others == [f"{rank} 6.0 (4, 4) (262144,) 3" for rank in (1, 2, 3)]


def test_every_file_it_names_is_there() -> None:
    text = "\n".join(page.read_text() for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")))
    named = set(re.findall(r"`((?:asyncpar|scripts|proto|\.ci)/[\w./-]+)`", text))
    named |= set(re.findall(r"(?m)(scripts/[\w./-]+\.py)", text))
    named |= set(re.findall(r"\]\(((?!http)[\w./-]+)\)", README))
    assert len(named) > 10
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []
