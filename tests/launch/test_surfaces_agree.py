"""Faults are planted in launched jobs, and every surface that speaks of a job is read: all say the same."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from asyncpar.dashboard.picture import Painter
from asyncpar.errors import AsyncparError
from asyncpar.launch.commands.job_text import TITLES, row_of, show_job
from asyncpar.launch.commands.top import fit_job
from asyncpar.launch.control_socket import ControlReply, ControlRequest, ask_control
from asyncpar.launch.job_directory import list_jobs
from asyncpar.launch.page_views import facts_of
from asyncpar.launch.stack_answers import sort_answers
from asyncpar.observe.chains import show_stacks
from asyncpar.observe.dump_folder import describe_findings
from asyncpar.observe.holdups import describe_holdups
from asyncpar.observe.image import read_image
from asyncpar.observe.summary import JobSummary
from tests.soak import chosen

pytestmark = [pytest.mark.process, pytest.mark.timeout(400)]
Launcher = Any  # the class lives in conftest.py

CULPRIT = 1
PATIENCE = 90.0
WARNING = 2.0
"""Seconds after which the launcher prints a wait."""

CAUSES = {
    "blocked": r"blocks its event loop",
    "sleeps": r"\bsleeps\b",
    "held": r"something holds its interpreter lock",
    "computes": r"a C call holds its interpreter lock, and computes",
    "stopped": r"is stopped \(SIGSTOP, or a debugger\)",
    "deadlock": r"(?i:deadlock)|wait for each other[;:,]",
    "link": r"link between",
    "leak": r"is short of memory: .* of its control group are used, most by rank 1 \(",
    "killed": r"killed by the kernel \(SIGKILL\), which was out of memory; the limit is 600 MiB of its control group",
}
"""By cause: the words of all surfaces.  One that has those of another cause contradicts them."""


class Hang(NamedTuple):
    """What rank 1 does until it may go on, in the line that ends with ``# name``."""

    cause: str
    body: str


ALL_HANGS = {
    "python": Hang("blocked", "while not os.path.exists(gate): sum(range(1000))"),
    "asleep": Hang("sleeps", "while not os.path.exists(gate): await asyncio.sleep(0.05)"),
    "user_lock": Hang("blocked", "hold(gate).acquire()"),
    "lock_held": Hang("held", "assert ctypes.PyDLL(None).poll(ctypes.byref(pipe(gate)), 1, -1) == 1"),
    "stop": Hang("stopped", "os.kill(os.getpid(), signal.SIGSTOP)"),
}
HANGS = {name: ALL_HANGS[name] for name in chosen(("user_lock", "stop"), soak=tuple(ALL_HANGS))}
"""One job has one after the other: by default one that the rank itself reports, and one that only its agent sees."""

PROGRAM = """
    import asyncio, ctypes, threading
    import numpy as np
    import asyncpar as ap

    class Pipe(ctypes.Structure):
        _fields_ = [("fd", ctypes.c_int), ("events", ctypes.c_short), ("revents", ctypes.c_short)]

    def pipe(gate):
        return Pipe(os.open(gate + ".pipe", os.O_RDWR | os.O_NONBLOCK), 1, 0)

    def hold(gate):
        lock = threading.Lock()
        lock.acquire()

        def release():
            while not os.path.exists(gate):
                time.sleep(0.05)
            lock.release()

        threading.Thread(target=release, daemon=True).start()
        return lock

    class Asker(ap.Actor):
        def __init__(self, other):
            self._other = other

        @ap.endpoint
        async def ask(self):
            await asyncio.sleep(0.1)
            await self._other.ask()

    FAULTS

    async def main():
        async with ap.init() as node:
            await node.world.barrier()
            for name in NAMES:
                if rank == 1:
                    await globals()[name](f"{os.getcwd()}/{name}")
                await node.world.all_reduce(np.zeros(4, np.float32))
            if rank < 2:
                await node.spawn(Asker, node.ref("asker", 1 - rank), name="asker")
            await node.world.barrier()
            if rank < 2:
                await node.ref("asker").ask()
            await node.world.barrier()

    ap.run(main)
"""


