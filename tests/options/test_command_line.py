"""Every option of the command line changes what its command does, or is refused with a reason."""

from __future__ import annotations

import hashlib
import importlib
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from asyncpar.collectives.lane_cache import LaneCache
from asyncpar.core.config.transport import LaneCosts
from asyncpar.launch import bench, cli
from asyncpar.launch.agents import commands
from asyncpar.launch.cli import main
from asyncpar.net.membership.host import host_name

SHAPE = ["--layers", "8", "--hidden", "256", "--heads", "8", "--vocab", "1000", "--seq", "128", "--world", "8"]
PLAN = [*SHAPE, "--batch", "16", "--ranks-per-host", "4", "--json", "--top", "1000"]

LAUNCH: dict[str, str] = {
    "--nproc-per-node": "3",
    "--nnodes": "2",
    "--node-rank": "0",
    "--rdzv-endpoint": "host:29400",
    "--master-addr": "host",
    "--master-port": "29400",
    "--rdzv-id": "name",
    "--rdzv-conf": "timeout=7",
    "--rdzv-timeout": "7",
    "--standalone": "",
    "--local-addr": "127.0.0.1",
    "--secret-file": "file",
    "--certs": "folder",
    "--transport": "tcp",
    "--last-call": "1",
    "--max-restarts": "1",
    "--restart-window": "60",
    "--on-total-loss": "fail",
    "--spares": "1",
    "--host-name": "name",
    "--elastic": "ranks",
    "--grace-period": "1",
    "--reconnect-within": "1",
    "--silent-after": "off",
    "--stopped-after": "5",
    "--busy-after": "60",
    "--log-dir": "folder",
    "--post-mortem": "folder",
    "--redirects": "1",
    "--tee": "1",
    "--full-traceback": "",
    "--module": "",
    "--no-python": "",
    "--dashboard": "",
    "--dashboard-names": "hub.example.org",
    "--metrics": "",
    "--sink": "opentelemetry",
}
BENCH: dict[str, str] = {
    "--min": "8",
    "--max": "64K",
    "--factor": "2",
    "--sizes": "4,8",
    "--nproc": "3",
    "--transport": "tcp",
    "--algorithm": "ring",
    "--dtype": "float64",
    "--redop": "max",
    "--budget": "1",
    "--calibrate": "",
    "--shared": "",
    "--json": "",
    "--plot": "file.png",
}
PLANS: dict[str, str] = {
    "--layers": "16",
    "--hidden": "512",
    "--heads": "4",
    "--vocab": "2000",
    "--seq": "256",
    "--world": "4",
    "--ffn": "2",
    "--untied": "",
    "--batch": "64",
    "--micro-batch": "2",
    "--memory": "0.02",
    "--precision": "mixed",
    "--optimizer": "sgd",
    "--schedule": "1f1b",
    "--chunks": "4",
    "--zero": "1",
    "--uneven": "",
    "--recompute": "",
    "--memory-strategy": "extreme",
    "--sequence-parallel": "",
    "--order": "dp-tp-pp",
    "--ranks-per-host": "2",
    "--flops": "500",
    "--bandwidth": "12.5",
    "--devices": "hierarchical",
    "--host-bandwidth": "1",
    "--measured": "",
    "--top": "1",
}
AGENT: dict[str, str] = {
    "--join": "host:29400",
    "--listen": "host:29400",
    "--name": "name",
    "--secret-file": "file",
    "--certs": "folder",
    "--state-dir": "folder",
    "--grace": "1",
    "--post-mortem": "folder",
    "--witness": "",
    "--dashboard": "",
    "--dashboard-names": "hub.example.org",
    "--metrics": "",
    "--sink": "opentelemetry",
}
STATUS: dict[str, str] = {"--agent": "host:29400", "--secret-file": "file", "--certs": "folder", "--json": ""}
DRAIN: dict[str, str] = {
    "--agent": "host:29400",
    "--secret-file": "file",
    "--certs": "folder",
    "--grace": "1",
    "--no-wait": "",
}
REPORT: dict[str, str] = {"--output": "page.html"}
STACKS: dict[str, str] = {"--ranks": "0,2", "--all": "", "--json": ""}
TOP: dict[str, str] = {"--every": "5", "--json": ""}
LOGS: dict[str, str] = {"--ranks": "0,2", "--lines": "5", "--json": ""}
TRACE: dict[str, str] = {"--seconds": "1", "--before": "1", "--output": "file", "--ranks": "0,2", "--json": ""}
FLIGHT: dict[str, str] = {"--output": "folder", "--torch": ""}
EXPLAIN: dict[str, str] = {"--job": "job"}
DOCTOR: dict[str, str] = {
    "--slurm": "",
    "--dask": "tcp://host:8786",
    "--hosts": "a,b",
    "--listen": ":29400",
    "--secret-file": "file",
    "--json": "",
}
CERTS: dict[str, str] = {"--ranks": "3", "--hosts": "2", "--job": "name", "--days": "5"}

