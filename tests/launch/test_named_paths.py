"""Paths in the texts of commands and launchers lead to files that are there."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.launch.conftest import LIMIT
from tests.launch.test_launch_hosts import start_pair

pytestmark = pytest.mark.process

FAILS = "sys.exit(3) if rank == int(sys.argv[1]) else park()"


def log_files_in(text: str) -> list[Path]:
    return [Path(path) for path in re.findall(r"\S+/attempt_\d+/\S+", text)]


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("keeps", [(0,), (1,), (0, 1)])
def test_the_last_words_of_a_job_of_two_hosts_name_the_log_of_the_rank_that_failed(
    launcher: Any, failing: int, keeps: tuple[int, ...]
) -> None:
    """Each host has a folder of its own, or none."""
    first, second = ((("--log-dir", f"logs{host}", "--tee", "3") if host in keeps else ()) for host in (0, 1))
    script = launcher.script("import select\n" + FAILS.replace("park()", "select.select([], [], [], 30)"))
    leader, follower = start_pair(launcher, script, first=first, second=second, arguments=(str(failing),))
    for done in (launcher.finish(leader), launcher.finish(follower)):
        assert done.returncode == 3
        assert f"rank {failing} failed first: exited with code 3" in done.stderr
        named = log_files_in(done.stderr)
        assert all(path.is_file() for path in named), done.stderr
        expected = [launcher.directory / f"logs{failing}/attempt_0/{failing}/stderr.log"]
        assert named == (expected if failing in keeps else []), done.stderr


def test_the_log_of_a_rank_that_the_last_attempt_has_not_is_that_of_the_attempt_that_failed(launcher: Any) -> None:
    script = launcher.script("sys.exit(3)")
    done = launcher.run("--log-dir", "logs", "--tee", "2", "--max-restarts", "1", script)
    named = log_files_in(done.stderr)
    assert named == [launcher.directory / f"logs/attempt_{attempt}/0/stderr.log" for attempt in (0, 1)]
    assert all(path.is_file() for path in named)


def test_streams_that_only_some_ranks_keep_are_named_for_these(launcher: Any) -> None:
    for failing in (0, 1):
        script = launcher.script(FAILS)
        options = ("--log-dir", f"logs{failing}", "--nproc-per-node", "2", "--tee", "0:2")
        done = launcher.run(*options, script, str(failing))
        named = log_files_in(done.stderr)
        expected = [launcher.directory / f"logs{failing}/attempt_0/0/stderr.log"] if failing == 0 else []
        assert named == expected, done.stderr


# -- what commands make -------------------------------------------------------------------------------------------

JOB = """
    import asyncio
    import asyncpar as ap

    async def main():
        async with ap.init() as node:
            await node.world.barrier()
            register()
            while not os.path.exists("end"):
                await asyncio.sleep(0.01)
            if sys.argv[1:] == ["fail"]:
                raise RuntimeError("the end")

    ap.run(main)
"""
COMMANDS = {
    "trace": ("trace", "--seconds", "0", "-o", "made/t.pftrace"),
    "trace as JSON": ("trace", "--seconds", "0", "--json", "-o", "made/t.json"),
    "flight dump": ("flight", "dump", "--torch", "-o", "made/deep/dump"),
}
OFFLINE = {
    "flight explain": ("flight", "explain", "made/deep/dump"),
    "report": ("report", "logs", "-o", "made/page.html"),
}
REFUSED = {
    "report of no run": ("report", "made", "-o", "made/other.html"),
    "explain of no dump": ("flight", "explain", "made"),
}


def paths_in(text: str, launcher: Any) -> list[Path]:
    """Return all paths of files that ``text`` names: absolute ones of the test, and relative ones with a folder."""
    words = re.findall(rf"(?:{re.escape(str(launcher.directory))}|\b(?:made|logs|remains))/[\w./+-]*\w", text)
    return [launcher.directory / word for word in words]


def ask(launcher: Any, arguments: tuple[str, ...], *, code: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "asyncpar", *arguments],
        cwd=launcher.directory,
        env={"TMPDIR": str(launcher.temporary), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    said = done.stdout + done.stderr
    assert done.returncode == code, said
    return said


def test_paths_that_commands_name_are_there(launcher: Any, eventually: Callable[[Callable[[], bool]], None]) -> None:
    """Those of what they made, and of what they read; of a command that refuses, none that it might have made."""
    (launcher.directory / "made").mkdir()
    options = ("--nproc-per-node", "2", "--log-dir", "logs", "--tee", "3", "--post-mortem", "remains")
    job = launcher.start(*options, launcher.script(JOB), "fail", env={"XDG_RUNTIME_DIR": ""})
    eventually(lambda: len(launcher.registered()) == 2)
    said = {name: ask(launcher, command) for name, command in COMMANDS.items()}
    (launcher.directory / "end").touch()
    said["launch"] = launcher.finish(job).stderr
    said |= {name: ask(launcher, command) for name, command in OFFLINE.items()}
    named = {name: paths_in(text, launcher) for name, text in said.items()}
    missing = {name: [path for path in paths if not path.exists()] for name, paths in named.items()}
    assert not any(missing.values()), (missing, said)
    names_something = {name for name, paths in named.items() if paths}
    assert names_something >= {*COMMANDS, "report", "launch"}, said
    for name, command in REFUSED.items():
        refusal = ask(launcher, command, code=2)
        assert not [path for path in paths_in(refusal, launcher) if path.name == "other.html"], (name, refusal)


@pytest.mark.parametrize("ending", ["well", "badly"])
@pytest.mark.parametrize("options", [("--tee", "3"), ("--redirects", "1"), ("--post-mortem", "remains"), ()])
def test_paths_that_a_launcher_names_are_there_however_its_job_ends(
    launcher: Any, options: tuple[str, ...], ending: str
) -> None:
    code = 3 if ending == "badly" else 0
    done = launcher.run(*options, launcher.script(f"print('x'); sys.exit({code})"))
    assert done.returncode == code
    named = paths_in(done.stderr, launcher)
    assert all(path.exists() for path in named), done.stderr
    makes_logs = options[:1] in (("--tee",), ("--redirects",))
    assert bool(named) == (makes_logs or (code != 0 and options[:1] == ("--post-mortem",))), done.stderr
    for path in launcher.temporary.glob("asyncpar-logs-*"):
        shutil.rmtree(path)
