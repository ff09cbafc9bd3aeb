"""Messages of `asyncpar launch` when a job fails: the first failure, its frames, and a line per consequence; once."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.launch.ways import changing_first, fixed_first
from tests.soak import first

pytestmark = pytest.mark.process
Launcher = Any  # the class lives in conftest.py

STEPS = """
    import asyncio
    import numpy as np
    import asyncpar as ap

    async def step(node, number):
        if number == 3 and rank == 1:
            {failure}
        await node.world.all_reduce(np.ones(4))

    async def main():
        async with ap.init() as node:
            for number in range(9):
                await step(node, number)

    ap.run(main)
"""


def summary_of(text: str) -> list[str]:
    begun = max(text.find("stopping all ranks"), 0)  # none are stopped if all have ended by themselves
    return text[text.index("asyncpar launch: rank ", begun) :].splitlines()


@changing_first
def test_an_exception_is_reported_in_ten_lines_with_the_programs_frames(
    launcher: Launcher, hosts: tuple[str, ...]
) -> None:
    script = launcher.script(STEPS.format(failure="raise ValueError('bad batch 7')"))
    done = launcher.run(*hosts, "--nproc-per-node", "3", script)
    lines = summary_of(done.stderr)
    assert done.returncode == 1
    assert lines[0] == "asyncpar launch: rank 1 failed first: ValueError: bad batch 7"
    assert "      await step(node, number)" in lines
    assert "      raise ValueError('bad batch 7')" in lines
    assert len(lines) <= 10
    others = " ".join(line for line in lines if line.startswith("  then "))  # one line, where both were told alike
    assert re.findall(r"then ranks? ([\d, ]+) on", others) in (["0, 2"], ["0", "2"], ["2", "0"])
    assert "Traceback" not in done.stderr
    assert "asyncio/" not in done.stderr
    assert done.stderr.count("bad batch 7") == 2  # what it is, and the line that raised it


@pytest.mark.soak
def test_victims_that_are_ended_while_they_end_are_one_line(launcher: Launcher) -> None:
    """Without ``asyncpar.run``, and so slow to exit that SIGTERM comes first: their tracebacks were all shown."""
    text = STEPS.format(failure="raise ValueError('bad batch 7')").replace("ap.run(main)", "asyncio.run(main())")
    slow = """
    import atexit
    if rank != 1:
        atexit.register(time.sleep, 60)
    """
    done = launcher.run("--nproc-per-node", "3", launcher.script(slow + text))
    lines = summary_of(done.stderr)
    assert lines[0] == "asyncpar launch: rank 1 failed first: ValueError: bad batch 7"
    others = " ".join(line for line in lines if line.startswith("  then "))
    assert re.findall(r"then ranks? ([\d, ]+) on", others) in (["0, 2"], ["0", "2"], ["2", "0"])
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) <= 11


@changing_first
def test_all_frames_are_shown_on_demand(launcher: Launcher, hosts: tuple[str, ...]) -> None:
    script = launcher.script(STEPS.format(failure="raise ValueError('bad batch 7')").replace("rank == 1", "rank == 0"))
    done = launcher.run(*hosts, "--full-traceback", script)
    assert done.stderr.count("Traceback (most recent call last)") == 1
    assert "asyncpar/runner.py" in done.stderr


@pytest.mark.parametrize(
    ("program", "kind", "frame"),
    first(
        1,
        [
            ("def f(:", "SyntaxError: invalid syntax", "def f(:"),
            ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'", "import no_such_module"),
            ("def f():\n    1 / 0\nf()", "ZeroDivisionError: division by zero", "1 / 0"),
        ],
    ),
)
def test_ranks_that_fail_alike_are_reported_once(launcher: Launcher, program: str, kind: str, frame: str) -> None:
    path = launcher.pids_directory.parent / "broken.py"
    path.write_text(program + "\n")
    done = launcher.run("--nproc-per-node", "3", str(path))
    lines = summary_of(done.stderr)
    assert lines[0].endswith(f"failed first: {kind}")
    assert f"      {frame}" in lines
    assert done.stderr.count(kind) == 1
    assert "Traceback" not in done.stderr


@pytest.mark.soak
def test_a_killed_rank_is_first_however_fast_others_notice(launcher: Launcher) -> None:
    script = launcher.script(STEPS.format(failure="os.kill(os.getpid(), signal.SIGKILL)"))
    done = launcher.run("--nproc-per-node", "3", script)
    lines = summary_of(done.stderr)
    assert lines[0] == "asyncpar launch: rank 1 failed first: was killed by SIGKILL"
    others = [
        line for line in lines if line.startswith("  then rank")
    ]  # one line, or two where they were told differently
    assert re.findall(r"then ranks? ([0-9, ]+) on", "\n".join(others)) in (["0, 2"], ["0", "2"], ["2", "0"])
    assert all(re.search(r"PeerLost: (rank \d: )?all_reduce #[34]: rank 1", line) for line in others), lines


@pytest.mark.soak
@pytest.mark.parametrize("leaving", ["os._exit(0)", "sys.exit(0)"])
def test_a_rank_that_leaves_quietly_is_first_with_its_code(launcher: Launcher, leaving: str) -> None:
    done = launcher.run("--nproc-per-node", "2", launcher.script(STEPS.format(failure=leaving)))
    lines = summary_of(done.stderr)
    assert done.returncode == 1
    assert lines[0] == ("asyncpar launch: rank 1 failed first: exited with code 0 while other ranks still needed it")
    assert all(line.startswith("  then rank") for line in lines[2:])


def test_a_consequence_in_other_words_is_not_first(launcher: Launcher) -> None:
    """Rank 0 handles its ``PeerLost`` and raises another error, faster than the rank that failed gets out."""
    script = launcher.script("""
        import asyncio, contextlib
        import numpy as np
        import asyncpar as ap

        async def main():
            async with contextlib.AsyncExitStack() as stack:
                stack.push_async_callback(asyncio.sleep, 0.3 * rank)
                node = await stack.enter_async_context(ap.init())
                if rank == 1:
                    raise ValueError("the cause")
                try:
                    await node.world.all_reduce(np.ones(4))
                except ap.PeerError:
                    raise RuntimeError("a consequence")

        ap.run(main)
    """)
    done = launcher.run("--nproc-per-node", "2", script)
    lines = summary_of(done.stderr)
    assert lines[0] == "asyncpar launch: rank 1 failed first: ValueError: the cause"
    assert lines[-1].endswith("RuntimeError: a consequence")


@pytest.mark.soak
@fixed_first
def test_a_failure_that_is_followed_by_a_restart_is_reported_too(launcher: Launcher, hosts: tuple[str, ...]) -> None:
    script = launcher.script("""
        register()
        if os.environ["ASYNCPAR_RESTART_COUNT"] == "0":
            raise ValueError("only once")
    """)
    done = launcher.run(*hosts, "--max-restarts", "1", script)
    assert done.returncode == 0
    assert "rank 0 failed first: ValueError: only once" in done.stderr
    assert "starting all ranks again (restart 1)" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_traceback_of_a_rank_that_goes_on_is_shown(launcher: Launcher) -> None:
    script = launcher.script("""
        import logging
        try:
            1 / 0
        except ZeroDivisionError:
            logging.exception("went wrong")
    """)
    done = launcher.run(script)
    assert done.returncode == 0
    assert done.stderr.count("Traceback (most recent call last)") == 1


@changing_first
def test_an_interrupted_job_shows_where_its_ranks_were(launcher: Launcher, hosts: tuple[str, ...]) -> None:
    script = launcher.script("""
        register()
        if rank == 1:
            os.kill(os.getppid(), signal.SIGINT)
        park()
    """)
    done = launcher.run(*hosts, "--nproc-per-node", "2", script)
    assert done.returncode == 130
    assert "KeyboardInterrupt" in done.stderr
    assert done.stderr.splitlines()[-1] == "asyncpar launch: ended by SIGINT"


def test_the_logs_keep_the_whole_traceback_and_are_named(launcher: Launcher) -> None:
    script = launcher.script("raise ValueError('bad')")
    logs = launcher.pids_directory.parent / "logs"
    done = launcher.run("--log-dir", str(logs), "--tee", "3", script)
    assert f"more: {logs}" in done.stderr
    found = list(logs.rglob("stderr.log"))
    assert len(found) == 1
    assert "Traceback (most recent call last)" in found[0].read_text()
