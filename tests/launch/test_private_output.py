"""All that commands write about a job can be read by its user only, whatever the umask is."""

from __future__ import annotations

import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.launch.conftest import LIMIT, Launcher

pytestmark = pytest.mark.process

PROGRAM = """
    import asyncio
    import asyncpar as ap

    async def main():
        async with ap.init() as node:
            print("what others need not see")
            await node.world.barrier()
            register()
            while not os.path.exists("end"):
                await asyncio.sleep(0.01)
            raise RuntimeError("the end")

    asyncio.run(main())
"""
OPEN_MASK = ("sh", "-c", 'umask 0; exec "$@"', "sh")
COMMANDS = (
    ("trace", "--seconds", "0", "-o", "out/t.pftrace"),
    ("trace", "--seconds", "0", "--json", "-o", "out/t.json"),
    ("flight", "dump", "--torch", "-o", "out/deep/dump"),
)


def ask(launcher: Launcher, *arguments: str) -> None:
    done = subprocess.run(
        [*OPEN_MASK, sys.executable, "-m", "asyncpar", *arguments],
        cwd=launcher.directory,
        env={"TMPDIR": str(launcher.temporary), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def modes(folder: Path) -> dict[str, int]:
    """Return the mode of each file below ``folder``, and of each folder with it."""
    found = [folder, *folder.rglob("*")]
    return {str(path.relative_to(folder)): stat.S_IMODE(path.lstat().st_mode) for path in found}


def test_no_file_about_a_job_can_be_read_by_others(
    launcher: Launcher, eventually: Callable[[Callable[[], bool]], None]
) -> None:
    directory = launcher.directory
    (directory / "out").mkdir(mode=0o700)
    job = launcher.start(
        *("--log-dir", "a/logs", "--tee", "3", "--post-mortem", "b/remains"),
        launcher.script(PROGRAM),
        env={"XDG_RUNTIME_DIR": ""},
        prefix=OPEN_MASK,
    )
    eventually(lambda: len(launcher.registered()) == 1)
    for command in COMMANDS:
        ask(launcher, *command)
    (directory / "end").touch()
    assert launcher.finish(job).returncode == 1
    ask(launcher, "report", "a/logs", "-o", "out/page.html")

    found = {name: mode for part in ("a", "b", "out") for name, mode in modes(directory / part).items()}
    wanted = ("run.json", "stdout.log", "stderr.log", "ends.jsonl", "summary.txt", "rank_0.ring", "torch_rank_0")
    assert all(any(name.endswith(want) for name in found) for want in wanted), found
    assert {name: oct(mode) for name, mode in found.items() if mode & 0o077} == {}
