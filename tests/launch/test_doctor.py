"""The doctor finds planted faults, says what to do, and ends with code 1; what is well is said, too."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from asyncpar.core.concurrency import streams
from asyncpar.launch.doctor import host_checks, peer_checks, peer_service
from asyncpar.launch.doctor.findings import Examination, Finding, Verdict, fail, show_findings, warn, well
from asyncpar.launch.doctor.peer_service import PeerReport, PortWays, meet, serve_doctor
from tests.launch.conftest import LIMIT, Launcher
from tests.ports import free_port


def test_findings_are_shown_with_what_to_do() -> None:
    findings = (
        well("name", "a is 10.0.0.1"),
        warn("clock", "no NTP", "start it"),
        fail("MTU", "900", "set it", host="b"),
    )
    examination = Examination(host="a", version="1", findings=findings)
    assert show_findings(examination).splitlines() == [
        "ok    name   a is 10.0.0.1",
        "warn  clock  no NTP",
        "             -> start it",
        "fail  MTU b  900",
        "             -> set it",
        "",
        "1 of 3 checks found something wrong, 1 a doubt",
    ]
    assert examination.exit_code == 1
    assert Examination(host="a", version="1", findings=findings[:2]).exit_code == 0


def test_every_check_of_this_host_reports_something(tmp_path: Path) -> None:
    findings = host_checks.examine_host({"XDG_RUNTIME_DIR": str(tmp_path)}, secret_file=None, with_hosts=False)
    assert len({finding.check for finding in findings}) == len(findings) == 14
    assert all(finding.found for finding in findings)
    assert all(finding.advice for finding in findings if finding.verdict is not Verdict.OK)


class _Usage(NamedTuple):
    free: int


class _Link(NamedTuple):
    isup: bool
    mtu: int


def _no_name(*_: object, **__: object) -> object:
    raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")


def _one_address(*_: object, **__: object) -> object:
    return [(socket.AF_INET, None, 0, "", ("127.0.1.1", 0))]


def verdict_of(finding: Finding) -> tuple[Verdict, bool]:
    return finding.verdict, bool(finding.advice)


def test_planted_faults_of_the_host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each fault is planted where the check looks; a script plants them in namespaces."""
    bad = (Verdict.FAIL, True)
    with monkeypatch.context() as patch:
        patch.setattr(resource, "getrlimit", lambda _: (256, 4096))
        assert verdict_of(host_checks.check_files()) == bad
        assert "ulimit -n 4096" in host_checks.check_files().advice
        assert verdict_of(host_checks.check_locked()) == (Verdict.WARN, True)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: _Usage(1 << 20))
        assert verdict_of(host_checks.check_shared_memory()) == bad
        assert verdict_of(host_checks.check_temporary({"XDG_RUNTIME_DIR": str(tmp_path)})) == bad
    with monkeypatch.context() as patch:
        patch.setattr(host_checks, "core_quota", lambda: 0.5)
        assert verdict_of(host_checks.check_processors()) == bad
        patch.setattr(host_checks, "core_quota", lambda: 1.5)
        patch.setattr(host_checks, "count_cores", lambda: 8)
        assert verdict_of(host_checks.check_processors()) == (Verdict.WARN, True)
    with monkeypatch.context() as patch:
        patch.setattr(socket, "getaddrinfo", _no_name)
        assert verdict_of(host_checks.check_name(with_hosts=True)) == bad
        assert verdict_of(host_checks.check_name(with_hosts=False)) == (Verdict.WARN, True)
        patch.setattr(socket, "getaddrinfo", _one_address)
        assert verdict_of(host_checks.check_name(with_hosts=True)) == (Verdict.WARN, True)
    with monkeypatch.context() as patch:
        patch.setattr(psutil, "net_if_stats", lambda: {"eth0": _Link(True, 900)})
        assert verdict_of(host_checks.check_links(with_hosts=False)) == bad
        patch.setattr(psutil, "net_if_stats", lambda: {"eth0": _Link(False, 1500)})
        assert verdict_of(host_checks.check_links(with_hosts=True)) == bad
        assert verdict_of(host_checks.check_links(with_hosts=False)) == (Verdict.OK, False)
    with monkeypatch.context() as patch:
        patch.setattr(host_checks, "available_memory", lambda: 1 << 20)
        assert verdict_of(host_checks.check_memory()) == bad
    with monkeypatch.context() as patch:
        patch.setattr(host_checks, "_adjtimex", lambda: (0x40, 0))
        assert verdict_of(host_checks.check_clock(with_hosts=True)) == (Verdict.WARN, True)
    with monkeypatch.context() as patch:
        patch.setattr(host_checks, "_REQUIRED", ("grpcio", "no-such-library"))
        assert verdict_of(host_checks.check_versions()) == bad


