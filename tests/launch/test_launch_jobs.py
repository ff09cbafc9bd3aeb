"""`asyncpar launch` on one host, with real processes: exit codes, output, environment, restarts."""

from __future__ import annotations

import json
import os
import pty
import re
import socket
from pathlib import Path
from typing import Any

import pytest

from asyncpar.dashboard.page_file import report_page
from asyncpar.dashboard.run_file import read_run
from tests.launch.ways import changing_first
from tests.soak import first

pytestmark = pytest.mark.process
Launcher = Any  # the class lives in conftest.py


def test_each_rank_sees_its_place(launcher: Launcher) -> None:
    script = launcher.script("print(json.dumps(dict(os.environ)), file=sys.stderr)")
    done = launcher.run("--nproc-per-node", "3", "--rdzv-id", "demo", script)
    assert done.returncode == 0, done.stderr
    places = [json.loads(line.split("] ", 1)[1]) for line in done.stderr.splitlines()]
    places.sort(key=lambda place: int(place["RANK"]))
    assert [place["RANK"] for place in places] == ["0", "1", "2"]
    for place in places:
        assert place["LOCAL_RANK"] == place["RANK"]
        assert (place["WORLD_SIZE"], place["LOCAL_WORLD_SIZE"]) == ("3", "3")
        assert (place["GROUP_RANK"], place["GROUP_WORLD_SIZE"]) == ("0", "1")
        assert (place["MASTER_ADDR"], place["ASYNCPAR_BIND"]) == ("127.0.0.1", "127.0.0.1")
        assert (place["ASYNCPAR_JOB"], place["ASYNCPAR_GENERATION"]) == ("demo", "0")
        assert (place["OMP_NUM_THREADS"], place["PYTHONUNBUFFERED"]) == ("1", "1")
    assert len({place["ASYNCPAR_HOST_ID"] for place in places}) == 1


def test_the_master_port_is_free_and_the_secret_private(launcher: Launcher) -> None:
    script = launcher.script("""
        import socket, stat
        with socket.socket() as server:
            server.bind((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
        path = os.environ["ASYNCPAR_SECRET_FILE"]
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
        assert stat.S_IMODE(os.stat(os.path.dirname(path)).st_mode) == 0o700
        secret = open(path, "rb").read()
        assert len(secret) == 32
        for pid in (os.getpid(), os.getppid()):
            assert secret not in open(f"/proc/{pid}/cmdline", "rb").read()
        print(path)
    """)
    done = launcher.finish(launcher.start(script))  # whose process is its own
    assert done.returncode == 0, done.stderr
    assert not os.path.exists(os.path.dirname(done.stdout.strip()))


def test_stdout_of_rank_0_is_the_jobs_and_all_else_is_prefixed(launcher: Launcher) -> None:
    script = launcher.script("""
        print(f"result of {rank}")
        print(f"note of {rank}", file=sys.stderr)
    """)
    done = launcher.run("--nproc-per-node", "2", script)
    host = socket.gethostname().partition(".")[0]
    assert done.stdout == "result of 0\n"
    expected = {f"[{host}:0] note of 0", f"[{host}:1] note of 1", f"[{host}:1] result of 1"}
    assert set(done.stderr.splitlines()) == expected


def test_any_bytes_come_through(launcher: Launcher) -> None:
    script = launcher.script("""
        os.write(2, b"bad \\xff\\xfe bytes\\n" + b"y" * 200_000 + b"\\nno line end")
        os.write(1, b"no line end here either")
    """)
    done = launcher.run(script)
    assert done.returncode == 0
    assert done.stdout == "no line end here either"
    lines = [line.split("] ", 1)[1] for line in done.stderr.splitlines()]
    assert lines[0] == "bad \ufffd\ufffd bytes"
    assert lines[-1] == "no line end"
    assert "".join(lines[1:-1]) == "y" * 200_000


@pytest.mark.soak
def test_much_output_arrives_whole(launcher: Launcher) -> None:
    script = launcher.script("""
        for number in range(40_000):
            sys.stdout.write(f"{number} {'x' * 90}\\n")
    """)
    done = launcher.run("--nproc-per-node", "2", script, env={"PYTHONUNBUFFERED": ""})
    assert done.returncode == 0
    numbers = [int(line.split()[0]) for line in done.stdout.splitlines()]
    assert numbers == list(range(40_000))
    assert len(done.stderr.splitlines()) == 40_000


