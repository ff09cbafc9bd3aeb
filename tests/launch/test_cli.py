"""The command line: what is accepted, and what is said about the rest."""

from __future__ import annotations

import importlib.metadata
import socket
from collections.abc import Mapping
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from asyncpar.errors import UsageError
from asyncpar.launch import cli
from asyncpar.launch.cli import main
from asyncpar.launch.options import (
    LaunchOptions,
    ProgramKind,
    StreamChoice,
    Streams,
    parse_conf,
    parse_nproc,
    parse_streams,
)


def invoke(*arguments: str, env: Mapping[str, str | None] | None = None) -> Result:
    return CliRunner().invoke(main, ["launch", *arguments], env=env, prog_name="asyncpar")


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[LaunchOptions]:
    """Collects the options instead of running anything."""
    seen: list[LaunchOptions] = []

    def keep(options: LaunchOptions) -> int:
        seen.append(options)
        return 0

    monkeypatch.setattr(cli, "_run", keep)
    return seen


def test_commands_are_listed_in_groups_each_of_them_once() -> None:
    lines = CliRunner().invoke(main, ["--help"], prog_name="asyncpar").output.splitlines()
    titles = [line for line in lines if line.endswith(":") and not line.startswith(("Usage", " "))]
    assert titles == ["Options:", "Start:", "See:", "Check and measure:"]
    listed = [line.split()[0] for line in lines[lines.index("Start:") :] if line[:3].strip() and line[:2] == "  "]
    assert listed[:2] == ["launch", "agent"]
    assert sorted(listed) == sorted(main.list_commands(click.Context(main)))


def test_options_have_torchruns_names_in_both_spellings(taken: list[LaunchOptions]) -> None:
    dashes = "--nnodes=2 --node-rank 1 --nproc-per-node 4 --rdzv-endpoint h:1 --rdzv-id j --rdzv-backend c10d"
    more = " --max-restarts 3 --log-dir logs --redirects 3 --tee 0:1 --monitor-interval 5 --local-addr 127.0.0.1"
    words = (dashes + more).split()
    for spelling in (words, [word.replace("-", "_").replace("__", "--", 1) for word in words]):
        result = invoke(*spelling, "job.py", "--own", "x")
        assert result.exit_code == 0, result.output
    assert taken[0] == taken[1]
    options = taken[0]
    assert (options.nnodes, options.node_rank, options.nproc, options.endpoint) == (2, 1, 4, "h:1")
    assert (options.job, options.max_restarts, options.log_dir) == ("j", 3, "logs")
    assert (options.program, options.arguments, options.kind) == ("job.py", ("--own", "x"), ProgramKind.SCRIPT)
    assert options.redirects == StreamChoice(everywhere=Streams.BOTH)
    assert options.tee == StreamChoice(by_rank={0: Streams.STDOUT})


def test_the_defaults_are_one_rank_here(taken: list[LaunchOptions]) -> None:
    invoke("job.py")
    assert taken == [LaunchOptions(program="job.py")]


@pytest.mark.parametrize(
    ("arguments", "endpoint"),
    [
        (("--master-addr", "h", "--master-port", "7"), "h:7"),
        (("--master_port", "7"), "127.0.0.1:7"),
        (("--master-addr", "h"), "h:29500"),
        (("--master-addr", "fe::1", "--master-port", "7"), "[fe::1]:7"),
        (("--master-addr", "h", "--rdzv-endpoint", "i:8"), "i:8"),
        (("--standalone", "--rdzv-endpoint", "i:8"), None),
    ],
)
def test_the_endpoint_has_many_spellings(
    taken: list[LaunchOptions], arguments: tuple[str, ...], endpoint: str | None
) -> None:
    assert invoke(*arguments, "job.py").exit_code == 0
    assert taken[0].endpoint == endpoint


def test_times_and_kinds(taken: list[LaunchOptions]) -> None:
    invoke("--rdzv-conf", "join_timeout=5,is_host=1", "--grace-period", "0", "-m", "pkg.mod")
    invoke("--rdzv-conf", "timeout=5", "--rdzv-timeout", "7", "--no-python", "sh", "-c", "true")
    invoke("--nproc-per-node", "auto", "job.py")
    assert [options.timeout for options in taken] == [5.0, 7.0, 300.0]
    assert [options.kind for options in taken] == [ProgramKind.MODULE, ProgramKind.PROGRAM, ProgramKind.SCRIPT]
    assert taken[0].grace == 0.0
    assert taken[1].arguments == ("-c", "true")
    assert taken[2].nproc is None


