"""scripts/bench/run: programs by their names, what starts them, and that texts name programs that are there."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from scripts.bench import programs
from scripts.bench.programs import BENCH, ROOT, RUN, command_of, find_programs, list_programs, own_command

PROGRAMS = find_programs()
NAMED = re.compile(r"scripts/bench/run (?:-\S+ )*([a-z]\w*)")
FILE = re.compile(r"scripts/bench/[\w/]+\.py")


def texts() -> list[Path]:
    """Return the files that may name programs."""
    found = [path for kind in ("md", "py", "json") for path in BENCH.rglob(f"*.{kind}")]
    for folder in ("asyncpar", "docs", "tests/bench", "scripts/examples"):
        found += [path for kind in ("md", "py") for path in (ROOT / folder).rglob(f"*.{kind}")]
    return [*found, *ROOT.glob("*.md")]


def test_every_program_says_in_a_line_what_it_does() -> None:
    shown = [line for line in list_programs().splitlines() if line.startswith("  ")]
    assert [line.split()[0] for line in shown] == list(PROGRAMS)
    assert [line.split(maxsplit=1)[1] for line in shown] == [program.summary for program in PROGRAMS.values()]
    assert all(program.summary for program in PROGRAMS.values())


def test_no_two_programs_have_one_name_and_none_is_a_rank_or_of_a_peer() -> None:
    scripts = [path for path in BENCH.rglob("*.py") if 'if __name__ == "__main__":' in path.read_text()]
    ours = [path for path in scripts if path.parent.name != "peers" and not path.stem.endswith("_rank")]
    assert sorted(path.stem for path in ours) == sorted([*PROGRAMS, "programs"])
    assert set(programs.LAUNCHED) | set(programs.ENVIRONMENTS) <= set(PROGRAMS)


def test_texts_name_programs_that_are_there() -> None:
    for path in texts():
        text = path.read_text(encoding="utf-8")
        assert set(NAMED.findall(text)) <= set(PROGRAMS), path
        assert all((ROOT / name).exists() for name in FILE.findall(text)), path


def test_the_readme_has_a_row_for_each_program_of_each_folder() -> None:
    text = (BENCH / "README.md").read_text(encoding="utf-8")
    rows = {}
    for section in text.split("\n## ")[1:]:
        title, _, table = section.partition("\n")
        rows[title] = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    folders = {"here": BENCH} | {name: BENCH / name for name in ("compare", "figures", "goals", "chaos")}
    for title, folder in folders.items():
        assert rows[title] == [name for name, program in PROGRAMS.items() if program.path.parent == folder]
    assert sum(map(len, rows.values())) == len(PROGRAMS)


def test_a_program_runs_with_this_interpreter_and_its_options() -> None:
    assert command_of("many", ["--size", "4"]) == [sys.executable, str(PROGRAMS["many"].path), "--size", "4"]


def elsewhere(folder: Path, *, is_needed: bool = True) -> programs.Environment:
    """Return an environment in ``folder`` of what this Python does not have."""
    return programs.Environment(
        module="no_such_module",
        maker="scripts/make-it",
        folder=str(folder),
        variable="ASYNCPAR_NO_SUCH_VENV",
        is_needed=is_needed,
    )


def test_a_program_that_uses_more_runs_in_the_environment_that_has_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(programs.ENVIRONMENTS, "many", elsewhere(tmp_path / "a", is_needed=False))
    assert command_of("many", [])[0] == sys.executable, "it says itself what it cannot do"
    for place in ("a", "b"):
        python = tmp_path / place / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.touch()
    assert command_of("many", [])[0] == str(tmp_path / "a" / "bin" / "python")
    monkeypatch.setenv("ASYNCPAR_NO_SUCH_VENV", str(tmp_path / "b"))
    assert command_of("many", [])[0] == str(tmp_path / "b" / "bin" / "python")
    monkeypatch.setitem(programs.ENVIRONMENTS, "many", replace(elsewhere(tmp_path), module="pytest"))
    assert command_of("many", [])[0] == sys.executable, "which has it"


def test_ranks_of_a_job_are_launched_and_options_before_the_name_are_of_the_launcher() -> None:
    path = str(PROGRAMS["recorder"].path)
    launch = [sys.executable, "-m", "asyncpar", "launch"]
    assert command_of("recorder", ["--rounds", "3"]) == [*launch, "--nproc-per-node=2", path, "--rounds", "3"]
    assert command_of("recorder", [], ["--nproc-per-node=4"]) == [*launch, "--nproc-per-node=4", path]
    assert command_of("recorder", ["--help"]) == [sys.executable, path, "--help"], "once, not by each rank"


def test_what_cannot_be_run_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setitem(programs.ENVIRONMENTS, "torch_groups", elsewhere(tmp_path))
    for arguments, reason in (
        (["nothing"], "expected the name of a program, got 'nothing'"),
        (["--dashboard"], "expected the name of a program"),
        (["--size", "many"], "options of many come after its name, got --size before it"),
        (
            ["torch_groups"],
            "torch_groups needs no_such_module; `scripts/make-it --version` makes an environment for it",
        ),
    ):
        with pytest.raises(SystemExit) as ended:
            programs.main(arguments)
        assert ended.value.code == 2
        [line] = capsys.readouterr().err.splitlines()
        assert line.startswith(f"{RUN}: {reason}")


def test_stored_commands_run_with_this_interpreter() -> None:
    assert own_command("python -m pytest") == [sys.executable, "-m", "pytest"]
    assert own_command("asyncpar launch x.py") == [sys.executable, "-m", "asyncpar", "launch", "x.py"]
    assert own_command(f"{RUN} many --size 4") == [sys.executable, str(BENCH / "programs.py"), "many", "--size", "4"]
    assert own_command("scripts/test 'a b'") == ["scripts/test", "a b"]


@pytest.mark.process
def test_help_lists_the_programs_and_a_program_shows_its_own() -> None:
    def run(*arguments: str) -> str:
        command = [sys.executable, str(BENCH / "programs.py"), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=50, check=True).stdout

    assert run().endswith(f"{list_programs()}\n")
    assert run("--list") == f"{list_programs()}\n"
    assert "--arrays" in run("many", "--help")


@pytest.mark.soak
@pytest.mark.process
@pytest.mark.parametrize("name", [name for name in PROGRAMS if name not in programs.ENVIRONMENTS])
def test_every_program_says_what_it_measures_and_its_options(name: str) -> None:
    command = [sys.executable, str(BENCH / "programs.py"), name, "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=True)
    assert done.stdout.startswith("usage: ")
    if name != "observe_cost":  # which has the options of the program that it observes
        assert PROGRAMS[name].summary in " ".join(done.stdout.split())
