"""Every option of the command line changes what its command does, or is refused with a reason."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from asyncpar.launch import bench, cli
from asyncpar.launch.cli import main

SHAPE = ["--layers", "8", "--hidden", "256", "--heads", "8", "--vocab", "1000", "--seq", "128", "--world", "8"]
PLAN = [*SHAPE, "--ranks-per-host", "4", "--json", "--top", "1000"]

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
    "--max-restarts": "1",
    "--grace-period": "1",
    "--reconnect-within": "1",
    "--silent-after": "off",
    "--log-dir": "folder",
    "--redirects": "1",
    "--tee": "1",
    "--module": "",
    "--no-python": "",
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
    "--host-bandwidth": "1",
    "--top": "1",
}
CERTS: dict[str, str] = {"--ranks": "3", "--hosts": "2", "--job": "name", "--days": "5"}

GIVEN: dict[tuple[str, str], list[str]] = {
    ("launch", "--nnodes"): ["--rdzv-endpoint", "host:1"],
    ("launch", "--node-rank"): ["--nnodes", "2", "--rdzv-endpoint", "host:1"],
    ("launch", "--standalone"): ["--rdzv-endpoint", "host:1"],
    ("plan", "--uneven"): ["--layers", "10"],
    ("plan", "--memory"): [],
}
"""What else the command gets, in both runs."""

REFUSED: dict[tuple[str, str, str], str] = {
    ("launch", "--rdzv-backend", "etcd"): "--rdzv-backend: expected one of asyncpar, c10d, static, got 'etcd'",
    ("launch", "--start-method", "fork"): "--start-method: expected spawn, got 'fork'",
}

EXCEPTIONS: dict[tuple[str, str], str] = {
    ("launch", "--monitor-interval"): "torchrun's scripts pass it, and its help says that nothing here polls.",
    ("launch", "--rdzv-backend"): "Every name that is not refused is documented to mean the same.",
    ("launch", "--start-method"): "There is one method, and every other name is refused.",
    ("plan", "--json"): "It says how to show the result, which the other entries look at.",
}
TABLES = {"launch": LAUNCH, "bench": BENCH, "plan": PLANS, "certs init": CERTS}
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


def _seen(command: str, more: list[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run ``command`` and return what it did: the options that it starts ranks with, or what it printed or made."""
    if command == "launch":
        return _options(cli, "_run", ["launch", *more, "program"], monkeypatch)
    if command == "bench":
        return _options(bench, "run_bench", ["bench", *more], monkeypatch)
    if command == "plan":
        return _planned(tuple(more))
    return _certificates(more)


def _options(module: Any, function: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    seen: list[Any] = []

    def keep(options: Any) -> int:
        seen.append(options)
        return 0

    monkeypatch.setattr(module, function, keep)
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    return seen[0]


@cache
def _planned(more: tuple[str, ...]) -> str:
    result = CliRunner().invoke(main, ["plan", *PLAN, *more])
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
