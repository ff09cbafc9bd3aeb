"""Functions on nodes of Slurm, with programs of ours in the place of Slurm's: each node is this machine.

`scripts/test-slurm` does the same with Slurm itself.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import asyncpar as ap
from asyncpar.testing import engine_programs as programs
from asyncpar.testing.engines import EngineConformance, EngineOutput
from tests.engines.consoles import RecordingConsole

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]

SRUN = """#!/bin/sh
for word in "$@"; do
    case "$word" in
    --test-only) echo "$SAYS" >&2; exit "$CODE" ;;
    --nodelist=*) export SLURMD_NODENAME="${word#*=}" ;;
    --*) ;;
    *) break ;;
    esac
    shift
done
exec "$@"
"""
SALLOC = """#!/bin/sh
for word in "$@"; do
    case "$word" in
    --nodes=*) export SLURM_JOB_NODELIST="here[1-${word#*=}]" ;;
    --*) ;;
    *) break ;;
    esac
    shift
done
export SLURM_JOB_ID=77
exec "$@"
"""


@pytest.fixture(autouse=True)
def _slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in (("srun", SRUN), ("salloc", SALLOC)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setenv("CODE", "0")
    monkeypatch.setenv("SAYS", "")


class TestSlurm(EngineConformance):
    async def launch(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        ranks: int,
        output: EngineOutput | None = None,
        **options: Any,
    ) -> list[Any]:
        return await ap.slurm.launch(
            function, *arguments, ranks=ranks, console=RecordingConsole(output), per_node=2, **options
        )


@pytest.mark.soak
def test_a_blocking_run_asks_for_nodes_as_well() -> None:
    assert ap.slurm.run(programs.add, 1, 2, ranks=1, console=RecordingConsole()) == [3]


async def test_what_slurm_can_never_give_is_reported_in_its_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CODE", "1")
    monkeypatch.setenv("SAYS", "srun: error: no such nodes")
    with pytest.raises(ap.UsageError, match=r"Slurm has no nodes for 9, 2 on each of 5: srun: error: no such nodes"):
        await ap.slurm.launch(programs.add, 1, 2, ranks=9, per_node=2)


def test_a_blocking_run_has_no_more_nodes_than_its_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "78")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "here[01-02]")
    assert ap.slurm.run(programs.add, 1, 2, ranks=2, console=RecordingConsole()) == [3, 1003]
    with pytest.raises(ap.UsageError, match=r"expected at most 2, 1 on each of the 2 nodes of Slurm's job 78, got 3"):
        ap.slurm.run(programs.add, 1, 2, ranks=3)


async def test_without_slurm_the_call_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    with pytest.raises(ap.UsageError, match="srun: it is not in PATH"):
        await ap.slurm.launch(programs.add, 1, 2, ranks=1)
