"""Running a program: how it ends, and what is left of it."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import asyncpar as ap
from tests.soak import first

WAITING = """
import asyncio, asyncpar as ap

async def main():
    async with ap.init() as node:
        print("ready", flush=True)
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            print("left", flush=True)

ap.run(main)
"""


FORKING = """
import asyncio, os, signal, sys
import asyncpar as ap

async def main():
    child = os.fork()
    if child == 0:
        handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
        print(handlers[0] is signal.SIG_DFL, handlers[1] is signal.default_int_handler, flush=True)
        print("kept back:", [*signal.pthread_sigmask(signal.SIG_BLOCK, ())], flush=True)
        os.kill(os.getpid(), signal.SIGTERM)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    await asyncio.sleep(0.05)
    print("kept back:", [*signal.pthread_sigmask(signal.SIG_BLOCK, ())])
    print("still here")

ap.run(main)
"""


_LEFT = """
import os, signal, sys, threading
import asyncpar as ap, asyncpar.runner, asyncpar.blocking.program
from asyncpar.errors import PeerLost
asyncpar.runner.SIGNAL_SECONDS = asyncpar.blocking.program.SIGNAL_SECONDS = 30
left = PeerLost("rank 1: it left the world", rank=1, operation="recv", cause="it left the world")
timer = threading.Timer(0.2, lambda: os.kill(os.getpid(), int(sys.argv[1])))
timer.daemon = True
"""
LEFT_ALONE = {
    "asyncio": f"""{_LEFT}
async def main():
    timer.start()
    raise left

ap.run(main)
""",
    "blocking": f"""{_LEFT}
import asyncpar.blocking as ab
with ab.init():
    timer.start()
    raise left