def program() -> str:
    faults = "".join(f"    async def {name}(gate):\n        {hang.body}  # {name}\n" for name, hang in HANGS.items())
    return PROGRAM.replace("    FAULTS\n", faults).replace("NAMES", repr(list(HANGS)))


class Job:
    """A launched job, whose launcher is asked as commands do."""

    def __init__(self, launcher: Launcher) -> None:
        self.environment = {"XDG_RUNTIME_DIR": str(launcher.directory)}

    def ask(self, kind: str) -> ControlReply:
        (entry,) = list_jobs(self.environment)
        return ask_control(entry.socket_path, ControlRequest(kind=kind), within=30.0)

    def look(self) -> tuple[JobSummary, dict[str, str]]:
        """Return the summary, and the text of each surface about what holds the job up."""
        job = self.ask("status").job
        assert job is not None
        images = {answer.rank: read_image(answer.content) for answer in self.ask("image").ranks if answer.content}
        painter = Painter()
        painter.paint(job)
        picture = painter.paint(job)
        screen = fit_job(job, columns=500, lines=60)
        known = [*describe_holdups(job), *job.alarms]
        return job, {
            "status": show_job(job).partition("\n\n")[0],
            "top": "\n".join(screen.troubles),
            "page": "\n".join([picture["sentence"], *picture["alarms"]]),
            "explain": describe_findings(images, facts_of(job), (), known),
        }

    def stacks(self, rank: int) -> str:
        found, silent = sort_answers(self.ask("stacks").ranks)
        return show_stacks({each: stacks for each, stacks in found.items() if each == rank}, silent)


def until(look: Callable[[], Any], seen: list[object]) -> Any:
    """Return what ``look`` returns once it is not None; what it raises while the job forms is no answer.

    What was ``seen`` last is in the error.
    """
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        try:
            if (found := look()) is not None:
                return found
        except (AsyncparError, ValueError) as error:
            seen.append(error)
        time.sleep(0.3)
    raise AssertionError(f"it never became so: {seen[-1:]}")


def causes_in(text: str) -> set[str]:
    return {name for name, words in CAUSES.items() if re.search(words, text)}


def waits_in(printed: str, place: str) -> list[str]:
    """Return the launcher's lines about a wait for the culprit at ``place``."""
    words = rf"waits? for rank {CULPRIT} \(.*{re.escape(place)}\b"
    return [line for line in printed.splitlines() if re.search(words, line.partition(";")[0])]


def causes_printed(printed: str, place: str) -> set[str]:
    """Return the causes in lines of the launcher about the culprit at ``place``; one that is seen late has another."""
    about = (line for line in printed.splitlines() if re.search(rf"{re.escape(place)}\b", line))
    return {cause for line in about if f"rank {CULPRIT}" in line for cause in causes_in(line)}


def line_of(script: str, name: str) -> str:
    lines = Path(script).read_text().splitlines()
    return f"job.py:{next(n for n, line in enumerate(lines, 1) if line.endswith(f'# {name}'))}"