def test_arguments_after_the_script_are_the_scripts(launcher: Launcher) -> None:
    script = launcher.script("print(sys.argv[1:])")
    assert launcher.run(script, "--nproc-per-node", "9", "-m", "--").stdout == "['--nproc-per-node', '9', '-m', '--']\n"


def test_modules_and_plain_programs_run_too(launcher: Launcher) -> None:
    launcher.script("print('module', __name__)", name="some_module.py")
    assert launcher.run("-m", "some_module").stdout == "module __main__\n"
    assert launcher.run("--no-python", "sh", "-c", "echo rank $RANK").stdout == "rank 0\n"


def test_the_first_failing_rank_is_named_with_its_end(launcher: Launcher) -> None:
    script = launcher.script("""
        register()
        if rank == 2:
            print("the disk is full", file=sys.stderr)
            sys.exit(7)
        park()
    """)
    done = launcher.run("--nproc-per-node", "3", script)
    assert done.returncode == 7
    assert "rank 2 failed first: exited with code 7" in done.stderr
    assert "local rank 2, pid " in done.stderr
    summary = done.stderr[done.stderr.index("failed first") :]
    assert "the disk is full" in summary
    assert "then rank" not in summary
    assert launcher.ranks_alive() == []


@pytest.mark.soak
def test_the_reported_traceback_is_in_the_summary(launcher: Launcher) -> None:
    script = launcher.script("""
        from asyncpar.core.observe.reporting import Reporter, record_failures
        record_failures(Reporter.from_environment(os.environ))
        def deep():
            raise LookupError("no such shard")
        deep()
    """)
    done = launcher.run(script)
    summary = done.stderr[done.stderr.index("rank 0 failed first") :]
    assert done.returncode == 1
    assert "rank 0 failed first: LookupError: no such shard" in summary
    assert "in deep" in summary


@pytest.mark.soak
def test_a_rank_that_blames_another_does_not_hide_the_culprit(launcher: Launcher) -> None:
    """Rank 0 notices first and exits first; the rank that it blames takes longer to end."""
    script = launcher.script("""
        flag = f"{os.path.dirname(sys.argv[0])}/seen"
        if rank == 0:
            report(kind="failure", time=time.time(), type="PeerLost", message="rank 1 is gone",
                   traceback="PeerLost: rank 1 is gone", is_peer_error=True, blames=1)
            os.close(os.open(flag, os.O_CREAT))
            sys.exit(1)
        while not os.path.exists(flag):
            time.sleep(0.01)
        time.sleep(0.2)
        sys.exit(5)
    """)
    done = launcher.run("--nproc-per-node", "2", script)
    assert done.returncode == 5
    assert "rank 1 failed first: exited with code 5" in done.stderr
    assert "then rank 0" in done.stderr
    assert "PeerLost: rank 1 is gone" in done.stderr


def test_what_a_rank_wrote_about_its_end_is_awaited_for_a_moment(launcher: Launcher) -> None:
    """The last words of a rank may come after its process has ended: here a child of it writes them."""
    script = launcher.script("""
        leader = os.getpid()
        if os.fork() == 0:
            while os.getppid() == leader:
                time.sleep(0.001)
            time.sleep(0.05)
            report(kind="failure", time=time.time(), type="LookupError", message="late words", traceback="tb")
            os._exit(0)
        os._exit(3)
    """)
    done = launcher.run(script)
    assert done.returncode == 3
    assert "rank 0 failed first: LookupError: late words" in done.stderr


@pytest.mark.soak
def test_a_killed_rank_gives_the_shells_code(launcher: Launcher) -> None:
    script = launcher.script("""
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        park()
    """)
    done = launcher.run("--nproc-per-node", "2", script)
    assert done.returncode == 128 + 9
    assert "rank 1 failed first: was killed by SIGKILL" in done.stderr


@pytest.mark.soak
def test_restarts_begin_with_the_next_generation(launcher: Launcher) -> None:
    script = launcher.script("""
        generation, restarts = os.environ["ASYNCPAR_GENERATION"], os.environ["ASYNCPAR_RESTART_COUNT"]
        print(f"{rank} {generation} {restarts}", file=sys.stderr)
        register()
        if generation == "2":
            sys.exit(0)
        if rank == 0:
            sys.exit(1)
        park()
    """)
    done = launcher.run("--nproc-per-node", "2", "--max-restarts", "2", script)
    assert done.returncode == 0, done.stderr
    assert "0 2 2" in done.stderr
    assert "1 2 2" in done.stderr
    assert "restart 2" in done.stderr