def test_the_environment_may_name_the_secret_file_the_transport_and_the_certificates(
    taken: list[LaunchOptions],
) -> None:
    invoke("job.py", env={"ASYNCPAR_SECRET_FILE": "/s", "ASYNCPAR_TRANSPORT": "grpc", "ASYNCPAR_CERTS": "/c"})
    assert (taken[0].secret_file, taken[0].transport, taken[0].certs) == ("/s", "grpc", "/c")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nothere.py",), "script: nothere.py does not exist"),
        (("-m", "no_such_module_here"), "module: no_such_module_here cannot be found"),
        (("--no-python", "no-such-program-here"), "program: no-such-program-here is not an executable"),
        (("--nproc-per-node", "0", "x"), "--nproc-per-node: expected at least 1, got 0"),
        (("--nproc-per-node", "-3", "x"), "--nproc-per-node: expected a number, 'auto' or 'cpu', got '-3'"),
        (("--nproc-per-node", "gpu", "x"), "got 'gpu'"),
        (("--nproc-per-node", "two", "x"), "got 'two'"),
        (("--nnodes", "0", "x"), "--nnodes: expected at least 1, got 0"),
        (
            ("--nnodes", "4:1", "--rdzv-endpoint", "h:1", "x"),
            "--nnodes: expected MIN:MAX with 1 <= MIN <= MAX, got 4:1",
        ),
        (
            ("--nnodes", "0:2", "--rdzv-endpoint", "h:1", "x"),
            "--nnodes: expected MIN:MAX with 1 <= MIN <= MAX, got 0:2",
        ),
        (("--nnodes", "1:", "x"), "--nnodes: expected a whole number, got ''"),
        (("--nnodes", "1:4", "x"), "--rdzv-endpoint: expected host:port of the first host"),
        (("--nnodes", "1:4", "--rdzv-endpoint", "h:1", "--last-call", "x", "x"), "--last-call: expected a number"),
        (("--last-call", "1", "x"), "--last-call: expected with --nnodes MIN:MAX"),
        (("--elastic", "keep", "x"), "--elastic: expected restart or ranks, got 'keep'"),
        (("--nnodes", "2", "x"), "--rdzv-endpoint: expected host:port of the first host"),
        (("--nnodes", "2", "--node-rank", "2", "--rdzv-endpoint", "h:1", "x"), "--node-rank: expected 0..1"),
        (("--nnodes", "2", "--standalone", "x"), "--standalone: expected with one host"),
        (("--rdzv-backend", "etcd", "x"), "--rdzv-backend: expected one of asyncpar, c10d, static, got 'etcd'"),
        (("--rdzv-conf", "speed=1", "x"), "--rdzv-conf: expected key=value"),
        (("--rdzv-timeout", "soon", "x"), "--rdzv-timeout: expected a number of seconds, got 'soon'"),
        (("--rdzv-timeout", "0", "x"), "--rdzv-timeout: expected seconds between"),
        (("--grace-period", "-1", "x"), "--grace-period: expected seconds between"),
        (("--grace-period", "nan", "x"), "--grace-period: expected seconds between"),
        (("--start-method", "fork", "x"), "--start-method: expected spawn, got 'fork'"),
        (("--transport", "pigeon", "x"), "--transport: expected one of shm, tcp, grpc, got 'pigeon'"),
        (("--redirects", "4", "x"), "--redirects: expected 0 (none), 1 (stdout), 2 (stderr) or 3 (both), got '4'"),
        (("--tee", "0:1,x", "x"), "--tee: expected 0..3 or LOCAL_RANK:0..3"),
        (("--max-restarts", "many", "x"), "--max-restarts: expected a whole number, got 'many'"),
        (("-m", "--no-python", "x"), "--module: expected alone"),
        (("--no-such-option", "x"), "No such option"),
        ((), "Missing argument 'PROGRAM'"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(arguments: tuple[str, ...], message: str) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("asyncpar launch: ")
    assert message in line
    assert result.stdout == ""


def test_a_port_in_use_is_a_mistake(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text("")
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        result = invoke("--rdzv-endpoint", f"127.0.0.1:{port}", str(tmp_path / "job.py"))
    assert result.exit_code == 2
    assert f"127.0.0.1:{port} cannot be bound: Address already in use" in result.stderr


def test_places_that_cannot_be_used_are_mistakes(tmp_path: Path) -> None:
    job = tmp_path / "job.py"
    job.write_text("")
    for arguments, message in (
        (("--log-dir", str(job / "logs")), "--log-dir: "),
        (("--secret-file", str(tmp_path / "none")), "--secret-file: "),
        (("--certs", str(tmp_path / "none")), "--certs: "),
        (("--local-addr", "203.0.113.7"), "203.0.113.7"),
        (("--nnodes", "2", "--rdzv-endpoint", "no such host:1"), "--rdzv-endpoint: expected host:port"),
        (("--nnodes", "2", "--rdzv-endpoint", "no-such-host.invalid:1"), "--rdzv-endpoint: the host name"),
        (("--nnodes", "2", "--rdzv-endpoint", "127.0.0.1:x"), "--rdzv-endpoint: expected host:port"),
        (("--nnodes", "2", "--rdzv-endpoint", "127.0.0.1:0"), "--rdzv-endpoint: expected a port other than 0"),
    ):
        result = invoke(*arguments, str(job))
        assert result.exit_code == 2, arguments
        assert message in result.stderr
        assert "Traceback" not in result.stderr


def test_a_wrong_setting_of_ranks_is_a_mistake_before_any_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "job.py").write_text("")
    monkeypatch.setenv("ASYNCPAR_ARENA_BYTES", "16")
    result = invoke(str(tmp_path / "job.py"))
    assert result.exit_code == 2
    assert result.stderr == "asyncpar launch: ASYNCPAR_ARENA_BYTES: expected 256K to 16G, or off, got 16 bytes\n"


def test_an_open_secret_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text("")
    secret = tmp_path / "secret"
    secret.write_bytes(bytes(32))
    secret.chmod(0o644)
    result = invoke("--secret-file", str(secret), str(tmp_path / "job.py"))
    assert result.exit_code == 2
    assert f"chmod 600 {secret}" in result.stderr


def test_help_fits_in_80_columns_and_shows_each_option_once() -> None:
    result = invoke("--help")
    assert result.exit_code == 0
    assert max(len(line) for line in result.output.splitlines()) <= 80
    assert "--nproc-per-node" in result.output
    assert "--nproc_per_node" not in result.output


@pytest.mark.parametrize("path", [[], ["certs"], ["flight"]], ids=["main", "certs", "flight"])
@pytest.mark.parametrize("width", [50, 80])
def test_lists_of_commands_are_not_cut_off_in_a_narrow_terminal(path: list[str], width: int) -> None:
    group: click.Command = main
    for name in path:
        assert isinstance(group, click.Group)
        found = group.get_command(click.Context(group), name)
        assert found is not None
        group = found
    assert isinstance(group, click.Group)
    result = CliRunner().invoke(main, [*path, "--help"], terminal_width=width)
    assert max(len(line) for line in result.output.splitlines()) <= width
    assert "..." not in result.output.replace("[OPTIONS] COMMAND [ARGS]...", "")
    words = " ".join(result.output.split())
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        assert f"{name} {command.get_short_help_str(500)}" in words


def test_the_version_is_shown() -> None:
    result = CliRunner().invoke(main, ["--version"], prog_name="asyncpar")
    assert result.output.strip() == f"asyncpar, version {importlib.metadata.version('asyncpar')}"


def test_streams_for_some_ranks_leave_the_others_alone() -> None:
    choice = parse_streams("--tee", "0:1,2:3")
    assert [choice.of(rank) for rank in range(3)] == [Streams.STDOUT, Streams.NONE, Streams.BOTH]
    assert parse_streams("--tee", "2").of(5) == Streams.STDERR


def test_small_parsers() -> None:
    assert parse_conf("") is None
    assert parse_nproc("cpu") is None
    with pytest.raises(UsageError, match="--rdzv-conf"):
        parse_conf("timeout")