def watch_hangs(launcher: Launcher) -> dict[str, Any]:
    """Run one job with all hangs.

    By fault: the surfaces, once the status has its cause; at the end what was printed.
    """
    script = launcher.script(program())
    if "lock_held" in HANGS:
        os.mkfifo(launcher.directory / "lock_held.pipe")
    job = Job(launcher)
    options = ("--nproc-per-node", "3", "--grace-period", "1")
    printed = launcher.directory / "printed"
    with printed.open("wb") as output:
        warning = {"ASYNCPAR_WAIT_WARNING": str(WARNING)}
        process = launcher.start(*options, script, env=job.environment | warning, output=output.fileno())
    found: dict[str, Any] = {"places": {name: line_of(script, name) for name in HANGS}}
    rows, reports, lines = (found.setdefault(what, {}) for what in ("rows", "reports", "lines"))
    last: list[object] = []
    for name, hang in HANGS.items():
        place = found["places"][name]

        def look(cause: str = hang.cause, place: str = place) -> tuple[JobSummary, dict[str, str]] | None:
            summary, surfaces = job.look()
            texts = (surfaces["status"], surfaces["explain"])
            last.append(surfaces)
            is_there = all(causes_in(text) == {cause} and place in text for text in texts)
            terminal = printed.read_text()
            is_there &= bool(waits_in(terminal, place)) and cause in causes_printed(terminal, place)
            return (summary, surfaces) if is_there else None

        summary, surfaces = until(look, last)
        found[name] = surfaces | {"stacks": job.stacks(CULPRIT)}
        rows[name] = next(row for row in Painter().paint(summary)["ranks"] if row["rank"] == CULPRIT)
        reports[name] = summary.ranks[CULPRIT]
        lines[name] = row_of(summary.ranks[CULPRIT])
        (launcher.directory / name).touch()
        if name == "lock_held":
            (launcher.directory / "lock_held.pipe").write_bytes(b"go on")
        if name == "stop":
            os.kill(summary.ranks[CULPRIT].pid, signal.SIGCONT)

    def is_deadlock() -> dict[str, str] | None:
        _, surfaces = job.look()
        last.append(surfaces)
        is_there = all(causes_in(text) == {"deadlock"} for text in surfaces.values())
        return surfaces if is_there and "deadlock" in printed.read_text() else None

    found["cycle"] = until(is_deadlock, last)
    process.send_signal(signal.SIGTERM)
    launcher.finish(process)
    found["terminal"] = printed.read_text()
    return found


def check_surface(seen: Mapping[str, Any], fault: str, surface: str) -> None:
    """Fail unless ``surface`` names rank, place and cause."""
    text, place = seen[fault][surface], seen["places"][fault]
    assert re.search(rf"wait for rank {CULPRIT}\b", text), text
    assert re.search(rf"{re.escape(place)}\b", text), text
    assert causes_in(text) == {HANGS[fault].cause}, text
    assert "nothing holds" not in text.lower()


def check_culprit(seen: Mapping[str, Any], fault: str) -> None:
    """Fail unless the stack and the row of the culprit have the same place."""
    place = seen["places"][fault]
    assert re.search(rf"{re.escape(place)}\b", seen[fault]["stacks"]), seen[fault]["stacks"]
    row, report = seen["rows"][fault], seen["reports"][fault]
    assert row["site"] == place
    assert row["cpu"] is None  # of one look there is no rate
    assert seen["lines"][fault][TITLES.index("at")] == place
    assert re.search(r"\w", seen["lines"][fault][TITLES.index("what")]), seen["lines"][fault]
    assert report.condition == {"held": "hung", "stopped": "stopped"}.get(HANGS[fault].cause, "well")


def check_terminal(seen: Mapping[str, Any]) -> None:
    """Fail unless the terminal has named them in the same words."""
    terminal = seen["terminal"]
    for name, hang in HANGS.items():
        assert waits_in(terminal, seen["places"][name]), terminal
        causes = causes_printed(terminal, seen["places"][name])
        if hang.cause == "held":
            causes.discard("blocked")  # it is, too, and that is seen before it is known why
        assert causes == {hang.cause}, terminal
    assert "deadlock" in terminal
    how = r"rank 1 is stopped \(SIGSTOP, or a debugger\)"
    assert re.search(rf"{how}; the job waits for it \(--stopped-after SECONDS would end the job\)", terminal), terminal
    assert "rank 1 runs again" in terminal


def test_every_surface_names_rank_place_and_cause_of_a_hang_and_of_a_cycle_of_asks(launcher: Launcher) -> None:
    seen = watch_hangs(launcher)
    for fault in HANGS:
        for surface in ("status", "top", "page", "explain"):
            check_surface(seen, fault, surface)
        check_culprit(seen, fault)
    check_terminal(seen)
    for surface, text in seen["cycle"].items():
        assert "asker" in text or "wait for each other" in text, (surface, text)


class End(NamedTuple):
    """What rank 1 does, which ends the job, and the words about it; ``code``: of the launcher."""

    body: str
    cause: str
    code: int
    is_error: bool = False
    """Does it end with an exception, whose place is printed?"""