def test_a_job_that_began_again_says_how_often_and_why_on_all_surfaces(launcher: Launcher, tmp_path: Path) -> None:
    script = launcher.script("""
        generation = os.environ["ASYNCPAR_GENERATION"]
        assert os.environ["ASYNCPAR_RESTART_COUNT"] == generation
        if generation == "2":
            if rank == 0:
                subprocess.run([sys.executable, "-m", "asyncpar", "status"], check=True)
            sys.exit(0)
        if generation == "0" and rank == 1:
            raise ValueError("no more samples")
        if generation == "1" and rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        park()
    """)
    done = launcher.run("--nproc-per-node", "2", "--max-restarts", "3", "--log-dir", "logs", script)
    assert done.returncode == 0, done.stderr
    document = read_run(tmp_path / "logs")
    host = document["picture"]["hosts"][0]
    why = [f"rank 1 on {host}: ValueError: no more samples", f"rank 0 on {host} was killed by SIGKILL"]
    assert document["picture"]["restarts"] == 2
    assert [(generation, reason) for generation, _, reason in document["picture"]["past"]] == [*enumerate(why)]
    assert all(reason in report_page(document) for reason in why)
    headline, *sentences = done.stdout.splitlines()
    assert headline.endswith("generation 2, 2 restarts")
    assert [line.partition(" ago: ")[2] for line in sentences if line.startswith("began again ")] == why[::-1]


@pytest.mark.soak
def test_restarts_come_to_an_end(launcher: Launcher) -> None:
    done = launcher.run("--max-restarts", "1", launcher.script("sys.exit(4)"))
    assert done.returncode == 4
    assert "restart 1" in done.stderr
    assert "restart 2" not in done.stderr


def test_leftovers_of_a_rank_end_with_it(launcher: Launcher) -> None:
    script = launcher.script("""
        child = subprocess.Popen(["sleep", "1000"])
        register(child.pid)
    """)
    done = launcher.run(script)
    assert done.returncode == 0
    assert len(launcher.registered()) == 1
    assert launcher.ranks_alive() == []


def test_log_files_are_written_by_attempt_and_rank(launcher: Launcher, tmp_path: Path) -> None:
    script = launcher.script("""
        print(f"out {rank}")
        print(f"err {rank}", file=sys.stderr)
    """)
    done = launcher.run("--nproc-per-node", "2", "--log-dir", "logs", "-r", "1", "--tee", "0:3,1:2", script)
    attempt = tmp_path / "logs" / "attempt_0"
    files = {str(path.relative_to(attempt)): path.read_text() for path in attempt.rglob("*.log")}
    assert files == {
        "0/stdout.log": "out 0\n",
        "0/stderr.log": "err 0\n",
        "1/stdout.log": "out 1\n",
        "1/stderr.log": "err 1\n",
    }
    assert done.stdout == "out 0\n"
    assert "err 1" in done.stderr
    assert "out 1" not in done.stderr


def test_progress_of_the_lowest_rank_is_shown_as_lines(launcher: Launcher) -> None:
    script = launcher.script("""
        for step in range(1, 201):
            report(kind="progress", description="train", completed=step, total=200, fields={"loss": f"{rank}.5"})
    """)
    done = launcher.run("--nproc-per-node", "2", script)
    lines = [line for line in done.stderr.splitlines() if "train" in line]
    assert lines[-1].endswith("] train 200/200 (100%) loss=0.5")
    assert len(lines) <= 4


def test_a_terminal_gets_a_bar_with_the_output_above_it(launcher: Launcher) -> None:
    script = launcher.script("""
        report(kind="progress", description="train", completed=5, total=5)
        time.sleep(0.2)
        print("done")
    """)
    terminal, inside = pty.openpty()
    process = launcher.start(script, env={"TERM": "xterm"}, output=inside)
    os.close(inside)
    seen = b""
    while chunk := read_terminal(terminal):
        seen += chunk
    os.close(terminal)
    assert process.wait(30) == 0
    text = re.sub(r"\x1b\[[0-9;]*m", "", seen.decode())
    first, *_, last = text.split("\r\x1b[2K")
    assert first == ""
    assert re.fullmatch(r"done\r\ntrain ━+ 5/5  100%\r\n", last)