GIVEN: dict[tuple[str, str], list[str]] = {
    ("launch", "--nnodes"): ["--rdzv-endpoint", "host:1"],
    ("launch", "--dashboard-names"): ["--dashboard"],
    ("agent", "--dashboard-names"): ["--dashboard"],
    ("launch", "--last-call"): ["--nnodes", "1:2", "--rdzv-endpoint", "host:1"],
    ("launch", "--host-name"): ["--elastic", "ranks"],
    ("launch", "--spares"): ["--elastic", "ranks"],
    ("launch", "--on-total-loss"): ["--elastic", "ranks"],
    ("launch", "--node-rank"): ["--nnodes", "2", "--rdzv-endpoint", "host:1"],
    ("launch", "--standalone"): ["--rdzv-endpoint", "host:1"],
    ("plan", "--uneven"): ["--layers", "10"],
    ("plan", "--memory"): [],
    ("plan", "--devices"): ["--flops", "300000"],
}
"""What else the command gets, in both runs."""

REFUSED: dict[tuple[str, str, str], str] = {
    ("launch", "--rdzv-backend", "etcd"): "--rdzv-backend: expected one of asyncpar, c10d, static, got 'etcd'",
    ("launch", "--start-method", "fork"): "--start-method: expected spawn, got 'fork'",
}

SLURM: dict[str, str] = {
    "--nodes": "2:3",
    "--tasks-per-node": "2",
    "--job-name": "name",
    "--partition": "name",
    "--time": "10",
    "--signal-before": "30",
    "--requeue": "",
    "--elastic": "ranks",
    "--max-restarts": "2",
    "--sbatch": "--exclusive",
    "--python": "python3",
    "--dry-run": "",
    "--queue-anyway": "",
    "--module": "",
    "--no-python": "",
}
KUBERNETES: dict[str, str] = {
    "--image": "other",
    "--name": "name",
    "--namespace": "name",
    "--nodes": "2",
    "--tasks-per-node": "2",
    "--resource": "cpu=4",
    "--max-restarts": "2",
    "--grace-period": "60",
    "--ttl": "600",
    "--port": "29401",
    "--secret": "name",
    "--env": "A=1",
    "--env-from": "secret/name",
    "--volume": "claim/name:/data",
    "--node-selector": "pool=gpu",
    "--toleration": "spot",
    "--service-account": "name",
    "--label": "a=b",
    "--annotation": "a=b",
    "--pull-secret": "name",
    "--metrics-port": "9464",
    "--indexed-job": "",
    "--python": "python3",
    "--dry-run": "",
    "--module": "",
    "--no-python": "",
}
EXCEPTIONS: dict[tuple[str, str], str] = {
    ("launch", "--monitor-interval"): "torchrun's scripts pass it, and its help says that nothing here polls.",
    ("launch", "--rdzv-backend"): "Every name that is not refused is documented to mean the same.",
    ("launch", "--start-method"): "There is one method, and every other name is refused.",
    ("plan", "--json"): "It says how to show the result, which the other entries look at.",
}
TABLES = {
    "launch": LAUNCH,
    "bench": BENCH,
    "plan": PLANS,
    "certs init": CERTS,
    "agent": AGENT,
    "status": STATUS,
    "drain": DRAIN,
    "report": REPORT,
    "stacks": STACKS,
    "top": TOP,
    "logs": LOGS,
    "trace": TRACE,
    "flight dump": FLIGHT,
    "flight explain": EXPLAIN,
    "doctor": DOCTOR,
    "slurm": SLURM,
    "k8s": KUBERNETES,
}
CASES = [(command, name) for command, table in TABLES.items() for name in table]