ENDS = {
    "exception": End("raise ValueError('no more data')", r"ValueError: no more data", 1, is_error=True),
    "other_operation": End(
        "await node.world.all_gather(np.zeros(4, np.float32))",
        r"OperationMismatch: .*rank 1 calls all_gather\(",
        1,
        is_error=True,
    ),
    "quiet_exit": End("os._exit(0)", r"exited with code 0", 1),
    "exit_code": End("os._exit(7)", r"exited with code 7", 7),
    "crash": End("ctypes.string_at(0)", r"was killed by SIGSEGV .*called in end at .*job\.py:\d+", 139),
}

RANKS_OF_AN_END = chosen(2, soak=3)

ENDING = """
    import asyncio, ctypes
    import numpy as np
    import asyncpar as ap

    async def end(node):
        BODY  # end

    async def main():
        async with ap.init() as node:
            await node.world.barrier()
            if rank == 1:
                await end(node)
            await node.world.all_reduce(np.zeros(4, np.float32))

    ap.run(main)
"""


@pytest.mark.parametrize("fault", chosen(("other_operation",), soak=tuple(ENDS)))
def test_the_terminal_and_the_report_name_the_rank_that_ended_a_job_and_why(launcher: Launcher, fault: str) -> None:
    end = ENDS[fault]
    script = launcher.script(ENDING.replace("BODY", end.body))
    done = launcher.run("--nproc-per-node", str(RANKS_OF_AN_END), "--transport", "tcp", "--log-dir", "logs", script)
    assert done.returncode == end.code, done.stderr
    if end.is_error:
        name, number = line_of(script, "end").split(":")
        first = done.stderr.partition(f"rank {CULPRIT} failed first")[2].partition("then rank")[0]
        assert f'File "{name}", line {number}, in end' in first, done.stderr
    assert re.search(rf"rank {CULPRIT} failed first: .*{end.cause}", done.stderr), done.stderr
    picture = json.loads((launcher.directory / "logs" / "run.json").read_text())["picture"]
    assert re.search(rf"rank {CULPRIT} failed first: .*{end.cause}", picture["ended"]), picture["ended"]
    assert re.match(rf"Rank {CULPRIT} \(.*\) .*{end.cause}", picture["sentence"]), picture["sentence"]
    others = "|".join(str(rank) for rank in range(RANKS_OF_AN_END) if rank != CULPRIT)
    blamed = re.split(end.cause, picture["sentence"])[0]
    assert not re.search(rf"[Rr]anks? ({others})\b", blamed)


LEAKING = """
    import asyncio
    import numpy as np
    import asyncpar as ap

    def used():
        with open(os.environ["GROUP"] + "/memory.usage_in_bytes") as file:
            return int(file.read())

    async def main():
        async with ap.init() as node:
            kept = []
            while True:
                await node.world.all_reduce(np.ones(4))
                if rank == 1 and (used() < 575 << 20 or os.path.exists("go")):
                    kept.append(np.ones(1_000_000))
                await asyncio.sleep(0.01)

    ap.run(main)
"""


@pytest.mark.soak
def test_a_leak_is_an_alarm_everywhere_and_then_the_cause_of_the_end(launcher: Launcher, memory_group: Path) -> None:
    job = Job(launcher)
    printed = launcher.directory / "printed"
    with printed.open("wb") as output:
        process = launcher.start(
            *("--nproc-per-node", "2", "--log-dir", "logs", launcher.script(LEAKING)),
            env=job.environment | {"GROUP": str(memory_group)},
            prefix=("sh", "-c", f'echo $$ > {memory_group}/cgroup.procs; exec "$@"', "sh"),
            output=output.fileno(),
        )
    last: list[object] = []

    def is_short() -> dict[str, str] | None:
        _, surfaces = job.look()
        surfaces["terminal"] = printed.read_text()
        last.append(surfaces)
        return surfaces if all(causes_in(text) == {"leak"} for text in surfaces.values()) else None

    until(is_short, last)
    (launcher.directory / "go").touch()
    launcher.finish(process)
    assert process.returncode == 137
    terminal = printed.read_text()
    words = CAUSES["killed"] + f"; resident last: rank {CULPRIT} "
    assert re.search(f"rank {CULPRIT} failed first: was {words}", terminal), terminal
    picture = json.loads((launcher.directory / "logs" / "run.json").read_text())["picture"]
    assert re.search(f"rank {CULPRIT} failed first: was {words}", picture["ended"]), picture["ended"]
    assert re.match(rf"Rank {CULPRIT} \(.*\) was {words}", picture["sentence"]), picture["sentence"]