def read_terminal(descriptor: int) -> bytes:
    """Read; a terminal whose other side is closed ends with an error."""
    try:
        return os.read(descriptor, 1 << 16)
    except OSError:
        return b""


@changing_first
def test_a_reader_that_leaves_ends_the_job_quietly(launcher: Launcher, hosts: tuple[str, ...]) -> None:
    script = launcher.script("""
        register()
        while True:
            print("more")
    """)
    process = launcher.start(*hosts, "--nproc-per-node", "2", script)
    assert process.stdout is not None
    assert process.stdout.readline() == "more\n"
    process.stdout.close()
    assert process.stderr is not None
    stderr = process.stderr.read()
    assert process.wait(30) == 128 + 13
    assert "Traceback" not in stderr
    assert "BrokenPipe" not in stderr
    assert launcher.ranks_alive() == []


def test_a_rank_that_exits_before_joining_ends_the_wait_of_the_others(launcher: Launcher) -> None:
    script = launcher.script("""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        register()
        if rank == 1:
            while len(os.listdir(sys.argv[1])) < 3:
                time.sleep(0.01)
            sys.exit(3)
        import asyncio
        from asyncpar.core.config.environment import LaunchEnvironment
        from asyncpar.core.config.world import Member
        from asyncpar.net.membership.client import JoinRequest, join_world
        from asyncpar.net.membership.credentials import read_secret
        from asyncpar.net.transport.rpc import Credentials
        place = LaunchEnvironment.from_mapping(os.environ)
        request = JoinRequest(member=Member(rank=rank), world_size=place.world_size, job=place.job)
        asyncio.run(join_world(place.rendezvous, Credentials(read_secret(place.secret_file)), request))
    """)
    grace = ("--grace-period", "1000")  # nobody waits for it
    done = launcher.run("--nproc-per-node", "3", *grace, script, str(launcher.pids_directory))
    assert done.returncode == 3
    assert "rank 1 failed first: exited with code 3" in done.stderr
    assert "PeerLost: rank 1 exited with code 3 before it joined the world" in done.stderr


@pytest.mark.soak
def test_a_world_that_never_fills_names_the_missing_ranks(launcher: Launcher) -> None:
    script = launcher.script("""
        if rank == 1:
            park()
        import asyncio
        from asyncpar.core.config.environment import LaunchEnvironment
        from asyncpar.core.config.world import Member
        from asyncpar.net.membership.client import JoinRequest, join_world
        from asyncpar.net.membership.credentials import read_secret
        from asyncpar.net.transport.rpc import Credentials
        place = LaunchEnvironment.from_mapping(os.environ)
        request = JoinRequest(
            member=Member(rank=rank), world_size=place.world_size, job=place.job, timeout=place.timeout
        )
        asyncio.run(join_world(place.rendezvous, Credentials(read_secret(place.secret_file)), request))
    """)
    done = launcher.run("--nproc-per-node", "2", "--rdzv-timeout", "0.5", script)
    assert done.returncode == 1
    assert "rank 0 waited 0.5 s: the world of 2 ranks (generation 0) is not complete; missing rank 1" in done.stderr


@pytest.mark.parametrize("closed", first(1, ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"]))
def test_a_launcher_works_with_its_standard_streams_closed(launcher: Launcher, closed: str) -> None:
    script = launcher.script("register()\nprint(rank, len(sys.stdin.read()))\n")
    shell = ("sh", "-c", f'"$@" {closed}', "sh")
    done = launcher.finish(launcher.start("--nproc-per-node", "2", script, prefix=shell))
    assert done.returncode == 0
    assert len(launcher.registered()) == 2
    assert done.stdout == ("" if ">&-" in closed.split() else "0 0\n")


@pytest.mark.soak
def test_the_progress_of_the_lowest_rank_is_shown(launcher: Launcher) -> None:
    script = launcher.script("""
        import asyncpar as ap

        with ap.progress("count", 3) as bar:
            for step in range(3):
                bar.advance(rank=rank)
    """)
    done = launcher.run("--nproc-per-node", "2", script)
    assert done.returncode == 0, done.stderr
    shown = [line for line in done.stderr.splitlines() if "count " in line]
    assert shown[-1].endswith("count 3/3 (100%) rank=0")  # rank 1 may have been the only one for a while