def _commands(group: click.Group, above: str = "") -> Iterator[tuple[str, click.Command]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from _commands(command, f"{above}{name} ")
        else:
            yield above + name, command


def test_every_option_has_an_entry() -> None:
    there = {
        (name, parameter.opts[0])
        for name, command in _commands(main)
        for parameter in command.params
        if isinstance(parameter, click.Option)
    }
    assert there == {*CASES, *EXCEPTIONS}
    assert {(command, name) for command, name, _ in REFUSED} <= EXCEPTIONS.keys()
    assert all(sentence.endswith(".") and len(sentence.split()) > 3 for sentence in EXCEPTIONS.values())


@pytest.mark.parametrize(("command", "name"), CASES)
def test_another_value_than_the_default_can_be_seen(command: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    value = TABLES[command][name]
    given = GIVEN.get((command, name), [])
    usual, changed = (_seen(command, [*given, *more], monkeypatch) for more in ([], [name, *filter(None, [value])]))
    assert usual != changed


@pytest.mark.parametrize(("command", "name", "value"), REFUSED)
def test_other_values_are_refused(command: str, name: str, value: str) -> None:
    result = CliRunner().invoke(main, [command, name, value, "x"])
    assert result.exit_code == 2
    assert REFUSED[command, name, value] in result.output


_LOOKS = (
    "status",
    "top",
    "report",
    "stacks",
    "logs",
    "trace",
    "flight dump",
    "flight explain",
    "doctor",
    "slurm",
    "k8s",
)
"""Commands with a module of their own, which have one function that does it, of the command's name."""


def _seen(command: str, more: list[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run ``command`` and return what it did: the options that it starts ranks with, or what it printed or made."""
    if command == "launch":
        return _options(cli, "_run", ["launch", *more, "program"], monkeypatch)
    if command == "bench":
        return _options(bench, "run_bench", ["bench", *more], monkeypatch)
    if command in ("agent", "drain"):
        needed = ["host"] if command == "drain" else []
        return _options(commands, f"_{command}", [command, *needed, *more], monkeypatch)
    if command in _LOOKS:
        needed = ["run"] if command == "report" else ["program"] if command in ("slurm", "k8s") else []
        words = [*command.split(), "--image", "image"] if command == "k8s" else command.split()
        module = importlib.import_module(f"asyncpar.launch.commands.{words[0]}")
        return _options(module, f"_{command.split()[-1]}", [*words, *more, *needed], monkeypatch)
    if command == "plan":
        return _planned(tuple(more))
    return _certificates(more)


def _options(module: Any, function: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    seen: list[Any] = []

    def keep(*options: Any, **more: Any) -> int:
        seen.append((options, more))
        return 0

    monkeypatch.setattr(module, function, keep)
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    return seen[0]


@cache
def _planned(more: tuple[str, ...]) -> str:
    with tempfile.TemporaryDirectory() as folder:
        lane = LaneCosts(latency=1e-4, bandwidth=1e8, reduction=1e9)
        LaneCache(f"{folder}/asyncpar/lanes.json").put(host_name(), "other", "tcp", lane)
        result = CliRunner(env={"XDG_CACHE_HOME": folder}).invoke(main, ["plan", *PLAN, *more])
    assert result.exit_code in (0, 1), result.output
    document = result.stdout if result.exit_code == 0 else result.output
    return hashlib.sha256(document.encode()).hexdigest()


def _certificates(more: list[str]) -> str:
    with tempfile.TemporaryDirectory() as made_in:
        needed = [] if "--ranks" in more else ["--ranks", "2"]
        job = [] if "--job" in more else ["--job", "usual"]
        made = CliRunner().invoke(main, ["certs", "init", f"{made_in}/here", *needed, *job, *more])
        assert made.exit_code == 0, made.output
        folders = sorted(path for path in Path(made_in).rglob("*") if path.is_dir())
        shown = [CliRunner().invoke(main, ["certs", "show", str(path)]).output for path in folders]
        return "".join(shown).replace(made_in, "")
