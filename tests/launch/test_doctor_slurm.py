"""`asyncpar doctor --slurm`, with programs of ours in the place of Slurm's."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from asyncpar.launch.doctor.findings import Finding, Verdict
from asyncpar.launch.doctor.slurm_checks import examine_slurm
from tests.core.config.test_rank_place import BATCH_SCRIPT, SLURM

WELL = {
    "sbatch": "",
    "srun": "",
    "sinfo": "echo '2 idle'; echo '1 mix'",
    "munge": "echo MUNGE:",
    "scontrol": (
        'if [ "$1" = ping ]; then echo "Slurmctld(primary) at head is UP"; else '
        "echo 'AuthType = auth/munge'; echo 'KillWait = 30 sec'; fi"
    ),
}


def examine(
    folder: Path, *, mounted: str = "nfs4", environment: dict[str, str] | None = None, **changed: str
) -> dict[str, Finding]:
    programs = {**WELL, **changed}
    for name, body in programs.items():
        if body != "absent":
            (folder / name).write_text(f"#!/bin/sh\n{body}\n")
            (folder / name).chmod(0o755)
    (folder / "mounts").write_text(f"disk / ext4 rw 0 0\nserver:/home {folder} {mounted} rw 0 0\n")
    variables = {"PATH": f"{folder}{os.pathsep}/bin", "HOME": str(folder), **(environment or {})}
    return {finding.check: finding for finding in examine_slurm(variables, mounts=str(folder / "mounts"))}


def test_a_cluster_that_works_has_nothing_to_mend(tmp_path: Path) -> None:
    found = examine(tmp_path)
    assert {finding.verdict for finding in found.values()} == {Verdict.OK}
    assert found["slurm nodes"].found == "3 take jobs"
    assert set(found) == {
        *("slurm controller", "slurm authentication", "slurm KillWait", "slurm nodes", "slurm meetings"),
    }


@pytest.mark.parametrize(
    ("changed", "check", "verdict", "text"),
    [
        ({"sbatch": "absent"}, "slurm", Verdict.FAIL, "sbatch: not in PATH"),
        ({"munge": "absent"}, "slurm authentication", Verdict.FAIL, "munge is not in PATH"),
        ({"munge": "echo 'Socket communication error'; exit 1"}, "slurm authentication", Verdict.FAIL, "Socket"),
        ({"scontrol": "echo 'Slurmctld(primary) at head is DOWN'"}, "slurm controller", Verdict.FAIL, "DOWN"),
        ({"scontrol": "echo 'Unable to contact'; exit 1"}, "slurm controller", Verdict.FAIL, "Unable to contact"),
        ({"sinfo": "echo '3 down*'"}, "slurm nodes", Verdict.FAIL, "none takes jobs (3 down*)"),
        ({"sinfo": "echo '3 idle*'"}, "slurm nodes", Verdict.FAIL, "none takes jobs (3 idle*)"),
        ({"sinfo": "echo '2 idle'; echo '1 drain'"}, "slurm nodes", Verdict.WARN, "2 take jobs, 1 drain do not"),
        ({"mounted": "ext4"}, "slurm meetings", Verdict.WARN, "is on ext4, which other nodes may not see"),
    ],
)
def test_what_is_wrong_is_named(
    tmp_path: Path, changed: dict[str, str], check: str, verdict: Verdict, text: str
) -> None:
    finding = examine(tmp_path, **changed)[check]  # type: ignore[arg-type]
    assert finding.verdict is verdict
    assert text in finding.found
    assert finding.advice


def test_in_a_job_the_place_is_reported(tmp_path: Path) -> None:
    here = {**SLURM, "SLURM_JOB_NODELIST": "127.0.0.[1-3]"}
    found = examine(tmp_path, environment=here)
    assert found["slurm place"].found == "rank 4 of 5 on n03"
    assert found["slurm names"].found == "3 nodes are known by name"
    unknown = examine(tmp_path, environment={**here, "SLURM_JOB_NODELIST": "127.0.0.1,a..b"})
    assert "a..b: cannot be resolved here" in unknown["slurm names"].found
    wrong = examine(tmp_path, environment={**here, "SLURM_STEP_TASKS_PER_NODE": "1"})
    assert wrong["slurm place"].verdict is Verdict.FAIL
    batch = examine(tmp_path, environment={**BATCH_SCRIPT, "SLURM_JOB_NODELIST": "127.0.0.1"})
    assert "start the ranks with srun" in batch["slurm place"].found