STEPS = """
    import asyncio
    import numpy as np
    import asyncpar as ap

    async def main():
        async with ap.init() as node:
            for step in range(10**9):
                await node.world.all_reduce(np.zeros(20_000))  # step
                if step == 10:
                    open(f"steps-{rank}", "w").close()
                await asyncio.sleep(0.02)

    ap.run(main)
"""
NOWHERE = "02:00:00:00:00:01"
"""A link-layer address that nobody has."""


@pytest.fixture
def second_wire(namespaces: tuple[str, str]) -> Callable[[], None]:
    """Join two hosts by a wire of their own for ranks, 10.213.8.1 and 10.213.8.2; return what cuts it in silence."""
    left, right = namespaces

    def run(command: str) -> None:
        subprocess.run(command.split(), check=True, capture_output=True)

    run(f"ip link add ranks netns {left} type veth peer name ranks netns {right}")
    for number, name in enumerate(namespaces, 1):
        run(f"ip -n {name} addr add 10.213.8.{number}/24 dev ranks")
        run(f"ip -n {name} link set ranks up")

    def cut() -> None:
        for number, name in enumerate(namespaces, 1):
            run(f"ip -n {name} neigh replace 10.213.8.{3 - number} lladdr {NOWHERE} dev ranks nud permanent")

    return cut


@pytest.mark.soak
def test_a_dead_link_is_named_everywhere(
    launcher: Launcher, namespaces: tuple[str, str], second_wire: Callable[[], None]
) -> None:
    (launcher.directory / "secret").write_bytes(os.urandom(32))
    (launcher.directory / "secret").chmod(0o600)
    script, job = launcher.script(STEPS), Job(launcher)
    printed, processes = launcher.directory / "printed", []
    for number, name in reversed(list(enumerate(namespaces))):
        hosts = ("--nnodes", "2", "--node-rank", str(number), "--rdzv-endpoint", "10.213.7.1:29400")
        options = ("--local-addr", f"10.213.8.{number + 1}", "--secret-file", "secret", "--grace-period", "1")
        env = {"ASYNCPAR_WAIT_WARNING": str(WARNING), "ASYNCPAR_LINK_TIMEOUT": "120", "ASYNCPAR_TRANSPORT": "tcp"}
        with printed.open("ab") if number == 0 else open(os.devnull, "wb") as output:
            processes.append(
                launcher.start(
                    *(*hosts, *options, script),
                    env=env | (job.environment if number == 0 else {}),
                    prefix=("ip", "netns", "exec", name),
                    output=output.fileno(),
                )
            )
    last: list[object] = []

    def has_begun() -> bool | None:
        last.append(printed.read_text())
        return all((launcher.directory / f"steps-{rank}").exists() for rank in (0, 1)) or None

    until(has_begun, last)
    second_wire()

    def is_cut() -> dict[str, str] | None:
        _, surfaces = job.look()
        surfaces["terminal"] = printed.read_text()
        last.append(surfaces)
        return surfaces if all(causes_in(text) == {"link"} for text in surfaces.values()) else None

    for surface, text in until(is_cut, last).items():
        assert re.search(r"[Rr]anks? 0, (rank )?1\b", text), (surface, text)
        assert re.search(rf"{re.escape(line_of(script, 'step'))}\b", text), (surface, text)
        assert "nothing holds" not in text.lower()
    for process in processes[::-1]:
        process.send_signal(signal.SIGTERM)
        launcher.finish(process)
