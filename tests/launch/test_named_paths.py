"""Paths in the texts of commands and launchers lead to files that are there."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.launch.test_launch_hosts import run_pair
from tests.soak import first

pytestmark = pytest.mark.process

FAILS = "sys.exit(3) if rank == int(sys.argv[1]) else park()"


def log_files_in(text: str) -> list[Path]:
    return [Path(path) for path in re.findall(r"\S+/attempt_\d+/\S+", text)]


@pytest.mark.parametrize("failing", first(1, [1, 0]))
@pytest.mark.parametrize("keeps", first(1, [(0,), (1,), (0, 1)]))
def test_the_last_words_of_a_job_of_two_hosts_name_the_log_of_the_rank_that_failed(
    launcher: Any, failing: int, keeps: tuple[int, ...]
) -> None:
    """Each host has a folder of its own, or none."""
    first, second = ((("--log-dir", f"logs{host}", "--tee", "3") if host in keeps else ()) for host in (0, 1))
    script = launcher.script("import select\n" + FAILS.replace("park()", "select.select([], [], [], 30)"))
    for done in run_pair(launcher, script, first=first, second=second, arguments=(str(failing),)):
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


@pytest.mark.parametrize("options", first(1, [(), ("--tee", "0:2"), ("--redirects", "0:1")]))
def test_both_streams_of_all_ranks_are_kept_where_a_folder_is_named_whatever_is_shown(
    launcher: Any, options: tuple[str, ...]
) -> None:
    script = launcher.script("""
        print(f"out {rank}")
        print(f"err {rank}", file=sys.stderr)
        sys.exit(3)
    """)
    done = launcher.run("--log-dir", "logs", "--nproc-per-node", "2", *options, script)
    attempt = launcher.directory / "logs" / "attempt_0"
    assert {str(path.relative_to(attempt)): path.read_text() for path in attempt.rglob("*.log")} == {
        f"{rank}/{stream}.log": f"{stream[3:]} {rank}\n" for rank in (0, 1) for stream in ("stdout", "stderr")
    }
    assert all(path.stat().st_mode & 0o077 == 0 for path in attempt.rglob("*"))
    assert ("out 0" in done.stdout) == (options != ("--redirects", "0:1"))
    assert "err 1" in done.stderr
    assert [path.name for path in log_files_in(done.stderr)] == ["stderr.log"]


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
    done = launcher.command(*arguments, env={"XDG_RUNTIME_DIR": ""})
    said: str = done.stdout + done.stderr
    assert done.returncode == code, said
    return said


def test_paths_that_commands_name_are_there(launcher: Any, eventually: Callable[[Callable[[], bool]], None]) -> None:
    """Those of what they made, and of what they read; of a command that refuses, none that it might have made."""
    (launcher.directory / "made").mkdir()
    options = ("--log-dir", "logs", "--tee", "3", "--post-mortem", "remains")
    job = launcher.start(*options, launcher.script(JOB), "fail", env={"XDG_RUNTIME_DIR": ""})
    eventually(lambda: len(launcher.registered()) == 1)
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
@pytest.mark.parametrize(
    "options", first(2, [("--tee", "3"), ("--redirects", "1"), ("--log-dir", "logs"), ("--post-mortem", "remains"), ()])
)
def test_paths_that_a_launcher_names_are_there_however_its_job_ends(
    launcher: Any, options: tuple[str, ...], ending: str
) -> None:
    code = 3 if ending == "badly" else 0
    done = launcher.run(*options, launcher.script(f"print('x'); sys.exit({code})"))
    assert done.returncode == code
    named = paths_in(done.stderr, launcher)
    assert all(path.exists() for path in named), done.stderr
    makes_folder = options[:1] in (("--tee",), ("--redirects",))  # whose name nobody has given
    assert bool(named) == (makes_folder or (code != 0 and bool(options))), done.stderr
    for path in launcher.temporary.glob("asyncpar-logs-*"):
        shutil.rmtree(path)
