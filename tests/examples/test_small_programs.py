"""The small programs that a new user would write: each runs, is short, and says in one line what is wrong."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.program_host import ProgramHost
from tests.soak import first, is_soak

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "scripts" / "examples"
NAMES = ("word_count", "stream_service", "ring_suite", "two_hosts", "torch_hook", "train_resume")
LIMIT = 55.0
LAUNCH = ("-m", "asyncpar", "launch", "--nproc-per-node")

MISSING = """
import sys

class Missing:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] == {0!r}:
            raise ModuleNotFoundError("No module named " + repr(name), name={0!r})

sys.meta_path.insert(0, Missing)
"""

pytestmark = pytest.mark.process


def run(
    *words: object, status: int = 0, cwd: Path = ROOT, host: ProgramHost | None = None, **variables: str
) -> tuple[str, str]:
    """Run Python with ``words``, a program and its arguments in ``host``; return both outputs."""
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")} | variables
    command = list(map(str, words))
    if host is not None and not is_soak():
        done = host.run(*command, home=cwd, environment=environment)
    else:
        done = subprocess.run(
            [sys.executable, *command],
            capture_output=True,
            text=True,
            timeout=LIMIT,
            check=False,
            env=environment,
            cwd=cwd,
        )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout, done.stderr


def run_without(module: str, folder: Path, *words: object) -> str:
    """Run Python where ``module`` is not installed; return the last line of its errors."""
    (folder / "sitecustomize.py").write_text(MISSING.format(module))
    _, errors = run(*words, status=1, PYTHONPATH=str(folder))
    return errors.strip().splitlines()[-1]


@pytest.mark.parametrize("name", NAMES)
def test_a_small_program_is_under_60_lines_and_imports_nothing_private(name: str) -> None:
    text = (EXAMPLES / f"{name}.py").read_text()
    assert len(text.splitlines()) < 60
    assert re.findall(r"asyncpar\.\w*\._|from asyncpar\.\w+\.\w+\.|\._[a-z]", text) == []


@pytest.mark.parametrize("ranks", first(1, [2, 3, 0]))
def test_words_are_counted_the_same_by_any_number_of_ranks(ranks: int, tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("apple pear apple")
    (tmp_path / "two.py").write_text("apple plum")
    launch = (*LAUNCH, ranks) if ranks else ()
    output, errors = run(*launch, EXAMPLES / "word_count.py", tmp_path)
    assert output.splitlines() == [f"2 files, 5 words, {ranks or 1} rank(s)", "apple 3, pear 1, plum 1"]
    assert "(100%)" in errors


def test_a_folder_that_is_not_there_is_one_line(host: ProgramHost) -> None:
    _, errors = run(EXAMPLES / "word_count.py", "nowhere", status=1, host=host)
    assert errors == "word_count: expected a folder: python word_count.py FOLDER\n"


def test_a_folder_without_a_file_that_counts_is_one_line(tmp_path: Path, host: ProgramHost) -> None:
    (tmp_path / "words.txt").write_text("apple")
    _, errors = run(EXAMPLES / "word_count.py", tmp_path, status=1, host=host)
    assert errors == f"word_count: there is no file *.py in {tmp_path}\n"


def test_a_number_of_ranks_that_makes_no_sense_is_one_line() -> None:
    _, errors = run(*LAUNCH, 0, EXAMPLES / "word_count.py", ".", status=2)
    assert "--nproc-per-node" in errors.strip().splitlines()[-1]


def test_a_suite_names_the_deadlock_that_is_in_it() -> None:
    output, _ = run("-m", "pytest", "-p", "no:cacheprovider", "-c", os.devnull, EXAMPLES / "ring_suite.py", status=1)
    assert "3 passed" in output
    assert "1 failed" in output
    assert re.search(r"deadlock: rank 0 waits for rank 2 in recv .*ring_suite.py:\d+, rank \d waits", output), output
    for rank in range(3):
        assert f"\nrank {rank}\n  task rank {rank}: waits for recv" in output


def test_a_suite_that_is_run_as_a_program_says_how_to_run_it(tmp_path: Path, host: ProgramHost) -> None:
    _, errors = run(EXAMPLES / "ring_suite.py", status=1, host=host)
    assert errors.splitlines()[-1].endswith("run it with: pytest scripts/examples/ring_suite.py")
    assert run_without("pytest", tmp_path, EXAMPLES / "ring_suite.py") == (
        "ring_suite: there is no pytest: pip install pytest"
    )


def test_two_hosts_make_one_world(host: ProgramHost) -> None:
    if os.geteuid() != 0 or not any(Path(folder, "ip").exists() for folder in os.environ["PATH"].split(":")):
        pytest.skip("network namespaces need root and the ip command")
    output, errors = run(EXAMPLES / "two_hosts.py")
    lines = [line.rpartition("] ")[2] for line in (output + errors).splitlines() if "(4, 4)" in line]
    assert sorted(lines) == [f"{rank} 6.0 (4, 4) (262144,) 3" for rank in range(4)]
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert not re.search(r"^ap[ab]\d+\b", listed, re.MULTILINE)
    _, errors = run(EXAMPLES / "two_hosts.py", "nowhere.py", status=1, host=host)
    assert errors == "two_hosts: there is no program nowhere.py\n"


def test_two_hosts_that_may_not_be_made_are_one_line(tmp_path: Path, host: ProgramHost) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root gets as far as the command ip")
    (tmp_path / "ip").write_text("#!/bin/sh\necho 'Operation not permitted' >&2\nexit 2\n")
    (tmp_path / "ip").chmod(0o755)
    _, errors = run(EXAMPLES / "two_hosts.py", status=1, host=host, PATH=str(tmp_path))
    assert re.fullmatch(r"two_hosts: ip netns add apa\d+: Operation not permitted\n", errors), errors


def test_two_hosts_without_the_command_ip_say_what_to_install(tmp_path: Path, host: ProgramHost) -> None:
    _, errors = run(EXAMPLES / "two_hosts.py", status=1, host=host, PATH=str(tmp_path))
    assert errors == "two_hosts: network namespaces need root and the command ip (apt-get install iproute2)\n"


def test_torch_without_its_extra_is_one_line(tmp_path: Path) -> None:
    line = run_without("torch", tmp_path, EXAMPLES / "torch_hook.py")
    assert line == 'torch_hook: asyncpar.torch needs torch: pip install "asyncpar[torch]"'


def test_a_service_without_its_extra_is_one_line(tmp_path: Path, host: ProgramHost) -> None:
    line = run_without("fastapi", tmp_path, EXAMPLES / "stream_service.py")
    assert line == 'stream_service: there is no fastapi: pip install "asyncpar[serve]"'
    _, errors = run(EXAMPLES / "stream_service.py", "http", status=1, host=host)
    assert errors == "stream_service: expected a port, got 'http'\n"
