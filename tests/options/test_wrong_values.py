"""A wrong value is refused by the name that was typed: the option, or the variable."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from asyncpar.launch.cli import main
from tests.options.test_command_line import _commands
from tests.soak import first

NOWHERE = "/proc/nowhere/x"
SPACED = "no such value"
SHAPE = "--layers 8 --hidden 256 --heads 8 --vocab 1000 --seq 128 --world 8"
TWO_HOSTS = "--nnodes 2 --rdzv-timeout 1"

BEFORE: dict[str, str] = {
    "launch": "--no-python",
    "plan": SHAPE,
    "k8s": "--dry-run",
    "slurm": "--dry-run",
    "bench": "--budget 0.1 --sizes 4",
}
AFTER: dict[str, str] = {
    "launch": "true",
    "drain": "host",
    "report": "run",
    "certs init": "certs",
    "k8s": "prog.py",
    "slurm": "prog.py",
}
GIVEN: dict[tuple[str, str], str] = {
    ("launch", "--rdzv-endpoint"): TWO_HOSTS,
    ("launch", "--master-addr"): TWO_HOSTS,
    ("launch", "--master-port"): TWO_HOSTS,
    ("launch", "--node-rank"): "--nnodes 2 --rdzv-endpoint host:1",
    ("launch", "--last-call"): "--nnodes 1:2 --rdzv-endpoint host:1",
    ("status", "--secret-file"): "--agent host:1",
    ("status", "--certs"): "--agent host:1",
}
WRONG: dict[str, list[str]] = {
    "--nproc-per-node": ["x", "0"],
    "--nnodes": ["x", "0", "3:2"],
    "--node-rank": ["x", "7"],
    "--rdzv-endpoint": [SPACED],
    "--master-addr": [SPACED],
    "--master-port": ["x"],
    "--rdzv-backend": ["etcd"],
    "--rdzv-conf": ["x"],
    "--rdzv-timeout": ["x", "-1"],
    "--local-addr": [SPACED, "192.0.2.7"],
    "--secret-file": [NOWHERE],
    "--certs": [NOWHERE],
    "--transport": ["x"],
    "--last-call": ["x", "-1"],
    "--elastic": ["x"],
    "--max-restarts": ["x", "-1"],
    "--restart-window": ["x", "0"],
    "--on-total-loss": ["", "never"],
    "--spares": ["x", "-1"],
    "--grace-period": ["x", "-1"],
    "--ttl": ["x", "-1"],
    "--reconnect-within": ["x", "-1"],
    "--silent-after": ["x", "0.5"],
    "--stopped-after": ["x", "0.5"],
    "--busy-after": ["x", "nan"],
    "--log-dir": [NOWHERE],
    "--post-mortem": [NOWHERE],
    "--redirects": ["x", "9"],
    "--tee": ["x", "0:9"],
    "--dashboard": ["=x"],
    "--metrics": ["=x"],
    "--sink": ["x"],
    "--start-method": ["fork"],
    "--join": [SPACED],
    "--listen": [SPACED],
    "--name": [SPACED],
    "--state-dir": [NOWHERE],
    "--grace": ["x", "-1"],
    "--agent": [SPACED],
    "--min": ["x"],
    "--max": ["x"],
    "--factor": ["x"],
    "--sizes": ["x"],
    "--nproc": ["x"],
    "--algorithm": ["x"],
    "--dtype": ["x"],
    "--redop": ["x"],
    "--budget": ["x"],
    "--plot": [NOWHERE],
    "--ranks": ["x"],
    "--hosts": ["x"],
    "--job": [""],
    "--days": ["x"],
    "--every": ["x", "-1"],
    "--lines": ["x", "-1"],
    "--seconds": ["x", "-1"],
    "--before": ["x", "-1"],
    "--layers": ["x"],
    "--hidden": ["x"],
    "--heads": ["x"],
    "--vocab": ["x"],
    "--seq": ["x"],
    "--world": ["x"],
    "--ffn": ["x"],
    "--batch": ["x"],
    "--micro-batch": ["x"],
    "--measured": [f"={NOWHERE}"],
    "--memory": ["x"],
    "--precision": ["x"],
    "--optimizer": ["x"],
    "--schedule": ["x"],
    "--chunks": ["x"],
    "--zero": ["x"],
    "--memory-strategy": ["x"],
    "--order": ["x"],
    "--ranks-per-host": ["x"],
    "--flops": ["x"],
    "--bandwidth": ["x"],
    "--devices": ["x"],
    "--host-bandwidth": ["x"],
    "--top": ["x"],
    "--nodes": ["x", "0"],
    "--tasks-per-node": ["x", "0"],
    "--time": ["x"],
    "--signal-before": ["x"],
    "--sbatch": ["x"],
    "--image": [""],
    "--namespace": [SPACED],
    "--resource": ["x"],
    "--port": ["x"],
    "--env": ["x"],
    "--env-from": ["x"],
    "--volume": ["x"],
    "--node-selector": ["x"],
    "--toleration": ["x:y"],
    "--service-account": [SPACED],
    "--label": ["x"],
    "--annotation": ["x"],
    "--pull-secret": [SPACED],
    "--metrics-port": ["x", "0"],
}
"""By option, whichever the command."""

ANYTHING: dict[tuple[str, str], str] = {
    ("launch", "--rdzv-id"): "Any text is the name of a job.",
    ("launch", "--monitor-interval"): "torchrun's scripts pass it, and it has no effect.",
    ("launch", "--host-name"): "Any text is a name for messages.",
    ("launch", "--dashboard-names"): "Any text may be the name of a proxy; others get no page.",
    ("agent", "--dashboard-names"): "Any text may be the name of a proxy; others get no page.",
    ("agent", "--post-mortem"): "It is looked at once the agent is being started; see the agent's tests.",
    ("doctor", "--dask"): "It is what is examined, and the finding names it.",
    ("doctor", "--hosts"): "It is what is examined, and the finding names it.",
    ("doctor", "--secret-file"): "It is what is examined, and the finding names it.",
    ("slurm", "--job-name"): "Slurm takes any text.",
    ("slurm", "--partition"): "Slurm knows its partitions, and says so when it is asked.",
    ("slurm", "--python"): "It is a path on the nodes, which are not here.",
    ("k8s", "--python"): "It is a path in the image, which is not here.",
    ("k8s", "--secret"): "It is the name of an object of the cluster, which is not asked.",
    ("trace", "--output"): "It is written after the job was found, and named then.",
    ("flight dump", "--output"): "It is written after the job was found, and named then.",
    ("report", "--output"): "It is written after the run was read, and named then.",
}


def cases() -> Iterator[tuple[str, str, str]]:
    for name, command in _commands(main):
        for parameter in command.params:
            if not isinstance(parameter, click.Option) or parameter.is_flag:
                continue
            option = parameter.opts[0]
            if (name, option) not in ANYTHING:
                yield from ((name, option, value) for value in WRONG.get(option, ["<no entry>"]))


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "prog.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize(("command", "option", "value"), list(cases()))
def test_the_error_begins_with_the_option(command: str, option: str, value: str) -> None:
    assert value != "<no entry>", f"{command} {option} is in neither table"
    words = [*command.split(), *BEFORE.get(command, "").split(), *GIVEN.get((command, option), "").split()]
    if command == "k8s" and option != "--image":
        words += ["--image", "image"]
    if command == "certs init" and option != "--ranks":
        words += ["--ranks", "2"]
    words += [f"{option}{value}"] if value.startswith("=") else [option, value]
    done = CliRunner().invoke(main, [*words, *AFTER.get(command, "").split()])
    assert isinstance(done.exception, SystemExit), done.exception
    assert done.exit_code in (1, 2), done.output
    assert re.search(rf"{option}\b", done.output.splitlines()[-1]), done.output


def test_every_exception_is_of_an_option_that_there_is() -> None:
    there = {(name, one.opts[0]) for name, command in _commands(main) for one in command.params}
    assert ANYTHING.keys() <= there
    assert WRONG.keys() <= {option for _, option in there}


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize(
    ("variable", "value", "more"),
    [
        ("ASYNCPAR_SECRET_FILE", NOWHERE, ""),
        ("ASYNCPAR_CERTS", NOWHERE, ""),
        ("ASYNCPAR_TRANSPORT", "x", ""),
        ("ASYNCPAR_ARENA_BYTES", "x", ""),
        ("ASYNCPAR_ARENA_BYTES", "1", ""),
        ("ASYNCPAR_ARENA_WAIT", "x", ""),
        ("ASYNCPAR_CALIBRATE", "x", ""),
        ("ASYNCPAR_CHECKSUMS", "x", ""),
        ("ASYNCPAR_CONNECTIONS", "99", ""),
        ("ASYNCPAR_LINK_TIMEOUT", "-1", ""),
        ("ASYNCPAR_NCCL_BETWEEN_HOSTS", "x", ""),
        ("ASYNCPAR_TORCH_CUDA", "x", ""),
        ("ASYNCPAR_WAIT_WARNING", "x", ""),
        ("PET_NNODES", "x", ""),
        ("PET_NPROC_PER_NODE", "x", ""),
        ("PET_MAX_RESTARTS", "x", ""),
        ("PET_RDZV_ENDPOINT", SPACED, TWO_HOSTS),
        ("PET_MASTER_ADDR", SPACED, TWO_HOSTS),
        ("PET_MASTER_PORT", "x", TWO_HOSTS),
    ],
)
def test_a_value_from_the_environment_is_refused_by_the_variable(
    variable: str, value: str, more: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    done = CliRunner().invoke(main, ["launch", *more.split(), "--no-python", "true"])
    assert done.exit_code == 2, done.output
    assert done.output.splitlines()[-1].startswith(f"asyncpar launch: {variable}: "), done.output


PROGRAM = """
import asyncpar as ap

async def main():
    async with ap.init():
        pass

ap.run(main)
"""


@pytest.mark.process
@pytest.mark.parametrize(
    "variable",
    first(
        2,
        [
            "ALGORITHM",
            "ARENA_BYTES",
            "ARENA_WAIT",
            "CHECKSUMS",
            "CONNECTIONS",
            "LINK_TIMEOUT",
            "NCCL_BETWEEN_HOSTS",
            "TORCH_CUDA",
            "WAIT_WARNING",
        ],
    ),
)
def test_a_program_alone_refuses_a_wrong_variable_by_its_name(variable: str) -> None:
    environment = {**os.environ, f"ASYNCPAR_{variable}": "nonsense"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode != 0
    assert f"UsageError: ASYNCPAR_{variable}: " in done.stderr