def test_secrets_that_others_can_read_or_that_are_missing(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    assert host_checks.check_secret(str(path), with_hosts=True).verdict is Verdict.FAIL
    path.write_bytes(os.urandom(32))
    path.chmod(0o644)
    assert host_checks.check_secret(str(path), with_hosts=True).verdict is Verdict.FAIL
    path.chmod(0o600)
    assert host_checks.check_secret(str(path), with_hosts=True).verdict is Verdict.OK
    assert host_checks.check_secret(None, with_hosts=True).verdict is Verdict.WARN


def test_a_port_that_is_taken_names_its_holder(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as listening:
        listening.bind(("", 0))
        listening.listen()
        port = listening.getsockname()[1]
        monkeypatch.setattr(host_checks, "_PORTS", {port: "tests"})
        finding = host_checks.check_ports()
    assert finding.verdict is Verdict.WARN
    assert f"pid {os.getpid()}" in finding.found


# -- between hosts -----------------------------------------------------------------------------------------------------


async def examine(port: int, *, mine: bytes = b"s" * 32, theirs: bytes = b"s" * 32) -> dict[str, Finding]:
    server = await serve_doctor("127.0.0.1", port, theirs)
    async with server:
        findings = await peer_checks.examine_hosts([f"127.0.0.1:{port}"], mine)
    return {finding.check: finding for finding in findings}


def wrong(findings: dict[str, Finding]) -> list[str]:
    return [check for check, finding in findings.items() if finding.verdict is Verdict.FAIL]


@pytest.fixture
def port() -> int:
    return free_port()


async def test_two_doctors_that_agree(port: int) -> None:
    findings = await examine(port)
    assert wrong(findings) == []
    assert set(findings) == {"MTU", "way", "clock", "secret", "versions", "rank ports"}
    assert findings["rank ports"].verdict is Verdict.OK
    assert findings["secret"].found == "the same"


async def test_other_secret_version_and_clock(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert wrong(await examine(port, mine=b"x" * 32)) == ["secret"]
    assert (await examine(port, mine=b""))["secret"].verdict is Verdict.WARN
    report = PeerReport(
        host="b",
        version="0.0.0",
        python="3.11",
        clock_offset=-5.0,
        round_trip=0.001,
        has_same_secret=True,
        bulk_seconds=None,
    )
    found = {finding.check: finding for finding in peer_checks.compare("b", report)}
    assert sorted(wrong(found)) == ["MTU", "clock", "versions"]
    assert found["clock"].found == "its clock is 5.0 s behind ours"


FORTH, BACK = "from here to", "from there to"


@pytest.mark.parametrize(
    ("is_open", "said", "unsaid"),
    [((False, True), [FORTH], [BACK]), ((True, False), [BACK], [FORTH]), ((False, False), [FORTH, BACK], [])],
)
async def test_a_firewall_that_passes_the_doctor_and_no_ranks_in_one_direction(
    port: int, monkeypatch: pytest.MonkeyPatch, is_open: tuple[bool, bool], said: list[str], unsaid: list[str]
) -> None:
    """The one that asks connects first, then the other one does; what is blocked is closed here, at once."""
    connect, passes = asyncio.open_connection, iter([is_open[0]] * 3 + [is_open[1]] * 3)

    async def open_connection(
        address: str, number: int, **options: int
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if number != port and not next(passes):
            raise TimeoutError
        return await connect(address, number, **options)

    monkeypatch.setattr(asyncio, "open_connection", open_connection)
    found = (await examine(port))["rank ports"]
    assert verdict_of(found) == (Verdict.FAIL, True)
    assert all(text in found.found for text in said)
    assert not any(text in found.found for text in unsaid)


async def test_an_older_doctor_and_one_that_lies_about_its_ports(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert peer_checks.check_ports("b", PortWays(forth=None, back=None)).verdict is Verdict.WARN
    other = await serve_doctor("127.0.0.1", 0, b"")
    taken = other.sockets[0].getsockname()[1]

    async def ask(*_: object, **request: object) -> dict[str, object]:
        return {"ports": [taken]} if request["ask"] == "ports" else {"missed": {"7": "closed"}}

    monkeypatch.setattr(peer_service, "_ask", ask)
    async with other:
        ways = await peer_service.try_ports("127.0.0.1", taken, "127.0.0.1", within=0.5)
    assert ways.forth is not None
    assert ways.forth.keys() == {taken}
    assert ways.back == {7: "closed"}


async def test_a_doctor_connects_to_no_port_of_the_system_and_to_few(port: int) -> None:
    server = await serve_doctor("127.0.0.1", port, b"")
    async with server:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(
            json.dumps({"ask": "reach", "ports": [22, 80, 443, 5000], "token": "", "within": 5}).encode() + b"\n"
        )
        writer.write_eof()
        answer = json.loads(await reader.readline())
        writer.close()
    assert answer == {"missed": {}}


@pytest.mark.process
def test_a_firewall_between_two_hosts(namespaces: tuple[str, str], tmp_path: Path) -> None:
    """It drops TCP between ports that the system chooses, and passes the doctor's: policy rules can do that."""
    left, right = namespaces
    first, last = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text("ascii").split()
    rules = (
        "rule add pref 100 lookup local",
        f"rule add pref 10 iif {right} ipproto tcp sport {first}-{last} dport {first}-{last} blackhole",
        "rule del pref 0",
    )
    for rule in rules:
        made = subprocess.run(["ip", "-n", right, *rule.split()], capture_output=True, text=True, check=False)
        if made.returncode != 0:
            pytest.skip(f"rules for packets cannot be made here: {made.stderr.strip()}")
    doctor, env = (sys.executable, "-m", "asyncpar", "doctor"), os.environ | {"XDG_RUNTIME_DIR": str(tmp_path)}
    there = subprocess.Popen(
        ["ip", "netns", "exec", right, *doctor, "--listen", ":29399"], stdout=subprocess.PIPE, text=True, env=env
    )
    try:
        assert there.stdout is not None
        assert "answers at" in there.stdout.readline()
        done = subprocess.run(
            ["ip", "netns", "exec", left, *doctor, "--json", "--hosts", "10.213.7.2"],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            env=env,
        )
    finally:
        there.kill()
        there.communicate()
    assert done.returncode == 1, done.stderr
    findings = {finding["check"]: finding for finding in json.loads(done.stdout)["findings"]}
    assert findings["way"]["verdict"] == "ok"
    assert findings["rank ports"]["verdict"] == "fail"
    assert "from here to" in findings["rank ports"]["found"]
    assert "from there to" in findings["rank ports"]["found"]


async def test_nobody_and_nonsense_at_the_port(port: int) -> None:
    (mtu, finding) = await peer_checks.examine_hosts([f"127.0.0.1:{port}"], b"")
    assert (mtu.check, finding.verdict) == ("MTU", Verdict.WARN)
    assert f"asyncpar doctor --listen :{port}" in finding.advice

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await reader.readline()
        writer.close()

    server = await asyncio.start_server(talk, "127.0.0.1", port)
    async with server:
        (_, finding) = await peer_checks.examine_hosts([f"127.0.0.1:{port}"], b"")
    assert finding.verdict is Verdict.FAIL
    assert "no doctor of asyncpar" in finding.found


async def test_a_host_that_takes_small_messages_only(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_service, "BULK_BYTES", 16 << 20)  # more than the system takes before it is read
    monkeypatch.setattr(streams, "FLUSH_SECONDS", 3600.0)
    server = await serve_doctor("127.0.0.1", port, b"")
    monkeypatch.setattr(peer_service, "_SERVE_SECONDS", 5.0)
    serve = peer_service._serve  # noqa: SLF001

    async def lose_bulk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes) -> None:
        await serve(_WithoutBulk(reader), writer, secret)  # type: ignore[arg-type]

    monkeypatch.setattr(peer_service, "_serve", lose_bulk)
    async with server, asyncio.timeout(30.0):  # what is left of the large message is not waited for
        report = await meet("127.0.0.1", port, b"", within=1.0)
    assert report.bulk_seconds is None
    assert report.round_trip > 0.0


class _WithoutBulk:
    """A reader whose large messages never come."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self._reader = reader

    async def readline(self) -> bytes:
        return await self._reader.readline()

    async def readexactly(self, _: int) -> bytes:
        await asyncio.sleep(60)
        return b""


@pytest.fixture
def silent_names(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Name servers that do not answer."""
    is_over = threading.Event()
    monkeypatch.setattr(host_checks, "NAME_SECONDS", 0.05)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: is_over.wait(60.0))
    yield
    is_over.set()


@pytest.mark.usefixtures("silent_names")
def test_a_name_server_that_does_not_answer_is_waited_for_shortly() -> None:
    own = host_checks.check_name(with_hosts=True)
    (other,) = asyncio.run(peer_checks.examine_hosts(["far.example"], b""))
    for finding in (own, other):
        assert verdict_of(finding) == (Verdict.FAIL, True)
        assert "cannot be resolved (no name server answers within 0.05 s)" in finding.found


NONSENSE = (
    b"\xff\xff\n",
    b"[]\n",
    b"{" * 5000 + b"\n",
    b"",
    b'{"ask": "reach", "ports": 5000}\n',
    b'{"ask": "reach", "ports": ["5000"]}\n',
    b'{"ask": "reach", "ports": [99999999]}\n',
    b'{"ask": "reach", "ports": [5000], "within": null}\n',
    b'{"ask": "ports", "token": ["x"]}\n',
    b'{"ask": "who", "nonce": {}}\n',
)


async def test_nonsense_ends_one_conversation(port: int, caplog: pytest.LogCaptureFixture) -> None:
    server = await serve_doctor("127.0.0.1", port, b"")
    async with server:
        for content in NONSENSE:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(content)
            writer.write_eof()
            await reader.read()
            writer.close()
        assert (await meet("127.0.0.1", port, b"", within=5.0)).has_same_secret is None
    assert caplog.records == [], "what is wrong is no error of the doctor"


@pytest.mark.process
def test_the_command(launcher: Launcher, tmp_path: Path) -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return launcher.command("doctor", *arguments, env={"XDG_RUNTIME_DIR": ""})

    done = run("--json", "--secret-file", str(tmp_path / "absent"))
    assert done.returncode == 1
    findings = {finding["check"]: finding for finding in json.loads(done.stdout)["findings"]}
    assert findings["secret"]["verdict"] == "fail"
    limited = subprocess.run(
        ["sh", "-c", 'ulimit -n 256; exec "$@"', "sh", sys.executable, "-m", "asyncpar", "doctor"],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
        env=os.environ | {"XDG_RUNTIME_DIR": ""},
    )
    assert limited.returncode == 1
    assert "fail  open files" in limited.stdout
    assert "-> ulimit -n" in limited.stdout
    for arguments in (("--hosts", ","), ("--listen", "nonsense"), ("--listen", ":1", "--json")):
        refused = run(*arguments)
        assert (refused.returncode, len(refused.stderr.splitlines())) == (2, 1)