""",
}


def test_the_result_of_main_is_returned() -> None:
    async def main() -> int:
        await asyncio.sleep(0)
        return 7

    assert ap.run(main) == 7
    assert ap.run(main()) == 7


@pytest.mark.parametrize("main", [None, 3, lambda: 3])
def test_what_is_no_coroutine_is_refused(main: Any) -> None:
    with pytest.raises(ap.UsageError, match="main: expected a coroutine, or a function"):
        ap.run(main)


async def test_within_a_running_loop_it_says_what_to_use_there() -> None:
    async def main() -> None: ...

    for given in (main, main()):
        with pytest.raises(ap.UsageError, match=r"run: an event loop runs already .* await Node.start"):
            ap.run(given)


def test_what_main_raises_is_raised() -> None:
    async def main() -> None:
        raise KeyError("gone")

    with pytest.raises(KeyError, match="gone"):
        ap.run(main)


def test_signal_handlers_are_as_before_when_run_returns() -> None:
    async def main() -> None:
        await asyncio.sleep(0)

    def own(_number: int, _frame: object) -> None:
        raise AssertionError

    before = signal.signal(signal.SIGTERM, own)
    interrupt = signal.getsignal(signal.SIGINT)
    try:
        ap.run(main)
        assert signal.getsignal(signal.SIGTERM) is own
        assert signal.getsignal(signal.SIGINT) is interrupt
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_handler_that_the_program_sets_stays() -> None:
    def own(_number: int, _frame: object) -> None:
        raise AssertionError

    async def main() -> None:
        signal.signal(signal.SIGINT, own)

    before = signal.getsignal(signal.SIGINT)
    try:
        ap.run(main)
        assert signal.getsignal(signal.SIGINT) is own
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.process
@pytest.mark.parametrize("loop", first(1, ["uvloop", "asyncio"]))
def test_children_of_forks_inherit_no_signal_handler_and_end_alone(tmp_path: Path, loop: str) -> None:
    """A loop's own handlers would write to the file that wakes the parent's loop."""
    program = tmp_path / "forking.py"
    program.write_text(FORKING)
    hide = "import sys; sys.modules['uvloop'] = None; " if loop == "asyncio" else ""
    run = subprocess.run(
        [sys.executable, "-c", f"{hide}import runpy; runpy.run_path({str(program)!r})"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout.splitlines() == ["True True", "kept back: []", "-15", "kept back: []", "still here"]


@pytest.mark.process
@pytest.mark.parametrize("closed", first(1, ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"]))
def test_a_program_runs_with_its_standard_streams_closed(tmp_path: Path, closed: str) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import sys, asyncio, asyncpar as ap\n"
        "async def main():\n"
        "    await asyncio.create_subprocess_exec(sys.executable, '-c', '')\n"
        "    open(sys.argv[1], 'w').close()\n"
        "ap.run(main)\n"
    )
    done = tmp_path / "done"
    code = subprocess.run(["sh", "-c", f'"$@" {closed}', "sh", sys.executable, program, done], check=False).returncode
    assert (code, done.exists()) == (0, True)


@pytest.mark.process
@pytest.mark.parametrize(
    ("number", "is_launched", "code", "is_silent"),
    [
        (signal.SIGTERM, False, 143, True),
        (signal.SIGINT, False, -signal.SIGINT, False),
        (signal.SIGINT, True, 130, True),
    ],
)
def test_signals_end_a_program_in_good_order(
    tmp_path: Path, number: signal.Signals, is_launched: bool, code: int, is_silent: bool
) -> None:
    program = tmp_path / "waiting.py"
    program.write_text(WAITING)
    reading, writing = os.pipe()
    environment = {**os.environ, **({"ASYNCPAR_REPORT_FD": str(writing)} if is_launched else {})}
    process = subprocess.Popen(
        [sys.executable, program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        pass_fds=[writing],
    )
    os.close(writing)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    shown, complaints = process.communicate()
    os.close(reading)
    assert shown == "left\n"
    assert process.returncode == code
    assert (complaints == "") is is_silent


@pytest.mark.process
@pytest.mark.parametrize("style", ["asyncio", "blocking"])
@pytest.mark.parametrize("number", first(1, [signal.SIGINT, signal.SIGTERM]))
def test_what_ctrl_c_did_to_other_ranks_first_is_not_shown_as_an_error(
    tmp_path: Path, style: str, number: signal.Signals
) -> None:
    """A launcher signals all ranks, but each in its own time.  SIGTERM comes because a rank was lost: that is shown."""
    program = tmp_path / "left.py"
    program.write_text(LEFT_ALONE[style])
    reading, writing = os.pipe()
    ended = subprocess.run(
        [sys.executable, program, str(int(number))],
        capture_output=True,
        text=True,
        env={**os.environ, "ASYNCPAR_REPORT_FD": str(writing)},
        pass_fds=[writing],
        check=False,
    )
    os.close(writing)
    os.close(reading)
    if number == signal.SIGINT:
        assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")
    else:
        assert (ended.returncode, ended.stdout) == (1, "")
        assert "PeerLost: rank 1: it left the world" in ended.stderr


@pytest.mark.process
@pytest.mark.parametrize("seconds", first(1, [0.0, 0.02]))
def test_what_sigterm_did_to_other_ranks_first_is_not_shown_as_an_error(tmp_path: Path, seconds: float) -> None:
    """A rank goes on for a moment after SIGTERM: it may lose ranks that had the signal before it and have left."""
    program = tmp_path / "left.py"
    program.write_text(f"""{_LEFT}
import asyncio

async def main():
    os.kill(os.getpid(), signal.SIGTERM)
    if {seconds}:
        await asyncio.sleep({seconds})
    raise left

asyncpar.runner.REASON_SECONDS = 30
ap.run(main)
""")
    reading, writing = os.pipe()
    ended = subprocess.run(
        [sys.executable, program],
        capture_output=True,
        text=True,
        env={**os.environ, "ASYNCPAR_REPORT_FD": str(writing)},
        pass_fds=[writing],
        check=False,
    )
    os.close(writing)
    reported = os.read(reading, 1)
    os.close(reading)
    assert (ended.returncode, ended.stdout, ended.stderr, reported) == (143, "", "", b"")


def test_what_ctrl_c_makes_of_operations_is_no_error_of_the_program() -> None:
    """Ranks are cancelled one after the other: one that cleans up may meet what the others did before."""
    read, write = os.pipe()
    program = """
import asyncio
import asyncpar as ap
from asyncpar.errors import PeerCancelled

async def main():
    print("ready", flush=True)
    try:
        await asyncio.sleep(60)
    except asyncio.CancelledError:
        raise PeerCancelled("rank 1 cancelled it", rank=1, cause="CancelledError")

ap.run(main)
"""
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        pass_fds=(write,),
        env=os.environ | {"ASYNCPAR_REPORT_FD": str(write)},
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    os.close(read)
    os.close(write)
    assert (process.returncode, errors) == (130, "")
