"""Whatever shows the text of others shows it without the orders in it."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from asyncpar.core.observe.rank_reports import ProgressRecord
from asyncpar.dashboard.log_tail import LogTail
from asyncpar.dashboard.page_file import report_page
from asyncpar.dashboard.picture import Painter
from asyncpar.dashboard.run_file import RUN_FILE, write_run
from asyncpar.dashboard.server import DashboardServer
from asyncpar.engines.interface import PlaceOutput, PlaceProgress
from asyncpar.engines.output import StreamConsole
from asyncpar.engines.place_agent import EventDisplay
from asyncpar.errors import LaunchError
from asyncpar.harmless import HarmlessStream
from asyncpar.launch.agents.views import GroupView, HostView, JobView, show_group
from asyncpar.launch.command_line import OneLineCommand, exit_with, print_line, print_result
from asyncpar.launch.commands.job_text import show_job
from asyncpar.launch.commands.logs import show_logs
from asyncpar.launch.commands.top import _paint
from asyncpar.launch.display import PlainDisplay, TerminalDisplay
from asyncpar.launch.post_mortem import PostMortem
from asyncpar.observe.summary import HostSummary, JobSummary, ProgressSummary, RankAnswer, RankReport, RankSummary
from tests.engines.test_output import Terminal
from tests.launch.conftest import LIMIT, Launcher
from tests.launch.test_display import Collected
from tests.orders import COLOR, ORDERS, check_shown, left_in, planted


def job(text: str) -> JobSummary:
    """Return a job in which every name and every sentence is ``text``."""
    summary = RankSummary(rank=0, pid=1, time=1.0, progress=ProgressSummary(description=text, completed=1.0, total=2.0))
    report = RankReport(rank=0, host=text, pid=1, condition="failed", ending=text, summary=summary)
    hosts = (HostSummary(host=text, ranks=(report,)),)
    return JobSummary(
        job=text, pid=1, time=2.0, started=1.0, command=(text,), world_size=1, hosts=hosts, alarms=(text,)
    )


def group(text: str) -> GroupView:
    host = HostView(name=text, address=text, state="up", is_leader=True, is_voter=True, failure=text)
    return GroupView(
        leader=text,
        hosts=(host,),
        job=JobView(number=1, name=text, mode="ranks", nnodes="1", state="over", exit_code=1, message=text),
        change=text,
        parked=text,
    )


def through_command(run: Callable[[], Any]) -> str:
    """Return what a command prints on both streams; its stdout is a terminal as far as colours go."""

    @click.command(cls=OneLineCommand)
    def command() -> None:
        exit_with("look", lambda: run() or 0)

    return CliRunner().invoke(command, [], color=True).output


def refuse(text: str) -> None:
    raise LaunchError(text)


async def displayed(display: str, text: str, *, is_output: bool) -> str:
    """Return what a display shows of ``text`` as lines, as stdout of rank 0, and as progress."""
    stdout, stderr = Collected(), Collected()
    read, write = os.pipe()
    shown: PlainDisplay | TerminalDisplay
    if display == "plain":
        shown = PlainDisplay(stdout, stderr, stdout_filter=HarmlessStream(colors=True))
    else:
        shown = TerminalDisplay(stdout, stderr, descriptor=write, is_stdout_shared=True)
    content = text.encode()
    await shown.lines(content + b"\n", is_output=is_output)
    if is_output:
        for byte in content + b"\n":
            await shown.raw(bytes([byte]))
        await shown.raw(b"")
    shown.progress(0, text, ProgressRecord(text, 1.0, 2.0, {text: text}))
    await shown.finish()
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        return (stdout.written + stderr.written + pipe.read()).decode()


@pytest.mark.parametrize("display", ["plain", "terminal"])
@pytest.mark.parametrize("is_output", [False, True])
async def test_displays_pass_no_orders_on(display: str, is_output: bool) -> None:
    for order in ORDERS.values():
        check_shown(await displayed(display, planted(order), is_output=is_output), own=True)


async def test_colours_are_kept_in_output_of_ranks_on_a_terminal_only() -> None:
    text = f"{COLOR}red"
    assert f"{COLOR}red\x1b[0m\n" in await displayed("terminal", text, is_output=True)
    assert COLOR not in (await displayed("terminal", text, is_output=False)).partition("\n")[0]
    assert COLOR not in (await displayed("plain", text, is_output=False))


async def test_a_stdout_that_is_no_terminal_gets_every_byte() -> None:
    stdout = Collected()
    await PlainDisplay(stdout, Collected()).raw(bytes(range(256)))
    assert stdout.written == bytes(range(256))


COMMANDS: dict[str, Callable[[str], Any]] = {
    "result": lambda text: print_result("it", text),
    "result with colours": lambda text: print_result("it", text, colors=True),
    "json": lambda text: print_result("it", json.dumps({"a": text}, ensure_ascii=False).encode()),
    "line": print_line,
    "error line": lambda text: print_line(text, err=True),
    "error": refuse,
    "logs": lambda text: print_result(
        "it", show_logs([RankAnswer(rank=0, host=text, content=text.encode())], 9), colors=True
    ),
    "status": lambda text: print_result("it", show_job(job(text))),
    "status of agents": lambda text: print_result("it", show_group(group(text), width=None)),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_pass_no_orders_on(command: str) -> None:
    for order in (*ORDERS.values(), "\n"):
        text = planted(order)
        check_shown(through_command(partial(COMMANDS[command], text)), own="colours" in command)


def test_pictures_of_top_have_no_orders() -> None:
    for order in ORDERS.values():
        check_shown(_paint(job(planted(order)), planted(order), 200, 30).plain)


def test_the_caller_of_a_cluster_gets_no_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    for order in ORDERS.values():
        stream = Terminal()
        monkeypatch.setattr(sys, "stdout", stream)
        monkeypatch.setattr(sys, "stderr", stream)
        fill_console(planted(order))
        check_shown(stream.getvalue().partition("\r")[0], own=True)
        assert left_in(stream.getvalue().rpartition("\r")[2]) == ""


def fill_console(text: str) -> None:
    console = StreamConsole()
    console.output(PlaceOutput(f"{text}\n".encode(), is_error=True))
    for byte in text.encode():
        console.output(PlaceOutput(bytes([byte]), is_error=False))
    asyncio.run(EventDisplay(console.output).lines(f"{text}\n".encode()))  # type: ignore[arg-type]
    console.close()
    console.progress(PlaceProgress(text, ProgressRecord(text, 1.0, 2.0, {text: text})))


@pytest.mark.parametrize("order", [planted("".join(map(planted, ORDERS.values()))), planted("\r"), planted("\n")])
def test_files_about_a_job_have_no_orders(order: str, tmp_path: Path) -> None:
    text = planted(order)
    remains = PostMortem.open(str(tmp_path), job=text, host=text, command=[text], environment={"X": text})
    remains.finish(has_failed=True, message=text)
    check_shown((remains.folder / "summary.txt").read_text())
    document = {"picture": Painter().paint(job(text)), "lines": [{"n": 1, "rank": 0, "text": text, "error": False}]}
    write_run(tmp_path, document)
    check_shown(json.dumps(json.loads((tmp_path / RUN_FILE).read_text()), ensure_ascii=False))
    inside = report_page(document).partition('id="document">')[2].partition("</script>")[0]
    check_shown(json.dumps(json.loads(inside), ensure_ascii=False))


async def test_the_dashboard_passes_no_orders_on() -> None:
    import aiohttp

    tail = LogTail()
    async with DashboardServer("127.0.0.1", 0, tail=tail) as serving, aiohttp.ClientSession() as session:
        for order in ORDERS.values():
            tail.add(planted(order).encode(), rank=0)
        await serving.show(Painter().paint(job("".join(map(planted, ORDERS.values())))))
        headers = {"Authorization": f"Bearer {serving.token}"}
        for path, end in (("events", b"\n\n"), ("lines", None)):
            async with session.get(f"http://{serving.address}/{path}", headers=headers) as answer:
                body = await (answer.content.read() if end is None else answer.content.readuntil(end))
            content = json.loads(body.decode().removeprefix("data: "))
            check_shown(json.dumps(content, ensure_ascii=False))


PROGRAM = """
    text = os.environ["TEXT"]
    sys.stdout.write(text + "\\n")
    sys.stderr.write(text + "\\n")
    sys.stdout.flush()
    report(kind="progress", description=text, completed=1.0, total=2.0, fields={text: text})
    if rank == 1:
        raise RuntimeError(text)
    park()
"""


@pytest.fixture
def terminal() -> Iterator[tuple[int, int]]:
    with ExitStack() as stack:
        ours, theirs = pty.openpty()
        stack.callback(os.close, ours)
        yield ours, theirs


@pytest.mark.process
def test_a_terminal_gets_no_orders_from_ranks_that_fail(launcher: Launcher, terminal: tuple[int, int]) -> None:
    ours, theirs = terminal
    text = "".join(map(planted, (order for order in ORDERS.values() if "\0" not in order))) + COLOR + "red"
    process = subprocess.Popen(
        [sys.executable, "-m", "asyncpar", "launch", "--nproc-per-node", "2", launcher.script(PROGRAM)],
        cwd=launcher.directory,
        env=os.environ | {"TEXT": text, "TMPDIR": str(launcher.temporary), "TERM": "xterm"},
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    shown = b""
    try:
        while chunk := os.read(ours, 1 << 16):
            shown += chunk
    except OSError:  # the end of a pseudo-terminal
        pass
    assert process.wait(timeout=LIMIT) == 1
    text = shown.decode().replace("\r\n", "\n")
    check_shown(text, own=True)
    assert "rank 1" in text
    assert f"{COLOR}red" in text
